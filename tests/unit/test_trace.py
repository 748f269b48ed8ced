"""Boxes recorded from a loader's copies reproduce the loader."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.weights.trace import TraceError, make_meta_sources, trace_copies


def replay(boxes, sources, destinations):
    """Write every box of real sources into real destinations."""
    for box in boxes:
        value = sources[box.name][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        target = destinations[box.storage]
        offset = target.storage_offset() + box.offset
        target.as_strided(box.size, box.stride, offset).copy_(value)


def check(load, shapes, destination_shapes):
    """Compare a loader run for real with the replay of its trace; return the boxes."""
    sources = {name: torch.randn(shape) for name, shape in shapes.items()}
    wanted = {name: torch.zeros(shape) for name, shape in destination_shapes.items()}
    load(sources, wanted)
    meta = {name: torch.empty(shape, device="meta") for name, shape in destination_shapes.items()}
    boxes = trace_copies(
        lambda named: load(named, meta),
        make_meta_sources(shapes, torch.float32),
        meta,
        rank=3,
    )
    assert all(box.rank == 3 for box in boxes)
    got = {name: torch.zeros(shape) for name, shape in destination_shapes.items()}
    replay(boxes, sources, got)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=0)
    return boxes


def test_slices_become_one_box():
    def load(sources, targets):
        targets["w"].copy_(sources["a"][4:8])
        targets["v"].copy_(sources["a"][:, 3:6])

    boxes = check(load, {"a": (8, 6)}, {"w": (4, 6), "v": (8, 3)})
    assert [(box.start, box.size) for box in boxes] == [
        ((0, 3), (8, 3)),
        ((4, 0), (4, 6)),
    ]


def test_interleaved_groups_are_peeled():
    groups, heads, dim, hidden = 3, 2, 4, 5

    def load(sources, targets):
        fused = targets["qkv"].view(groups, heads + 2, dim, hidden)
        fused[:, :heads].copy_(sources["q"].view(groups, heads, dim, hidden))
        fused[:, heads].copy_(sources["k"].view(groups, dim, hidden))
        fused[:, heads + 1].copy_(sources["v"].view(groups, dim, hidden))

    shapes = {
        "q": (groups * heads * dim, hidden),
        "k": (groups * dim, hidden),
        "v": (groups * dim, hidden),
    }
    boxes = check(load, shapes, {"qkv": (groups * (heads + 2) * dim, hidden)})
    assert len(boxes) == 3 * groups


def test_neighbours_are_merged():
    def load(sources, targets):
        for row in range(8):
            targets["w"][row].copy_(sources["a"][row])

    assert len(check(load, {"a": (8, 6)}, {"w": (8, 6)})) == 1


def test_transposes_flattening_and_broadcast():
    def load(sources, targets):
        targets["t"].copy_(sources["a"].t())
        targets["flat"].copy_(sources["a"].reshape(-1))
        targets["rows"].copy_(sources["b"])
        targets["steps"].copy_(sources["a"][::2])

    check(
        load,
        {"a": (6, 4), "b": (4,)},
        {"t": (4, 6), "flat": (24,), "rows": (3, 4), "steps": (3, 4)},
    )


def test_conversions_and_contiguous_copies_are_followed():
    def load(sources, targets):
        converted = sources["a"].to(torch.float64)[2:4].t().contiguous()
        targets["w"].copy_(converted[1:3].float())

    check(load, {"a": (6, 4)}, {"w": (2, 2)})


def test_destinations_in_one_storage_are_told_apart():
    buffer = torch.zeros(20)
    targets = {"first": buffer[:8].view(2, 4), "second": buffer[8:].view(3, 4)}

    def load(sources):
        targets["second"].copy_(sources["a"])

    boxes = trace_copies(load, make_meta_sources({"a": (3, 4)}, torch.float32), targets, rank=0)
    assert [(box.storage, box.offset) for box in boxes] == [("second", 0)]
    assert not buffer.any()


def test_unknown_values_are_refused():
    target = {"w": torch.empty(3, device="meta")}
    sources = make_meta_sources({"a": (3,)}, torch.float32)
    with pytest.raises(TraceError, match="'w'"):
        trace_copies(lambda named: target["w"].copy_(named["a"] + 1), sources, target, rank=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_views(data):
    """Random chains of views on both sides trace to boxes that reproduce the copy."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    split = data.draw(st.integers(1, len(sizes) - 1))
    rows, columns = (
        int(torch.tensor(sizes[:split]).prod()),
        int(torch.tensor(sizes[split:]).prod()),
    )
    order = data.draw(st.permutations(range(len(sizes))))
    dim = data.draw(st.integers(0, len(sizes) - 1))
    begin = data.draw(st.integers(0, sizes[dim] - 1))
    length = data.draw(st.integers(1, sizes[dim] - begin))
    taken = [length if index == dim else size for index, size in enumerate(sizes)]

    def load(sources, targets):
        view = sources["a"].view(sizes).narrow(dim, begin, length).permute(order)
        targets["w"].view([taken[index] for index in order]).copy_(view)

    total = int(torch.tensor(taken).prod())
    check(load, {"a": (rows, columns)}, {"w": (total,)})
