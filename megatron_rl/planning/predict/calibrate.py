"""Fit efficiency factors to the measured phase times of a run.

A run folder contains the resolved configuration and metrics.jsonl with seconds per phase (time/generate,
which includes the weight sync, time/reshard, time/reward, time/score, time/learn). A single run can only
identify one factor per phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from megatron_rl.config.load import load
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, UserErrors, missing_file_error
from megatron_rl.metrics import read_metrics
from megatron_rl.planning.predict.step import PHASES, RunStats, RunStep, predict_run, role_shapes
from megatron_rl.shapes.hardware import Constants
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape

MAX_SPEEDUP = 4.0
"""Largest plausible ratio of predicted to measured seconds: efficiencies are fractions of peak rates."""
MAX_SLOWDOWN = 50.0
"""Largest plausible ratio of measured to predicted seconds, if the run used the GPU of the prediction."""
LISTED_METRICS = 10
"""Largest number of metrics that an error lists."""
_DEFAULT_GPU = "h100"
_REST = "rest"
"""Key for the seconds of a step outside of all phases."""


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase from one line of metrics.jsonl.

    In the file time/generate includes the weight sync. Here the weight sync is a separate phase.
    """
    seconds: dict[str, float] = {}
    for phase in PHASES:
        key = f"time/{phase}"
        if key in metrics:
            seconds[phase] = max(0.0, metrics[key])

    reshard_seconds = metrics.get("time/reshard", 0.0) + metrics.get("time/reshard_verify", 0.0)
    if "generate" in seconds:
        seconds["generate"] = max(0.0, seconds["generate"] - reshard_seconds)
    if reshard_seconds > 0:
        seconds["reshard"] = reshard_seconds
    return seconds


def _require_file(path: Path, option: str) -> Path:
    """Return ``path`` if the file exists; otherwise raise UserError with the command-line ``option``."""
    if path.is_file():
        return path
    raise missing_file_error(path, where=option, expected=str(path), fix="give a run folder")


def read_steps(run_dir: str | Path, option: str = "--calibrate") -> list[dict[str, float]]:
    """Read the metrics of a run's steps, without the first step, which includes warm-up.

    If the run has only one step, that step is returned. Raises UserError for a run without steps.
    """
    path = _require_file(RunFolder(run_dir).metrics, option)
    lines = read_metrics(path)
    # Evaluation lines have no phase times.
    steps = [line for line in lines if phase_seconds(line)]
    if not steps:
        metric_names: set[str] = set()
        for line in lines:
            metric_names.update(line)
        raise UserError(
            f"{path} has no phase times",
            where=option,
            expected="one of " + ", ".join(f"time/{name}" for name in PHASES),
            got=", ".join(sorted(metric_names)[:LISTED_METRICS]) or "no numbers",
            fix="give the folder of a run with at least one step",
        )

    if len(steps) == 1:
        return steps
    return steps[1:]


def estimate_run_stats(config: RunConfig, steps: list[dict[str, float]]) -> RunStats:
    """Estimate the mean lengths of a run's prompts and responses from the metrics of its steps.

    Each metric is reduced to its median over all steps.
    """
    rows = config.batch.prompts_per_step * config.batch.samples_per_prompt

    def median_metric(name: str) -> float | None:
        """Return the median of a metric over all steps, or None if a step does not have it."""
        if not all(name in line for line in steps):
            return None
        return median(line[name] for line in steps)

    response_length = median_metric("response/length")
    tokens_per_second = median_metric("throughput/tokens_per_second")
    step_seconds = median_metric("time/step")
    if response_length is None or tokens_per_second is None or step_seconds is None:
        return RunStats(None, response_length)

    # The measured throughput counts prompts and responses, so subtract the responses to get the prompts.
    mean_row_length = tokens_per_second * step_seconds / rows
    return RunStats(max(1.0, mean_row_length - response_length), response_length)


