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
"""Key of the seconds of a step that belong to no phase."""


def phase_seconds(step: Mapping[str, float]) -> dict[str, float]:
    """Return the disjoint seconds per phase of one line of metrics.jsonl.

    time/generate in the file includes the weight sync, which is a separate phase here.
    """
    seconds: dict[str, float] = {}
    for phase in PHASES:
        key = f"time/{phase}"
        if key in step:
            seconds[phase] = max(0.0, step[key])

    reshard = step.get("time/reshard", 0.0) + step.get("time/reshard_verify", 0.0)
    if "generate" in seconds:
        seconds["generate"] = max(0.0, seconds["generate"] - reshard)
    if reshard > 0:
        seconds["reshard"] = reshard
    return seconds


def _require_file(path: Path, option: str) -> Path:
    """Return ``path``, a file in a run folder; raise UserError about ``option`` if it does not exist."""
    if path.is_file():
        return path
    raise missing_file_error(path, where=option, expected=str(path), fix="give a run folder")


def read_steps(run_dir: str | Path, option: str = "--calibrate") -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl that are steps, without the first one, which includes warm-up.

    Raises UserError for a run without steps.
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
            fix="give the folder of a run of at least one step",
        )

    return steps[1:] or steps


def run_stats(config: RunConfig, steps: list[dict[str, float]]) -> RunStats:
    """Return the mean lengths, in tokens, of prompts and responses in the ``steps`` of a run."""
    rows = config.batch.prompts_per_step * config.batch.samples_per_prompt

    def median_of(name: str) -> float | None:
        if not all(name in line for line in steps):
            return None
        return median(line[name] for line in steps)

    response = median_of("response/length")
    tokens_per_second = median_of("throughput/tokens_per_second")
    seconds = median_of("time/step")
    if response is None or tokens_per_second is None or seconds is None:
        return RunStats(None, response)

    # The measured throughput counts prompts and responses, so subtract the responses to get the prompts.
    mean_row = tokens_per_second * seconds / rows
    return RunStats(max(1.0, mean_row - response), response)


