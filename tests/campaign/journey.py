"""What a tiny run of `combinations` goes through once it has ended: resumed, moved, compared, handed on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.campaign import kills, runs
from tests.campaign.campaign import Result, vague
from tests.campaign.commands import checked, commanded, errors_of, told, train, write
from tests.campaign.features import HALF, STEPS
from tests.golden import record

CLOSE = 2e-3
FAR = 0.1
"""By how much a metric may differ between layouts, relatively: of the first step, and after two of Adam."""
ASKED = tuple(
    f"reward/{server}/{count}"
    for server in ("http", "judge")
    for count in ("requests", "retries", "rate_limited", "cache_hits")
)
"""Metrics of what a server was asked: it may be busy another time, and a cache is of one process."""
UNCOMPARED = (*record.MEASURED, "reshard/", "rows/", "idle/", "offload/", "padding/")
"""Metrics of a step that belong to a layout."""


@dataclass(frozen=True)
class Trial:
    """Hold a case whose run has ended, and what it ``left``; ``onward`` are ranks and settings of others.

    ``stopped``: the run that is compared with it is stopped by a signal, instead of ended in the middle.
    """

    folder: Path
    work: Path
    config: dict[str, Any]
    ranks: int
    onward: tuple[int, dict[str, Any]]
    left: dict[str, Any]
    stopped: bool = False

    @property
    def run(self) -> Path:
        """Return the folder of the run that has ended."""
        return self.folder / "whole/run"

    @property
    def repeatable(self) -> bool:
        """Say whether another run learns from the same samples."""
        return self.config["rollout"].get("order") != "open"

    @property
    def exact(self) -> bool:
        """Say whether another layout computes the same but for rounding.

        What is dropped is drawn by each rank; and where ``|log_probs - old_log_probs|`` is a loss its slope
        at old weights is the sign of a rounding, unless old log-probs are the pass's own.
        """
        actor = self.config["actor"]
        drawn = {"attention_dropout", "hidden_dropout", "moe_input_jitter_eps"} & {*actor.get("megatron", {})}
        dropout = drawn or actor.get("lora", {}).get("dropout")
        several = {"optimizer_steps", "epochs"} & {*self.config["batch"]}
        signs = several and "kl_cov" in str(self.config.get("algorithm"))
        return self.config["model"]["dtype"] == "float32" and not dropout and not signs


def resume(trial: Trial) -> Result | bool:
    """Interrupt a run and start it again; say whether all that it left was compared."""
    config = trial.config
    ranks = trial.ranks
    folder = trial.folder
    if trial.stopped:
        second = write(config, folder / "second", trial.work)
        problem = train(second, ranks, stop=True)
        _keep_half(trial)
    elif ahead(config):  # a run that ends does not sample ahead: its newest checkpoints are lost instead
        second = write(config, folder / "second", trial.work)
        problem = None
        _shorten(trial.run, second.parent / "run")
    else:
        second = write({**config, "steps": HALF}, folder / "second", trial.work)
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
        how = "stopped" if trial.stopped else "ended"
        return Result("lost", f"{how} and resumed:\n" + "\n".join(differences[:40]))
    return True


def _keep_half(trial: Trial) -> None:
    """Leave the run as it was in its middle, for those that go on from there, where it still has that."""
    if ahead(trial.config) or not (trial.run / f"checkpoints/step_{HALF}").exists():
        return
    _shorten(trial.run, trial.folder / "relaid/run")
    if trial.ranks > 1:
        _shorten(trial.run, trial.folder / "moved/run")


def _shorten(run: Path, target: Path) -> None:
    """Copy a run without the checkpoints after its middle."""
    shutil.copytree(run, target)
    for step in range(HALF + 1, STEPS + 1):
        shutil.rmtree(target / f"checkpoints/step_{step}", ignore_errors=True)


def read(trial: Trial) -> Result | bool:
    """Have the commands that read a run read this one; its newest checkpoint is what it ended with."""
    out = trial.folder / "read"
    commands = {
        "report": ["report", str(trial.run)],
        "compare": ["compare", str(trial.run), str(trial.folder / "second/run"), "--out", str(out / "both")],
        "picture": [
            "check", str(trial.folder / "whole/config.yaml"), "--world-size", str(trial.ranks),
            "--picture", str(out / "picture.svg"),
        ],
    }  # fmt: skip

    newest = newest_checkpoint(trial.run)
    ended = newest.name == f"step_{STEPS}" and (trial.run / "hf").exists()
    if ended:
        commands["export"] = ["export", str(newest), "--out", str(out / "hf")]

    out.mkdir()
    for name, words in commands.items():
        code, said, errors = commanded(words, out / f"{name}.log")
        if code:
            return Result("accepted", f"{name} ended with {code}: {said[-2000:]}{errors[-2000:]}")

    if ended and record.tensor_digests(out / "hf") != record.tensor_digests(trial.run / "hf"):
        return Result("lost", "the newest checkpoint, exported, is not what the run left in hf")
    return True


def evaluate(trial: Trial) -> Result | bool:
    """Answer the evaluation sets again with the newest checkpoint, where the run did; compare the metrics."""
    sets = trial.config.get("evaluation", {}).get("sets", {})
    newest = newest_checkpoint(trial.run)
    if not sets:
        return False

    file = write(trial.config, trial.folder / "again", trial.work)
    problem = train(file, trial.ranks, "--checkpoint", str(newest), command="eval")
    if problem is not None:
        return replace(problem, detail=f"eval: {problem.detail}")

    said = (file.parent / "output").read_text()
    step = newest.name.removeprefix("step_")
    known = trial.left["metrics"]["metrics.jsonl"].get(step, {})

    greedy = [f"eval/{name}/reward" for name, one in sets.items() if not _is_drawn(one)]
    for name in greedy if trial.exact else ():
        if known.get(name) is None:
            continue
        line = next((line.split() for line in said.splitlines() if line.split()[:1] == [name]), None)
        value = float.fromhex(known[name])
        if line is None or not math.isclose(float(line[1]), value, rel_tol=1e-2, abs_tol=1e-3):
            return Result("lost", f"eval says {line} where the run measured {value}")
    return True


def _is_drawn(one: Any) -> bool:
    return isinstance(one, Mapping) and bool(one.get("temperature"))


def stage_alone(trial: Trial) -> Result | bool:
    """Run the first stage as a job of its own; what it leaves is what the run began with."""
    stage, job = next(
        ((name, job) for name, job in (("sft", "sft"), ("preference", "prefer")) if name in trial.config),
        (None, None),
    )

    if stage is None or job is None:
        return False

    kept = trial.run / f"stages/{stage}/hf"
    file = write(trial.config, trial.folder / job, trial.work)
    problem = train(file, trial.ranks, command=job)
    if problem is not None:
        return replace(problem, detail=f"{job}: {problem.detail}")
    if not kept.exists() or not (file.parent / "run/hf").exists():
        return False
    if record.tensor_digests(kept) != record.tensor_digests(file.parent / "run/hf"):
        return Result("lost", f"the job {job} leaves other weights than the stage of the run")
    return True


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.split("_")[1]))


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
    hf = trial.config["model"]["path"]
    dtype = trial.config["model"]["dtype"]
    run, taken, adapter = (trial.folder / name for name in ("whole/run", "whole/taken", "adapter"))
    resumable = not trial.config["actor"]["optimizer"].get("name")

    starts: dict[str, dict[str, Any]] = {}
    if (run / "hf").exists():
        starts["exported"] = {"model": {"path": str(run / "hf")}}
    if taken.exists():
        starts["handed_on"] = {"model": {"megatron": str(taken), "hf_path": hf}}
        if resumable and "lora" not in trial.config["actor"]:
            starts["continued"] = runs.merged(starts["handed_on"], {"model": {"resume_optimizer": True}})

    if "lora" in trial.config["actor"]:
        problem = _exported_adapters(run, adapter)
        if problem is not None:
            return problem
        starts["adapted"] = {"model": {"path": hf}, "actor": {"lora": {"path": str(adapter)}}}

    judge = run / "reward_models/judge"
    if judge.exists():
        model = {"path": str(judge), "training": None, "layout": {}, "weight": 0.5}
        starts["judged"] = {"model": {"path": hf}, "reward": {"models": {"judge": model}}}
        if "critic" in config:
            starts["judged"]["critic"] = {"path": str(judge)}

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
    words = ["export", str(newest_checkpoint(run)), "--format", "peft", "--out", str(target)]
    code, _, errors = commanded(words, target.with_suffix(".log"))
    return Result("accepted", errors[-2000:]) if code else None


def ahead(config: Mapping[str, Any]) -> bool:
    """Say whether a configuration samples for later steps than the one that it learns."""
    return bool(config.get("asynchrony"))


def _differences(
    expected: Mapping[str, Any],
    resumed: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what a resumed run left otherwise than the one that was not interrupted.

    Where the clock says which rows are computed together, the last digits of the rollout's log-probs differ.
    """
    rollout = config["rollout"]
    small = {"environment", "max_in_flight", "max_num_seqs", "max_num_batched_tokens"}
    clock = {*rollout, *rollout.get("vllm", {})} & small

    pieces = str(config.get("algorithm"))
    if clock and ("correction" in pieces or "topr" in pieces):  # these learn with the rollout's log-probs
        return

    for line in kills.differing(expected, resumed):
        if not (clock and "mismatch/" in line) and not any(name in line for name in ASKED):
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


