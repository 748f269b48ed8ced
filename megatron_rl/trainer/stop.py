"""End a rank that its launcher stopped or left behind, and say where it was, even inside a collective."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.distributed.watch import last_calls
from megatron_rl.launcher import launch
from megatron_rl.trainer.loop import Phases

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
        self.place, self._phases, self._console, self._seconds = place, phases, console, seconds
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
        os.write(self._console, f"\n{self.place} was asked to stop ({name}): after this step\n".encode())
        timer = threading.Timer(self._seconds, self._end, args=(number,))
        timer.daemon = True
        timer.start()

    def leave(self, words: str, code: int = 1) -> None:
        """Say the words on the console and end the process at once."""
        os.write(self._console, f"\n{words}\n".encode())
        os._exit(code)

    def _end(self, number: int) -> None:
        calls = last_calls(self._main)
        self.leave(f"{self.place} was stopped {self._phases.place}, inside {calls}", 128 + number)


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
    # What nohup started outlives its terminal. torchrun ends a rank that does not answer what it passes on.
    nohup = launch().alone and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    answered = [number for number in SIGNALS if not (nohup and number is signal.SIGHUP)]
    before = {number: signal.signal(number, lambda *_: None) for number in answered}
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
