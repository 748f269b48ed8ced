"""Simulate ranks of a checked job in processes of their own, and show their bytes beside the estimate."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.check.configuration import CheckReport
from megatron_rl.config.budget import RankMemory, SimulatedRank, rank_memory
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError
from megatron_rl.shapes.memory import representative_stages
from megatron_rl.shapes.traffic import byte_words

_PHASES = {"generate": "at rest", "score": "score", "learn": "learn"}
_PROCESSES = 2
SIMULATED_LAYERS = (
    "models of plain layers with PyTorch's fused attention, no engine; the estimate is of the same"
)


@dataclass(frozen=True)
class Simulated:
    """Hold one simulated rank beside what its models hold by the estimate, of the layers simulated."""

    rank: SimulatedRank
    estimate: RankMemory

    def bytes(self, phase: str) -> int:
        """Return the bytes of a phase of the estimate; while the engine generates, the models rest."""
        return self.rank.resting if phase == "generate" else self.rank.phases[phase].peak

    def difference(self, phase: str) -> float:
        """Return by how much the estimate is above the simulation, as a share of this; 0 of a few bytes."""
        held = self.bytes(phase)
        return round(self.estimate.total(phase) / held - 1, 4) + 0.0 if held > 2**20 else 0.0


def simulation(report: CheckReport) -> list[Simulated]:
    """Simulate the ranks of a job of which one is the fullest: of the telling stages of every role."""
    layouts, batch = report.layouts, report.batch
    if layouts is None or batch is None or report.shape is None:
        raise UserError(
            "there is nothing to simulate",
            where="--simulate",
            expected="a training run without errors, with its model's config.json on this machine",
            got="a job of one stage" if layouts is not None and batch is None else "no memory plan",
            fix="correct the errors above, or leave --simulate away",
        )
    ranks = set()
    for role, layout in layouts.items():
        if role != "rollout":
            stages = layout.groups("pipeline")[0]
            ranks |= {stages[stage] for stage in representative_stages(layout.pipeline)}
    plans = [planned(report, rank) for rank in sorted(ranks)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, spawn, max_tasks_per_child=1) as pool:
        jobs = [
            pool.submit(_simulate, config, dict(report.models), batch, estimate.rank, report.world_size)
            for config, estimate in plans
        ]
        return [Simulated(job.result(), estimate) for job, (_, estimate) in zip(jobs, plans, strict=True)]


def planned(report: CheckReport, rank: int) -> tuple[RunConfig, RankMemory]:
    """Return the configuration to simulate, and the estimate of what its models hold on a rank."""
    assert report.layouts is not None
    config = replace(report.config, model=replace(report.config.model, attention="torch"))
    models = {role: layout for role, layout in report.layouts.items() if role != "rollout"}
    estimate = rank_memory(replace(config, gpu_memory_gib=None), models, report.shapes, report.batch, rank)
    return config, estimate


def _simulate(*arguments: Any) -> SimulatedRank:
    # Kernels of these take tensors that hold something; what is simulated are Megatron's own layers.
    modules: Any = sys.modules
    modules.update(dict.fromkeys(("transformer_engine", "transformer_engine_torch", "apex", "amp_C")))
    from megatron_rl.planning.simulation.step import simulate

    warnings.simplefilter("ignore")  # of libraries about each other
    return simulate(*arguments)


def simulation_lines(simulated: list[Simulated]) -> list[str]:
    """Return the table of bytes, then what each rank launches, waits for and sends."""
    lines = [f"{'rank':>6}  {'phase':<8}{'simulated':>12}{'estimate':>12}{'difference':>12}"]
    for each in simulated:
        for phase, words in _PHASES.items():
            cells = [f"{size / 2**30:.2f} GiB" for size in (each.bytes(phase), each.estimate.total(phase))]
            lines.append(
                f"{each.rank.rank:>6}  {words:<8}{cells[0]:>12}{cells[1]:>12}{each.difference(phase):>+12.1%}"
            )
    for each in simulated:
        rank = each.rank
        lines.append(
            f"rank {rank.rank}: at most {rank.connections:,} connections of the host's backend, in "
            f"{len(rank.groups)} groups of "
            + ", ".join(f"{members:,} ({kind})" for kind, members in rank.groups)
        )
        for phase in ("score", "learn", "step"):
            usage = rank.phases[phase]
            sent = ", ".join(
                f"{kind} {byte_words(usage.bytes[kind])} in {count:,} calls"
                for kind, count in usage.calls.items()
            )
            lines.append(
                f"  {phase}: peak {usage.peak / 2**30:.2f} GiB, {usage.kernels:,} kernels, "
                f"{usage.reads:,} reads of the device; {sent or 'nothing sent'}"
            )
    return lines


def simulation_json(simulated: list[Simulated]) -> list[Mapping[str, Any]]:
    """Return the simulated ranks as plain values; sizes are in bytes."""
    return [
        {
            **asdict(each.rank),
            "connections": each.rank.connections,
            "estimate": {phase: each.estimate.total(phase) for phase in _PHASES},
            "simulated": {phase: each.bytes(phase) for phase in _PHASES},
        }
        for each in simulated
    ]
