"""Experiment trackers: their input, also after a restart, and their failures, which cannot stop a run."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import struct
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.sections.logging import LoggingConfig
from megatron_rl.errors import first_line
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer import trackers as module
from megatron_rl.trainer.logging import MetricsLog
from megatron_rl.trainer.trackers import TensorBoard, Trackers, describe_host
from megatron_rl.versions import DISTRIBUTIONS_AFFECTING_RESULTS, installed_versions


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run").create()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are imported in the thread, which takes long on a busy machine."""
    monkeypatch.setattr(module, "CLOSING_SECONDS", 500.0)


def trackers(folder: RunFolder, said: list[str], resumed: bool = False, **settings) -> Trackers:
    about = {
        "configuration": {"seed": 7},
        "versions": installed_versions(DISTRIBUTIONS_AFFECTING_RESULTS),
        "hardware": describe_host(),
    }
    return Trackers(LoggingConfig(**settings), folder, about, resumed=resumed, print_line=said.append)


def run_restart_and_run_anew(folder: RunFolder, tracker: str) -> str:
    """Return the id of the last run: the first takes two steps with a restart between, the last takes one."""
    said: list[str] = []
    for resumed, step in ((False, 1), (True, 2), (False, 1)):
        with (
            trackers(folder, said, resumed, trackers=(tracker,), offline=True, samples=1) as told,
            MetricsLog(folder, 2, resumed_step=step - 1 if resumed else None, trackers=told) as log,
        ):
            log.write(step, {"reward/mean": 0.123456 * step, "policy/loss": math.nan})
            told.write_samples("step", step, {"prompt": ["1+1=", "2+2="], "reward": [0.5, 1.0]})
    assert said == []
    return json.loads((folder.path / "trackers.json").read_text())[tracker]


@pytest.mark.slow
def test_wandb_offline_has_everything_and_goes_on_after_a_restart(folder: RunFolder) -> None:
    last = run_restart_and_run_anew(folder, "wandb")
    import wandb

    wandb.teardown()  # its process goes on writing after a run has ended
    runs = sorted((folder.path / "wandb").glob("offline-run-*"))
    ids = [run.name.rpartition("-")[2] for run in runs]
    assert len(ids) == 3 and len(set(ids)) == 2 and ids.count(ids[0]) == 2, "one over a restart"
    assert ids.count(last) == 1
    stored = [next(run.glob("*.wandb")).read_bytes() for run in runs]
    assert sum(b"0.123456" in data and b"reward/mean" in data for data in stored) == 2
    assert sum(b"0.246912" in data for data in stored) == 1
    assert all(b'"seed":7' in data and b"processor" in data for data in stored), "configuration and hardware"
    (table,) = runs[0].glob("files/media/table/samples/*.json")
    assert json.loads(table.read_text()) == {"columns": ["prompt", "reward"], "data": [["1+1=", 0.5]]}


