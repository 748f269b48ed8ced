"""Write a plan as a run configuration, predict that configuration, and format it as text and JSON.

The printed numbers are predicted from the written configuration, by the functions that `check` uses. They are
not copied from the search, so that they describe the run that the configuration starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.budget import PHASES, RankMemory, memory_plan
from megatron_rl.config.derive import batch_plan, resolve
from megatron_rl.config.hub import PREFIX
from megatron_rl.config.load import load_text
from megatron_rl.config.placement import HALF_PRESETS, role_layouts, shared_weights
from megatron_rl.config.roles import ACTOR, CRITIC, INITIAL, REFERENCE, REWARD_MODELS, ROLLOUT, spec_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import OPEN
from megatron_rl.planning.predict.placement import OPEN_ORDER, OVERSAMPLE, PlacementPlan, PlacementProblem
from megatron_rl.planning.predict.search import TrainPlan
from megatron_rl.planning.predict.step import RunStats, RunStep, predict_run
from megatron_rl.shapes.hardware import GB
from megatron_rl.shapes.layout import ParallelLayout, end_settings
from megatron_rl.shapes.pretrained import download_command
from megatron_rl.shapes.traffic import WeightTraffic, byte_text

_GIB = 2**30
# Placeholders for paths that the user does not name.
_TRAIN_DATA = "hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet"
_REWARD_FUNCTION = "megatron_rl.rewards.math_answer:marked_number"
_REWARD_MODEL = "models/reward-model"
_REWARD_MODEL_NAME = "preference"
"""Name of the reward model in the configuration."""
_LAYOUT_SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
"""Sizes of a layout section that plans set."""


@dataclass(frozen=True)
class Paths:
    """Paths of models, data and rewards, which a plan does not determine.

    Without data or a reward, the configuration has grade-school mathematics (GSM8K) as a placeholder.

    Example: ``Paths("models/Qwen3-8B", data="data/train.jsonl", reward="my_rewards:score")``.
    """

    model: str
    """Model of the actor."""
    data: str | None = None
    """Training data."""
    reward: str | None = None
    """Reward function."""
    reward_model: str | None = None
    """Reward model."""
    critic: str | None = None
    """Model from which the critic is initialised, or None for ``model``."""
    chat_template: bool = True
    """Whether the tokenizer of ``model`` has a chat template, with which the placeholder data is rendered."""


RankRange = tuple[int, int]
"""Range of ranks: the first rank, and the number of ranks."""


def _rank_text(first: int, count: int) -> str:
    """Format a range of ``count`` ranks from ``first`` on as in a configuration, such as ``0-7``."""
    if count == 1:
        return str(first)
    return f"{first}-{first + count - 1}"


def _layout_section(layout: ParallelLayout) -> dict[str, Any]:
    """Return the layout section of a configuration: the parallel sizes of `_LAYOUT_SIZES` that are above 1.

    With expert parallelism the section also sets ``expert_tensor`` to 1, the value that all plans use.
    """
    section: dict[str, Any] = {}
    for name in _LAYOUT_SIZES:
        size = getattr(layout, name)
        if size > 1:
            section[name] = size

    if layout.expert > 1:
        section["expert_tensor"] = 1
    return section


def ranks_by_role(plan: PlacementPlan) -> dict[str, RankRange]:
    """Return the ranks of every role and of the rollout; the actor's group has the lowest ranks."""
    groups = sorted(plan.groups, key=lambda group: ACTOR.name not in group.plans)
    ranges: dict[str, RankRange] = {}
    first = 0
    for group in groups:
        ranges |= {role: (first, group.gpus) for role in group.plans}
        first += group.gpus

    # Without separate GPUs the rollout is on the GPUs of the actor's group.
    ranges[ROLLOUT.name] = (0, groups[0].gpus)
    if plan.rollout_gpus:
        ranges[ROLLOUT.name] = (first, plan.rollout_gpus)
    return ranges


