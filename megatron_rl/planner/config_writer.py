"""Write a plan as a run configuration in the terms of megatron_rl.config.schema."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import yaml

from megatron_rl.config.errors import UserError
from megatron_rl.config.schema import RunConfig
from megatron_rl.planner.layout import Layout, uneven_split
from megatron_rl.planner.placement import PlacementPlan, Problem
from megatron_rl.planner.search import TrainPlan
from megatron_rl.planner.show import plan_record

_TRAIN_DATA = "data/gsm8k/main/train-00000-of-00001.parquet"


def _ranks(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def _layout(layout: Layout, first: int, count: int, world: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if count < world:
        values["ranks"] = _ranks(first, count)
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert"):
        if getattr(layout, name) > 1:
            values[name] = getattr(layout, name)
    if layout.expert > 1:
        values["expert_tensor"] = 1
    return values


def expressible(plan: PlacementPlan) -> str | None:
    """Return why the configuration cannot state a plan, or None when it can."""
    known = {entry.name for entry in fields(RunConfig)}
    for group in plan.groups:
        for role, chosen in group.plans.items():
            if role in ("critic", "reward") and not {"critic", "reward_model"} & known:
                return f"the configuration has no section for the {role} model yet"
            if chosen.choice.layout.context > 1:
                return "the trainer cannot cut sequences over ranks (context parallelism) yet"
    if plan.overlapped:
        return "the configuration has no one-step-off-policy setting yet"
    return None


def _uneven(problem: Problem, layout: Layout) -> dict[str, int]:
    layers = problem.models["actor"].layers
    if layers % layout.pipeline == 0:
        return {}
    split = uneven_split(layers, layout.pipeline)
    assert split is not None, "the search yields only pipelines with a split"
    return {"num_layers_in_first_pipeline_stage": split[0], "num_layers_in_last_pipeline_stage": split[1]}


def _add_roles(
    config: dict[str, Any], problem: Problem, plan: PlacementPlan, actor: TrainPlan, actor_gpus: int
) -> None:
    """Fill in what depends on how the roles share the ranks: the actor's come first."""
    world = plan.gpus
    if actor.choice.optimizer.offload:
        config["actor"]["optimizer"] = {"offload": True}
    uneven = _uneven(problem, actor.choice.layout)
    if uneven:
        config["actor"]["megatron"] = uneven
    if plan.rollout_gpus:
        config["rollout"]["ranks"] = _ranks(actor_gpus, plan.rollout_gpus)
    elif actor_gpus < world:
        config["rollout"]["ranks"] = _ranks(0, actor_gpus)
    reference = plan.plan_of("reference")
    if reference is not None:
        apart = "reference" not in next(group.plans for group in plan.groups if "actor" in group.plans)
        first, count = actor_gpus if apart else 0, reference.choice.layout.size
        config["reference"] = {"layout": _layout(reference.choice.layout, first, count, world)}
        if problem.algorithm == "grpo":
            config["algorithm"]["settings"] = {"kl_in": "loss"}  # what the reference is for


def run_config(
    problem: Problem, plan: PlacementPlan, model_path: str, data: str | None, reward: str | None
) -> dict[str, Any]:
    """Return the configuration of a plan as a plain mapping; raises UserError if it cannot be stated.

    ``data`` and ``reward`` None: the grade-school mathematics set and its reward, to be replaced.
    """
    reason = expressible(plan)
    if reason:
        raise UserError(
            f"plan {plan.name!r} cannot be written: {reason}",
            where="--out",
            fix="write the grpo plan, or leave --out",
        )
    batch, world = problem.batch, plan.gpus
    actor = plan.plan_of("actor")
    assert actor is not None
    actor_gpus = next(group.gpus for group in plan.groups if "actor" in group.plans)
    choice, rollout = actor.choice, plan.rollout.layout
    config: dict[str, Any] = {
        "model": {"path": model_path},
        "data": {"train": data or _TRAIN_DATA, "max_prompt_tokens": int(batch.prompt)},
        "reward": {"function": reward or "megatron_rl.rewards.math_answer:marked_number"},
        "run_dir": f"runs/{problem.models['actor'].name.rsplit('/', 1)[-1]}",
        "steps": 100,
        "world_size": world,
        "gpus_per_node": problem.cluster.gpus_per_node,
        "gpu_memory_gib": round(problem.cluster.gpu.memory / 2**30, 1),
        "algorithm": {"name": problem.algorithm},
        "batch": {
            "prompts_per_step": batch.prompts,
            "samples_per_prompt": batch.samples,
            "optimizer_steps": batch.optimizer_steps,
            "tokens_per_microbatch": int(choice.micro_batch * batch.longest),
        },
        "actor": {
            "layout": _layout(choice.layout, 0, actor_gpus, world),
            "recompute": choice.recompute,
            "offload": any(group.offloaded for group in plan.groups),
        },
        "rollout": {
            "tensor": rollout.tensor,
            "max_response_tokens": int(batch.lengths.longest),
            "memory_fraction": rollout.memory_fraction,
        },
    }
    _add_roles(config, problem, plan, actor, actor_gpus)
    if data is None:
        config["data"] |= {"prompt_field": "question", "ground_truth_field": "answer", "chat_template": True}
    return config


def config_text(
    problem: Problem, plan: PlacementPlan, model_path: str, data: str | None, reward: str | None
) -> str:
    """Return the configuration of a plan as YAML, its prediction in comments."""
    config = run_config(problem, plan, model_path, data, reward)
    name = problem.models["actor"].name
    prepare = {}
    if not model_path.startswith(("/", ".")):
        prepare[model_path] = (
            f"hf download ORGANISATION/{model_path.rsplit('/', 1)[-1]} --local-dir {model_path}"
        )
    if data is None:
        prepare["data/gsm8k"] = "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k"
    if prepare and "prepare" in {entry.name for entry in fields(RunConfig)}:
        config["prepare"] = prepare
    record = plan_record(problem, plan)
    seconds = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in record["seconds"].items())
    memory = ", ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in record["gigabytes"].items())
    head = [
        f"# {problem.algorithm} of {name} on {plan.gpus} x {problem.cluster.gpu.name}, {plan.name}.",
        f"# Predicted seconds a step: {seconds}.",
        f"# Predicted GB per GPU: {memory}.",
    ]
    if data is None:
        head.append("# Data and reward are the grade-school mathematics example: put yours in their place.")
    return (
        "\n".join(head) + "\n" + yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=100)
    )
