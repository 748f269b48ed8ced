"""Shared fixtures: launches of scripts on several ranks, bounded in time, that leave no process behind."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from megatron_rl.check import rewards as check_rewards
from megatron_rl.check.model import megatron_settings
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.contained import process as contained_process
from megatron_rl.errors import UserError
from megatron_rl.imports import import_libraries
from tests import browser, nccl_rules
from tests import rank_server as rank_server_module
from tests.contained_server import forking

ROOT = Path(__file__).resolve().parent.parent
STANDIN = ROOT / "tests/te_standin"
"""Folder with the stand-in of Transformer Engine, for PYTHONPATH."""
# A launch on a busy machine takes minutes, but a hang must end before the test session does.
LAUNCH_SECONDS = 300.0
# Containers often set it; each process that a test starts would then compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile("untimed", deadline=None)  # a busy machine says nothing of an example
settings.load_profile("untimed")
# Recipes name models and data on the Hub: tests see a machine without a network and with an empty cache,
# whatever this one has. Workers of xdist and processes of tests inherit the variables.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="megatron_rl_hub_")
    atexit.register(shutil.rmtree, _cache, True)
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE=_cache)
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Variables of ranks that execute Megatron's fused functions without compiling them.

Tiny models run in less time than torch.compile takes in each process, a third of a layout's step.
"""
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
USED_PORTS: set[int] = set()
DESELECTED = pytest.StashKey[list[str]]()


@dataclass(frozen=True)
class Launch:
    """Result of a finished launch: exit code and both streams."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Return both streams, standard output first."""
        return self.stdout + self.stderr


def free_port() -> int:
    """Return a TCP port without a listener, outside of the range from which Linux assigns ports itself.

    It is then still free when it is bound, perhaps a minute later, and no two ports of a test are equal.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = 10_000 + secrets.randbelow(22_000)  # not ``random``, which tests seed
            probe.bind(("127.0.0.1", port))
            if port not in USED_PORTS:
                USED_PORTS.add(port)
                return port


def launch_environment(*packages: Path) -> dict[str, str]:
    """Return the environment of a rank: one thread, with ``packages`` and the repository on PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    path = os.environ.get("PYTHONPATH")
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, (*packages, ROOT)), *([path] if path else [])]),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return environment


def run_bounded(command: list[str], timeout: float, environment: dict[str, str] | None = None) -> Launch:
    """Run ``command`` in a session of its own; kill it with its descendants after ``timeout`` seconds."""
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
        _end_processes(process.pid)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        stdout, stderr = process.communicate()
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{_tail(stdout)}\n{_tail(stderr)}")
    return Launch(process.returncode, stdout, stderr)


