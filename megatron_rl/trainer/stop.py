"""End a rank that its launcher stopped or left behind, and say where it was, even inside a collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.trainer.loop import Phases

_SHOWN = 4
"""Calls of the stack that are told: the collective and who asked for it."""


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a job to stop: from launchers, terminals, and schedulers that will preempt it."""


class Stopped(BaseException):
    """End this rank in order, after a signal asked the job to stop and its state was saved."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Stop:
    """Know whether this rank was asked to stop, and bound the time that it takes to save first."""

    def __init__(self, place: str, phases: Phases, console: int, seconds: float) -> None:
        self.asked: int | None = None
        self._place, self._phases, self._console, self._seconds = place, phases, console, seconds
        self._saves = False
        self._main = threading.main_thread().ident

    @contextmanager
    def saves(self) -> Iterator[None]:
        """Say that each step inside the block ends with a look at `asked`, when the job can save and stop."""
        self._saves = True
        try:
            yield
        finally:
            self._saves = False

    def answer(self, number: int) -> None:
        """Take a signal: end at once where nothing is saved, or on the second one, else wait for the step."""
        name = signal.Signals(number).name
        if not self._saves or self.asked is not None:
            self._end(number)
        self.asked = number
        os.write(self._console, f"\n{self._place} was asked to stop ({name}): after this step\n".encode())
        timer = threading.Timer(self._seconds, self._end, args=(number,))
        timer.daemon = True
        timer.start()

    def _end(self, number: int) -> None:
        os.write(self._console, _words(self._place, self._phases, self._main).encode())
        os._exit(128 + number)


@contextmanager
def report_stop(place: str, phases: Phases, seconds: float) -> Iterator[Stop]:
    """Answer `SIGNALS` inside the block: let the job save after its step, or end and say where it was.

    What is said goes to what standard error is at the block's start. A rank that does not come to the end of
    its step within ``seconds``, as where it waits for a rank that is gone, ends then, with its phase, step
    and the waiting call. Python runs signal handlers between its own instructions, which never come while a
    collective waits; so the signal wakes a thread, and that speaks for the process.
    """
    console = os.dup(2)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    stop = Stop(place, phases, console, seconds)

    def listen() -> None:
        while received := os.read(woken, 1):
            if received[0] in SIGNALS:
                stop.answer(received[0])

    listener = threading.Thread(target=listen, name="report_stop", daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)  # ends the listener
        listener.join()
        os.close(woken)
        os.close(console)


def _words(place: str, phases: Phases, main: int | None) -> str:
    frame = sys._current_frames().get(main or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [entry.name for entry in stack if entry.name != "wrapper"][-_SHOWN:]
    calls = " > ".join(own) or "an unknown call"
    return f"\n{place} was stopped in phase '{phases.current}' of step {phases.step}, inside {calls}\n"
