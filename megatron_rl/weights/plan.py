"""Reshard plan: choose a sender for every region that a rank needs, with the least traffic.

Pure: integers in, integers out. Every rank computes the same plan from the same layouts, so that no rank has
to distribute it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_rl.weights.boxes import BoxGroup, BoxIndex, Region, needed_bytes, regions
from megatron_rl.weights.senders import Share, choose_senders
from megatron_rl.weights.transfer import OWN_MESSAGE_BYTES, slot_bytes

MAX_MESSAGES = 1000
"""Messages that a rank should at most send, or receive, in one transfer: each costs a launch and a wait."""


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

    @cached_property
    def peers(self) -> dict[int, int]:
        """Return the number of other ranks that each rank exchanges messages with; each is a connection."""
        peers: dict[int, set[int]] = defaultdict(set)
        for sender, receiver in self.pairs:
            peers[sender].add(receiver)
            peers[receiver].add(sender)
        return {rank: len(others) for rank, others in peers.items()}

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
    own_message_bytes: int
    """Bytes from which a region has messages of its own; smaller ones are packed."""
    messages: Mapping[tuple[int, int], int] = field(repr=False)
    """Messages by (sender, receiver)."""

    @property
    def staging(self) -> int:
        """Return the largest number of bytes of one rank's in and out buffers together."""
        # Each stream has two buffers: one message is in transit while the other is unpacked.
        return 2 * self.slot * self.streams

    @property
    def messages_per_rank(self) -> int:
        """Return the most messages that any rank sends, or receives."""
        counts: dict[tuple[int, bool], int] = defaultdict(int)
        for (sender, receiver), count in self.messages.items():
            counts[sender, True] += count
            counts[receiver, False] += count
        return max(counts.values(), default=0)


