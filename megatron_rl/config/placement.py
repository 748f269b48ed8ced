"""Placement: the ranks and the layout of each role, and the weights that rollout and actor share.

A preset assigns ranks only to layouts without explicit ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_rl.config.adapters import separate_lora
from megatron_rl.config.roles import ROLES, ROLLOUT, role_of, role_sections, spec_at, with_role_sections
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.models import LayoutConfig
from megatron_rl.shapes.accelerator import AcceleratedJob
from megatron_rl.shapes.layout import STAGE_SETTINGS, ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape
from megatron_rl.shapes.traffic import SharedBytes, best_rank_order, byte_text, shared_bytes

# Placement presets that split the ranks into halves. Roles whose `RoleSpec.placement` is the preset use the
# second half.
HALF_PRESETS = tuple(dict.fromkeys(spec.placement for spec in ROLES if spec.placement is not None))


def with_ranks(config: RunConfig, world_size: int) -> RunConfig:
    """Fill in the ranks of every role without explicit ranks, according to the preset ``placement``.

    Some presets split the job's ranks into two halves. `RoleSpec.placement` of a role is the preset that
    assigns the second half to the role. A critic, reference or reward model without a layout has the actor's
    parallel sizes.
    """
    uses_halves = config.placement in HALF_PRESETS and world_size >= 2
    half_size = world_size // 2
    actor_layout = config.actor.layout

    def ranks_of(path: str) -> tuple[int, ...]:
        """Return the ranks that the preset ``config.placement`` assigns to the role at ``path``."""
        if not uses_halves:
            return tuple(range(world_size))
        is_on_second_half = spec_at(path).placement == config.placement
        if is_on_second_half:
            return tuple(range(half_size, world_size))
        return tuple(range(half_size))

    def fill_ranks(path: str, section: Any) -> Any:
        """Return a copy of a role's section in which the layout has ranks; ``path`` is the section's path."""
        layout = section.layout
        if layout is None:
            # If the preset assigns the same ranks to the role and to the actor, the role gets the actor's
            # complete layout, so that it can share the actor's base weights. The user may have set other
            # ranks for the actor: the role then gets the user's ranks, too.
            layout = actor_layout
            if ranks_of(path) != ranks_of("actor"):
                layout = replace(actor_layout, ranks=None)
        if layout.ranks is None:
            layout = replace(layout, ranks=ranks_of(path))
        return replace(section, layout=layout)

    rollout = config.rollout
    if rollout.ranks is None:
        rollout = replace(rollout, ranks=ranks_of("rollout"))
    return replace(with_role_sections(config, fill_ranks), rollout=rollout)


def layout_sections(config: RunConfig) -> dict[str, LayoutConfig | None]:
    """Map the path of each role's layout, such as ``critic.layout``, to the section; None if it is unset."""
    return {f"{path}.layout": section.layout for path, section in role_sections(config).items()}


def megatron_sections(config: RunConfig) -> dict[str, Mapping[str, Any] | None]:
    """Map the path of each role's Megatron settings, such as ``critic.megatron``, to the settings.

    The settings are None if the section does not set them.
    """
    return {f"{path}.megatron": section.megatron for path, section in role_sections(config).items()}


def explicit_megatron_settings(config: RunConfig, section: str) -> tuple[str, Mapping[str, Any]]:
    """Return the path and the values of the Megatron settings of a role's section, such as ``critic``.

    A section without Megatron settings inherits the actor's.
    """
    path = f"{section}.megatron"
    settings = megatron_sections(config).get(path)
    if settings is None:
        return "actor.megatron", config.actor.megatron
    return path, settings


def megatron_settings(config: RunConfig, layout: ParallelLayout) -> tuple[str, Mapping[str, Any]]:
    """Return the path and the values of the Megatron settings for the role with this ``layout``.

    A role that inherits the actor's settings does not inherit uneven pipeline stages if its number of
    pipeline stages differs from the actor's.
    """
    section = layout.path.rpartition(".")[0]
    path, settings = explicit_megatron_settings(config, section)
    if path == f"{section}.megatron":
        return path, settings

    actor = config.actor.layout
    if (layout.pipeline, layout.virtual_pipeline) != (actor.pipeline, actor.virtual_pipeline):
        settings = {name: value for name, value in settings.items() if name not in STAGE_SETTINGS}
    return path, settings


def role_layout(section: LayoutConfig, path: str) -> ParallelLayout:
    """Convert the layout section at ``path`` to a `ParallelLayout`; its ranks must be set.

    Sizes that do not fit together are not an error here: ``check`` reports them.
    """
    assert section.ranks is not None

    sequence_parallel = section.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = section.tensor > 1

    return ParallelLayout(
        ranks=section.ranks,
        tensor=section.tensor,
        pipeline=section.pipeline,
        virtual_pipeline=section.virtual_pipeline,
        context=section.context,
        expert=section.expert,
        expert_tensor=1 if section.expert_tensor is None else section.expert_tensor,
        sequence_parallel=sequence_parallel,
        path=path,
    )


