"""Plans for random layouts: everything arrives once, from a holder, with the least traffic."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import BoxGroup, UncoveredError, cut_overlaps, intersect
from megatron_rl.weights.plan import PlanError, build_plan, check_plan, schedule_phases
from megatron_rl.weights.transfer import _Stream, largest_message_bytes

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4)


def cut(size, parts):
    """Cut a length into that many parts at even places; some may be empty."""
    edges = [size * index // parts for index in range(parts + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]


@st.composite
def layouts(draw, shapes, ranks, complete):
    """Assign each rank one cell of each tensor's grid, replicas included, with one storage per cell."""
    by_rank = {rank: [] for rank in ranks}
    for index, shape in enumerate(shapes):
        dim = draw(st.integers(0, len(shape) - 1))
        parts = draw(st.integers(1, len(ranks)))
        cells = cut(shape[dim], parts)
        order = draw(st.permutations(range(len(ranks))))
        for position, place in enumerate(order):
            if not complete and position >= parts and draw(st.booleans()):
                continue
            low, length = cells[position % parts]
            if length == 0:
                continue
            start, size = [0] * len(shape), list(shape)
            start[dim], size[dim] = low, length
            by_rank[ranks[place]].append(
                box(f"t{index}", start, size, draw(st.permutations(range(len(shape)))))
            )
    return by_rank


def box(name, start, size, order):
    """Lay a box out densely in a storage of its own, its dimensions in any order."""
    stride, step = [0] * len(size), 1
    for dim in order:
        stride[dim], step = step, step * size[dim]
    return TensorBox(name, tuple(start), tuple(size), -1, f"{name}/{start}", 0, tuple(stride))


def grouped(by_rank):
    """Describe ranks with equal boxes once."""
    groups = {}
    for rank in sorted(by_rank):
        groups.setdefault(tuple(by_rank[rank]), []).append(rank)
    return [
        BoxGroup(tuple(ranks), boxes, {item.storage: torch.float32 for item in boxes})
        for boxes, ranks in groups.items()
    ]


