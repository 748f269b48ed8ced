"""Run the command line as a rank does and tell a port which phase of which step the rank enters."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron_rl.cli.main import main
from megatron_rl.trainer.loop import Phases


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


if __name__ == "__main__":
    announce_phases()
    sys.exit(main())