def role_layouts(config: RunConfig, world_size: int) -> dict[str, ParallelLayout]:
    """Map the name of each role of the job to its layout.

    Sizes that do not fit together are not an error here: ``check`` reports them.
    """
    config = with_ranks(config, world_size)
    layouts = {}
    for path, section in layout_sections(config).items():
        assert section is not None
        layouts[role_of(path)] = role_layout(section, path)

    # A job that trains a reward model has no actor. The layouts above used the actor's sizes as defaults.
    if config.job == "reward-model":
        del layouts["actor"]
    if config.job == TRAIN:
        rollout = config.rollout
        assert rollout.ranks is not None
        layouts["rollout"] = ParallelLayout(rollout.ranks, tensor=rollout.tensor, path="rollout")
    return layouts


def accelerated_job(config: RunConfig, layouts: Mapping[str, ParallelLayout]) -> AcceleratedJob:
    """Return the properties of a job that decide its environment variables on accelerators."""
    rollout = config.rollout
    vllm_arguments = rollout.vllm
    # vLLM's custom all-reduce (0.32) shares the buffers of CUDA graphs by IPC handles. Memory in expandable
    # segments has no such handles, and the engine would exit while it captures the graphs.
    captures_all_reduce = (
        config.job == TRAIN
        and rollout.capabilities.in_process
        and rollout.tensor > 1
        and not vllm_arguments.get("disable_custom_all_reduce")
        and not vllm_arguments.get("enforce_eager")
    )
    model_layouts = {role: layout for role, layout in layouts.items() if role != "rollout"}
    return AcceleratedJob(model_layouts, captures_all_reduce)


def sleeping_ranks(layouts: Mapping[str, ParallelLayout]) -> frozenset[int]:
    """Return the rollout ranks whose engine sleeps while other roles work.

    All ranks of a replica sleep if another role uses any of them.
    """
    model_ranks: set[int] = set()
    for role, layout in layouts.items():
        if role != "rollout":
            model_ranks.update(layout.ranks)

    sleeping: set[int] = set()
    for replica in layouts["rollout"].groups("tensor"):
        if model_ranks.intersection(replica):
            sleeping.update(replica)
    return frozenset(sleeping)


class GroupCounts(NamedTuple):
    """Numbers of process groups with several ranks. Each such group has a communicator with buffers."""

    total: int
    """Groups in the job."""
    per_rank: int
    """Largest number of groups that one rank belongs to."""


def process_group_counts(layouts: Mapping[str, ParallelLayout], world_size: int) -> GroupCounts:
    """Count the process groups of a training job; groups with identical ranks are counted once.

    On accelerators, an engine that uses all ranks of the job creates more groups, which are not counted.
    """
    groups = {tuple(range(world_size))}
    for role, layout in layouts.items():
        if role == ROLLOUT.name:
            groups |= {layout.ranks, *layout.groups("tensor")}
        else:
            for named_groups in layout.process_groups().values():
                groups.update(named_groups)

    # A group of one rank has no communicator.
    groups = {ranks for ranks in groups if len(ranks) > 1}
    groups_of_rank: Counter[int] = Counter()
    for ranks in groups:
        groups_of_rank.update(ranks)
    return GroupCounts(len(groups), max(groups_of_rank.values(), default=0))


def shared_weights(config: RunConfig, shape: ModelShape) -> SharedBytes:
    """Return the bytes of weights that each pair of an actor rank and a rollout rank has in common.

    ``config`` must have the ranks of every role, as `with_ranks` sets them.
    """
    lora = separate_lora(config)
    return shared_bytes(
        shape,
        role_layout(config.actor.layout, "actor.layout"),
        config.rollout.tensor,
        DTYPE_BYTES[config.model.dtype],
        settings=config.actor.megatron,
        whole_experts=bool(config.rollout.vllm.get("enable_expert_parallel")),
        lora=None if lora is None else Lora.for_model(shape, lora.rank, lora.targets),
    )


def with_best_rank_order(config: RunConfig, shape: ModelShape) -> tuple[RunConfig, str]:
    """Order the rollout ranks so that the busiest rank receives the fewest bytes per weight sync.

    Consecutive ranks form a replica of the engine. A rollout rank that is also an actor rank already has some
    of the replica's weights, and receives only the rest. The order decides how many bytes it receives.

    Returns the configuration with the order, and the reason for the order as text.
    """
    ranks = config.rollout.ranks
    assert ranks is not None
    common_bytes = shared_weights(config, shape)
    # Ranks of one node exchange weights faster than ranks of different nodes.
    best_order = best_rank_order(common_bytes, ranks, config.gpus_per_node)

    best_bytes = common_bytes.traffic(best_order).received_most
    ascending_bytes = common_bytes.traffic(ranks).received_most
    reason = (
        "the order in which the busiest rank receives the fewest bytes per weight sync: "
        f"{byte_text(best_bytes)}"
    )
    if best_bytes < ascending_bytes:
        reason += f" instead of {byte_text(ascending_bytes)} in ascending order"
    return replace(config, rollout=replace(config.rollout, ranks=best_order)), reason