def preset_of(ranges: Mapping[str, RankRange], world: int) -> str | None:
    """Return the placement preset in which every role has these ranks, or None without such a preset.

    ``ranges`` has the ranks of each role, and ``world`` is the number of ranks of the job.
    """
    if all(ranks == (0, world) for ranks in ranges.values()):
        return "colocate"

    first_half = (0, world // 2)
    second_half = (world // 2, world - world // 2)
    for preset in HALF_PRESETS:
        preset_ranges: dict[str, RankRange] = dict.fromkeys(ranges, first_half)
        for role in ranges:
            if spec_of(role).placement == preset:
                preset_ranges[role] = second_half
        if preset_ranges == dict(ranges):
            return preset
    return None


def _download_commands(paths: Paths, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the download commands of the models that this machine does not have, by path."""
    models = [paths.model, paths.critic]
    reward_models = config["reward"].get("models", {})
    models += [model["path"] for model in reward_models.values()]

    commands: dict[str, str] = {}
    for path in models:
        # Absolute paths and paths that start with a dot are the user's files. A model with a name on the Hub
        # is downloaded by the run.
        if not path or path.startswith(("/", ".", PREFIX)):
            continue
        if not Path(path).exists():
            commands[path] = download_command(path)
    return commands


class _ConfigWriter:
    """Writer of the configuration of one plan, section by section."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan, paths: Paths) -> None:
        self.problem = problem
        self.plan = plan
        self.paths = paths
        self.actor = self._plan_of(ACTOR.name)
        self.ranges = ranks_by_role(plan)
        self.placement = preset_of(self.ranges, plan.gpus)

    def _plan_of(self, role: str) -> TrainPlan:
        """Return the plan of a role, which must be in the placement."""
        plan = self.plan.plan_of(role)
        assert plan is not None
        return plan

    def layout_section(self, role: str, layout: ParallelLayout) -> dict[str, Any]:
        """Return the layout section of a role, with its ranks unless a placement preset implies them."""
        if self.placement:
            return _layout_section(layout)
        return {"ranks": _rank_text(*self.ranges[role])} | _layout_section(layout)

    def trained_section(self, role: str) -> dict[str, Any]:
        """Return the section of a trained role: layout, optimizer and memory settings."""
        choice = self._plan_of(role).choice
        group = next(group for group in self.plan.groups if role in group.plans)
        section = {
            "layout": self.layout_section(role, choice.layout),
            "recompute": choice.recompute,
            "offload": group.offloaded,
        }
        if choice.optimizer.offload:
            section["optimizer"] = {"offload": True}
        if choice.lora is not None:
            section["lora"] = {"rank": choice.lora.rank}

        # Uneven stages are Megatron settings of the actor; other roles inherit them with the actor's layout.
        stages = end_settings(choice.model.layers, choice.layout.pipeline)
        if role != ACTOR.name and stages:
            del section["layout"]
        elif stages:
            section["megatron"] = stages
        return section

    def frozen_section(self, role: str) -> dict[str, Any]:
        """Return the section of a frozen role: its layout, or nothing if it inherits the actor's layout."""
        # If the actor trains adapters, the reference is the actor's model without adapters. On the actor's
        # ranks the reference then has no separate weights, and no layout.
        choice = self._plan_of(role).choice
        has_actor_ranks = self.ranges[role] == self.ranges[ACTOR.name]
        shares_base = spec_of(role).shares == INITIAL and self.actor.choice.lora is not None
        if shares_base and has_actor_ranks:
            return {}

        # If the role's pipeline stages are uneven, the role inherits the actor's layout and settings.
        uneven_stage_settings = end_settings(choice.model.layers, choice.layout.pipeline)
        if uneven_stage_settings:
            return {}
        return {"layout": self.layout_section(role, choice.layout)}

    def batch_section(self) -> dict[str, Any]:
        """Return the section ``batch`` of the configuration."""
        batch = self.problem.batch
        micro_batches: list[int] = []
        for group in self.plan.groups:
            for role, plan in group.plans.items():
                if spec_of(role).trains:
                    micro_batches.append(plan.choice.micro_batch)

        # The configuration has one token budget for all roles: use the smallest.
        micro_batch = min(micro_batches)
        return {
            "prompts_per_step": batch.prompts,
            "samples_per_prompt": batch.samples,
            "optimizer_steps": batch.optimizer_steps,
            "tokens_per_microbatch": int(micro_batch * batch.row_limit),
        }

    def reward_section(self) -> dict[str, Any]:
        """Return the section ``reward``: a reward model if the plan has one, otherwise a function."""
        if self.plan.plan_of(REWARD_MODELS.name) is None:
            return {"function": self.paths.reward or _REWARD_FUNCTION}

        path = self.paths.reward_model or _REWARD_MODEL
        model = {"path": path, **self.frozen_section(REWARD_MODELS.name)}
        section: dict[str, Any] = {"models": {_REWARD_MODEL_NAME: model}}
        if self.paths.reward:
            section = {"function": self.paths.reward, **section}
        return section

    def other_sections(self) -> dict[str, Any]:
        """Return the sections ``critic``, ``reference``, ``rollout`` and ``asynchrony``.

        A section is absent if the plan does not have the role, or if no samples are generated ahead.
        """
        sections: dict[str, Any] = {}
        if self.plan.plan_of(CRITIC.name) is not None:
            critic = self.trained_section(CRITIC.name)
            if self.paths.critic:
                critic = {"path": self.paths.critic, **critic}
            sections[CRITIC.section] = critic
        if self.plan.plan_of(REFERENCE.name) is not None:
            sections[REFERENCE.section] = self.frozen_section(REFERENCE.name)

        # A placement preset implies the ranks of the rollout and of the other roles.
        layout = self.plan.rollout.layout
        rollout: dict[str, Any] = {
            "tensor": layout.tensor,
            "max_response_tokens": int(self.problem.batch.lengths.limit),
            "memory_fraction": layout.memory_fraction,
        }
        if not self.placement:
            rollout["ranks"] = _rank_text(*self.ranges[ROLLOUT.name])
        if self.plan.name == OPEN_ORDER:
            rollout |= {"order": OPEN, "partial": True, "oversample": OVERSAMPLE}
        sections[ROLLOUT.section] = rollout
        if self.plan.step.samples_ahead:
            sections["asynchrony"] = {"steps_ahead": 1}
        return sections

    def build_config(self) -> dict[str, Any]:
        """Return the complete configuration of the plan as a mapping."""
        problem = self.problem
        cluster = problem.machine.cluster
        algorithm: dict[str, Any] = {"name": problem.algorithm}
        # A reference needs a KL penalty: in the reward for PPO, in the loss otherwise.
        if self.plan.plan_of(REFERENCE.name) is not None:
            algorithm["kl"] = "loss"
            if problem.algorithm == "ppo":
                algorithm["kl"] = "reward"

        data: dict[str, Any] = {
            "train": self.paths.data or _TRAIN_DATA,
            "max_prompt_tokens": int(problem.batch.prompt_length),
        }
        if self.paths.data is None:
            data |= {
                "prompt_field": "question",
                "ground_truth_field": "answer",
                "chat_template": self.paths.chat_template,
            }

        # Select the attention implementation for which memory and step time of the plan were predicted.
        attention = "torch"
        if self.actor.choice.transformer_engine:
            attention = "transformer_engine"

        _, _, run_name = problem.models[ACTOR.name].name.rpartition("/")
        return {
            "model": {"path": self.paths.model, "attention": attention},
            "data": data,
            "reward": self.reward_section(),
            "run_dir": f"runs/{run_name}",
            "steps": 100,
            "world_size": self.plan.gpus,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu": cluster.gpu.name,
            "gpu_memory_gib": round(cluster.gpu.memory / _GIB, 1),
            "network_gigabits_per_gpu": round(cluster.network * 8 / GB, 3),
            "placement": self.placement or "colocate",
            "algorithm": algorithm,
            "batch": self.batch_section(),
            ACTOR.section: self.trained_section(ACTOR.name),
            **self.other_sections(),
        }


def plan_settings(problem: PlacementProblem, plan: PlacementPlan, paths: Paths) -> dict[str, Any]:
    """Return the configuration of a plan, as the mapping that is written to a file."""
    return _ConfigWriter(problem, plan, paths).build_config()


@dataclass(frozen=True)
class PlannedRun:
    """Plan with its configuration, and the predictions of `check` for that configuration."""

    plan: PlacementPlan
    """Plan that the configuration describes."""
    written_config: Mapping[str, Any]
    """Configuration as written to the file."""
    config: RunConfig
    """Configuration with its derived values."""
    prediction: RunStep
    """Seconds and FLOPs of a step."""
    memory: tuple[RankMemory, ...]
    """Memory of each distinct rank, fullest first."""
    traffic: WeightTraffic
    """Bytes that each weight sync sends from the trainer to the engines."""


def make_planned_run(problem: PlacementProblem, plan: PlacementPlan, paths: Paths) -> PlannedRun:
    """Write the configuration of a plan, and predict its step, memory and weight traffic."""
    written_config = plan_settings(problem, plan, paths)
    download_commands = _download_commands(paths, written_config)
    if download_commands:
        written_config["prepare"] = download_commands

    # Predict from the resolved configuration, as `check` does, instead of copying the plan's estimates.
    actor = problem.models[ACTOR.name]
    # Replace names on the Hub by paths, so that loading the configuration downloads nothing.
    config_text = yaml.safe_dump(written_config).replace(PREFIX, "hub/")
    loaded_config = load_text(config_text, name=plan.name).valid()
    config = resolve(loaded_config, plan.gpus, shape=actor).config
    layouts = role_layouts(config, plan.gpus)
    shapes = {role: problem.models.get(spec_of(role).name, actor) for role in layouts}

    machine = problem.machine
    prediction = predict_run(
        config,
        machine.constants,
        machine.gpu.name,
        shapes,
        RunStats(problem.batch.prompt_length, problem.batch.lengths.mean),
        machine.precision,
    )
    memory = memory_plan(config, layouts, shapes, batch_plan(config, layouts))
    rollout_ranks = layouts[ROLLOUT.name].ranks
    return PlannedRun(
        plan=plan,
        written_config=written_config,
        config=config,
        prediction=prediction,
        memory=tuple(memory),
        traffic=shared_weights(config, actor).traffic(rollout_ranks, config.gpus_per_node),
    )


def peak_bytes(run: PlannedRun, phase: str) -> int:
    """Return the bytes on the fullest rank in a phase; the fullest rank may differ between phases."""
    return max(memory.phase_peak(phase) for memory in run.memory)


def plan_record(run: PlannedRun) -> dict[str, Any]:
    """Convert a planned run to plain JSON values: seconds, and gigabytes on the fullest rank by phase."""
    # Layout and settings of each role with a Megatron model.
    plan = run.plan
    seconds = run.prediction.seconds
    roles = {}
    for group in plan.groups:
        for role, role_plan in group.plans.items():
            choice = role_plan.choice
            sizes = {name: getattr(choice.layout, name) for name in (*_LAYOUT_SIZES, "data")}
            roles[role] = {
                "gpus": group.gpus,
                **sizes,
                "recompute": choice.recompute,
                "micro_batch": choice.micro_batch,
                "optimizer_offload": choice.optimizer.offload,
            }

    # The names of these keys are part of the command's output.
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
        "gigabytes": {phase: peak_bytes(run, phase) / GB for phase in PHASES},
        "gigabytes_received_per_sync": run.traffic.received_most / GB,
        "roles": roles,
        "rollout": {
            "gpus": rollout.replicas * rollout.gpus,
            "tensor": rollout.tensor,
            "replicas": rollout.replicas,
            "memory_fraction": rollout.memory_fraction,
        },
        "reasons": list(plan.reasons),
        "training_state_offloaded": any(group.offloaded for group in plan.groups),
        "one_step_off_policy": plan.step.samples_ahead,
    }


def _seconds_text(run: PlannedRun) -> str:
    """Format the seconds of a planned run's phases as one line of text."""
    seconds = plan_record(run)["seconds"]
    return (
        f"generate {seconds['generate']:.1f}   log-probs {seconds['log_probs']:.1f}   "
        f"train {seconds['train']:.1f}   weight sync {seconds['weight_sync']:.2f}"
    )


def _memory_text(run: PlannedRun) -> str:
    """Format the memory of the fullest rank in each phase as one line of text, in GiB."""
    phases = "   ".join(f"{phase} {peak_bytes(run, phase) / _GIB:,.1f}" for phase in PHASES)
    return f"{phases}   (of {run.config.gpu_memory_gib:g})"


def _role_line(problem: PlacementProblem, role: str, gpus: int, plan: TrainPlan) -> str:
    """Format one role of a plan as a line: its GPUs, layout and settings."""
    choice = plan.choice
    line = f"     {role:10} {gpus:5} GPUs  {choice.layout.short_text()}"

    is_trained = spec_of(role).trains
    if is_trained:
        line += f", recompute {choice.recompute}"
    if choice.optimizer.offload:
        line += ", optimizer on the host"
    if choice.lora:
        line += f", adapters of rank {choice.lora.rank}"
    if is_trained:
        line += f", micro-batch {choice.micro_batch} x {problem.batch.row_limit:.0f} tokens"
    return line


def _plan_lines(problem: PlacementProblem, number: int, run: PlannedRun) -> list[str]:
    """Format one plan as lines of text; ``number`` is its position in the list of plans."""
    plan = run.plan
    total_seconds = run.prediction.total
    rate = run.prediction.tokens / total_seconds / plan.gpus
    lines = [
        f"{number}. {plan.name}: {total_seconds:.1f} s a step, {rate:.0f} tokens/s/GPU on {plan.gpus} GPUs",
        f"     seconds     {_seconds_text(run)}",
        f"     GiB per GPU {_memory_text(run)}",
        f"     weight sync {byte_text(run.traffic.received_most)} received by the busiest rank",
    ]
    # A line for each role, the rollout last.
    for group in plan.groups:
        for role, role_plan in group.plans.items():
            lines.append(_role_line(problem, role, group.gpus, role_plan))

    for reason in plan.reasons:
        lines.append(f"     why         {reason}")
    rollout = plan.rollout.layout
    offload_text = ""
    if any(group.offloaded for group in plan.groups):
        offload_text = ", training state waits on the host"
    lines.append(
        f"     {ROLLOUT.name:10} {rollout.replicas * rollout.gpus:5} GPUs  TP{rollout.tensor} x "
        f"{rollout.replicas} replicas, memory fraction {rollout.memory_fraction:.2f}{offload_text}"
    )
    return lines


def plans_text(
    problem: PlacementProblem, runs: Sequence[PlannedRun], num_layouts: int, num_evaluated: int
) -> str:
    """Format the best plans of a search as text.

    ``num_layouts`` is the number of parallel layouts that the search tried. ``num_evaluated`` is the number
    of combinations of a layout and settings (micro-batch, recompute, offload) that the search evaluated.
    """
    model = problem.models[ACTOR.name]
    batch = problem.batch
    optimizer_steps = f"{batch.optimizer_steps} optimizer steps"
    if batch.optimizer_steps == 1:
        optimizer_steps = "1 optimizer step"
    lines = [
        f"{model.name}: {model.parameters / GB:.2f} B parameters, "
        f"{model.active_parameters / GB:.2f} B active; "
        f"{problem.algorithm} on {problem.gpus} x {problem.machine.gpu.name}",
        f"{batch.prompts} prompts x {batch.samples} samples, {optimizer_steps}, "
        f"prompt {batch.prompt_length:.0f}, "
        f"response {batch.lengths.mean:.0f} on average, {batch.lengths.limit:.0f} at most",
        f"{num_layouts} layouts, {num_evaluated} ways to run them",
        "",
    ]

    for number, run in enumerate(runs, start=1):
        lines += [*_plan_lines(problem, number, run), ""]
    return "\n".join(lines).rstrip()


def config_text(problem: PlacementProblem, run: PlannedRun) -> str:
    """Format the configuration of a planned run as YAML, with its prediction in comments."""
    model = problem.models[ACTOR.name]
    comments = [
        f"# {problem.algorithm} of {model.name} on {run.plan.gpus} x {problem.machine.gpu.name}, "
        f"{run.plan.name}.",
        f"# Predicted: {run.prediction.total:.1f} s a step: {_seconds_text(run)}.",
        f"# GiB on the fullest rank of each phase: {_memory_text(run)}.",
    ]
    if run.written_config["data"]["train"] == _TRAIN_DATA:
        comments.append("# Data and reward are the grade-school mathematics example: replace them by yours.")
    body = yaml.safe_dump(dict(run.written_config), sort_keys=False, default_flow_style=None, width=100)
    return "\n".join(comments) + "\n" + body