def storages(by_rank, rank, fill=None):
    """Make a rank's storages; ``fill`` gives each element the value of its place in the whole tensor."""
    result = {}
    for item in by_rank[rank]:
        storage = torch.full((math.prod(item.size),), -1.0)
        if fill is not None:
            part = tuple(slice(a, a + n) for a, n in zip(item.start, item.size, strict=True))
            storage.as_strided(item.size, item.stride).copy_(fill[item.name][part])
        result[item.storage] = storage
    return result


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_element_arrives_once_from_a_holder_with_the_least_traffic(data):
    shapes = data.draw(SHAPES)
    ranks = list(range(data.draw(st.integers(1, 6))))
    first = data.draw(st.integers(0, len(ranks) - 1))
    sources = data.draw(layouts(shapes, ranks, complete=True))
    destinations = data.draw(layouts(shapes, ranks[first:], complete=False))
    plan = build_plan(grouped(sources), grouped(destinations), {rank: rank // 2 for rank in ranks})

    whole = {f"t{i}": torch.arange(math.prod(s), dtype=torch.float32).view(s) for i, s in enumerate(shapes)}
    held = {rank: storages(sources, rank, whole) for rank in ranks}
    received = Counter()
    for rank in ranks[first:]:
        written = storages(destinations, rank)
        writes = {name: torch.zeros_like(value) for name, value in written.items()}
        targets = plan.index_boxes(rank, is_destination=True)
        for sender, coming in plan.regions_to_receive(rank).items():
            index = plan.index_boxes(sender, is_destination=False)
            for region in coming:
                there = index.boxes_containing(region)[0]
                value = held[sender][there.storage].as_strided(there.size, there.stride, there.offset)
                received[rank] += region.bytes if sender != rank else 0
                for here in targets.boxes_containing(region):
                    written[here.storage].as_strided(here.size, here.stride, here.offset).copy_(value)
                    writes[here.storage].as_strided(here.size, here.stride, here.offset).add_(1)
        expected = storages(destinations, rank, whole)
        for name in written:
            assert torch.equal(written[name], expected[name])
            assert bool((writes[name] == 1).all())
        mine = sum(math.prod(item.size) for item in destinations[rank]) * 4
        overlap = sum(
            math.prod(both[1]) * 4
            for a in destinations[rank]
            for b in sources[rank]
            if a.name == b.name and (both := intersect((a.start, a.size), (b.start, b.size)))
        )
        assert received[rank] == mine - overlap == plan.received.get(rank, 0)
    for rank in ranks:
        for peer, going in plan.regions_to_send(rank).items():
            assert going == plan.regions_to_receive(peer)[rank]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_phases_bound_the_streams_of_every_rank(data):
    count = data.draw(st.integers(2, 12))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    chosen = data.draw(st.sets(pairs, min_size=1))
    boxes = {pair: [box(f"t{pair}", [0], [4], (0,))] for pair in chosen}
    sources = {
        rank: [b for pair, own in boxes.items() if pair[0] == rank for b in own] for rank in range(count)
    }
    needs = {
        rank: [b for pair, own in boxes.items() if pair[1] == rank for b in own] for rank in range(count)
    }
    plan = build_plan(grouped(sources), grouped(needs))
    staging = data.draw(st.integers(1, 12)) * 4096
    when = schedule_phases(plan, staging, message_bytes=1024)
    assert set(when.phase_by_pair) == chosen
    assert when.staging_bytes <= staging
    for rank in range(count):
        for phase in set(when.phase_by_pair.values()):
            streams = [
                pair for pair, number in when.phase_by_pair.items() if number == phase and rank in pair
            ]
            assert len(streams) <= when.max_streams
            assert len({pair[1] for pair in streams if pair[0] == rank}) <= staging // 4096


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 12), min_size=0, max_size=3), min_size=1, max_size=6),
    slot=st.integers(1, 40),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=6, max_size=6),
)
def test_messages_stay_within_their_slot_and_carry_everything_once(shapes, slot, dtypes):
    stream = _Stream(slot * 16)
    values = [torch.zeros(shape) for shape in shapes]
    for value, dtype in zip(values, dtypes, strict=False):
        stream.append_region((value,), dtype)
    for message, length in zip(stream.messages, stream.lengths, strict=True):
        assert 0 < length <= slot * 16
        end = 0
        for segment in message:
            assert segment.offset >= end
            end = segment.offset + segment.views[0].numel() * segment.dtype.itemsize
            segment.views[0].add_(1)
        assert end <= length
    assert all(bool((value == 1).all()) for value in values)


@given(streams=st.integers(1, 64), staging=st.integers(4096, 2**30))
def test_double_buffered_streams_fit_the_staging_bound(streams, staging):
    assert 2 * streams * largest_message_bytes(staging, streams) <= staging


def test_too_little_staging_is_refused():
    with pytest.raises(ValueError, match="too few"):
        largest_message_bytes(100, 8)


def test_a_gap_is_an_error():
    half = {0: [box("t", [0, 0], [2, 4], (1, 0))]}
    whole = {1: [box("t", [0, 0], [4, 4], (1, 0))]}
    with pytest.raises(UncoveredError, match=r"t: no rank holds 8 of the 16 elements"):
        build_plan(grouped(half), grouped(whole))


def test_a_wrong_sender_is_an_error():
    whole = [box("t", [0], [4], (0,))]
    plan = build_plan(grouped({0: whole}), grouped({1: whole}))
    senders = {1: 2}
    broken = type(plan)(
        **{**vars(plan), "bundles": (type(plan.bundles[0])(plan.bundles[0].regions, senders, 16),)}
    )
    with pytest.raises(PlanError, match="does not hold"):
        check_plan(broken)


def test_overlapping_boxes_are_cut_apart():
    cells = cut_overlaps({((0, 0), (4, 2)): (0,), ((2, 0), (4, 2)): (1,)})
    assert cells == {((0, 0), (2, 2)): (0,), ((2, 0), (2, 2)): (0, 1), ((4, 0), (2, 2)): (1,)}


