"""Train features together that the other tests try apart.

A case draws a model family, ranks, and some of `FEATURES`, with a layout for each role. What `check` refuses
has to be a clear error. What it calls READY trains; ended in the middle and started again it equals the run
that was not, to the last bit; it goes on from there on one rank; and where the layout cannot matter its first
step is that of one rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.campaign import kills, runs
from tests.campaign.campaign import HELD, Case, Result, vague
from tests.campaign.features import BASE, ENVIRONMENT, FEATURES, HALF, REWARDS, STEPS
from tests.campaign.forked import preload
from tests.golden import record

PATIENCE = 420.0
CLOSE, FAR = 2e-3, 0.1
"""By how much a metric may differ between layouts, relatively: of the first step, and after two of Adam."""
FAMILIES = (
    "qwen2", "qwen2", "llama3", "qwen3-tied", "gemma3", "qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe",
)  # fmt: skip
MIXTURES = ("qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe")
NOTHING_LEFT = "no token of this step's responses is left to learn from"
"""What a run may end with, clearly: these models answer at random, and filters may take it all."""
UNCOMPARED = (*record.MEASURED, "reshard/", "rows/", "idle/", "offload/", "padding/")
"""Metrics of a step that belong to a layout."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases of a seed."""
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        family = source.choice(FAMILIES)
        ranks = source.choice((1, 2, 2, 4, 4))
        several = [name for name in FEATURES if name != "mixture" or family in MIXTURES]
        chosen = {
            name: source.randrange(len(FEATURES[name]))
            for name in sorted(source.sample(several, source.randint(3, 8)), key=several.index)
        }
        apart = "apart" in chosen and ranks > 1
        if not apart:
            chosen.pop("apart", None)
        layout = _layout(source, family, ranks // 2 if apart else ranks)
        critic = _layout(source, family, ranks // 2 if apart else ranks) if source.random() < 0.3 else None
        settings = {"family": family, "ranks": ranks, "features": chosen, "layout": layout, "critic": critic}
        yield Case(f"{number:04d} {family} x{ranks}", family, settings)


def _layout(source: random.Random, family: str, ranks: int) -> dict[str, int]:
    """Draw how a model is cut over at most so many ranks."""
    layout, left = {}, ranks
    names = ["tensor", "pipeline", "context", *(["expert"] * (family in MIXTURES))]
    for name in source.sample(names, 2):
        size = source.choice((1, 2))
        if size <= left:
            layout[name], left = size, left // size
    if layout.get("pipeline") == 2 and source.random() < 0.3:
        layout["virtual_pipeline"] = 2
    return {name: size for name, size in layout.items() if size > 1}


def configuration(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a case."""
    config = dict(BASE)
    for name, index in settings["features"].items():
        config = runs.merged(config, FEATURES[name][index])
    config = runs.merged(config, {"actor": {"layout": settings["layout"]}})
    if "critic" in config and settings["critic"] is not None:
        config = runs.merged(config, {"critic": {"layout": settings["critic"]}})
    tensor = settings["layout"].get("tensor", 1)
    if settings["family"] == "deepseek-v3":  # vLLM has no latent attention of this size on hosts
        config = runs.merged(config, {"rollout": {"engine": "torch"}})
    if config["rollout"]["engine"] == "vllm":
        config = runs.merged(config, {"rollout": {"tensor": tensor}})
    if ahead(config):
        config = runs.merged(config, {"checkpoint": {"keep": STEPS}})
    return config


def try_case(case: Case, work: Path) -> Result:
    """Check a case's configuration, train it whole, in two halves, and a step on one rank."""
    preload()  # before anything that would leave a thread: ranks are forked
    settings = case.settings
    folder = work / case.name.split()[0]
    shutil.rmtree(folder, ignore_errors=True)
    config, ranks = configuration(settings), settings["ranks"]
    config["model"] = {**config["model"], "path": str(_model(settings["family"], work))}
    whole = _write(config, folder / "whole", work)
    code, shown = _checked(whole, ranks)
    if code == 2:
        errors = _errors(shown)
        shutil.rmtree(folder)
        return Result(HELD if errors and not vague(errors) else "unclear", _told(shown), {"refused": 1})
    if code != 0:
        return Result("unclear", shown[-3000:])
    problem = _train(whole, ranks)
    if problem is not None:
        return problem
    trial = Trial(folder, work, config, ranks, runs.recording(whole.parent / "run"))
    counts = {"trained": 1.0}
    for name, step in (("resumed", resume), ("moved", move), ("compared", compare), ("handed on", hand_on)):
        ended = step(trial)
        if isinstance(ended, Result):
            return replace(ended, counts=counts)
        counts[name] = float(ended)
    shutil.rmtree(folder)
    return Result(HELD, counts=counts)


@dataclass(frozen=True)
class Trial:
    """Hold a case whose run has ended, and what it ``left``."""

    folder: Path
    work: Path
    config: dict[str, Any]
    ranks: int
    left: dict[str, Any]

    @property
    def repeatable(self) -> bool:
        """Say whether another run learns from the same samples."""
        return self.config["rollout"].get("order") != "open"


def resume(trial: Trial) -> Result | bool:
    """End a run in the middle and start it again; say whether all that it left was compared."""
    config, ranks, folder = trial.config, trial.ranks, trial.folder
    if ahead(config):  # a run that ends does not sample ahead: its newest checkpoints are lost instead
        second = _write(config, folder / "second", trial.work)
        shutil.copytree(folder / "whole/run", second.parent / "run")
        for step in range(HALF + 1, STEPS + 1):
            shutil.rmtree(second.parent / f"run/checkpoints/step_{step}")
        problem = _train(second, ranks)
    else:
        second = _write({**config, "steps": HALF}, folder / "halves", trial.work)
        problem = _train(second, ranks)
        if problem is None and ranks > 1:
            shutil.copytree(second.parent / "run", folder / "moved/run")
        problem = problem or _train(_write(config, second.parent, trial.work), ranks)
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
    folder = trial.folder / "moved"
    if not folder.exists():
        return False
    problem = _train(_write(_alone(trial.config), folder, trial.work), 1)
    if problem is not None:
        return problem
    wrong = list(_different_steps(trial.left, runs.recording(folder / "run"), str(HALF + 1), FAR))
    if wrong and trial.repeatable and trial.config["model"]["dtype"] == "float32":
        return Result("lost", "resumed on one rank:\n" + "\n".join(wrong[:20]))
    return True


def compare(trial: Trial) -> Result | bool:
    """Take the first step on one rank, where its numbers are the same; say whether it was compared."""
    if trial.ranks == 1 or not trial.repeatable or not _layout_is_nothing(trial.config):
        return False
    alone = _write(_alone({**trial.config, "steps": 1}), trial.folder / "alone", trial.work)
    problem = _train(alone, 1)
    if problem is not None:
        return problem
    single = runs.recording(alone.parent / "run")
    wrong = list(_different_steps(trial.left, single, "1", CLOSE))
    if wrong:
        return Result("lost", "on one rank:\n" + "\n".join(wrong[:20]))
    return _same_samples(trial.left, single, "1")


def hand_on(trial: Trial) -> Result | bool:
    """Begin another run with the weights that were left for Megatron-LM, if any were."""
    taken = trial.folder / "whole/taken"
    if not taken.exists():
        return False
    model = {"megatron": str(taken), "hf_path": trial.config["model"]["path"]}
    stages = ("sft", "preference")
    config = {name: value for name, value in trial.config.items() if name not in stages}
    config["model"] = {"dtype": trial.config["model"]["dtype"], **model}
    second = _write({**config, "steps": HALF}, trial.folder / "handed_on", trial.work)
    code, shown = _checked(second, trial.ranks)
    if code:
        return Result("unclear", f"handed on: {_told(shown)}")
    return _train(second, trial.ranks) or True


def ahead(config: Mapping[str, Any]) -> bool:
    """Say whether a configuration samples for later steps than the one that it learns."""
    return bool(config.get("asynchrony"))


def _differences(
    expected: Mapping[str, Any], resumed: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what a resumed run left otherwise than the one that was not interrupted.

    Where the clock says which rows are computed together, the last digits of the rollout's log-probs differ.
    """
    clock = config["rollout"].keys() & {"environment", "max_in_flight"}
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
        config["model"]["dtype"] == "float32"
        and not stages  # several steps of Adam before it
        and not ahead(config)
        and not config["rollout"].get("oversample")
    )


def _alone(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for one rank."""
    config = {name: value for name, value in config.items() if name != "placement"}
    for role in ("actor", "critic", "reference"):
        if role in config:
            config[role] = {name: value for name, value in config[role].items() if name != "layout"}
    config["rollout"] = {name: value for name, value in config["rollout"].items() if name != "tensor"}
    return config


def _model(family: str, work: Path) -> Path:
    """Return a tiny model of a family with the quickstart's tokenizer, made once."""
    dense, target = runs.material(work) / "model", work / "models" / family
    if not target.exists():
        # vLLM has no attention of 16 numbers a head on hosts.
        record.make_model(family, dense, target, hidden_size=128)
    return target


def _write(config: Mapping[str, Any], folder: Path, work: Path) -> Path:
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


def _checked(config: Path, ranks: int) -> tuple[int, str]:
    from megatron_rl.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        code = main(["check", str(config), "--world-size", str(ranks), "--json"])
    return code, output.getvalue()


def _errors(shown: str) -> list[dict[str, Any]]:
    """Return the errors of a check, none where it said something else."""
    return json.loads(shown)["errors"] if shown.startswith("{") else []


def _told(shown: str) -> str:
    """Return the errors of a check in one line, or what it said instead."""
    told = [f"{error['where']}: {error['message']}" for error in _errors(shown)]
    return "; ".join(told) or shown[-2000:]


def _train(config: Path, ranks: int) -> Result | None:
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
