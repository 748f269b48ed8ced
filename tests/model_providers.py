"""A user's own model code for the tiny Qwen2 of `hf_models`, in the forms that Megatron-LM's scripts have."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

NAMES = {"mlp.down.weight": "mlp.linear_fc2.weight"}


def older(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Ask Megatron's globals for the layout, and state the model."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
        normalization="RMSNorm", layernorm_epsilon=1e-6, gated_linear_unit=True, activation_func=silu,
        add_bias_linear=False, add_qkv_bias=True, bias_activation_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return gpt(config, pre_process, post_process)


def gpt_builder(
    args: Namespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Take everything from the call."""
    assert args.num_layers == config.num_layers
    assert vp_stage == parallel_state.get_virtual_pipeline_model_parallel_rank()
    return gpt(config, pre_process, post_process, vp_stage=vp_stage, pg_collection=pg_collection)


def renamed(pre_process: bool, post_process: bool, config: Any, **further: Any) -> GPTModel:
    """Have a layer whose parameter is called otherwise."""
    return gpt(config, pre_process, post_process, RenamedMLP)


def raising(pre_process: bool, post_process: bool) -> GPTModel:
    """Fail as a user's code may."""
    raise KeyError("seq_length")


def elsewhere(pre_process: bool, post_process: bool) -> list[None]:
    """Return something else."""
    return [None]


def shallower(pre_process: bool, post_process: bool, config: Any) -> GPTModel:
    """Contradict config.json."""
    config.num_layers = 2
    return gpt(config, pre_process, post_process)


class RenamedMLP(MLP):
    """Megatron's with another name for its second layer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.down = self.linear_fc2
        del self.linear_fc2

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, dim=-1)
        return self.down(silu(gate) * up)


def gpt(config: Any, pre_process: bool, post_process: bool, mlp: Any = MLP, **further: Any) -> GPTModel:
    """Build a pipeline stage of Megatron's plain layers."""
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.mlp.module = mlp
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return GPTModel(
        config,
        layer,
        vocab_size=-(-131 // tensor) * tensor,
        max_sequence_length=128,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **further,
    )
