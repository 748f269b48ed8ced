"""What tests share: one way to launch a script on several ranks, bounded in time, leaving nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from megatron_rl.check.model import megatron_settings
from tests import browser, nccl_rules

ROOT = Path(__file__).resolve().parent.parent
STANDIN = ROOT / "tests/te_standin"
"""Where Python finds the stand-in of Transformer Engine."""
LAUNCH_SECONDS = 300.0
# Containers often set it; each process that a test starts would then compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile("untimed", deadline=None)  # a busy machine says nothing of an example
settings.load_profile("untimed")
GIVEN_PORTS: set[int] = set()
NOT_LOOKED_AT = pytest.StashKey[list[str]]()


@dataclass(frozen=True)
class Launch:
    """Hold what a finished launch said: its exit code and its two streams."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Return both streams, standard output first."""
        return self.stdout + self.stderr


def free_port() -> int:
    """Return a TCP port that no process listens on, of those that Linux gives to nobody who asks for any.

    So it is still free when it is bound, which may be a minute later, and no two of a test are the same.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = 10_000 + secrets.randbelow(22_000)  # not ``random``, which tests seed
            probe.bind(("127.0.0.1", port))
            if port not in GIVEN_PORTS:
                GIVEN_PORTS.add(port)
                return port


def launch_environment(*packages: Path) -> dict[str, str]:
    """Return the environment of a launched rank: one thread per rank, these and the repository importable."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    path = os.environ.get("PYTHONPATH")
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, (*packages, ROOT)), *([path] if path else [])]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return environment


