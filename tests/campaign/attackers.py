"""Run attacks inside contained reward functions: as this user or another, with namespaces or without."""

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
"""User number of ``nobody`` on Linux."""
NAMED = {
    "see names of files": confinement.NAMES_VISIBLE,
    "see processes": confinement.NAMES_VISIBLE,
    "read hidden files beside the code": confinement.HIDDEN_READABLE,
}
"""Attacks that succeed if Landlock replaces namespaces -> the notice that announces it."""


def unannounced(result: Mapping[str, Any]) -> list[str]:
    """Return the attacks that succeeded although no notice announces them. ``result`` is that of `attack`."""
    notices = " ".join(result["missing"])
    return [name for name in result["through"] if name not in NAMED or NAMED[name] not in notices]


@contextlib.contextmanager
def targets(work: Path) -> Iterator[dict[str, Any]]:
    """Create the targets of attacks in their usual folders; yield the facts that an attacker would have."""
    # The mark is unique, so that a target of another run is not taken for this one's.
    mark = f"megatron-rl-target-{os.getpid()}-{time.monotonic_ns()}"
    home = work / "home"
    code = work / "code"
    for folder in (home / ".ssh", code):
        folder.mkdir(parents=True, exist_ok=True)

    (home / ".ssh" / "id_rsa").write_text("a key")
    (code / ".env").write_text("OPENAI_KEY=abc")
    (code / "attacks.py").write_text(Path(attacks.__file__).read_text())

    # Readable for everybody: the containment has to refuse them, not their mode.
    shared_files = [Path("/tmp", mark), Path("/dev/shm", mark)]
    for file in shared_files:
        file.write_text("x")
        file.chmod(0o644)

    # Servers that an attacker could reach: by path, by abstract name, by port.
    by_path = socket.socket(socket.AF_UNIX)
    by_name = socket.socket(socket.AF_UNIX)
    by_port = socket.socket()
    address = shared_files[0].with_name(f"{mark}.sock")
    environment = {name: "a secret" for name in SECRETS} | {"HOME": str(home)}

    old_environment = {name: os.environ.get(name) for name in environment}
    try:
        by_path.bind(str(address))
        address.chmod(0o777)
        by_name.bind("\0" + mark)
        by_port.bind(("127.0.0.1", 0))

        for server in (by_path, by_name, by_port):
            server.listen()

        os.environ.update(environment)
        yield {
            "home": str(home), "code": str(code), "file": str(shared_files[0]), "shm": str(shared_files[1]),
            "socket": str(address), "abstract": mark, "port": by_port.getsockname()[1],
            "trainer": os.getpid(),
        }  # fmt: skip
    finally:
        # Restore the environment, then remove the targets.
        for name, value in old_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for server in (by_path, by_name, by_port):
            server.close()
        for file in (*shared_files, address):
            file.unlink(missing_ok=True)


def attack(names: list[str], work: Path) -> dict[str, Any]:
    """Run attacks one by one; return which succeeded, how each ended, and which limits are not enforced."""
    # Time enough for every attack; memory and processes are what attacks exceed.
    limits = RewardLimitsConfig(
        memory_gib=LIMIT_GIB,
        processes=16,
        cpu_seconds=60.0,
        file_gib=2.0,
    )

    succeeded: list[str] = []
    outcomes: dict[str, str] = {}
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
                outcomes[name] = "; ".join(failures) or f"reward {float(result.rewards[0])}"

                if not failures and result.rewards[0] > 0:
                    succeeded.append(name)
            notices = list(reward.unenforced_limits)

    return {
        "through": succeeded,
        "ended": outcomes,
        "missing": notices,
        "user": os.getuid(),
    }


def run_as_user(user: int, function: Callable[[], Any]) -> Any:
    """Call a function in a child process that runs as ``user``, and return its result.

    Raises RuntimeError with the child's error, or if the child ends without a result.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if user != os.getuid():
                _make_reachable(sys.base_prefix)
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                kernel.process_control(kernel.SET_DUMPABLE, 1)  # after a change of user, /proc/self is root's
            result = (True, function())
        except BaseException as error:
            result = (False, repr(error))

        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)

    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        content = pipe.read()

    os.waitpid(child, 0)
    is_ok, value = pickle.loads(content) if content else (False, "the child ended without a result")
    if not is_ok:
        raise RuntimeError(value)
    return value


def _make_reachable(folder: str) -> None:
    """Make a folder reachable for every user, in a mount namespace of its own that covers closed folders."""
    unreachable = [path for path in Path(folder).parents if not path.stat().st_mode & stat.S_IXOTH]
    if not unreachable:
        return

    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.make_mounts_private()
    # Cover the topmost closed folder with an empty file system, and attach the wanted tree below it.
    tree = kernel.clone_mounts(folder)
    kernel.attach_mounts(kernel.create_file_system("tmpfs", 0, mode="0755"), str(unreachable[-1]))
    os.makedirs(folder)
    kernel.attach_mounts(tree, folder)


def without_namespaces(function: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a function so that the kernel refuses namespaces to it, as in most containers."""

    def call() -> Any:
        # Without capabilities, and with system calls filtered, creating a namespace fails.
        kernel.drop_bounding_set()
        kernel.drop_capabilities()
        families = filters.allowed_socket_families(network=True, local=True)
        filters.filter_system_calls(families)
        return function()

    return call


def main() -> None:
    """Run every attack as this user, and as nobody if this is root; print the results."""
    names = sys.argv[1:] or list(ATTACKS)
    users = {os.getuid()}
    if os.getuid() == 0:
        users.add(NOBODY)

    for user in users:
        for confine in (without_namespaces, lambda function: function):
            with tempfile.TemporaryDirectory() as folder:
                os.chmod(folder, 0o777)
                work = Path(folder)
                result = run_as_user(user, confine(lambda work=work: attack(names, work)))
                print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
