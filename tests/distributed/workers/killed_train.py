"""Run the command line and kill one rank at a call of a function.

``KILL_AT`` names the function as ``MODULE:NAME``, ``KILL_CALL`` the number of the call from 1, ``KILL_RANK``
the rank. With ``KILL_AFTER`` the function runs before the rank is killed.
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
    """Replace the function of ``KILL_AT`` by one that kills this process at call ``KILL_CALL``."""
    module, name = os.environ["KILL_AT"].split(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def kill_at_call(*values: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != int(os.environ["KILL_CALL"]):
            return original(*values, **keywords)
        if "KILL_AFTER" in os.environ:
            original(*values, **keywords)
        # SIGKILL leaves no chance to clean up, as a power failure or the kernel's memory killer.
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, kill_at_call)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["KILL_RANK"]:
        arm()
    sys.exit(main())
