"""Replace the process-global tensor-parallel group inside Megatron's attention by the module's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import attention as megatron_attention

_group: Any = None


def group() -> Any:
    """Return the tensor-parallel group of the running attention module, None outside of one."""
    return _group


def bind(attention: Any) -> None:
    """Make an attention module project queries, keys and values in its own group."""
    original = attention.get_query_key_value_tensors
    attention.get_query_key_value_tensors = partial(_in_group, original, attention.pg_collection.tp)


def _in_group(function: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    global _group
    before, _group = _group, group
    try:
        return function(*args, **kwargs)
    finally:
        _group = before


def allow_shared_heads() -> None:
    """Support fewer key-value heads than tensor-parallel ranks, by sharing heads. May be repeated.

    Megatron then gathers the ranks' projections and finds its place by the process-global group, where its
    version does not name the attention's own.
    """
    module: Any = megatron_attention
    module.all_gather_last_dim_from_tensor_parallel_region = lambda value, group=None: (
        mappings.all_gather_last_dim_from_tensor_parallel_region(
            value, group=_group if group is None else group
        )
    )
    module.get_tensor_model_parallel_rank = lambda: (
        parallel_state.get_tensor_model_parallel_rank() if _group is None else _group.rank()
    )
