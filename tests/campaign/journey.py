"""What a tiny run of `combinations` goes through once it has ended: resumed, moved, compared, handed on."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.campaign import kills, runs
from tests.campaign.campaign import HELD, Result, vague
from tests.campaign.features import ENVIRONMENT, HALF, REWARDS, STEPS
from tests.golden import record

PATIENCE = 420.0
CLOSE, FAR = 2e-3, 0.1
"""By how much a metric may differ between layouts, relatively: of the first step, and after two of Adam."""
NOTHING_LEFT = "no token of this step's responses is left to learn from"
"""What a run may end with, clearly: these models answer at random, and filters may take it all."""
UNCOMPARED = (*record.MEASURED, "reshard/", "rows/", "idle/", "offload/", "padding/")
"""Metrics of a step that belong to a layout."""


@dataclass(frozen=True)
class Trial:
    """Hold a case whose run has ended, and what it ``left``; ``onward`` are ranks and settings of others."""

    folder: Path
    work: Path
    config: dict[str, Any]
    ranks: int
    onward: tuple[int, dict[str, Any]]
    left: dict[str, Any]

    @property
    def repeatable(self) -> bool:
        """Say whether another run learns from the same samples."""
        return self.config["rollout"].get("order") != "open"

    @property
    def exact(self) -> bool:
        """Say whether another layout computes the same but for rounding: adapters drop other inputs there."""
        dropout = self.config["actor"].get("lora", {}).get("dropout")
        return self.config["model"]["dtype"] == "float32" and not dropout


def resume(trial: Trial) -> Result | bool:
    """End a run in the middle and start it again; say whether all that it left was compared."""
    config, ranks, folder = trial.config, trial.ranks, trial.folder
    if ahead(config):  # a run that ends does not sample ahead: its newest checkpoints are lost instead
        second = write(config, folder / "second", trial.work)
        shutil.copytree(folder / "whole/run", second.parent / "run")
        for step in range(HALF + 1, STEPS + 1):
            shutil.rmtree(second.parent / f"run/checkpoints/step_{step}")
        problem = train(second, ranks)
    else:
        second = write({**config, "steps": HALF}, folder / "halves", trial.work)
        problem = train(second, ranks)
        if problem is None:
            shutil.copytree(second.parent / "run", folder / "relaid/run")
        if problem is None and ranks > 1:
            shutil.copytree(second.parent / "run", folder / "moved/run")
        problem = problem or train(write(config, second.parent, trial.work), ranks)
    if problem is not None:
        return problem
    if not trial.repeatable:
        return False
    differences = list(_differences(trial.left, runs.recording(second.parent / "run"), config))
    if differences:
        return Result("lost", "resumed:\n" + "\n".join(differences[:40]))
    return True


def move(trial: Trial) -> Result | bool:
    """Go on on one rank from the middle of the run; say whether it did."""
    return _go_on(trial, "moved", 1, _alone(trial.config))


def relay(trial: Trial) -> Result | bool:
    """Go on on other ranks in another layout from the middle of the run; say whether it did."""
    return _go_on(trial, "relaid", *trial.onward)


def _go_on(trial: Trial, name: str, ranks: int, config: dict[str, Any]) -> Result | bool:
    """Go on from the middle of the run that lies below ``name``, where it does; say whether it did."""
    folder = trial.folder / name
    if not folder.exists():
        return False
    file = write(config, folder, trial.work)
    code, shown = checked(file, ranks)
    if code == 2 and (errors := errors_of(shown)) and not vague(errors):
        return False
    if code:
        return Result("unclear", f"{name}: {told(shown)}")
    problem = train(file, ranks)
    if problem is not None:
        return problem
    wrong = list(_different_steps(trial.left, runs.recording(folder / "run"), str(HALF + 1), FAR))
    if wrong and trial.repeatable and trial.exact:
        return Result("lost", f"{name}:\n" + "\n".join(wrong[:20]))
    return True


def compare(trial: Trial) -> Result | bool:
    """Take the first step on one rank, where its numbers are the same; say whether it was compared."""
    if trial.ranks == 1 or not (trial.repeatable and trial.exact and _layout_is_nothing(trial.config)):
        return False
    alone = write(_alone({**trial.config, "steps": 1}), trial.folder / "alone", trial.work)
    problem = train(alone, 1)
    if problem is not None:
        return problem
    single = runs.recording(alone.parent / "run")
    wrong = list(_different_steps(trial.left, single, "1", CLOSE))
    if wrong:
        return Result("lost", "on one rank:\n" + "\n".join(wrong[:20]))
    return _same_samples(trial.left, single, "1")


def hand_on(trial: Trial) -> Result | bool:
    """Begin other runs with the weights and adapters that this one left; say whether any did."""
    ranks, config = trial.onward
    hf, dtype = trial.config["model"]["path"], trial.config["model"]["dtype"]
    run, taken, adapter = (trial.folder / name for name in ("whole/run", "whole/taken", "adapter"))
    starts: dict[str, dict[str, Any]] = {}
    if (run / "hf").exists():
        starts["exported"] = {"model": {"path": str(run / "hf")}}
    if taken.exists():
        starts["handed_on"] = {"model": {"megatron": str(taken), "hf_path": hf}}
    if "lora" in trial.config["actor"]:
        problem = _exported_adapters(run, adapter)
        if problem is not None:
            return problem
        starts["adapted"] = {"model": {"path": hf}, "actor": {"lora": {"path": str(adapter)}}}
    for name, start in starts.items():
        begun = {key: value for key, value in config.items() if key not in ("sft", "preference")}
        begun = runs.merged({**begun, "model": {"dtype": dtype}}, {**start, "steps": HALF})
        file = write(begun, trial.folder / name, trial.work)
        code, shown = checked(file, ranks)
        errors = errors_of(shown) if code == 2 else []
        if code and (not errors or vague(errors)):
            return Result("unclear", f"{name}: {told(shown)}")
        problem = None if code else train(file, ranks)
        if problem is not None:
            return replace(problem, detail=f"{name}: {problem.detail}")
    return bool(starts)


def _exported_adapters(run: Path, target: Path) -> Result | None:
    """Write the newest checkpoint's adapters as PEFT does; return what went wrong, None where nothing did."""
    checkpoint = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    command = [sys.executable, "-m", "megatron_rl", "export", str(checkpoint), "--format", "peft"]
    command += ["--out", str(target)]
    ended = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, env=record.environment())
    return Result("accepted", ended.stderr[-2000:]) if ended.returncode else None


