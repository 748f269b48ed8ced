"""A Megatron-Core train step as users write it by hand, to compare with the learn phase in step_time.py.

The timed part contains only Megatron-Core: global process groups, GPTModel with labels and its vocab-parallel
cross entropy, DDP, distributed optimizer and schedule. The batches are prepared beforehand, as by a data
loader.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.megatron.layers import PackedRotaryEmbedding, block_spec
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.shapes.layout import ParallelLayout

_RUNTIME_HOOKS = (
    "finalize_model_grads_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "grad_scale_func",
)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of b rows of s tokens."""

    tokens: Tensor
    """Input tokens [b, s]."""
    labels: Tensor
    """Next tokens [b, s]."""
    loss_mask: Tensor
    """1 for tokens with a loss [b, s]."""
    packing: Any = None
    """Megatron's PackedSeqParams, or None for rows that are not packed."""


class BareMegatron:
    """Model and optimizer of a Megatron-Core user. The constructor is collective over the world.

    The settings and the weights are copied from ``source``. With ``local_layers``, attention, norm and rotary
    embedding are Megatron's local layers, for rows that are not packed. Otherwise the model has the layers of
    ``source``, for packed rows.
    """

    def __init__(
        self,
        source: ParallelModel,
        learning_rate: float,
        local_layers: bool,
    ) -> None:
        start_megatron(source.groups.layout)

        # Copy the settings without megatron_rl's hooks. Their names differ between versions of Megatron.
        config = copy.copy(source.transformer_config)

        names = {field.name for field in fields(config)}
        for name in _RUNTIME_HOOKS:
            if name in names:
                setattr(config, name, None)

        config.finalize_model_grads_func = finalize_model_grads
        self.config = config
        stage = parallel_state.get_pipeline_model_parallel_rank()
        if local_layers:
            spec = _local_layer_spec(config, stage)
        else:
            spec = block_spec(
                config,
                source.uses_transformer_engine,
                None,
                stage,
            )

        with device.megatron_mode():
            model = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                parallel_output=True,
                **source.spec.gpt_kwargs,
            ).to(device.device())

            if local_layers:
                source.spec.finish(model)
            else:
                model.rotary_pos_emb = PackedRotaryEmbedding(
                    source.spec.inverse_frequencies.to(device.device())
                )

            model.load_state_dict(source.chunks[0].state_dict())

            self.model = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
                model,
            )

            # The same optimizer settings as in the run of megatron_rl.
            settings = OptimizerConfig(
                optimizer="adam",
                lr=learning_rate,
                min_lr=learning_rate,
                weight_decay=0.01,
                adam_beta2=0.999,
                clip_grad=1.0,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            )
            self.optimizer = get_megatron_optimizer(settings, [self.model], use_gloo_process_groups=False)
        self.model.train()

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Run one optimizer step, and return the mean loss of all tokens and the gradient norm."""
        # Pipeline stages exchange shapes only if the micro-batches have different shapes, as in Megatron-LM.
        self.config.variable_seq_lengths = len({batch.tokens.shape for batch in batches}) > 1
        with device.megatron_mode():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=iter(batches),
                model=self.model,
                num_microbatches=len(batches),
                seq_length=batches[0].tokens.shape[1],
                micro_batch_size=batches[0].tokens.shape[0],
                forward_only=False,
            )
            _, norm, _ = self.optimizer.step()

        # Only the last stage has losses. Tensor ranks have equal copies, which cancel in the quotient.
        total = torch.zeros(2)
        if losses:
            total = torch.stack([microbatch["loss"] for microbatch in losses]).sum(0)

        dist.all_reduce(total)
        return float(total[0] / total[1]), float(norm)


class SequenceParallelNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with sequence parallelism, which Megatron's own wrapper does not support."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        # Megatron sums the gradients of weights with this attribute over the tensor-parallel group.
        setattr(self.weight, "sequence_parallel", True)


def _local_layer_spec(config: TransformerConfig, stage: int) -> Any:
    """Return the spec of Megatron's local layers, which do not need Transformer Engine."""
    # With sequence parallelism, replace the norms of all layers.
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    if not config.sequence_parallel:
        return layer
    norm: Any = SequenceParallelNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layers = [layer] * get_num_layers_to_build(config, None, stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def start_megatron(layout: ParallelLayout) -> None:
    """Create Megatron's global process groups once. Collective over the world."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_global_memory_buffer()  # initialize_model_parallel fails if it exists
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            create_gloo_process_groups=False,
        )


def _forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Run the model on the next micro-batch; return its output and loss function for Megatron's schedule."""
    batch = next(iterator)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    options = {}
    if batch.packing is not None:
        options["packed_seq_params"] = batch.packing
    output = model(
        batch.tokens,
        positions,
        None,
        labels=batch.labels,
        **options,
    )
    return output, partial(_loss, batch.loss_mask)


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses, the number of tokens, and a mapping with both."""
    total_loss = (losses.float() * mask).sum()
    num_tokens = mask.sum()
    return total_loss, num_tokens.to(torch.int), {"loss": torch.stack((total_loss.detach(), num_tokens))}
