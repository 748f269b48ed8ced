"""Measure the speed of a configuration by phase, and compare it with the planner's prediction.

    python benchmarks/throughput.py CONFIG [key=value ...] [--steps N] [--json FILE]    # launches torchrun
    torchrun ... benchmarks/throughput.py CONFIG ...                        # as a rank of a job
    python benchmarks/throughput.py CONFIG --run RUN_DIR                    # reads a finished run
    python benchmarks/throughput.py CONFIG [CONFIG ...] --simulate          # no GPU: the prediction alone

A run trains N steps (default 3) after a warm-up step, without evaluation or export. The table has the seconds
per phase, the tokens per second and process (one GPU each), and the memory peaks in its metrics.jsonl. If the
GPU is known (`gpu` in the configuration, or --gpu), the table also has the prediction for the run's mean
lengths, and the ratio of model FLOPs (with causal attention) to peak FLOPs by phase.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import ChildFailed, Report, cores, make_parser, print_progress, torchrun, warn_if_busy

from megatron_rl.check.configuration import check_config
from megatron_rl.config.budget import PHASES as MEMORY_PHASES
from megatron_rl.config.load import load
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.planning.predict.calibrate import estimate_run_stats, phase_seconds, read_steps
from megatron_rl.planning.predict.step import PHASES, RunStats, RunStep, predict_run, role_shapes
from megatron_rl.shapes.hardware import Constants, load_constants
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import load_shape

QUIET = (
    "evaluation.sets={}",
    "checkpoint.every=1000000",
    "checkpoint.resume=never",
    "checkpoint.export=false",
)
"""Overrides of a measured run. The checkpoint after the last step is not part of the measured time."""


@dataclass(frozen=True)
class Case:
    """Configuration with derived values."""

    name: str
    """Name of the configuration file without its suffix."""
    config: RunConfig
    """Resolved configuration."""
    memory: Mapping[str, float]
    """Estimated peak of memory by phase, in bytes."""
    shipped_models: tuple[Path, ...]
    """Folders of models that ship with the configuration."""

    def shape_of(self, path: str) -> ModelShape:
        """Return the shape of the model at ``path``, or of the shipped model of the same name."""
        # The path may exist only on a cluster. Then the shipped config.json is used.
        folders = [Path(path), *(folder / Path(path).name for folder in self.shipped_models)]
        folder = next((folder for folder in folders if (folder / "config.json").is_file()), None)
        return load_shape(str(folder or path))

    def predict(
        self,
        gpu: str,
        constants: Constants,
        stats: RunStats | None = None,
    ) -> RunStep:
        """Predict one step on GPUs of the type ``gpu``; ``stats`` are measured lengths, if any."""
        return predict_run(
            self.config,
            constants,
            gpu,
            role_shapes(self.config, self.shape_of),
            stats,
        )


def read_case(path: str, overrides: Sequence[str]) -> Case:
    """Read and check a configuration; raises UserErrors with all its errors."""
    loaded = load(path, overrides)
    candidates = [folder / "models" for file in loaded.files for folder in (file.parent, file.parent.parent)]
    shipped_models = tuple(folder for folder in candidates if folder.is_dir())
    report = check_config(loaded, without_files=True, shipped_models=next(iter(shipped_models), None))
    # Without the model's config.json, no memory is estimated.
    memory = {}
    if report.memory:
        memory = {name: max(rank.phase_peak(name) for rank in report.memory) for name in MEMORY_PHASES}
    return Case(Path(path).stem, report.valid(), memory, shipped_models)


def add_prediction(
    report: Report,
    case: Case,
    step: RunStep,
) -> None:
    """Record the seconds, the rates and the memory of a predicted step."""
    method = f"predicted, {case.config.gpu}"
    report.add(case.name, method, "step", "s", [step.total])
    for phase in PHASES:
        if step.seconds[phase]:
            report.add(case.name, method, phase, "s", [step.seconds[phase]])
    add_rates(
        report,
        case,
        method,
        [step],
        [{**step.seconds, "step": step.total}],
    )
    for phase, size in case.memory.items():
        report.add(
            case.name,
            method,
            f"memory {phase}",
            "GB per process",
            [size / 1e9],
        )


def add_rates(
    report: Report,
    case: Case,
    method: str,
    steps: Sequence[RunStep],
    seconds: Sequence[Mapping[str, float]],
) -> None:
    """Record the tokens per second and process of each phase, and the ratio to peak FLOPs for a known GPU.

    ``steps`` are measured or predicted steps, and ``seconds`` the seconds of their phases.
    """
    step_rates = []
    phase_rates = []
    utilizations = []
    for step, times in zip(steps, seconds, strict=True):
        step_rates.append(step.tokens / times["step"] / step.world)
        phase_rates.append(step.rates(times))
        # For an unknown GPU, `peak_flops` is 0.
        utilizations.append(step.utilization(times) if step.peak_flops else {})

    # All steps have the phases of the first step.
    report.add(
        case.name,
        method,
        "tokens/s per process, step",
        "tokens/s",
        step_rates,
    )
    for phase in phase_rates[0]:
        values = [rates[phase] for rates in phase_rates if phase in rates]
        report.add(
            case.name,
            method,
            f"tokens/s per process, {phase}",
            "tokens/s",
            values,
        )
    for phase in utilizations[0]:
        values = [utilization[phase] for utilization in utilizations if phase in utilization]
        report.add(
            case.name,
            method,
            f"FLOPs / peak, {phase}",
            "share",
            values,
        )


def add_measurement(
    report: Report,
    case: Case,
    folder: Path,
    gpu: str | None,
    constants: Constants,
) -> None:
    """Record the metrics of a run folder and, for a known GPU, the prediction for the run's mean lengths."""
    lines = read_steps(folder, "--run")
    world = case.config.world_size or 1
    method = f"measured on {world} process"
    if world > 1:
        method += "es"
    seconds = [{**phase_seconds(line), "step": line["time/step"]} for line in lines]
    for phase in ("step", *PHASES):
        values = [times[phase] for times in seconds if phase in times]
        if values:
            report.add(case.name, method, phase, "s", values)

    # Compute the tokens and FLOPs of each step from the lengths of this step.
    stats = [estimate_run_stats(case.config, [line]) for line in lines]
    steps = [case.predict(gpu or "h100", constants, step_stats) for step_stats in stats]
    if gpu is None:
        # Do not compare with the peak FLOPs of a different GPU.
        steps = [replace(step, peak_flops=0.0) for step in steps]
    add_rates(report, case, method, steps, seconds)
    # The names of memory metrics depend on device and phases: record all of them.
    for name in sorted({key for line in lines for key in line if key.endswith("peak_bytes")}):
        values = [line[name] / 1e9 for line in lines if name in line]
        report.add(
            case.name,
            method,
            name.removesuffix("_bytes").replace("memory/", "memory "),
            "GB",
            values,
        )
    if gpu is not None:
        add_prediction(report, case, case.predict(gpu, constants, estimate_run_stats(case.config, lines)))


