"""Say where a rank was when the launcher stopped it, even while it waits inside a collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.trainer.phases import Phases

_SHOWN = 4
"""Calls of the stack that are told: the collective and who asked for it."""


@contextmanager
def report_stop(place: str, phases: Phases) -> Iterator[None]:
    """Answer SIGTERM inside the block with ``place``, phase, step and waiting call, then end the process.

    They go to what standard error is at the block's start. Python runs signal handlers between its own
    instructions, which never come while a collective waits for a rank that is gone; so the signal wakes a
    thread, and that speaks for the process.
    """
    console = os.dup(2)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    descriptor = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    main = threading.main_thread().ident

    def listen() -> None:
        while received := os.read(woken, 1):
            if received[0] == signal.SIGTERM:
                os.write(console, _words(place, phases, main).encode())
                os._exit(128 + signal.SIGTERM)

    listener = threading.Thread(target=listen, name="report_stop", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGTERM, before)
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
