"""Where the time of a training step goes, and what a bare Megatron-Core step and TRL take for the same work.

    python benchmarks/step_time.py [--quick] [--repeats N] [--json FILE]
                                  [--without step,trl,learn] [--continuous-batching]

A Qwen2-shaped model of 25.7M parameters in float32 answers prompts with 1 to 256 tokens (see workload.py),
12 prompts × 8 samples a step, one optimizer step per training step. Three parts:

1. the phases of our step, as `megatron_rl train` reports them, on the best of our layouts for this machine;
2. our learn phase against a hand-written Megatron-Core train step on the same tokens, model, weights and
   layout, measured in turns in one job, twice as often as the rest, data parallel, TP2, PP2 and TP2×PP2; both
   first take one supervised step, and must get the same loss and gradient norm (bare_megatron.py). Megatron's
   own layers know no packed rows here: they take rows of one length with as many tokens and, in attention, as
   many pairs of tokens, and at the end the same rows padded;
3. TRL's GRPOTrainer (trl_worker.py, in the environment that make_trl_venv.sh makes) on the same prompts,
   weights, batch and sampling, with the number of processes and micro-batch that are best for it;
   it generates with transformers' `generate`, its default, and with --continuous-batching also with
   transformers' continuous batching.

Every method gets all cores. The first step of each run warms up and is not counted. `--quick` makes the
batch and the limit smaller and tries no alternatives for either side.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import HERE, ChildFailed, Report, arguments, cores, paired_ratio, say, torchrun, warn_if_busy
from workload import Workload, configuration, make

from megatron_rl.metrics import read_metrics

FULL = Workload(prompts=12, samples=8, max_response_tokens=256)
QUICK = Workload(prompts=8, samples=4, max_response_tokens=128)
TRL_PYTHON = HERE / ".venv-trl" / "bin" / "python"
PARTS = ("step", "trl", "learn")


@dataclass(frozen=True)
class Choice:
    """One way to use the machine; ``rows`` per micro-batch, 0 for the derived token budget (ours)."""

    processes: int
    threads: int
    rows: int = 0
    continuous: bool = False

    def __str__(self) -> str:
        words = f"{self.processes}×{self.threads} processes×threads"
        words += ", continuous batching" if self.continuous else ""
        return words + (f", micro-batches of {self.rows}" if self.rows else "")


def our_choices(available: int) -> list[Choice]:
    """Return our layouts to try: data parallel over all cores, or one process with all threads."""
    return list(dict.fromkeys([Choice(available, 1), Choice(1, available)]))


def trl_choices(available: int, work: Workload) -> list[Choice]:
    """Return TRL's: whole batch or small micro-batches, one process or one per core."""
    spread, alone = our_choices(available)[0], our_choices(available)[-1]
    share = work.rows // spread.processes
    found = [replace(spread, rows=share), replace(spread, rows=min(share, 4)), replace(alone, rows=work.rows)]
    return list(dict.fromkeys(found))


