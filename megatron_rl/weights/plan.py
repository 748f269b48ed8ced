"""Reshard plan: choose a sender for every region that a rank needs, with the least traffic.

Pure: integers in, integers out. Every rank computes the same plan from the same layouts, so that no rank has
to distribute it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.weights.boxes import BoxGroup, BoxIndex, Region, needed_bytes, regions
from megatron_rl.weights.transfer import slot_bytes


@dataclass(frozen=True)
class Bundle:
    """Regions with the same holders and receivers, which are sent together."""

    regions: tuple[Region, ...]
    senders: Mapping[int, int]
    """Receiver -> its sender; a receiver that is its own sender copies locally."""
    bytes: int
    """Bytes of all regions, once."""


@dataclass(frozen=True)
class ReshardPlan:
    """Reshard plan of one transfer: the regions that each rank sends to each other rank."""

    sources: tuple[BoxGroup, ...]
    """Boxes that ranks hold."""
    destinations: tuple[BoxGroup, ...]
    """Boxes that ranks need."""
    bundles: tuple[Bundle, ...]
    """All regions, each with a sender for each of its receivers."""
    received: Mapping[int, int]
    """Bytes that arrive over the wire, by rank."""
    sent: Mapping[int, int]
    """Bytes that leave over the wire, by rank."""
    local: Mapping[int, int]
    """Bytes copied inside a rank, by rank."""
    needed: Mapping[int, int]
    """Bytes that a rank needs from anywhere, by rank."""
    pairs: Mapping[tuple[int, int], int] = field(repr=False)
    """Bytes over the wire by (sender, receiver)."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return every rank that holds or needs weights, sorted."""
        return tuple(sorted({rank for group in (*self.sources, *self.destinations) for rank in group.ranks}))

    def bytes_between(self, node_of: Mapping[int, int]) -> tuple[int, int]:
        """Return the bytes over the wire inside nodes and across nodes."""
        intra_node = 0
        inter_node = 0
        for (sender, receiver), count in self.pairs.items():
            if node_of[sender] == node_of[receiver]:
                intra_node += count
            else:
                inter_node += count
        return intra_node, inter_node

    def to_send(self, rank: int) -> dict[int, list[Region]]:
        """Return by receiver the regions that a rank sends, in the order that both sides use."""
        result: dict[int, list[Region]] = defaultdict(list)
        for bundle in self.bundles:
            for receiver, sender in bundle.senders.items():
                if sender == rank != receiver:
                    result[receiver].extend(bundle.regions)
        return dict(sorted(result.items()))

    def to_receive(self, rank: int) -> dict[int, list[Region]]:
        """Return by sender the regions that a rank receives; its own rank has the local copies."""
        result: dict[int, list[Region]] = defaultdict(list)
        for bundle in self.bundles:
            sender = bundle.senders.get(rank)
            if sender is not None:
                result[sender].extend(bundle.regions)
        return dict(sorted(result.items()))

    def boxes_of(self, rank: int, destination: bool) -> BoxIndex:
        """Return an index of the boxes that a rank needs if ``destination``, else of its sources."""
        groups = self.destinations if destination else self.sources
        return BoxIndex(box for group in groups if rank in group.ranks for box in group.boxes)


@dataclass(frozen=True)
class Schedule:
    """Phases of a transfer, which every rank executes in order.

    In one phase a rank exchanges messages with few others, so that messages are large in bounded staging
    memory.
    """

    phase: Mapping[tuple[int, int], int]
    """Phase by (sender, receiver)."""
    slot: int
    """Bytes of the largest message."""
    streams: int
    """Most pairs that one rank belongs to in one phase."""

    @property
    def staging(self) -> int:
        """Return the largest number of bytes of one rank's in and out buffers together."""
        # Each stream has two buffers: one message is in transit while the other is unpacked.
        return 2 * self.slot * self.streams


