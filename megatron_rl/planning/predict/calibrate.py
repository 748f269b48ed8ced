"""Fit efficiency factors to a run's own phase times.

A run folder holds the resolved configuration and metrics.jsonl with seconds per phase (time/generate, which
contains the weight sync, time/reshard, time/reward, time/score, time/learn). One factor per phase is all a
single run can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from megatron_rl.config.load import load
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.metrics import read_metrics
from megatron_rl.planning.predict.step import PHASES, Observed, RunStep, predict_run, role_shapes
from megatron_rl.shapes.hardware import Constants
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape

QUICKEST, SLOWEST = 4.0, 50.0
"""How much quicker and slower than predicted a phase can be: constants are shares of a GPU's own rates."""


def without_sync(step: Mapping[str, float]) -> dict[str, float]:
    """Return the disjoint seconds per phase of one line of metrics.jsonl; generate there holds the sync."""
    reshard = step.get("time/reshard", 0.0) + step.get("time/reshard_verify", 0.0)
    seconds = {name: max(0.0, step[f"time/{name}"]) for name in PHASES if f"time/{name}" in step}
    if "generate" in seconds:
        seconds["generate"] = max(0.0, seconds["generate"] - reshard)
    return seconds | ({"reshard": reshard} if reshard > 0 else {})


def _require(path: Path, where: str) -> Path:
    """Return the path of a file of a run folder; raises UserError where it is not there."""
    if path.is_file():
        return path
    raise UserError(
        f"no {path.name} in {path.parent}",
        where=where,
        expected=str(path),
        got="no such file",
        fix="give a run folder",
    )


def read_steps(run_dir: str | Path, where: str = "--calibrate") -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl that are steps, without the first, which warms up.

    Raises UserError where there are none.
    """
    path = _require(RunFolder(run_dir).metrics, where)
    lines = read_metrics(path)
    steps = [line for line in lines if without_sync(line)]
    if not steps:
        raise UserError(
            f"{path} has no phase times",
            where=where,
            expected="one of " + ", ".join(f"time/{name}" for name in PHASES),
            got=", ".join(sorted({name for line in lines for name in line})[:10]) or "no numbers",
            fix="give the folder of a run of at least one step",
        )
    return steps[1:] or steps


def observed(config: RunConfig, steps: list[dict[str, float]]) -> Observed:
    """Return the mean lengths that a run's steps tell: rows are the same number in each."""
    rows = config.batch.prompts_per_step * config.batch.samples_per_prompt

    def middle(name: str) -> float | None:
        return median(line[name] for line in steps) if all(name in line for line in steps) else None

    response = middle("response/length")
    rate, seconds = middle("throughput/tokens_per_second"), middle("time/step")
    if response is None or rate is None or seconds is None:
        return Observed(None, response)
    return Observed(max(1.0, rate * seconds / rows - response), response)


