"""A user's own model code in the forms that Megatron-LM's scripts have; stated sizes are the tiny Qwen2's."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.functional import silu

from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments
from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.distributed import device

NAMES = {"mlp.down.weight": "mlp.linear_fc2.weight"}
TWICE = {"mlp.down.weight": "mlp.linear_fc1.weight"}


def older(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Ask Megatron's globals for the layout, and state the model."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return gpt(config, pre_process, post_process)


def gpt_builder(
    args: Namespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
    attention: Any = None,
) -> GPTModel:
    """Take everything from the call, as Megatron-LM's function of this name does.

    Where Transformer Engine is installed, its layers are taken, with ``attention`` where there is one.
    """
    assert vp_stage == parallel_state.get_virtual_pipeline_model_parallel_rank()

    fused = has_transformer_engine()
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    if fused:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
        if attention is not None:
            layer.submodules.self_attention.submodules.core_attention = attention

    if args.num_experts:
        layer = get_gpt_decoder_block_spec(config, fused, normalization=args.normalization, vp_stage=vp_stage)
    return GPTModel(
        config,
        layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def own_attention(
    args: Namespace,
    pre_process: bool,
    post_process: bool,
    config: Any,
    pg_collection: Any,
) -> GPTModel:
    """Have attention of one's own among Transformer Engine's layers: rows come as Megatron gives them."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class Mine(TEDotProductAttention):
        def forward(self, *args: Any, packed_seq_params: Any = None, **more: Any) -> Tensor:
            assert packed_seq_params.qkv_format == "thd"
            return super().forward(*args, packed_seq_params=packed_seq_params, **more)

    return gpt_builder(args, pre_process, post_process, None, config, pg_collection, Mine)


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


def gpt(config: Any, pre_process: bool, post_process: bool, mlp: Any = MLP) -> GPTModel:
    """Build a pipeline stage of Megatron's plain layers."""
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    if isinstance(layer.submodules.mlp, partial):  # since Megatron-Core 0.19
        layer.submodules.mlp = partial(mlp.as_mlp_submodule, **layer.submodules.mlp.keywords)
    else:
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
    )


def set_up(path: Path, distributed: bool = True) -> tuple[list[Any], Any, Any]:
    """Return what Megatron-LM's setup_model_and_optimizer does, for the model at ``path`` on one process.

    ``distributed`` chooses its optimizer. Call it inside `own_groups`. Its weights are random.
    """
    args = Namespace(**checkpoint_arguments(path)[0])

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization="RMSNorm",
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
    )
    with device.megatron_mode():
        device.seed_tensor_parallel(1, 0)
        chunk = gpt_builder(args, True, True, config=config)
        buffers = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        )
        model: list[Any] = [DistributedDataParallel(config, buffers, chunk)]

        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            adam_eps=1e-2,
            weight_decay=0.01,
            adam_beta2=0.999,
            clip_grad=1.0,
            use_distributed_optimizer=distributed,
        )
        optimizer = get_megatron_optimizer(settings, model)

    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-2,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


@contextmanager
def own_groups() -> Iterator[None]:
    """Have Megatron's process-global groups, as a training script makes them, and close their connections."""
    device.initialize()
    before = set(distributed_c10d._world.pg_map)
    state: Any = parallel_state
    buffer = state._GLOBAL_MEMORY_BUFFER
    state._GLOBAL_MEMORY_BUFFER = None

    with device.megatron_mode():
        parallel_state.initialize_model_parallel()

    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        state._GLOBAL_MEMORY_BUFFER = buffer
        for group in set(distributed_c10d._world.pg_map) - before:
            dist.destroy_process_group(group)
        gc.collect()  # models and what refers to them from their groups are cycles
