"""Exchange of activations between tensor-parallel ranks, forward and backward, with plain collectives."""

from contextlib import nullcontext

import torch
import torch.distributed as dist


class CudaRNGStatesTracker:
    """Base class of a class of Megatron-Core's that this package's models do not use."""


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    """Return a context for a recomputed forward pass; it would matter to 8-bit scaling alone."""
    return nullcontext()


def gathered(tensor, group):
    """Return the shards of all ranks concatenated along the first dimension. Collective over the group."""
    out = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=group)
    return out


def scattered(tensor, group):
    """Return this rank's shard, along the first dimension, of the sum. Collective over the group."""
    out = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(out, tensor.contiguous(), group=group)
    return out


def summed(tensor, group):
    """Return the sum over ranks. Collective over the group."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _same(tensor, group):
    return tensor


_BACKWARD = {
    gathered: scattered,
    scattered: gathered,
    summed: _same,
    _same: summed,
}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, forward, group):
        ctx.back, ctx.group = _BACKWARD[forward], group
        return forward(tensor, group) if forward is not _same else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.group), None, None


def into_column(tensor, group, sequence_parallel):
    """Return the complete input of a column-parallel product; its gradient is summed over the group."""
    return _Exchange.apply(tensor, gathered if sequence_parallel else _same, group)


def out_of_row(tensor, group, sequence_parallel):
    """Return the sum of row-parallel products, or with sequence parallelism this rank's shard of it."""
    return _Exchange.apply(tensor, scattered if sequence_parallel else summed, group)
