"""A run whose engine is two of vLLM's API servers, of which one is killed while it samples, and comes back.

    server_ranks.py CONFIG

The process that answers is killed, and that of the engine, which it started, has to end by itself. Servers
are started with the words of the command that `check` shows, in processes that are forked here, which saves
importing vLLM. The run is ended once the server that came back has its weights.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
import urllib.request
from contextlib import suppress
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
from vllm.entrypoints.launchers.api_server.entry import main as serve

import megatron_rl.hybrid_engine.worker_extension  # noqa: F401 - what each worker imports
from megatron_rl.check.engine.servers import server_commands
from megatron_rl.cli.common import load_and_check
from megatron_rl.cli.main import main, parse
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import read_metrics
from megatron_rl.rollout.engines.servers import ServerError
from megatron_rl.rollout.engines.vllm_server.server import VllmServer
from tests.conftest import free_port

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = 400.0
MOST = 6
"""Of the 8 requests that each of two servers has in a step."""


class Servers:
    """Start servers from a process that is forked before there are threads, and ends with this one."""

    def __init__(self, config: RunConfig) -> None:
        *lines, _, host = server_commands(config)
        command = " ".join(line.removesuffix("\\") for line in lines)
        self._words = [*shlex.split(f"{command} {host}")[4:], "--kv-cache-memory-bytes", str(2**26)]
        self._words += ["--host", "127.0.0.1"]
        self._pipe, far = Pipe()
        if not os.fork():
            self._pipe.close()
            nurse(far, list(config.rollout.server.urls), Path(config.run_dir))

    def start(self, url: str, workers: int = 1) -> int:
        """Return the process of a server at ``url``, which leads a session of its own."""
        executor = "uni" if workers == 1 else "mp"
        many = ["--tensor-parallel-size", str(workers), "--distributed-executor-backend", executor]
        self._pipe.send([*self._words, *many, "--port", str(urlsplit(url).port)])
        return self._pipe.recv()


def nurse(pipe: Connection, urls: list[str], folder: Path) -> NoReturn:
    """Fork servers as long as anyone asks, note whether another run could have them then, and end them."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    processes = []
    with suppress(EOFError):
        while words := pipe.recv():
            processes.append(os.fork())
            if not processes[-1]:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                pipe.close()
                sys.argv = ["api_server", *words]
                serve()
                os._exit(0)
            pipe.send(processes[-1])
    with suppress(ServerError, OSError):
        note = folder / "holders_after.part"
        note.write_text(str([VllmServer(url).claim("another run", 1.0) for url in urls]))
        note.rename(folder / "holders_after")
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os._exit(0)


def asked(url: str) -> str | None:
    """Return what is answered at ``url``, None where nothing is."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return None


def wait_for(condition, what: str) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} within {PATIENCE} s")
        time.sleep(0.02)


def is_there(process: psutil.Process) -> bool:
    """Say whether a process has not ended."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def is_busy(url: str) -> bool:
    """Say whether a server works on most of its share of a step: it will not have ended all in a moment."""
    lines = (asked(f"{url}/metrics") or "").splitlines()
    running = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running")]
    return any(float(count) >= MOST for count in running)


def accident(servers: Servers, processes: list[int], urls: list[str], metrics: Path) -> None:
    """Kill the second server while it samples, start it again, and end the run once it samples again.

    On a busy host the requests may have ended when the signal comes: then it is killed once more. Before, say
    whom the first server tells another run that it works for.
    """

    def servers_of_last_step() -> float:
        lines = read_metrics(metrics)
        return lines[-1]["rollout/servers"] if lines and lines[-1]["step"] > 1 else 0.0

    try:
        wait_for(lambda: servers_of_last_step() == 2, "step with two servers")
        (metrics.parent / "holder").write_text(str(VllmServer(urls[0]).claim("another run", 1.0)))
        while not any(line["rollout/sampled_again"] for line in read_metrics(metrics)):
            started = psutil.Process(processes[1]).children(recursive=True)
            assert started, "a server without an engine process"
            wait_for(lambda: is_busy(urls[1]), "request")
            os.kill(processes[1], signal.SIGKILL)
            wait_for(lambda there=started: not any(map(is_there, there)), f"end of {started}")
            wait_for(lambda: servers_of_last_step() == 1, "step with one server")
            processes[1] = servers.start(urls[1])
            wait_for(lambda: servers_of_last_step() == 2, "step with the server that came back")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def train(*words: str) -> int:
    """Train on a port that is free now: the launch's was, a minute before the servers stood."""
    os.environ["MASTER_PORT"] = str(free_port())
    return main(["train", *words])


def train_before(path: str, run_dir: str) -> None:
    """Have another run of one step use the servers, which find the traces of it where they are used again."""
    process = os.fork()
    if not process:
        os._exit(train(path, "steps=1", f"run_dir={run_dir}"))
    assert os.waitpid(process, 0)[1] == 0, "the run before has failed"


def run(path: str) -> None:
    """Start the servers, of two workers and of one, and train."""
    config = load_and_check(parse(["train", path]), 1, job="train", training=True).config
    servers, urls = Servers(config), list(config.rollout.server.urls)
    processes = [servers.start(url, workers) for url, workers in zip(urls, (2, 1), strict=True)]
    for url in urls:
        wait_for(lambda url=url: asked(f"{url}/health") is not None, f"server at {url}")
    train_before(path, f"{config.run_dir}_before")
    values = (servers, processes, urls, Path(config.run_dir) / "metrics.jsonl")
    threading.Thread(target=accident, args=values, daemon=True).start()
    train(path)


if __name__ == "__main__":
    run(sys.argv[1])
