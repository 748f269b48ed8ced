"""Run the command line and kill one rank at a call of a function.

Environment variables select the call: ``KILL_AT`` is the function as ``MODULE:NAME``, ``KILL_CALL`` the
number of the call from 1, ``KILL_RANK`` the rank. With ``KILL_AFTER`` the function runs before the kill.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any

from megatron_rl.cli.main import main


def replace_function() -> None:
    """Replace the function ``KILL_AT`` by a wrapper that kills this process at call ``KILL_CALL``."""
    module_name, path = os.environ["KILL_AT"].split(":")
    # A method has the names of its classes before its own.
    *class_names, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for class_name in class_names:
        owner = getattr(owner, class_name)

    original = getattr(owner, name)
    num_calls = 0

    @functools.wraps(original)
    def kill_at_call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls != int(os.environ["KILL_CALL"]):
            return original(*arguments, **keywords)

        if "KILL_AFTER" in os.environ:
            original(*arguments, **keywords)
        # SIGKILL leaves no chance to clean up, as a power failure or the kernel's memory killer.
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, kill_at_call)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["KILL_RANK"]:
        replace_function()
    sys.exit(main())
