"""Defaults of an accelerator for a checked configuration, and the error of experts in plain layers.

`shapes.accelerator` has the table. Here it is applied to the hardware that a check judges: the GPU that the
configuration names, or this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.check.engine.arguments import has_host_build
from megatron_rl.config.adapters import adapters_of
from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.config.placement import accelerated_job, megatron_settings
from megatron_rl.config.roles import learner_sections, section_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.accelerator import (
    DDP,
    ENVIRONMENT,
    MEGATRON,
    AcceleratedRole,
    AcceleratorDefault,
    applicable_rows,
    capability_of,
)
from megatron_rl.shapes.layout import ParallelLayout, plain_experts_error
from megatron_rl.shapes.model import ModelShape

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder of NVIDIA's driver with an entry for each GPU."""


@dataclass(frozen=True)
class AppliedDefault:
    """Default of an accelerator in a checked configuration.

    Example: ``AppliedDefault(("actor", "reference"), row)``.
    """

    roles: tuple[str, ...]
    """Roles that have it; none for an environment variable, which the whole job has."""
    row: AcceleratorDefault
    """Its row in the table of defaults."""


def judged_gpu(config: RunConfig, for_this_machine: bool) -> str | None:
    """Return the name of the GPUs that a check judges, None if the run will be on hosts.

    A configuration that names a ``gpu`` is for other machines, unless it is checked ``for_this_machine``.
    """
    if config.gpu is not None and not for_this_machine:
        return config.gpu
    if has_host_build() or not _DRIVER.is_dir():
        return None
    return config.gpu or "the GPU of this machine"


def accelerated_roles(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shapes: Mapping[str, ModelShape],
    for_this_machine: bool,
) -> dict[str, AcceleratedRole]:
    """Return the roles with a Megatron model on the judged GPUs; none if the run will be on hosts.

    Another machine is taken to have Transformer Engine, which ``launch/setup.sh --gpu`` installs.
    """
    gpu = judged_gpu(config, for_this_machine)
    if gpu is None:
        return {}

    elsewhere = config.gpu is not None and not for_this_machine
    has_engine = elsewhere or has_transformer_engine()
    attention = config.model.attention or ("transformer_engine" if has_engine else "torch")
    roles: dict[str, AcceleratedRole] = {}
    for role, layout in layouts.items():
        shape = shapes.get(role, shapes.get("actor"))
        if role == "rollout" or shape is None:
            continue
        learner = learner_sections(config).get(section_of(role))
        reduces = learner is not None and learner.ddp.get("overlap_grad_reduce", True)
        roles[role] = AcceleratedRole(
            shape,
            layout,
            fused=attention == "transformer_engine" and not shape.plain_layers,
            half_precision=config.model.dtype in ("bfloat16", "float16"),
            capability=capability_of(gpu),
            deterministic=config.deterministic,
            has_flash_attention=not elsewhere and find_spec("flash_attn") is not None,
            distributed=learner is not None and learner.optimizer.distributed and reduces,
            replays_routing=config.actor.routing_replay != "none",
            adapted=bool(adapters_of(config)),
        )
    return roles


def applied_defaults(config: RunConfig, roles: Mapping[str, AcceleratedRole]) -> tuple[AppliedDefault, ...]:
    """Return the defaults that `accelerated_roles` and their job get, without keys that the user has set."""
    if not roles:
        return ()

    roles_by_row: dict[AcceleratorDefault, list[str]] = {}
    for name, role in roles.items():
        _, settings = megatron_settings(config, role.layout)
        learner = learner_sections(config).get(section_of(name))
        explicit = {MEGATRON: settings, DDP: {} if learner is None else learner.ddp}
        for row in applicable_rows(role):
            is_set = row.key in explicit.get(row.section, {})
            if not is_set and (row.section != DDP or learner is not None):
                roles_by_row.setdefault(row, []).append(name)

    applied = [AppliedDefault(tuple(names), row) for row, names in roles_by_row.items()]
    job = accelerated_job(config, {name: role.layout for name, role in roles.items()})
    applied += [AppliedDefault((), row) for row in applicable_rows(job, ENVIRONMENT)]
    return tuple(applied)


def plain_experts(roles: Mapping[str, AcceleratedRole]) -> Iterator[UserError]:
    """Yield the error of a mixture of experts whose layers on an accelerator are not Transformer Engine's."""
    for role in roles.values():
        if role.shape.experts and not role.fused:
            yield plain_experts_error(role.shape.name)
            return
