"""Exchange activations between tensor-parallel ranks, forward and backward, with plain collectives."""

from contextlib import nullcontext

import torch
import torch.distributed as dist


class CudaRNGStatesTracker:
    """Be a base class for Megatron-Core's own, which this package's models do not take."""


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    """Mark a forward pass that is repeated; only 8-bit scaling asks."""
    return nullcontext()


def gathered(tensor, group):
    """Return the group's parts one after another along the first dimension."""
    out = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=group)
    return out


def scattered(tensor, group):
    """Return this rank's part, along the first dimension, of the sum over the group."""
    out = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(out, tensor.contiguous(), group=group)
    return out


def summed(tensor, group):
    """Return the sum over the group."""
    out = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _same(tensor, group):
    return tensor


_BACKWARD = {gathered: scattered, scattered: gathered, summed: _same, _same: summed}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, forward, group):
        ctx.back, ctx.group = _BACKWARD[forward], group
        return forward(tensor, group) if forward is not _same else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.group), None, None


def into_column(tensor, group, sequence_parallel):
    """Give a column-parallel product its input: whole, its gradient summed over the group."""
    return _Exchange.apply(tensor, gathered if sequence_parallel else _same, group)


def out_of_row(tensor, group, sequence_parallel):
    """Sum up what a row-parallel product gives; under sequence parallelism each rank keeps its part."""
    return _Exchange.apply(tensor, scattered if sequence_parallel else summed, group)
