"""Hang detector: abort a job in which no rank makes progress, and report the ranks that block the others.

A rank may wait for other ranks as long as they make progress, even for hours if a rank generates long
responses. Collectives therefore have practically no timeout. Instead, a thread of each rank reports the
rank's progress to the job's store: the phase, the work done and the current calls of the main thread. One
rank checks whether any report changes.

Before a hanging job is aborted, each rank writes its last collectives from PyTorch's flight recorder, for
``torchfrtrace FOLDER``.

In a job of one rank, the thread of that rank is the only check. It cannot detect a call into C that never
releases the interpreter lock, or a suspended process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.distributed import device
from megatron_rl.progress import progress_text

_MAX_REPORT_INTERVAL = 5.0
"""Largest time in seconds between two reports of a rank; an eighth of `rank_timeout` if that is shorter."""
_STACK_DEPTH = 4
"""Number of innermost calls in a report: the collective and its callers."""
_MAX_RANKS_LISTED = 8
"""Largest number of ranks in the abort message, so that it stays readable in a large job."""

_ABORT_KEY = "hangs"
"""Key in the job's store that is set once a rank has decided to abort."""

_watchdog: Watchdog | None = None


def last_calls(thread_id: int | None) -> str:
    """Return the names of a thread's innermost calls as one line, from the outer to the inner call."""
    frame = sys._current_frames().get(thread_id or 0)
    if frame is None:
        return "an unknown call"

    # `wrapper` is the decorator around every collective of torch.
    call_names = [call.name for call in traceback.extract_stack(frame) if call.name != "wrapper"]
    return " > ".join(call_names[-_STACK_DEPTH:]) or "an unknown call"


@dataclass(frozen=True)
class Report:
    """Report of one rank in the job's store, which other ranks compare with the rank's previous report.

    Example: ``Report("12", "81303", True, "rank 3 in phase learn after 40 micro-batches, inside barrier")``.
    """

    report_number: str
    """Number of this rank's reports so far; it changes while the reporting thread runs."""
    progress_hash: str
    """Hash of phase, work done and call stack; it changes when the main thread makes progress."""
    is_in_collective: bool
    """Whether the main thread is in a collective, where it may wait for other ranks."""
    text: str
    """Rank, phase, work and innermost calls, for the abort message."""

    @classmethod
    def from_text(cls, text: str) -> Report:
        """Parse a report from the text of `to_text`."""
        # Split only three times, since the description may contain line breaks.
        report_number, progress_hash, waiting_flag, description = text.split("\n", 3)
        return cls(report_number, progress_hash, bool(waiting_flag), description)

    def to_text(self) -> str:
        """Format the report as text, which `from_text` parses."""
        waiting_flag = ""
        if self.is_in_collective:
            waiting_flag = "waits"
        return "\n".join([self.report_number, self.progress_hash, waiting_flag, self.text])


