"""Which ranks each role has: what a placement preset gives to the layouts that name none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.adapters import lora_apart
from megatron_rl.config.roles import ROLES, role_of, role_sections, spec_at, with_role_sections
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.models import LayoutConfig
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape
from megatron_rl.shapes.pipeline_stages import STAGE_SETTINGS
from megatron_rl.shapes.rank_order import best_rank_order
from megatron_rl.shapes.traffic import SharedBytes, byte_words, shared_bytes

APART = tuple(dict.fromkeys(spec.placement for spec in ROLES if spec.placement is not None))
"""Presets that give the second half of the ranks to the roles whose `RoleSpec.placement` is the preset."""


def placed(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with the ranks of every role named, as its placement says.

    A critic, reference or reward model without a layout gets the actor's sizes. Ranks that are named stay.
    """

    def ranks(path: str) -> tuple[int, ...]:
        if config.placement not in APART or world_size < 2:
            return tuple(range(world_size))

        half = world_size // 2
        if spec_at(path).placement == config.placement:
            return tuple(range(half, world_size))
        return tuple(range(half))

    def place(path: str, section: Any) -> Any:
        layout = section.layout
        if layout is None:
            layout = config.actor.layout if ranks(path) == ranks("actor") else sizes
        return replace(
            section, layout=layout if layout.ranks is not None else replace(layout, ranks=ranks(path))
        )

    sizes, rollout = replace(config.actor.layout, ranks=None), config.rollout
    if rollout.ranks is None:
        rollout = replace(rollout, ranks=ranks("rollout"))
    return replace(with_role_sections(config, place), rollout=rollout)


def layout_sections(config: RunConfig) -> dict[str, LayoutConfig | None]:
    """Return every role's layout section by its configuration path, None where it has none."""
    return {f"{path}.layout": section.layout for path, section in role_sections(config).items()}


def megatron_sections(config: RunConfig) -> dict[str, Mapping[str, Any] | None]:
    """Return what every role states of Megatron's settings by its configuration path, None where nothing."""
    return {f"{path}.megatron": section.megatron for path, section in role_sections(config).items()}


def stated_settings(config: RunConfig, section: str) -> tuple[str, Mapping[str, Any]]:
    """Return Megatron's settings for a role's section, its own or else the actor's, and where they stand."""
    path = f"{section}.megatron"
    stated = megatron_sections(config).get(path)
    return ("actor.megatron", config.actor.megatron) if stated is None else (path, stated)


def megatron_settings(config: RunConfig, layout: ParallelLayout) -> tuple[str, Mapping[str, Any]]:
    """Return Megatron's settings for the model of a role's ``layout``, and the path at which they stand.

    Of the actor's, uneven stages are for the actor's pipeline alone.
    """
    section, actor = layout.path.rpartition(".")[0], config.actor.layout
    path, settings = stated_settings(config, section)
    cut_alike = (layout.pipeline, layout.virtual_pipeline) == (actor.pipeline, actor.virtual_pipeline)
    if path != f"{section}.megatron" and not cut_alike:
        settings = {name: value for name, value in settings.items() if name not in STAGE_SETTINGS}
    return path, settings


def role_layout(section: LayoutConfig, path: str) -> ParallelLayout:
    """Return the layout of a section whose ranks are named, its other defaults filled in.

    ``path`` is the section's configuration path. What does not fit together is returned as it stands.
    """
    assert section.ranks is not None
    stated = section.sequence_parallel
    return ParallelLayout(
        ranks=section.ranks,
        tensor=section.tensor,
        pipeline=section.pipeline,
        virtual_pipeline=section.virtual_pipeline,
        context=section.context,
        expert=section.expert,
        expert_tensor=1 if section.expert_tensor is None else section.expert_tensor,
        sequence_parallel=section.tensor > 1 if stated is None else stated,
        path=path,
    )


def role_layouts(config: RunConfig, world_size: int) -> dict[str, ParallelLayout]:
    """Return the layout of every role; what does not fit together is returned as it stands."""
    config = placed(config, world_size)
    layouts = {}
    for path, section in layout_sections(config).items():
        assert section is not None
        layouts[role_of(path)] = role_layout(section, path)
    if config.job == "reward-model":
        del layouts["actor"]  # its sizes are those of models without a layout of their own
    if config.job == TRAIN:
        section = config.rollout
        assert section.ranks is not None
        layouts["rollout"] = ParallelLayout(section.ranks, tensor=section.tensor, path="rollout")
    return layouts


def sleeping_ranks(layouts: Mapping[str, ParallelLayout]) -> frozenset[int]:
    """Return the rollout ranks whose engine sleeps while others work: replicas that another role shares."""
    used = {rank for role, layout in layouts.items() if role != "rollout" for rank in layout.ranks}
    replicas = layouts["rollout"].groups("tensor")
    return frozenset(rank for replica in replicas if used.intersection(replica) for rank in replica)


def shared_weights(config: RunConfig, shape: ModelShape) -> SharedBytes:
    """Return what actor and rollout engine have in common of the actor's weights, once ranks are named."""
    rollout, lora = config.rollout, lora_apart(config)
    return shared_bytes(
        shape,
        role_layout(config.actor.layout, "actor.layout"),
        rollout.tensor,
        DTYPE_BYTES[config.model.dtype],
        settings=config.actor.megatron,
        whole_experts=bool(rollout.vllm.get("enable_expert_parallel")),
        lora=None if lora is None else Lora.of(shape, lora.rank, lora.targets),
    )


def with_best_rank_order(config: RunConfig, shape: ModelShape) -> tuple[RunConfig, str]:
    """Return the configuration with the rollout's ranks in the order that moves the least, and the reason.

    The order decides which ranks form a replica, and so how much of its weights a rank holds as an actor.
    """
    ranks = config.rollout.ranks
    assert ranks is not None
    shared = shared_weights(config, shape)
    order = best_rank_order(shared, ranks, config.gpus_per_node)
    best, plain = (shared.traffic(each).received_most for each in (order, ranks))
    reason = f"the order in which the busiest rank receives least per weight sync: {byte_words(best)}"
    if best < plain:
        reason += f", not {byte_words(plain)}"
    return replace(config, rollout=replace(config.rollout, ranks=order)), reason
