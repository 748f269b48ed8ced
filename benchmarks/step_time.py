"""Time of a training step by phase, compared with bare Megatron-Core and TRL on the same workload.

    python benchmarks/step_time.py [--quick] [--repeats N] [--json FILE]
                                  [--without step,trl,learn] [--continuous-batching]

A Qwen2-shaped model of 25.7M parameters in float32 answers prompts with 1 to 256 tokens (see workload.py),
12 prompts × 8 samples a step, one optimizer step per training step. Three parts:

1. the phases of our step, as `megatron_rl train` reports them, on the best of our layouts for this machine;
2. our learn phase against a hand-written Megatron-Core train step on the same tokens, model, weights and
   layout, measured in turns in one job, twice as often as the rest, data parallel, TP2, PP2 and TP2×PP2; both
   first take one supervised step, and must get the same loss and gradient norm (bare_megatron.py). Megatron's
   own layers do not support packed rows here: they get rows of one length with as many tokens and, in
   attention, as many pairs of tokens, and at the end the same rows padded;
3. TRL's GRPOTrainer (trl_worker.py, in the environment of make_trl_venv.sh) on the same prompts,
   weights, batch and sampling, with the number of processes and micro-batch that are best for it;
   it generates with transformers' `generate`, its default, and with --continuous-batching also with
   transformers' continuous batching.

Every method gets all cores. The first step of each run is a warm-up and is not counted. `--quick` reduces the
batch and the limit and tries no alternatives for either side.
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
    """One way to use the machine."""

    processes: int
    """Ranks of the job."""
    threads: int
    """Threads of a rank."""
    rows: int = 0
    """Rows of a micro-batch; 0: the token budget that we derive."""
    continuous: bool = False
    """Whether transformers generates with continuous batching."""

    def __str__(self) -> str:
        text = f"{self.processes}×{self.threads} processes×threads"
        if self.continuous:
            text += ", continuous batching"
        if self.rows:
            text += f", micro-batches of {self.rows}"
        return text


def our_choices(available: int) -> list[Choice]:
    """Return our layouts to try: data parallel over all cores, or one process with all threads."""
    return list(dict.fromkeys([Choice(available, 1), Choice(1, available)]))


def trl_choices(available: int, work: Workload) -> list[Choice]:
    """Return TRL's choices to try: the complete batch or small micro-batches, one process or one per core."""
    choices = our_choices(available)
    data_parallel = choices[0]
    one_process = choices[-1]
    # TRL has no token budget: its micro-batches have a fixed number of rows.
    rows = work.rows // data_parallel.processes

    # A machine of one core has one choice.
    return list(
        dict.fromkeys(
            [
                replace(data_parallel, rows=rows),
                replace(data_parallel, rows=min(rows, 4)),
                replace(one_process, rows=work.rows),
            ]
        )
    )