def median_phase_seconds(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase over steps, and of the rest of a step as ``rest``."""
    # Not every step has every phase.
    values: dict[str, list[float]] = defaultdict(list)
    remainders: list[float] = []
    for line in steps:
        seconds = phase_seconds(line)
        for phase, value in seconds.items():
            values[phase].append(value)
        if "time/step" in line:
            remainders.append(line["time/step"] - sum(seconds.values()))

    medians = {phase: median(values[phase]) for phase in PHASES if phase in values}
    if remainders:
        medians[_REST] = max(0.0, median(remainders))
    return medians


def _with_efficiency(constants: Constants, **values: float) -> Constants:
    """Return a copy of the constants in which the named efficiencies have new values."""
    efficiency = vars(constants.efficiency) | values
    return replace(constants, efficiency=SimpleNamespace(**efficiency))


def _fit_train_factor(
    predict: Callable[[Constants], RunStep],
    constants: Constants,
    predicted: RunStep,
    seconds: float,
) -> float:
    """Return the value of rl_train for which the predicted learn phase takes ``seconds``.

    Only computation scales with rl_train; a second prediction with twice the factor separates it from the
    gradient exchange.
    """
    factor = constants.efficiency.rl_train
    learn = predicted.seconds["learn"]

    # learn = compute + exchange, and with twice the factor compute / 2 + exchange.
    faster_constants = _with_efficiency(constants, rl_train=2.0 * factor)
    faster_learn = predict(faster_constants).seconds["learn"]
    compute_seconds = 2.0 * (learn - faster_learn)
    exchange_seconds = learn - compute_seconds

    # If the run is faster than the predicted exchange alone, scale the complete phase.
    if seconds > exchange_seconds:
        return factor * (compute_seconds / (seconds - exchange_seconds))
    return factor * (learn / seconds)


def _require_plausible(phases: Mapping[str, tuple[float, float]], run_dir: str, gpu: str) -> None:
    """Raise UserErrors for phases that are implausibly fast or slow for the GPU.

    ``phases``: (predicted, measured) seconds by phase.
    """
    errors = []
    for name, (predicted, seconds) in phases.items():
        # The remainder of a step is time of the host, which has no bounds.
        if name == _REST:
            continue
        lower_bound = predicted / MAX_SPEEDUP
        upper_bound = predicted * MAX_SLOWDOWN
        if lower_bound <= seconds <= upper_bound:
            continue

        error = UserError(
            f"the phase {name} of the run took {seconds:.3g} s, where {predicted:.3g} s are predicted",
            where=f"{run_dir}/metrics.jsonl: time/{name}",
            expected=f"{lower_bound:.3g} to {upper_bound:.3g} s with {gpu}",
            got=f"{seconds:.3g} s",
            fix="name the GPU that it ran on with --gpu; a run on the host does not calibrate",
        )
        errors.append(error)
    if errors:
        raise UserErrors(errors)


def _load_run_shape(path: str, run_dir: str) -> ModelShape:
    """Return the shape of the model of a run; raise UserError if the model's path does not exist."""
    try:
        return load_shape(path)
    except UserError as error:
        if Path(path).exists():
            raise

        # A relative path depends on the folder in which the run was started.
        raise UserError(
            "the run's model was not found",
            where=f"{RunFolder(run_dir).config}: model.path",
            expected=f"{path}, from the current folder {Path.cwd()}",
            got="no such file or directory",
            fix="call the command in the folder where the run was started, or name the model: plan MODEL "
            f"--calibrate {run_dir}",
        ) from error


def calibrate(
    run_dir: str,
    gpu: str | None,
    constants: Constants,
    model: str | None = None,
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return (constants override, {phase: (predicted, measured) seconds}) of a run folder.

    ``gpu`` defaults to the configuration's GPU, or to h100 if it names none. ``model`` replaces a model.path
    that no longer exists. Raises UserError if the folder has no configuration or no phase times.
    """
    steps = read_steps(run_dir)
    config = load(_require_file(RunFolder(run_dir).config, "--calibrate")).valid()
    gpu_name = gpu or config.gpu or _DEFAULT_GPU
    stats = run_stats(config, steps)
    seconds = median_phase_seconds(steps)

    def shape_of(path: str) -> ModelShape:
        if model:
            return load_shape(model)
        return _load_run_shape(path, run_dir)

    shapes = role_shapes(config, shape_of)

    def predict(with_constants: Constants) -> RunStep:
        return predict_run(config, with_constants, gpu_name, shapes, stats)

    # Compare the phases that were both predicted and measured.
    predicted = predict(constants)
    phases: dict[str, tuple[float, float]] = {}
    for name in PHASES:
        if seconds.get(name) and predicted.seconds[name]:
            phases[name] = (predicted.seconds[name], seconds[name])
    if _REST in seconds:
        phases[_REST] = (predicted.step.fixed, seconds[_REST])
    _require_plausible(phases, run_dir, gpu_name)

    override: dict[str, Any] = {"calibrated_from": str(run_dir)}
    efficiency: dict[str, float] = {}
    if "learn" in phases:
        efficiency["rl_train"] = _fit_train_factor(predict, constants, predicted, seconds["learn"])
    # Score and reward have a common efficiency, since both are forward passes.
    slowdown = _slowdown(phases, "score", "reward")
    if slowdown is not None:
        efficiency["rl_log_probs"] = constants.efficiency.rl_log_probs / slowdown
    if _REST in phases:
        efficiency["rl_fixed_seconds"] = seconds[_REST]
    if efficiency:
        override["efficiency"] = efficiency

    # Generation has one factor, which also scales its fixed time.
    slowdown = _slowdown(phases, "generate")
    if slowdown is not None:
        override["decode"] = {
            "rl_generate": constants.decode.rl_generate / slowdown,
            "rl_fixed_seconds": constants.decode.rl_fixed_seconds * slowdown,
        }

    # A weight sync has one factor for all links.
    slowdown = _slowdown(phases, "reshard")
    if slowdown is not None:
        weight_sync = constants.weight_sync
        override["weight_sync"] = {
            "planned_fixed_seconds": weight_sync.planned_fixed_seconds * slowdown,
            "planned_network": weight_sync.planned_network / slowdown,
            "planned_nvlink": weight_sync.planned_nvlink / slowdown,
        }
    return override, phases


def _slowdown(phases: Mapping[str, tuple[float, float]], *names: str) -> float | None:
    """Return the ratio of measured to predicted seconds of the named phases together.

    ``phases``: name -> (predicted, measured) seconds. Returns None if none of the phases was measured.
    """
    predicted_seconds = 0.0
    measured_seconds = 0.0
    for name in names:
        if name in phases:
            predicted, seconds = phases[name]
            predicted_seconds += predicted
            measured_seconds += seconds

    if not predicted_seconds:
        return None
    return measured_seconds / predicted_seconds
