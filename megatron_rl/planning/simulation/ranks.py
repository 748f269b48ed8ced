"""Simulate ranks of a checked job in separate processes, and compare their bytes with the memory estimate.

All ranks of a pipeline stage have equal work, and few stages of a pipeline differ in memory. So a few
simulated ranks are enough for a job of any size.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.check.configuration import CheckReport
from megatron_rl.config.budget import RankMemory, SimulatedRank, Usage, layers_by_stage, rank_memory
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.memory import find_representative_stages
from megatron_rl.shapes.traffic import byte_text

SIMULATED_LAYERS = (
    "plain layers with PyTorch's fused attention, without an engine; the estimate assumes the same"
)
_PHASES = {"generate": "at rest", "score": "score", "learn": "learn"}
"""Phase of the estimate -> name in the table; during generation the models are idle ("at rest")."""
_PROCESSES = 2
"""Number of ranks to simulate at the same time: each process imports torch and Megatron-Core."""
_MIN_BYTES = 2**20
"""Bytes below which a relative difference is meaningless."""
_GIB = 2**30
_FOREIGN_LAYERS = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
"""Modules whose kernels need tensors with storage.

A simulated rank uses Megatron's layers without Transformer Engine instead."""


@dataclass(frozen=True)
class RankSimulation:
    """Simulation of one rank, and the estimate of its memory for the same layers.

    Example: ``RankSimulation(rank, estimate).relative_error("learn")`` is 0.02 for an estimate that is 2 %
    too high.
    """

    rank: SimulatedRank
    """Simulated memory, messages and micro-batches of the rank."""
    estimate: RankMemory
    """Estimate of the rank's memory by `check`."""

    def bytes(self, phase: str) -> int:
        """Return the simulated peak bytes in a phase; for ``generate`` the bytes of the idle models."""
        if phase == "generate":
            return self.rank.resting
        return self.rank.phases[phase].peak

    def relative_error(self, phase: str) -> float:
        """Return the relative error of the estimate, estimated / simulated - 1; 0 below 1 MiB."""
        simulated_bytes = self.bytes(phase)
        if simulated_bytes <= _MIN_BYTES:
            return 0.0

        ratio = self.estimate.phase_peak(phase) / simulated_bytes
        # Adding 0.0 removes the sign of a negative zero, which would be printed.
        return round(ratio - 1, 4) + 0.0


def simulate_ranks(report: CheckReport) -> list[RankSimulation]:
    """Simulate one rank of each representative pipeline stage of every role.

    Among pipeline stages with equal layers, only the stage with the most micro-batches in flight is
    simulated, since its memory is the largest. The last stage, which has the output layer, is also simulated.
    Raises UserError for a report without layouts, batch or model.
    """
    layouts = report.layouts
    batch = report.batch
    if layouts is None or batch is None or report.shape is None:
        reason = "no memory plan"
        if layouts is not None and batch is None:
            reason = "a job without steps of reinforcement learning"
        raise UserError(
            "this configuration has no training step to simulate",
            where="--simulate",
            expected="a training run without errors, with its model's config.json on this machine",
            got=reason,
            fix="correct the errors above, or omit --simulate",
        )

    # Pipeline stages differ in memory; data-parallel replicas of a stage do not.
    ranks = set()
    for role, layout in layouts.items():
        if role != ROLLOUT.name:
            shape = report.shapes.get(role, report.shape)
            pipeline_ranks = layout.groups("pipeline")[0]
            stages = layers_by_stage(report.config, layout, shape)
            ranks |= {pipeline_ranks[stage] for stage in find_representative_stages(shape, stages)}
    plans = [plan_simulation(report, rank) for rank in sorted(ranks)]

    # Start a new process for each rank: a process can simulate only once, and torch's threads must not be
    # forked.
    spawn_context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, spawn_context, max_tasks_per_child=1) as pool:
        models = dict(report.models)
        jobs = []
        for config, estimate in plans:
            job = pool.submit(
                _simulate_rank,
                config,
                models,
                batch,
                estimate.rank,
                report.world_size,
            )
            jobs.append((job, estimate))
        return [RankSimulation(job.result(), estimate) for job, estimate in jobs]


