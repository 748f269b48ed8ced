"""Let Megatron's expert layers run where Transformer Engine, or an accelerator, is absent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from megatron_rl.parallel import device


def prepare_experts() -> None:
    """Define what Megatron-Core's router and dispatcher leave undefined on this machine. May be repeated."""
    utilities: Any = moe_utils
    if not hasattr(utilities, "te_general_gemm"):
        utilities.te_general_gemm = None  # the router asks whether it is None
    if device.on_host():
        dispatcher: Any = token_dispatcher
        dispatcher.maybe_move_tensor_to_cpu = _on_host
        regions: Any = mappings
        if regions._gather_along_first_dim is not _gather_uneven:
            _even["gather"] = regions._gather_along_first_dim
            _even["scatter"] = regions._reduce_scatter_along_first_dim
            regions._gather_along_first_dim = _gather_uneven
            regions._reduce_scatter_along_first_dim = _scatter_uneven


_even: dict[str, Any] = {}
"""Megatron's exchanges along the first dimension, which the host's communication has for equal parts."""


def _gather_uneven(
    value: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Gather parts of these sizes from the group's ranks, as Megatron's function does on an accelerator."""
    if output_split_sizes is None or group.size() == 1:
        return _even["gather"](value, group, output_split_sizes, use_global_buffer)
    longest = max(output_split_sizes)
    padded = value.new_zeros((longest, *value.shape[1:]))
    padded[: len(value)] = value
    parts = padded.new_empty((group.size(), *padded.shape))
    dist.all_gather_into_tensor(parts.view(-1), padded.view(-1), group=group)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _scatter_uneven(
    value: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Add up the group's tensors and keep this rank's part of these sizes."""
    if input_split_sizes is None or group.size() == 1:
        return _even["scatter"](value, group, input_split_sizes, use_global_buffer)
    total = value.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(list(input_split_sizes))[group.rank()].contiguous()


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a host tensor as the dispatcher wants it: Megatron converts only what comes from a device."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
