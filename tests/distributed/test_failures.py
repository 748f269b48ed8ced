"""A rank that dies or hangs ends the job everywhere in bounded time, with rank, role and phase named."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from tests.conftest import Launch, free_port

ROOT = Path(__file__).resolve().parents[2]


def endless(folder: Path, material: Path, rank_timeout: float = 8) -> Path:
    config = {
        "run_dir": str(folder / "run"),
        "steps": 100_000,
        "rank_timeout": rank_timeout,
        "model": {"path": str(material / "model"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 2},
        "actor": {"layout": {"pipeline": 2}},
        "rollout": {"engine": "torch", "max_response_tokens": 4},
        "evaluation": {"at_start": False},
        "checkpoint": {"every": 100_000},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def rank_process(launcher: int, rank: int) -> psutil.Process:
    return sorted(psutil.Process(launcher).children(), key=lambda process: process.pid)[rank]


def launch(folder: Path, config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [*command, "-m", "megatron_rl", "train", str(config)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def await_step(folder: Path, said_at_end: Callable[[], str | None]) -> None:
    metrics, deadline = folder / "run/metrics.jsonl", time.monotonic() + 180
    while not metrics.exists() or not metrics.read_text():
        assert said_at_end() is None and time.monotonic() < deadline
        time.sleep(0.2)


def signalled(
    forked_torchrun, folder: Path, config: Path, sent: int, rank: int | None, **env: str
) -> tuple[int, str]:
    """Send a signal to a rank, or to torchrun, after a step; return its exit code and its output."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(forked_torchrun, "megatron_rl", "train", config, env=env)
        await_step(folder, lambda: job.result()[1] if job.done() else None)
        launcher = int((folder / "torchrun").read_text())
        os.kill(launcher if rank is None else rank_process(launcher, rank).pid, sent)
        return job.result()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_job_by_name(forked_torchrun, material, tmp_path, sent):
    # A job that hangs is ended after rank_timeout, and a stopped process does not end when it is asked to.
    patience = {"SHUTDOWN_SECONDS": "3"} if sent == signal.SIGSTOP else {}
    # Silent is a rank without a report for half of the timeout: a rank that a busy machine held up for longer
    # before it was stopped would be reported as busy.
    config = endless(tmp_path, material, rank_timeout=16)
    code, text = signalled(forked_torchrun, tmp_path, config, sent, rank=1, **patience)
    assert code == 1
    first, second = (
        rf"rank {rank} \(actor: tensor 0, pipeline {rank}, data 0; rollout: replica {rank}, tensor 0\)"
        for rank in (0, 1)
    )
    phase = r"in phase '\w+' of step \d+"
    if sent == signal.SIGKILL:
        assert re.search(rf"{first} (was stopped|failed) {phase}", text), text[-3000:]
        assert "exitcode  : -9" in text
    else:
        silent = rf"no rank made progress for 16 s .*\n  {second} stopped reporting, last seen {phase} "
        waits = rf"after .*\n  waiting for them: {first} {phase} after .*\d+ engine steps, .*inside "
        assert re.search(silent + waits, text), text


def test_a_folder_has_one_job_and_ranks_leave_with_their_launcher(fork, material, tmp_path):
    config = endless(tmp_path, material)
    launcher = launch(tmp_path, config)
    try:
        said = tmp_path / "output"
        await_step(tmp_path, lambda: None if launcher.poll() is None else said.read_text())
        ranks = [rank_process(launcher.pid, rank) for rank in (0, 1)]
        second = fork("megatron_rl", 2, "train", config, module=True, check=False)
        assert "another job trains in this run folder" in second.output and "fix:" in second.output
        assert all(rank.is_running() for rank in ranks), "the second job disturbed the first"
        launcher.kill()
        _, left = psutil.wait_procs(ranks, timeout=15)
        assert not left, "ranks went on without their launcher"
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    # What a killed job leaves behind stops nobody.
    changes = ["steps=1", "checkpoint.resume=never", "checkpoint.export=false"]
    fork("megatron_rl", 2, "train", config, *changes, module=True)


