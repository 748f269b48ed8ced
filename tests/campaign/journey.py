"""Steps that follow a finished run of `combinations`: resume, move, compare, and start other runs from it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.campaign import kills, runs
from tests.campaign.campaign import Result, incomplete_errors
from tests.campaign.commands import (
    check,
    error_summary,
    errors_of,
    run_command,
    train,
    write,
)
from tests.campaign.features import HALF, STEPS
from tests.golden import record

FIRST_STEP_TOLERANCE = 2e-3
"""Relative tolerance of metrics between layouts in the first step."""
LATER_TOLERANCE = 0.1
"""Relative tolerance of metrics between layouts after two steps of Adam."""
REQUEST_METRICS = tuple(
    f"reward/{server}/{count}"
    for server in ("http", "judge")
    for count in ("requests", "retries", "rate_limited", "cache_hits")
)
"""Metrics of a server's requests, which may be busy another time; each process has its own cache."""
UNCOMPARED = (
    *record.MEASURED,
    "reshard/",
    "rows/",
    "idle/",
    "offload/",
    "padding/",
)
"""Prefixes of metrics that depend on the machine or the layout."""


@dataclass(frozen=True)
class Trial:
    """Case whose run has finished."""

    folder: Path
    """Folder of the case's runs."""
    work: Path
    """Folder that all cases share."""
    config: dict[str, Any]
    """Configuration of the finished run."""
    ranks: int
    """Ranks of the finished run."""
    continuation: tuple[int, dict[str, Any]]
    """Ranks and configuration of the runs that continue in another layout."""
    reference: dict[str, Any]
    """Recording of the finished run."""
    stopped: bool = False
    """The run to compare is stopped by a signal, instead of ending in the middle."""

    @property
    def run(self) -> Path:
        """Return the folder of the finished run."""
        return self.folder / "whole/run"

    @property
    def repeatable(self) -> bool:
        """Return whether another run trains on the same samples."""
        return self.config["rollout"].get("order") != "open"

    @property
    def exact(self) -> bool:
        """Return whether another layout computes the same up to rounding.

        Each rank draws its own dropout. And the slope of ``|log_probs - old_log_probs|`` at the old weights
        is the sign of a rounding error, unless the old log-probs come from the same forward pass.
        """
        actor = self.config["actor"]
        random_settings = {
            "attention_dropout",
            "hidden_dropout",
            "moe_input_jitter_eps",
        } & {*actor.get("megatron", {})}
        dropout = random_settings or actor.get("lora", {}).get("dropout")
        repeated_updates = {"optimizer_steps", "epochs"} & {*self.config["batch"]}
        is_discontinuous = repeated_updates and "kl_cov" in str(self.config.get("algorithm"))
        return self.config["model"]["dtype"] == "float32" and not dropout and not is_discontinuous


def resume(trial: Trial) -> Result | bool:
    """Interrupt a run and resume it; return whether its result was compared, or the problem."""
    config = trial.config
    ranks = trial.ranks
    folder = trial.folder
    if trial.stopped:
        second_config = write(config, folder / "second", trial.work)
        problem = train(second_config, ranks, stop=True)
        _keep_half(trial)
    elif samples_ahead(config):  # a run that ends does not sample ahead
        second_config = write(config, folder / "second", trial.work)
        problem = None
        _shorten(trial.run, second_config.parent / "run")
    else:
        second_config = write({**config, "steps": HALF}, folder / "second", trial.work)
        problem = train(second_config, ranks)
        if problem is None:
            shutil.copytree(second_config.parent / "run", folder / "relaid/run")
        if problem is None and ranks > 1:
            shutil.copytree(second_config.parent / "run", folder / "moved/run")

    # The run resumes from its newest checkpoint with the full number of steps.
    problem = problem or train(write(config, second_config.parent, trial.work), ranks)
    if problem is not None:
        return problem

    if not trial.repeatable:
        return False

    differences = list(
        _differences(
            trial.reference,
            runs.recording(second_config.parent / "run"),
            config,
        )
    )
    if differences:
        ending = "stopped" if trial.stopped else "ended"
        return Result("lost", f"{ending} and resumed:\n" + "\n".join(differences[:40]))
    return True


