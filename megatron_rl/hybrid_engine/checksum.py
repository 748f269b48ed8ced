"""Checksums of boxes that both ends of a transfer can compute without seeing each other's data.

The sum runs over the raw bits, each weighted by its position in the whole tensor, so that a changed
bit, a shifted block and swapped rows or columns all change it. Integers wrap: the order of summation
does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK = 2**18
"""Elements handled at once, which bounds temporary memory and keeps it in the processor's cache."""


def checksum(values: Tensor, start: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the checksum, a 0-dim int64 below 2**32, of a box that begins at ``start`` of its tensor.

    ``values`` has any strides and is converted to ``dtype`` first, a part at a time. Any single changed
    element changes the result; several changes cancel with probability 2**-32. The checksums of the
    parts of a box add up to its own, modulo 2**32.
    """
    if values.dim() == 0:
        values, start = values.reshape(1), (0,)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    columns = values.shape[-1]
    weights = _column_weights(start[-1], columns, dtype.itemsize, values.device)
    flat = values.reshape(-1, columns) if values.dim() <= 2 else values.flatten(0, -2)
    rows = _row_weights(values, start)
    step = max(1, _CHUNK // columns)
    for begin in range(0, len(flat), step):
        bits = _bits(flat[begin : begin + step].to(dtype))
        total += (_weighted(bits, weights) * rows[begin : begin + step]).sum(dtype=torch.int64)
    return total & 0xFFFFFFFF


def _bits(values: Tensor) -> Tensor:
    """Return the raw bits of [rows, columns] values as int32, two numbers for an 8-byte element."""
    if values.element_size() == 8:
        return values.contiguous().view(torch.int32)
    if values.element_size() == 4:
        return values.view(torch.int32)
    narrow = torch.int16 if values.element_size() == 2 else torch.int8
    return values.view(narrow).to(torch.int32)


def _weighted(bits: Tensor, weights: Tensor) -> Tensor:
    """Return each row's weighted sum modulo 2**32."""
    if not _has_integer_product(bits.device.type):
        return (bits * weights).sum(1, dtype=torch.int32)
    return (bits @ weights[:, None]).squeeze(1)


@lru_cache(maxsize=4)
def _has_integer_product(kind: str) -> bool:
    """Say whether the device multiplies integer matrices, which is several times faster there."""
    ones = torch.ones(1, 1, dtype=torch.int32, device=kind)
    try:
        return bool((ones @ ones).item())
    except RuntimeError:
        return False


@lru_cache(maxsize=64)
def _column_weights(start: int, count: int, itemsize: int, device: torch.device) -> Tensor:
    words = 2 if itemsize == 8 else 1
    return _mix(start * words, count * words, device).to(torch.int32)


def _row_weights(values: Tensor, start: Sequence[int]) -> Tensor:
    """Return one odd weight per row; with several leading dimensions the product of theirs."""
    weights = torch.ones(1, dtype=torch.int32, device=values.device)
    for dim in range(values.dim() - 1):
        axis = _axis_weights(start[dim], values.shape[dim], dim, values.device)
        weights = (weights[:, None] * axis[None, :]).flatten()
    return weights


@lru_cache(maxsize=64)
def _axis_weights(start: int, count: int, dim: int, device: torch.device) -> Tensor:
    return _mix(start + (dim + 1) * 2**40, count, device).to(torch.int32)


def _mix(start: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random int64 numbers for the positions from ``start`` on (splitmix64's steps)."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1
