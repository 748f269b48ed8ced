"""Rules on the memory of a GPU: what it has, and whether the estimate of a rank fits in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.config.budget import PHASES, RankMemory
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.hardware import load_constants

TRUST = 0.2
"""Share of a GPU's memory by which an estimate may be too high: beyond it a run cannot fit.

Estimates count what a rank is known to hold and leave kernels' workspaces and fragmentation to a constant.
"""


def with_gpu_memory(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Return the configuration with the memory of the GPU that it names, and the reason by its key."""
    if config.gpu is None or config.gpu_memory_gib is not None:
        return config, {}
    try:
        gpu = load_constants().gpu(config.gpu)
    except UserError:
        return config, {}  # a warning of the name's own
    gib = round(gpu.memory / 2**30, 1)
    return replace(config, gpu_memory_gib=gib), {"gpu_memory_gib": f"a GPU of gpu={config.gpu}"}


def check_memory(
    config: RunConfig, ranks: Sequence[RankMemory], where: str
) -> tuple[list[UserError], list[UserError]]:
    """Return errors and warnings of the phases in which a rank is estimated not to fit in a GPU.

    Beyond the limit by more than `TRUST` it is an error, and less is a warning. ``where`` is the key that
    says how much a GPU has.
    """
    errors: list[UserError] = []
    warnings: list[UserError] = []
    limit = config.gpu_memory_gib
    if limit is None or not ranks:
        return errors, warnings

    for phase in PHASES:
        worst = max(ranks, key=lambda memory: memory.total(phase))
        total = worst.total(phase) / 2**30
        if total <= limit:
            continue
        items = sorted((item for item in worst.items if phase in item.phases), key=lambda item: -item.bytes)
        largest = ", ".join(f"{item.name} {item.bytes / 2**30:.1f}" for item in items[:3])
        error = UserError(
            f"rank {worst.rank} is estimated to need more memory than a GPU has in the phase {phase}",
            where=where,
            expected=f"at most {limit:g} GiB; up to {limit * (1 + TRUST):.1f} may fit, since the estimate is "
            f"trusted within {TRUST:.0%}",
            got=f"{total:.1f} GiB of {limit:g} GiB; largest: {largest}",
            fix=_fix(config),
        )
        (errors if total > limit * (1 + TRUST) else warnings).append(error)
    return errors, warnings


def _fix(config: RunConfig) -> str:
    """Return the settings that lower the memory of a rank, without those that the run has already."""
    steps = ["raise tensor or pipeline", "use more GPUs"]
    if config.job == TRAIN:
        if config.actor.recompute != "full":
            steps.append("set actor.recompute=full")
        if not config.actor.offload:
            steps.append("set actor.offload=true")
        if not config.actor.optimizer.offload:
            steps.append("set actor.optimizer.offload=true")
    steps.append("lower batch.tokens_per_microbatch")
    return ", ".join(steps[:-1]) + f", or {steps[-1]}"