@pytest.mark.slow
def test_mlflow_offline_has_everything_and_goes_on_after_a_restart(folder: RunFolder) -> None:
    last = run_restart_and_run_anew(folder, "mlflow")
    from mlflow import MlflowClient  # the tracker has imported it, after it said that nothing is to be sent

    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    client = MlflowClient(f"sqlite:///{folder.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("megatron_rl")
    assert experiment is not None
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    assert len(runs) == 2 and last in runs, "one over a restart"
    (first,) = runs.keys() - {last}
    for run, steps in ((first, [1, 2]), (last, [1])):
        assert runs[run].info.status == "FINISHED" and runs[run].info.run_name == "run"
        rewards = client.get_metric_history(run, "reward/mean")
        assert [(metric.step, metric.value) for metric in rewards] == [(n, 0.123456 * n) for n in steps]
        assert "policy/loss" not in runs[run].data.metrics
        assert "processor" in json.loads(runs[run].data.tags["hardware"])
        artifacts = folder.path / "mlartifacts" / run / "artifacts"
        about = json.loads((artifacts / "about.json").read_text())
        assert about["configuration"] == {"seed": 7}
        assert json.loads(runs[run].data.tags["versions"]) == about["versions"] != {}
        tables = {table.name: json.loads(table.read_text()) for table in artifacts.glob("samples/*")}
        table = {"columns": ["prompt", "reward"], "data": [["1+1=", 0.5]]}
        assert tables == {f"step_{n}.json": table for n in steps}


@pytest.mark.slow
def test_swanlab_offline_has_everything_and_goes_on_after_a_restart(folder: RunFolder) -> None:
    last = run_restart_and_run_anew(folder, "swanlab")
    # By time, which their names give in whole seconds.
    runs = sorted((folder.path / "swanlab").glob("run-*"), key=lambda run: run.stat().st_mtime_ns)
    ids = [run.name.rpartition("-")[2] for run in runs]
    assert len(ids) == 3 and ids[0] == ids[1] != ids[2] == last, "one over a restart"
    stored = [next(run.glob("*.swanlab")).read_bytes() for run in runs]
    assert all(b"reward/mean" in data for data in stored)
    rewards = [[struct.pack("<d", 0.123456 * step) in data for step in (1, 2)] for data in stored]
    assert rewards == [[True, False], [False, True], [True, False]]
    about = yaml.safe_load((runs[0] / "files" / "config.yaml").read_text())
    assert about["configuration"]["value"] == {"seed": 7} and about["hardware"]["value"]["processor"]
    (table,) = runs[0].glob("media/echarts/*.json")
    assert json.loads(table.read_text())["rowData"] == [{"prompt": "1+1=", "reward": 0.5}]


def test_samples_are_a_text_of_tensorboard(folder: RunFolder) -> None:
    with trackers(folder, []) as told:
        told.begin_phase("train", None)
        told.write_samples("eval_held_out", 3, {"prompt": ["<b>"], "conversation": [[{"role": "policy"}]]})
    events = EventAccumulator(str(folder.tensorboard / "train"))
    events.Reload()
    (event,) = events.Tensors("samples/eval_held_out/text_summary")
    (text,) = event.tensor_proto.string_val
    assert event.step == 3 and text.startswith(b'    {"prompt": "<b>", "conversation": "[{')


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_of_tensorboard_is_said_without_a_traceback(folder: RunFolder) -> None:
    def full(_: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tracker = TensorBoard(folder)
    tracker.begin_phase("train", None)
    thread = tracker._writers["train"].file_writer.event_writer._async_writer._worker
    thread._record_writer.write = full
    with pytest.raises(OSError, match="No space left"):
        for step in range(100):
            tracker.write("train", step, {"reward/mean": 0.5})
    thread.join()


@pytest.mark.slow
def test_a_tracker_that_fails_is_said_once_and_stops_nothing(folder: RunFolder) -> None:
    said: list[str] = []
    folder.tensorboard.rmdir()
    folder.tensorboard.write_text("in the way")
    (folder.path / "mlflow.db").write_text("no database")
    names = ("tensorboard", "mlflow")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            trackers(folder, said, trackers=names, offline=True, prometheus=address) as told,
            MetricsLog(folder, 3, trackers=told) as log,
        ):
            for step in (1, 2, 3):
                log.write(step, {"reward/mean": 0.5})
                told.write_samples("step", step, {"prompt": ["x"]})
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2, 3]
    assert len(said) == 3 and all("failed and is disabled for this run" in line for line in said)
    assert "mlflow" in said[0] and "not a database" in said[0]
    assert "prometheus" in said[1] and "Address already in use" in said[1] and "tensorboard" in said[2]


def test_a_traceback_in_the_text_of_an_error_is_not_the_text_of_a_warning() -> None:
    told = "Traceback (most recent call last):\n\n  the server is away\n  File x.py, line 3"
    assert first_line(RuntimeError(told)) == "RuntimeError: the server is away"
    assert first_line(KeyError()) == "KeyError" and len(first_line(ValueError("x" * 999))) == 300


def test_damaged_ids_of_trackers_are_named_and_begin_new_runs(folder: RunFolder) -> None:
    said: list[str] = []
    ids = folder.path / "trackers.json"
    with trackers(folder, said, trackers=(), resumed=True) as told:
        assert told._read_ids(ids) == {} and not said, "of a run that has begun none"
        for content in (b"{", b"[1]", b"\xff"):
            ids.write_bytes(content)
            assert told._read_ids(ids) == {} and f"{ids} cannot be read" in said.pop()
        ids.write_text('{"mlflow": "17"}')
        assert told._read_ids(ids) == {"mlflow": "17"} and not said


def test_prometheus_reads_the_newest_metrics_by_their_names(folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with trackers(folder, [], trackers=(), prometheus=address) as told:
        told.begin_phase("train", None)
        told.write("train", 1, {"reward/mean": 0.25})
        told.write("train", 2, {"reward/mean": 0.5})
        end, text = time.monotonic() + 60, ""
        while 'megatron_rl{metric="reward/mean"} 0.5' not in text and time.monotonic() < end:
            time.sleep(0.05)
            try:
                text = urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()
            except OSError:  # not yet
                continue
    assert 'megatron_rl{metric="reward/mean"} 0.5' in text and 'metric="train/at_step"} 2.0' in text
