"""Dequantisation of boxes of tensors to float32, from 8-bit numbers with scales, MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.shapes.quantized import MXFP4_BLOCK

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floating-point numbers, which have a sign bit, two exponent bits and a mantissa bit."""
_E8M0_BIAS = 127
"""Stored exponent of the scale 1."""


def dequantize(
    values: Tensor,
    scales: Tensor,
    start: Sequence[int],
    block_shape: Sequence[int],
) -> Tensor:
    """Dequantise a box of a weight to float32: multiply each stored number by the scale of its block.

    ``values`` is the box that begins at ``start`` in the weight; the start need not be the start of a block.
    ``scales`` has one scale for each block of shape ``block_shape`` in the complete weight. If ``scales`` has
    fewer dimensions than the weight, a scale applies to all elements along the missing last dimensions.
    Source: DeepSeek-V3, inference/kernel.py, ``weight_dequant_kernel``.
    """
    trailing_dims = (1,) * (values.dim() - scales.dim())
    scales = scales.float().reshape(scales.shape + trailing_dims)

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
    num_columns: int,
) -> Tensor:
    """Dequantise columns of a matrix in MXFP4 to float32: multiply each number by its block's power of two.

    ``blocks`` [rows, blocks, 16] and ``scales`` [rows, blocks] are bytes. A byte of ``blocks`` contains two
    adjacent numbers, the first in its lower half. The result has ``num_columns`` columns, from column
    ``first_column`` of ``blocks`` on. Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and 5.4.1;
    the order of the two numbers in a byte is taken from gpt-oss.
    """
    numbers = unpack_numbers(blocks)

    # The products are exact in float32. The exponent 255 means NaN, which `require_finite` refuses.
    exponents = scales.int() - _E8M0_BIAS
    powers = torch.ldexp(torch.ones(scales.shape), exponents)
    powers[scales == 255] = torch.nan
    values = (numbers * powers[..., None]).flatten(1)
    assert values.shape[1] % MXFP4_BLOCK == 0, values.shape
    return values[:, first_column : first_column + num_columns]


def unpack_numbers(packed: Tensor) -> Tensor:
    """Convert bytes with two 4-bit numbers each to float32, [..., bytes] to [..., 2 * bytes].

    The first of two adjacent numbers is in the lower half of the byte, as in MXFP4 and NVFP4.
    """
    # The sign is the highest of the four bits, so negative numbers follow positive numbers.
    negative_values = [-value for value in _E2M1]
    values = torch.tensor([*_E2M1, *negative_values])
    low_half = packed & 0xF
    high_half = packed >> 4
    halves = torch.stack((low_half, high_half), dim=-1)
    return values[halves.int()].flatten(-2)
