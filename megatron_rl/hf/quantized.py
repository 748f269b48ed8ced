"""Boxes of quantised tensors as float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dequantize(
    values: Tensor,
    scales: Tensor,
    start: Sequence[int],
    block: Sequence[int],
) -> Tensor:
    """Return a box of a quantised weight as float32: each stored number times the scale of its block.

    ``values`` is the box that begins at ``start`` in the weight, at any place in a block. ``scales`` are
    those of the complete weight, with one entry for each block of size ``block``; they may lack the last
    dimensions. Source: DeepSeek-V3, inference/kernel.py, ``weight_dequant_kernel``.
    """
    scales = scales.float().reshape(scales.shape + (1,) * (values.dim() - scales.dim()))

    for dim, (begin, count) in enumerate(zip(start, values.shape, strict=True)):
        # A dimension with one block is broadcast.
        if scales.shape[dim] == 1:
            continue
        blocks = torch.arange(begin, begin + count) // block[dim]
        scales = scales.index_select(dim, blocks)
    return values.float().mul_(scales)
