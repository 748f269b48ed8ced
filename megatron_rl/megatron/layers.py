"""Layers for Megatron's models: attention and rotary embedding of packed rows, and a norm for plain layers.

Megatron's own local norm refuses sequence parallelism and its local attention packed rows.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import divide
from torch import Tensor, nn

from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.megatron.packing import PackedRows


def require_transformer_engine() -> None:
    """Raise UserError, with the reason, where Transformer Engine cannot be imported."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            "Transformer Engine cannot be used",
            where="model.attention",
            expected="torch, or a transformer_engine[pytorch] that fits this PyTorch and this driver",
            got=f"{type(error).__name__}: {error}",
            fix="set model.attention to torch, or install Transformer Engine again",
        ) from error


def warn_of_unfused_attention() -> None:
    """Warn, once per process, where Transformer Engine has computed attention without a fused kernel.

    It selects a kernel silently (`get_attention_backend`). On an H100, training a 1.5B model on packed rows
    of 660 tokens reached 11 % of the GPU's peak: unfused attention was one cause, and stored all scores.
    """
    global _unfused
    backends = getattr(sys.modules.get(_ATTENTION), "_attention_backends", {})
    if _unfused or not backends.get("use_unfused_attention"):
        return
    _unfused = True
    warnings.warn(
        "Transformer Engine computes attention without a fused kernel, several times slower and with the "
        f"scores of whole rows in memory. What it says of the others: {_refusals(backends)}. Fix: install "
        "flash-attn, or a cuDNN that it takes",
        stacklevel=2,
    )


def _refusals(backends: Mapping[str, Any]) -> str:
    """Make Transformer Engine select its attention kernel again; return the reasons that it logs.

    They are logged at a level that is off by default.
    """
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    log = logging.getLogger("DotProductAttention")
    level_before = log.level
    propagate_before = log.propagate
    log.propagate = False

    try:
        choice = importlib.import_module(f"{_ATTENTION}.utils")
        settings = choice.AttentionLogging
        log.addHandler(handler)
        setting_before = settings._log_level
        settings._log_level = logging.DEBUG
        try:
            choice.get_attention_backend(backends["attention_params"])
        finally:
            settings._log_level = setting_before
    except Exception as error:  # a warning ends no run
        messages.append(f"not to be learned ({type(error).__name__}: {error})")
    finally:
        log.removeHandler(handler)
        log.setLevel(level_before)
        log.propagate = propagate_before

    reasons = [
        line for line in messages if not line.startswith(("Running with", "Available backends", "Selected"))
    ]
    return "; ".join(reasons) or "nothing"


_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_unfused = False


class RmsNorm(nn.Module):
    """Normalise by the root mean square (Zhang & Sennrich 2019), in float32, in any parallel layout."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        fill = torch.zeros if self.offset else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device.device()))
        # Marked so that gradients of sequence-parallel shards are summed.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised ``hidden``, in its dtype."""
        if hidden.dtype in (torch.float32, torch.float64) and not self.offset:
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        normalised = functional.rms_norm(hidden.float(), self.weight.shape, None, self.eps)
        if self.offset:
            return (normalised * (self.weight.float() + self.offset)).to(hidden.dtype)
        return normalised.to(hidden.dtype) * self.weight


