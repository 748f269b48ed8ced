"""Write a plan as a run configuration, predict what that takes and holds, and show it as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.budget import PHASES, RankMemory, memory_plan
from megatron_rl.config.derive import batch_plan, resolve
from megatron_rl.config.load import load_text
from megatron_rl.config.placement import APART, role_layouts, shared_weights
from megatron_rl.config.roles import spec_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import OPEN
from megatron_rl.planning.predict.groups import Problem
from megatron_rl.planning.predict.placement import ALWAYS, OVERSAMPLE, PlacementPlan
from megatron_rl.planning.predict.search import TrainPlan
from megatron_rl.planning.predict.step import Observed, RunStep, predict_run
from megatron_rl.shapes.hardware import GB
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pipeline_stages import end_settings
from megatron_rl.shapes.pretrained import download_command
from megatron_rl.shapes.traffic import WeightTraffic, byte_words

_TRAIN_DATA = "data/gsm8k/main/train-00000-of-00001.parquet"
_REWARD = "megatron_rl.rewards.math_answer:marked_number"
_REWARD_MODEL = "models/reward-model"
_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")


@dataclass(frozen=True)
class Paths:
    """Name what a plan does not know; None: the grade-school mathematics set and its reward, to be replaced.

    ``critic`` None starts the critic from ``model``.
    """

    model: str
    data: str | None = None
    reward: str | None = None
    reward_model: str | None = None
    critic: str | None = None


def _ranks(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else str(first)


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    values = {name: getattr(layout, name) for name in _SIZES if getattr(layout, name) > 1}
    if layout.expert > 1:
        values["expert_tensor"] = 1
    return values


def group_ranks(plan: PlacementPlan) -> dict[str, tuple[int, int]]:
    """Return (first rank, number of ranks) of every role and the rollout; the actor's group comes first."""
    groups = sorted(plan.groups, key=lambda group: "actor" not in group.plans)
    places, first = {}, 0
    for group in groups:
        places |= {role: (first, group.gpus) for role in group.plans}
        first += group.gpus
    places["rollout"] = (first, plan.rollout_gpus) if plan.rollout_gpus else (0, groups[0].gpus)
    return places


