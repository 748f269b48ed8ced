"""The process in which a reward function runs. Started as a file by `megatron_rl.rewards.function`.

It imports the standard library alone, so a new worker is ready in some ten milliseconds and has none of the
trainer's threads and devices. Frames are pickles behind an 8-byte length.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

HEADER = struct.Struct("<Q")

LOAD_FAILED, READY, SCORED, FAILED = "load_failed", "ready", "scored", "failed"
EXCEPTION, NOT_FINITE, WRONG_TYPE = "exception", "not_finite", "wrong_type"


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Write one value as a frame and flush it."""
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEADER.pack(len(payload)) + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """Read one frame; raise EOFError when the other side has closed."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def load_function(spec: str) -> Callable[..., Any]:
    """Import what ``module:function`` or ``file.py:function`` names; errors tell which part is wrong."""
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{name} is not callable but {type(function).__name__}")
    return function


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_reward_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up by name
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbours
    spec.loader.exec_module(module)
    return module


def judge(
    function: Callable[..., Any], item: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Call ``function`` on one sample; return (SCORED, reward, components) or (FAILED, reason, message)."""
    try:
        value = function(**item, **arguments)
        components = dict(value) if isinstance(value, Mapping) else {"reward": value}
        if "reward" not in components:
            return FAILED, WRONG_TYPE, f"a mapping without 'reward': {sorted(map(str, components))}"
        numbers = {str(name): _number(part) for name, part in components.items()}
    except WrongType as error:
        return FAILED, WRONG_TYPE, str(error)
    except BaseException as error:  # a reward function that calls sys.exit must not end the worker
        return FAILED, EXCEPTION, "".join(traceback.format_exception(error, limit=-3)).strip()
    for name, number in numbers.items():
        if not math.isfinite(number):
            return FAILED, NOT_FINITE, f"{name} is {number}"
    return SCORED, numbers.pop("reward"), numbers


class WrongType(Exception):
    """A reward function returned something that is not a number."""


def _number(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
        if isinstance(value, int | float):
            return float(value)
    raise WrongType(
        f"expected a number or a mapping with 'reward', got {type(value).__name__}: {value!r:.80}"
    )


def _end_with(parent: int) -> None:
    """End this process and its children when the trainer is gone, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Serve until the trainer closes the request pipe: one set-up frame, then frames of samples."""
    requests, replies = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    for stream in (requests, replies):
        os.set_inheritable(stream.fileno(), False)  # programs that a reward function starts
    threading.Thread(target=_end_with, args=(int(sys.argv[3]),), daemon=True).start()
    path, spec, arguments = read_frame(requests)
    sys.path[:] = path
    try:
        function = load_function(spec)
    except BaseException as error:
        message = "".join(traceback.format_exception(error, limit=-2)).strip()
        write_frame(replies, (LOAD_FAILED, f"{type(error).__name__}: {error}", message))
        return
    write_frame(replies, (READY,))
    while True:
        try:
            items = read_frame(requests)
        except EOFError:
            return
        for item in items:
            write_frame(replies, judge(function, item, arguments))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads that a reward function left running must not keep the process
