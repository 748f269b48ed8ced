"""Checksums agree between layouts and notice every kind of damage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.distributed import device
from megatron_rl.types import TensorBox
from megatron_rl.weights import execute
from megatron_rl.weights.boxes import BoxGroup
from megatron_rl.weights.execute import BoxChecksum, Execution, WeightMismatchError
from megatron_rl.weights.plan import build_plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def checksum(values: torch.Tensor, start: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the checksum of a box as a number below 2**32."""
    return int(BoxChecksum(values, start, dtype).compute()) % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_division_do_not_matter(dtype):
    values = torch.randn(60, 70).to(dtype)
    whole = checksum(values, (0, 0), dtype)
    assert checksum(values.t().contiguous().t(), (0, 0), dtype) == whole
    boxes = [(slice(a, a + 20), slice(*b)) for a in (0, 20, 40) for b in ((0, 36), (36, 70))]
    parts = sum(checksum(values[box], (box[0].start, box[1].start), dtype) for box in boxes)
    assert parts % 2**32 == whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "columns"), [(0, 70), (1, 70), (2, 69)])
def test_devices_without_integer_products_agree(monkeypatch, dtype, start, columns):
    padded = torch.randn(60, 73).to(dtype)
    beside = padded[:, 1 : 1 + columns]  # words do not begin where its memory does
    whole = checksum(beside.clone(), (0, start), dtype)
    assert checksum(beside, (0, start), dtype) == whole
    monkeypatch.setattr(execute, "_supports_int32_matmul", lambda kind: False)
    monkeypatch.setattr(execute, "_ACCELERATOR_CHUNK_WORDS", 512)
    assert checksum(beside, (0, start), dtype) == checksum(beside.clone(), (0, start), dtype) == whole


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_single_flipped_bit_is_noticed(data):
    values = torch.randn(7, 9)
    row, column = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 8))
    bit = data.draw(st.integers(0, 31))
    damaged = values.clone()
    damaged.view(torch.int32)[row, column] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    assert checksum(damaged, (0, 0), torch.float32) != checksum(values, (0, 0), torch.float32)


def test_swaps_and_shifts_are_noticed():
    values = torch.randn(16, 16)
    whole = checksum(values, (0, 0), torch.float32)
    rows, columns = values.clone(), values.clone()
    rows[[3, 5]] = rows[[5, 3]]
    columns[:, [3, 5]] = columns[:, [5, 3]]
    for damaged in (rows, columns, values.t(), values.roll(1, 0), values.roll(1, 1)):
        assert checksum(damaged, (0, 0), torch.float32) != whole
    assert checksum(values, (1, 0), torch.float32) != whole


def test_conversion_comes_first():
    values = torch.randn(5, 6)
    half = values.bfloat16()
    assert checksum(values, (0, 0), torch.bfloat16) == checksum(half, (0, 0), torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5)])
def test_any_number_of_dimensions(shape):
    values = torch.randn(shape)
    start = (2,) * len(shape)
    before = checksum(values, start, torch.float32)
    assert 0 <= before < 2**32
    assert checksum(values + 1, start, torch.float32) != before


@pytest.fixture
def alone() -> None:
    """Run as the only rank of a job."""
    device.initialize()


def execution(offsets: tuple[int, int]) -> Execution:
    """Copy two tensors [4, 4] into one storage, which the second overlaps where its offset is below 16."""
    boxes = [(name, (0, 0), (4, 4), 0) for name in ("t0", "t1")]
    sources = [TensorBox(*box, box[0], 0, (4, 1)) for box in boxes]
    targets = [TensorBox(*box, "all", offset, (4, 1)) for box, offset in zip(boxes, offsets, strict=True)]
    held = {name: torch.randn(16) for name in ("t0", "t1")}
    written = {"all": torch.zeros(32)}
    groups = [
        BoxGroup((0,), tuple(group), {name: torch.float32 for name in storages})
        for group, storages in ((sources, held), (targets, written))
    ]
    return Execution(build_plan(groups[:1], groups[1:]), 0, held, written, 2**20)


@pytest.mark.usefixtures("alone")
def test_a_box_that_another_overwrites_differs():
    apart, overlapping = execution((0, 16)), execution((0, 8))
    for each in (apart, overlapping):
        each.run("full")
    assert apart.verify("full", 0) == 2
    with pytest.raises(WeightMismatchError, match=r"1 regions of .*\n  t0, box at \[0, 0\].*: rank 0 has"):
        overlapping.verify("full", 0)


@pytest.mark.usefixtures("alone")
def test_a_write_that_goes_astray_differs():
    each = execution((0, 16))
    each.run("full")
    assert each.verify("full", 0) == 2
    (targets, value), (_, other) = each._local_copies
    each._local_copies = [(targets, value + 1), ((torch.empty(4, 4),), other)]
    each._destinations["all"][16:] = 3.0
    each.run("full")
    with pytest.raises(WeightMismatchError, match="2 regions of"):
        each.verify("full", 0)