def preset_of(places: Mapping[str, tuple[int, int]], world: int) -> str | None:
    """Return the placement preset that gives every role its ranks, or None: they must be named."""
    half, rest = (0, world // 2), (world // 2, world - world // 2)
    if all(place == (0, world) for place in places.values()):
        return "colocate"

    for preset in APART:
        wanted = {role: rest if spec_of(role).placement == preset else half for role in places}
        if wanted == dict(places):
            return preset
    return None


def _prepare(paths: Paths, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the commands that fetch what the configuration names and this machine may not have."""
    models = [paths.model, paths.critic]
    models += [model["path"] for model in config["reward"].get("models", {}).values()]
    wanted = dict.fromkeys(path for path in models if path and not path.startswith(("/", ".")))
    commands = {path: download_command(path) for path in wanted if not Path(path).exists()}
    if paths.data is None:
        commands["data/gsm8k"] = "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k"
    return commands


class _Writer:
    """Build the configuration of one plan, section by section."""

    def __init__(self, problem: Problem, plan: PlacementPlan, paths: Paths) -> None:
        self.problem, self.plan, self.paths = problem, plan, paths
        actor = plan.plan_of("actor")
        assert actor is not None
        self.actor: TrainPlan = actor
        self.places = group_ranks(plan)
        self.placement = preset_of(self.places, plan.gpus)

    def layout(self, role: str, layout: ParallelLayout) -> dict[str, Any]:
        ranks = {} if self.placement else {"ranks": _ranks(*self.places[role])}
        return ranks | _layout(layout)

    def trained(self, role: str) -> dict[str, Any]:
        """Return the section of the actor or the critic."""
        chosen = self.plan.plan_of(role)
        assert chosen is not None
        choice = chosen.choice
        group = next(group for group in self.plan.groups if role in group.plans)
        section = {
            "layout": self.layout(role, choice.layout),
            "recompute": choice.recompute,
            "offload": group.offloaded,
        }
        if choice.optimizer.offload:
            section["optimizer"] = {"offload": True}
        if choice.lora is not None:
            section["lora"] = {"rank": choice.lora.rank}
        stages = end_settings(choice.model.layers, choice.layout.pipeline)
        if role != "actor" and stages:
            del section["layout"]  # the actor's, with its stages
        elif stages:
            section["megatron"] = stages
        return section

    def frozen(self, role: str) -> dict[str, Any]:
        """Return the section of a role that only scores; the reference of adapters is their base."""
        chosen = self.plan.plan_of(role)
        assert chosen is not None
        if role == "reference" and self.actor.choice.lora and self.places[role] == self.places["actor"]:
            return {}
        if end_settings(chosen.choice.model.layers, chosen.choice.layout.pipeline):
            return {}
        return {"layout": self.layout(role, chosen.choice.layout)}

    def batch(self) -> dict[str, Any]:
        """Return the batch section; one token budget holds for every role, the smallest that was planned."""
        batch = self.problem.batch
        micro = min(
            entry.choice.micro_batch
            for group in self.plan.groups
            for role, entry in group.plans.items()
            if spec_of(role).trains
        )
        return {
            "prompts_per_step": batch.prompts,
            "samples_per_prompt": batch.samples,
            "optimizer_steps": batch.optimizer_steps,
            "tokens_per_microbatch": int(micro * batch.longest),
        }

    def reward(self) -> dict[str, Any]:
        """Return the reward section: a model where one is planned, else a function."""
        if self.plan.plan_of("reward") is None:
            return {"function": self.paths.reward or _REWARD}
        model = {"path": self.paths.reward_model or _REWARD_MODEL, **self.frozen("reward")}
        function = {"function": self.paths.reward} if self.paths.reward else {}
        return {**function, "models": {"preference": model}}

    def roles(self) -> dict[str, Any]:
        """Return the sections of critic, reference and rollout, and what makes the reference needed."""
        sections: dict[str, Any] = {}
        if self.plan.plan_of("critic") is not None:
            sections["critic"] = ({"path": self.paths.critic} if self.paths.critic else {}) | self.trained(
                "critic"
            )
        if self.plan.plan_of("reference") is not None:
            sections["reference"] = self.frozen("reference")
        rollout = self.plan.rollout.layout
        sections["rollout"] = {
            "tensor": rollout.tensor,
            "max_response_tokens": int(self.problem.batch.lengths.longest),
            "memory_fraction": rollout.memory_fraction,
        }
        if not self.placement:
            sections["rollout"]["ranks"] = _ranks(*self.places["rollout"])
        if self.plan.step.ahead:
            sections["asynchrony"] = {"steps_ahead": 1}
        if self.plan.name == ALWAYS:
            sections["rollout"] |= {"order": OPEN, "partial": True, "oversample": OVERSAMPLE}
        return sections

    def config(self) -> dict[str, Any]:
        """Return the whole configuration."""
        problem, cluster, world = self.problem, self.problem.machine.cluster, self.plan.gpus
        algorithm: dict[str, Any] = {"name": problem.algorithm}
        if self.plan.plan_of("reference") is not None:
            # What the reference is for: a penalty in the loss, or in the reward as PPO has it.
            algorithm["kl"] = "reward" if problem.algorithm == "ppo" else "loss"
        # The layers that the plan's memory and seconds are of.
        attention = "transformer_engine" if self.actor.choice.transformer_engine else "torch"
        config: dict[str, Any] = {
            "model": {"path": self.paths.model, "attention": attention},
            "data": {"train": self.paths.data or _TRAIN_DATA, "max_prompt_tokens": int(problem.batch.prompt)},
            "reward": self.reward(),
            "run_dir": f"runs/{problem.models['actor'].name.rsplit('/', 1)[-1]}",
            "steps": 100,
            "world_size": world,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu": cluster.gpu.name,
            "gpu_memory_gib": round(cluster.gpu.memory / 2**30, 1),
            "network_gigabits_per_gpu": round(cluster.network * 8 / GB, 3),
            "placement": self.placement or "colocate",
            "algorithm": algorithm,
            "batch": self.batch(),
            "actor": self.trained("actor"),
            **self.roles(),
        }
        if self.paths.data is None:
            fields = {"prompt_field": "question", "ground_truth_field": "answer", "chat_template": True}
            config["data"] |= fields
        return config


@dataclass(frozen=True)
class PlannedRun:
    """Hold a plan as a run: its configuration, how long a step takes, what ranks hold and what a sync moves.

    All of them are worked out from the configuration, by the functions that `check` calls.
    """

    plan: PlacementPlan
    mapping: Mapping[str, Any]
    config: RunConfig
    prediction: RunStep
    memory: tuple[RankMemory, ...]
    traffic: WeightTraffic


def planned_run(problem: Problem, plan: PlacementPlan, paths: Paths) -> PlannedRun:
    """Return a plan as the run that its configuration describes."""
    mapping = _Writer(problem, plan, paths).config()
    if prepare := _prepare(paths, mapping):
        mapping["prepare"] = prepare
    actor = problem.models["actor"]
    stated = load_text(yaml.safe_dump(mapping), name=plan.name).valid()
    config = resolve(stated, plan.gpus, shape=actor).config
    layouts = role_layouts(config, plan.gpus)
    shapes = {role: problem.models.get(role.split(".")[0], actor) for role in layouts}
    observed = Observed(problem.batch.prompt, problem.batch.lengths.mean)
    machine = problem.machine
    return PlannedRun(
        plan=plan,
        mapping=mapping,
        config=config,
        prediction=predict_run(
            config, machine.constants, machine.gpu.name, shapes, observed, machine.precision
        ),
        memory=tuple(memory_plan(config, layouts, shapes, batch_plan(config, layouts))),
        traffic=shared_weights(config, actor).traffic(layouts["rollout"].ranks),
    )


GIB = 2**30


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
                **{size: getattr(choice.layout, size) for size in (*_SIZES, "data")},
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
            words = entry.choice.layout.short_words()
            extra = f", recompute {entry.choice.recompute}" if spec_of(role).trains else ""
            extra += ", optimizer on the host" if entry.choice.optimizer.offload else ""
            extra += f", adapters of rank {entry.choice.lora.rank}" if entry.choice.lora else ""
            rows = f", micro-batch {entry.choice.micro_batch} x {problem.batch.longest:.0f} tokens"
            lines.append(
                f"     {role:10} {group.gpus:5} GPUs  {words}{extra}{rows if spec_of(role).trains else ''}"
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