class PackedRotaryEmbedding(nn.Module):
    """Rotary angles of each token of a packed sequence, by its position in its own row."""

    def __init__(self, inverse_frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies
        self._positions: Tensor | None = None

    def get_rotary_seq_len(
        self,
        context: Any,
        block: Any,
        hidden: Any,
        config: Any,
        packed: PackedRows | None = None,
    ) -> int:
        """Store the positions of the packed sequence; Megatron calls this before `forward`."""
        assert packed is not None, "packed rows are the only input format"
        self._positions = packed.positions
        return len(packed.positions)

    def forward(self, length: int, **_: Any) -> Tensor:
        """Return the angles [T, 1, 1, rotary size]."""
        assert self._positions is not None
        angles = torch.outer(self._positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RowAttention:
    """Marker of attention modules that take `PackedRows`."""


class PackedAttention(nn.Module, RowAttention):
    """Causal attention inside each row of a packed sequence, with PyTorch's fused kernels.

    A ``window_size`` of the config limits how far a token looks back. Under context parallelism an
    all-to-all exchanges all heads of a shard of the tokens for all tokens of a shard of the heads, and back
    (Jacobs et al. 2023, DeepSpeed-Ulysses), so that every rank attends within complete rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cap: float | None = None
        """Bound of the scores: cap * tanh(score / cap) (Gemma Team 2024, arXiv 2408.00118)."""
        self.context = pg_collection.cp

        # A frequency is a flag per layer, or N for full attention in every N-th layer.
        self.window = None
        frequency: Any = config.window_attn_skip_freq
        if config.window_size is not None:
            if isinstance(frequency, list):
                has_window = frequency[layer_number - 1]
            else:
                has_window = layer_number % (frequency or 1e9)
            self.window = config.window_size[0] if has_window else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
        attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: PackedRows | None = None,
    ) -> Tensor:  # fmt: skip
        """Return [T, 1, heads * size] for query [T, 1, heads, size] or [T, heads, size], and grouped keys.

        Collective over the context-parallel group.
        """
        assert packed_seq_params is not None, "packed rows are the only input format"
        query, key, value = (heads.flatten(0, -3) for heads in (query, key, value))

        # Context-parallel ranks take equal numbers of key-value heads: repeat those that do not divide.
        if key.shape[1] % self.context.size():
            key, value = _ungrouped(query, key, value)
        query, key, value = (_exchange_for_rows(self.context, heads) for heads in (query, key, value))

        output = self._attend(query, key, value, packed_seq_params)
        return _exchange_for_heads(self.context, output).flatten(1).unsqueeze(1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed_seq_params: PackedRows,
    ) -> Tensor:
        """Return the attention output [T, heads, size] of complete rows, bucket by bucket."""
        filled = zip(*map(packed_seq_params.fill, (query, key, value)), strict=True)
        return packed_seq_params.join([self._bucket(*bucket) for bucket in filled])

    def _bucket(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Return a bucket's output [rows * longest, heads, size] for inputs [rows, longest, heads, size]."""
        grouped = self.cap is None and _takes_grouped_keys(query)
        if not grouped:
            key, value = _ungrouped(query, key, value)
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]

        # Without a window the kernel's own causal mask is enough.
        length = query.shape[1]
        mask = None
        if self.window is not None and length > self.window + 1:
            distance = torch.arange(length, device=query.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance <= self.window)

        if self.cap is not None:
            out = _capped_attention(
                rows[0],
                rows[1],
                rows[2],
                mask,
                self.scale,
                self.cap,
            )
            return out.transpose(1, 2).flatten(0, 1)
        out = functional.scaled_dot_product_attention(
            *rows, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    cap: float,
) -> Tensor:
    """Compute attention with scores within ``cap``, [rows, heads, longest, size]; stores all scores."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores.float() / cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(value.dtype) @ value


def _exchange_for_rows(group: Any, heads: Tensor) -> Tensor:
    """Return [T, H / ranks, size], all tokens, for [T / ranks, H, size], all heads.

    Collective over ``group``.
    """
    ranks = group.size()
    if ranks == 1:
        return heads
    tokens, count, size = heads.shape
    shards = heads.view(tokens, ranks, count // ranks, size).transpose(0, 1).contiguous()
    return all_to_all(group, shards).view(ranks * tokens, count // ranks, size)


def _exchange_for_heads(group: Any, rows: Tensor) -> Tensor:
    """Return [T / ranks, H, size], all heads, for [T, H / ranks, size], all tokens.

    Collective over ``group``.
    """
    ranks = group.size()
    if ranks == 1:
        return rows
    tokens, count, size = rows.shape
    shards = all_to_all(group, rows.view(ranks, tokens // ranks, count, size))
    return shards.transpose(0, 1).reshape(tokens // ranks, ranks * count, size)


def _takes_grouped_keys(query: Tensor) -> bool:
    """Return whether PyTorch's fused attention takes grouped keys and values without repeating them.

    The host's kernel does, but in half precision it would sum the gradients of a group's heads in half
    precision. On accelerators only the half-precision kernel without a mask does.
    """
    return device.on_host() and query.dtype in (torch.float32, torch.float64)


def _ungrouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Repeat keys and values [.., groups, size] for each query head of their group: [.., heads, size]."""
    repeats = query.shape[-2] // key.shape[-2]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=-2), value.repeat_interleave(repeats, dim=-2)


@cache
def transformer_engine_attention() -> type:
    """Return Transformer Engine's attention for `PackedRows`, a class for Megatron's specs of layers.

    Its kernels take row boundaries (THD). Given those, Megatron would also derive rotary angles from them, at
    four reads of the device per layer, and cut each row over context-parallel ranks; here angles come from
    `PackedRotaryEmbedding`, and every rank attends within complete rows.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class WholeRowAttention(TEDotProductAttention, RowAttention):
        def __init__(self, config: Any, *args: Any, pg_collection: Any, **arguments: Any) -> None:
            ranks = pg_collection.cp.size()
            self.divides = divide(config.num_query_groups, pg_collection.tp.size()) % ranks == 0

            # Transformer Engine sees one context-parallel rank with fewer heads.
            rank_config = copy(config)
            rank_config.context_parallel_size = 1
            rank_config.num_attention_heads = divide(config.num_attention_heads, ranks)
            rank_config.num_query_groups = rank_config.num_attention_heads
            if self.divides:
                rank_config.num_query_groups = config.num_query_groups // ranks
            super().__init__(rank_config, *args, pg_collection=pg_collection, **arguments)
            self.context = pg_collection.cp

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any,
            attention_bias: Any = None, packed_seq_params: Any = None, num_splits: Any = None,
        ) -> Tensor:  # fmt: skip
            """Return [T, 1, heads * size] as `PackedAttention` does."""
            assert packed_seq_params is not None, "packed rows are the only input format"
            query, key, value = (heads.flatten(0, -3) for heads in (query, key, value))
            if not self.divides:
                key, value = _ungrouped(query, key, value)
            query, key, value = (_exchange_for_rows(self.context, heads) for heads in (query, key, value))

            output = super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias=attention_bias,
                packed_seq_params=packed_seq_params.boundaries, num_splits=num_splits,
            )  # fmt: skip
            output = output.view(len(query), query.shape[1], -1)
            return _exchange_for_heads(self.context, output).flatten(1).unsqueeze(1)

    return WholeRowAttention


def block_spec(
    config: TransformerConfig, use_transformer_engine: bool, vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
    """Return one pipeline stage's layers: Transformer Engine's, or Megatron's with our norm and attention."""
    if use_transformer_engine:
        block = _fused_block(config, vp_stage, pp_rank)
        layers: Any = block.layer_specs
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = transformer_engine_attention()
        return block

    offset = get_transformer_layer_offset(config, vp_stage, pp_rank)
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    specs = [_local_layer(config, _is_moe(config, offset + index)) for index in range(count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_norm(RmsNorm))


def _fused_block(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=pp_rank
        )
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    from megatron.core.extensions.transformer_engine import TENorm

    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=_norm(TENorm))


def _norm(module: Any) -> Any:
    # Megatron takes a class here, though it declares a spec or a module.
    return module


def _is_moe(config: TransformerConfig, layer: int) -> bool:
    if not config.num_moe_experts:
        return False
    frequency = config.moe_layer_freq
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0


def _local_layer(config: TransformerConfig, moe: bool) -> Any:
    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )

    # Norms and attention that take packed rows in any layout.
    modules = layer.submodules
    modules.input_layernorm = RmsNorm
    modules.pre_mlp_layernorm = RmsNorm
    attention = modules.self_attention.submodules
    attention.core_attention = PackedAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(attention, name):
            setattr(attention, name, RmsNorm)
    if config.multi_latent_attention and getattr(config, "q_lora_rank", None) is None:
        # The query is not compressed.
        attention.q_layernorm = None
    return layer