def run_bounded(command: list[str], timeout: float, environment: dict[str, str] | None = None) -> Launch:
    """Run ``command`` in a session of its own; end it and all it started after ``timeout`` seconds."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment or launch_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException as error:
        _end_family(process.pid)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        stdout, stderr = process.communicate()
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{_tail(stdout)}\n{_tail(stderr)}")
    return Launch(process.returncode, stdout, stderr)


def _end_family(process: int, patience: float = 10.0) -> None:
    """Ask the launcher to end its ranks, then kill what is left of it and of them.

    The ranks are in sessions of their own under torchrun's agent, so a signal to the agent's process group
    does not reach them; they are remembered as its descendants before it goes.
    """
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process)
        family = [launcher, *launcher.children(recursive=True)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=patience)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()


def _tail(text: str, lines: int = 80) -> str:
    return "\n".join(text.splitlines()[-lines:])


STARTS_RANKS = {"fork", "fork_fused", "forked_torchrun", "rank_server", "torchrun"}
"""Fixtures that start ranks."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by ``-m``
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks, by the fixtures they use, directly or through others.

    Leave out what needs a browser where none stands; `pytest_terminal_summary` says so.
    """
    for item in items:
        if STARTS_RANKS & set(getattr(item, "fixturenames", ())):
            item.add_marker("starts_ranks")
    if browser.executable() is None and (left := [item for item in items if "browser" in item.keywords]):
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
        config.stash[NOT_LOOKED_AT] = [item.nodeid for item in left]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in red which pages no browser has looked at."""
    if names := config.stash.get(NOT_LOOKED_AT, []):
        terminalreporter.section("NOT RUN: no browser stands here", red=True, bold=True)
        for name in names:
            terminalreporter.line(name)
        places = f"one of {', '.join(browser.NAMES)} on the path, or {browser.VARIABLE}=/path/to/it"
        terminalreporter.line(f"fix: {places} (Debian, Ubuntu: apt-get install chromium)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that reports, where tests run in several."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["not_looked_at"] = session.config.stash.get(NOT_LOOKED_AT, [])


def pytest_testnodedown(node: Any) -> None:
    """Hear it from a process of tests; one that was killed has said nothing."""
    if names := getattr(node, "workeroutput", {}).get("not_looked_at", []):
        node.config.stash[NOT_LOOKED_AT] = names


class Schedule(LoadFileScheduling):
    """Give each file to a process that is free: to the first one from the end, to others from the beginning.

    Files that start ranks come last. So one of them runs at a time while there are others, which fill the
    time in which ranks start, write and wait.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule:
    """Return who shares out the tests."""
    return Schedule(config, log)


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """Undo what a module's tests set in the environment, such as the world of a single process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def trial_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Keep one process from which trials of Megatron's settings are forked; return the command of a trial."""
    server, address = ROOT / "tests/trial_server.py", tmp_path_factory.mktemp("trials") / "socket"
    process = subprocess.Popen(
        [sys.executable, str(server), "serve", str(address)],
        env=launch_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield [sys.executable, "-S", str(server), "ask", str(address)]
    process.stdin.close()
    process.wait()


@pytest.fixture
def forked_trials(trial_server: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `check` in this process have Megatron validate settings in processes that start at once."""
    monkeypatch.setattr(megatron_settings, "TRIAL_COMMAND", trial_server)


@pytest.fixture
def torchrun() -> Callable[..., Launch]:
    """Launch ranks as users do: ``torchrun(script, ranks, *arguments)``; see ``Launcher``."""

    def start(
        script: str, ranks: int, arguments: list[str], timeout: float, module: bool, env: dict[str, str]
    ) -> Launch:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command += ["-m", script] if module else [script]
        return run_bounded([*command, *arguments], timeout, launch_environment() | env)

    return Launcher(start)


@pytest.fixture
def fork(rank_server: RankServer) -> Callable[..., Launch]:
    """Launch ranks that start at once, the libraries imported: ``fork(script, ranks, *arguments)``."""
    return Launcher(rank_server.launch)


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory) -> Iterator[RankServer]:
    """Keep one process from which ranks are forked."""
    server = RankServer(tmp_path_factory.mktemp("rank_server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def fork_fused(tmp_path_factory) -> Iterator[Callable[..., Launch]]:
    """Launch ranks as ``fork`` does, on a machine that has Transformer Engine: its stand-in in torch."""
    server = RankServer(tmp_path_factory.mktemp("fused_ranks"), STANDIN)
    yield Launcher(server.launch)
    server.close()


class Launcher:
    """Launch a script or module on ranks of this machine, bounded in time."""

    def __init__(self, start: Callable[..., Launch]) -> None:
        self._start = start

    def __call__(
        self,
        script: str | Path,
        ranks: int,
        *arguments: object,
        timeout: float = LAUNCH_SECONDS,
        check: bool = True,
        module: bool = False,
        env: dict[str, str] | None = None,
    ) -> Launch:
        """Return what the launch said; a failed one fails the test unless ``check`` is False.

        ``timeout`` in seconds; ``module`` takes the script for a module name; ``env`` adds variables.
        """
        result = self._start(
            str(script), ranks, [str(word) for word in arguments], timeout, module, env or {}
        )
        if check and result.returncode != 0:
            pytest.fail(
                f"exit code {result.returncode}: {script} on {ranks} ranks with {arguments}\n"
                f"--- stdout\n{_tail(result.stdout)}\n--- stderr\n{_tail(result.stderr)}"
            )
        return result


class RankServer:
    """Talk to ``rank_server.py``, which starts when the first launch needs it.

    ``packages`` are folders in which its ranks find packages. What they tell one another is held against the
    rules of NCCL; see ``nccl_rules.py``.
    """

    def __init__(self, folder: Path, *packages: Path) -> None:
        self._folder, self._packages = folder, packages
        self._launches = 0
        self._process: subprocess.Popen[bytes] | None = None

    def launch(
        self, script: str, ranks: int, arguments: list[str], timeout: float, module: bool, env: dict[str, str]
    ) -> Launch:
        """Run one launch and return what it said."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/rank_server.py")],
                cwd=ROOT,
                env=launch_environment(*self._packages),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what was read ahead would be hidden from select
            )
        server = self._process
        assert server.stdin is not None and server.stdout is not None
        self._launches += 1
        streams = [self._folder / f"{self._launches}_{name}" for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        calls = self._folder / f"{self._launches}_calls"
        calls.mkdir()
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        order = {
            "script": script,
            "ranks": ranks,
            "arguments": arguments,
            "module": module,
            "environment": address | env,
            "stdout": str(streams[0]),
            "stderr": str(streams[1]),
            "calls": str(calls),
        }
        server.stdin.write(json.dumps(order).encode() + b"\n")
        watcher = int(server.stdout.readline())
        late = True
        try:
            late = not select.select([server.stdout], [], [], timeout)[0]
        finally:
            # Also where the test's own time is up: the next launch must not read this one's answer.
            if late:
                _end_family(watcher)
            code = int(server.stdout.readline())
        stdout, stderr = (stream.read_text() for stream in streams)
        if late:
            pytest.fail(f"no end after {timeout:.0f} s: {script}\n{_tail(stdout)}\n{_tail(stderr)}")
        broken = nccl_rules.violations(nccl_rules.read(calls)) if code == 0 else []
        shutil.rmtree(calls)
        if broken:
            pytest.fail("NCCL would not carry this out:\n" + "\n".join(broken))
        return Launch(code, stdout, stderr)

    def close(self) -> None:
        """End the server."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