def test_sending_is_shared_by_replicas_and_stays_on_the_node():
    boxes = [box(f"t{i}", [0], [2**20], (0,)) for i in range(8)]
    plan = build_plan(grouped({0: boxes, 1: boxes}), grouped({2: boxes}))
    assert plan.sent == {0: 4 * 2**22, 1: 4 * 2**22}
    near = build_plan(grouped({0: boxes, 1: boxes}), grouped({2: boxes}), {0: 0, 1: 1, 2: 1})
    assert near.sent == {1: 8 * 2**22}
    assert near.bytes_inside_and_across_nodes({0: 0, 1: 1, 2: 1}) == (8 * 2**22, 0)


def test_own_copies_come_first():
    boxes = [box("t", [0], [8], (0,))]
    plan = build_plan(grouped({0: boxes, 1: boxes}), grouped({1: boxes}))
    assert plan.received == {} and plan.local == {1: 32}


def test_groups_describe_equal_ranks_once():
    boxes = [box("t", [0], [8], (0,))]
    (group,) = grouped({0: boxes, 3: boxes})
    assert isinstance(group, BoxGroup) and group.ranks == (0, 3)


def test_receivers_of_replicas_have_one_sender_each_and_loads_are_even():
    boxes = [box(f"t{i}", [0], [2**20], (0,)) for i in range(8)]
    sources = {rank: boxes for rank in range(4)}
    plan = build_plan(grouped(sources), grouped({rank: boxes for rank in range(4, 12)}))
    assert set(plan.sent.values()) == {2 * 8 * 2**22}
    assert all(plan.peer_counts[receiver] == 1 for receiver in range(4, 12))
    assert all(plan.peer_counts[sender] == 2 for sender in range(4))


def test_small_regions_come_from_the_holders_of_large_ones():
    """Every rank holds the norm, but a receiver has a connection to the holder of its matrix."""
    matrices = {rank: box(f"m{rank}", [0], [2**20], (0,)) for rank in range(4)}
    norm = box("norm", [0], [64], (0,))
    sources = {rank: [matrix, norm] for rank, matrix in matrices.items()}
    destinations = {4 + rank: [matrix, norm] for rank, matrix in matrices.items()}
    plan = build_plan(grouped(sources), grouped(destinations))
    assert set(plan.pair_bytes) == {(rank, 4 + rank) for rank in range(4)}


def test_holders_on_the_same_rail_come_before_others():
    boxes = [box("t", [0], [2**20], (0,))]
    sources = {rank: boxes for rank in range(4)}
    nodes = {rank: rank // 4 for rank in range(8)}
    plan = build_plan(grouped(sources), grouped({rank: boxes for rank in range(4, 8)}), nodes)
    assert set(plan.pair_bytes) == {(rank, 4 + rank) for rank in range(4)}


def test_rounds_are_matchings_and_the_planned_messages_are_those_of_the_streams():
    boxes = [box(f"t{i}", [0, 0], [64, 1024 + i], (1, 0)) for i in range(40)]
    sources = {rank: boxes[rank::4] for rank in range(4)}
    plan = build_plan(grouped(sources), grouped({rank: boxes for rank in range(4, 8)}))
    transfers = schedule_phases(plan, 2**22)
    ends = Counter(
        (rank, direction, phase)
        for pair, phase in transfers.phase_by_pair.items()
        for direction, rank in enumerate(pair)
    )
    assert max(ends.values()) == 1 and len(set(transfers.phase_by_pair.values())) == 4
    for sender in range(4):
        for receiver, regions in plan.regions_to_send(sender).items():
            stream = _Stream(transfers.max_message_bytes, transfers.min_separate_bytes)
            stream.append_regions([((torch.empty(r.size, device="meta"),), r.dtype) for r in regions])
            assert len(stream.messages) == transfers.message_counts[sender, receiver]


def test_regions_are_packed_where_messages_are_too_many(monkeypatch):
    boxes = [box(f"t{i}", [0], [2**18], (0,)) for i in range(64)]
    plan = build_plan(grouped({0: boxes}), grouped({1: boxes}))
    assert schedule_phases(plan, 2**26).max_messages_per_rank == 64
    monkeypatch.setattr("megatron_rl.weights.plan.MAX_MESSAGES", 10)
    packed = schedule_phases(plan, 2**26)
    assert packed.max_messages_per_rank == 2 and packed.staging_bytes <= 2**26
