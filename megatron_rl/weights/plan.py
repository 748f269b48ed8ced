"""Decide who sends what to whom: the least traffic for a given placement, spread over the holders.

Pure: integers in, integers out. Every rank computes the same plan from the same layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.weights.boxes import BoxGroup, BoxIndex, Region, needed_bytes, regions
from megatron_rl.weights.transfer import slot_bytes


@dataclass(frozen=True)
class Bundle:
    """Regions with the same holders and receivers, and the sender to each receiver.

    A receiver that is its own sender copies locally.
    """

    regions: tuple[Region, ...]
    senders: Mapping[int, int]
    bytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """Hold who sends which regions to whom.

    ``received`` and ``sent`` are bytes over the wire by rank, ``local`` bytes copied inside a rank;
    ``needed`` bytes a rank holds after the transfer.
    """

    sources: tuple[BoxGroup, ...]
    destinations: tuple[BoxGroup, ...]
    bundles: tuple[Bundle, ...]
    received: Mapping[int, int]
    sent: Mapping[int, int]
    local: Mapping[int, int]
    needed: Mapping[int, int]
    pairs: Mapping[tuple[int, int], int] = field(repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return every rank that holds or needs weights."""
        return tuple(sorted({rank for group in (*self.sources, *self.destinations) for rank in group.ranks}))

    def bytes_between(self, node_of: Mapping[int, int]) -> tuple[int, int]:
        """Return bytes that stay inside a node and bytes that cross nodes."""
        inside = sum(count for (a, b), count in self.pairs.items() if node_of[a] == node_of[b])
        return inside, sum(self.pairs.values()) - inside

    def to_send(self, rank: int) -> dict[int, list[Region]]:
        """Return the regions a rank sends to each other rank, in the order both sides keep."""
        result: dict[int, list[Region]] = defaultdict(list)
        for bundle in self.bundles:
            for receiver, sender in bundle.senders.items():
                if sender == rank != receiver:
                    result[receiver].extend(bundle.regions)
        return dict(sorted(result.items()))

    def to_receive(self, rank: int) -> dict[int, list[Region]]:
        """Return the regions a rank gets from each rank; those under its own number are local copies."""
        result: dict[int, list[Region]] = defaultdict(list)
        for bundle in self.bundles:
            sender = bundle.senders.get(rank)
            if sender is not None:
                result[sender].extend(bundle.regions)
        return dict(sorted(result.items()))

    def boxes_of(self, rank: int, destination: bool) -> BoxIndex:
        """Return an index of the boxes a rank holds, or with ``destination`` those it needs."""
        groups = self.destinations if destination else self.sources
        return BoxIndex(box for group in groups if rank in group.ranks for box in group.boxes)


@dataclass(frozen=True)
class Schedule:
    """Say in which phase each pair of ranks talks, and how large its messages may be.

    A rank talks to few others in one phase, so that messages are large in bounded staging memory; every
    rank goes through the phases in order.
    """

    phase: Mapping[tuple[int, int], int]
    slot: int
    streams: int

    @property
    def staging(self) -> int:
        """Return the most bytes that in and out buffers of one rank take together."""
        return 2 * self.slot * self.streams


