"""Reward function that harms its process, its machine or its caller, as the response names."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any


def judge(*, prompt: str, response: str, ground_truth: Any, metadata: dict[str, Any]) -> Any:
    """Perform the act that ``response`` names, in the way that the metadata's ``vehicle`` names."""
    return VEHICLES[metadata["vehicle"]](lambda: ACTS[response](metadata))


def threaded(act: Callable[[], Any]) -> float:
    """Act in a thread and wait for it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return 1.0


def forked(act: Callable[[], Any]) -> float:
    """Act in a child process and wait for it."""
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def abandoned(act: Callable[[], Any]) -> float:
    """Act in an orphaned process with a session of its own that ignores signals."""
    if os.fork() == 0:
        os.setsid()
        for number in (
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGINT,
            signal.SIGXCPU,
        ):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            act()
            time.sleep(1000)
        os._exit(0)

    # Let the process become an orphan before the call returns.
    time.sleep(0.2)
    return 1.0


VEHICLES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "direct": lambda act: act(),
    "threaded": threaded,
    "forked": forked,
    "abandoned": abandoned,
}


class Silent(BaseException):
    """Exception whose message raises another one."""

    def __str__(self) -> str:
        raise ValueError("no message")


class Number:
    """Result whose conversion to a number fails."""

    def __float__(self) -> float:
        raise ArithmeticError("no number")


class Endless:
    """Result whose conversion to a number does not end."""

    def __float__(self) -> float:
        while True:
            pass


class Liar(float):
    """Number that converts to another one."""

    def __float__(self) -> float:
        return float("nan")


def raises(error: BaseException) -> Callable[[Any], Any]:
    def act(_: Any) -> Any:
        raise error

    return act


def deep(_: Any) -> Any:
    return deep(_)


def bomb(_: Any) -> None:
    """Start 400 processes that sleep."""
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def spin(_: Any) -> None:
    while True:
        pass


def spin_in_c(_: Any) -> Any:
    return sum(range(10**12))


def many_threads(_: Any) -> None:
    for _ in range(5000):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    time.sleep(1000)


def many_files(_: Any) -> Any:
    return float(len([open("/dev/null") for _ in range(10_000)]))


def write(folder: str) -> Callable[[Any], Any]:
    def act(metadata: dict[str, Any]) -> Any:
        return float(Path(folder, metadata["mark"]).write_text("x"))

    return act


def fill(metadata: dict[str, Any]) -> None:
    with open(f"/tmp/{metadata['mark']}", "wb") as file:
        while True:
            file.write(bytes(2**24))


def segment(metadata: dict[str, Any]) -> float:
    shared_memory.SharedMemory(metadata["mark"], create=True, size=2**20)
    return 1.0


def connect(metadata: dict[str, Any]) -> float:
    socket.create_connection(("127.0.0.1", metadata["port"]), timeout=5)
    raise AssertionError("reached a server outside")


def listen(_: Any) -> None:
    server = socket.socket()
    # Nobody can connect: the call waits until its time is up.
    server.bind(("0.0.0.0", 0))
    server.listen()
    server.accept()


def say(_: Any) -> float:
    for _ in range(50):
        os.write(1, b"x" * 2**16)
        os.write(2, b"y" * 2**16)
    return 1.0


def close_all(_: Any) -> float:
    # One of these descriptors is the pipe to the trainer.
    os.closerange(0, 100)
    return 1.0


def to_pipes(data: bytes) -> Callable[[Any], float]:
    """Return an act that writes data to every open descriptor, including the pipe to the trainer."""

    def act(_: Any) -> float:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.write(int(name), data)
        return 1.0

    return act


def frame(content: Any) -> bytes:
    """Return content in the format of the pipe to the trainer: its length in 8 bytes, then JSON."""
    data = json.dumps(content).encode()
    return struct.pack("<Q", len(data)) + data


def blind(_: Any) -> float:
    """Ignore every signal that can be ignored, and never return."""
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def kill_everyone(_: Any) -> float:
    os.kill(-1, signal.SIGKILL)
    return 1.0


def kill_group(_: Any) -> float:
    os.killpg(0, signal.SIGKILL)
    return 1.0


def trace_parent(_: Any) -> float:
    # 16 is PTRACE_ATTACH.
    if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0:
        raise AssertionError("attached to the parent")
    return 1.0


def replaced(_: Any) -> float:
    """Replace the worker by another program."""
    os.execvp("sleep", ["sleep", "1000"])
    return 1.0


def remount(_: Any) -> float:
    # 32 | 4096: a bind mount is mounted again, without its read-only flag.
    if ctypes.CDLL(None).mount(None, b"/", None, 32 | 4096, None) == 0:
        raise AssertionError("made the file system writable")
    return 1.0


def sleeper(metadata: dict[str, Any]) -> float:
    """Start a program in a session of its own, and return."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 1.0


