"""Exchange of activations between tensor-parallel ranks, forward and backward, with plain collectives."""

from contextlib import nullcontext

import torch
import torch.distributed as dist


class CudaRNGStatesTracker:
    """Base class of a Megatron-Core tracker that the models of this package do not use."""


def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    """Return an empty context for a recomputed forward pass; only 8-bit scaling would need one."""
    return nullcontext()


def all_gather(tensor, group):
    """Return the shards of all ranks concatenated along the first dimension. Collective over the group."""
    output = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(output, tensor.contiguous(), group=group)
    return output


def reduce_scatter(tensor, group):
    """Return this rank's shard, along the first dimension, of the sum. Collective over the group."""
    output = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    dist.reduce_scatter_tensor(output, tensor.contiguous(), group=group)
    return output


def all_reduce(tensor, group):
    """Return the sum over ranks. Collective over the group."""
    # A copy, since autograd forbids an in-place change of the input.
    output = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(output, group=group)
    return output


def identity(tensor, group):
    """Return the tensor itself."""
    return tensor


# The gradient of each exchange is another exchange.
_BACKWARD = {
    all_gather: reduce_scatter,
    reduce_scatter: all_gather,
    all_reduce: identity,
    identity: all_reduce,
}


class _Exchange(torch.autograd.Function):
    """Exchange of activations whose backward pass exchanges the gradients."""

    @staticmethod
    def forward(ctx, tensor, exchange, group):
        ctx.backward_exchange = _BACKWARD[exchange]
        ctx.group = group
        # An autograd function must not return its input, but may return a view of it.
        if exchange is identity:
            return tensor.view_as(tensor)
        return exchange(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.backward_exchange(gradient, ctx.group), None, None


def gather_column_input(tensor, group, sequence_parallel):
    """Return the complete input of a column-parallel product; its gradient is summed over the group."""
    # Without sequence parallelism the input is complete on every rank.
    if sequence_parallel:
        return _Exchange.apply(tensor, all_gather, group)
    return _Exchange.apply(tensor, identity, group)


def reduce_row_output(tensor, group, sequence_parallel):
    """Return the sum of row-parallel products, or with sequence parallelism this rank's shard of it."""
    if sequence_parallel:
        return _Exchange.apply(tensor, reduce_scatter, group)
    return _Exchange.apply(tensor, all_reduce, group)