def schedule(plan: ReshardPlan, staging_bytes: int, message_bytes: int = 4 * 2**20) -> Schedule:
    """Divide a plan's pairs into phases by the distance between their ranks.

    Each rank has one sender and one receiver at each distance, so a phase of ``w`` distances has at most
    2 ``w`` streams per rank. There are as few phases as messages of ``message_bytes`` allow.
    """
    position = {rank: index for index, rank in enumerate(plan.ranks)}
    count = len(position)
    width = max(1, staging_bytes // (4 * message_bytes))
    phase = {
        (sender, receiver): ((position[receiver] - position[sender]) % count - 1) // width
        for sender, receiver in plan.pairs
    }
    streams: dict[tuple[int, int], int] = defaultdict(int)
    for pair, number in phase.items():
        for rank in pair:
            streams[rank, number] += 1
    most = max(streams.values(), default=1)
    return Schedule(phase, slot_bytes(staging_bytes, most), most)


class PlanError(RuntimeError):
    """Report a plan that breaks its own promises."""


def build_plan(
    sources: Sequence[BoxGroup],
    destinations: Sequence[BoxGroup],
    node_of: Mapping[int, int] | None = None,
) -> ReshardPlan:
    """Plan the transfer: own copies first, then the least-loaded holder, on the same node where there is one.

    Raises UncoveredError when something needed is held nowhere, PlanError when a rank would receive more
    than what it needs and lacks.
    """
    nodes = node_of or {}
    all_regions = regions(sources, destinations)
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    local: dict[int, int] = defaultdict(int)
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    bundles = []
    for group in _groups(all_regions):
        choices = _Choices(group[0].holders, nodes)
        for part in _parts(group):
            bytes_ = sum(region.bytes for region in part)
            senders = {}
            for receiver in part[0].receivers:
                sender = choices.sender(receiver, sent)
                senders[receiver] = sender
                if sender == receiver:
                    local[receiver] += bytes_
                else:
                    sent[sender] += bytes_
                    received[receiver] += bytes_
                    pairs[sender, receiver] += bytes_
            bundles.append(Bundle(tuple(part), senders, bytes_))
    plan = ReshardPlan(
        tuple(sources), tuple(destinations), tuple(bundles),
        dict(received), dict(sent), dict(local), needed_bytes(destinations), dict(pairs),
    )  # fmt: skip
    check_plan(plan)
    return plan


def check_plan(plan: ReshardPlan) -> None:
    """Check that every needed element arrives exactly once and that no rank receives what it already has."""
    bound: dict[int, int] = defaultdict(int)
    arriving: dict[int, int] = defaultdict(int)
    for bundle in plan.bundles:
        holders = set(bundle.regions[0].holders)
        for receiver, sender in bundle.senders.items():
            arriving[receiver] += bundle.bytes
            if sender not in holders:
                raise PlanError(f"rank {sender} is to send {bundle.regions[0].name}, which it does not hold")
            if receiver not in holders:
                bound[receiver] += bundle.bytes
    for rank, count in plan.needed.items():
        if arriving[rank] != count:
            raise PlanError(f"rank {rank} needs {count} bytes and would be given {arriving[rank]}")
        if plan.received.get(rank, 0) != bound[rank]:
            raise PlanError(
                f"rank {rank} would receive {plan.received.get(rank, 0)} bytes, it lacks {bound[rank]}"
            )


def _groups(all_regions: Sequence[Region]) -> list[list[Region]]:
    """Collect regions with equal holders and receivers, the groups with fewest choices first."""
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in all_regions:
        groups.setdefault((id(region.holders), id(region.receivers)), []).append(region)
    return sorted(groups.values(), key=lambda group: len(group[0].holders))


def _parts(group: list[Region], smallest: int = 2**20) -> Iterator[list[Region]]:
    """Divide a group so that several holders can share the sending."""
    total = sum(region.bytes for region in group)
    target = max(smallest, total // (4 * len(group[0].holders)))
    part: list[Region] = []
    filled = 0
    for region in group:
        if part and filled + region.bytes > target:
            yield part
            part, filled = [], 0
        part.append(region)
        filled += region.bytes
    yield part


class _Choices:
    """Choose among the holders of a region: the receiver itself, else the least loaded, near ones first."""

    def __init__(self, holders: Sequence[int], nodes: Mapping[int, int]) -> None:
        self._holders, self._members, self._nodes = holders, set(holders), nodes
        self._on_node: dict[int | None, list[int]] = defaultdict(list)
        for rank in holders:
            self._on_node[nodes.get(rank)].append(rank)

    def sender(self, receiver: int, sent: Mapping[int, int]) -> int:
        """Return who gives the region to ``receiver``, given the bytes each rank already sends."""
        if receiver in self._members:
            return receiver
        near = self._on_node.get(self._nodes.get(receiver)) or self._holders
        return near[0] if len(near) == 1 else min(near, key=lambda rank: (sent.get(rank, 0), rank))
