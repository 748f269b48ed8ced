"""Decide who sends what to whom: the least traffic for a given placement, spread over the holders.

Pure: integers in, integers out. Every rank computes the same plan from the same layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.parallel.boxes import BoxGroup, BoxIndex, Region, regions


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

    def peers(self, rank: int) -> int:
        """Return from how many ranks it receives plus to how many it sends."""
        return sum((rank == sender) + (rank == receiver) for sender, receiver in self.pairs)

    def most_peers(self) -> int:
        """Return the largest number of incoming plus outgoing streams of any rank."""
        count: dict[int, int] = defaultdict(int)
        for sender, receiver in self.pairs:
            count[sender] += 1
            count[receiver] += 1
        return max(count.values(), default=0)

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
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    local: dict[int, int] = defaultdict(int)
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    bundles = []
    for group in _groups(regions(sources, destinations)):
        for part in _parts(group):
            bytes_ = sum(region.bytes for region in part)
            senders = {}
            for receiver in part[0].receivers:
                sender = _sender(receiver, part[0].holders, nodes, sent)
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
        dict(received), dict(sent), dict(local), _needed(destinations), dict(pairs),
    )  # fmt: skip
    check_plan(plan)
    return plan


def lower_bound(sources: Sequence[BoxGroup], destinations: Sequence[BoxGroup]) -> dict[int, int]:
    """Return by receiver the bytes it needs and does not hold: no transfer can receive less."""
    bound: dict[int, int] = defaultdict(int)
    for region in regions(sources, destinations):
        holders = set(region.holders)
        for receiver in region.receivers:
            bound[receiver] += 0 if receiver in holders else region.bytes
    return dict(bound)


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


def _needed(destinations: Sequence[BoxGroup]) -> dict[int, int]:
    """Return the bytes of distinct tensor elements each rank needs."""
    needed: dict[int, int] = defaultdict(int)
    for region in regions(destinations, destinations):
        for rank in region.receivers:
            needed[rank] += region.bytes
    return dict(needed)


def _groups(all_regions: Sequence[Region]) -> list[list[Region]]:
    """Collect regions with equal holders and receivers, the groups with fewest choices first."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Region]] = {}
    for region in all_regions:
        groups.setdefault((region.holders, region.receivers), []).append(region)
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


def _sender(receiver: int, holders: Sequence[int], nodes: Mapping[int, int], sent: Mapping[int, int]) -> int:
    if receiver in holders:
        return receiver
    near = [rank for rank in holders if nodes.get(rank) == nodes.get(receiver)] or holders
    return min(near, key=lambda rank: (sent.get(rank, 0), rank))
