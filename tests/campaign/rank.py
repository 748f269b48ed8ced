"""Run the command line as a rank and announce each phase of each step to a local port."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.durable import REPLACED
from megatron_rl.metrics import LAST_STEP
from megatron_rl.trainer.loop import Phases

REPLACEMENT = "replacement"
"""Phase that is announced between the two renames of a replaced checkpoint."""
REPLACEMENT_SECONDS = 2.0
"""Seconds for a signal to arrive in that phase."""


def announce_phases() -> None:
    """Send a datagram at the start of each phase to the local port ``CAMPAIGN_PORT``."""
    sender = socket.socket(type=socket.SOCK_DGRAM)
    listener = "127.0.0.1", int(os.environ["CAMPAIGN_PORT"])
    original = Phases.__call__
    facts = {"rank": int(os.environ["RANK"]), "process": os.getpid()}
    facts |= {"launch": int(os.environ["CAMPAIGN_LAUNCH"])}
    facts |= {"restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}

    @contextmanager
    def announced(phases: Phases, name: str) -> Iterator[None]:
        with original(phases, name):
            with suppress(OSError):  # the campaign has stopped listening
                message = json.dumps(facts | {"phase": name, "step": phases.step})
                sender.sendto(message.encode(), listener)
            yield

    # Phases is entered by every stage of a run, so one patch covers them all.
    setattr(Phases, "__call__", announced)


def announce_replacements() -> None:
    """Announce the moment between the two renames of a replaced checkpoint as a phase, and wait in it.

    It lasts microseconds, so a signal at a random time would never arrive in it.
    """
    sender = socket.socket(type=socket.SOCK_DGRAM)
    listener = "127.0.0.1", int(os.environ["CAMPAIGN_PORT"])
    facts = {"rank": int(os.environ["RANK"]), "process": os.getpid()}
    facts |= {"launch": int(os.environ["CAMPAIGN_LAUNCH"])}
    facts |= {"restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}

    def on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
        # The first rename moves the old checkpoint aside, the second one moves the new one to its place.
        if event != "os.rename" or not str(arguments[0]).endswith(".partial"):
            return
        if os.path.isdir(f"{arguments[1]}{REPLACED}"):
            message = json.dumps(facts | {"phase": REPLACEMENT, "step": LAST_STEP})
            with suppress(OSError):
                sender.sendto(message.encode(), listener)
            time.sleep(REPLACEMENT_SECONDS)

    sys.addaudithook(on_audit_event)


if __name__ == "__main__":
    announce_phases()
    announce_replacements()
    sys.exit(main())
