"""Import the user's pieces in processes of their own before a check imports them in its own.

A loss, an engine or a provider of models runs inside the training processes, so a check imports it, too. A
module that ends its process, or never ends, would do that to the check, which is to report it instead.
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
    readable,
    search,
    told,
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
"""What a training process has anyway."""
_MOST_AT_ONCE = 8


def rehearse(pieces: Mapping[str, str], *, only: tuple[str, ...] = ()) -> list[UserError]:
    """Return the errors of ``file.py:Name`` or ``module:Name`` by key, of those that cannot be imported.

    A piece whose import raises is an error here for the keys in ``only``, which nothing else imports; of the
    others the check tells what they raise when it imports them.
    """
    named = {key: spec for key, spec in pieces.items() if ":" in spec}
    if not named:
        return []
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        failures = list(pool.map(_failure, named.values()))
    errors: list[UserError] = []
    for (key, spec), failure in zip(named.items(), failures, strict=True):
        if failure is not None and (failure.ended or key in only):
            expected = "file.py:Name or module:Name that can be imported"
            errors.append(failure.as_error(spec, key, expected))
    return errors


class _Failure(LoadFailed):
    """Why a piece was not imported; ``ended`` is whether its process ended or did not get to an end."""

    ended = True


def _failure(spec: str) -> _Failure | None:
    process = ContainedProcess("megatron_rl.check.rehearsal:serve", _LIMITS, spec)
    try:
        answer = process.load(spec)
    except LoadFailed as failed:
        return _Failure(failed.reason, failed.details)
    finally:
        process.kill()
    if "raised" not in answer:
        return None
    failure = _Failure(readable(str(answer["raised"])), readable(str(answer.get("text", ""))))
    failure.ended = False
    return failure


def serve(requests: Requests, limits: Mapping[str, Any], missing: list[str]) -> None:
    """Import the piece that the trainer names, and say whether that raised."""
    place, spec = requests.read()
    search(place)
    module, _, name = spec.rpartition(":")
    answer: dict[str, Any] = {"kind": READY}
    try:
        value: Any = load_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except BaseException as error:
        answer |= {"raised": f"{type(error).__name__}: {error}", "text": told(error)}
    requests.reply(answer)
