"""A run folder has one job at a time, wherever the jobs run."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.trainer import job as job_module
from megatron_rl.trainer.job import lock_run_folder


def hold(folder: Path, says: Connection) -> None:
    """Be a job that holds the lock until it is killed."""
    with lock_run_folder(folder):
        says.send("held")
        time.sleep(600)


def holder(folder: Path, host: str, age: float) -> Path:
    """Leave the lock of a job on ``host`` whose last sign of life was ``age`` seconds ago."""
    path = folder / "run.lock"
    path.write_text(json.dumps({"host": host, "process": 1, "since": "then"}))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_living_job_keeps_its_folder_and_a_killed_one_does_not(tmp_path):
    # A forked process has imported Megatron-Core already.
    fork = multiprocessing.get_context("fork")
    said, says = fork.Pipe(duplex=False)
    job = fork.Process(target=hold, args=(tmp_path, says))
    job.start()
    assert said.poll(60) and said.recv() == "held"
    with pytest.raises(UserError) as refused, lock_run_folder(tmp_path):
        pass
    assert f"process {job.pid} on {socket.gethostname()}" in str(refused.value)
    job.kill()
    job.join()
    with lock_run_folder(tmp_path):
        pass
    assert (tmp_path / "run.lock").read_text() == "", "a lock that was given back names nobody"


@pytest.mark.slow
def test_a_dead_hosts_lock_is_taken_over_and_a_living_ones_respected(tmp_path, monkeypatch):
    holder(tmp_path, "another-host", age=3600)
    with lock_run_folder(tmp_path):
        pass
    monkeypatch.setattr(job_module, "STALE_SECONDS", 2.0)
    holder(tmp_path, "another-host", age=0)
    begun = time.monotonic()
    with lock_run_folder(tmp_path):  # no sign of life comes
        assert time.monotonic() - begun > 1
    path = holder(tmp_path, "another-host", age=0)
    threading.Timer(0.5, os.utime, args=(path,)).start()
    with pytest.raises(UserError, match="another job"), lock_run_folder(tmp_path):
        pass