def ahead(config: Mapping[str, Any]) -> bool:
    """Say whether a configuration samples for later steps than the one that it learns."""
    return bool(config.get("asynchrony"))


def _differences(
    expected: Mapping[str, Any], resumed: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what a resumed run left otherwise than the one that was not interrupted.

    Where the clock says which rows are computed together, the last digits of the rollout's log-probs differ.
    """
    rollout = config["rollout"]
    clock = {*rollout, *rollout.get("vllm", {})} & {"environment", "max_in_flight", "max_num_seqs"}
    pieces = str(config.get("algorithm"))
    if clock and ("correction" in pieces or "topr" in pieces):  # these learn with the rollout's log-probs
        return
    for line in kills.differing(expected, resumed):
        if not (clock and "mismatch/" in line):
            yield line


def _layout_is_nothing(config: Mapping[str, Any]) -> bool:
    """Say whether a step's numbers are those of one rank but for rounding."""
    stages = any(config.get(name) for name in ("sft", "preference")) or config["reward"].get("models")
    return (
        not stages  # several steps of Adam before it
        and not ahead(config)
        and not config["rollout"].get("oversample")
    )


def _alone(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for one rank."""
    return on_all_ranks(config, {})


def on_all_ranks(config: dict[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration with every role on every rank, in the actor's ``layout``."""
    config = {name: value for name, value in config.items() if name != "placement"}
    for role in ("actor", "critic", "reference"):
        if role in config:
            config[role] = {name: value for name, value in config[role].items() if name != "layout"}
    models = config["reward"].get("models", {})
    models = {name: {**model, "layout": {}} for name, model in models.items()}
    config["reward"] = {**config["reward"], "models": models}
    config["actor"] = {**config["actor"], "layout": dict(layout)}
    config["rollout"] = {**config["rollout"], "tensor": layout.get("tensor", 1)}
    return config


def write(config: Mapping[str, Any], folder: Path, work: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = config["checkpoint"]
    if "megatron" in checkpoint:
        config = {**config, "checkpoint": {**checkpoint, "megatron": str(folder / checkpoint["megatron"])}}
    code = folder.parent  # one for all of a case's runs: errors name the file
    (code / "environment.py").write_text(ENVIRONMENT)
    (code / "rewards.py").write_text(REWARDS)
    text = yaml.safe_dump(runs.placed(config, runs.material(work), code) | {"run_dir": str(folder / "run")})
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def checked(config: Path, ranks: int) -> tuple[int, str]:
    from megatron_rl.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        code = main(["check", str(config), "--world-size", str(ranks), "--json"])
    return code, output.getvalue()


def errors_of(shown: str) -> list[dict[str, Any]]:
    """Return the errors of a check, none where it said something else."""
    return json.loads(shown)["errors"] if shown.startswith("{") else []


def told(shown: str) -> str:
    """Return the errors of a check in one line, or what it said instead."""
    told = [f"{error['where']}: {error['message']}" for error in errors_of(shown)]
    return "; ".join(told) or shown[-2000:]


def train(config: Path, ranks: int) -> Result | None:
    """Train and return what went wrong, None where nothing did."""
    environment = {"CAMPAIGN_PORT": "9", "CAMPAIGN_LAUNCH": "1"}  # nobody listens to its phases
    launcher = runs.launch(config, ranks, restarts=0, env=environment)
    try:
        code = launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return Result("hang", kills.tail(config.parent))
    finally:
        left = runs.descendants(launcher) if launcher.poll() is not None else []
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait()
        for process in runs.descendants(launcher):
            process.kill()
    told = kills.tail(config.parent)
    if code and NOTHING_LEFT in told:
        return Result(HELD, NOTHING_LEFT)
    if code:
        return Result("accepted", f"READY, and `train` ended with {code}\n{told}")
    return Result("left over", f"{left}") if left else None


def _same_samples(first: Mapping[str, Any], second: Mapping[str, Any], step: str) -> bool:
    """Say whether two recorded runs sampled the same responses for a step."""
    samples = [run["samples"][f"step_{step}.parquet"]["response"] for run in (first, second)]
    return samples[0] == samples[1]


def _different_steps(
    first: Mapping[str, Any], second: Mapping[str, Any], step: str, tolerance: float
) -> Iterator[str]:
    """Yield the metrics of a step that differ between two recorded runs, where they sampled the same."""
    if not _same_samples(first, second, step):
        return
    steps = [run["metrics"]["metrics.jsonl"][step] for run in (first, second)]
    for name in sorted(steps[0].keys() & steps[1].keys()):
        if name.startswith(UNCOMPARED) or None in (steps[0][name], steps[1][name]):
            continue
        values = [float.fromhex(step[name]) for step in steps]
        if not math.isclose(*values, rel_tol=tolerance, abs_tol=tolerance / 10):
            yield f"{name}: {values[0]} and {values[1]}"


JOURNEY: Mapping[str, Callable[[Trial], Result | bool]] = {
    "resumed": resume,
    "moved": move,
    "relaid": relay,
    "compared": compare,
    "handed on": hand_on,
}
"""What a run that has ended goes through; each says whether it applied, or what went wrong."""
