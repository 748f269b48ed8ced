"""Layers that Megatron lacks, or that it has only with Transformer Engine.

- Attention and rotary embedding of packed rows, and a norm for Megatron's local layers (without Transformer
  Engine): Megatron's local norm refuses sequence parallelism, its local attention refuses packed rows.
- Gemma's scaled embeddings, local rotary angles and score caps.
- Multi-latent attention (DeepSeek-AI 2024) on packed rows.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor, nn

from megatron_rl.config.derive import has_transformer_engine
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.megatron.packing import PackedRows


def require_transformer_engine() -> None:
    """Raise UserError with the reason if Transformer Engine cannot be imported."""
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
    """Warn, once per process, if Transformer Engine has computed attention without a fused kernel.

    Transformer Engine selects a kernel silently (`get_attention_backend`). Without a fused kernel it stores
    all scores, which was one reason why a 1.5B model on packed rows of 660 tokens reached only 11 % of an
    H100's peak.
    """
    global _warned_of_unfused

    # Transformer Engine caches its last selection in this module, which it imports on its first attention.
    backends = getattr(sys.modules.get(_TE_ATTENTION_PACKAGE), "_attention_backends", {})
    if _warned_of_unfused or not backends.get("use_unfused_attention"):
        return

    _warned_of_unfused = True
    warnings.warn(
        "Transformer Engine computes attention without a fused kernel, several times slower and with the "
        f"scores of whole rows in memory. Its reasons against fused kernels: {_rejection_reasons(backends)}. "
        "Fix: install flash-attn, or a cuDNN that it supports",
        stacklevel=2,
    )


def find_earlier_attention_backend() -> dict[str, str]:
    """Return ``{"attention_backend": "auto"}`` if an earlier model of this process had this setting, else {}.

    Megatron writes the setting of the first model into three environment variables of Transformer Engine,
    and raises for a later model with a different setting. The model of a user's training script has ``auto``
    by default.
    """
    # Only the setting `auto` enables all three kernels.
    if all(os.environ.get(f"NVTE_{kernel}_ATTN") == "1" for kernel in ("FLASH", "FUSED", "UNFUSED")):
        return {"attention_backend": "auto"}
    return {}


@contextmanager
def _explain_missing_kernel() -> Iterator[None]:
    """Convert Transformer Engine's error for a missing attention kernel to a UserError with its reasons."""
    try:
        yield
    except ValueError as error:
        if "No dot product attention backend" not in str(error):
            raise

        backends = getattr(sys.modules.get(_TE_ATTENTION_PACKAGE), "_attention_backends", {})
        raise UserError(
            "Transformer Engine has no fused attention kernel for these rows",
            where="actor.megatron.attention_backend",
            expected="a kernel of attention_backend, by default a kernel of cuDNN (`fused`)",
            got=f"no kernel; its reasons: {_rejection_reasons(backends)}",
            fix="run `megatron-rl doctor`, which checks the libraries that cuDNN opens; or set "
            "actor.megatron.attention_backend=flash with flash-attn, or model.attention=torch",
        ) from error


def _rejection_reasons(backends: Mapping[str, Any]) -> str:
    """Return Transformer Engine's reasons for rejecting its fused attention kernels.

    Transformer Engine logs its reasons at DEBUG, which is off by default. This function enables DEBUG and
    repeats the last kernel selection, which ``backends`` caches. It never raises, since its result explains
    another error.
    """
    messages: list[str] = []

    def collect_message(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())

    # Capture the log without passing it to the handlers of the application.
    handler = logging.Handler()
    handler.emit = collect_message
    log = logging.getLogger("DotProductAttention")
    level_before = log.level
    propagate_before = log.propagate
    log.propagate = False

    try:
        te_utilities = importlib.import_module(f"{_TE_ATTENTION_PACKAGE}.utils")
        logging_options = te_utilities.AttentionLogging
        log.addHandler(handler)
        option_before = logging_options._log_level
        logging_options._log_level = logging.DEBUG
        try:
            te_utilities.get_attention_backend(backends["attention_params"])
        finally:
            logging_options._log_level = option_before
    except Exception as error:  # private functions of Transformer Engine: any version may change them
        messages.append(f"unavailable ({type(error).__name__}: {error})")
    finally:
        log.removeHandler(handler)
        log.setLevel(level_before)
        log.propagate = propagate_before

    other_messages = ("Running with", "Available backends", "Selected")
    reasons = [message for message in messages if not message.startswith(other_messages)]
    return "; ".join(reasons) or "nothing"


_TE_ATTENTION_PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"
"""Package in which Transformer Engine selects its attention kernel."""
_warned_of_unfused = False
"""Whether `warn_of_unfused_attention` has warned in this process."""


