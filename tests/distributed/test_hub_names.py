"""Runs that name model and data on the Hugging Face Hub: huggingface_hub itself, a server on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file

from megatron_rl.hf.files import write_index
from tests.conftest import Launch, Launcher, RankServer, free_port, other_servers
from tests.hub_server import COMMIT, hub
from tests.rank_server import CACHE


@pytest.fixture
def repositories(tmp_path: Path, material: Path) -> Path:
    """Return a folder with the repositories of a model and of a data set with two splits."""
    root = tmp_path / "repositories"
    shutil.copytree(material / "model", root / "models" / "Org" / "tiny")
    data = root / "datasets" / "Org" / "sums" / "main"
    data.mkdir(parents=True)
    shutil.copy(material / "train.jsonl", data / "train-0.jsonl")
    shutil.copy(material / "eval.jsonl", data / "test-0.jsonl")
    return root


def write_config(folder: Path, model: str = "hf://Org/tiny") -> Path:
    config = {
        "run_dir": str(folder / "run"),
        "steps": 1,
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": "hf://datasets/Org/sums/main/train-*.jsonl", "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"engine": "torch", "max_response_tokens": 6},
        "checkpoint": {"every": 1},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="module")
def port() -> int:
    """Return the port of the Hub."""
    return free_port()


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of downloads of both machines."""
    return tmp_path_factory.mktemp("machines") / "cache"


@pytest.fixture
def cache(shared_cache: Path) -> Iterator[Path]:
    """Yield the folder of downloads, which is empty when a test begins."""
    yield shared_cache
    shutil.rmtree(shared_cache, ignore_errors=True)


@pytest.fixture(scope="module")
def online_server(
    tmp_path_factory: pytest.TempPathFactory,
    shared_cache: Path,
    port: int,
    trial_server: list[str],
    contained_server: str,
) -> Iterator[RankServer]:
    """Yield a server of ranks that reach the Hub.

    huggingface_hub reads these variables when it is imported, so this machine has a process of its own.
    """
    variables = other_servers(trial_server, contained_server) | {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_CACHE": str(shared_cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    server = RankServer(tmp_path_factory.mktemp("online"), environment=variables)
    yield server
    server.close()


@pytest.fixture
def online(online_server: RankServer) -> Launcher:
    """Return the launcher of ranks that reach the Hub."""
    return Launcher(online_server.launch)


@pytest.fixture
def offline(fork: Launcher, shared_cache: Path) -> Callable[..., Launch]:
    """Return the launcher of ranks that have the same downloads and no network."""
    return partial(fork, env={CACHE: str(shared_cache)})


def check(fork: Callable[..., Launch], config: Path) -> Launch:
    return fork("megatron_rl", 1, "check", config, "--world-size", 2, module=True, check=False)


def test_a_run_downloads_what_it_names_once_and_resumes_without_a_network(
    repositories: Path,
    tmp_path: Path,
    port: int,
    online: Launcher,
    offline: Callable[..., Launch],
    cache: Path,
) -> None:
    config = write_config(tmp_path)
    with hub(repositories, port) as server:
        # A check needs the model's sizes and the data, and leaves the weights where they are.
        found = check(online, config)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "READY once the missing files exist" in found.stdout
        assert "hf://Org/tiny is not downloaded yet" in found.stdout
        assert "hf download Org/tiny" in found.stdout
        assert not [line for line in server.requests if line.endswith(".safetensors")]

        server.requests.clear()
        online("megatron_rl", 2, "train", config, module=True)
        fetched = [line for line in server.requests if line.startswith("GET") and "resolve" in line]
        assert [line.rpartition("/")[2] for line in fetched] == ["model.safetensors"], (
            "two ranks, one download"
        )
        assert not [line for line in server.requests if "test-0" in line], "only what is named"

    # The run's own record names the revision.
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert f"snapshots/{COMMIT}" in saved

    found = check(offline, config)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "READY: " in found.stdout
    # The model has its name on the Hub, not that of the folder of its commit.
    assert "run          tiny, " in found.stdout
    resumed = offline("megatron_rl", 2, "train", config, "steps=2", module=True)
    assert "resum" in resumed.stdout + resumed.stderr
    assert "actor from hf://Org/tiny " in resumed.stdout + resumed.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_2").exists() or "step 2" in resumed.stdout


def test_a_download_that_was_killed_is_completed_by_the_next_start(
    repositories: Path,
    tmp_path: Path,
    port: int,
    online: Launcher,
    online_server: RankServer,
    offline: Callable[..., Launch],
    cache: Path,
) -> None:
    # A model of two files with an index, and training data of two files.
    model = repositories / "models/Org/tiny"
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    (model / "checksums.json").unlink()
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, model / file, {"format": "pt"})
    write_index(model, files, sum(tensor.nbytes for tensor in tensors.values()))
    data = repositories / "datasets/Org/sums/main"
    records = (data / "train-0.jsonl").read_text().splitlines(keepends=True)
    (data / "train-0.jsonl").write_text("".join(records[::2]))
    (data / "train-1.jsonl").write_text("".join(records[1::2]))

    config = write_config(tmp_path)
    with hub(repositories, port) as server, ThreadPoolExecutor(1) as pool:
        for stall_at in ("train-1.jsonl", "model-00002-of-00002.safetensors"):
            server.stall_at = stall_at
            server.stalled.clear()
            run = pool.submit(online, "megatron_rl", 1, "train", config, module=True, check=False)
            assert server.stalled.wait(120), f"{stall_at} was not requested"
            # The supervisor of the ranks, and the rank.
            for process in psutil.Process(online_server.process_id).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            assert run.result().returncode
            # Without a network the files that were complete are not taken for all of them.
            found = check(offline, config)
            assert "is not downloaded yet" in found.stdout, found.stdout + found.stderr
        assert not (tmp_path / "run" / "metrics.jsonl").exists(), "no step from a part of the files"

        server.stall_at = None
        online("megatron_rl", 2, "train", config, module=True)

    copies = {file.name: file for file in cache.glob(f"*/snapshots/{COMMIT}/**/*") if file.is_file()}
    for source in (*model.iterdir(), data / "train-0.jsonl", data / "train-1.jsonl"):
        assert copies[source.name].read_bytes() == source.read_bytes(), source.name
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_without_a_network_the_command_that_downloads_is_named(
    tmp_path: Path, offline: Callable[..., Launch], cache: Path
) -> None:
    config = write_config(tmp_path)
    found = check(offline, config)
    launch = offline("megatron_rl", 1, "train", config, module=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "hf download Org/tiny" in found.stdout
    assert 'hf download Org/sums --repo-type dataset --include "main/train-*.jsonl"' in found.stdout

    assert launch.returncode != 0
    assert "hf://Org/tiny is not downloaded yet" in launch.stdout + launch.stderr


def test_a_malformed_name_says_how_names_are_written(fork: Launcher, tmp_path: Path) -> None:
    found = check(fork, write_config(tmp_path, "hf://tiny"))
    assert found.returncode == 2
    assert "hf://ORG/NAME of a model" in found.stdout + found.stderr
