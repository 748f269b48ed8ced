"""Run the command line as a rank does and tell a port which phase of which step the rank enters."""

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
"""The phase that is announced between the two renames of a replaced checkpoint."""
REPLACEMENT_SECONDS = 2.0
"""Time that a signal has to come in it."""


def announce_phases() -> None:
    """Send a datagram at each phase's begin to the port of this host that the environment names."""
    sender = socket.socket(type=socket.SOCK_DGRAM)
    listener = "127.0.0.1", int(os.environ["CAMPAIGN_PORT"])
    original = Phases.__call__
    facts = {"rank": int(os.environ["RANK"]), "process": os.getpid()}
    facts |= {"launch": int(os.environ["CAMPAIGN_LAUNCH"])}

    facts |= {"restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}

    @contextmanager
    def announced(phases: Phases, name: str) -> Iterator[None]:
        with original(phases, name):
            with suppress(OSError):  # nobody listens any more
                message = json.dumps(facts | {"phase": name, "step": phases.step})
                sender.sendto(message.encode(), listener)
            yield

    setattr(Phases, "__call__", announced)


def announce_replacements() -> None:
    """Announce the moment between the two renames of a replaced checkpoint, as a phase, and wait a little.

    It lasts microseconds: a signal that the campaign sends at a random time never comes in it.
    """
    sender = socket.socket(type=socket.SOCK_DGRAM)
    listener = "127.0.0.1", int(os.environ["CAMPAIGN_PORT"])
    facts = {"rank": int(os.environ["RANK"]), "process": os.getpid()}
    facts |= {"launch": int(os.environ["CAMPAIGN_LAUNCH"])}

    facts |= {"restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.rename" or not str(arguments[0]).endswith(".partial"):
            return
        if os.path.isdir(f"{arguments[1]}{REPLACED}"):
            message = json.dumps(facts | {"phase": REPLACEMENT, "step": LAST_STEP})
            with suppress(OSError):
                sender.sendto(message.encode(), listener)
            time.sleep(REPLACEMENT_SECONDS)

    sys.addaudithook(look)


if __name__ == "__main__":
    announce_phases()
    announce_replacements()
    sys.exit(main())