def plan_simulation(report: CheckReport, rank: int) -> tuple[RunConfig, RankMemory]:
    """Return the configuration for simulating a rank of a checked job, and the rank's memory estimate."""
    assert report.layouts is not None
    config = replace(report.config, model=replace(report.config.model, attention="torch"))
    layouts = dict(report.layouts)
    layouts.pop(ROLLOUT.name, None)

    # Unset the memory of a GPU: the estimate then excludes the runtime's overhead, which is not simulated.
    without_runtime = replace(config, gpu_memory_gib=None)
    estimate = rank_memory(without_runtime, layouts, report.shapes, report.batch, rank)
    return config, estimate


def _simulate_rank(*arguments: Any) -> SimulatedRank:
    """Simulate one rank in this process, which must do nothing else; see `simulate_step`."""
    # An entry None in sys.modules makes an import fail as if the package were not installed.
    modules: Any = sys.modules
    modules.update(dict.fromkeys(_FOREIGN_LAYERS))
    from megatron_rl.planning.simulation.step import simulate_step

    # Libraries warn that the packages above are missing.
    warnings.simplefilter("ignore")
    return simulate_step(*arguments)


def simulation_lines(simulations: list[RankSimulation]) -> list[str]:
    """Format simulated ranks as lines: a table of bytes, then each rank's kernels, reads and messages."""
    # The table compares simulated and estimated bytes.
    lines = [f"{'rank':>6}  {'phase':<8}{'simulated':>12}{'estimate':>12}{'difference':>12}"]
    for simulation in simulations:
        for phase, name in _PHASES.items():
            simulated_size = f"{simulation.bytes(phase) / _GIB:.2f} GiB"
            estimated_size = f"{simulation.estimate.phase_peak(phase) / _GIB:.2f} GiB"
            lines.append(
                f"{simulation.rank.rank:>6}  {name:<8}{simulated_size:>12}{estimated_size:>12}"
                f"{simulation.relative_error(phase):>+12.1%}"
            )

    # Groups, messages and kernels of each rank.
    for simulation in simulations:
        rank = simulation.rank
        groups = ", ".join(f"{num_ranks:,} ({group_name})" for group_name, num_ranks in rank.groups)
        lines.append(
            f"rank {rank.rank}: at most {rank.connections:,} connections of the host's backend, in "
            f"{len(rank.groups)} groups of {groups}"
        )
        if rank.sync is not None:
            lines.append(
                f"  weight sync: {rank.sync.peers} peers, {rank.sync.sent:,} messages sent, "
                f"{rank.sync.received:,} received"
            )
        lines += [f"  {phase}: {_usage_text(rank.phases[phase])}" for phase in ("score", "learn", "step")]
    return lines


def _usage_text(usage: Usage) -> str:
    """Format the peak memory, kernels, host syncs and messages of one phase as text.

    A host sync is a wait of the CPU for the device. The text counts three causes of host syncs: reads of
    device values, copies from unpinned CPU memory to the device, and operators whose output size depends on
    device values, such as indexing with a boolean mask.
    """
    # Bytes and calls by kind of process group, such as tensor-parallel.
    terms = []
    for group_name, count in usage.calls.items():
        terms.append(f"{group_name} {byte_text(usage.bytes[group_name])} in {count:,} calls")
    traffic = ", ".join(terms)
    return (
        f"peak {usage.peak / _GIB:.2f} GiB, {usage.kernels:,} kernels, "
        f"{usage.microbatches:,} micro-batches, {usage.waits:,} host syncs ({usage.reads:,} device reads, "
        f"{usage.copies:,} pageable copies to the device, {usage.selections:,} operators with a "
        f"data-dependent output size); {traffic or 'nothing sent'}"
    )


def simulation_json(simulations: list[RankSimulation]) -> list[Mapping[str, Any]]:
    """Convert simulated ranks to plain values for JSON; sizes are in bytes."""
    return [
        {
            **asdict(simulation.rank),
            "connections": simulation.rank.connections,
            "estimate": {phase: simulation.estimate.phase_peak(phase) for phase in _PHASES},
            "simulated": {phase: simulation.bytes(phase) for phase in _PHASES},
        }
        for simulation in simulations
    ]
