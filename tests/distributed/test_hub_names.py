"""Runs that name model and data on the Hugging Face Hub: huggingface_hub itself, a server on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.conftest import Launch, Launcher, RankServer
from tests.hub_server import COMMIT, hub


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


@contextmanager
def machine(folder: Path, cache: Path, address: str | None) -> Iterator[Launcher]:
    """Fork commands as on a machine that reaches a Hub, or none; huggingface_hub reads it when imported."""
    offline = "1" if address is None else "0"
    environment = {
        "HF_ENDPOINT": address or "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": "1",
    }
    with RankServer(folder, environment=environment) as fork:
        yield fork


def check(fork: Launcher, config: Path) -> Launch:
    return fork("megatron_rl", 1, "check", config, "--world-size", 2, module=True, check=False)


def test_a_run_downloads_what_it_names_once_and_resumes_without_a_network(
    repositories: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    cache = tmp_path / "cache"
    with hub(repositories) as server, machine(tmp_path / "online", cache, server.address) as fork:
        # A check needs the model's sizes and the data, and leaves the weights where they are.
        found = check(fork, config)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "READY once the missing files exist" in found.stdout
        assert "hf://Org/tiny is not downloaded yet" in found.stdout
        assert "hf download Org/tiny" in found.stdout
        assert not [line for line in server.requests if line.endswith(".safetensors")]

        server.requests.clear()
        fork("megatron_rl", 2, "train", config, module=True)
        fetched = [line for line in server.requests if line.startswith("GET") and "resolve" in line]
        assert [line.rpartition("/")[2] for line in fetched] == ["model.safetensors"], (
            "two ranks, one download"
        )
        assert not [line for line in server.requests if "test-0" in line], "only what is named"

    # The run's own record names the revision.
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert f"snapshots/{COMMIT}" in saved

    with machine(tmp_path / "offline", cache, None) as fork:
        found = check(fork, config)
        assert found.returncode == 0, found.stdout + found.stderr
        assert "READY: " in found.stdout
        resumed = fork("megatron_rl", 2, "train", config, "steps=2", module=True)
    assert "resum" in resumed.stdout + resumed.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_2").exists() or "step 2" in resumed.stdout


def test_without_a_network_the_command_that_downloads_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with machine(tmp_path / "offline", tmp_path / "cache", None) as fork:
        found = check(fork, config)
        launch = fork("megatron_rl", 1, "train", config, module=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "hf download Org/tiny" in found.stdout
    assert 'hf download Org/sums --repo-type dataset --include "main/train-*.jsonl"' in found.stdout

    assert launch.returncode != 0
    assert "hf://Org/tiny is not downloaded yet" in launch.stdout + launch.stderr


def test_a_malformed_name_says_how_names_are_written(fork: Launcher, tmp_path: Path) -> None:
    found = check(fork, write_config(tmp_path, "hf://tiny"))
    assert found.returncode == 2
    assert "hf://ORG/NAME of a model" in found.stdout + found.stderr
