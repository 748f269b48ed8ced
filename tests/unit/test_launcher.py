"""Environment of launchers, contradictions in it, and requests to stop."""

from __future__ import annotations

import signal

import pytest

from megatron_rl.errors import UserError
from megatron_rl.launcher import Launch, read_launch
from megatron_rl.trainer.job import handle_stop_signals
from megatron_rl.trainer.loop import Phases

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_the_place_of_a_process_in_its_job() -> None:
    assert read_launch({}) == Launch(0, 1, 0, alone=True)
    assert read_launch(GOOD, joins_group=True) == Launch(1, 2, 1, alone=False)
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) == Launch(0, 1, 0, alone=False)
    assert read_launch({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": ""}).alone


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "-1"}, ["WORLD_SIZE"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE"]),
        ({"RANK": "2"}, ["RANK"]),
        ({"RANK": "-1"}, ["RANK"]),
        ({"RANK": ""}, ["RANK"]),
        ({"LOCAL_RANK": "first"}, ["LOCAL_RANK"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT"]),
        ({"MASTER_ADDR": "", "MASTER_PORT": "0"}, ["MASTER_ADDR", "MASTER_PORT"]),
        ({"RANK": "", "WORLD_SIZE": "", "SLURM_STEP_NUM_TASKS": "8"}, ["SLURM_STEP_NUM_TASKS"]),
        ({"RANK": "", "WORLD_SIZE": "", "OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE"]),
    ],
)
def test_what_a_launcher_cannot_mean_is_named(changes: dict[str, str], named: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        read_launch(GOOD | changes, joins_group=True)
    text = str(refused.value)
    assert all(f"environment: {name}" in text for name in named) and "fix:" in text


@pytest.mark.parametrize("torchrun", [False, True])
def test_what_nohup_started_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch, torchrun: bool) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        if torchrun:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_stop_signals("rank 0", Phases(), 60.0):
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ignored is not torchrun


def test_a_signal_that_slurm_and_torchrun_both_send_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals every process of a step, and torchrun passes its own signal on."""
    ended: list[int] = []
    with handle_stop_signals("rank 0", Phases(), 60.0) as stop, stop.defer_stops():
        monkeypatch.setattr(stop, "_end_after_signal", ended.append)
        stop.handle_signal(signal.SIGUSR1)
        stop.handle_signal(signal.SIGUSR1)
        assert stop.signal_number == signal.SIGUSR1 and not ended
        stop.handle_signal(signal.SIGTERM)
        assert ended == [signal.SIGTERM], "another signal does not wait"
    ended.clear()
    with handle_stop_signals("rank 0", Phases(), 60.0) as stop, stop.defer_stops():
        monkeypatch.setattr(stop, "_end_after_signal", ended.append)
        monkeypatch.setattr("megatron_rl.trainer.job.REPEATED_SIGNAL_SECONDS", 0.0)
        stop.handle_signal(signal.SIGUSR1)
        stop.handle_signal(signal.SIGUSR1)
    assert ended == [signal.SIGUSR1], "later it is a second request"