def schedule(
    plan: ReshardPlan,
    staging_bytes: int,
    message_bytes: int = 4 * 2**20,
) -> Schedule:
    """Assign the pairs of a plan to phases, and divide the staging memory between the pairs of a phase.

    As many pairs share a phase as messages of ``message_bytes`` allow, and large regions travel without
    staging. If a rank then has more than `MAX_MESSAGES`, more regions are packed, then phases are narrower,
    until it has not, or messages are as large as the staging memory allows.
    """
    rounds = _rounds(plan.pairs)
    sizes = [Counter(region.bytes for region in bundle.regions) for bundle in plan.bundles]

    # A round has two streams per rank, with two buffers each.
    width = max(1, staging_bytes // (4 * message_bytes))
    while True:
        phase = {pair: number // width for pair, number in rounds.items()}
        candidate = _divide(plan, sizes, phase, staging_bytes)
        if width == 1 or candidate.messages_per_rank <= MAX_MESSAGES:
            return candidate
        width //= 2


def _divide(
    plan: ReshardPlan,
    sizes: Sequence[Mapping[int, int]],
    phase: Mapping[tuple[int, int], int],
    staging_bytes: int,
) -> Schedule:
    """Return the schedule of these phases that packs as few regions as `MAX_MESSAGES` allows.

    ``sizes`` counts the regions of each bundle by their bytes.
    """
    streams = _most_streams(phase)
    slot = slot_bytes(staging_bytes, streams)
    own_bytes = min(OWN_MESSAGE_BYTES, slot)
    # Where not even full messages would do, pack as much as possible at once.
    if max([*plan.sent.values(), *plan.received.values()], default=0) > MAX_MESSAGES * slot:
        own_bytes = slot

    while True:
        messages = _count_messages(plan, sizes, slot, own_bytes)
        candidate = Schedule(phase, slot, streams, own_bytes, messages)
        if own_bytes == slot or candidate.messages_per_rank <= MAX_MESSAGES:
            return candidate
        own_bytes = min(2 * own_bytes, slot)


def _rounds(pairs: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Return a round for each pair, such that a rank sends to one other in a round, and receives from one.

    This colours the edges of a bipartite graph. Large pairs choose first, so that the pairs of a round are
    of similar size and no rank waits long for its partner.
    """
    # Bit n of a rank's mask: it already sends, or receives, in round n.
    sends: dict[int, int] = defaultdict(int)
    receives: dict[int, int] = defaultdict(int)
    result: dict[tuple[int, int], int] = {}
    for sender, receiver in sorted(pairs, key=lambda pair: (-pairs[pair], pair)):
        occupied = sends[sender] | receives[receiver]
        # The lowest bit that is not set.
        first_free = ~occupied & (occupied + 1)
        sends[sender] |= first_free
        receives[receiver] |= first_free
        result[sender, receiver] = first_free.bit_length() - 1
    return result


def _most_streams(phase: Mapping[tuple[int, int], int]) -> int:
    """Return the most pairs that one rank belongs to in one phase: they share the staging memory."""
    streams: dict[tuple[int, int], int] = defaultdict(int)
    for pair, number in phase.items():
        for rank in pair:
            streams[rank, number] += 1
    return max(streams.values(), default=1)


def _count_messages(
    plan: ReshardPlan, sizes: Sequence[Mapping[int, int]], slot: int, own_bytes: int
) -> dict[tuple[int, int], int]:
    """Return the messages of each pair; ``sizes`` counts the regions of each bundle by their bytes."""
    own_messages: dict[tuple[int, int], int] = defaultdict(int)
    packed_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for bundle, regions_by_size in zip(plan.bundles, sizes, strict=True):
        own = sum(-(-size // slot) * count for size, count in regions_by_size.items() if size >= own_bytes)
        packed = sum(size * count for size, count in regions_by_size.items() if size < own_bytes)
        for receiver, sender in bundle.senders.items():
            if sender != receiver:
                own_messages[sender, receiver] += own
                packed_bytes[sender, receiver] += packed
    return {pair: own_messages[pair] + -(-packed_bytes[pair] // slot) for pair in plan.pairs}


class PlanError(RuntimeError):
    """Error for a plan that `check_plan` rejects: a fault of the planner."""


def build_plan(
    sources: Sequence[BoxGroup],
    destinations: Sequence[BoxGroup],
    node_of: Mapping[int, int] | None = None,
) -> ReshardPlan:
    """Plan the transfer from the ranks that hold weights to the ranks that need them.

    A receiver that holds a region copies it locally. Otherwise a holder on its node (``node_of``: rank to
    node) sends it if there is any, else one that `choose_senders` finds.

    Raises UncoveredError if no rank holds a needed region, PlanError if a rank would receive more than it
    needs and lacks.
    """
    groups = _group_by_ranks(regions(sources, destinations))
    constraints = [
        (group[0].holders, group[0].receivers, sum(region.bytes for region in group)) for group in groups
    ]
    chosen = choose_senders(constraints, node_of or {})
    bundles = [
        bundle for group, shares in zip(groups, chosen, strict=True) for bundle in _bundles(group, shares)
    ]

    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    local: dict[int, int] = defaultdict(int)
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for bundle in bundles:
        for receiver, sender in bundle.senders.items():
            if sender == receiver:
                local[receiver] += bundle.bytes
            else:
                sent[sender] += bundle.bytes
                received[receiver] += bundle.bytes
                pairs[sender, receiver] += bundle.bytes

    plan = ReshardPlan(
        sources=tuple(sources),
        destinations=tuple(destinations),
        bundles=tuple(bundles),
        received=dict(received),
        sent=dict(sent),
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

    Their senders cannot be chosen freely, so the others balance the load after them. Of equally many holders,
    large groups come first: small ones then follow the connections that large ones need.
    """
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in all_regions:
        # Equal tuples of ranks are one object: see `regions`.
        groups.setdefault((id(region.holders), id(region.receivers)), []).append(region)
    return sorted(
        groups.values(), key=lambda group: (len(group[0].holders), -sum(region.bytes for region in group))
    )


def _bundles(group: Sequence[Region], shares: Mapping[int, Sequence[Share]]) -> Iterator[Bundle]:
    """Yield a group in bundles, cut where the sender of any receiver changes.

    ``shares``: receiver to its senders, each with its part of the group's bytes. Regions are not cut, so a
    sender's part ends at the region's end nearest to it.
    """
    region_bytes = [region.bytes for region in group]
    ends = list(itertools.accumulate(region_bytes))

    # Receiver -> (index of the first region, sender) of each of its parts.
    starts: dict[int, list[tuple[int, int]]] = {}
    for receiver, parts in shares.items():
        offset = 0
        starts[receiver] = []
        for sender, num_bytes in parts:
            index = _nearest_boundary(ends, offset)
            if starts[receiver] and starts[receiver][-1][0] == index:
                starts[receiver].pop()
            if index < len(group):
                starts[receiver].append((index, sender))
            offset += num_bytes

    cuts = sorted({index for parts in starts.values() for index, _ in parts})
    for first, end in itertools.pairwise([*cuts, len(group)]):
        senders = {
            receiver: next(sender for index, sender in reversed(parts) if index <= first)
            for receiver, parts in starts.items()
        }
        yield Bundle(tuple(group[first:end]), senders, sum(region_bytes[first:end]))


def _nearest_boundary(ends: Sequence[int], offset: int) -> int:
    """Return the number of the regions before the boundary that is nearest to a byte; ``ends`` are sorted."""
    if offset == 0:
        return 0
    index = bisect.bisect_left(ends, offset)
    before = ends[index - 1] if index else 0
    return index + 1 if ends[index] - offset <= offset - before else index