def learn_layouts(available: int, best: Choice) -> list[tuple[Choice, dict[str, int]]]:
    """Return where the learn phase is measured: data parallel by both choices, TP2, PP2, TP2×PP2.

    With tensor parallelism both with sequence parallelism, our default, and without.
    """
    data_parallel = list(dict.fromkeys([best, *our_choices(available)]))
    pair, four = (Choice(ranks, max(1, available // ranks)) for ranks in (2, 4))
    plain = {"sequence_parallel": False}
    return [(choice, {}) for choice in data_parallel] + [
        (pair, {"tensor": 2}),
        (pair, {"tensor": 2, **plain}),
        (pair, {"pipeline": 2}),
        (four, {"tensor": 2, "pipeline": 2}),
        (four, {"tensor": 2, "pipeline": 2, **plain}),
    ]


class Bench:
    """Hold the folder and the sizes of one run of this benchmark."""

    def __init__(self, folder: Path, work: Workload, repeats: int, report: Report) -> None:
        self.folder, self.work, self.repeats, self.report = folder, work, repeats, report

    def ours(self, choice: Choice, work: Workload, steps: int) -> list[Mapping[str, float]]:
        """Train with the command that users call; return the metrics of each of ``steps`` but the first."""
        say("step_time", f"megatron_rl, {choice}, {steps} steps of {work.rows} samples")
        number = len(list(self.folder.glob("run*.yaml")))
        config, run = self.folder / f"run{number}.yaml", self.folder / f"run{number}"
        config.write_text(configuration(work, self.folder, run, steps, {}))
        command = ["-m", "megatron_rl", "train", str(config)]
        torchrun(command, choice.processes, choice.threads, self.folder / f"run{number}.log", 1800)
        lines = read_metrics(run / "metrics.jsonl")
        return lines[1:]

    def trl(self, choice: Choice, work: Workload, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps with TRL; return its result without the first step."""
        say("step_time", f"TRL, {choice}, {steps} steps of {work.rows} samples")
        result = self.folder / "trl.json"
        sizes = {
            "prompts": work.prompts,
            "samples": work.samples,
            "max-response-tokens": work.max_response_tokens,
            "steps": steps,
            "rows-per-microbatch": choice.rows,
        }
        options = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)]
        options += ["--continuous-batching"] if choice.continuous else []
        command = [str(HERE / "trl_worker.py"), str(self.folder), str(result), *options]
        torchrun(command, choice.processes, choice.threads, self.folder / "trl.log", 1800, TRL_PYTHON)
        found = json.loads(result.read_text())
        return {name: value[1:] if isinstance(value, list) else value for name, value in found.items()}

    def best(self, who: str, choices: Sequence[Choice], seconds: Any) -> Choice:
        """Return the fastest choice on a smaller batch; ``seconds(choice, work)`` of a step."""
        if len(choices) == 1:
            return choices[0]
        work = replace(self.work, max_response_tokens=self.work.max_response_tokens // 4)
        found = {choice: seconds(choice, work) for choice in choices}
        for choice, value in found.items():
            self.report.note(f"tried with a limit of a quarter: {who}, {choice}: {value:.2f} s per step")
        return min(found, key=lambda choice: found[choice])

    def measure_ours(self, choice: Choice) -> dict[str, list[float]]:
        """Record the phases of our step; return its rates by name."""
        steps = self.ours(choice, self.work, self.repeats + 1)
        method, case = f"megatron_rl, {choice}", self.case
        for name, values in phases(steps).items():
            self.report.add(case, method, name, "s", values)
        tokens = [step["throughput/tokens_per_second_per_gpu"] for step in steps]
        self.report.add(case, method, "tokens/s per process", "1/s", tokens)
        self.report.add(
            case, method, "response length", "tokens", [step["response/length"] for step in steps]
        )
        return self.rates([step["time/step"] for step in steps], [step["response/length"] for step in steps])

    def rates(self, seconds: Sequence[float], lengths: Sequence[float]) -> dict[str, list[float]]:
        """Return samples and response tokens per second: lengths are drawn anew by each, so both count."""
        samples = [self.work.rows / value for value in seconds]
        tokens = [rate * length for rate, length in zip(samples, lengths, strict=True)]
        return {"samples/s": samples, "response tokens/s": tokens}

    def measure_trl(self, choice: Choice, ours: Mapping[str, Sequence[float]]) -> None:
        """Record TRL's step, and the ratios of rates, which are ours over TRL's."""
        found = self.trl(choice, self.work, self.repeats + 1)
        method, versions = f"TRL, {choice}", found["versions"]
        self.report.add(self.case, method, "step", "s", found["seconds"], peer_versions=versions)
        self.report.add(self.case, method, "generate", "s", found["generate"], peer_versions=versions)
        self.report.add(
            self.case, method, "response length", "tokens", found["length"], peer_versions=versions
        )
        kind = "TRL with continuous batching" if choice.continuous else "TRL"
        for name, theirs in self.rates(found["seconds"], found["length"]).items():
            self.report.add(self.case, method, name, "1/s", theirs, peer_versions=versions)
            ratio = statistics.median(ours[name]) / statistics.median(theirs)
            self.report.add(self.case, f"megatron_rl, against {kind}", name, "1/s", ours[name], ratio)

    def measure_learn(self, choice: Choice, layout: Mapping[str, int]) -> None:
        """Record our learn phase and the bare Megatron-Core steps, on half the rows."""
        work = replace(self.work, prompts=self.work.prompts // 2)
        where = ", ".join(f"{name} {size}" for name, size in layout.items()) or "data parallel"
        say("step_time", f"learn phase in turns with bare Megatron-Core, {choice}, {where}")
        config, result = self.folder / "learn.yaml", self.folder / "learn.json"
        config.write_text(configuration(work, self.folder, self.folder / "learn", 1, dict(layout)))
        command = [str(HERE / "learn_worker.py"), str(config), str(result)]
        command += ["--work", json.dumps(asdict(work)), "--repeats", str(2 * self.repeats)]
        torchrun(command, choice.processes, choice.threads, self.folder / "learn.log", 1800)
        found = json.loads(result.read_text())
        our_name, *peers = found["seconds"]
        ours = [1e6 * value / found["tokens"][our_name] for value in found["seconds"][our_name]]
        for peer in peers:
            theirs = [1e6 * value / found["tokens"][peer] for value in found["seconds"][peer]]
            case = f"learn {found['tokens'][our_name]} tokens, {choice}, {where}, against {peer}"
            turns = len(theirs) == len(ours)
            ratio = (
                paired_ratio(ours, theirs) if turns else statistics.median(ours) / statistics.median(theirs)
            )
            self.report.add(case, our_name, "learn phase per token", "µs", ours, ratio)
            self.report.add(case, peer, "train step per token", "µs", theirs)
        equal = "one supervised step gives loss {loss:.6f} and gradient norm {norm:.6f}, "
        equal += "bare Megatron-Core {peer_loss:.6f} and {peer_norm:.6f}"
        self.report.note(f"same work, {choice}, {where}: {equal.format(**found['check'])}")

    @property
    def case(self) -> str:
        """Return the name of the whole step's case."""
        work = self.work
        return f"step of {work.prompts}×{work.samples} samples, ≤{work.max_response_tokens} tokens"


def phases(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return seconds by phase per step; phases are disjoint and add up to ``step``."""
    parts: dict[str, list[float]] = {
        name: [] for name in ("step", "generate", "reshard", "score", "learn", "rest")
    }
    for step in steps:
        reshard = step.get("time/reshard", 0.0) + step.get("time/reshard_verify", 0.0)
        values = {
            "generate": step["time/generate"] - reshard,
            "reshard": reshard,
            "score": step["time/score"],
            "learn": step["time/learn"],
        }
        values |= {"step": step["time/step"], "rest": step["time/step"] - sum(values.values())}
        for name, seconds in values.items():
            parts[name].append(seconds)
    return parts


def make_trl() -> None:
    """Make TRL's environment where it is missing; raises ChildFailed."""
    if subprocess.run([str(HERE / "make_trl_venv.sh")]).returncode:
        raise ChildFailed("TRL's environment could not be made: run benchmarks/make_trl_venv.sh to see why")


def measure(bench: Bench, quick: bool, without: Sequence[str], continuous: bool) -> None:
    """Run all parts; one that fails is reported and the others go on."""
    available = cores()
    choice, *others = our_choices(available)
    if "step" not in without:
        choices = [choice] if quick else [choice, *others]
        choice = bench.best("megatron_rl", choices, lambda c, work: bench.ours(c, work, 2)[-1]["time/step"])
        ours = bench.measure_ours(choice)
    if not {"step", "trl"} & set(without):
        try:
            make_trl()
            choices = trl_choices(available, bench.work)[: 1 if quick else None]
            best = bench.best("TRL", choices, lambda c, work: bench.trl(c, work, 2)["seconds"][-1])
            bench.measure_trl(best, ours)
            if continuous:
                bench.measure_trl(replace(best, continuous=True), ours)
        except ChildFailed as error:
            bench.report.fail(f"TRL: {error}")
    if "learn" not in without:
        for processes, layout in learn_layouts(available, choice):
            try:
                bench.measure_learn(processes, layout)
            except ChildFailed as error:
                bench.report.fail(f"learn phase, {processes}, {layout or 'data parallel'}: {error}")


def main() -> int:
    """Measure, print, write; return the exit code."""
    parser = arguments(__doc__, repeats=2)
    parser.add_argument("--without", default="", help="parts to leave out: " + ",".join(PARTS))
    parser.add_argument("--continuous-batching", action="store_true", help="measure TRL with that, too")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR", help="keep logs and runs in DIR")
    options = parser.parse_args()
    without = [name for name in options.without.split(",") if name]
    if unknown := set(without) - set(PARTS):
        parser.error(f"--without: unknown part {sorted(unknown)[0]!r}, expected one of {', '.join(PARTS)}")
    warn_if_busy("step_time")
    work = QUICK if options.quick else FULL
    report = Report("step_time")
    with tempfile.TemporaryDirectory(prefix="step_time.") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, work)
        bench = Bench(folder, work, options.repeats or 2, report)
        try:
            measure(bench, options.quick, without, options.continuous_batching)
        except ChildFailed as error:
            report.fail(str(error))
        report.note(
            "aims: samples/s at least 2.5 times TRL's; learn phase at most 1.05 of bare Megatron-Core"
        )
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
