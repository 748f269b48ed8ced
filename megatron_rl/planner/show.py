"""Print planned runs as text, as plain JSON values and as configuration files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from megatron_rl.config.budget import PHASES
from megatron_rl.planner.constants import GB
from megatron_rl.planner.groups import Problem
from megatron_rl.planner.step import TRAINED
from megatron_rl.planner.writer import PlannedRun
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.traffic import byte_words

GIB = 2**30


def layout_words(layout: ParallelLayout) -> str:
    """Return a layout in short, leaving out what is 1."""
    names = (
        ("TP", layout.tensor),
        ("PP", layout.pipeline),
        ("VPP", layout.virtual_pipeline),
        ("CP", layout.context),
        ("EP", layout.expert),
        ("DP", layout.data),
    )
    return " ".join(f"{name}{size}" for name, size in names if size > 1 or name in ("TP", "DP"))


def most_held(run: PlannedRun, phase: str) -> int:
    """Return the bytes on the rank that holds most in a phase; it need not be the same in every phase."""
    return max(memory.total(phase) for memory in run.memory)


def plan_record(run: PlannedRun) -> dict[str, Any]:
    """Return a planned run as plain JSON values: seconds, and 1e9 bytes on the fullest rank of each phase."""
    plan, seconds = run.plan, run.prediction.seconds
    roles = {}
    for group in plan.groups:
        for role, entry in group.plans.items():
            choice = entry.choice
            roles[role] = {
                "gpus": group.gpus,
                "tensor": choice.layout.tensor,
                "pipeline": choice.layout.pipeline,
                "virtual_pipeline": choice.layout.virtual_pipeline,
                "context": choice.layout.context,
                "expert": choice.layout.expert,
                "data": choice.layout.data,
                "recompute": choice.recompute,
                "micro_batch": choice.micro_batch,
                "optimizer_offload": choice.optimizer.offload,
            }
    rollout = plan.rollout.layout
    return {
        "placement": plan.name,
        "gpus": plan.gpus,
        "seconds": {
            "total": run.prediction.total,
            "generate": seconds["generate"],
            "log_probs": seconds["reward"] + seconds["score"],
            "train": seconds["learn"],
            "weight_sync": seconds["reshard"],
        },
        "tokens_per_second_per_gpu": run.prediction.tokens / run.prediction.total / plan.gpus,
        "gigabytes": {phase: most_held(run, phase) / GB for phase in PHASES},
        "gigabytes_received_per_sync": run.traffic.received_most / GB,
        "roles": roles,
        "rollout": {
            "gpus": rollout.replicas * rollout.gpus,
            "tensor": rollout.tensor,
            "replicas": rollout.replicas,
            "memory_fraction": rollout.memory_fraction,
        },
        "training_state_offloaded": any(group.offloaded for group in plan.groups),
        "one_step_off_policy": plan.step.ahead,
    }


def _seconds_words(run: PlannedRun) -> str:
    seconds = plan_record(run)["seconds"]
    return (
        f"generate {seconds['generate']:.1f}   log-probs {seconds['log_probs']:.1f}   "
        f"train {seconds['train']:.1f}   weight sync {seconds['weight_sync']:.2f}"
    )


def _memory_words(run: PlannedRun) -> str:
    """Return what the fullest rank of each phase holds, in GiB as `check` prints it."""
    held = "   ".join(f"{phase} {most_held(run, phase) / GIB:,.1f}" for phase in PHASES)
    return f"{held}   (of {run.config.gpu_memory_gib:g})"


def _plan_lines(problem: Problem, number: int, run: PlannedRun) -> list[str]:
    plan, total = run.plan, run.prediction.total
    rate = run.prediction.tokens / total / plan.gpus
    lines = [
        f"{number}. {plan.name}: {total:.1f} s a step, {rate:.0f} tokens/s/GPU on {plan.gpus} GPUs",
        f"     seconds     {_seconds_words(run)}",
        f"     GiB per GPU {_memory_words(run)}",
        f"     weight sync {byte_words(run.traffic.received_most)} received by the busiest rank",
    ]
    for group in plan.groups:
        for role, entry in group.plans.items():
            words = layout_words(entry.choice.layout)
            extra = f", recompute {entry.choice.recompute}" if role in TRAINED else ""
            extra += ", optimizer on the host" if entry.choice.optimizer.offload else ""
            rows = f", micro-batch {entry.choice.micro_batch} x {problem.batch.longest:.0f} tokens"
            lines.append(
                f"     {role:10} {group.gpus:5} GPUs  {words}{extra}{rows if role in TRAINED else ''}"
            )
    rollout, count = plan.rollout.layout, plan.rollout.layout.replicas * plan.rollout.layout.gpus
    offloaded = any(group.offloaded for group in plan.groups)
    state = ", training state waits on the host" if offloaded else ""
    lines.append(
        f"     {'rollout':10} {count:5} GPUs  TP{rollout.tensor} x {rollout.replicas} "
        f"replicas, memory fraction {rollout.memory_fraction:.2f}{state}"
    )
    return lines


def plans_text(problem: Problem, runs: Sequence[PlannedRun], layouts: int, evaluated: int) -> str:
    """Return the best plans as text."""
    model, batch = problem.models["actor"], problem.batch
    lines = [
        f"{model.name}: {model.parameters / GB:.2f} B parameters, "
        f"{model.active_parameters / GB:.2f} B active; "
        f"{problem.algorithm} on {problem.gpus} x {problem.machine.gpu.name}",
        f"{batch.prompts} prompts x {batch.samples} samples, {batch.optimizer_steps} optimizer steps, "
        f"prompt {batch.prompt:.0f}, "
        f"response {batch.lengths.mean:.0f} on average, {batch.lengths.longest:.0f} at most",
        f"{layouts} layouts, {evaluated} ways to run them",
        "",
    ]
    for number, run in enumerate(runs, start=1):
        lines += [*_plan_lines(problem, number, run), ""]
    return "\n".join(lines).rstrip()


def config_text(problem: Problem, run: PlannedRun) -> str:
    """Return the configuration of a planned run as YAML, its prediction in comments."""
    head = [
        f"# {problem.algorithm} of {problem.models['actor'].name} on {run.plan.gpus} x "
        f"{problem.machine.gpu.name}, {run.plan.name}.",
        f"# Predicted: {run.prediction.total:.1f} s a step: {_seconds_words(run)}.",
        f"# GiB on the fullest rank of each phase: {_memory_words(run)}.",
    ]
    if "data/gsm8k" in run.config.prepare:
        head.append("# Data and reward are the grade-school mathematics example: put yours in their place.")
    body = yaml.safe_dump(dict(run.mapping), sort_keys=False, default_flow_style=None, width=100)
    return "\n".join(head) + "\n" + body