def _keep_half(trial: Trial) -> None:
    """Copy the run up to its middle for the steps that continue from there, if that checkpoint exists."""
    if samples_ahead(trial.config) or not (trial.run / f"checkpoints/step_{HALF}").exists():
        return
    _shorten(trial.run, trial.folder / "relaid/run")
    if trial.ranks > 1:
        _shorten(trial.run, trial.folder / "moved/run")


def _shorten(run: Path, target: Path) -> None:
    """Copy a run without the checkpoints after its middle."""
    shutil.copytree(run, target)
    # The newest remaining checkpoint is then that of the middle.
    for step in range(HALF + 1, STEPS + 1):
        shutil.rmtree(target / f"checkpoints/step_{step}", ignore_errors=True)


def read(trial: Trial) -> Result | bool:
    """Check the commands that read a run, and that its newest checkpoint exports to the run's own export."""
    out = trial.folder / "read"
    commands = {
        "report": ["report", str(trial.run)],
        "compare": ["compare", str(trial.run), str(trial.folder / "second/run"), "--out", str(out / "both")],
        "picture": [
            "check", str(trial.folder / "whole/config.yaml"), "--world-size", str(trial.ranks),
            "--picture", str(out / "picture.svg"),
        ],
    }  # fmt: skip

    # A run that stopped early, or exports nothing, has nothing to compare its export with.
    newest = newest_checkpoint(trial.run)
    is_complete = newest.name == f"step_{STEPS}" and (trial.run / "hf").exists()
    if is_complete:
        commands["export"] = ["export", str(newest), "--out", str(out / "hf")]

    out.mkdir()
    for name, arguments in commands.items():
        code, output, errors = run_command(arguments, out / f"{name}.log")
        if code:
            return Result(
                "accepted",
                f"{name} ended with {code}: {output[-2000:]}{errors[-2000:]}",
            )

    if is_complete and record.tensor_digests(out / "hf") != record.tensor_digests(trial.run / "hf"):
        return Result(
            "lost",
            "the export of the newest checkpoint differs from the run's own in hf",
        )
    return True


def evaluate(trial: Trial) -> Result | bool:
    """Evaluate the newest checkpoint with `eval`, and compare its metrics with the run's."""
    sets = trial.config.get("evaluation", {}).get("sets", {})
    newest = newest_checkpoint(trial.run)
    if not sets:
        return False

    file = write(trial.config, trial.folder / "again", trial.work)
    problem = train(file, trial.ranks, "--checkpoint", str(newest), command="eval")
    if problem is not None:
        return replace(problem, detail=f"eval: {problem.detail}")

    output = (file.parent / "output").read_text()
    step = newest.name.removeprefix("step_")
    run_metrics = trial.reference["metrics"]["metrics.jsonl"].get(step, {})

    # Sampled responses depend on the random state; greedy ones have to agree with the run's.
    greedy = [f"eval/{name}/reward" for name, settings in sets.items() if not _is_drawn(settings)]
    for name in greedy if trial.exact else ():
        if run_metrics.get(name) is None:
            continue
        line = next(
            (line.split() for line in output.splitlines() if line.split()[:1] == [name]),
            None,
        )
        value = float.fromhex(run_metrics[name])
        if line is None or not math.isclose(float(line[1]), value, rel_tol=1e-2, abs_tol=1e-3):
            return Result("lost", f"eval printed {line}, the run measured {value}")
    return True


def _is_drawn(settings: Any) -> bool:
    return isinstance(settings, Mapping) and bool(settings.get("temperature"))