def _same_samples(first: Mapping[str, Any], second: Mapping[str, Any], step: str) -> bool:
    """Say whether two recorded runs sampled the same responses for a step."""
    samples = [run["samples"][f"step_{step}.parquet"]["response"] for run in (first, second)]
    return samples[0] == samples[1]


def _different_steps(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    step: str,
    tolerance: float,
) -> Iterator[str]:
    """Yield the metrics of a step that differ between two recorded runs, where they sampled the same."""
    if not _same_samples(first, second, step):
        return

    steps = [run["metrics"]["metrics.jsonl"][step] for run in (first, second)]
    for name in sorted(steps[0].keys() & steps[1].keys()):
        if name.startswith((*UNCOMPARED, *ASKED)) or None in (steps[0][name], steps[1][name]):
            continue
        values = [float.fromhex(step[name]) for step in steps]
        if not math.isclose(*values, rel_tol=tolerance, abs_tol=tolerance / 10):
            yield f"{name}: {values[0]} and {values[1]}"


JOURNEY: Mapping[str, Callable[[Trial], Result | bool]] = {
    "resumed": resume,
    "read": read,
    "evaluated": evaluate,
    "stage alone": stage_alone,
    "moved": move,
    "relaid": relay,
    "compared": compare,
    "handed on": hand_on,
}
"""What a run that has ended goes through; each says whether it applied, or what went wrong."""
