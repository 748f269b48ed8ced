"""Predict the layout of a user's configuration, and compare it with the layouts that the search finds.

Each layout of the search is a list of overrides of the configuration. `check` predicts the overridden
configuration in the same way as the user's configuration. All settings outside the layout keep the user's
values: lengths, mini-batches, optimizer, engine.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.check.configuration import CheckReport, check_file
from megatron_rl.config.hub import model_source
from megatron_rl.config.load import flatten
from megatron_rl.config.roles import REWARD_MODELS, ROLLOUT, spec_of
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.rollout import OPEN
from megatron_rl.errors import UserError
from megatron_rl.planning.predict.batch import StepBatch
from megatron_rl.planning.predict.learn import network_bytes
from megatron_rl.planning.predict.placement import (
    ONE_STEP_OFF,
    OPEN_ORDER,
    ROLES,
    SYNCHRONOUS,
    PlacementPlan,
    PlacementProblem,
    search_simplest_placements,
)
from megatron_rl.planning.predict.plan_file import Paths, plan_settings
from megatron_rl.planning.predict.step import (
    ASSUMED_GPU,
    PHASES,
    RunStats,
    RunStep,
    build_step_batch,
    predict_run,
    train_choice,
)
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.traffic import byte_text

_OVERRIDE_WIDTH = 84
"""Maximum number of columns of a line of overrides."""


@dataclass(frozen=True)
class ConfiguredPlan:
    """Layout of a configured run with its predictions: the configured layout, or a layout of the search.

    Example: ``ConfiguredPlan("the given layout", (), report, step, network, ())``.
    """

    name: str
    """Name: "the given layout", or the name of the placement."""
    overrides: tuple[str, ...]
    """Overrides of the configuration that select the layout; empty for the configured layout."""
    report: CheckReport
    """Check of the configuration with these overrides."""
    step: RunStep
    """Seconds of a step by phase."""
    network: Mapping[str, float]
    """Bytes that leave the NVLink domain of the busiest rank in a step, by cause."""
    reasons: tuple[str, ...]
    """Reasons why no simpler layout was selected."""


@dataclass(frozen=True)
class ConfiguredPlans:
    """The configuration's layout, and the layouts of the search, fastest first.

    Example: ``ConfiguredPlans(given, found=(best, second, third), rejected=())``.
    """

    given: ConfiguredPlan
    """Layout of the configuration."""
    found: tuple[ConfiguredPlan, ...]
    """Best plan of each placement whose configuration passes `check`."""
    rejected: tuple[str, ...]
    """Placements whose configuration does not pass, each with its first error."""
    is_gpu_assumed: bool = False
    """Whether the GPU is `ASSUMED_GPU`, because neither the configuration nor the command has a GPU."""


def plan_configuration(
    path: Path, overrides: Sequence[str], world_size: int | None, gpu: str | None, constants: Constants
) -> ConfiguredPlans:
    """Predict the step time of a configuration, and of the best plan of every placement of its roles.

    A placement assigns the roles (such as actor and rollout) to GPUs. A plan uses at most as many GPUs as the
    configuration.

    ``gpu`` replaces the configuration's GPU. If both are None, the GPU is `ASSUMED_GPU`. Raises UserErrors
    for a configuration with errors other than missing files. Raises UserError for roles that the placement
    search does not support.
    """
    machine_overrides = list(overrides)
    if gpu is not None:
        machine_overrides += [f"gpu={gpu}", "gpu_memory_gib=null"]
    report = _check_for_other_machines(path, machine_overrides, world_size)
    is_gpu_assumed = report.config.gpu is None
    if is_gpu_assumed:
        machine_overrides.append(f"gpu={ASSUMED_GPU}")
        report = _check_for_other_machines(path, machine_overrides, world_size)

    config = report.valid()
    problem = configured_problem(report, constants)
    configured_plan = _predict_configuration(
        "the given layout", overrides=(), report=report, constants=constants, reasons=()
    )

    # Check the layout of each plan: the search estimates memory less precisely than `check`.
    candidates: list[ConfiguredPlan] = []
    rejections: list[str] = []
    for plan in search_simplest_placements(problem, _sampling_schedule(config)).plans:
        plan_overrides = layout_overrides(problem, plan, report)
        candidate_report = _check_for_other_machines(path, [*machine_overrides, *plan_overrides], plan.gpus)
        if candidate_report.errors:
            rejections.append(f"{plan.name}: {candidate_report.errors[0].message}")
            continue
        candidates.append(
            _predict_configuration(
                plan.name,
                overrides=plan_overrides,
                report=candidate_report,
                constants=constants,
                reasons=plan.reasons,
            )
        )
    candidates.sort(key=lambda candidate: candidate.step.total)
    return ConfiguredPlans(configured_plan, tuple(candidates), tuple(rejections), is_gpu_assumed)


def _check_for_other_machines(path: Path, overrides: Sequence[str], world_size: int | None) -> CheckReport:
    """Check a configuration that will run on other machines, whose files may be missing on this machine."""
    return check_file(path, overrides, world_size, without_files=True, on_other_machines=True)


def _sampling_schedule(config: RunConfig) -> str:
    """Return the sampling schedule of a configuration, one of `SAMPLING_SCHEDULES`."""
    if config.rollout.order == OPEN:
        return OPEN_ORDER
    if config.asynchrony.steps_ahead:
        return ONE_STEP_OFF
    return SYNCHRONOUS


def configured_problem(report: CheckReport, constants: Constants) -> PlacementProblem:
    """Build the placement problem of a checked configuration, which is the input of the placement search.

    Raises UserError for a job or for roles that the search does not support.
    """
    # Refuse jobs that the planner's constants do not describe.
    config = report.valid()
    layouts = report.layouts or {}
    dtype = config.model.dtype
    in_process = config.rollout.capabilities.in_process
    if config.job != TRAIN or report.shape is None or not in_process or dtype == "float32":
        raise UserError(
            "this configuration cannot be planned",
            where="CONFIG",
            expected="a reinforcement-learning job in half precision, with an engine inside the training "
            "processes (not a server), and the model's config.json",
            got=f"job {config.job}, {dtype}, engine {config.rollout.engine}, model {config.model.path}",
            fix="plan without a configuration: plan MODEL --gpus N, or copy config.json into model.path",
        )

    # The search places one model for each of its roles.
    models = {spec_of(role).name: report.shapes.get(role, report.shape) for role in layouts}
    del models[ROLLOUT.name]
    algorithm = "grpo"
    if "critic" in models:
        algorithm = "ppo"
    unplaced_roles = [role for role in models if role not in ROLES[algorithm]]
    if unplaced_roles or len(config.reward.models) > 1:
        raise UserError(
            "the search does not place these roles",
            where="CONFIG",
            expected=f"the roles {', '.join(ROLES[algorithm])}; at most one reward model, and only with a "
            "critic",
            got=", ".join(layouts),
            fix="plan the run without the other roles, then set the ranks of these roles yourself: `check` "
            "predicts the memory of any layout",
        )

    # The search varies the token budget of a micro-batch in units of the longest row.
    assumed_batch = build_step_batch(config, layouts, RunStats())
    row_limit = config.data.max_prompt_tokens + config.rollout.response_limit
    batch = StepBatch(
        prompts=assumed_batch.prompts,
        samples=assumed_batch.samples,
        optimizer_steps=assumed_batch.optimizer_steps,
        prompt_length=assumed_batch.prompt_length,
        lengths=assumed_batch.lengths,
        row_limit=float(row_limit),
        epochs=assumed_batch.epochs,
        oversample=assumed_batch.oversample,
    )

    cluster = constants.cluster(
        config.gpu or ASSUMED_GPU,
        report.world_size,
        config.gpus_per_node,
        config.network_gigabits_per_gpu,
    )
    lora = None
    if config.actor.lora is not None:
        lora = Lora.for_model(report.shape, config.actor.lora.rank, config.actor.lora.targets)
    return PlacementProblem(models, algorithm, batch, Machine(cluster, constants), lora=lora)


def layout_overrides(problem: PlacementProblem, plan: PlacementPlan, report: CheckReport) -> tuple[str, ...]:
    """Return the overrides that give a checked configuration the layout of a plan."""
    config = report.config
    settings = plan_settings(problem, plan, Paths(config.model.path))
    layout_values: dict[str, Any] = {
        "world_size": plan.gpus,
        "placement": settings["placement"],
        "batch.tokens_per_microbatch": settings["batch"]["tokens_per_microbatch"],
        "rollout.tensor": settings["rollout"]["tensor"],
        "rollout.ranks": settings["rollout"].get("ranks"),
        "rollout.memory_fraction": settings["rollout"]["memory_fraction"],
    }
    for role in problem.models:
        section = settings.get(role, {})
        section_path = role
        if role == REWARD_MODELS.name:
            # The single reward model has different names in the configuration and in the plan.
            (name,) = config.reward.models
            section_path = f"{REWARD_MODELS.section}.{name}"
            (section,) = settings["reward"]["models"].values()
        layout_values[f"{section_path}.layout"] = section.get("layout")
        if not spec_of(role).trains:
            continue

        layout_values[f"{section_path}.recompute"] = section["recompute"]
        layout_values[f"{section_path}.offload"] = section["offload"]
        optimizer_section = section.get("optimizer", {})
        layout_values[f"{section_path}.optimizer.offload"] = optimizer_section.get("offload", False)
        for name, value in section.get("megatron", {}).items():
            layout_values[f"{section_path}.megatron.{name}"] = value

    # Omit values that the configuration already has, and values that it would derive.
    config_values = flatten(config)
    overrides: list[str] = []
    for key, value in layout_values.items():
        is_derived = key in report.origins and report.origins[key].kind in ("default", "derived")
        is_unchanged = key in config_values and config_values[key] == value
        if is_unchanged or (value is None and is_derived):
            continue
        overrides.append(f"{key}={_override_text(value)}")
    return tuple(overrides)


def _override_text(value: Any) -> str:
    """Format a value as YAML on one line, for an override."""
    if value is None:
        return "null"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _predict_configuration(
    name: str,
    overrides: Sequence[str],
    report: CheckReport,
    constants: Constants,
    reasons: Sequence[str],
) -> ConfiguredPlan:
    """Predict the step time and the network traffic of a checked configuration.

    The traffic is listed by cause, such as gradients. ``name``, ``overrides`` and ``reasons`` become fields
    of the result.
    """
    config = report.config
    layouts = report.layouts or {}
    assert report.shape is not None and report.sync is not None
    shapes = {role: report.shapes.get(role, report.shape) for role in layouts}
    gpu = config.gpu or ASSUMED_GPU
    step = predict_run(config, constants, gpu, shapes)

    # Bytes of the busiest rank: the sum over the trained roles on it, and the weight sync.
    cluster = constants.cluster(gpu, report.world_size, config.gpus_per_node, config.network_gigabits_per_gpu)
    batch = build_step_batch(config, layouts, RunStats())
    network_bytes_by_cause: dict[str, float] = {}
    for role, layout in layouts.items():
        if not spec_of(role).trains:
            continue
        choice = train_choice(config, role, layout, shapes[role])
        for cause, byte_count in network_bytes(choice, batch, cluster).items():
            network_bytes_by_cause[cause] = network_bytes_by_cause.get(cause, 0.0) + byte_count
    if report.world_size > cluster.domain and report.sync.received_most:
        network_bytes_by_cause["weight sync"] = float(report.sync.received_most)
    return ConfiguredPlan(name, tuple(overrides), report, step, network_bytes_by_cause, tuple(reasons))


def difference_text(plan: ConfiguredPlan, baseline: ConfiguredPlan) -> str:
    """Describe how the step time of a plan differs from the step time of ``baseline``.

    The text names the phase that contributes most to the difference. ``baseline`` is the layout of the user's
    configuration, which the text calls "the given layout".
    """
    seconds_more = plan.step.total - baseline.step.total
    seconds_more_by_phase: dict[str, float] = {}
    for phase in PHASES:
        seconds_more_by_phase[phase] = plan.step.seconds[phase] - baseline.step.seconds[phase]
    relative_difference = abs(seconds_more) / baseline.step.total

    # A difference below 1% is far smaller than the error of the predictions.
    if relative_difference < 0.01:
        return "as fast as the given layout"

    verb = "slower"
    phase = max(seconds_more_by_phase, key=lambda name: seconds_more_by_phase[name])
    if seconds_more < 0:
        verb = "faster"
        phase = min(seconds_more_by_phase, key=lambda name: seconds_more_by_phase[name])
    phase_text = f"{phase} ({seconds_more_by_phase[phase]:+.1f} s)"
    return f"{relative_difference:.0%} {verb} than the given layout, most of it in {phase_text}"


def configured_plans_text(name: str, plans: ConfiguredPlans, best: Sequence[ConfiguredPlan]) -> str:
    """Format the configured layout and the best layouts of the search as text."""
    configured_plan = plans.given
    report = configured_plan.report
    config = report.config
    batch = build_step_batch(config, report.layouts or {}, RunStats())
    shape = report.shape
    assert shape is not None

    model = Path(model_source(config.model.path)).name
    gpu = str(config.gpu)
    if plans.is_gpu_assumed:
        gpu += " (assumed)"
    optimizer_steps = _count_text(batch.optimizer_steps, "optimizer step")
    lines = [
        f"{name}: {model}, {shape.parameters / 1e9:.2f} B parameters, {config.algorithm.name} on "
        f"{report.world_size} x {gpu}",
        f"{batch.prompts} prompts x {batch.samples} samples, {optimizer_steps}, "
        f"prompt {batch.prompt_length:.0f}, response {batch.lengths.mean:.0f} on average (assumed), "
        f"{batch.lengths.limit:.0f} at most",
        "",
        f"given: {configured_plan.step.total:.1f} s a step",
        *_plan_lines(configured_plan),
    ]
    for number, plan in enumerate(best, start=1):
        difference = difference_text(plan, configured_plan)
        lines += ["", f"{number}. {plan.name}: {plan.step.total:.1f} s a step, {difference}"]
        lines += _plan_lines(plan)
        lines += [f"     why         {reason}" for reason in plan.reasons]
        lines += _override_lines(plan.overrides)

    # A placement that fits by the search's estimate of memory may not fit by the estimate of `check`.
    lines.append("")
    lines += [f"not shown: {rejection}" for rejection in plans.rejected]
    if not best:
        lines.append("no other layout passes check")
    return "\n".join(lines).rstrip()


def _plan_lines(plan: ConfiguredPlan) -> list[str]:
    """Format a layout's predicted seconds, memory, network bytes and roles as lines."""
    seconds = "   ".join(f"{phase} {plan.step.seconds[phase]:.1f}" for phase in PHASES)
    peak = max(memory.peak for memory in plan.report.memory) / 2**30
    network = ", ".join(f"{cause} {byte_text(count)}" for cause, count in plan.network.items())

    lines = [
        f"     seconds     {seconds}",
        f"     memory      {peak:.1f} GiB of {plan.report.config.gpu_memory_gib:g} on the fullest rank",
        f"     network     {network or 'nothing'} across nodes, from or to the busiest rank in a step",
    ]
    for role, layout in (plan.report.layouts or {}).items():
        sizes_text = layout.short_text()
        if role == ROLLOUT.name:
            sizes_text = f"TP{layout.tensor} x {_count_text(layout.data, 'replica')}"
        lines.append(f"     {role:<11} {_count_text(len(layout.ranks), 'GPU')}, {sizes_text}")
    return lines


def _count_text(number: int, noun: str) -> str:
    """Format a number with its noun, with a plural s unless the number is 1."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def _override_lines(overrides: Sequence[str]) -> list[str]:
    """Format the overrides of a layout as lines that can be pasted after a command."""
    # Break between overrides only: a quoted value may contain spaces.
    lines = [""]
    for override in overrides:
        quoted_override = shlex.quote(override)
        if lines[-1] and len(lines[-1]) + len(quoted_override) >= _OVERRIDE_WIDTH:
            lines.append("")
        lines[-1] += f" {quoted_override}"
    labels = ["overrides", *[""] * (len(lines) - 1)]
    return [f"     {label:<11}{line}" for label, line in zip(labels, lines, strict=True)]


def configured_plan_record(plan: ConfiguredPlan) -> dict[str, Any]:
    """Convert a layout with its predictions to plain values for JSON: seconds and bytes."""
    return {
        "name": plan.name,
        "overrides": list(plan.overrides),
        "seconds": {**plan.step.seconds, "total": plan.step.total},
        "memory": max(memory.peak for memory in plan.report.memory),
        "network": dict(plan.network),
        "reasons": list(plan.reasons),
    }
