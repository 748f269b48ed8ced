"""Run the command line and kill one rank at a call.

``KILL_AT`` is ``MODULE:NAME``, ``KILL_CALL`` which call of it (1 is the first), ``KILL_RANK`` whose; with
``KILL_AFTER`` the call still returns.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any

from megatron_rl.cli.main import main


def arm() -> None:
    """Put a function in the place of the named one that kills this process at the named call."""
    module, name = os.environ["KILL_AT"].split(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    calls = 0

    @functools.wraps(original)
    def killing(*values: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != int(os.environ["KILL_CALL"]):
            return original(*values, **named)
        if "KILL_AFTER" in os.environ:
            original(*values, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killing)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["KILL_RANK"]:
        arm()
    sys.exit(main())