# --- Key-value heads that tensor-parallel ranks share

_attention_group: Any = None
"""Tensor-parallel group of the attention module that is projecting, None outside of one."""


def bind_tensor_group(attention: Any) -> None:
    """Make an attention module project queries, keys and values in its own tensor-parallel group."""
    original = attention.get_query_key_value_tensors
    attention.get_query_key_value_tensors = partial(_in_group, original, attention.pg_collection.tp)


def _in_group(function: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    global _attention_group
    outer_group = _attention_group
    _attention_group = group
    try:
        return function(*args, **kwargs)
    finally:
        _attention_group = outer_group


def allow_shared_heads() -> None:
    """Support fewer key-value heads than tensor-parallel ranks, by sharing heads. Idempotent.

    Megatron gathers the projections of all ranks and selects this rank's by its index in the process-global
    group, unless its version uses the attention's own group. `bind_tensor_group` provides that group.
    """
    module: Any = megatron_attention
    module.all_gather_last_dim_from_tensor_parallel_region = _gather_projections
    module.get_tensor_model_parallel_rank = _tensor_parallel_rank


def _gather_projections(value: Tensor, group: Any = None) -> Tensor:
    if group is None:
        group = _attention_group
    return mappings.all_gather_last_dim_from_tensor_parallel_region(value, group=group)


def _tensor_parallel_rank() -> int:
    if _attention_group is None:
        return parallel_state.get_tensor_model_parallel_rank()
    return _attention_group.rank()