def schedule(
    plan: ReshardPlan,
    staging_bytes: int,
    message_bytes: int = 4 * 2**20,
) -> Schedule:
    """Assign the pairs of a plan to phases by the distance between their ranks.

    Each rank has one receiver and one sender at each distance, so a phase of ``w`` distances has at most
    2 ``w`` streams per rank. There are as few phases as messages of ``message_bytes`` allow.
    """
    position = {rank: index for index, rank in enumerate(plan.ranks)}
    count = len(position)

    # Two streams per distance, with two buffers each.
    width = max(1, staging_bytes // (4 * message_bytes))
    phase = {
        (sender, receiver): ((position[receiver] - position[sender]) % count - 1) // width
        for sender, receiver in plan.pairs
    }

    # Count the pairs of each rank in each phase: they share the staging memory.
    streams: dict[tuple[int, int], int] = defaultdict(int)
    for pair, number in phase.items():
        for rank in pair:
            streams[rank, number] += 1
    max_streams = max(streams.values(), default=1)
    return Schedule(phase, slot_bytes(staging_bytes, max_streams), max_streams)


class PlanError(RuntimeError):
    """Error for a plan that `check_plan` rejects: a fault of the planner."""


def build_plan(
    sources: Sequence[BoxGroup],
    destinations: Sequence[BoxGroup],
    node_of: Mapping[int, int] | None = None,
) -> ReshardPlan:
    """Plan the transfer from the ranks that hold weights to the ranks that need them.

    A receiver that holds a region copies it locally. Otherwise the least loaded holder sends it, one on the
    receiver's node (``node_of``: rank to node) if there is any. Raises UncoveredError if no rank holds a
    needed region, PlanError if a rank would receive more than it needs and lacks.
    """
    nodes = node_of or {}
    sent_bytes: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    local: dict[int, int] = defaultdict(int)
    pairs: dict[tuple[int, int], int] = defaultdict(int)

    # Regions whose senders are fixed come first, so that free choices balance the load.
    bundles = []
    for group in _group_by_ranks(regions(sources, destinations)):
        selector = _SenderSelector(group[0].holders, nodes)
        for bundle_regions in _split_group(group):
            num_bytes = sum(region.bytes for region in bundle_regions)
            senders = {}
            for receiver in bundle_regions[0].receivers:
                sender = selector.select(receiver, sent_bytes)
                senders[receiver] = sender
                if sender == receiver:
                    local[receiver] += num_bytes
                else:
                    sent_bytes[sender] += num_bytes
                    received[receiver] += num_bytes
                    pairs[sender, receiver] += num_bytes
            bundles.append(Bundle(tuple(bundle_regions), senders, num_bytes))

    plan = ReshardPlan(
        sources=tuple(sources),
        destinations=tuple(destinations),
        bundles=tuple(bundles),
        received=dict(received),
        sent=dict(sent_bytes),
        local=dict(local),
        needed=needed_bytes(destinations),
        pairs=dict(pairs),
    )
    check_plan(plan)
    return plan


def check_plan(plan: ReshardPlan) -> None:
    """Check that every needed element arrives exactly once, and none on a rank that already holds it.

    Raises PlanError.
    """
    wire_bytes: dict[int, int] = defaultdict(int)
    arriving_bytes: dict[int, int] = defaultdict(int)
    for bundle in plan.bundles:
        holders = set(bundle.regions[0].holders)
        for receiver, sender in bundle.senders.items():
            arriving_bytes[receiver] += bundle.bytes
            if sender not in holders:
                raise PlanError(f"rank {sender} is to send {bundle.regions[0].name}, which it does not hold")
            if receiver not in holders:
                wire_bytes[receiver] += bundle.bytes

    # Every needed byte arrives, and none that the rank already holds.
    for rank, count in plan.needed.items():
        if arriving_bytes[rank] != count:
            raise PlanError(f"rank {rank} needs {count} bytes and would be given {arriving_bytes[rank]}")
        if plan.received.get(rank, 0) != wire_bytes[rank]:
            raise PlanError(
                f"rank {rank} would receive {plan.received.get(rank, 0)} bytes, it lacks {wire_bytes[rank]}"
            )


def _group_by_ranks(all_regions: Sequence[Region]) -> list[list[Region]]:
    """Group regions with equal holders and receivers; groups with the fewest holders come first.

    Their senders cannot be chosen freely, so the others balance the load after them.
    """
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in all_regions:
        # Equal tuples of ranks are one object: see `regions`.
        groups.setdefault((id(region.holders), id(region.receivers)), []).append(region)
    return sorted(groups.values(), key=lambda group: len(group[0].holders))


def _split_group(group: list[Region], min_bytes: int = 2**20) -> Iterator[list[Region]]:
    """Split a group into lists of regions, so that several holders can share the sending."""
    total = sum(region.bytes for region in group)

    # Four lists per holder balance the load without many small messages.
    target = max(min_bytes, total // (4 * len(group[0].holders)))
    chunk: list[Region] = []
    chunk_bytes = 0
    for region in group:
        if chunk and chunk_bytes + region.bytes > target:
            yield chunk
            chunk = []
            chunk_bytes = 0
        chunk.append(region)
        chunk_bytes += region.bytes
    yield chunk


class _SenderSelector:
    """Selector of senders: a receiver that is a holder, else the least loaded holder, near ones first."""

    def __init__(
        self,
        holders: Sequence[int],
        nodes: Mapping[int, int],
    ) -> None:
        self._holders = holders
        self._holder_set = set(holders)
        self._nodes = nodes
        self._holders_by_node: dict[int | None, list[int]] = defaultdict(list)
        for rank in holders:
            self._holders_by_node[nodes.get(rank)].append(rank)

    def select(self, receiver: int, sent_bytes: Mapping[int, int]) -> int:
        """Return the sender for ``receiver``; ``sent_bytes`` has the bytes that each rank already sends."""
        if receiver in self._holder_set:
            return receiver

        candidates = self._holders_by_node.get(self._nodes.get(receiver)) or self._holders
        if len(candidates) == 1:
            return candidates[0]
        # Equal loads go to the lowest rank, so that all ranks compute the same plan.
        return min(candidates, key=lambda rank: (sent_bytes.get(rank, 0), rank))