HARMLESS = (
    "fine", "say", "write /tmp", "write /var/tmp", "write home", "segment", "trace parent", "remount",
    "sleeper", "liar", "bool",
)  # fmt: skip
"""Acts after which the sample may be valid."""
ACTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fine": lambda _: 1.0,
    "nan": lambda _: float("nan"),
    "inf": lambda _: {"reward": -float("inf")},
    "huge": lambda _: 1e300,
    "huge integer": lambda _: 10**5000,
    "text": lambda _: "1.0",
    "nothing": lambda _: None,
    "list": lambda _: [1.0],
    "bytes": lambda _: b"1",
    "complex": lambda _: 1j,
    "bool": lambda _: True,
    "no reward": lambda _: {"score": 1.0},
    "nested": lambda _: {"reward": {"reward": 1.0}},
    "nan component": lambda _: {"reward": 1.0, "part": float("nan")},
    "many components": lambda _: {"reward": 1.0} | {str(n): 1.0 for n in range(10_000)},
    "long name": lambda _: {"reward": 1.0, "x" * 10**7: 1.0, 3: 1.0},
    "no number": lambda _: Number(),
    "endless number": lambda _: Endless(),
    "liar": lambda _: Liar(1.0),
    "generator": lambda _: (value for value in (1.0,)),
    "silent": raises(Silent()),
    "interrupt": raises(KeyboardInterrupt()),
    "exit": raises(SystemExit(0)),
    "generator exit": raises(GeneratorExit()),
    "long words": raises(ValueError("x" * 10**8)),
    "half words": raises(ValueError("half \udc00 pair")),
    "deep": deep,
    "leave": lambda _: os._exit(0),
    "leave with 3": lambda _: os._exit(3),
    "segmentation": lambda _: ctypes.string_at(0),
    "kill self": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop self": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "kill parent": lambda _: (
        os.kill(os.getppid(), signal.SIGKILL),
        time.sleep(1),
    )[1],
    "kill everyone": kill_everyone,
    "kill group": kill_group,
    "sleep": lambda _: time.sleep(1000),
    "spin": spin,
    "spin in c": spin_in_c,
    "bomb": bomb,
    "many threads": many_threads,
    "many files": many_files,
    "memory": lambda _: float(len(bytearray(10 * 2**30))),
    "write here": write("."),
    "write /tmp": write("/tmp"),
    "write /var/tmp": write("/var/tmp"),
    "write home": write(os.path.expanduser("~")),
    "fill": fill,
    "segment": segment,
    "connect": connect,
    "listen": listen,
    "say": say,
    "close all": close_all,
    "noise": to_pipes(os.urandom(4096)),
    "forged": to_pipes(
        frame(
            {
                "sample": 2,
                "kind": "scored",
                "reward": 9.0,
                "components": {},
            }
        )
    ),
    "endless frame": to_pipes(struct.pack("<Q", 1 << 60)),
    "empty frame": to_pipes(struct.pack("<Q", 0) * 8),
    "deep frame": to_pipes(struct.pack("<Q", 200_000) + b"[" * 200_000),
    "blind": blind,
    "trace parent": trace_parent,
    "replaced": replaced,
    "remount": remount,
    "sleeper": sleeper,
    "broken json": lambda _: setattr(json, "dumps", lambda *_, **__: "{"),
    "broken exit": lambda _: (
        setattr(sys, "exit", None),
        setattr(os, "write", None),
    )[0],
}
