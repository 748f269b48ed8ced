"""A user's own model code in one process: what it must be, and what is said of code that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from megatron_rl.errors import UserError
from megatron_rl.parallel import device
from megatron_rl.parallel.checkpoint_megatron import checkpoint_arguments
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.hf.weights import load_weights
from megatron_rl.parallel.model import build_model
from megatron_rl.parallel.provider import global_groups, load_provider
from megatron_rl.shapes.layout import ParallelLayout
from tests.hf_models import save_model

PLACE = "tests.model_providers:"


def build(path: Path, name: str, names: str | None = None) -> Any:
    device.initialize()
    config = save_model("qwen2", path).config
    provider = load_provider(PLACE + name, names, checkpoint_arguments(path)[0])
    groups = ParallelGroups(ParallelLayout((0,)))
    model = build_model(config, groups, dtype=torch.float32, provider=provider)
    load_weights(model, path)
    return model


def test_parameters_that_are_called_otherwise_are_named_by_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"decoder\.layers\.0\.mlp\.down\.weight") as caught:
        build(tmp_path, "renamed")
    assert "mlp.linear_fc2.weight" in caught.value.expected and "model.weights=" in caught.value.fix
    model = build(tmp_path, "renamed", PLACE + "NAMES")
    trained = dict(model.chunks[0].named_parameters())["decoder.layers.3.mlp.down.weight"]
    stored = load_file(tmp_path / "model.safetensors")["model.layers.3.mlp.down_proj.weight"]
    assert torch.equal(trained, stored)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raising", ["raised an error", "KeyError: 'seq_length'", "pre_process, post_process"]),
        ("elsewhere", ["something else than a bare GPTModel", "list"]),
        ("shallower", ["another than config.json", "num_layers: 4", "num_layers: 2"]),
        ("nowhere", ["cannot be imported", "model.provider", "nowhere"]),
    ],
)
def test_what_is_no_model_of_the_run_is_refused(name: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        build(tmp_path, name)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_groups_are_global_for_as_long_as_the_block(tmp_path: Path) -> None:
    device.initialize()
    groups = ParallelGroups(ParallelLayout((0,)))
    before = dict(vars(parallel_state))
    with pytest.raises(RuntimeError), global_groups(groups):
        assert parallel_state.get_tensor_model_parallel_group() is groups.tensor
        assert parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
        assert parallel_state.is_pipeline_last_stage() and parallel_state.is_rank_in_embedding_group()
        raise RuntimeError
    after = dict(vars(parallel_state))
    assert all(after[name] is value for name, value in before.items())
