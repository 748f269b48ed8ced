"""The memory model's activations are what autograd keeps of a real forward pass."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import saved_activation_bytes
from tests.saved_tensors import layer_bytes


@pytest.fixture(scope="module")
def groups() -> ParallelGroups:
    device.initialize()
    return ParallelGroups(ParallelLayout((0,)))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "qwen3",
        "gemma3",
        "gemma4",
        "olmo2",
        "mixtral",
        "qwen3-moe",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
def test_a_layer_keeps_what_is_counted(
    family: str, dtype: torch.dtype, recompute: str, groups: ParallelGroups
) -> None:
    saved, shape = layer_bytes(family, groups, dtype, recompute)
    counted = 0.0
    for layer in range(shape.layers):
        block = shape.block(layer)
        counted += saved_activation_bytes(shape, block, 1, 1, 1, recompute, dtype.itemsize, fused=False)
    counted /= shape.layers
    assert counted == pytest.approx(saved, rel=0.05)
