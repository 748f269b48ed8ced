"""Make attacks in contained reward functions: as this user or another, with namespaces or without."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.sections.rewards import RewardConfig, RewardLimitsConfig
from megatron_rl.contained import confinement, filters, kernel
from megatron_rl.rewards.function import FunctionReward
from tests.campaign import attacks
from tests.campaign.attacks import ATTACKS, LIMIT_GIB, SECRETS

NOBODY = 65534
NAMED = {
    "see names of files": confinement.NAMES_VISIBLE,
    "see processes": confinement.NAMES_VISIBLE,
    "read hidden files beside the code": confinement.HIDDEN_READABLE,
}
"""Attacks that get through where Landlock takes the place of namespaces, and the words it is said with."""


def unnamed(answer: Mapping[str, Any]) -> list[str]:
    """Return the attacks of an `attack` that got through although nothing says that they may."""
    missing = " ".join(answer["missing"])
    return [name for name in answer["through"] if name not in NAMED or NAMED[name] not in missing]


@contextlib.contextmanager
def targets(work: Path) -> Iterator[dict[str, Any]]:
    """Put up what attacks aim at, in the folders where it usually is; yields what an attacker knows of it."""
    mark = f"megatron-rl-target-{os.getpid()}-{time.monotonic_ns()}"
    home = work / "home"
    code = work / "code"
    for folder in (home / ".ssh", code):
        folder.mkdir(parents=True, exist_ok=True)

    (home / ".ssh" / "id_rsa").write_text("a key")
    (code / ".env").write_text("OPENAI_KEY=abc")
    (code / "attacks.py").write_text(Path(attacks.__file__).read_text())

    outside = [Path("/tmp", mark), Path("/dev/shm", mark)]
    for file in outside:
        file.write_text("x")
        file.chmod(0o644)

    by_path = socket.socket(socket.AF_UNIX)
    by_name = socket.socket(socket.AF_UNIX)
    by_port = socket.socket()
    address = outside[0].with_name(f"{mark}.sock")
    environment = {name: "a secret" for name in SECRETS} | {"HOME": str(home)}

    before = {name: os.environ.get(name) for name in environment}
    try:
        by_path.bind(str(address))
        address.chmod(0o777)
        by_name.bind("\0" + mark)
        by_port.bind(("127.0.0.1", 0))

        for server in (by_path, by_name, by_port):
            server.listen()

        os.environ.update(environment)
        yield {
            "home": str(home), "code": str(code), "file": str(outside[0]), "shm": str(outside[1]),
            "socket": str(address), "abstract": mark, "port": by_port.getsockname()[1],
            "trainer": os.getpid(),
        }  # fmt: skip
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for server in (by_path, by_name, by_port):
            server.close()
        for file in (*outside, address):
            file.unlink(missing_ok=True)


def attack(names: list[str], work: Path) -> dict[str, Any]:
    """Make attacks one by one; return what got through, how each ended, and what is not enforced."""
    limits = RewardLimitsConfig(
        memory_gib=LIMIT_GIB,
        processes=16,
        cpu_seconds=60.0,
        file_gib=2.0,
    )

    through: list[str] = []
    ended: dict[str, str] = {}
    with targets(work) as facts:
        spec = f"{facts['code']}/attacks.py:judge"
        with FunctionReward(RewardConfig(spec, timeout=60.0, limits=limits)) as reward:
            for name in names:
                sample = {
                    "prompt": "p",
                    "response": name,
                    "ground_truth": "",
                    "metadata": facts,
                }
                result = reward.score([sample])
                failures = [f"{failure.reason}: {failure.message}"[-500:] for failure in result.failures]
                ended[name] = "; ".join(failures) or f"reward {float(result.rewards[0])}"

                if not failures and result.rewards[0] > 0:
                    through.append(name)
            missing = list(reward.missing)

    return {
        "through": through,
        "ended": ended,
        "missing": missing,
        "user": os.getuid(),
    }


def as_user(user: int, function: Callable[[], Any]) -> Any:
    """Return what a function returns in a child that is ``user``, who reaches the interpreter.

    Raises RuntimeError with what the child wrote where it has failed.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if user != os.getuid():
                _open_the_way_to(sys.base_prefix)
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                kernel.process_control(kernel.SET_DUMPABLE, 1)  # a process may look into itself again
            answer = (True, function())
        except BaseException as error:
            answer = (False, repr(error))

        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)

    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()

    os.waitpid(child, 0)
    held, value = pickle.loads(content) if content else (False, "the child ended without an answer")
    if not held:
        raise RuntimeError(value)
    return value


def _open_the_way_to(folder: str) -> None:
    """Let everybody reach a folder, in a mount namespace of its own, by covering what is in the way."""
    closed = [path for path in Path(folder).parents if not path.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return

    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.make_mounts_private()
    tree = kernel.copy_of_tree(folder)
    kernel.attach(kernel.new_file_system("tmpfs", 0, mode="0755"), str(closed[-1]))
    os.makedirs(folder)
    kernel.attach(tree, folder)


def without_namespaces(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that is called where the kernel refuses namespaces, as most containers have it."""

    def call() -> Any:
        kernel.drop_bounding_set()
        kernel.drop_capabilities()
        families = filters.families_of(network=True, local=True)
        filters.filter_system_calls(families)
        return function()

    return call


def main() -> None:
    """Make every attack as this user, and as nobody where this is root; print what got through."""
    names = sys.argv[1:] or list(ATTACKS)
    for user in {os.getuid(), NOBODY if os.getuid() == 0 else os.getuid()}:
        for wrap in (without_namespaces, lambda function: function):
            with tempfile.TemporaryDirectory() as folder:
                os.chmod(folder, 0o777)
                work = Path(folder)
                answer = as_user(user, wrap(lambda work=work: attack(names, work)))
                print(json.dumps(answer, indent=1), flush=True)


if __name__ == "__main__":
    main()