def median_phase_seconds(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over steps; ``rest`` has the seconds outside of all phases."""
    # Not every step has every phase.
    seconds_by_phase: dict[str, list[float]] = defaultdict(list)
    rest_seconds: list[float] = []
    for line in steps:
        step_seconds = phase_seconds(line)
        for phase, seconds in step_seconds.items():
            seconds_by_phase[phase].append(seconds)
        if "time/step" in line:
            rest_seconds.append(line["time/step"] - sum(step_seconds.values()))

    medians = {phase: median(seconds_by_phase[phase]) for phase in PHASES if phase in seconds_by_phase}
    if rest_seconds:
        medians[_REST] = max(0.0, median(rest_seconds))
    return medians


def _with_efficiency(constants: Constants, **efficiencies: float) -> Constants:
    """Return a copy of the constants with new values of the named efficiencies."""
    efficiency = vars(constants.efficiency) | efficiencies
    return replace(constants, efficiency=SimpleNamespace(**efficiency))


def _fit_train_efficiency(
    predict_with: Callable[[Constants], RunStep],
    constants: Constants,
    predicted: RunStep,
    measured_seconds: float,
) -> float:
    """Return the ``rl_train`` at which the predicted time of the learn phase equals the measured time.

    ``rl_train`` is the planner's efficiency of training computation. ``predicted`` is the prediction with the
    current value. A second prediction with twice the value separates computation, which gets twice as fast,
    from the gradient exchange, which does not change.
    """
    efficiency = constants.efficiency.rl_train
    learn_seconds = predicted.seconds["learn"]

    # The phase takes compute + exchange seconds. At twice the efficiency it takes compute / 2 + exchange.
    faster_constants = _with_efficiency(constants, rl_train=2.0 * efficiency)
    faster_learn_seconds = predict_with(faster_constants).seconds["learn"]
    compute_seconds = 2.0 * (learn_seconds - faster_learn_seconds)
    exchange_seconds = learn_seconds - compute_seconds

    # If the run is faster than the predicted exchange alone, scale the complete phase.
    if measured_seconds > exchange_seconds:
        return efficiency * (compute_seconds / (measured_seconds - exchange_seconds))
    return efficiency * (learn_seconds / measured_seconds)


def _require_plausible_seconds(
    seconds_by_phase: Mapping[str, tuple[float, float]], run_dir: str, gpu: str
) -> None:
    """Raise UserErrors for phases that are implausibly fast or slow for the GPU.

    ``seconds_by_phase``: (predicted, measured) seconds by phase.
    """
    errors = []
    for name, (predicted_seconds, measured_seconds) in seconds_by_phase.items():
        # Do not check the time outside of all phases: it is CPU time, for which no bounds are known.
        if name == _REST:
            continue
        lower_bound = predicted_seconds / MAX_SPEEDUP
        upper_bound = predicted_seconds * MAX_SLOWDOWN
        if lower_bound <= measured_seconds <= upper_bound:
            continue

        error = UserError(
            f"the phase {name} of the run took {measured_seconds:.3g} s, where "
            f"{predicted_seconds:.3g} s are predicted",
            where=f"{run_dir}/metrics.jsonl: time/{name}",
            expected=f"{lower_bound:.3g} to {upper_bound:.3g} s with {gpu}",
            got=f"{measured_seconds:.3g} s",
            fix="name the GPU that it ran on with --gpu; a run on CPUs cannot be used",
        )
        errors.append(error)
    if errors:
        raise UserErrors(errors)


def _load_run_shape(model_path: str, run_dir: str) -> ModelShape:
    """Return the shape of a run's model; raise UserError if the model's path does not exist."""
    try:
        return load_shape(model_path)
    except UserError as error:
        if Path(model_path).exists():
            raise

        # A relative path depends on the folder in which the run was started.
        raise UserError(
            "the run's model was not found",
            where=f"{RunFolder(run_dir).config}: model.path",
            expected=f"{model_path}, from the current folder {Path.cwd()}",
            got="no such file or directory",
            fix="call the command in the folder where the run was started, or name the model: plan MODEL "
            f"--calibrate {run_dir}",
        ) from error


def calibrate_constants(
    run_dir: str,
    gpu: str | None,
    constants: Constants,
    model: str | None = None,
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Fit the planner's constants to the phase times of a run.

    Returns (override of the constants, {phase: (predicted, measured) seconds}).

    ``gpu`` defaults to the configuration's GPU, then to h100. ``model`` replaces a model.path that no longer
    exists. Raises UserError if the folder has no configuration or no phase times.
    """
    steps = read_steps(run_dir)
    config = load(_require_file(RunFolder(run_dir).config, "--calibrate")).valid()
    gpu_name = gpu or config.gpu or _DEFAULT_GPU
    stats = estimate_run_stats(config, steps)
    measured_seconds = median_phase_seconds(steps)

    def shape_of(path: str) -> ModelShape:
        """Return the shape of the model at ``path``, or of ``model`` if it is set."""
        if model:
            return load_shape(model)
        return _load_run_shape(path, run_dir)

    shapes = role_shapes(config, shape_of)

    def predict_with(new_constants: Constants) -> RunStep:
        """Predict a step of the run with other constants."""
        return predict_run(config, new_constants, gpu_name, shapes, stats)

    # Compare the phases that were both predicted and measured.
    predicted_step = predict_with(constants)
    seconds_by_phase: dict[str, tuple[float, float]] = {}
    for name in PHASES:
        if measured_seconds.get(name) and predicted_step.seconds[name]:
            seconds_by_phase[name] = (predicted_step.seconds[name], measured_seconds[name])
    if _REST in measured_seconds:
        seconds_by_phase[_REST] = (predicted_step.step.fixed, measured_seconds[_REST])
    _require_plausible_seconds(seconds_by_phase, run_dir, gpu_name)

    override: dict[str, Any] = {"calibrated_from": str(run_dir)}
    efficiency: dict[str, float] = {}
    if "learn" in seconds_by_phase:
        efficiency["rl_train"] = _fit_train_efficiency(
            predict_with, constants, predicted_step, measured_seconds["learn"]
        )
    # The phases score and reward have a common efficiency, since both are forward passes.
    slowdown = _slowdown(seconds_by_phase, "score", "reward")
    if slowdown is not None:
        efficiency["rl_log_probs"] = constants.efficiency.rl_log_probs / slowdown
    if _REST in seconds_by_phase:
        efficiency["rl_fixed_seconds"] = measured_seconds[_REST]
    if efficiency:
        override["efficiency"] = efficiency

    # The phase generate has one factor, which also scales its fixed seconds.
    slowdown = _slowdown(seconds_by_phase, "generate")
    if slowdown is not None:
        override["decode"] = {
            "rl_generate": constants.decode.rl_generate / slowdown,
            "rl_fixed_seconds": constants.decode.rl_fixed_seconds * slowdown,
        }

    # The phase reshard (the weight sync) has one factor for all links.
    slowdown = _slowdown(seconds_by_phase, "reshard")
    if slowdown is not None:
        weight_sync = constants.weight_sync
        override["weight_sync"] = {
            "planned_fixed_seconds": weight_sync.planned_fixed_seconds * slowdown,
            "planned_network": weight_sync.planned_network / slowdown,
            "planned_nvlink": weight_sync.planned_nvlink / slowdown,
        }
    return override, seconds_by_phase


def _slowdown(seconds_by_phase: Mapping[str, tuple[float, float]], *names: str) -> float | None:
    """Return the ratio of measured to predicted seconds, summed over the named phases.

    ``seconds_by_phase``: name -> (predicted, measured) seconds. Returns None if no named phase was measured.
    """
    total_predicted = 0.0
    total_measured = 0.0
    for name in names:
        if name in seconds_by_phase:
            predicted_seconds, measured_seconds = seconds_by_phase[name]
            total_predicted += predicted_seconds
            total_measured += measured_seconds

    if not total_predicted:
        return None
    return total_measured / total_predicted
