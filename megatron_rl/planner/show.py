"""Print plans as text and as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.planner.constants import GB
from megatron_rl.planner.groups import Problem
from megatron_rl.planner.learn import score_memory
from megatron_rl.planner.placement import PlacementPlan
from megatron_rl.planner.step import TRAINED
from megatron_rl.shapes.layout import ParallelLayout


def memory_by_phase(problem: Problem, plan: PlacementPlan) -> dict[str, float]:
    """Return bytes on the fullest GPU in each phase: generate, log_probs, train."""
    context = problem.machine.constants.memory.context_gigabytes * GB
    generate = plan.rollout.layout.memory_fraction * problem.machine.gpu.memory
    for group in plan.groups:
        if group.rollout is not None:
            generate += group.resident + context
    if any(group.offloaded for group in plan.groups):
        generate += problem.machine.constants.memory.after_offload_gigabytes * GB
    log_probs = train = 0.0
    for group in plan.groups:
        resting = sum(entry.memory.states for entry in group.plans.values())
        for role, entry in group.plans.items():
            others = resting - entry.memory.states
            if group.swap and entry.memory.total + others > problem.machine.usable_memory:
                others = 0.0  # they wait in host memory
            scoring = score_memory(entry.choice, problem.batch, problem.machine.constants)
            # A trained role scores with its optimizer state beside it.
            held = entry.memory.states if role in TRAINED else scoring.weights_and_gradients
            work = scoring.total - scoring.weights_and_gradients
            log_probs = max(log_probs, held + work + others)
            if role in TRAINED:
                train = max(train, entry.memory.total + others)
    return {"generate": generate, "log_probs": log_probs or context, "train": train}


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


def plan_record(problem: Problem, plan: PlacementPlan) -> dict[str, Any]:
    """Return a plan as plain JSON values; seconds, and gigabytes of 1e9 bytes."""
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
    rollout, phases = plan.rollout.layout, plan.step.seconds
    return {
        "placement": plan.name,
        "gpus": plan.gpus,
        "seconds": {
            "total": plan.step.total,
            "generate": phases["generate"],
            "log_probs": phases["reward"] + phases["score"],
            "train": phases["learn"],
            "weight_sync": phases["reshard"],
        },
        "tokens_per_second_per_gpu": problem.batch.tokens / plan.step.total / problem.gpus,
        "gigabytes": {name: value / GB for name, value in memory_by_phase(problem, plan).items()},
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


def _plan_lines(problem: Problem, number: int, plan: PlacementPlan) -> list[str]:
    record = plan_record(problem, plan)
    seconds, memory = record["seconds"], record["gigabytes"]
    lines = [
        f"{number}. {plan.name}: {seconds['total']:.1f} s a step, "
        f"{record['tokens_per_second_per_gpu']:.0f} tokens/s/GPU on {plan.gpus} GPUs",
        f"     seconds    generate {seconds['generate']:.1f}   log-probs {seconds['log_probs']:.1f}   "
        f"train {seconds['train']:.1f}   weight sync {seconds['weight_sync']:.2f}",
        f"     GB per GPU generate {memory['generate']:.0f}   log-probs {memory['log_probs']:.0f}   "
        f"train {memory['train']:.0f}   (of {problem.machine.gpu.memory / GB:.0f})",
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
    state = ", training state waits on the host" if record["training_state_offloaded"] else ""
    lines.append(
        f"     {'rollout':10} {count:5} GPUs  TP{rollout.tensor} x {rollout.replicas} "
        f"replicas, memory fraction {rollout.memory_fraction:.2f}{state}"
    )
    return lines


def plans_text(problem: Problem, plans: Sequence[PlacementPlan], layouts: int, evaluated: int) -> str:
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
    for number, plan in enumerate(plans, start=1):
        lines += [*_plan_lines(problem, number, plan), ""]
    return "\n".join(lines).rstrip()
