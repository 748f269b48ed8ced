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
    """Dequantise a box of a weight to float32: multiply each stored number by the scale of its block.

    ``values`` is the box that begins at ``start`` in the weight; it need not begin where a block does.
    ``scales`` belong to the complete weight, with one entry for each block of size ``block``; they may lack
    the last dimensions. Source: DeepSeek-V3, inference/kernel.py, ``weight_dequant_kernel``.
    """
    trailing = (1,) * (values.dim() - scales.dim())
    scales = scales.float().reshape(scales.shape + trailing)

    for dim, (begin, count) in enumerate(zip(start, values.shape, strict=True)):
        # A dimension with one block is broadcast.
        if scales.shape[dim] == 1:
            continue
        blocks = torch.arange(begin, begin + count) // block[dim]
        scales = scales.index_select(dim, blocks)
    return values.float().mul_(scales)
