"""One low-rank adapter on one of Megatron's linear layers, sharded over tensor-parallel ranks like the layer.

The layer computes W x, the adapter adds scale * B (A x). Where the rows of W are cut (Megatron's
ColumnParallelLinear: linear_qkv, linear_fc1), B is cut by rows and every rank has all of A. Where the columns
of W are cut (RowParallelLinear: linear_proj, linear_fc2), A is cut by columns and every rank has all of B.
Ranks exchange only A x, which has ``rank`` features per token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.nn import functional

from megatron_rl.distributed import device
from megatron_rl.shapes.lora import ADAPTER


class Adapter(nn.Module):
    """This rank's share of A [kinds x rank, in] and B [out, rank] of one linear layer.

    A layer of Megatron's may contain several tensors of the checkpoint ("kinds": query, key and value in
    linear_qkv), each with its own A. ``mask`` [out, kinds] is 1 where a row of B belongs to a kind.
    ``columns``: the layer's weight is cut by columns over ``group``. ``expert``: it is a routed expert's.
    ``state`` selects the trained or the initial values.
    """

    mask: Tensor
    initial_A: Tensor | None
    initial_B: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        rank: int,
        mask: Tensor,
        scale: float,
        dropout: float,
    ) -> None:
        super().__init__()
        rows, inputs = weight.shape
        kind_count = mask.shape[1]
        like = {"dtype": weight.dtype, "device": weight.device}
        self.A = nn.Parameter(torch.empty(kind_count * rank, inputs, **like))
        self.B = nn.Parameter(torch.empty(rows, rank, **like))
        self.scale = scale
        self.dropout = dropout
        self.state = "trained"

        # Not persistent: checkpoints and PEFT files have A and B alone.
        self.register_buffer("mask", mask.to(**like), persistent=False)
        self.register_buffer("initial_A", None, persistent=False)
        self.register_buffer("initial_B", None, persistent=False)

        self.columns = False
        self.sequence_parallel = False
        self.expert = False
        self.group: Any = None

    def cut(
        self,
        columns: bool,
        group: Any,
        sequence_parallel: bool,
    ) -> None:
        """Set how the layer is sharded over a tensor-parallel group, and mark the factors for Megatron.

        ``tensor_model_parallel`` makes the gradient norm count a shard on every rank; ``sequence_parallel``
        makes finalize_model_grads sum the partial gradients of the factor that every rank has.
        """
        self.columns = columns
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size() > 1
        shard, replicated = self._shard_and_replicated()
        set_tensor_model_parallel_attributes(shard, True, int(columns), 1)
        setattr(replicated, "sequence_parallel", self.sequence_parallel)

    def cut_expert(self, columns: bool, group: Any) -> None:
        """Set how an expert's layer is sharded over its tensor-parallel group; mark the factors for Megatron.

        Tensor-parallel ranks may hold different experts: the gradient norm must count a parameter on every
        rank (``tensor_model_parallel``), unless the rank is not the first of its expert's group (``shared``).
        """
        self.columns = columns
        self.group = group
        self.expert = True
        shard, replicated = self._shard_and_replicated()
        for factor in (shard, replicated):
            set_tensor_model_parallel_attributes(factor, True, int(columns), 1)
        setattr(replicated, "shared", group.rank() > 0)

    def _shard_and_replicated(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the factor that is sharded over the group and the one that every rank has."""
        return (self.A, self.B) if self.columns else (self.B, self.A)

    def partial_gradient(self) -> Tensor | None:
        """Return the gradient to sum over an expert's tensor ranks, None if it is complete."""
        if not self.expert or self.group.size() == 1:
            return None
        _, replicated = self._shard_and_replicated()
        return getattr(replicated, "main_grad", None)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """Return the adapter's addition to the layer's output, None for an initial adapter that adds zero."""
        factor_a, factor_b = self.A, self.B
        if self.state == "initial":
            if self.initial_A is None or self.initial_B is None:
                return None
            factor_a, factor_b = self.initial_A, self.initial_B

        if self.dropout and self.training:
            hidden = self._drop(hidden)
        low_rank = self._exchange(functional.linear(hidden, factor_a))
        return functional.linear(low_rank, self._expand(factor_b)) * self.scale

    def _drop(self, hidden: Tensor) -> Tensor:
        # Ranks with shards of the tokens or the features need different random numbers, ranks with the same
        # inputs need the same ones.
        separate_experts = self.expert and self.group.size() == 1
        if self.columns or self.sequence_parallel or separate_experts:
            with device.tensor_parallel_generator():
                return functional.dropout(hidden, self.dropout)
        return functional.dropout(hidden, self.dropout)

    def _exchange(self, low_rank: Tensor) -> Tensor:
        """Exchange A x as the layer exchanges its inputs or outputs. Collective over the layer's group."""
        if self.expert:
            # The dispatcher sends all tokens of an expert to each of its ranks, and sums their outputs, W x
            # and B (A x) alike. Each rank thus has a part of the gradient of the factor that is replicated
            # over them: see `partial_gradient`.
            return low_rank
        if self.columns and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low_rank, group=self.group)
        if self.columns:
            return reduce_from_tensor_model_parallel_region(low_rank, group=self.group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(low_rank, group=self.group)
        # The forward pass copies; the backward pass sums the gradients of the ranks' rows of B.
        return copy_to_tensor_model_parallel_region(low_rank, group=self.group)

    def _expand(self, factor_b: Tensor) -> Tensor:
        """Return B as [out, kinds x rank], block-sparse: a row is zero in the columns of other kinds."""
        if self.mask.shape[1] == 1:
            return factor_b
        return (self.mask[:, :, None] * factor_b[:, None, :]).flatten(1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's share of W + scale * B A in W's dtype, summed in float32."""
        change = self._expand(self.B).float() @ self.A.float()
        return (weight.float() + self.scale * change).to(weight.dtype)


def add_adapter_output(
    linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Add the adapter's output to its linear layer's; a forward hook of the layer.

    A grouped layer of many experts has one adapter per expert, and its second input is the number of tokens
    of each.
    """
    adapter = getattr(linear, ADAPTER, None)
    if adapter is None:
        return output  # `remove_adapters` leaves the hook

    hidden = inputs[0]
    norm_weight = getattr(linear, "layer_norm_weight", None)
    if norm_weight is not None:
        # Transformer Engine normalises inside the layer: A must see the normalised inputs, too.
        gain = norm_weight.float() + (1.0 if linear.zero_centered_gamma else 0.0)
        hidden = functional.rms_norm(hidden.float(), gain.shape, gain, linear.eps).to(hidden.dtype)

    result, bias = output
    if isinstance(adapter, Adapter):
        change = adapter(hidden)
        return output if change is None else (result + change, bias)

    tokens_of_experts = hidden.split(list(inputs[1]))
    changes = []
    for expert_adapter, tokens in zip(adapter, tokens_of_experts, strict=True):
        change = expert_adapter(tokens)
        if change is not None:
            changes.append(change)
    if not changes:
        return output
    return result + torch.cat(changes), bias