def launch(
    path: str,
    overrides: Sequence[str],
    world: int,
    folder: Path,
) -> None:
    """Train on this host in ``world`` processes, or in this process if it is a rank of a launched job."""
    command_line = ["train", path, *overrides, f"run_dir={folder}"]
    # A launcher has set the size of the job: this process is one rank of the run.
    if "WORLD_SIZE" in os.environ:
        from megatron_rl.cli.main import main as command

        if code := command(command_line):
            sys.exit(code)
        return

    # Distribute the cores over the ranks.
    log = folder.parent / f"{folder.name}.log"
    torchrun(
        ["-m", "megatron_rl", *command_line],
        world,
        max(1, cores() // world),
        log,
        24 * 3600.0,
    )


def summary_table(cases: Sequence[tuple[Case, RunStep]]) -> str:
    """Return predictions as a table with one line per configuration."""
    header: tuple[str, ...] = ("configuration", "GPUs", "step s", *PHASES, "tokens/s/GPU", "learn FLOPs/peak")
    lines = [header]
    for case, step in cases:
        utilization = step.utilization(step.seconds)
        cells = (f"{step.total:.1f}", *(f"{step.seconds[name]:.1f}" for name in PHASES))
        rate = f"{step.tokens / step.total / step.world:.0f}"
        lines.append((case.name, str(step.world), *cells, rate, f"{utilization['learn']:.2f}"))

    # Align names at the left, and numbers at the right.
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def simulate(
    report: Report,
    paths: Sequence[str],
    overrides: Sequence[str],
    gpu: str | None,
    constants: Constants,
) -> None:
    """Predict and record a step of every configuration; raises UserError if no GPU is configured."""
    cases = []
    for path in paths:
        # The option has precedence over the configuration.
        case = read_case(path, overrides)
        name = gpu or case.config.gpu
        if name is None:
            raise UserError("no GPU to predict for", where=path, fix="write gpu: H100-80GB, or give --gpu")
        case = replace(case, config=replace(case.config, gpu=name))

        step = case.predict(name, constants)
        cases.append((case, step))
        add_prediction(report, case, step)
    print(summary_table(cases))
    report.note("predicted: nothing was run; prompts at their limit, responses a third of theirs on average")


def parse_command_line() -> tuple[list[str], list[str], argparse.Namespace]:
    """Return the configurations, the overrides and the options of the command line."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("arguments", metavar="CONFIG [key=value ...]", nargs="+")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help="measured steps (default 3; with --quick 1)",
    )
    parser.add_argument("--simulate", action="store_true", help="print the planner's prediction alone")
    parser.add_argument(
        "--run",
        type=Path,
        default=None,
        metavar="DIR",
        help="read this finished run folder",
    )
    parser.add_argument(
        "--gpu", default=None, help="GPU of the prediction (default: `gpu` of the configuration)"
    )
    parser.add_argument(
        "--constants",
        default=None,
        metavar="FILE",
        help="planner constants, as plan --calibrate makes",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=None,
        metavar="DIR",
        help="keep the run folder as DIR",
    )
    options = parser.parse_intermixed_args()

    # Configurations and overrides may come in any order.
    paths = [text for text in options.arguments if "=" not in text]
    overrides = [text for text in options.arguments if "=" in text]
    if not options.simulate and len(paths) != 1:
        parser.error("one CONFIG at a time can be run; --simulate takes several")
    return paths, overrides, options


def measure(
    report: Report,
    path: str,
    overrides: list[str],
    options: argparse.Namespace,
    constants: Constants,
) -> None:
    """Run one configuration and record its metrics; in a launched job, only rank 0 records."""
    default_steps = 1 if options.quick else 3
    steps = options.steps or options.repeats or default_steps
    # Add one step for the warm-up.
    overrides = [*QUIET, f"steps={steps + 1}", *overrides]
    case = read_case(path, overrides)
    # The option has precedence over the configuration.
    gpu = options.gpu or case.config.gpu
    if options.run is not None:
        add_measurement(report, case, options.run, gpu, constants)
        return

    with tempfile.TemporaryDirectory(prefix="throughput.") as temporary:
        # The ranks of a launched job must use the same folder, so they use that of the configuration.
        is_launched = "WORLD_SIZE" in os.environ
        folder = options.keep
        if folder is None:
            folder = Path(case.config.run_dir) if is_launched else Path(temporary) / "run"
        folder.parent.mkdir(parents=True, exist_ok=True)
        launch(path, overrides, case.config.world_size or 1, folder)
        if int(os.environ.get("RANK", "0")) == 0:
            add_measurement(report, case, folder, gpu, constants)


def main() -> int:
    """Measure or predict, print and write the results; return the exit code."""
    paths, overrides, options = parse_command_line()
    report = Report("throughput")

    try:
        constants = load_constants(options.constants)
        if options.simulate:
            simulate(report, paths, overrides, options.gpu, constants)
        else:
            warn_if_busy("throughput")
            measure(report, paths[0], overrides, options, constants)
    except (UserError, UserErrors) as error:
        print_progress("throughput", str(error))
        return 2
    except ChildFailed as error:
        report.fail(str(error))

    # Only rank 0 of a job prints.
    if int(os.environ.get("RANK", "0")):
        return 0
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
