"""End a rank that its launcher stopped or left behind, and say where it was, even inside a collective."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.parallel import device
from megatron_rl.trainer.phases import Phases

_LOOKS_SECONDS = 1.0
"""Time between two looks at whether the launcher is still there."""

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


def leave_with_launcher() -> None:
    """End this process soon after the launcher that started it is gone, killed without a word to its ranks.

    Ranks that went on would hold devices and ports and write into a folder that the next job takes for its
    own. Only torchrun's own ranks are watched: other launchers see to that themselves, and a process that a
    shell started may outlive it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOKS_SECONDS)
        words = f"\nrank {device.rank()}: the launcher, process {launcher}, is gone: leaving\n"
        with contextlib.suppress(OSError):
            os.write(2, words.encode())
        os._exit(1)

    threading.Thread(target=watch, name="leave_with_launcher", daemon=True).start()


def _words(place: str, phases: Phases, main: int | None) -> str:
    frame = sys._current_frames().get(main or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [entry.name for entry in stack if entry.name != "wrapper"][-_SHOWN:]
    calls = " > ".join(own) or "an unknown call"
    return f"\n{place} was stopped in phase '{phases.current}' of step {phases.step}, inside {calls}\n"
