"""Processes that a server leaves behind, started, named and nested as vLLM's, without vLLM."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

PROCESSES = """
import multiprocessing, os, sys, time
from megatron_rl.rollout.engines.vllm.orphans import start_watchdog

context = multiprocessing.get_context(sys.argv[3])


def wait(ready):
    ready.put(os.getpid())
    time.sleep(1000)


def work(ready):
    if os.path.exists("late"):  # it loads for longer than its server lives
        ready.put(os.getpid())
        while os.path.exists("late"):
            time.sleep(0.05)
    start_watchdog()
    wait(ready)


def run_engine(ready, workers):
    if not workers:
        start_watchdog()
    for place in range(workers):
        context.Process(target=work, args=(ready,), name=f"VllmWorker-{place}").start()
    wait(ready)


if __name__ == "__main__":
    engines, workers = map(int, sys.argv[1:3])
    ready = context.Queue()
    if engines > 1:
        context.Process(target=wait, args=(ready,), name="VLLM_DP_Coordinator", daemon=True).start()
        ready.get()
    for place in range(engines):
        name = f"EngineCore_DP{place}" if engines > 1 else "EngineCore"
        context.Process(target=run_engine, args=(ready, workers), name=name).start()
    for _ in range(engines * (1 + workers)):
        ready.get()
    print("ready", flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engines", "workers", "late", "method"),
    # Forked processes import once; a server spawns them, beside which it has a tracker of resources.
    [(1, 0, False, "fork"), (2, 1, False, "fork"), (1, 1, True, "spawn")],
)
def test_all_that_a_server_started_ends_when_it_is_killed(tmp_path, engines, workers, late, method):
    (tmp_path / "server.py").write_text(PROCESSES)
    if late:
        (tmp_path / "late").touch()
    command = [sys.executable, str(tmp_path / "server.py"), str(engines), str(workers), method]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        started = psutil.Process(server.pid).children(recursive=True)
        assert len(started) >= engines * (1 + workers) + (engines > 1)
        server.kill()
    (tmp_path / "late").unlink(missing_ok=True)
    _, left = psutil.wait_procs(started, timeout=60)
    for process in left:
        process.kill()
    assert not left


@pytest.mark.slow
def test_a_process_that_is_no_engine_stays(tmp_path):
    (tmp_path / "rank.py").write_text(
        "import threading\nfrom megatron_rl.rollout.engines.vllm.orphans import start_watchdog\n"
        "start_watchdog()\nprint(threading.active_count())\n"
    )
    command = [sys.executable, str(tmp_path / "rank.py")]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "1\n"
