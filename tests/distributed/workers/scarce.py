"""A host that runs out of memory: layers refuse the bytes of micro-batches beyond a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.megatron.model import ParallelModel

FORWARD = "forward"
BACKWARD = "backward"


@contextmanager
def scarce(model: ParallelModel, most_bytes: float, where: str = FORWARD) -> Iterator[None]:
    """Raise torch's error in a layer whose activations, forward or backward, have more than ``most_bytes``.

    The last layer of the model refuses, so that the layers before it have saved their activations.
    """

    def allocate(tensor: torch.Tensor) -> None:
        if tensor.nbytes > most_bytes:
            raise torch.OutOfMemoryError(f"host out of memory. Tried to allocate {tensor.nbytes} bytes")

    def before(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        allocate([*arguments, *keywords.values()][0])

    def after(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, tuple):
            output = output[0]
        if output.requires_grad:
            output.register_hook(allocate)

    handles = []
    for chunk in model.chunks:
        layers: Any = chunk.decoder.layers  # pyright: ignore[reportAttributeAccessIssue]
        if where == FORWARD:
            handles.append(layers[-1].register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(layers[0].register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
