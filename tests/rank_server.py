"""Launch ranks by forking a process that has already imported the libraries, so that a rank starts at once.

Importing torch, Megatron-Core, transformers and vLLM takes ten seconds of processor time per rank, which is
most of a test on tiny models. Ranks are processes of their own with the environment that torchrun sets.

``python rank_server.py SOCKET`` imports, then forks a server for each client of the socket until its standard
input is closed. A client sends lines of JSON: the server's environment, answered with the server's process
number, then launches. Each launch is answered with two lines: the number of the process that supervises the
ranks, and its exit code. A server ends with its connection.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.metadata
import io
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

IMPORTED = (
    "megatron_rl.trainer.run",
    "megatron_rl.cli.train",
    "megatron_rl.rollout.engines.vllm.engine",
    "transformers.models.auto.modeling_auto",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "megatron.core.models.mimo",
    "transformers.models.qwen2.modeling_qwen2",
    "torch._dynamo",
    # Imported by the first rank when it writes reports.
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pandas",
    "pyarrow.parquet",
    "rich.progress",
    "rich.table",
)
TRIAL_COMMAND = "TRIAL_COMMAND"
"""Variable with the command of a trial, such as one that asks ``trial_server.py``."""
CONTAINED_SERVER = "CONTAINED_SERVER"
"""Variable with the socket of ``contained_server.py``, from which contained processes are forked."""
CACHE = "HF_HUB_CACHE"
"""Variable of a launch with the folder of its downloads, which huggingface_hub reads when it is imported."""
EAGER = "EAGER"
"""Variable of a launch whose ranks execute eagerly what they would otherwise compile."""
PATIENCE = 30.0
"""Seconds between SIGTERM to the remaining ranks and SIGKILL, after one rank failed."""


def main(address: str) -> None:
    """Import the libraries, then fork servers until standard input is closed."""
    preload()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        # The kernel reaps the servers, for which nothing waits.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (0, 1):
                    os.dup2(connection.fileno(), descriptor)
                connection.close()
                serve()
            connection.close()


def serve() -> NoReturn:
    """Serve the launches of one client, which is connected to standard input and output."""
    from megatron_rl.check.model import megatron_settings
    from megatron_rl.contained import process
    from tests.contained_server import forking

    os.environ.update(json.loads(sys.stdin.readline()))
    if command := os.environ.get(TRIAL_COMMAND):
        megatron_settings.TRIAL_COMMAND = shlex.split(command)
    if address := os.environ.get(CONTAINED_SERVER):
        setattr(process, "start_process", forking(address))

    print(os.getpid(), flush=True)
    while line := sys.stdin.readline():
        launch = json.loads(line)
        supervisor = os.fork()
        if supervisor == 0:
            watch(launch)
        print(supervisor, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]), flush=True)
    os._exit(0)


def preload() -> None:
    """Import the libraries of a rank; the process stays single-threaded, since a fork loses other threads."""
    from megatron_rl.imports import import_libraries

    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow would start a thread
    with import_libraries():
        from megatron_rl.distributed import device
        from megatron_rl.rollout.engines.vllm.setup import prepare_vllm

        device.prepare_megatron()
        prepare_vllm()
        for name in IMPORTED:
            importlib.import_module(name)
        prepare_engines()
        draw_once()

    # vLLM collects several times per engine and unfreezes when an engine closes: a rank's collections would
    # visit, and so copy, the memory of all imported modules.
    setattr(gc, "freeze", lambda: None)
    setattr(gc, "unfreeze", lambda: None)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lose them"


def prepare_engines() -> None:
    """Do once what the first engine of a process does: each rank would repeat it."""
    from transformers import conversion_mapping
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    # Every setting of a level clears a cache in each of thousands of loggers.
    configure_logging_if_needed(LoggingConfig())
    # It looks through the names of all imported modules, which takes half a second.
    current_platform.register_triton_kernel_overrides()
    setattr(type(current_platform), "register_triton_kernel_overrides", staticmethod(lambda: None))
    # Plugins are looked up among all installed distributions, three times per engine.
    setattr(importlib.metadata, "entry_points", functools.cache(importlib.metadata.entry_points))
    # transformers compiles thousands of patterns of tensor names when it builds its first model.
    conversion_mapping.get_checkpoint_conversion_mapping("qwen2")


def draw_once() -> None:
    """Draw a picture of a run's curves; every run here gets it, since drawing takes a third of a second.

    Pictures are tested in tests/unit/test_report.py.
    """
    from megatron_rl.trainer import curves, report

    lines = [{"step": step, "reward/mean": 0.1, "mismatch/abs_diff": 1e-5 * step} for step in (1, 2)]
    picture = io.BytesIO()
    curves.draw_figure(lines, {}).savefig(picture, format="png")

    class DrawnFigure:
        """The picture, in place of a run's figure."""

        def savefig(self, path: Path, **_: object) -> None:
            """Write the picture."""
            path.write_bytes(picture.getvalue())

    setattr(report, "draw_figure", lambda *_: DrawnFigure())


def watch(launch: dict) -> None:
    """Fork the ranks; exit with 0, or with the code of the first rank that fails, after ending the others."""
    os.setsid()
    # Write to the files of this launch. Each rank then leads a session, as under torchrun.
    for descriptor, path in ((1, launch["stdout"]), (2, launch["stderr"])):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)

    ranks = set()
    for rank in range(launch["ranks"]):
        process = os.fork()
        if process == 0:
            os.setsid()
            work(launch, rank)
        ranks.add(process)

    signal.signal(signal.SIGTERM, lambda *_: (end(ranks), os._exit(1)))
    while ranks:
        process, status = os.wait()
        ranks.discard(process)
        if status:
            end(ranks)
            os._exit(max(os.waitstatus_to_exitcode(status), 1))
    os._exit(0)


def end(ranks: set[int]) -> None:
    """Terminate ranks, and kill them when they have not ended after `PATIENCE` seconds."""
    for process in ranks:
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGCONT)  # a stopped process handles SIGTERM only after it continues

    limit = time.monotonic() + PATIENCE
    while ranks:
        process, _ = os.waitpid(-1, os.WNOHANG)
        ranks.discard(process)
        if process == 0 and time.monotonic() > limit:
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            return
        time.sleep(0.02)


def work(launch: dict, rank: int) -> None:
    """Become one rank: run the script or module in this process, with torchrun's environment."""
    size = str(launch["ranks"])
    names = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    os.environ.update(names | launch["environment"])

    if cache := launch["environment"].get(CACHE):
        setattr(importlib.import_module("huggingface_hub").constants, CACHE, cache)
    if launch["environment"].get(EAGER):
        importlib.import_module("torch").compiler.set_stance("force_eager")

    # Only groups of several ranks have an order of calls that NCCL could reject.
    if launch["ranks"] > 1:
        from tests import nccl_rules

        nccl_rules.record(Path(launch["calls"]))
    become([launch["script"], *launch["arguments"]], module=launch["module"])


def become(command: list[str], *, module: bool) -> NoReturn:
    """Run a script or a module in this forked process as if Python had just started it.

    The process ends without the interpreter's shutdown, which would free the objects of all imported modules:
    a second of processor time, most of it for copies of the memory that the process shares with its parent.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = command

    try:
        if module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    # The exit code follows Python's own rules for SystemExit.
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1

    # What the interpreter does before it frees its objects: wait for threads, call exit functions, flush.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
