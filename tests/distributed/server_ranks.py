"""Train with two vLLM API servers; one is killed while it samples, and restarted.

    server_ranks.py CONFIG

The serving process is killed; its engine process has to exit by itself. Servers start with the arguments of
the command that `check` prints, in processes forked here, which saves importing vLLM again. The run ends
once the restarted server has received the weights.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

os.environ |= {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

import psutil
from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.launchers.api_server.entry import main as serve
from vllm.v1.engine import utils as engine_processes
from vllm.v1.executor import multiproc_executor

import megatron_rl.hybrid_engine.worker_extension  # noqa: F401 - what each worker imports
from megatron_rl.check.engine.servers import server_command_lines
from megatron_rl.cli.common import load_and_check
from megatron_rl.cli.main import main, parse_command_line
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import read_metrics
from megatron_rl.rollout.engines.servers import ServerError
from megatron_rl.rollout.engines.vllm_server.server import VllmServer
from tests.conftest import free_port

RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
PATIENCE = 400.0
"""Seconds to wait for any event of the run."""
BUSY_REQUESTS = 6
"""Least number of running requests of a busy server; each of the two servers gets 8 per step."""


class Servers:
    """Starter of vLLM servers: a helper process that is forked before this process has threads."""

    def __init__(self, config: RunConfig) -> None:
        *lines, _, host = server_command_lines(config)
        command = " ".join(line.removesuffix("\\") for line in lines)
        self._command = [
            *shlex.split(f"{command} {host}")[4:],
            "--kv-cache-memory-bytes",
            str(2**26),
        ]
        self._command += ["--host", "127.0.0.1"]
        self._pipe, child_end = Pipe()
        if not os.fork():
            self._pipe.close()
            serve_commands(
                child_end,
                list(config.rollout.server.urls),
                Path(config.run_dir),
            )

    def start(self, url: str, workers: int = 1) -> int:
        """Start a server at ``url`` with ``workers`` tensor-parallel workers; return its process ID.

        The server leads a session of its own, so that it can be killed with its workers.
        """
        executor = "uni" if workers == 1 else "mp"
        worker_options = [
            "--tensor-parallel-size",
            str(workers),
            "--distributed-executor-backend",
            executor,
        ]
        self._pipe.send(
            [
                *self._command,
                *worker_options,
                "--port",
                str(urlsplit(url).port),
            ]
        )
        return self._pipe.recv()


def serve_commands(pipe: Connection, urls: list[str], folder: Path) -> NoReturn:
    """Fork a server for each command from the pipe; when the pipe closes, claim all servers and kill them.

    The results of the claims are written to ``holders_after``: the run has released its servers by then.
    """
    # A server must not take itself for a rank of the training job.
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)

    # The kernel reaps killed servers, which would otherwise stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    fork_engines()
    processes = []
    with suppress(EOFError):
        while arguments := pipe.recv():
            processes.append(os.fork())
            if not processes[-1]:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                pipe.close()
                sys.argv = ["api_server", *arguments]
                serve()
                os._exit(0)
            pipe.send(processes[-1])

    # The file appears complete, since a rename is atomic.
    with suppress(ServerError, OSError):
        report = folder / "holders_after.part"
        report.write_text(str([VllmServer(url).claim("another run", 1.0) for url in urls]))
        report.rename(folder / "holders_after")

    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os._exit(0)


def fork_engines() -> None:
    """Make servers fork their engines and workers, and let workers sleep between two requests.

    A spawned process would import vLLM again, and workers keep a processor busy for a second after a request.
    """
    for module in (engine_processes, multiproc_executor):
        setattr(
            module,
            "get_mp_context",
            lambda: multiprocessing.get_context("fork"),
        )
    condition = shm_broadcast.SpinCondition
    setattr(
        shm_broadcast,
        "SpinCondition",
        partial(condition, busy_loop_s=0.0),
    )
    # A notification that arrives before its reader waits is lost: readers look for themselves.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 2


def read_url(url: str) -> str | None:
    """Return the body at ``url``, or None if there is no server."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read().decode()
    except OSError:
        return None


def wait_for(condition, event: str) -> None:
    """Wait until a condition holds; raise TimeoutError after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {event} within {PATIENCE} s")
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process is running."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def is_busy(url: str) -> bool:
    """Return whether a server has so many running requests that a signal interrupts some of them."""
    lines = (read_url(f"{url}/metrics") or "").splitlines()
    # Prometheus metrics: one line per model.
    running = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running")]
    return any(float(count) >= BUSY_REQUESTS for count in running)


def accident(
    servers: Servers,
    processes: list[int],
    urls: list[str],
    metrics: Path,
) -> None:
    """Kill the second server while it samples, restart it, and end the run once it samples again.

    On a busy host the requests may have ended before the signal arrives; then the server is killed once more.
    Before the first kill, another run tries to claim the first server; the answer is written to ``holder``.
    """

    def servers_of_last_step() -> float:
        lines = read_metrics(metrics)
        return lines[-1]["rollout/servers"] if lines and lines[-1]["step"] > 1 else 0.0

    try:
        wait_for(lambda: servers_of_last_step() == 2, "step with two servers")
        (metrics.parent / "holder").write_text(str(VllmServer(urls[0]).claim("another run", 1.0)))
        while not any(line["rollout/sampled_again"] for line in read_metrics(metrics)):
            children = psutil.Process(processes[1]).children(recursive=True)
            assert children, "a server without an engine process"
            wait_for(lambda: is_busy(urls[1]), "request")
            os.kill(processes[1], signal.SIGKILL)
            wait_for(
                lambda children=children: not any(map(is_running, children)),
                f"end of {children}",
            )
            wait_for(
                lambda: servers_of_last_step() == 1,
                "step with one server",
            )
            processes[1] = servers.start(urls[1])
            wait_for(
                lambda: servers_of_last_step() == 2,
                "step with the restarted server",
            )
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def train(*arguments: str) -> int:
    """Train with a free master port, and return the exit code."""
    # The port of the launch may be taken a minute later, when the servers are ready.
    os.environ["MASTER_PORT"] = str(free_port())
    return main(["train", *arguments])


def train_before(path: str, run_dir: str) -> None:
    """Train another run for one step on the same servers, which the next run has to be able to reuse."""
    process = os.fork()
    if not process:
        os._exit(train(path, "steps=1", f"run_dir={run_dir}"))
    assert os.waitpid(process, 0)[1] == 0, "the run before has failed"


def run(path: str) -> None:
    """Start the servers, with two workers and with one, and train."""
    config = load_and_check(
        parse_command_line(["train", path]),
        1,
        job="train",
        training=True,
    ).config
    # The helper process is forked before the threads of training exist.
    servers = Servers(config)
    urls = list(config.rollout.server.urls)

    processes = [servers.start(url, workers) for url, workers in zip(urls, (2, 1), strict=True)]
    for url in urls:
        wait_for(
            lambda url=url: read_url(f"{url}/health") is not None,
            f"server at {url}",
        )

    # The claims of an earlier run must not keep this one from its servers.
    train_before(path, f"{config.run_dir}_before")
    values = (
        servers,
        processes,
        urls,
        Path(config.run_dir) / "metrics.jsonl",
    )
    threading.Thread(target=accident, args=values, daemon=True).start()
    train(path)


if __name__ == "__main__":
    run(sys.argv[1])