def run_forked(work: Callable[[], None], timeout: float = 120.0) -> Launch:
    """Run ``work`` in a process of its own that has imported what this one has; see `run_bounded`."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()

        def become_worker() -> None:
            for descriptor, stream in enumerate(streams, start=1):
                os.dup2(os.open(stream, os.O_WRONLY), descriptor)
            sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
            work()

        process = multiprocessing.get_context("fork").Process(target=become_worker)
        process.start()
        process.join(timeout)
        process.kill()  # nothing where it has ended
        process.join()
        assert process.exitcode is not None
        return Launch(process.exitcode, *(stream.read_text() for stream in streams))


def _end_processes(process: int, patience: float = 10.0) -> None:
    """Terminate a launcher, and kill its remaining processes after ``patience`` seconds.

    torchrun's ranks lead sessions of their own, so that a signal to the launcher's process group does not
    reach them. Its descendants are therefore listed before it ends.
    """
    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process)
        processes = [launcher, *launcher.children(recursive=True)]

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGTERM)

    # Ranks that handle SIGTERM have time to end; the others are killed.
    _, alive = psutil.wait_procs(processes, timeout=patience)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()


def _tail(text: str, lines: int = 80) -> str:
    return "\n".join(text.splitlines()[-lines:])


STARTS_RANKS = {"fork", "fork_fused", "forked_torchrun", "rank_server", "torchrun"}
"""Fixtures that start ranks; tests that use them get the mark ``starts_ranks``."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect the tests without garbage collections, which would visit them all in vain."""
    with import_libraries():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by ``-m``
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks: tests/distributed, and all users of the fixtures above.

    Some tests of tests/distributed read files of the ranks of another test in the same module. Tests of the
    marker ``campaign`` are deselected unless ``-m`` names it, see tests/campaign/matrices.py. Without a
    browser, tests that need one are deselected; `pytest_terminal_summary` reports them.
    """
    distributed = str(ROOT / "tests/distributed") + os.sep
    for item in items:
        starts_ranks = STARTS_RANKS & set(getattr(item, "fixturenames", ()))
        if starts_ranks or str(item.path).startswith(distributed):
            item.add_marker("starts_ranks")

    if "campaign" not in config.option.markexpr:
        campaign = {item for item in items if item.get_closest_marker("campaign")}
        items[:] = [item for item in items if item not in campaign]
        config.hook.pytest_deselected(items=list(campaign))

    if browser.executable() is None and (pages := [item for item in items if "browser" in item.keywords]):
        items[:] = [item for item in items if item not in pages]
        config.hook.pytest_deselected(items=pages)
        config.stash[DESELECTED] = [item.nodeid for item in pages]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report the tests of pages that did not run without a browser."""
    if names := config.stash.get(DESELECTED, []):
        terminalreporter.section("NOT RUN: no browser found", red=True, bold=True)
        for name in names:
            terminalreporter.line(name)
        remedy = f"one of {', '.join(browser.NAMES)} on the path, or {browser.VARIABLE}=/path/to/it"
        terminalreporter.line(f"fix: {remedy} (Debian, Ubuntu: apt-get install chromium)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the deselected tests to the controller if tests run in several processes."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["deselected"] = session.config.stash.get(DESELECTED, [])


def pytest_testnodedown(node: Any) -> None:
    """Receive the deselected tests of a worker process; a killed worker has sent nothing."""
    if names := getattr(node, "workeroutput", {}).get("deselected", []):
        node.config.stash[DESELECTED] = names


FIRST = tuple(f"tests/distributed/test_{name}.py" for name in ("family_commands", "failures", "servers"))
"""Files with which the processes begin: one of several minutes, and two that mostly wait."""


class Schedule(LoadFileScheduling):
    """Assignment of test files to processes: `FIRST`, then the first process takes them from the end.

    Files that start ranks are last, so one of them runs at a time while other files remain, which use the
    time in which ranks start, write and wait.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = next((file for file in FIRST if file in self.workqueue), None)
        if file is None and node is self.nodes[0]:
            file = next(reversed(self.workqueue))
        if file is not None:
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule:
    """Return the scheduler of pytest-xdist."""
    return Schedule(config, log)


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """Restore the environment after each module, for example the variables of a single-process world."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def contained_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a process from which contained processes are forked; yield the path of its socket."""
    address = str(tmp_path_factory.mktemp("contained") / "socket")
    command = [sys.executable, "-P", str(ROOT / "tests/contained_server.py"), address]
    with _serve(command, launch_environment()):
        yield address


@pytest.fixture(autouse=True, scope="module")
def forked_contained(request: pytest.FixtureRequest, contained_server: str) -> Iterator[None]:
    """Fork the contained processes of a module's tests, unless it has the mark ``starts_contained``."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("starts_contained"):
            patch.setattr(contained_process, "start_process", forking(contained_server))
        yield


@pytest.fixture(scope="session")
def trial_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Start a process from which trials of Megatron's settings are forked; yield the command of a trial."""
    with serve_trials(tmp_path_factory.mktemp("trials")) as command:
        yield command


@contextlib.contextmanager
def serve_trials(folder: Path, *packages: Path) -> Iterator[list[str]]:
    """Start a server of trials with ``packages`` on its PYTHONPATH; yield the command of a trial."""
    server = str(ROOT / "tests/trial_server.py")
    address = str(folder / "socket")
    with _serve([sys.executable, server, "serve", address], launch_environment(*packages)):
        # Without `site`: the client needs the standard library alone, and starts at once.
        yield [sys.executable, "-S", server, "ask", address]


@contextlib.contextmanager
def _serve(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Start a server that prints a line when its socket accepts connections; it ends with its input."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield
    process.stdin.close()
    process.wait()


@pytest.fixture
def forked_trials(trial_server: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `check` in this process validate Megatron's settings in forked processes, which start at once."""
    monkeypatch.setattr(megatron_settings, "TRIAL_COMMAND", trial_server)


@pytest.fixture(scope="module")
def functions_load_once() -> Iterator[None]:
    """Make `check` in this process load an unchanged function only once per module.

    Each loading is a contained process of its own: a fifth of a second, for each of hundreds of
    configurations with the same reward function.
    """
    load = check_rewards.loading_errors
    results: dict[object, list[UserError]] = {}

    def load_once(config: RewardConfig, *arguments: object) -> list[UserError]:
        # The key contains the sources: a test that edits its reward function gets it loaded again.
        folder = Path((config.function or "").partition(":")[0]).parent.resolve()
        sources = [(file.name, file.read_bytes()) for file in sorted(folder.glob("*.py"))]
        key = repr((config, arguments, folder, sources, contained_process.LOAD_SECONDS))
        if key not in results:
            results[key] = load(config, *arguments)
        return results[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_rewards, "loading_errors", load_once)
        yield


@pytest.fixture
def torchrun() -> Callable[..., Launch]:
    """Launch ranks as users do: ``torchrun(script, ranks, *arguments)``; see `Launcher`."""

    def start(
        script: str,
        ranks: int,
        arguments: list[str],
        timeout: float,
        module: bool,
        env: dict[str, str],
    ) -> Launch:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command += ["-m", script] if module else [script]
        return run_bounded([*command, *arguments], timeout, launch_environment() | env)

    return Launcher(start)


@pytest.fixture
def fork(rank_server: RankServer) -> Callable[..., Launch]:
    """Launch ranks forked from a process with imported libraries: ``fork(script, ranks, *arguments)``."""
    return Launcher(rank_server.launch)


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory, trial_server: list[str], contained_server: str) -> Iterator[RankServer]:
    """Server process from which ranks are forked."""
    folder = tmp_path_factory.getbasetemp()
    # Workers of xdist have folders in a common one; the first to need the libraries imports them for all.
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    server = RankServer(
        tmp_path_factory.mktemp("rank_server"),
        environment=other_servers(trial_server, contained_server),
        address=folder / "rank_server",
    )
    yield server
    server.close()


def other_servers(trial_command: list[str], contained_address: str) -> dict[str, str]:
    """Return the variables with which contained processes of ranks and `check`'s trials are forked, too."""
    return {
        rank_server_module.TRIAL_COMMAND: shlex.join(trial_command),
        rank_server_module.CONTAINED_SERVER: contained_address,
    }


@pytest.fixture(scope="module")
def fork_fused(tmp_path_factory, contained_server: str) -> Iterator[Callable[..., Launch]]:
    """Launch ranks as ``fork`` does, with the stand-in of Transformer Engine installed.

    These ranks compile Megatron's functions, and their steps are compared with those of ranks that do not.
    """
    with serve_trials(tmp_path_factory.mktemp("fused_trials"), STANDIN) as command:
        variables = COMPILED | other_servers(command, contained_server)
        server = RankServer(tmp_path_factory.mktemp("fused_ranks"), STANDIN, environment=variables)
        yield Launcher(server.launch)
        server.close()


class Launcher:
    """Callable that launches a script or module on ranks of this machine, bounded in time."""

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
        """Return the result of the launch; a failed one fails the test unless ``check`` is False.

        ``timeout`` is in seconds; with ``module`` the script is a module name; ``env`` adds variables.
        """
        result = self._start(
            str(script), ranks, [str(argument) for argument in arguments], timeout, module, env or {}
        )
        if check and result.returncode != 0:
            pytest.fail(
                f"exit code {result.returncode}: {script} on {ranks} ranks with {arguments}\n"
                f"--- stdout\n{_tail(result.stdout)}\n--- stderr\n{_tail(result.stderr)}"
            )
        return result


class RankServer:
    """Client of ``rank_server.py``, which starts with the first launch.

    ``packages`` are additional folders on the ranks' PYTHONPATH, and ``environment`` has variables that
    libraries read when they are imported; a launch's own come too late for these. Clients with one
    ``address`` share the process that imports, which then has the variables of the first. The ranks'
    communication is checked against the rules of NCCL; see ``nccl_rules.py``.
    """

    def __init__(
        self,
        folder: Path,
        *packages: Path,
        environment: Mapping[str, str] | None = None,
        address: Path | None = None,
    ) -> None:
        self._folder = folder
        self._address = address or folder / "socket"
        self._own_environment = dict(environment or {})
        self._environment = launch_environment(*packages) | UNCOMPILED | self._own_environment
        self._launches = 0
        self._connection: socket.socket | None = None
        self._importer = contextlib.ExitStack()
        self.process_id = 0
        """Process ID of the server, the parent of the ranks' supervisor, once a launch has been made."""

    def launch(
        self,
        script: str,
        ranks: int,
        arguments: list[str],
        timeout: float,
        module: bool,
        env: dict[str, str],
    ) -> Launch:
        """Run one launch and return its result."""
        if self._connection is None:
            self._connection = self._connect()
            self._connection.sendall(json.dumps(self._own_environment).encode() + b"\n")
            self.process_id = self._read_number()
        connection = self._connection

        # Each launch has files of its own: a late rank must not write into the next launch's files.
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

        # The server replies with the supervisor's process id at once, and with the exit code at the end.
        connection.sendall(json.dumps(order).encode() + b"\n")
        watcher = self._read_number()

        late = True
        try:
            late = not select.select([connection], [], [], timeout)[0]
        finally:
            # Also if the test itself is interrupted: the next launch must not read this one's result.
            if late:
                _end_processes(watcher)
            code = self._read_number()

        stdout, stderr = (stream.read_text() for stream in streams)
        if late:
            pytest.fail(f"no end after {timeout:.0f} s: {script}\n{_tail(stdout)}\n{_tail(stderr)}")

        # Ranks of a failed launch end at different calls, which breaks no rule.
        broken = nccl_rules.violations(nccl_rules.read(calls)) if code == 0 else []
        shutil.rmtree(calls)
        if broken:
            pytest.fail("NCCL would not carry this out:\n" + "\n".join(broken))
        return Launch(code, stdout, stderr)

    def _connect(self) -> socket.socket:
        """Connect to the process that imports; start it if there is none."""
        connection = socket.socket(socket.AF_UNIX)
        with open(f"{self._address}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # It ends with the client that started it, and leaves its socket.
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect(str(self._address))
                return connection

            self._address.unlink(missing_ok=True)
            command = [sys.executable, str(ROOT / "tests/rank_server.py"), str(self._address)]
            self._importer.enter_context(_serve(command, self._environment))
            connection.connect(str(self._address))
        return connection

    def _read_number(self) -> int:
        """Read a line with a number from the server."""
        assert self._connection is not None
        line = b""
        # Byte by byte: select does not see what a buffer has read.
        while not line.endswith(b"\n"):
            line += self._connection.recv(1) or pytest.fail("the server of ranks has ended")
        return int(line)

    def __enter__(self) -> Launcher:
        self._folder.mkdir(exist_ok=True)
        return Launcher(self.launch)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server, and the process that imports if it was started here."""
        if self._connection is not None:
            self._connection.close()
        self._importer.close()
