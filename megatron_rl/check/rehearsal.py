"""Trial import of the user's code in sandboxed processes, before `check` imports it in its own process.

A loss, an engine or a model provider runs inside the training processes, so `check` imports it too. A module
that exits its process, or whose import never returns, would end or block `check`; here it becomes one error
of the report.

The sandboxed processes import this module, so it imports none of the other rules: that would add to the
start-up time of each process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_rl.contained.process import (
    READY,
    ContainedProcess,
    LoadFailed,
    Requests,
    escape_unprintable,
    format_error,
    set_module_sources,
)
from megatron_rl.errors import UserError
from megatron_rl.user_code import load_module

_LIMITS = {
    "memory_gib": 1024.0,
    "files": 65536,
    "file_gib": 1024.0,
    "processes": 4096,
    "network": True,
    "write": True,
    "read": ("/",),
    "environment": tuple(os.environ),
}
"""Limits that restrict nothing: the code must load as in a training process, which has no limits."""

_MAX_PROCESSES = 8
"""Largest number of concurrent sandboxed processes; few configurations name more functions and classes."""


class _ImportFailure(LoadFailed):
    """Error of a failed import; ``process_failed`` is true if the process exited or timed out."""

    def __init__(self, reason: str, details: str, *, process_failed: bool) -> None:
        super().__init__(reason, details)
        self.process_failed = process_failed


def try_imports(
    object_paths: Mapping[str, str], *, report_exceptions_for: tuple[str, ...] = ()
) -> list[UserError]:
    """Import each function or class of the user in a separate process; return the import errors.

    ``object_paths`` maps configuration keys to the objects that they name: ``file.py:Name`` or
    ``module:Name``.

    An import that crashes or hangs is always an error. An import that raises an exception is an error only
    for the keys in ``report_exceptions_for``. For any other key, `check` later imports the object itself and
    reports the exception.
    """
    # A name without a colon belongs to this package and need not be tested.
    user_paths = {key: object_path for key, object_path in object_paths.items() if ":" in object_path}
    if not user_paths:
        return []

    with ThreadPoolExecutor(_MAX_PROCESSES) as pool:
        failures = list(pool.map(_try_import, user_paths.values()))

    errors: list[UserError] = []
    for (key, object_path), failure in zip(user_paths.items(), failures, strict=True):
        if failure is not None and (failure.process_failed or key in report_exceptions_for):
            expected = "file.py:Name or module:Name that can be imported"
            errors.append(failure.as_error(object_path, key, expected))
    return errors


def _try_import(object_path: str) -> _ImportFailure | None:
    """Import ``object_path`` in a sandboxed process; return the failure, or None if the import succeeds."""
    process = ContainedProcess("megatron_rl.check.rehearsal:serve_import", _LIMITS, object_path)
    try:
        reply = process.load(object_path)
    except LoadFailed as error:
        return _ImportFailure(error.reason, error.details, process_failed=True)
    finally:
        process.kill()

    if "raised" not in reply:
        return None
    reason = escape_unprintable(str(reply["raised"]))
    details = escape_unprintable(str(reply.get("text", "")))
    return _ImportFailure(reason, details, process_failed=False)


def serve_import(requests: Requests, limits: Mapping[str, Any], unenforced: list[str]) -> None:
    """Import the requested object in this sandboxed process, and reply whether the import raised.

    The signature is the same for all serving functions. ``limits`` and ``unenforced`` are not used here.
    """
    # Use the trainer's search path, and its copies of the user's files (`megatron_rl.user_code`) if it has
    # any.
    module_sources, object_path = requests.read()
    set_module_sources(module_sources)
    module, _, name = object_path.rpartition(":")

    reply: dict[str, Any] = {"kind": READY}
    try:
        imported: Any = load_module(module)
        for attribute in name.split("."):
            imported = getattr(imported, attribute)
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt of the user's module
        reply |= {"raised": f"{type(error).__name__}: {error}", "text": format_error(error)}
    requests.reply(reply)
