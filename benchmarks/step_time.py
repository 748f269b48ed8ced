"""Measure the phases of a training step, and compare with bare Megatron-Core and TRL on the same workload.

    python benchmarks/step_time.py [--quick] [--repeats N] [--json FILE]
                                  [--without step,trl,learn] [--continuous-batching]

A Qwen2-shaped model of 25.7M parameters in float32 samples responses of 1 to 256 tokens (see workload.py). A
step has 12 prompts × 8 samples and one optimizer step. There are three parts:

1. step: the phases of a step, as `megatron_rl train` reports them, with the fastest layout on this machine.
2. trl: TRL's GRPOTrainer (trl_worker.py, in the environment of make_trl_venv.sh) on the same prompts,
   weights, batch and sampling, with its fastest number of processes and micro-batch. It generates with
   transformers' `generate`, its default. With --continuous-batching it is also measured with transformers'
   continuous batching.
3. learn: the learn phase against a hand-written Megatron-Core train step (bare_megatron.py) on the same
   tokens, model, weights and layout. They run in turns in one job, with twice as many repeats, and with data
   parallelism, TP2, PP2 and TP2×PP2. First, both take one supervised step, and must get the same loss and
   gradient norm. Megatron's local layers do not support packed rows here. They get rows of equal length, with
   as many tokens and as many pairs of tokens in attention. At the end they also get the padded rows.

Every method uses all cores. The first step of each run is a warm-up and is not counted. `--quick` reduces the
batch and the response limit, and measures only one layout per method.
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

from common import (
    HERE,
    ChildFailed,
    Report,
    cores,
    make_parser,
    paired_ratio,
    print_progress,
    torchrun,
    warn_if_busy,
)
from workload import Workload, configuration, write_workload

from megatron_rl.metrics import read_metrics

FULL = Workload(prompts=12, samples=8, max_response_tokens=256)
QUICK = Workload(prompts=8, samples=4, max_response_tokens=128)
TRL_PYTHON = HERE / ".venv-trl" / "bin" / "python"
PARTS = ("step", "trl", "learn")


@dataclass(frozen=True)
class Choice:
    """Number of processes and threads of a job, and options of TRL."""

    processes: int
    """Number of ranks of the job."""
    threads: int
    """Number of threads of a rank."""
    rows: int = 0
    """Number of rows of a micro-batch; 0 for megatron_rl, which derives a token budget."""
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
    """Return the choices of megatron_rl: a process per core with data parallelism, or one process."""
    return list(dict.fromkeys([Choice(available, 1), Choice(1, available)]))


def trl_choices(available: int, work: Workload) -> list[Choice]:
    """Return TRL's choices: one process or a process per core, with large or small micro-batches."""
    choices = our_choices(available)
    data_parallel = choices[0]
    one_process = choices[-1]
    # TRL has no token budget: its micro-batches have a fixed number of rows.
    rows = work.rows // data_parallel.processes

    # On a machine with one core, some choices are equal.
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
    """Return the layouts of the learn phase: data parallelism with each choice, TP2, PP2 and TP2×PP2.

    Layouts with tensor parallelism are measured with sequence parallelism, the default, and without. ``best``
    is the fastest choice for the complete step.
    """
    data_parallel = list(dict.fromkeys([best, *our_choices(available)]))
    # Distribute all cores over two or four ranks.
    two_ranks, four_ranks = (Choice(ranks, max(1, available // ranks)) for ranks in (2, 4))
    no_sequence_parallel = {"sequence_parallel": False}

    return [(choice, {}) for choice in data_parallel] + [
        (two_ranks, {"tensor": 2}),
        (two_ranks, {"tensor": 2, **no_sequence_parallel}),
        (two_ranks, {"pipeline": 2}),
        (four_ranks, {"tensor": 2, "pipeline": 2}),
        (four_ranks, {"tensor": 2, "pipeline": 2, **no_sequence_parallel}),
    ]


class Bench:
    """Measurements of this benchmark on one workload; ``folder`` contains all files."""

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

    def train_ours(
        self,
        choice: Choice,
        work: Workload,
        steps: int,
    ) -> list[Mapping[str, float]]:
        """Train ``steps`` steps with `megatron_rl train`; return the metrics without the first step."""
        print_progress("step_time", f"megatron_rl, {choice}, {steps} steps of {work.rows} samples")
        # Every run has separate files, so that a failure can be examined.
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
        # The first step is a warm-up: kernels compile, and memory is allocated.
        return read_metrics(run / "metrics.jsonl")[1:]

    def train_trl(
        self,
        choice: Choice,
        work: Workload,
        steps: int,
    ) -> dict[str, Any]:
        """Train ``steps`` steps with TRL; return the metrics without the first step."""
        print_progress("step_time", f"TRL, {choice}, {steps} steps of {work.rows} samples")
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

        # Drop the value of the first step from each list. The versions are not a list.
        metrics = json.loads(result.read_text())
        return {name: value[1:] if isinstance(value, list) else value for name, value in metrics.items()}

    def find_fastest(
        self,
        system: str,
        choices: Sequence[Choice],
        measure_seconds: Any,
    ) -> Choice:
        """Return the choice with the fastest step; ``measure_seconds(choice, work)`` measures a step."""
        if len(choices) == 1:
            return choices[0]
        # Measure short responses, which give the same order of choices in less time.
        work = replace(self.work, max_response_tokens=self.work.max_response_tokens // 4)
        seconds_by_choice = {choice: measure_seconds(choice, work) for choice in choices}
        for choice, value in seconds_by_choice.items():
            self.report.note(f"tried with a limit of a quarter: {system}, {choice}: {value:.2f} s per step")
        return min(seconds_by_choice, key=lambda choice: seconds_by_choice[choice])

    def measure_ours(self, choice: Choice) -> dict[str, list[float]]:
        """Record the phases of a step of megatron_rl; return the result of `compute_rates`."""
        steps = self.train_ours(choice, self.work, self.repeats + 1)
        method = f"megatron_rl, {choice}"
        case = self.case
        for name, values in phases(steps).items():
            self.report.add(case, method, name, "s", values)

        token_rates = [step["throughput/tokens_per_second_per_gpu"] for step in steps]
        self.report.add(case, method, "tokens/s per process", "1/s", token_rates)
        seconds = [step["time/step"] for step in steps]
        lengths = [step["response/length"] for step in steps]
        self.report.add(case, method, "response length", "tokens", lengths)
        return self.compute_rates(seconds, lengths)

    def compute_rates(
        self,
        seconds: Sequence[float],
        lengths: Sequence[float],
    ) -> dict[str, list[float]]:
        """Compute samples per second and response tokens per second of each step.

        Both are needed, since each method samples different lengths. ``lengths`` has the mean response length
        of each step.
        """
        sample_rates = [self.work.rows / value for value in seconds]
        token_rates = [rate * length for rate, length in zip(sample_rates, lengths, strict=True)]
        return {"samples/s": sample_rates, "response tokens/s": token_rates}

    def measure_trl(
        self,
        choice: Choice,
        our_rates: Mapping[str, Sequence[float]],
    ) -> None:
        """Record TRL's step, and the ratios of megatron_rl's rates to TRL's rates."""
        metrics = self.train_trl(choice, self.work, self.repeats + 1)
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

        for name, trl_rates in self.compute_rates(metrics["seconds"], metrics["length"]).items():
            self.report.add(
                self.case,
                method,
                name,
                "1/s",
                trl_rates,
                peer_versions=versions,
            )
            # Steps of separate jobs cannot be paired, so this is a ratio of medians.
            ratio = statistics.median(our_rates[name]) / statistics.median(trl_rates)
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
        """Record the learn phase and the bare Megatron-Core steps, on half of the rows."""
        # Half of the rows, since this part has twice as many repeats.
        work = replace(self.work, prompts=self.work.prompts // 2)
        layout_text = ", ".join(f"{name} {size}" for name, size in layout.items()) or "data parallel"
        print_progress("step_time", f"learn phase in turns with bare Megatron-Core, {choice}, {layout_text}")
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
        # Report microseconds per token, so that padded and packed batches can be compared.
        our_name, *peers = seconds
        our_times = [1e6 * value / tokens[our_name] for value in seconds[our_name]]
        for peer in peers:
            peer_times = [1e6 * value / tokens[peer] for value in seconds[peer]]
            case = f"learn {tokens[our_name]} tokens, {choice}, {layout_text}, against {peer}"
            # Methods with the same number of repeats were measured in turns.
            if len(peer_times) == len(our_times):
                ratio = paired_ratio(our_times, peer_times)
            else:
                ratio = statistics.median(our_times) / statistics.median(peer_times)
            self.report.add(case, our_name, "learn phase per token", "µs", our_times, ratio)
            self.report.add(case, peer, "train step per token", "µs", peer_times)

        comparison = "one supervised step gives loss {loss:.6f} and gradient norm {norm:.6f}, "
        comparison += "bare Megatron-Core {peer_loss:.6f} and {peer_norm:.6f}"
        comparison = comparison.format(**measurement["check"])
        self.report.note(f"same work, {choice}, {layout_text}: {comparison}")

    @property
    def case(self) -> str:
        """Return the name of the case in the records of complete steps."""
        work = self.work
        return f"step of {work.prompts}×{work.samples} samples, ≤{work.max_response_tokens} tokens"


def phases(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the seconds of each step by phase. The phases are disjoint and add up to ``step``."""
    seconds_by_phase: dict[str, list[float]] = {
        name: [] for name in ("step", "generate", "reshard", "score", "learn", "rest")
    }
    for step in steps:
        # The trainer's metric of generation includes the weight sync.
        reshard = step.get("time/reshard", 0.0) + step.get("time/reshard_verify", 0.0)
        values = {
            "generate": step["time/generate"] - reshard,
            "reshard": reshard,
            "score": step["time/score"],
            "learn": step["time/learn"],
        }

        # The rest of the step: rewards, logging and overhead.
        values |= {"step": step["time/step"], "rest": step["time/step"] - sum(values.values())}
        for name, seconds in values.items():
            seconds_by_phase[name].append(seconds)
    return seconds_by_phase


def create_trl_environment() -> None:
    """Create TRL's Python environment unless it exists; raises ChildFailed."""
    # TRL needs a separate environment, since it requires other versions of libraries.
    if subprocess.run([str(HERE / "make_trl_venv.sh")]).returncode:
        raise ChildFailed("TRL's environment could not be made: run benchmarks/make_trl_venv.sh to see why")


def measure(
    bench: Bench,
    quick: bool,
    excluded: Sequence[str],
    continuous: bool,
) -> None:
    """Run all parts except the ``excluded`` ones; a failure of a part does not stop the other parts."""
    available = cores()
    choices = our_choices(available)
    choice = choices[0]
    if "step" not in excluded:
        if quick:
            choices = choices[:1]
        # Run two steps: the first is a warm-up, the second is measured.
        choice = bench.find_fastest(
            "megatron_rl",
            choices,
            lambda choice, work: bench.train_ours(choice, work, 2)[-1]["time/step"],
        )
        our_rates = bench.measure_ours(choice)

    # TRL is compared with the rates of the part `step`.
    if not {"step", "trl"} & set(excluded):
        try:
            create_trl_environment()
            choices = trl_choices(available, bench.work)
            if quick:
                choices = choices[:1]
            best = bench.find_fastest(
                "TRL", choices, lambda choice, work: bench.train_trl(choice, work, 2)["seconds"][-1]
            )
            bench.measure_trl(best, our_rates)
            if continuous:
                bench.measure_trl(replace(best, continuous=True), our_rates)
        except ChildFailed as error:
            bench.report.fail(f"TRL: {error}")

    if "learn" not in excluded:
        for learn_choice, layout in learn_layouts(available, choice):
            try:
                bench.measure_learn(learn_choice, layout)
            except ChildFailed as error:
                bench.report.fail(f"learn phase, {learn_choice}, {layout or 'data parallel'}: {error}")


def main() -> int:
    """Measure, print and write the results; return the exit code."""
    parser = make_parser(__doc__, repeats=2)
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

    # The folder contains the model, the configurations, and the logs of all jobs.
    with tempfile.TemporaryDirectory(prefix="step_time.") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_workload(folder, work)

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
