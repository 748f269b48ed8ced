"""Tell ranks that wait from ranks that hang: a job in which no rank gets on ends, and says who is behind.

One rank is watched as many are, by its own thread: it cannot see a call into C that never lets go of the
interpreter, nor its process being stopped.

A rank may wait for others as long as they work: hours, where one of them writes long responses. So no
collective has a limit of its own. Instead each rank tells the job's store, from a thread, where it is, and
one of them looks whether anybody is elsewhere than before. Before a job that hangs ends, each rank writes
down which collectives it has called: PyTorch's flight recorder, for ``torchfrtrace FOLDER``.
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
from megatron_rl.progress import done

_LOOKS_SECONDS = 5.0
"""Time between two reports of a rank, at most; where the limit is short, an eighth of it."""
_SHOWN_CALLS = 4
"""Calls of the stack that are told: the collective and who asked for it."""
_SHOWN_RANKS = 8

_HANGS = "hangs"
"""The store's key that says that the job ends because nobody gets on."""

_watch: Watch | None = None


def last_calls(thread: int | None) -> str:
    """Return the innermost calls of a thread in words."""
    frame = sys._current_frames().get(thread or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    frames = [entry.name for entry in stack if entry.name != "wrapper"][-_SHOWN_CALLS:]
    return " > ".join(frames) or "an unknown call"


@dataclass(frozen=True)
class Report:
    """Hold what a rank says: the ``beat`` of its thread, what changes when it gets on, and where it is.

    ``waits``: it is in a call that other ranks must enter.
    """

    beat: str
    progress: str
    waits: bool
    words: str

    @classmethod
    def read(cls, text: str) -> Report:
        """Return what `write` gave."""
        beat, progress, waits, words = text.split("\n", 3)
        return cls(beat, progress, bool(waits), words)

    def write(self) -> str:
        """Return the report as text."""
        return "\n".join([self.beat, self.progress, "waits" if self.waits else "", self.words])


class Judge:
    """Follow the reports of all ranks, by one clock; ``limit`` in seconds."""

    def __init__(self, limit: float, ranks: int, now: float) -> None:
        self._limit = limit
        self._last: list[Report | None] = [None] * ranks
        self._moved, self._spoke = [now] * ranks, [now] * ranks

    def hear(self, now: float, rank: int, report: Report) -> None:
        """Take what a rank says now."""
        last = self._last[rank]
        if last is None or last.progress != report.progress:
            self._moved[rank] = now
        if last is None or last.beat != report.beat:
            self._spoke[rank] = now
        self._last[rank] = report

    def is_silent(self, now: float, rank: int) -> bool:
        """Say whether a rank's thread has stopped: the process does, or its machine."""
        return now - self._spoke[rank] > self._limit / 2

    def verdict(self, now: float) -> str | None:
        """Return why the job ends, with the ranks that the others wait for; None where any rank gets on."""
        if now - max(self._moved) <= self._limit:
            return None
        ranks = range(len(self._last))
        silent = [rank for rank in ranks if self.is_silent(now, rank)]
        alone = [rank for rank in ranks if rank not in silent and not self._waits(rank)]
        behind = silent or alone or list(ranks)
        lines = [f"no rank gets on for {self._limit:g} s (rank_timeout)"]
        for rank in behind[:_SHOWN_RANKS]:
            last = self._last[rank]
            state = "says nothing any more, and was last seen" if rank in silent else "stands"
            lines.append(f"  {last.words.replace(' in phase', f' {state} in phase', 1) if last else rank}")
        if len(behind) > _SHOWN_RANKS:
            lines.append(f"  and {len(behind) - _SHOWN_RANKS} more")
        waiting = [rank for rank in ranks if rank not in behind]
        if waiting:
            last = self._last[waiting[0]]
            others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            lines.append(f"  for which wait: {last.words if last else waiting[0]}{others}")
        return "\n".join(lines)

    def _waits(self, rank: int) -> bool:
        last = self._last[rank]
        return last is not None and last.waits


class Watch:
    """Report this rank to the job's store and end the process when the job hangs.

    ``place`` says who and where this rank is, ``end`` takes the words and leaves the process; ``records`` is
    the folder of the ranks' last collectives, where they are to be written down. The first rank judges; where
    it is silent, the next one that is not. Collective over the world, which meets in it.
    """

    def __init__(
        self, limit: float, place: Callable[[], str], end: Callable[[str], None], records: Path | None
    ) -> None:
        self._limit, self._place, self._end, self._records = limit, place, end, records
        self._looks = min(_LOOKS_SECONDS, limit / 8)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident
        self._beats = 0
        self._ended = threading.Event()
        # A connection of its own: the main thread's may be busy for as long as it waits.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._tell()
        dist.barrier()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Report and judge no more."""
        self._ended.set()

    def _run(self) -> None:
        judge, answered = None, time.monotonic()
        while not self._ended.wait(self._looks):
            now = time.monotonic()
            if judge is None or now - answered > self._limit / 2:  # this process was stopped itself
                judge = Judge(self._limit, self._size, now)
            try:
                self._tell()
                if self._store.check([_HANGS]):
                    self._record()
                    return
                self._judge(judge, now)
                answered = now
            except RuntimeError as error:  # what torch's stores raise
                if not self._ended.is_set() and now - answered > self._limit:
                    self._end(f"{self._place()}: the job's store does not answer: {error}")

    def _judge(self, judge: Judge, now: float) -> None:
        """End the process where this rank is the one that judges, and the job hangs."""
        # Only the first rank listens to all others, unless it is silent itself.
        self._hear(judge, now, range(1 if self._rank else self._size))
        if self._rank and not judge.is_silent(now, 0):
            return
        self._hear(judge, now, range(1, self._size if self._rank else 1))
        first = next((rank for rank in range(self._size) if not judge.is_silent(now, rank)), None)
        words = judge.verdict(now) if first == self._rank else None
        if words is None or self._ended.is_set():
            return
        self._store.set(_HANGS, words)
        self._record()
        if not self._ended.wait(3 * self._looks):  # the other ranks look and write meanwhile
            where = f"\n  the last collectives of each rank: torchfrtrace {self._records}"
            self._end(words + (where if self._records else ""))

    def _record(self) -> None:
        """Write this rank's last collectives down, where that is wanted."""
        if self._records is not None:
            with contextlib.suppress(OSError):  # there is a reason to be told, with or without them
                self._records.mkdir(parents=True, exist_ok=True)
                (self._records / f"rank_{self._rank}").write_bytes(device.flight_record())

    def _hear(self, judge: Judge, now: float, ranks: range) -> None:
        keys = [f"report {rank}" for rank in ranks]
        for rank, text in zip(ranks, self._store.multi_get(keys) if keys else (), strict=True):
            judge.hear(now, rank, Report.read(text.decode()))

    def _tell(self) -> None:
        self._beats += 1
        frame: Any = sys._current_frames().get(self._main or 0)
        stack, waits = [], False
        while frame is not None:
            stack.append((frame.f_code.co_name, frame.f_lineno))
            waits = waits or frame.f_globals.get("__name__", "").startswith("torch.distributed")
            frame = frame.f_back
        place, work = self._place(), done()
        words = f"{place} after {work or 'no work'}, inside {last_calls(self._main)}"
        progress = str(hash((place, work, *stack)))
        self._store.set(f"report {self._rank}", Report(str(self._beats), progress, waits, words).write())


def join(
    limit: float,
    place: Callable[[], str],
    end: Callable[[str], None] | None = None,
    records: Path | None = None,
) -> None:
    """Join the job, and end the process when no rank gets on for ``limit`` seconds; see `Watch`.

    Ranks that do not meet within ``limit`` seconds give up, too. Collective over the world.
    """
    global _watch
    device.initialize(limit, waits=True)
    if not device.simulated():
        _watch = Watch(limit, place, end or leave_process, records)


def leave_process(words: str) -> None:
    """Print the words and end the process at once, whatever its threads wait for."""
    os.write(2, f"\n{words}\n".encode())
    os._exit(1)


def leave() -> None:
    """Leave the job in an orderly way. Collective over the world."""
    global _watch
    if dist.is_initialized():
        dist.barrier()
        if _watch is not None:
            _watch.stop()
            _watch = None
        dist.destroy_process_group()