class RmsNorm(nn.Module):
    """RMS norm (Zhang & Sennrich 2019), computed in float32, for any parallel layout."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps

        # A zero-centered weight is stored as its difference from 1.
        self.offset = float(config.layernorm_zero_centered_gamma)
        initial_weight = torch.full(
            (hidden_size,),
            1.0 - self.offset,
            dtype=config.params_dtype,
            device=device.device(),
        )
        self.weight = nn.Parameter(initial_weight)
        # Marked so that finalize_model_grads sums the gradients of sequence-parallel shards.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised ``hidden``, in its dtype."""
        if hidden.dtype in (torch.float32, torch.float64) and not self.offset:
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)

        # Round in the order of the models' own code: Gemma multiplies by the weight in float32, Llama
        # multiplies after rounding to the dtype.
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
        """Store the positions of the packed sequence, and return its length on this rank.

        Megatron calls this before `forward`.
        """
        assert packed is not None, "packed rows are the only input format"
        self._positions = packed.positions
        return len(packed.positions)

    def forward(self, length: int, **_: Any) -> Tensor:
        """Return the angles [T, 1, 1, rotary size]."""
        assert self._positions is not None
        angles = torch.outer(self._positions.to(self.inv_freq.dtype), self.inv_freq)

        # Megatron rotates pairs (i, i + size / 2) by one angle, which it reads at both positions.
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RowAttention:
    """Base class of attention modules that receive the boundaries of rows as `PackedRows`."""

    @property
    def uses_varlen_kernel(self) -> bool:
        """Return whether attention uses a variable-length kernel, whose input includes ``cu_seqlens``.

        Other kernels need buckets: batches of rows of similar length, with padding.
        """
        return True


