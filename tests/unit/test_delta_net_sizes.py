"""Memory of gated delta nets, against the cache of transformers and tensors that are counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from megatron_rl.shapes.blocks.attention import Attention
from megatron_rl.shapes.blocks.block import Block, LocalLayer
from megatron_rl.shapes.blocks.experts import Experts
from megatron_rl.shapes.blocks.gated_delta_net import GatedDeltaNet
from megatron_rl.shapes.memory import saved_activation_bytes
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.published import shape_of

CONFIG = Qwen3NextConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
"""Three value heads a key head, whose sizes differ: no two factors of the formulas are equal."""


def shape() -> ModelShape:
    return shape_of(CONFIG.to_dict())


def saved_elements(tensor: int, dtype_bytes: int, *, fused: bool) -> float:
    layer = LocalLayer(shape(), tensor, 1, 1, dtype_bytes, fused)
    return GatedDeltaNet().saved_elements(layer)


def test_the_state_of_a_row_is_what_transformers_keeps() -> None:
    model = Qwen3NextForCausalLM(CONFIG).float().eval()
    with torch.no_grad():
        cache = model(torch.arange(9)[None], use_cache=True).past_key_values
    matrices = 0
    inputs = 0
    for layer in shape().linear_layers:
        state = cache.layers[layer]
        (recurrent,) = state.recurrent_states.values()
        (conv,) = state.conv_states.values()
        matrices += recurrent.numel()
        # transformers keeps the newest input as well, which the next token shifts out.
        inputs += conv.shape[1] * (CONFIG.linear_conv_kernel_dim - 1)
    assert len(shape().linear_layers) == 3
    assert shape().state_bytes_per_row(1, 2) == matrices * 4 + inputs * 2
    assert shape().state_bytes_per_row(2, 2) == shape().state_bytes_per_row(1, 2) / 2
    assert replace(shape(), linear_layers=()).state_bytes_per_row(1, 2) == 0


@pytest.mark.parametrize(("dtype_bytes", "float32"), [(2, 2), (4, 1)])
def test_saved_tensors_are_those_of_a_layer(dtype_bytes: int, float32: int) -> None:
    queries = keys = 2 * 8
    values = gate = 6 * 12
    decay = step = 6
    projections = queries + keys + values + gate + decay + step
    convolution = queries + keys + values
    repeated = (6 * 8 + 6 * 8) * float32
    outputs = values + values
    total = projections + convolution + repeated + outputs
    assert saved_elements(1, dtype_bytes, fused=True) == total
    states = 6 * 8 * 12 * float32 / 64
    assert saved_elements(1, dtype_bytes, fused=False) == total + states
    assert saved_elements(2, dtype_bytes, fused=True) == total / 2


def test_a_layer_counts_its_delta_net_instead_of_attention() -> None:
    longer = replace(shape(), heads=64, kv_heads=32)
    linear, attention = (Block(mixer, Experts()) for mixer in (GatedDeltaNet(), Attention()))
    for recompute in ("none", "selective"):
        same = [saved_activation_bytes(item, linear, 1, 1, 1, recompute) for item in (shape(), longer)]
        assert same[0] == same[1]
    more = [saved_activation_bytes(item, attention, 1, 1, 1, "none") for item in (shape(), longer)]
    assert more[0] < more[1]
