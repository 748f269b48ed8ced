"""Experts in one module each and in one grouped module, whole and cut, are filled with the same numbers."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.megatron.parameter_mapping import Shard, import_parameters, trace_import
from megatron_rl.weights.boxes import view_of
from tests.hf_models import config_of

LAYER = "decoder.layers.2.mlp.experts."
SEQUENTIAL = LAYER + "local_experts.{expert}.linear_{name}.weight"
GROUPED = LAYER + "linear_{name}.weight{expert}"


def checkpoint(config):
    """Return tensors of a whole checkpoint, every number of them different."""
    shapes, begin, tensors = describe_model(config).tensor_shapes(), 0, {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(begin, begin + count, dtype=torch.float64).view(shape)
        begin += count
    return tensors


def storages(config, naming, shard):
    """Return empty parameters of the experts one rank holds, under their Megatron names."""
    shape = describe_model(config).shape
    experts, width = shape.experts, shape.expert_width // shard.expert_tensor_size
    parameters = {}
    for expert in range(experts // shard.expert_size):
        fc1 = torch.full((2 * width, config.hidden_size), -1.0, dtype=torch.float64)
        parameters[naming.format(expert=expert, name="fc1")] = fc1
        fc2 = torch.full((config.hidden_size, width), -1.0, dtype=torch.float64)
        parameters[naming.format(expert=expert, name="fc2")] = fc2
    return parameters


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("naming", [SEQUENTIAL, GROUPED])
def test_both_kinds_of_expert_storage_hold_the_checkpoint(family, naming):
    config = config_of(family)
    tensors = checkpoint(config)
    shard = Shard(expert=1, expert_size=2, expert_tensor=1, expert_tensor_size=2)
    parameters = storages(config, naming, shard)
    import_parameters(parameters, tensors, describe_model(config), shard)
    shape = describe_model(config).shape
    local, width = shape.experts // 2, shape.expert_width // 2
    block, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2")
        if family == "mixtral"
        else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    for expert in range(local):
        prefix = f"model.layers.2.{block}.experts.{local + expert}."
        halves = [tensors[f"{prefix}{name}.weight"][width:] for name in (gate, up)]
        assert torch.equal(parameters[naming.format(expert=expert, name="fc1")], torch.cat(halves))
        assert torch.equal(
            parameters[naming.format(expert=expert, name="fc2")], tensors[f"{prefix}{down}.weight"][:, width:]
        )


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
@pytest.mark.parametrize("naming", [SEQUENTIAL, GROUPED])
def test_boxes_of_both_kinds_read_the_checkpoint_back(family, naming):
    config = config_of(family)
    tensors = checkpoint(config)
    shard = Shard(expert=1, expert_size=2)
    parameters = storages(config, naming, shard)
    import_parameters(parameters, tensors, describe_model(config), shard)
    meta = {name: torch.empty_like(value, device="meta") for name, value in parameters.items()}
    boxes = trace_import(meta, describe_model(config), shard, rank=0)
    assert boxes
    for box in boxes:
        part = tuple(slice(low, low + size) for low, size in zip(box.start, box.size, strict=True))
        assert torch.equal(view_of(parameters[box.storage], box), tensors[box.name][part])