class PackedAttention(nn.Module, RowAttention):
    """Causal attention inside each row of a packed sequence, with PyTorch's fused kernels.

    On an accelerator in half precision, PyTorch's variable-length kernel (`varlen_attn`) takes ``cu_seqlens``
    as input. Otherwise attention is computed by buckets: padded batches of rows of similar length. The
    config's ``window_size`` limits the number of earlier tokens that a token attends to.

    Under context parallelism, all-to-all collectives change the sharding from tokens to heads before
    attention, and back afterwards (Jacobs et al. 2023, DeepSpeed-Ulysses): every rank attends within complete
    rows.
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
        self.half_precision = config.params_dtype in (torch.bfloat16, torch.float16)

        # In latent attention keys include rotary dimensions, and are wider than values.
        untyped_config: Any = config
        self.head_sizes: tuple[int, int] = (untyped_config.kv_channels, untyped_config.kv_channels)
        if config.multi_latent_attention:
            key_size = untyped_config.qk_head_dim + untyped_config.qk_pos_emb_head_dim
            self.head_sizes = (key_size, untyped_config.v_head_dim)
        self.cap: float | None = None
        """Bound of the scores: cap * tanh(score / cap) (Gemma Team 2024, arXiv 2408.00118)."""
        self.context_group = pg_collection.cp
        self.tensor_group = pg_collection.tp
        self.softmax_offset: nn.Parameter | None = None
        """[heads of this tensor-parallel rank], the logits of attention sinks. The name is Megatron's."""
        if config.softmax_type == "learnable":
            heads = divide(config.num_attention_heads, self.tensor_group.size())
            offset = torch.empty(heads, dtype=config.params_dtype, device=device.device())
            self.softmax_offset = nn.Parameter(offset)
            assert config.init_method is not None
            config.init_method(self.softmax_offset)
            # Marked so that the gradient norm counts the heads of every rank.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

        # ``window_attn_skip_freq`` is a list with a flag per layer, or a number N: then every N-th layer has
        # full attention. Without this setting every layer has the window.
        self.window = None
        skip_frequency: Any = config.window_attn_skip_freq
        if config.window_size is not None:
            if isinstance(skip_frequency, list):
                has_window = bool(skip_frequency[layer_number - 1])
            elif skip_frequency:
                has_window = layer_number % skip_frequency != 0
            else:
                has_window = True
            if has_window:
                self.window = config.window_size[0]

    @property
    def uses_varlen_kernel(self) -> bool:
        """Return whether attention uses PyTorch's variable-length kernel.

        Requires an accelerator, half precision, head sizes that the kernel supports, and attention without
        a score cap or sinks.
        """
        # The limits of FlashAttention 2, which `varlen_attn` calls.
        are_sizes_supported = max(self.head_sizes) <= 256 and not any(size % 8 for size in self.head_sizes)
        has_plain_scores = self.cap is None and self.softmax_offset is None
        return device.on_accelerator() and self.half_precision and has_plain_scores and are_sizes_supported

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        """Return the output [T, 1, heads * size] of a query [T, 1, heads, size] or [T, heads, size].

        ``key`` and ``value`` may have fewer heads, each for a group of the query's heads. Collective over the
        context-parallel group.
        """
        assert packed_seq_params is not None, "packed rows are the only input format"
        query = query.flatten(0, -3)
        key = key.flatten(0, -3)
        value = value.flatten(0, -3)

        # Context-parallel ranks need equal numbers of key-value heads: repeat heads that do not divide
        # evenly.
        if key.shape[1] % self.context_group.size():
            key, value = _repeat_grouped_heads(query, key, value)
        query = _shard_over_heads(self.context_group, query)
        key = _shard_over_heads(self.context_group, key)
        value = _shard_over_heads(self.context_group, value)

        if self.uses_varlen_kernel and packed_seq_params.boundaries is not None:
            output = _attend_varlen(query, key, value, packed_seq_params.boundaries, self.scale, self.window)
        else:
            output = self._attend_by_bucket(query, key, value, packed_seq_params)
        return _shard_over_tokens(self.context_group, output).flatten(1).unsqueeze(1)

    def _attend_by_bucket(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed_seq_params: PackedRows,
    ) -> Tensor:
        """Compute the attention output [T, heads, size] of a packed sequence of complete rows, by buckets.

        A bucket is a batch of rows of similar length, padded to the longest row.
        """
        query_buckets = packed_seq_params.fill_buckets(query)
        key_buckets = packed_seq_params.fill_buckets(key)
        value_buckets = packed_seq_params.fill_buckets(value)
        buckets = zip(query_buckets, key_buckets, value_buckets, strict=True)

        attend = self._compute_bucket
        if self.softmax_offset is not None:
            attend = self._compute_bucket_with_sinks
        return packed_seq_params.join_buckets([attend(*bucket) for bucket in buckets])

    def _compute_bucket_with_sinks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Compute attention within the rows of a bucket as `_compute_bucket` does, with attention sinks.

        A sink is a key before the first token, with values of zero: its score is the head's logit for every
        query.
        """
        assert self.softmax_offset is not None
        scale = self.scale
        if scale is None:
            scale = query.shape[-1] ** -0.5

        # Under context parallelism this rank has a shard of the heads.
        shards = self.softmax_offset.chunk(self.context_group.size())
        sinks = shards[self.context_group.rank()].to(query.dtype)
        logits = sinks[None, None, :, None].expand(*query.shape[:3], 1)

        # Append one dimension to queries and keys, so that any fused kernel computes the sink's score. The
        # new dimension contains the sink's logit in every query, 0 in the keys of tokens, and 1 / scale in
        # the key of the sink.
        # `pad` expects (before, after) of the last dimension first: this adds one position before the first.
        query = functional.pad(torch.cat((query, logits), dim=-1), (0, 0, 0, 0, 1, 0))
        sink = key.new_zeros(key.shape[-1] + 1)
        sink[-1] = 1 / scale
        sink_keys = sink.expand(key.shape[0], 1, key.shape[2], -1)
        key = torch.cat((sink_keys, functional.pad(key, (0, 1))), dim=1)
        # Kernels that store no scores require keys and values of equal size.
        value = functional.pad(value, (0, 1, 0, 0, 1, 0))

        # Drop the output of the sink's own query, which is the first, and the padding of the values.
        length = query.shape[1]
        output = self._compute_bucket(query, key, value, scale, sink_count=1)
        return output.unflatten(0, (-1, length))[:, 1:, :, :-1].flatten(0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: Any = None,
    ) -> dict[str, Any]:
        """Return Megatron's sharded state: the logits of the attention sinks, sharded by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def _compute_bucket(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        sink_count: int = 0,
    ) -> Tensor:
        """Compute attention within the rows of a bucket: [rows * longest, heads, size].

        A bucket is a batch of rows of similar length, padded to the longest row: ``query``, ``key`` and
        ``value`` are [rows, longest, heads, size]. ``scale`` is the factor of the scores, by default the
        factor of the layer. Every token's sliding window also contains the first ``sink_count`` positions.
        """
        if scale is None:
            scale = self.scale
        enable_gqa = self.cap is None and _supports_grouped_keys(query)
        if not enable_gqa:
            key, value = _repeat_grouped_heads(query, key, value)
        query_rows = query.transpose(1, 2)
        key_rows = key.transpose(1, 2)
        value_rows = value.transpose(1, 2)

        # Without a window the kernel's own causal mask is enough.
        length = query.shape[1]
        mask = None
        if self.window is not None and length > self.window + 1:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance <= self.window)
            # A sink attends only to itself, and every token attends to it.
            mask[:, :sink_count] |= distance[:, :sink_count] >= 0

        if self.cap is not None:
            output = _compute_capped_attention(
                query_rows,
                key_rows,
                value_rows,
                mask,
                scale,
                self.cap,
            )
        else:
            output = functional.scaled_dot_product_attention(
                query_rows,
                key_rows,
                value_rows,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        return output.transpose(1, 2).flatten(0, 1)


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Any,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute the attention output [T, heads, value size] of a packed sequence with a variable-length kernel.

    ``boundaries`` has the ``cu_seqlens`` of the packed rows. ``window`` is the number of earlier tokens that
    a token attends to, or None for all. Grouped keys and values are not repeated. The kernel supports a
    single head size, so values that are narrower than keys are padded with zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    value_size = value.shape[-1]
    padding = key.shape[-1] - value_size
    if padding:
        value = functional.pad(value, (0, padding))

    # Numbers of tokens before and after a token that it attends to; -1 means no limit.
    window_size = (-1, 0)
    if window is not None:
        window_size = (window, 0)
    output: Any = varlen_attn(
        query,
        key,
        value,
        boundaries.cu_seqlens_q,
        boundaries.cu_seqlens_kv,
        boundaries.max_seqlen_q,
        boundaries.max_seqlen_kv,
        scale=scale,
        window_size=window_size,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[..., :value_size]


def _compute_capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    cap: float,
) -> Tensor:
    """Compute causal attention with scores bounded by ``cap``, [rows, heads, longest, size].

    PyTorch's fused kernels have no cap, so all scores are stored. ``mask`` [longest, longest] is True where a
    query attends to a key; by default a token attends to itself and to all tokens before it.
    """
    score_factor = query.shape[-1] ** -0.5
    if scale is not None:
        score_factor = scale
    scores = query @ key.transpose(2, 3) * score_factor
    scores = cap * torch.tanh(scores.float() / cap)

    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(value.dtype) @ value


def _shard_over_heads(group: Any, heads: Tensor) -> Tensor:
    """Change the sharding from tokens [T / ranks, H, size] to heads [T, H / ranks, size].

    Collective over ``group``.
    """
    rank_count = group.size()
    if rank_count == 1:
        return heads

    # Rank r receives the r-th shard of the heads from every rank.
    num_tokens, head_count, size = heads.shape
    shards = heads.view(num_tokens, rank_count, head_count // rank_count, size).transpose(0, 1).contiguous()
    return all_to_all(group, shards).view(rank_count * num_tokens, head_count // rank_count, size)


def _shard_over_tokens(group: Any, heads: Tensor) -> Tensor:
    """Change the sharding from heads [T, H / ranks, size] to tokens [T / ranks, H, size].

    Collective over ``group``.
    """
    rank_count = group.size()
    if rank_count == 1:
        return heads

    # Rank r receives the r-th shard of the tokens from every rank.
    num_tokens, local_head_count, size = heads.shape
    shards = all_to_all(group, heads.view(rank_count, num_tokens // rank_count, local_head_count, size))
    return shards.transpose(0, 1).reshape(num_tokens // rank_count, rank_count * local_head_count, size)


def _supports_grouped_keys(query: Tensor) -> bool:
    """Return whether to pass grouped keys and values to scaled_dot_product_attention (``enable_gqa``).

    Otherwise the caller must repeat keys and values for each query head. On CPU in half precision the result
    is False, since PyTorch would sum the gradients of a group's heads in half precision. On a GPU the result
    is False, too: PyTorch has a kernel for grouped keys there, but it supports neither masks nor float32.
    """
    return device.on_host() and query.dtype in (torch.float32, torch.float64)


def _repeat_grouped_heads(
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
    """Return the class of Transformer Engine's attention for `PackedRows`, for Megatron's layer specs.

    Its kernels read row boundaries (THD). Megatron's own layers would also derive rotary angles from these
    boundaries, with four device synchronizations per layer, and split each row over context-parallel ranks.
    With this class, angles come from `PackedRotaryEmbedding`, and every rank attends within complete rows.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class WholeRowAttention(TEDotProductAttention, RowAttention):
        """Transformer Engine's attention within complete rows, for this context-parallel rank's heads."""

        def __init__(
            self,
            config: Any,
            *args: Any,
            pg_collection: Any,
            **arguments: Any,
        ) -> None:
            # Whether the key-value heads divide evenly over context-parallel ranks. If not, `forward` repeats
            # the heads: one for each query head.
            num_ranks = pg_collection.cp.size()
            local_key_heads = divide(config.num_query_groups, pg_collection.tp.size())
            self.can_shard_key_heads = local_key_heads % num_ranks == 0

            # Configure Transformer Engine for one context-parallel rank with a shard of the heads.
            rank_config = copy(config)
            rank_config.context_parallel_size = 1
            rank_config.num_attention_heads = divide(config.num_attention_heads, num_ranks)
            rank_config.num_query_groups = rank_config.num_attention_heads
            if self.can_shard_key_heads:
                rank_config.num_query_groups = config.num_query_groups // num_ranks
            super().__init__(rank_config, *args, pg_collection=pg_collection, **arguments)
            self.context_group = pg_collection.cp

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any,
            attn_mask_type: Any,
            attention_bias: Any = None,
            packed_seq_params: Any = None,
            num_splits: Any = None,
        ) -> Tensor:
            """Return the attention output [T, 1, heads * size], as `PackedAttention.forward` does."""
            assert packed_seq_params is not None, "packed rows are the only input format"
            query = query.flatten(0, -3)
            key = key.flatten(0, -3)
            value = value.flatten(0, -3)

            if not self.can_shard_key_heads:
                key, value = _repeat_grouped_heads(query, key, value)
            query = _shard_over_heads(self.context_group, query)
            key = _shard_over_heads(self.context_group, key)
            value = _shard_over_heads(self.context_group, value)

            with _explain_missing_kernel():
                output = super().forward(
                    query,
                    key,
                    value,
                    attention_mask,
                    attn_mask_type,
                    attention_bias=attention_bias,
                    packed_seq_params=packed_seq_params.boundaries,
                    num_splits=num_splits,
                )
            output = output.view(len(query), query.shape[1], -1)
            return _shard_over_tokens(self.context_group, output).flatten(1).unsqueeze(1)

    return WholeRowAttention


@contextmanager
def allow_plain_output_layer(uses_transformer_engine: bool) -> Iterator[None]:
    """Allow Megatron to build its own output layer with ``gradient_accumulation_fusion`` inside the block.

    ``uses_transformer_engine``: whether the transformer layers are Transformer Engine's; otherwise the block
    has no effect.

    Megatron's own linear layer refuses ``gradient_accumulation_fusion`` if Apex is not installed (seen in
    0.16.1 and 0.19.2). Transformer Engine's layers need no Apex. But GPTModel uses Megatron's own linear
    layer as the output layer even if all other layers are Transformer Engine's. The forward pass of the
    output layer is never called, since `ParallelModel.token_outputs` projects the hidden states.
    """
    original_flag = megatron_layers._grad_accum_fusion_available
    is_available = uses_transformer_engine or original_flag
    setattr(megatron_layers, "_grad_accum_fusion_available", is_available)
    try:
        yield
    finally:
        setattr(megatron_layers, "_grad_accum_fusion_available", original_flag)


def block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    vp_stage: int | None,
    pp_rank: int,
    core_attention: str | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of one pipeline stage's layers: Transformer Engine's, or Megatron's local layers.

    Megatron's local layers (without Transformer Engine) use the norm and the attention of this module.
    Transformer Engine's layers use `PackedAttention` if ``core_attention`` is "torch" or if attention has
    sinks.
    """
    # Replace the attention of Transformer Engine's layers, which expects rows in a different format.
    if use_transformer_engine:
        block = _fused_block_spec(config, vp_stage, pp_rank)
        attention: Any = PackedAttention
        if core_attention != "torch" and config.softmax_type == "vanilla":
            attention = transformer_engine_attention()
        layers: Any = block.layer_specs
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = attention
        return block

    # Layers are counted over the whole model, since only some may have experts.
    first_layer = get_transformer_layer_offset(config, vp_stage, pp_rank)
    num_layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    layer_specs = []
    for layer in range(first_layer, first_layer + num_layers):
        layer_specs.append(_plain_layer_spec(config, _has_experts(config, layer)))
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=_untyped_norm(RmsNorm))


def _fused_block_spec(
    config: TransformerConfig,
    vp_stage: int | None,
    pp_rank: int,
) -> TransformerBlockSubmodules:
    """Return Megatron's spec of one pipeline stage, with Transformer Engine's layers."""
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=vp_stage, pp_rank=pp_rank
        )

    # The layers of a dense model are equal.
    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm, use_te_activation_func=config.use_te_activation_func
    )
    from megatron.core.extensions.transformer_engine import TENorm

    num_layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=_untyped_norm(TENorm))


def _untyped_norm(norm_class: Any) -> Any:
    """Return a norm's class with the type Any.

    Megatron's type for ``layer_norm`` is a spec or a module, although it also accepts a class.
    """
    return norm_class


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer, counted from 0 over the whole model, has experts."""
    if not config.num_moe_experts:
        return False

    # ``moe_layer_freq`` is a list with a flag per layer, or a number N: then every N-th layer has experts.
    frequency = config.moe_layer_freq
    if isinstance(frequency, list):
        return bool(frequency[layer])
    return layer % frequency == 0


def _plain_layer_spec(config: TransformerConfig, has_experts: bool) -> Any:
    """Return Megatron's local layer spec (without Transformer Engine) with modules that support packed rows.

    ``has_experts``: whether the layer has experts instead of a dense MLP.
    """
    num_experts = None
    if has_experts:
        num_experts = config.num_moe_experts
    layer: Any = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )

    modules = layer.submodules
    modules.input_layernorm = RmsNorm
    modules.pre_mlp_layernorm = RmsNorm
    attention = modules.self_attention.submodules
    attention.core_attention = PackedAttention
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if config.qk_layernorm and hasattr(attention, name):
            setattr(attention, name, RmsNorm)
    if config.multi_latent_attention and getattr(config, "q_lora_rank", None) is None:
        # An uncompressed query has no norm.
        attention.q_layernorm = None
    return layer


# --- Key-value heads that tensor-parallel ranks share

_attention_group: Any = None
"""Tensor-parallel group of the attention module whose projections are being computed, or None."""


def bind_tensor_group(attention: Any) -> None:
    """Make an attention module project queries, keys and values in its own tensor-parallel group."""
    original_function = attention.get_query_key_value_tensors
    tensor_group = attention.pg_collection.tp
    attention.get_query_key_value_tensors = partial(_call_in_group, original_function, tensor_group)


def _call_in_group(
    function: Callable[..., Any],
    group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a function with `_attention_group` set to ``group``; calls may nest."""
    global _attention_group
    outer_group = _attention_group
    _attention_group = group
    try:
        return function(*args, **kwargs)
    finally:
        _attention_group = outer_group


def allow_shared_heads() -> None:
    """Support fewer key-value heads than tensor-parallel ranks, by sharing heads. Idempotent.

    With fewer heads than ranks, Megatron gathers the projections of all ranks, and each rank selects its own
    projection. Some versions of Megatron do this in the process-global group. After this call Megatron uses
    the group that `bind_tensor_group` sets.
    """
    module: Any = megatron_attention
    module.all_gather_last_dim_from_tensor_parallel_region = _gather_projections
    module.get_tensor_model_parallel_rank = _tensor_parallel_rank


def _gather_projections(value: Tensor, group: Any = None) -> Tensor:
    """All-gather a projection along its last dimension over ``group``, by default `_attention_group`."""
    if group is None:
        group = _attention_group
    return mappings.all_gather_last_dim_from_tensor_parallel_region(value, group=group)


def _tensor_parallel_rank() -> int:
    """Return this process's rank in `_attention_group`, if set, or in the process-global group."""
    if _attention_group is None:
        return parallel_state.get_tensor_model_parallel_rank()
    return _attention_group.rank()


def scale_embeddings(chunk: Any) -> None:
    """Multiply the embeddings of a GPTModel chunk by the square root of their width (arXiv 2408.00118)."""
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(partial(_scale_output, chunk.config.hidden_size**0.5))


def cap_scores(chunk: Any, cap: float) -> None:
    """Soft-cap the attention scores of a GPTModel chunk at ``cap`` (arXiv 2408.00118)."""
    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.cap = cap


def scale_queries(chunk: Any, beta: float, original_length: int) -> None:
    """Multiply the queries of a GPTModel chunk by 1 + beta ln(1 + floor(position / original_length)).

    ``original_length`` is the context length of pretraining, before the context was extended. The factor is 1
    at positions below it. The factor is the same for all elements of a query, so it may be applied before or
    after the rotary angles. Source: transformers, `get_llama_4_attn_scale` of ministral3.
    """
    for layer in chunk.decoder.layers:
        core: nn.Module = layer.self_attention.core_attention
        core.register_forward_pre_hook(partial(_scale_query, beta, original_length), with_kwargs=True)


def _scale_query(
    beta: float,
    original_length: int,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Scale the query of an attention module as `scale_queries` describes (forward pre-hook)."""
    query, *other_args = args
    intervals = kwargs["packed_seq_params"].positions // original_length
    factors = 1 + beta * torch.log1p(intervals.float())
    # Only the first dimension, the tokens, is common to all attention modules.
    trailing_dims = (1,) * (query.dim() - 1)
    token_factors = factors.view(-1, *trailing_dims).to(query.dtype)
    return (query * token_factors, *other_args), kwargs


def prepare_local_rotation(
    layers: Iterable[Any], local_layers: tuple[int, ...], local_size: int, local_factor: float
) -> None:
    """Register hooks that select each layer's rotary angles: of local attention, or of full attention.

    Each layer receives both, since `join_frequencies` has joined their frequencies; the first ``local_size``
    frequencies are local. ``local_layers`` are the indices of the layers with local angles, counted from 0
    over the whole model. These layers multiply cos and sin by ``local_factor``, other layers by the factor in
    the config. Source: Gemma Team, arXiv 2503.19786.
    """
    for layer in layers:
        attention = layer.self_attention
        is_local = layer.layer_number - 1 in local_layers
        frequency_range = slice(local_size, None)
        if is_local:
            frequency_range = slice(0, local_size)
        hook = partial(_select_angles, frequency_range)
        attention.register_forward_pre_hook(hook, with_kwargs=True)

        if is_local:
            # Megatron-Core 0.16 reads the config in each forward pass, 0.19 reads the attribute below.
            attention.config = copy(attention.config)
            set_rotary_factor(attention.config, local_factor)
            attention._yarn_concentration_factor = local_factor


def scale_layers(chunk: Any) -> None:
    """Multiply the output of each layer of a GPTModel chunk by its buffer ``layer_scalar`` [1].

    Source: transformers, `Gemma4TextDecoderLayer`.
    """
    for layer in chunk.decoder.layers:
        scalar = torch.ones(1, dtype=chunk.config.params_dtype, device=device.device())
        layer.register_buffer("layer_scalar", scalar)
        layer.register_forward_hook(_scale_layer_output)


def _scale_layer_output(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Multiply a layer's hidden states by its ``layer_scalar`` (forward hook)."""
    hidden, context = output
    return hidden * module.layer_scalar, context


def set_rotary_factor(config: TransformerConfig, factor: float) -> None:
    """Make Megatron's attention multiply cos and sin by ``factor``.

    Megatron multiplies them by 0.1 ln(s) + 1, where s is an attribute that `TransformerConfig` does not
    declare. The value that is set here makes this expression equal to ``factor``.
    """
    setattr(config, "yarn_rotary_scaling_factor", math.exp(10.0 * (factor - 1.0)))


def join_frequencies(local: Tensor, full: Tensor) -> Tensor:
    """Concatenate the inverse frequencies of local attention and of full attention."""
    return torch.cat((local, full))


def _scale_output(
    factor: float,
    module: Any,
    inputs: Any,
    output: Tensor,
) -> Tensor:
    """Multiply a module's output by ``factor`` (forward hook)."""
    # Round the factor to the precision of the output, as in the training of Gemma's models.
    return output * torch.tensor(factor, dtype=output.dtype, device=output.device)


def _select_angles(
    frequency_range: slice,
    module: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Select the rotary angles of local or of full attention (forward pre-hook of an attention module).

    ``frequency_range`` is the range of the module's frequencies in the result of `join_frequencies`.
    """
    # Angles are given as [local, full, local, full], since rotation pairs both halves of a head.
    angles = kwargs["rotary_pos_emb"]
    if isinstance(angles, tuple):
        angles = angles[0]
    half = angles.shape[-1] // 2
    selected_angles = angles[..., :half][..., frequency_range]
    new_kwargs = dict(kwargs)
    new_kwargs["rotary_pos_emb"] = torch.cat((selected_angles, selected_angles), dim=-1)
    return args, new_kwargs


def clear_transformer_engine_flag() -> None:
    """Clear Megatron's HAVE_TE flag for latent attention without Transformer Engine. Idempotent."""
    if not has_transformer_engine():
        module: Any = multi_latent_attention
        module.HAVE_TE = False


class LatentSelfAttention(multi_latent_attention.MLASelfAttention):
    """Latent attention with the projections and norms of the layer's spec, in any version of Megatron-Core.

    Megatron-Core 0.19 ignores some modules of the spec. It builds a query norm even for an uncompressed
    query, which DeepSeek's models do not have, and refuses to build a norm without Transformer Engine.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the projections and norms of the layer's spec, which Megatron-Core 0.19 would replace."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def use_latent_attention(layer_spec: Any, group: Any) -> None:
    """Set the attention module of ``layer_spec`` to `LatentSelfAttention`, in place.

    The query projection uses the tensor-parallel ``group``, see `_bind_projection`.
    """
    attention = layer_spec.submodules.self_attention
    attention.module = LatentSelfAttention
    attention.submodules.linear_q_proj = _bind_projection(attention.submodules.linear_q_proj, group)


def _bind_projection(linear: type, group: Any) -> type:
    """Return a subclass of a projection whose default tensor-parallel group is ``group``.

    Megatron passes no group to the projection of an uncompressed query. Without this subclass the projection
    would use the process-global group.
    """

    def __init__(
        self: Any,
        *args: Any,
        tp_group: Any = None,
        **kwargs: Any,
    ) -> None:
        linear.__init__(self, *args, tp_group=tp_group or group, **kwargs)

    return type(linear.__name__, (linear,), {"__init__": __init__})


def prepare_latent_attention(layers: Iterable[Any], inverse_frequencies: Tensor) -> None:
    """Adapt layers with latent attention to packed rows and to tensor parallelism.

    The layers compute rotary angles from ``inverse_frequencies``. If a model provider replaced the core
    attention by a class that is no `RowAttention`, the layer keeps its own rotary embedding.

    Under tensor parallelism, forward hooks gather the outputs of the down projections, so that every rank has
    the complete latents and the rotary key that all heads share. In the backward pass the key's gradient is
    summed over the ranks, since each rank computes only the part of its own heads. A down projection that
    Transformer Engine replicates is marked as replicated, so that the gradient norm counts it once.
    """
    for layer in layers:
        attention = layer.self_attention
        config = attention.config
        if isinstance(attention.core_attention, RowAttention):
            # Megatron's fused kernel would derive positions from row boundaries.
            config.apply_rope_fusion = False
            layer_device = next(layer.parameters()).device
            attention.rotary_pos_emb = _LatentRotaryEmbedding(
                inverse_frequencies.to(layer_device), returns_factor=config.rope_type == "yarn"
            )
        if attention.pg_collection.tp.size() == 1:
            continue

        # Per down projection: the size of its latent, and the size of the rotary key that all heads share.
        projections = [(attention.linear_kv_down_proj, config.kv_lora_rank, config.qk_pos_emb_head_dim)]
        if config.q_lora_rank is not None:
            projections.append((attention.linear_q_down_proj, config.q_lora_rank, 0))
        for linear, latent_size, key_size in projections:
            gather = partial(_gather_latent, attention.pg_collection.tp, config.sequence_parallel)
            linear.register_forward_hook(partial(gather, latent_size, key_size))
            if len(linear.weight) == latent_size + key_size:
                # Transformer Engine marks every weight as sharded, and the norm would count each rank's copy.
                setattr(linear.weight, "tensor_model_parallel", False)


def _gather_latent(
    group: Any,
    sequence_parallel: bool,
    latent_size: int,
    key_size: int,
    module: Any,
    inputs: Any,
    output: tuple[Tensor, Any],
) -> tuple[Tensor, Any]:
    """Gather a down projection's output [.., latent size + key size] over ranks (forward hook).

    After this hook the output is complete, so Megatron skips its own gather, which would use the
    process-global group.
    """
    projected, bias = output

    # The weight is sharded over its outputs, unless Transformer Engine replicates it.
    if projected.shape[-1] != latent_size + key_size:
        projected = mappings.gather_from_tensor_model_parallel_region(projected, group)
        if sequence_parallel:
            return mappings.scatter_to_sequence_parallel_region(projected, group), bias

    # The heads of all ranks read the key, but each rank computes only the gradient of its own heads: sum the
    # gradients in the backward pass. Under sequence parallelism the gather of the tokens already sums them.
    if key_size and not sequence_parallel:
        compressed, key = projected.split((latent_size, key_size), dim=-1)
        key = mappings.copy_to_tensor_model_parallel_region(key, group)
        projected = torch.cat((compressed, key), dim=-1)
    return projected, bias


class _LatentRotaryEmbedding(PackedRotaryEmbedding):
    """Rotary embedding with angles [T, 1, rotary size], without the batch dimension, for latent attention.

    ``returns_factor``: whether `forward` also returns a factor for cos and sin, as Megatron expects of YaRN.
    """

    def __init__(self, inverse_frequencies: Tensor, returns_factor: bool) -> None:
        super().__init__(inverse_frequencies)
        self._returns_factor = returns_factor

    def forward(self, length: int, **kwargs: Any) -> Any:
        """Return the angles or, for a model with YaRN, the angles and the factor 1.0 for cos and sin.

        Megatron's latent attention with YaRN expects this pair.
        """
        angles = super().forward(length, **kwargs).squeeze(1)
        if self._returns_factor:
            return angles, 1.0
        return angles
