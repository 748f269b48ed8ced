"""Attention of packed rows between context-parallel ranks: heads are exchanged for whole rows, and back.

Ranks that hold all heads of a part of the tokens exchange them for all tokens of a part of the heads, and
back (Jacobs et al. 2023, DeepSpeed-Ulysses): every rank attends to whole rows, by whatever kernel.
"""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.utils import divide
from torch import Tensor


def exchange_for_rows(group: Any, heads: Tensor) -> Tensor:
    """Return [T, H / ranks, size], all tokens, for [T / ranks, H, size], all heads.

    Collective over ``group``.
    """
    ranks = group.size()
    if ranks == 1:
        return heads
    tokens, count, size = heads.shape
    parts = heads.view(tokens, ranks, count // ranks, size).transpose(0, 1).contiguous()
    return all_to_all(group, parts).view(ranks * tokens, count // ranks, size)


def exchange_for_heads(group: Any, rows: Tensor) -> Tensor:
    """Return [T / ranks, H, size], all heads, for [T, H / ranks, size], all tokens.

    Collective over ``group``.
    """
    ranks = group.size()
    if ranks == 1:
        return rows
    tokens, count, size = rows.shape
    parts = all_to_all(group, rows.view(ranks, tokens // ranks, count, size))
    return parts.transpose(0, 1).reshape(tokens // ranks, ranks * count, size)


def repeat_heads(grouped: Tensor, repeats: int) -> Tensor:
    """Return [T, repeats * groups, size] for [T, groups, size]: each group for every head that uses it."""
    return grouped.repeat_interleave(repeats, dim=1) if repeats > 1 else grouped


class RowAttention:
    """Mark attention that takes `PackedRows`, whose tokens bring rotary angles of their own."""


@cache
def transformer_engine_attention() -> type:
    """Return Transformer Engine's attention for `PackedRows`, a class for Megatron's specs of layers.

    Its kernels know rows by their boundaries (THD). Megatron would also derive rotary angles from these, with
    four reads of the device in a layer, and cut each row between context-parallel ranks; here angles are
    those of positions, and rows are whole.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class WholeRowAttention(TEDotProductAttention, RowAttention):
        def __init__(self, config: Any, *args: Any, pg_collection: Any, **more: Any) -> None:
            ranks = pg_collection.cp.size()
            self.divides = divide(config.num_query_groups, pg_collection.tp.size()) % ranks == 0
            seen = copy(config)  # the heads that this rank attends with, of whole rows
            seen.context_parallel_size = 1
            seen.num_attention_heads = divide(config.num_attention_heads, ranks)
            seen.num_query_groups = seen.num_attention_heads
            if self.divides:
                seen.num_query_groups = config.num_query_groups // ranks
            super().__init__(seen, *args, pg_collection=pg_collection, **more)
            self.context = pg_collection.cp

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any,
            attention_bias: Any = None, packed_seq_params: Any = None, num_splits: Any = None,
        ) -> Tensor:  # fmt: skip
            """Return [T, 1, heads * size] as `PackedAttention` does."""
            assert packed_seq_params is not None, "packed rows are the only input format"
            query, key, value = (heads.flatten(0, -3) for heads in (query, key, value))
            if not self.divides:
                key, value = (repeat_heads(part, query.shape[1] // part.shape[1]) for part in (key, value))
            query, key, value = (exchange_for_rows(self.context, heads) for heads in (query, key, value))
            joined = super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias=attention_bias,
                packed_seq_params=packed_seq_params.whole, num_splits=num_splits,
            )  # fmt: skip
            joined = joined.view(len(query), query.shape[1], -1)
            return exchange_for_heads(self.context, joined).flatten(1).unsqueeze(1)

    return WholeRowAttention
