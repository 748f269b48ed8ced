"""Simulated shortage of memory: a layer raises torch's error for activations beyond a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.megatron.model import ParallelModel

FORWARD = "forward"
BACKWARD = "backward"


@contextmanager
def scarce(model: ParallelModel, max_bytes: float, direction: str = FORWARD) -> Iterator[None]:
    """Raise torch's out-of-memory error for activations, or gradients of them, of more than ``max_bytes``.

    The layer that a pass reaches last raises it, when the other layers have saved their activations.
    """

    def check_size(tensor: torch.Tensor) -> None:
        if tensor.nbytes > max_bytes:
            raise torch.OutOfMemoryError(f"host out of memory. Tried to allocate {tensor.nbytes} bytes")

    def check_input(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # Megatron passes the hidden states first, or by keyword.
        inputs = [*arguments, *keywords.values()]
        check_size(inputs[0])

    def check_gradient(_: Any, __: Any, output: Any) -> None:
        # Layers return the hidden states, some with a context.
        if isinstance(output, tuple):
            output = output[0]
        if output.requires_grad:
            output.register_hook(check_size)

    handles = []
    for chunk in model.chunks:
        layers: Any = chunk.decoder.layers  # pyright: ignore[reportAttributeAccessIssue]
        if direction == FORWARD:
            handle = layers[-1].register_forward_pre_hook(check_input, with_kwargs=True)
        else:
            handle = layers[0].register_forward_hook(check_gradient)
        handles.append(handle)

    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
