"""Dequantisation of boxes of tensors to float32: numbers of 8 bits with scales, mxfp4, and NVFP4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.shapes.quantized import MXFP4_BLOCK

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of floating-point numbers of 4 bits: one bit of sign, two of exponent, one of mantissa."""
_E8M0_BIAS = 127
"""Stored exponent of the scale 1."""


def dequantize(
    values: Tensor,
    scales: Tensor,
    start: Sequence[int],
    block_shape: Sequence[int],
) -> Tensor:
    """Dequantise a box of a weight to float32: multiply each stored number by the scale of its block.

    ``values`` is the box that begins at ``start`` in the weight, which need not be the start of a block.
    ``scales`` has one entry for each block of shape ``block_shape`` in the complete weight, and may lack the
    last dimensions. Source: DeepSeek-V3, inference/kernel.py, ``weight_dequant_kernel``.
    """
    trailing = (1,) * (values.dim() - scales.dim())
    scales = scales.float().reshape(scales.shape + trailing)

    for dim, (begin, count) in enumerate(zip(start, values.shape, strict=True)):
        # A dimension with one block is broadcast.
        if scales.shape[dim] == 1:
            continue
        block_indices = torch.arange(begin, begin + count) // block_shape[dim]
        scales = scales.index_select(dim, block_indices)
    return values.float().mul_(scales)


def dequantize_blocks(
    blocks: Tensor,
    scales: Tensor,
    first_column: int,
    column_count: int,
) -> Tensor:
    """Dequantise columns of rows in mxfp4 to float32: multiply each number by the power of two of its block.

    ``blocks`` [rows, blocks, 16] and ``scales`` [rows, blocks] are bytes. A byte of ``blocks`` contains two
    neighbouring numbers, the first one in its lower half. The result has ``column_count`` columns, from
    ``first_column`` of the given blocks on. Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and
    5.4.1; the order in a byte is gpt-oss's.
    """
    numbers = unpack_numbers(blocks)

    # The products are exact in float32. The exponent 255 stands for NaN, which `require_finite` refuses.
    exponents = scales.int() - _E8M0_BIAS
    powers = torch.ldexp(torch.ones(scales.shape), exponents)
    powers[scales == 255] = torch.nan
    values = (numbers * powers[..., None]).flatten(1)
    assert values.shape[1] % MXFP4_BLOCK == 0, values.shape
    return values[:, first_column : first_column + column_count]


def unpack_numbers(packed: Tensor) -> Tensor:
    """Return the numbers of 4 bits in bytes as float32, [..., 2 * bytes].

    A byte contains two neighbouring numbers, the first one in its lower half, as in mxfp4 and NVFP4.
    """
    # The sign is the highest of the four bits, so the negative numbers follow the positive ones.
    negative_values = [-value for value in _E2M1]
    values = torch.tensor([*_E2M1, *negative_values])
    low_half = packed & 0xF
    high_half = packed >> 4
    halves = torch.stack((low_half, high_half), dim=-1)
    return values[halves.int()].flatten(-2)
