"""A low-rank adapter on one of Megatron's linear layers, cut as the layer is."""

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
    """Hold A [kinds x rank, in] and B [out, rank] of one linear layer on this rank.

    The checkpoint's tensors that a layer holds, of which there are ``kinds``, have an A each. ``columns``
    says that the layer's weight is cut by columns over ``group``, ``expert`` that it is a routed expert's.
    ``mask`` [out, kinds] has a 1 where a row of B belongs to a kind.
    """

    mask: Tensor
    initial_A: Tensor | None
    initial_B: Tensor | None

    def __init__(self, weight: Tensor, rank: int, mask: Tensor, scale: float, dropout: float) -> None:
        super().__init__()
        rows, inputs = weight.shape
        like = {"dtype": weight.dtype, "device": weight.device}
        self.A = nn.Parameter(torch.empty(mask.shape[1] * rank, inputs, **like))
        self.B = nn.Parameter(torch.empty(rows, rank, **like))
        self.scale, self.dropout, self.state = scale, dropout, "trained"
        self.register_buffer("mask", mask.to(**like), persistent=False)
        self.register_buffer("initial_A", None, persistent=False)
        self.register_buffer("initial_B", None, persistent=False)
        self.columns = self.sequence_parallel = self.expert = False
        self.group: Any = None

    def cut(self, columns: bool, group: Any, sequence_parallel: bool) -> None:
        """Say how the layer is cut over a tensor-parallel group, and mark whose gradients are partial."""
        self.columns, self.group = columns, group
        self.sequence_parallel = sequence_parallel and group.size() > 1
        shard, whole = self._shard_and_whole()
        set_tensor_model_parallel_attributes(shard, True, int(columns), 1)
        setattr(whole, "sequence_parallel", self.sequence_parallel)

    def cut_expert(self, columns: bool, group: Any) -> None:
        """Say how an expert's layer is cut over its tensor-parallel group, and mark what the norm counts.

        Tensor-parallel ranks have experts or tokens of their own: the gradient's norm counts a parameter on
        every rank unless it is marked as shared.
        """
        self.columns, self.group, self.expert = columns, group, True
        shard, whole = self._shard_and_whole()
        for factor in (shard, whole):
            set_tensor_model_parallel_attributes(factor, True, int(columns), 1)
        setattr(whole, "shared", group.rank() > 0)

    def _shard_and_whole(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return the factor that is cut over the group and the one that each of its ranks has."""
        return (self.A, self.B) if self.columns else (self.B, self.A)

    def partial_gradient(self) -> Tensor | None:
        """Return the gradient that is to be added up over an expert's tensor ranks, None where none is."""
        if not self.expert or self.group.size() == 1:
            return None
        return getattr(self._shard_and_whole()[1], "main_grad", None)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """Return what the adapter adds to the layer's output, None where it adds nothing."""
        down, up = self.A, self.B
        if self.state == "initial":
            if self.initial_A is None or self.initial_B is None:
                return None
            down, up = self.initial_A, self.initial_B
        if self.dropout and self.training:
            hidden = self._dropped(hidden)
        narrow = self._exchanged(functional.linear(hidden, down))
        return functional.linear(narrow, self._wide(up)) * self.scale

    def _dropped(self, hidden: Tensor) -> Tensor:
        # Ranks with parts of the same tokens or features draw numbers of their own, others the same.
        apart = self.expert and self.group.size() == 1
        if self.columns or self.sequence_parallel or apart:
            with device.tensor_parallel_generator():
                return functional.dropout(hidden, self.dropout)
        return functional.dropout(hidden, self.dropout)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        if self.expert:
            # Tokens come whole, and what a rank makes of them is added up where they go back. That holds for
            # B A x as for W x, and leaves each rank a part of the gradient of the factor that all have.
            return narrow
        if self.columns and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        if self.columns:
            return reduce_from_tensor_model_parallel_region(narrow, group=self.group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, group=self.group)
        return copy_to_tensor_model_parallel_region(narrow, group=self.group)

    def _wide(self, up: Tensor) -> Tensor:
        """Return B with a column for every row of A: zero where a row belongs to another kind."""
        if self.mask.shape[1] == 1:
            return up
        return (self.mask[:, :, None] * up[:, None, :]).flatten(1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the weight with the adapter added in, summed in float32."""
        change = self._wide(self.B).float() @ self.A.float()
        return (weight.float() + self.scale * change).to(weight.dtype)


def add_change(linear: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add what a linear layer's adapter makes of its inputs to its output; a hook of its forward pass.

    Layers that hold many experts are given how many tokens each of them has.
    """
    adapter = getattr(linear, ADAPTER, None)
    if adapter is None:
        return output  # it was removed
    hidden = inputs[0]
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is not None:  # Transformer Engine normalises inside the layer
        gain = weight.float() + (1.0 if linear.zero_centered_gamma else 0.0)
        hidden = functional.rms_norm(hidden.float(), gain.shape, gain, linear.eps).to(hidden.dtype)
    if isinstance(adapter, Adapter):
        change = adapter(hidden)
        return output if change is None else (output[0] + change, output[1])
    parts = zip(adapter, hidden.split(list(inputs[1])), strict=True)
    changes = [change for each, part in parts if (change := each(part)) is not None]
    return (output[0] + torch.cat(changes), output[1]) if changes else output