@pytest.mark.parametrize(
    ("sent", "rank"),
    [
        (signal.SIGTERM, None),
        # torchrun and the ranks have the same handler for these as for SIGTERM.
        pytest.param(signal.SIGINT, None, marks=pytest.mark.campaign),
        pytest.param(signal.SIGHUP, None, marks=pytest.mark.campaign),
        (signal.SIGUSR1, 1),
    ],
)
def test_a_job_that_is_asked_to_stop_saves_after_its_step(
    fork, forked_torchrun, material, tmp_path, sent, rank
):
    config = endless(tmp_path, material)
    code, text = signalled(forked_torchrun, tmp_path, config, sent, rank)
    assert code != 0
    told = re.search(rf"stopped by {sent.name} after step (\d+): saved (\S+); exit code {128 + sent}", text)
    assert told, text[-3000:]
    assert Path(told[2]).name == f"step_{told[1]}" and (Path(told[2]) / "meta.json").is_file()
    changes = [f"steps={int(told[1]) + 1}", "batch.prompts_per_step=4"]
    result = fork("megatron_rl", 2, "train", config, *changes, module=True)
    assert f"resumed from {told[2]} at step {told[1]}" in result.output
    begin = "warning: this run resumes with a changed setting:"
    assert f"{begin} batch.prompts_per_step was 8 and is 4: the order of the prompts changes" in result.output
    assert f"{begin} steps was 100000 and is {int(told[1]) + 1}\n" in result.output
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, int(told[1]) + 2))


def test_ranks_that_do_not_meet_say_where_they_waited(fork, material, tmp_path):
    words = ["world_size=2", "sft=null", "evaluation.sets={}", "actor.layout.pipeline=1", "rank_timeout=5"]
    words += [f"run_dir={tmp_path / 'run'}", f"model.path={material / 'model'}"]
    words += [f"data.train={material / 'train.jsonl'}"]

    def train(**environment: str) -> Launch:
        command = ("megatron_rl", 1, "train", "configs/quickstart.yaml", *words)
        return fork(*command, module=True, check=False, env={"WORLD_SIZE": "2", **environment}, timeout=120)

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        taken = train(RANK="0", LOCAL_RANK="0", MASTER_PORT=port)
    assert taken.returncode == 2, taken.output
    assert "the ranks of the job did not rendezvous" in taken.stderr and port in taken.stderr
    alone = train(RANK="1", LOCAL_RANK="0", MASTER_PORT=str(free_port()))
    assert alone.returncode == 2 and "within 5 s" in alone.stderr and "Traceback" not in alone.stderr


WATCHED = Path(__file__).with_name("watch_ranks.py")


def test_a_rank_may_be_waited_for_as_long_as_it_gets_on(fork):
    assert fork(WATCHED, 4, "works").stdout.count("sum 4") == 4


def test_a_job_of_one_rank_is_watched_like_many(fork, tmp_path):
    assert fork(WATCHED, 1, "works").stdout.count("sum 1") == 1
    result = fork(WATCHED, 1, "hangs", tmp_path, check=False)
    stands = r"\n  rank 0 \(none\) is in phase 'generate' after no work, inside .*hangs > wait\n"
    assert result.returncode == 1
    assert re.search(r"no rank made progress for 4 s \(rank_timeout\)" + stands, result.stderr), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hangs", r"\n  rank 2 \(none\) is in phase 'generate' after no work, inside .*hangs > wait\n"),
        ("is_stopped", r"\n  rank 2 \(none\) stopped reporting, last seen in phase '\w+' after"),
    ],
)
def test_of_ranks_that_hang_the_one_is_named_that_the_others_wait_for(fork, tmp_path, fault, words):
    result = fork(WATCHED, 4, fault, tmp_path, check=False)
    waits = (
        r".*  waiting for them: rank 0 \(none\) in phase 'generate' after .*, inside .*all_reduce and 2 more"
    )
    assert result.returncode == 1
    assert re.search(
        r"no rank made progress for 4 s \(rank_timeout\)" + words + waits, result.stderr, re.DOTALL
    ), result.output
    assert f"torchfrtrace {tmp_path}" in result.stderr
    records = {path.name: pickle.loads(path.read_bytes()) for path in tmp_path.iterdir()}
    assert set(records) == {f"rank_{rank}" for rank in range(4) if rank != 2 or fault == "hangs"}
    called = {name: record["entries"][-1]["collective_seq_id"] for name, record in records.items()}
    last = called.pop("rank_2", called["rank_0"] - 1)
    assert set(called.values()) == {last + 1}
