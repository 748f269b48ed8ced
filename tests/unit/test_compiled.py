"""Functions that Megatron-Core compiles have one kernel for all numbers of tokens."""

from __future__ import annotations

import pytest
import torch
from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import router
from torch._dynamo.utils import counters

from megatron_rl.distributed.compiled import compile_for_any_shape


@pytest.mark.slow
def test_one_kernel_takes_every_number_of_tokens() -> None:
    compile_for_any_shape()
    before = counters["stats"]["unique_graphs"]
    for tokens in (5, 9, 13):
        hidden = torch.randn(tokens, 8)
        gate, up = hidden.chunk(2, -1)
        assert torch.allclose(fused_bias_swiglu.swiglu(hidden), torch.nn.functional.silu(gate) * up)
    assert counters["stats"]["unique_graphs"] - before == 1


def test_methods_are_renewed_and_activations_that_settings_name_are_not() -> None:
    method, activation = router.TopKRouter._apply_expert_bias, fused_bias_geglu.quick_gelu
    compile_for_any_shape()
    assert router.TopKRouter._apply_expert_bias is not method
    assert mlp.quick_gelu is fused_bias_geglu.quick_gelu is activation