def stage_alone(trial: Trial) -> Result | bool:
    """Run the first stage as a job of its own; its export must equal the stage's."""
    stage, job = next(
        ((name, job) for name, job in (("sft", "sft"), ("preference", "prefer")) if name in trial.config),
        (None, None),
    )

    if stage is None or job is None:
        return False

    stage_export = trial.run / f"stages/{stage}/hf"
    # The job trains as the stage does, from the same seed.
    file = write(trial.config, trial.folder / job, trial.work)
    problem = train(file, trial.ranks, command=job)
    if problem is not None:
        return replace(problem, detail=f"{job}: {problem.detail}")
    if not stage_export.exists() or not (file.parent / "run/hf").exists():
        return False
    if record.tensor_digests(stage_export) != record.tensor_digests(file.parent / "run/hf"):
        return Result("lost", f"the job {job} exports other weights than the run's stage")
    return True


def newest_checkpoint(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max(
        (run / "checkpoints").glob("step_*"),
        key=lambda path: int(path.name.split("_")[1]),
    )


def move(trial: Trial) -> Result | bool:
    """Continue on one rank from the middle of the run; return whether it was possible."""
    return _continue(trial, "moved", 1, _on_one_rank(trial.config))


def relay(trial: Trial) -> Result | bool:
    """Continue on other ranks in another layout; return whether it was possible, or the problem."""
    return _continue(trial, "relaid", *trial.continuation)


def _continue(trial: Trial, name: str, ranks: int, config: dict[str, Any]) -> Result | bool:
    """Continue the run below ``name`` from its middle, if there is one and `check` accepts it."""
    folder = trial.folder / name
    if not folder.exists():
        return False

    file = write(config, folder, trial.work)
    code, output = check(file, ranks)
    if code == 2 and (errors := errors_of(output)) and not incomplete_errors(errors):
        return False
    if code:
        return Result("unclear", f"{name}: {error_summary(output)}")

    problem = train(file, ranks)
    if problem is not None:
        return problem

    differences = list(
        _different_steps(
            trial.reference,
            runs.recording(folder / "run"),
            str(HALF + 1),
            LATER_TOLERANCE,
        )
    )
    if differences and trial.repeatable and trial.exact:
        return Result("lost", f"{name}:\n" + "\n".join(differences[:20]))
    return True


def compare(trial: Trial) -> Result | bool:
    """Train the first step on one rank, if its numbers must be equal; return whether it was compared."""
    if trial.ranks == 1 or not (trial.repeatable and trial.exact and _is_layout_invariant(trial.config)):
        return False

    single_config = write(
        _on_one_rank({**trial.config, "steps": 1}),
        trial.folder / "alone",
        trial.work,
    )
    problem = train(single_config, 1)
    if problem is not None:
        return problem

    single = runs.recording(single_config.parent / "run")
    # The step after the middle: later steps amplify rounding.
    differences = list(_different_steps(trial.reference, single, "1", FIRST_STEP_TOLERANCE))
    if differences:
        return Result("lost", "on one rank:\n" + "\n".join(differences[:20]))
    return _same_samples(trial.reference, single, "1")


def start_others(trial: Trial) -> Result | bool:
    """Start other runs from this run's weights and adapters; return whether there were any."""
    # Starts from a checkpoint of Megatron's, an export, adapters, and a trained reward model.
    ranks, config = trial.continuation
    hf = trial.config["model"]["path"]
    dtype = trial.config["model"]["dtype"]
    run, megatron_checkpoint, adapter = (
        trial.folder / name for name in ("whole/run", "whole/taken", "adapter")
    )
    # The optimizer of a Megatron checkpoint is resumed for Adam, the default, only.
    resumable = not trial.config["actor"]["optimizer"].get("name")

    starts: dict[str, dict[str, Any]] = {}
    if (run / "hf").exists():
        starts["exported"] = {"model": {"path": str(run / "hf")}}
    if megatron_checkpoint.exists():
        starts["handed_on"] = {"model": {"megatron": str(megatron_checkpoint), "hf_path": hf}}
        if resumable and "lora" not in trial.config["actor"]:
            starts["continued"] = runs.merged(starts["handed_on"], {"model": {"resume_optimizer": True}})

    if "lora" in trial.config["actor"]:
        problem = _exported_adapters(run, adapter)
        if problem is not None:
            return problem
        starts["adapted"] = {
            "model": {"path": hf},
            "actor": {"lora": {"path": str(adapter)}},
        }

    # A reward model of the first run is a fixed one of the next, and initialises its critic.
    judge = run / "reward_models/judge"
    if judge.exists():
        model = {
            "path": str(judge),
            "training": None,
            "layout": {},
            "weight": 0.5,
        }
        starts["judged"] = {
            "model": {"path": hf},
            "reward": {"models": {"judge": model}},
        }
        if "critic" in config:
            starts["judged"]["critic"] = {"path": str(judge)}

    for name, start in starts.items():
        second_run = {key: value for key, value in config.items() if key not in ("sft", "preference")}
        second_run = runs.merged({**second_run, "model": {"dtype": dtype}}, {**start, "steps": HALF})
        file = write(second_run, trial.folder / name, trial.work)
        code, output = check(file, ranks)

        errors = errors_of(output) if code == 2 else []
        if code and (not errors or incomplete_errors(errors)):
            return Result("unclear", f"{name}: {error_summary(output)}")

        # A refusal with complete errors is as good as a run.
        if code:
            continue
        problem = train(file, ranks)
        if problem is not None:
            return replace(problem, detail=f"{name}: {problem.detail}")
    return bool(starts)


def _exported_adapters(run: Path, target: Path) -> Result | None:
    """Export the newest checkpoint's adapters in PEFT's format; return None on success, or the problem."""
    arguments = [
        "export",
        str(newest_checkpoint(run)),
        "--format",
        "peft",
        "--out",
        str(target),
    ]
    code, _, errors = run_command(arguments, target.with_suffix(".log"))
    if code:
        return Result("accepted", errors[-2000:])
    return None


def samples_ahead(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration samples for later steps than the one it trains on."""
    return bool(config.get("asynchrony"))


def _differences(
    expected: Mapping[str, Any],
    resumed: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the differences between a resumed run and the uninterrupted one.

    If timing determines which rows are computed together, the rollout's log-probs differ in the last digits.
    """
    rollout = config["rollout"]
    timing_settings = {
        "environment",
        "max_in_flight",
        "max_num_seqs",
        "max_num_batched_tokens",
    }
    is_timed = {*rollout, *rollout.get("vllm", {})} & timing_settings

    pieces = str(config.get("algorithm"))
    if is_timed and ("correction" in pieces or "topr" in pieces):  # these train on the rollout's log-probs
        return

    for line in kills.differing_values(expected, resumed):
        if not (is_timed and "mismatch/" in line) and not any(name in line for name in REQUEST_METRICS):
            yield line


def _is_layout_invariant(config: Mapping[str, Any]) -> bool:
    """Return whether any layout computes a step's numbers of one rank up to rounding."""
    has_stages = any(config.get(name) for name in ("sft", "preference")) or config["reward"].get("models")
    return (
        not has_stages  # their steps of Adam have amplified rounding
        and not samples_ahead(config)
        and not config["rollout"].get("oversample")
    )


def _on_one_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for one rank."""
    return on_all_ranks(config, {})


def on_all_ranks(config: dict[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
    """Return the configuration with every role on all ranks, in the actor's ``layout``."""
    # Placement and layouts of single roles would contradict one layout for all.
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
    """Return whether two recorded runs sampled the same responses in a step."""
    samples = [run["samples"][f"step_{step}.parquet"]["response"] for run in (first, second)]
    return samples[0] == samples[1]


def _different_steps(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    step: str,
    tolerance: float,
) -> Iterator[str]:
    """Yield the metrics of a step that differ between two recorded runs with equal samples."""
    if not _same_samples(first, second, step):
        return

    # Compare metrics by value: both recordings contain exact hexadecimal numbers.
    steps = [run["metrics"]["metrics.jsonl"][step] for run in (first, second)]
    for name in sorted(steps[0].keys() & steps[1].keys()):
        if name.startswith((*UNCOMPARED, *REQUEST_METRICS)) or None in (
            steps[0][name],
            steps[1][name],
        ):
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
    "handed on": start_others,
}
"""Step -> its function, which returns whether the step applied to the case, or the problem."""