class HangDetector:
    """Detector of a hang from the reports of all ranks; all times are of this rank's monotonic clock.

    ``timeout``: seconds without progress of any rank after which the job counts as hanging.
    ``rank_count``: number of ranks in the job.
    ``now``: current time in seconds.
    """

    def __init__(self, timeout: float, rank_count: int, now: float) -> None:
        self._timeout = timeout
        self._last_report: list[Report | None] = [None] * rank_count
        # By rank: the time of the last report with progress, and the time of the last report.
        self._progress_time = [now] * rank_count
        self._report_time = [now] * rank_count

    def record_report(self, now: float, rank: int, report: Report) -> None:
        """Record the report of a rank, read at time ``now``."""
        previous = self._last_report[rank]
        if previous is None or previous.progress_hash != report.progress_hash:
            self._progress_time[rank] = now
        if previous is None or previous.report_number != report.report_number:
            self._report_time[rank] = now
        self._last_report[rank] = report

    def is_silent(self, now: float, rank: int) -> bool:
        """Return whether a rank no longer reports: its process is suspended or its machine unreachable."""
        return now - self._report_time[rank] > self._timeout / 2

    def abort_message(self, now: float) -> str | None:
        """Return the message with which to abort the job, or None while any rank makes progress."""
        if now - max(self._progress_time) <= self._timeout:
            return None

        # Find the stragglers, which block the other ranks: silent ranks, or else ranks outside a collective,
        # or else all ranks.
        ranks = range(len(self._last_report))
        silent_ranks = [rank for rank in ranks if self.is_silent(now, rank)]
        busy_ranks = [rank for rank in ranks if rank not in silent_ranks and not self._is_waiting(rank)]
        stragglers = list(ranks)
        if silent_ranks:
            stragglers = silent_ranks
        elif busy_ranks:
            stragglers = busy_ranks

        # List the stragglers with their last reports.
        lines = [f"no rank made progress for {self._timeout:g} s (rank_timeout)"]
        for rank in stragglers[:_MAX_RANKS_LISTED]:
            state = "is"
            if rank in silent_ranks:
                state = "stopped reporting, last seen"
            # The text of a report begins with "rank N in phase": insert the state of the rank.
            report_text = self._describe_rank(rank).replace(" in phase", f" {state} in phase", 1)
            lines.append(f"  {report_text}")
        if len(stragglers) > _MAX_RANKS_LISTED:
            lines.append(f"  and {len(stragglers) - _MAX_RANKS_LISTED} more")

        # Describe only the first of the waiting ranks, with its collective.
        waiting_ranks = [rank for rank in ranks if rank not in stragglers]
        if waiting_ranks:
            line = f"  waiting for them: {self._describe_rank(waiting_ranks[0])}"
            if len(waiting_ranks) > 1:
                line += f" and {len(waiting_ranks) - 1} more"
            lines.append(line)
        return "\n".join(lines)

    def _describe_rank(self, rank: int) -> str:
        """Return the text of a rank's last report, or the rank's number if it has not reported."""
        report = self._last_report[rank]
        if report is None:
            return str(rank)
        return report.text

    def _is_waiting(self, rank: int) -> bool:
        """Return whether a rank was in a collective at its last report."""
        report = self._last_report[rank]
        return report is not None and report.is_in_collective


