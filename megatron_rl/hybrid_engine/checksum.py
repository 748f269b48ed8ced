"""Checksums of boxes that both ends of a transfer can compute without seeing each other's data.

The sum runs over the raw bits, each weighted by its position in the whole tensor, so that a changed
bit, a shifted block and swapped rows or columns all change it. Integers wrap: the order of summation
does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK = 2**18
"""Elements handled at once, which bounds temporary memory."""


class BoxSum:
    """Compute the checksum of one box of live storage, as often as asked.

    ``values`` has any strides; the box begins at ``start`` of its tensor. Values are converted to ``dtype``
    first, a part at a time. Any single changed element changes the result; several changes cancel with
    probability 2**-32. The checksums of the parts of a box add up to its own, modulo 2**32.
    """

    def __init__(self, values: Tensor, start: Sequence[int], dtype: torch.dtype) -> None:
        if values.dim() < 2:
            values, start = values.reshape(1, -1), (0, *(start or (0,)))
        self._columns = _column_weights(start[-1], values.shape[-1], dtype.itemsize, values.device)
        self._dtype = dtype
        # Bits of 4-byte elements are seen through a view; others are copied, a part at a time.
        in_place = values.dtype == dtype and dtype.itemsize == 4
        step = values.shape[-2] if in_place else max(1, _CHUNK // values.shape[-1])
        self._parts = [
            (part.view(torch.int32) if in_place else part, weights)
            for matrix, rows in _matrices(values, start)
            for part, weights in zip(matrix.split(step), rows.split(step), strict=True)
        ]

    def compute(self) -> Tensor:
        """Return the checksum of what the storage holds now, a 0-dim int32."""
        sums = [self._part(values, rows) for values, rows in self._parts]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dtype=torch.int32)

    def _part(self, values: Tensor, rows: Tensor) -> Tensor:
        bits = values if values.dtype == torch.int32 else _bits(values.to(self._dtype))
        if _has_integer_product(bits.device.type):
            return torch.dot(rows, torch.mv(bits, self._columns))
        return ((bits * self._columns).sum(-1, dtype=torch.int32) * rows).sum(dtype=torch.int32)


def checksum(values: Tensor, start: Sequence[int], dtype: torch.dtype) -> int:
    """Return the checksum of a box as a number below 2**32; see `BoxSum`."""
    return int(BoxSum(values, start, dtype).compute()) % 2**32


def _bits(values: Tensor) -> Tensor:
    """Return the raw bits of values as int32, two numbers for an 8-byte element."""
    if values.element_size() == 8:
        return values.contiguous().view(torch.int32)
    if values.element_size() == 4:
        return values.view(torch.int32)
    narrow = torch.int16 if values.element_size() == 2 else torch.int8
    return values.view(narrow).to(torch.int32)


@lru_cache(maxsize=4)
def _has_integer_product(kind: str) -> bool:
    """Say whether the device multiplies integer matrices, which is several times faster there."""
    ones = torch.ones(1, 1, dtype=torch.int32, device=kind)
    try:
        return bool(torch.dot(ones[0], torch.mv(ones, ones[0])).item())
    except RuntimeError:
        return False


@lru_cache(maxsize=1024)
def _column_weights(start: int, count: int, itemsize: int, device: torch.device) -> Tensor:
    words = 2 if itemsize == 8 else 1
    return _mix(start * words, count * words, device)


def _matrices(values: Tensor, start: Sequence[int], weight: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the [rows, columns] matrices of a box, with an odd weight per row from all its coordinates."""
    dim = len(start) - values.dim()
    axis = _mix(start[dim] + values.dim() * 2**40, values.shape[0], values.device) * weight
    if values.dim() == 2:
        yield values, axis
        return
    for inner, factor in zip(values, axis.tolist(), strict=True):
        yield from _matrices(inner, start, factor)


def _mix(start: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random int32 numbers for the positions from ``start`` on (splitmix64's steps)."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x | 1).to(torch.int32)