def measured_phases(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return median seconds per phase, and of what a step takes beside its phases as ``rest``."""
    seconds = [without_sync(line) for line in steps]
    phases = {
        name: median(values)
        for name in PHASES
        if (values := [step[name] for step in seconds if name in step])
    }
    rests = [
        line["time/step"] - sum(step.values())
        for line, step in zip(steps, seconds, strict=True)
        if "time/step" in line
    ]
    return {**phases, "rest": max(0.0, median(rests))} if rests else phases


def _with(constants: Constants, **values: float) -> Constants:
    return replace(constants, efficiency=SimpleNamespace(**{**vars(constants.efficiency), **values}))


def _train_factor(
    predict: Callable[[Constants], RunStep], constants: Constants, predicted: RunStep, seconds: float
) -> float:
    """Return rl_train for which training takes ``seconds``: computation scales, the exchange does not."""
    now = constants.efficiency.rl_train
    faster = predict(_with(constants, rl_train=2.0 * now)).seconds["learn"]
    scaling = 2.0 * (predicted.seconds["learn"] - faster)
    rest = predicted.seconds["learn"] - scaling
    return now * (scaling / (seconds - rest) if seconds > rest else predicted.seconds["learn"] / seconds)


def _require_plausible(phases: Mapping[str, tuple[float, float]], run_dir: str, gpu: str) -> None:
    """Raise UserErrors for phases that no machine with such GPUs takes so long for, or is so quick with."""
    errors = [
        UserError(
            f"the phase {name} of the run took {measured:.3g} s, where {predicted:.3g} s are predicted",
            where=f"{run_dir}/metrics.jsonl: time/{name}",
            expected=f"{predicted / QUICKEST:.3g} to {predicted * SLOWEST:.3g} s with {gpu}",
            got=f"{measured:.3g} s",
            fix="name the GPU that it ran on with --gpu; a run on the host or of a tiny model tells nothing",
        )
        for name, (predicted, measured) in phases.items()
        if name != "rest" and not predicted / QUICKEST <= measured <= predicted * SLOWEST
    ]
    if errors:
        raise UserErrors(errors)


def _own_shape(path: str, run_dir: str) -> ModelShape:
    """Return the shape of a run's model; raises UserError where its path leads nowhere from here."""
    try:
        return load_shape(path)
    except UserError as error:
        if Path(path).exists():
            raise
        raise UserError(
            "the model of the run is not there",
            where=f"{RunFolder(run_dir).config}: model.path",
            expected=f"{path}, from the current folder {Path.cwd()}",
            got="no such file or directory",
            fix="call the command in the folder where the run was started, or name the model: plan MODEL "
            f"--calibrate {run_dir}",
        ) from error


def calibrate(
    run_dir: str, gpu: str | None, constants: Constants, model: str | None = None
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return (constants override, {phase: (predicted, measured) seconds}) of a run folder.

    ``gpu`` None: the configuration's own, else h100. ``model`` stands for a model.path that is not here any
    more. Raises UserError when the folder has no configuration or no phase times.
    """
    steps = read_steps(run_dir)
    config = load(_require(RunFolder(run_dir).config, "--calibrate")).valid()
    lengths, measured = observed(config, steps), measured_phases(steps)
    shapes = role_shapes(config, lambda path: load_shape(model) if model else _own_shape(path, run_dir))

    def predict(with_constants: Constants) -> RunStep:
        return predict_run(config, with_constants, gpu or config.gpu or "h100", shapes, lengths)

    predicted = predict(constants)
    phases = {
        name: (predicted.seconds[name], measured[name])
        for name in PHASES
        if measured.get(name) and predicted.seconds[name]
    }
    if "rest" in measured:
        phases["rest"] = (predicted.step.fixed, measured["rest"])
    _require_plausible(phases, run_dir, gpu or config.gpu or "h100")
    efficiency: dict[str, float] = {}
    if "learn" in phases:
        efficiency["rl_train"] = _train_factor(predict, constants, predicted, measured["learn"])
    scoring = [name for name in ("score", "reward") if name in phases]
    if scoring:
        ratio = sum(phases[name][0] for name in scoring) / sum(phases[name][1] for name in scoring)
        efficiency["rl_log_probs"] = constants.efficiency.rl_log_probs * ratio
    if "rest" in phases:
        efficiency["rl_fixed_seconds"] = phases["rest"][1]
    override: dict[str, Any] = {"calibrated_from": str(run_dir)}
    if efficiency:
        override["efficiency"] = efficiency
    if "generate" in phases:
        slower = phases["generate"][1] / phases["generate"][0]
        override["decode"] = {
            "rl_generate": constants.decode.rl_generate / slower,
            "rl_fixed_seconds": constants.decode.rl_fixed_seconds * slower,
        }
    if "reshard" in phases:
        slower = phases["reshard"][1] / phases["reshard"][0]
        override["weight_sync"] = {
            "planned_fixed_seconds": constants.weight_sync.planned_fixed_seconds * slower,
            "planned_network": constants.weight_sync.planned_network / slower,
            "planned_nvlink": constants.weight_sync.planned_nvlink / slower,
        }
    return override, phases
