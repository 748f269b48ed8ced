"""What tests share: one way to launch a script on several ranks, bounded in time, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_SECONDS = 300.0


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
    """Return a TCP port that no process listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch_environment() -> dict[str, str]:
    """Return the environment of a launched rank: one thread per rank, the repository importable."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    path = os.environ.get("PYTHONPATH")
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), path] if path else [str(ROOT)]),
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
        _kill_session(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        stdout, stderr = process.communicate()
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{_tail(stdout)}\n{_tail(stderr)}")
    return Launch(process.returncode, stdout, stderr)


def _kill_session(process: subprocess.Popen[str], patience: float = 10.0) -> None:
    """Ask the launcher to end its ranks, then kill what is left of it and of them.

    The ranks are in sessions of their own under torchrun's agent, so a signal to the agent's process group
    does not reach them; they are remembered as its descendants before it goes.
    """
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=patience)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()


def _tail(text: str, lines: int = 80) -> str:
    return "\n".join(text.splitlines()[-lines:])


@pytest.fixture
def torchrun() -> Callable[..., Launch]:
    """Launch ``script args`` on ``nproc`` ranks of this machine: ``torchrun(script, nproc, *args)``.

    Keywords: ``timeout`` in seconds; ``check`` False returns a failed launch instead of failing the test;
    ``module`` True takes the script for a module name; ``env`` adds variables.
    """

    def launch(
        script: str | Path,
        nproc: int,
        *args: object,
        timeout: float = LAUNCH_SECONDS,
        check: bool = True,
        module: bool = False,
        env: dict[str, str] | None = None,
    ) -> Launch:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command += ["-m", str(script)] if module else [str(script)]
        command += [str(argument) for argument in args]
        result = run_bounded(command, timeout, launch_environment() | (env or {}))
        if check and result.returncode != 0:
            pytest.fail(
                f"exit code {result.returncode}: {' '.join(command)}\n"
                f"--- stdout\n{_tail(result.stdout)}\n--- stderr\n{_tail(result.stderr)}"
            )
        return result

    return launch
