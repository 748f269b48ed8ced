"""Speed of a real configuration, phase by phase, and the planner's prediction of it.

    python benchmarks/throughput.py CONFIG [key=value ...] [--steps N] [--json FILE]    # launches torchrun
    torchrun ... benchmarks/throughput.py CONFIG ...                        # as a rank of a job
    python benchmarks/throughput.py CONFIG --run RUN_DIR                    # reads a finished run
    python benchmarks/throughput.py CONFIG [CONFIG ...] --simulate          # no GPU: the prediction alone

A run trains N steps (default 3) after a warm-up step, without evaluation or export. Its metrics.jsonl gives
seconds per phase, tokens/s per process (one GPU each) and memory peaks. If the GPU is known (`gpu` in the
configuration, or --gpu), the table also has the prediction at the run's mean lengths, and model FLOPs over
peak FLOPs by phase (attention counted causally).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import ChildFailed, Report, arguments, cores, say, torchrun, warn_if_busy

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
"""Overrides of a measured run. Its last step still saves the state, outside the measured time."""


@dataclass(frozen=True)
class Case:
    """One configuration with its derived values."""

    name: str
    """Name of its file."""
    config: RunConfig
    """Resolved configuration."""
    memory: Mapping[str, float]
    """Bytes by phase, as `check` estimates them."""
    shipped: tuple[Path, ...]
    """Folders of models that ship with the configuration."""

    def shape_of(self, path: str) -> ModelShape:
        """Return the shape of a model by its path, or of a shipped one of the same name."""
        # The path may only exist on a cluster: then a shipped config.json of the same name is used.
        folders = [Path(path), *(folder / Path(path).name for folder in self.shipped)]
        folder = next((folder for folder in folders if (folder / "config.json").is_file()), None)
        return load_shape(str(folder or path))

    def predict(
        self,
        gpu: str,
        constants: Constants,
        stats: RunStats | None = None,
    ) -> RunStep:
        """Predict one step on a GPU."""
        return predict_run(
            self.config,
            constants,
            gpu,
            role_shapes(self.config, self.shape_of),
            stats,
        )


def read_case(path: str, overrides: Sequence[str]) -> Case:
    """Read and check a configuration; raises UserErrors with every error in it."""
    loaded = load(path, overrides)
    candidates = [folder / "models" for file in loaded.files for folder in (file.parent, file.parent.parent)]
    shipped = tuple(folder for folder in candidates if folder.is_dir())
    report = check_config(loaded, without_files=True, shipped_models=next(iter(shipped), None))
    # Without the model's config.json there is no estimate.
    memory = {}
    if report.memory:
        memory = {name: max(rank.phase_peak(name) for rank in report.memory) for name in MEMORY_PHASES}
    return Case(Path(path).stem, report.valid(), memory, shipped)


def add_prediction(
    report: Report,
    case: Case,
    step: RunStep,
) -> None:
    """Record a predicted step."""
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
    """Record tokens per second and process of each phase, and FLOPs over peak for a known GPU."""
    step_rates = []
    phase_rates = []
    utilizations = []
    for step, times in zip(steps, seconds, strict=True):
        step_rates.append(step.tokens / times["step"] / step.world)
        phase_rates.append(step.rates(times))
        # Without a known GPU there is no peak.
        utilizations.append(step.utilization(times) if step.peak_flops else {})

    # All steps have the phases of the first one.
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
    """Record the metrics of a run folder, and for a known GPU the prediction at the run's own lengths."""
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

    # Tokens and FLOPs of each step follow from its own lengths.
    stats = [estimate_run_stats(case.config, [line]) for line in lines]
    steps = [case.predict(gpu or "h100", constants, step_stats) for step_stats in stats]
    if gpu is None:
        # The peak of another machine is no reference.
        steps = [replace(step, peak_flops=0.0) for step in steps]
    add_rates(report, case, method, steps, seconds)
    # Memory metrics depend on device and phases: record all that the run has written.
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
    """Train on this host in ``world`` processes, or in this process of a job that is launched already."""
    command_line = ["train", path, *overrides, f"run_dir={folder}"]
    # Under a launcher this process is one rank of the run already.
    if "WORLD_SIZE" in os.environ:
        from megatron_rl.cli.main import main as command

        if code := command(command_line):
            sys.exit(code)
        return

    # As many threads for each rank as leave no core idle.
    log = folder.parent / f"{folder.name}.log"
    torchrun(
        ["-m", "megatron_rl", *command_line],
        world,
        max(1, cores() // world),
        log,
        24 * 3600.0,
    )


def compact(cases: Sequence[tuple[Case, RunStep]]) -> str:
    """Return predictions as a table of one line per configuration."""
    head: tuple[str, ...] = ("configuration", "GPUs", "step s", *PHASES, "tokens/s/GPU", "learn FLOPs/peak")
    lines = [head]
    for case, step in cases:
        utilization = step.utilization(step.seconds)
        cells = (f"{step.total:.1f}", *(f"{step.seconds[name]:.1f}" for name in PHASES))
        rate = f"{step.tokens / step.total / step.world:.0f}"
        lines.append((case.name, str(step.world), *cells, rate, f"{utilization['learn']:.2f}"))

    # Names at the left, numbers at the right.
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
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
    """Predict and record every configuration; raises UserError for one without a GPU."""
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
    print(compact(cases))
    report.note("predicted: nothing was run; prompts at their limit, responses a third of theirs on average")


def options_of() -> tuple[list[str], list[str], argparse.Namespace]:
    """Return configurations, overrides and options of the command line."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("words", metavar="CONFIG [key=value ...]", nargs="+")
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
    paths = [text for text in options.words if "=" not in text]
    overrides = [text for text in options.words if "=" in text]
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
    """Run one configuration and record it (rank 0 of a launched job alone records)."""
    default_steps = 1 if options.quick else 3
    steps = options.steps or options.repeats or default_steps
    # One step more, which warms up.
    overrides = [*QUIET, f"steps={steps + 1}", *overrides]
    case = read_case(path, overrides)
    # The option has precedence over the configuration.
    gpu = options.gpu or case.config.gpu
    if options.run is not None:
        add_measurement(report, case, options.run, gpu, constants)
        return

    with tempfile.TemporaryDirectory(prefix="throughput.") as temporary:
        # Ranks of a launched job must agree on the folder: the configuration's own.
        launched = "WORLD_SIZE" in os.environ
        folder = options.keep
        if folder is None:
            folder = Path(case.config.run_dir) if launched else Path(temporary) / "run"
        folder.parent.mkdir(parents=True, exist_ok=True)
        launch(path, overrides, case.config.world_size or 1, folder)
        if int(os.environ.get("RANK", "0")) == 0:
            add_measurement(report, case, folder, gpu, constants)


def main() -> int:
    """Measure or simulate, print, write; return the exit code."""
    paths, overrides, options = options_of()
    report = Report("throughput")

    try:
        constants = load_constants(options.constants)
        if options.simulate:
            simulate(report, paths, overrides, options.gpu, constants)
        else:
            warn_if_busy("throughput")
            measure(report, paths[0], overrides, options, constants)
    except (UserError, UserErrors) as error:
        say("throughput", str(error))
        return 2
    except ChildFailed as error:
        report.fail(str(error))

    # One rank of a job prints.
    if int(os.environ.get("RANK", "0")):
        return 0
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