def learn_layouts(available: int, best: Choice) -> list[tuple[Choice, dict[str, int]]]:
    """Return the layouts of the learn phase: data parallel by both choices, TP2, PP2, TP2×PP2.

    With tensor parallelism both with sequence parallelism, our default, and without.
    """
    data_parallel = list(dict.fromkeys([best, *our_choices(available)]))
    # Two and four ranks, with as many threads as leave no core idle.
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
    """Methods of this benchmark on one work, with the folder of their files."""

    def __init__(
        self,
        folder: Path,
        work: Workload,
        repeats: int,
        report: Report,
    ) -> None:
        self.folder = folder
        self.work = work
        self.repeats = repeats
        self.report = report

    def ours(
        self,
        choice: Choice,
        work: Workload,
        steps: int,
    ) -> list[Mapping[str, float]]:
        """Train with the command that users call; return the metrics of each of ``steps`` but the first."""
        say("step_time", f"megatron_rl, {choice}, {steps} steps of {work.rows} samples")
        # Every run has its own files, so that a failure can be examined.
        number = len(list(self.folder.glob("run*.yaml")))
        config = self.folder / f"run{number}.yaml"
        run = self.folder / f"run{number}"
        config.write_text(configuration(work, self.folder, run, steps, {}))
        command = ["-m", "megatron_rl", "train", str(config)]
        torchrun(
            command,
            choice.processes,
            choice.threads,
            self.folder / f"run{number}.log",
            1800,
        )
        # The first step warms up: kernels compile, and memory is allocated.
        return read_metrics(run / "metrics.jsonl")[1:]

    def trl(
        self,
        choice: Choice,
        work: Workload,
        steps: int,
    ) -> dict[str, Any]:
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

        options = []
        for name, value in sizes.items():
            options += [f"--{name}", str(value)]

        if choice.continuous:
            options.append("--continuous-batching")

        command = [str(HERE / "trl_worker.py"), str(self.folder), str(result), *options]
        torchrun(
            command,
            choice.processes,
            choice.threads,
            self.folder / "trl.log",
            1800,
            TRL_PYTHON,
        )

        # Lists have a value per step, of which the first is dropped; the versions are a dictionary.
        metrics = json.loads(result.read_text())
        return {name: value[1:] if isinstance(value, list) else value for name, value in metrics.items()}

    def best(
        self,
        system: str,
        choices: Sequence[Choice],
        seconds: Any,
    ) -> Choice:
        """Return the fastest choice on a smaller batch; ``seconds(choice, work)`` of a step."""
        if len(choices) == 1:
            return choices[0]
        # Short responses rank the choices as long ones do, in less time.
        work = replace(self.work, max_response_tokens=self.work.max_response_tokens // 4)
        seconds_by_choice = {choice: seconds(choice, work) for choice in choices}
        for choice, value in seconds_by_choice.items():
            self.report.note(f"tried with a limit of a quarter: {system}, {choice}: {value:.2f} s per step")
        return min(seconds_by_choice, key=lambda choice: seconds_by_choice[choice])

    def measure_ours(self, choice: Choice) -> dict[str, list[float]]:
        """Record the phases of our step; return its rates by name."""
        steps = self.ours(choice, self.work, self.repeats + 1)
        method = f"megatron_rl, {choice}"
        case = self.case
        for name, values in phases(steps).items():
            self.report.add(case, method, name, "s", values)

        # Lengths are drawn by each method anew: rates count both samples and tokens.
        tokens = [step["throughput/tokens_per_second_per_gpu"] for step in steps]
        self.report.add(case, method, "tokens/s per process", "1/s", tokens)
        self.report.add(
            case, method, "response length", "tokens", [step["response/length"] for step in steps]
        )
        return self.rates([step["time/step"] for step in steps], [step["response/length"] for step in steps])

    def rates(
        self,
        seconds: Sequence[float],
        lengths: Sequence[float],
    ) -> dict[str, list[float]]:
        """Return samples and response tokens per second. Each method draws its own lengths, so both count."""

        samples = [self.work.rows / value for value in seconds]
        tokens = [rate * length for rate, length in zip(samples, lengths, strict=True)]
        return {"samples/s": samples, "response tokens/s": tokens}

    def measure_trl(
        self,
        choice: Choice,
        our_rates: Mapping[str, Sequence[float]],
    ) -> None:
        """Record TRL's step, and the ratios of rates, which are ours over TRL's."""
        metrics = self.trl(choice, self.work, self.repeats + 1)
        method = f"TRL, {choice}"
        versions = metrics["versions"]
        self.report.add(
            self.case,
            method,
            "step",
            "s",
            metrics["seconds"],
            peer_versions=versions,
        )
        self.report.add(
            self.case,
            method,
            "generate",
            "s",
            metrics["generate"],
            peer_versions=versions,
        )

        self.report.add(
            self.case, method, "response length", "tokens", metrics["length"], peer_versions=versions
        )

        kind = "TRL"
        if choice.continuous:
            kind = "TRL with continuous batching"

        for name, theirs in self.rates(metrics["seconds"], metrics["length"]).items():
            self.report.add(
                self.case,
                method,
                name,
                "1/s",
                theirs,
                peer_versions=versions,
            )
            # Steps of separate jobs have no neighbours to pair, hence a ratio of medians.
            ratio = statistics.median(our_rates[name]) / statistics.median(theirs)
            self.report.add(
                self.case,
                f"megatron_rl, against {kind}",
                name,
                "1/s",
                our_rates[name],
                ratio,
            )

    def measure_learn(
        self,
        choice: Choice,
        layout: Mapping[str, int],
    ) -> None:
        """Record our learn phase and the bare Megatron-Core steps, on half the rows."""
        # Half the rows, since these are repeated twice as often.
        work = replace(self.work, prompts=self.work.prompts // 2)
        layout_text = ", ".join(f"{name} {size}" for name, size in layout.items()) or "data parallel"
        say("step_time", f"learn phase in turns with bare Megatron-Core, {choice}, {layout_text}")
        config = self.folder / "learn.yaml"
        result = self.folder / "learn.json"

        config.write_text(configuration(work, self.folder, self.folder / "learn", 1, dict(layout)))
        command = [str(HERE / "learn_worker.py"), str(config), str(result)]
        command += ["--work", json.dumps(asdict(work)), "--repeats", str(2 * self.repeats)]
        torchrun(
            command,
            choice.processes,
            choice.threads,
            self.folder / "learn.log",
            1800,
        )

        measurement = json.loads(result.read_text())
        seconds = measurement["seconds"]

        tokens = measurement["tokens"]
        # Microseconds per token, so that padded and packed batches compare.
        our_name, *peers = seconds
        our_times = [1e6 * value / tokens[our_name] for value in seconds[our_name]]
        for peer in peers:
            theirs = [1e6 * value / tokens[peer] for value in seconds[peer]]
            case = f"learn {tokens[our_name]} tokens, {choice}, {layout_text}, against {peer}"
            # Methods with as many repeats were measured in turns.
            if len(theirs) == len(our_times):
                ratio = paired_ratio(our_times, theirs)
            else:
                ratio = statistics.median(our_times) / statistics.median(theirs)
            (self.report.add(case, our_name, "learn phase per token", "µs", our_times, ratio),)
            self.report.add(case, peer, "train step per token", "µs", theirs)

        comparison = "one supervised step gives loss {loss:.6f} and gradient norm {norm:.6f}, "
        comparison += "bare Megatron-Core {peer_loss:.6f} and {peer_norm:.6f}"
        comparison = comparison.format(**measurement["check"])
        self.report.note(f"same work, {choice}, {layout_text}: {comparison}")

    @property
    def case(self) -> str:
        """Return the name of the case of a complete step."""
        work = self.work
        return f"step of {work.prompts}×{work.samples} samples, ≤{work.max_response_tokens} tokens"


def phases(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return seconds by phase per step; phases are disjoint and add up to ``step``."""
    seconds_by_phase: dict[str, list[float]] = {
        name: [] for name in ("step", "generate", "reshard", "score", "learn", "rest")
    }
    for step in steps:
        # The trainer's own time of generate contains the weight sync.
        reshard = step.get("time/reshard", 0.0) + step.get("time/reshard_verify", 0.0)
        values = {
            "generate": step["time/generate"] - reshard,
            "reshard": reshard,
            "score": step["time/score"],
            "learn": step["time/learn"],
        }

        # The remainder: rewards, logging, the step's own overhead.
        values |= {"step": step["time/step"], "rest": step["time/step"] - sum(values.values())}
        for name, seconds in values.items():
            seconds_by_phase[name].append(seconds)
    return seconds_by_phase


def make_trl() -> None:
    """Make TRL's environment unless it exists; raises ChildFailed."""
    # TRL has an environment of its own, since its versions of libraries differ from these.
    if subprocess.run([str(HERE / "make_trl_venv.sh")]).returncode:
        raise ChildFailed("TRL's environment could not be made: run benchmarks/make_trl_venv.sh to see why")


def measure(
    bench: Bench,
    quick: bool,
    excluded: Sequence[str],
    continuous: bool,
) -> None:
    """Run all parts but the ``excluded``; a failure of one is reported and does not stop the others."""
    available = cores()
    choices = our_choices(available)
    choice = choices[0]
    if "step" not in excluded:
        if quick:
            choices = choices[:1]
        # Two steps: the first one warms up, the second one ranks the choices.
        choice = bench.best("megatron_rl", choices, lambda c, work: bench.ours(c, work, 2)[-1]["time/step"])
        our_rates = bench.measure_ours(choice)

    # TRL is compared with our step.
    if not {"step", "trl"} & set(excluded):
        try:
            make_trl()
            choices = trl_choices(available, bench.work)
            if quick:
                choices = choices[:1]
            best = bench.best("TRL", choices, lambda c, work: bench.trl(c, work, 2)["seconds"][-1])
            bench.measure_trl(best, our_rates)
            if continuous:
                bench.measure_trl(replace(best, continuous=True), our_rates)
        except ChildFailed as error:
            bench.report.fail(f"TRL: {error}")

    if "learn" not in excluded:
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
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        metavar="DIR",
        help="keep logs and runs in DIR",
    )

    options = parser.parse_args()
    excluded = [name for name in options.without.split(",") if name]
    for name in excluded:
        if name not in PARTS:
            parser.error(f"--without: unknown part {name!r}, expected one of {', '.join(PARTS)}")

    warn_if_busy("step_time")
    work = QUICK if options.quick else FULL
    report = Report("step_time")

    # The folder has the model, the configurations, and the logs of all jobs.
    with tempfile.TemporaryDirectory(prefix="step_time.") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, work)

        bench = Bench(folder, work, options.repeats or 2, report)
        try:
            measure(
                bench,
                options.quick,
                excluded,
                options.continuous_batching,
            )
        except ChildFailed as error:
            report.fail(str(error))

        report.note(
            "aims: samples/s at least 2.5 times TRL's; learn phase at most 1.05 of bare Megatron-Core"
        )
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
