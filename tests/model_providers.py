"""Model code of a user, in the forms of Megatron-LM's scripts; fixed sizes are the tiny Qwen2's."""

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
"""Names of `RenamedMLP`'s parameters -> Megatron's own."""
TWICE = {"mlp.down.weight": "mlp.linear_fc1.weight"}
"""Invalid names: two parameters would have one name."""


def older(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Return the model of an older script: Megatron's global groups give the layout, the code the sizes."""
    # An older script has no arguments, so the sizes are those of the tests' tiny model.
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
    """Build the model as Megatron-LM's function of this name does, from its arguments alone.

    Layers are Transformer Engine's if it is installed; ``attention`` replaces their core attention.
    """
    # Megatron-LM passes the stage and sets it globally; both have to agree.
    assert vp_stage == parallel_state.get_virtual_pipeline_model_parallel_rank()

    fused = has_transformer_engine()
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    if fused:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
        if attention is not None:
            layer.submodules.self_attention.submodules.core_attention = attention

    # Dense layers share one spec; a mixture has a spec per layer.
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
    """Return Transformer Engine's layers with an attention of the user's own, which receives packed rows."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PackedAttention(TEDotProductAttention):
        def forward(self, *args: Any, packed_seq_params: Any = None, **keywords: Any) -> Tensor:
            assert packed_seq_params.qkv_format == "thd"
            return super().forward(*args, packed_seq_params=packed_seq_params, **keywords)

    return gpt_builder(args, pre_process, post_process, None, config, pg_collection, PackedAttention)


def renamed(pre_process: bool, post_process: bool, config: Any, **keywords: Any) -> GPTModel:
    """Return a model whose MLP has a parameter of another name."""
    return gpt(config, pre_process, post_process, RenamedMLP)


def raising(pre_process: bool, post_process: bool) -> GPTModel:
    """Raise an error, as broken code of a user would."""
    raise KeyError("seq_length")


def elsewhere(pre_process: bool, post_process: bool) -> list[None]:
    """Return an object that is not a model."""
    return [None]


def shallower(pre_process: bool, post_process: bool, config: Any) -> GPTModel:
    """Return a model with fewer layers than config.json has."""
    config.num_layers = 2
    return gpt(config, pre_process, post_process)


class RenamedMLP(MLP):
    """Megatron's MLP with another name for its second layer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.down = self.linear_fc2
        del self.linear_fc2

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, dim=-1)
        return self.down(silu(gate) * up)


def gpt(config: Any, pre_process: bool, post_process: bool, mlp: Any = MLP) -> GPTModel:
    """Build a pipeline stage of Megatron's local layers, without Transformer Engine."""
    # Megatron-Core 0.19 made the MLP of a layer spec a partial function.
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    if isinstance(layer.submodules.mlp, partial):
        layer.submodules.mlp = partial(mlp.as_mlp_submodule, **layer.submodules.mlp.keywords)
    else:
        layer.submodules.mlp.module = mlp

    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return GPTModel(
        config,
        layer,
        # Megatron pads the vocabulary to a multiple of the tensor-parallel size.
        vocab_size=-(-131 // tensor) * tensor,
        max_sequence_length=128,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def set_up(path: Path, distributed: bool = True) -> tuple[list[Any], Any, Any]:
    """Build model, optimizer and scheduler as Megatron-LM's setup_model_and_optimizer does, on one process.

    Sizes come from the folder at ``path``; weights are random. ``distributed`` selects the
    distributed optimizer. Must be called inside `own_groups`.
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

        # A large epsilon makes steps proportional to gradients, so that trainings can be compared.
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
    """Create Megatron's global process groups, as a training script does, and destroy them at the end."""
    device.initialize()
    before = set(distributed_c10d._world.pg_map)
    # This test process may hold groups and a buffer of earlier tests; both stay untouched.
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
        # Models and their references to the groups form cycles, which keep connections open.
        gc.collect()
