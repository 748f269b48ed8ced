"""Accelerator defaults of a checked configuration, and the error for experts without Transformer Engine.

`shapes.accelerator` has the table of defaults. This module applies the table to the hardware of the run: the
GPU that the configuration names, or this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.check.engine.arguments import has_cpu_build
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
    """Accelerator default that applies to roles of a checked configuration.

    Example: ``attention_backend: fused`` of the roles actor and reference, which the user has not set.
    """

    roles: tuple[str, ...]
    """Roles to which the default applies; empty for an environment variable, which applies to the job."""
    row: AcceleratorDefault
    """Row of the table of defaults: the field, its value, the condition and the reason."""


def target_gpu(config: RunConfig, for_this_machine: bool) -> str | None:
    """Return the name of the run's GPUs, or None for a run on hosts without GPUs.

    A configuration that sets ``gpu`` is for other machines, unless ``for_this_machine`` is true.
    """
    if config.gpu is not None and not for_this_machine:
        return config.gpu

    # Host builds of torch and vLLM use no GPU, and neither does a machine without NVIDIA's driver.
    if has_cpu_build() or not _DRIVER.is_dir():
        return None
    return config.gpu or "the GPU of this machine"


def accelerated_roles(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shapes: Mapping[str, ModelShape],
    for_this_machine: bool,
) -> dict[str, AcceleratedRole]:
    """Return the roles that have a Megatron model on the run's GPUs: name -> role; empty without GPUs.

    If the run will be on other machines, they are assumed to have Transformer Engine, which
    ``launch/setup.sh --gpu`` installs.
    """
    gpu = target_gpu(config, for_this_machine)
    if gpu is None:
        return {}

    # The layers that model.attention selects, by default Transformer Engine's if it is installed.
    is_other_machine = config.gpu is not None and not for_this_machine
    attention = config.model.attention
    if not attention:
        attention = "torch"
        if is_other_machine or has_transformer_engine():
            attention = "transformer_engine"

    roles: dict[str, AcceleratedRole] = {}
    for role, layout in layouts.items():
        shape = shapes.get(role, shapes.get("actor"))
        if role == "rollout" or shape is None:
            continue

        # Frozen roles have no section of a learner, and no gradients to reduce.
        learner = learner_sections(config).get(section_of(role))
        reduces_in_backward = learner is not None and learner.ddp.get("overlap_grad_reduce", True)
        roles[role] = AcceleratedRole(
            shape,
            layout,
            fused=attention == "transformer_engine" and not shape.needs_plain_layers,
            half_precision=config.model.dtype in ("bfloat16", "float16"),
            capability=capability_of(gpu),
            deterministic=config.deterministic,
            has_flash_attention=not is_other_machine and find_spec("flash_attn") is not None,
            distributed=learner is not None and learner.optimizer.distributed and reduces_in_backward,
            replays_routing=config.actor.routing_replay != "none",
            adapted=bool(adapters_of(config)),
        )
    return roles


def applied_defaults(config: RunConfig, roles: Mapping[str, AcceleratedRole]) -> tuple[AppliedDefault, ...]:
    """Return the accelerator defaults of the roles and their job, without keys that the user has set."""
    if not roles:
        return ()

    # A default that applies to several roles is returned once, with these roles.
    roles_by_default: dict[AcceleratorDefault, list[str]] = {}
    for role_name, role in roles.items():
        for default in _role_defaults(config, role_name, role):
            roles_by_default.setdefault(default, []).append(role_name)
    applied: list[AppliedDefault] = []
    for default, role_names in roles_by_default.items():
        applied.append(AppliedDefault(tuple(role_names), default))

    # Environment variables apply to the complete job, and depend on all of its roles.
    layouts = {role_name: role.layout for role_name, role in roles.items()}
    job = accelerated_job(config, layouts)
    for default in applicable_rows(job, ENVIRONMENT):
        applied.append(AppliedDefault((), default))
    return tuple(applied)


def _role_defaults(config: RunConfig, role_name: str, role: AcceleratedRole) -> Iterator[AcceleratorDefault]:
    """Yield the accelerator defaults of one role, without keys that the user has set."""
    # Section -> settings that the user has set. Only trained roles have a DDP section.
    _, megatron_values = megatron_settings(config, role.layout)
    explicit_settings: dict[str, Mapping[str, object]] = {MEGATRON: megatron_values}
    learner = learner_sections(config).get(section_of(role_name))
    if learner is not None:
        explicit_settings[DDP] = learner.ddp

    for default in applicable_rows(role):
        if default.section == DDP and learner is None:
            continue
        if default.key not in explicit_settings.get(default.section, {}):
            yield default


def plain_expert_errors(roles: Mapping[str, AcceleratedRole]) -> Iterator[UserError]:
    """Yield the error for roles that have experts but do not use Transformer Engine's layers.

    ``roles`` are the roles on accelerators. Megatron's local layer spec (without Transformer Engine) computes
    experts one after the other.
    """
    for role in roles.values():
        if role.shape.experts and not role.fused:
            # All roles have the same setting, model.attention: one error suffices.
            yield plain_experts_error(role.shape.name)
            return
