"""Copies of Hub repositories on this machine: one for each name, and complete or not used."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatron_rl.config.hub import has_weights, parse_hub_name, resolve_hub_names
from megatron_rl.config.source import Leaf, Origin, Section
from megatron_rl.errors import UserError
from tests.hub_server import Hub, hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


def tree_of(*names: str) -> Section:
    origin = Origin("file", "run.yaml")
    return Section({str(index): Leaf(name, origin) for index, name in enumerate(names)})


def values(tree: Section) -> list[str]:
    return [leaf.value for _, leaf in tree.leaves()]


def use(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub send its requests to a server on this machine."""
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_names_that_differ_in_a_separator_have_copies_of_their_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a/b-c", "a-b/c", "a/b_c", "a_b/c", "a/b.c"]
    for name in names:
        model = tmp_path / "repositories/models" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps({"name": name}))
        (model / "model.safetensors").write_text(name)
    with hub(tmp_path / "repositories") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        tree = tree_of(*(f"hf://{name}" for name in names))
        assert not resolve_hub_names(tree, [], with_weights=True)
        downloaded = values(tree)
        server.requests.clear()
        # The second use reads the pins.
        tree = tree_of(*(f"hf://{name}" for name in names))
        assert not resolve_hub_names(tree, [], with_weights=True)
        assert values(tree) == downloaded and not server.requests
    for name, folder in zip(names, downloaded, strict=True):
        assert (Path(folder) / "model.safetensors").read_text() == name
    assert len(list((cache / ".megatron_rl").glob("*.lock"))) == len(names)


@pytest.mark.slow
def test_a_hub_that_goes_away_within_a_file_is_a_copy_that_is_not_complete(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "repositories/datasets/a/sums"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("{}" * 1000)
    name = "hf://datasets/a/sums/train.jsonl"
    with ThreadPoolExecutor(1) as pool:
        with hub(tmp_path / "repositories") as server:
            use(server, monkeypatch)
            server.stall_at = "train.jsonl"
            resolved = pool.submit(resolve_hub_names, tree_of(name), [], with_weights=True)
            assert server.stalled.wait(30)
        (copy,) = resolved.result(60).values()
    assert (copy.repo, copy.kind) == ("a/sums", "dataset") and copy.reason
    assert not list(cache.glob("*/snapshots/*/train.jsonl"))


def test_a_repository_with_terms_says_how_to_get_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "repositories/models/meta/llama"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with hub(tmp_path / "repositories") as server:
        use(server, monkeypatch)
        server.gated = "meta/llama"
        (copy,) = resolve_hub_names(tree_of("hf://meta/llama"), [], with_weights=True).values()
    assert "accept the terms" in copy.reason and "hf auth login" in copy.reason


def test_each_copy_that_is_not_downloaded_has_a_folder_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    names = ["hf://a/m", "hf://b/m", "hf://a/m@v2", "hf://datasets/a/m/x.jsonl", "hf://datasets/a/m/y.jsonl"]
    tree = tree_of(*names)
    incomplete = resolve_hub_names(tree, [], with_weights=True)
    assert [f"{copy.name}/{copy.files}".removesuffix("/None") for copy in incomplete.values()] == names
    assert len(set(values(tree))) == len(names)
    # A config.json that the package ships is found by the model's name.
    assert all(Path(folder).name == "m" for folder in incomplete)


@pytest.mark.parametrize("repo", ["a/b--c", "a--b/c", "a/b..c", "a/-b", "a/b.git"])
def test_a_name_that_the_hub_does_not_allow_is_malformed(repo: str, cache: Path) -> None:
    assert parse_hub_name(f"hf://{repo}") is None
    errors: list[UserError] = []
    resolve_hub_names(tree_of(f"hf://{repo}"), errors, with_weights=True)
    assert [error.got for error in errors] == [f"hf://{repo}"] and "ORG/NAME" in str(errors[0])


def test_weights_are_complete_with_every_file_of_the_index(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").touch()
    assert not has_weights(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    assert has_weights(tmp_path)
    # `check` reports an index that cannot be read.
    index.write_text("[")
    assert has_weights(tmp_path)
    # A file of all weights takes precedence over the index, also for transformers.
    index.write_text(json.dumps({"weight_map": {"x": "model-3.safetensors"}}))
    assert not has_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert has_weights(tmp_path)