class Watchdog:
    """Thread that reports this rank's progress to the job's store and ends the process when the job hangs.

    The lowest rank that still reports decides whether the job hangs; usually this is rank 0. The constructor
    is collective over the world.

    ``timeout``: seconds without progress of any rank after which the job is aborted (`rank_timeout`).
    ``describe``: function that returns this rank and its phase, for messages.
    ``abort``: function that prints a message and ends the process.
    ``records_folder``: folder for the flight records of all ranks, or None for no records.
    """

    def __init__(
        self,
        timeout: float,
        describe: Callable[[], str],
        abort: Callable[[str], None],
        records_folder: Path | None,
    ) -> None:
        self._timeout = timeout
        self._describe = describe
        self._abort = abort
        self._records_folder = records_folder
        self._interval = min(_MAX_REPORT_INTERVAL, timeout / 8)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._main_thread = threading.main_thread().ident
        self._num_reports = 0
        self._stopped = threading.Event()

        # Use a second connection, since the main thread may block the first connection while it waits.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()

        # Every rank must have reported once before any rank reads the reports.
        self._send_report()
        dist.barrier()
        threading.Thread(target=self._watch_until_stopped, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Stop reporting and checking."""
        self._stopped.set()

    def _watch_until_stopped(self) -> None:
        """Run the thread: report and check until `stop` is called or the job hangs."""
        detector = None
        last_store_reply = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()

            # A long gap means that this process was suspended (SIGSTOP) and has missed reports of other
            # ranks. Restart the detector: the old one would count the gap as silence of the other ranks.
            if detector is None or now - last_store_reply > self._timeout / 2:
                detector = HangDetector(self._timeout, self._world_size, now)

            try:
                self._send_report()
                if self._store.check([_ABORT_KEY]):
                    self._write_flight_record()
                    return
                self._abort_if_hanging(detector, now)
                last_store_reply = now
            except RuntimeError as error:
                # torch's stores raise RuntimeError if their host is unreachable.
                if not self._stopped.is_set() and now - last_store_reply > self._timeout:
                    self._abort(f"{self._describe()}: the job's store does not answer: {error}")

    def _abort_if_hanging(self, detector: HangDetector, now: float) -> None:
        """Abort the job if it hangs, and if this is the lowest rank that still reports."""
        # Rank 0 reads all reports. Other ranks read only the report of rank 0, until rank 0 is silent.
        first_unread_rank = 0
        if self._rank != 0:
            self._read_reports(detector, now, range(1))
            if not detector.is_silent(now, 0):
                return
            first_unread_rank = 1
        self._read_reports(detector, now, range(first_unread_rank, self._world_size))

        # The lowest rank that still reports decides.
        reporting_ranks = [rank for rank in range(self._world_size) if not detector.is_silent(now, rank)]
        if not reporting_ranks or reporting_ranks[0] != self._rank:
            return

        message = detector.abort_message(now)
        if message is None or self._stopped.is_set():
            return

        self._store.set(_ABORT_KEY, message)
        self._write_flight_record()

        # The other ranks need up to three intervals to read the key and to write their flight records.
        if not self._stopped.wait(3 * self._interval):
            if self._records_folder:
                message += f"\n  the last collectives of each rank: torchfrtrace {self._records_folder}"
            self._abort(message)

    def _write_flight_record(self) -> None:
        """Write this rank's last collectives to the folder of flight records, if it is configured."""
        if self._records_folder is None:
            return

        # The abort message must appear even if the folder cannot be written.
        with contextlib.suppress(OSError):
            self._records_folder.mkdir(parents=True, exist_ok=True)
            (self._records_folder / f"rank_{self._rank}").write_bytes(device.dump_flight_record())

    def _read_reports(self, detector: HangDetector, now: float, ranks: range) -> None:
        """Update the detector from the reports of ``ranks`` in the job's store."""
        keys = [f"report {rank}" for rank in ranks]
        report_texts = self._store.multi_get(keys)
        for rank, report_text in zip(ranks, report_texts, strict=True):
            detector.record_report(now, rank, Report.from_text(report_text.decode()))

    def _send_report(self) -> None:
        """Write the phase, the work done and the innermost calls of this rank's main thread to the store."""
        self._num_reports += 1

        # Hash the line numbers of the complete stack: while a rank makes progress, one of them changes.
        stack = []
        is_in_collective = False
        frame: Any = sys._current_frames().get(self._main_thread or 0)
        while frame is not None:
            stack.append((frame.f_code.co_name, frame.f_lineno))
            module_name = frame.f_globals.get("__name__", "")
            is_in_collective = is_in_collective or module_name.startswith("torch.distributed")
            frame = frame.f_back

        description = self._describe()
        work = progress_text()
        report_text = f"{description} after {work or 'no work'}, inside {last_calls(self._main_thread)}"
        progress_hash = str(hash((description, work, *stack)))
        report = Report(str(self._num_reports), progress_hash, is_in_collective, report_text)
        self._store.set(f"report {self._rank}", report.to_text())


def join_job(
    timeout: float,
    describe: Callable[[], str],
    abort: Callable[[str], None] | None = None,
    records_folder: Path | None = None,
) -> None:
    """Join the job, and start a `Watchdog` that aborts it after ``timeout`` seconds without progress.

    ``timeout`` also bounds the rendezvous. The other arguments are as in `Watchdog`; ``abort`` is by default
    `exit_immediately`. Collective over the world.
    """
    global _watchdog
    device.initialize(timeout, watched=True)

    # A simulated rank has no peers to wait for.
    if not device.is_simulated():
        _watchdog = Watchdog(timeout, describe, abort or exit_immediately, records_folder)


def exit_immediately(message: str) -> None:
    """Print the message and end the process immediately, even if its threads are blocked."""
    os.write(2, f"\n{message}\n".encode())
    os._exit(1)


def leave_job() -> None:
    """Leave the job after all ranks are done, and destroy the process groups. Collective over the world."""
    global _watchdog
    if not dist.is_initialized():
        return

    dist.barrier()
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None
    dist.destroy_process_group()
