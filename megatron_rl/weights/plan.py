"""Reshard plan: the sender of every region that a rank needs, chosen for the least traffic.

Only integer arithmetic. Every rank computes the same plan from the same layouts, so no rank has to send it to
the others.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import (
    BoxGroup,
    BoxIndex,
    Region,
    compute_regions,
    needed_bytes,
)
from megatron_rl.weights.senders import RegionGroup, SharesByReceiver, choose_senders
from megatron_rl.weights.transfer import MIN_SEPARATE_BYTES, largest_message_bytes

Pair = tuple[int, int]
"""Global ranks of a sender and a receiver."""

MAX_MESSAGES = 1000
"""Largest number of messages that a rank should send, or receive, in one transfer.

Each message costs a launch and a wait."""


@dataclass(frozen=True)
class Bundle:
    """Regions with the same holders and receivers, which are sent together.

    Example: ranks 2 and 4 need 64 bytes, which rank 4 receives from rank 0 and rank 2 copies locally::

        Bundle(regions, senders={4: 0, 2: 2}, bytes=64)
    """

    regions: tuple[Region, ...]
    """Regions in the order in which sender and receiver pack them into messages."""
    senders: Mapping[int, int]
    """Receiver -> its sender; a receiver that is its own sender copies locally."""
    bytes: int
    """Bytes of all regions, counted once for all receivers."""


@dataclass(frozen=True)
class ReshardPlan:
    """Reshard plan of one transfer: the regions that each sender sends to each receiver.

    Example: one bundle of 64 bytes, which rank 0 holds and ranks 0 and 1 need, has ``received={1: 64}``,
    ``sent={0: 64}``, ``local={0: 64}``, ``needed={0: 64, 1: 64}`` and ``pair_bytes={(0, 1): 64}``.
    """

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
    """Bytes that a rank needs, received or copied locally, by rank."""
    pair_bytes: Mapping[Pair, int] = field(repr=False)
    """Bytes over the wire by (sender, receiver)."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks that hold or need weights, sorted."""
        ranks: set[int] = set()
        for group in (*self.sources, *self.destinations):
            ranks.update(group.ranks)
        return tuple(sorted(ranks))

    @cached_property
    def peer_counts(self) -> dict[int, int]:
        """Return the number of peers of each rank that sends or receives messages.

        Each peer costs a connection.
        """
        peers_by_rank: dict[int, set[int]] = defaultdict(set)
        for sender, receiver in self.pair_bytes:
            peers_by_rank[sender].add(receiver)
            peers_by_rank[receiver].add(sender)
        return {rank: len(rank_peers) for rank, rank_peers in peers_by_rank.items()}

    def bytes_inside_and_across_nodes(
        self,
        node_of: Mapping[int, int],
    ) -> tuple[int, int]:
        """Return the sent bytes (inside nodes, across nodes); ``node_of`` maps a rank to its node."""
        intra_node = 0
        inter_node = 0
        for (sender, receiver), num_bytes in self.pair_bytes.items():
            if node_of[sender] == node_of[receiver]:
                intra_node += num_bytes
            else:
                inter_node += num_bytes
        return intra_node, inter_node

    def regions_to_send(self, rank: int) -> dict[int, list[Region]]:
        """Return the regions that a rank sends, by receiver, in the order in which messages contain them."""
        regions_by_receiver: dict[int, list[Region]] = defaultdict(list)
        for bundle in self.bundles:
            for receiver, sender in bundle.senders.items():
                if sender == rank and receiver != rank:
                    regions_by_receiver[receiver].extend(bundle.regions)
        return dict(sorted(regions_by_receiver.items()))

    def regions_to_receive(self, rank: int) -> dict[int, list[Region]]:
        """Return the regions that a rank receives, by sender.

        Regions with the sender ``rank`` are copied locally.
        """
        regions_by_sender: dict[int, list[Region]] = defaultdict(list)
        for bundle in self.bundles:
            sender = bundle.senders.get(rank)
            if sender is not None:
                regions_by_sender[sender].extend(bundle.regions)
        return dict(sorted(regions_by_sender.items()))

    def index_boxes(self, rank: int, is_destination: bool) -> BoxIndex:
        """Return an index of a rank's destination boxes if ``is_destination``, else of its source boxes."""
        groups = self.sources
        if is_destination:
            groups = self.destinations

        boxes: list[TensorBox] = []
        for group in groups:
            if rank in group.ranks:
                boxes += group.boxes
        return BoxIndex(boxes)


@dataclass(frozen=True)
class Schedule:
    """Phases of a transfer, which every rank executes in order.

    Each phase pairs a rank with few peers, because its peers share the staging memory: fewer peers get larger
    messages.

    Example: rank 0 sends to rank 1 and then to rank 2, 3 messages of at most 4 MiB each::

        Schedule(
            phase_by_pair={(0, 1): 0, (0, 2): 1},
            max_message_bytes=4 * 2**20,
            max_streams=1,
            min_separate_bytes=2**20,
            message_counts={(0, 1): 3, (0, 2): 3},
        )
    """

    phase_by_pair: Mapping[Pair, int]
    """Index of the phase in which a (sender, receiver) pair exchanges its messages."""
    max_message_bytes: int
    """Bytes of the largest message."""
    max_streams: int
    """Largest number of pairs that one rank belongs to in one phase."""
    min_separate_bytes: int
    """Smallest region, in bytes, that has separate messages; smaller regions share messages."""
    message_counts: Mapping[Pair, int] = field(repr=False)
    """Number of messages by (sender, receiver)."""

    @property
    def staging_bytes(self) -> int:
        """Return the peak size, in bytes, of one rank's send and receive buffers together."""
        # Each stream has two buffers: one message is in transit while the other is unpacked.
        return 2 * self.max_message_bytes * self.max_streams

    @property
    def max_messages_per_rank(self) -> int:
        """Return the largest number of messages that any rank sends, or receives."""
        sent_counts: Counter[int] = Counter()
        received_counts: Counter[int] = Counter()
        for (sender, receiver), count in self.message_counts.items():
            sent_counts[sender] += count
            received_counts[receiver] += count
        message_counts = [*sent_counts.values(), *received_counts.values()]
        return max(message_counts, default=0)


def schedule_phases(
    plan: ReshardPlan,
    staging_bytes: int,
    message_bytes: int = 4 * 2**20,
) -> Schedule:
    """Assign the (sender, receiver) pairs of a plan to phases, and choose the size of their messages.

    The pairs of a phase share the staging memory: messages can be larger if a phase has fewer pairs. A rank
    should have at most `MAX_MESSAGES` messages.

    First, a phase gets as many pairs as fit into the staging memory with messages of ``message_bytes``. If a
    rank then has too many messages, the size up to which regions are packed into shared messages is raised.
    If this is not enough, the number of pairs per phase is halved, until no rank has too many messages or
    each rank has at most one sender and one receiver per phase.
    """
    round_by_pair = _assign_rounds(plan.pair_bytes)
    size_counts = [Counter(region.bytes for region in bundle.regions) for bundle in plan.bundles]

    # A round has two streams per rank, one in and one out, with two buffers each.
    rounds_per_phase = max(1, staging_bytes // (4 * message_bytes))
    while True:
        phase_by_pair = {pair: round_index // rounds_per_phase for pair, round_index in round_by_pair.items()}
        schedule = _build_schedule(plan, size_counts, phase_by_pair, staging_bytes)
        if rounds_per_phase == 1 or schedule.max_messages_per_rank <= MAX_MESSAGES:
            return schedule

        # Fewer streams share the staging memory, so each message is larger.
        rounds_per_phase //= 2


def _build_schedule(
    plan: ReshardPlan,
    size_counts: Sequence[Mapping[int, int]],
    phase_by_pair: Mapping[Pair, int],
    staging_bytes: int,
) -> Schedule:
    """Build the schedule of the given phases, and choose which regions share messages.

    A region of at least ``min_separate_bytes`` gets separate messages, and smaller regions share messages.
    The function chooses the smallest such threshold with which no rank has more than `MAX_MESSAGES` messages.
    If no threshold suffices, the threshold is the size of a message, and the schedule exceeds `MAX_MESSAGES`.

    ``size_counts`` has one mapping for each bundle of the plan: size of a region in bytes -> number of
    regions of this size.
    """
    max_streams = _max_streams(phase_by_pair)
    max_message_bytes = largest_message_bytes(staging_bytes, max_streams)
    min_separate_bytes = min(MIN_SEPARATE_BYTES, max_message_bytes)

    # If a rank has too many messages even when all are full, no threshold suffices: skip the search.
    rank_bytes = [*plan.sent.values(), *plan.received.values()]
    max_bytes = max(rank_bytes, default=0)
    if max_bytes > MAX_MESSAGES * max_message_bytes:
        min_separate_bytes = max_message_bytes

    while True:
        message_counts = _count_messages(plan, size_counts, max_message_bytes, min_separate_bytes)
        schedule = Schedule(
            phase_by_pair,
            max_message_bytes,
            max_streams,
            min_separate_bytes,
            message_counts,
        )
        if min_separate_bytes == max_message_bytes or schedule.max_messages_per_rank <= MAX_MESSAGES:
            return schedule
        min_separate_bytes = min(2 * min_separate_bytes, max_message_bytes)


def _assign_rounds(pairs: Mapping[Pair, int]) -> dict[Pair, int]:
    """Assign each pair to a round, in which a rank has at most one receiver and one sender.

    This is a greedy edge colouring of a bipartite graph. Pairs with the most bytes come first. The pairs of a
    round then have similar sizes, and no rank waits long for its peer.
    """
    # Bit n of a rank's mask: it already sends, or receives, in round n.
    send_masks: dict[int, int] = defaultdict(int)
    receive_masks: dict[int, int] = defaultdict(int)
    round_by_pair: dict[Pair, int] = {}

    # Break ties by rank: every rank must compute the same rounds.
    largest_first = sorted(pairs, key=lambda pair: (-pairs[pair], pair))
    for sender, receiver in largest_first:
        occupied_mask = send_masks[sender] | receive_masks[receiver]
        # The lowest bit that is not set.
        free_bit = ~occupied_mask & (occupied_mask + 1)
        send_masks[sender] |= free_bit
        receive_masks[receiver] |= free_bit
        round_by_pair[sender, receiver] = free_bit.bit_length() - 1
    return round_by_pair


def _max_streams(phase_by_pair: Mapping[Pair, int]) -> int:
    """Return the largest number of (sender, receiver) pairs that any rank belongs to in one phase."""
    stream_counts: Counter[tuple[int, int]] = Counter()
    for pair, phase in phase_by_pair.items():
        for rank in pair:
            stream_counts[rank, phase] += 1
    return max(stream_counts.values(), default=1)


def _count_messages(
    plan: ReshardPlan,
    size_counts: Sequence[Mapping[int, int]],
    max_message_bytes: int,
    min_separate_bytes: int,
) -> dict[Pair, int]:
    """Return the number of messages of each (sender, receiver) pair.

    A region of at least ``min_separate_bytes`` gets separate messages; smaller regions share messages.
    ``size_counts`` has one mapping for each bundle of the plan: size of a region in bytes -> number of
    regions of this size. A bundle is a set of regions that are sent together.
    """
    separate_counts: Counter[Pair] = Counter()
    shared_bytes: Counter[Pair] = Counter()
    for bundle, regions_by_size in zip(plan.bundles, size_counts, strict=True):
        # Separate messages of the large regions, and bytes of the regions that share messages.
        num_messages = 0
        num_shared_bytes = 0
        for region_bytes, count in regions_by_size.items():
            if region_bytes >= min_separate_bytes:
                num_messages += _ceil_div(region_bytes, max_message_bytes) * count
            else:
                num_shared_bytes += region_bytes * count

        for receiver, sender in bundle.senders.items():
            if sender != receiver:
                separate_counts[sender, receiver] += num_messages
                shared_bytes[sender, receiver] += num_shared_bytes

    message_counts: dict[Pair, int] = {}
    for pair in plan.pair_bytes:
        num_shared_messages = _ceil_div(shared_bytes[pair], max_message_bytes)
        message_counts[pair] = separate_counts[pair] + num_shared_messages
    return message_counts


def _ceil_div(dividend: int, divisor: int) -> int:
    """Divide two integers and round up."""
    return -(-dividend // divisor)


class PlanError(RuntimeError):
    """Error for a plan that `check_plan` rejects: a bug in the planner."""


def build_plan(
    sources: Sequence[BoxGroup],
    destinations: Sequence[BoxGroup],
    node_of: Mapping[int, int] | None = None,
) -> ReshardPlan:
    """Plan the transfer from the ranks that hold weights to the ranks that need them.

    A receiver that holds a region copies it locally. Otherwise a holder on the receiver's node sends it, or
    any holder if the node has none. ``node_of`` maps ranks to nodes. `choose_senders` selects among holders.

    Raises UncoveredError if no rank holds a needed region, and PlanError if `check_plan` rejects the result.
    """
    # Regions of a group have the same holders and receivers, so senders are chosen per group.
    groups = _group_by_ranks(compute_regions(sources, destinations))
    region_groups = []
    for group in groups:
        first_region = group[0]
        group_bytes = _total_bytes(group)
        region_groups.append(RegionGroup(first_region.holders, first_region.receivers, group_bytes))

    # Several senders may share a group: a bundle has one sender for each receiver.
    bundles: list[Bundle] = []
    shares_by_group = choose_senders(region_groups, node_of or {})
    for group, shares in zip(groups, shares_by_group, strict=True):
        bundles += _split_into_bundles(group, shares)

    # Count the bytes of each rank and pair.
    sent_bytes: Counter[int] = Counter()
    received_bytes: Counter[int] = Counter()
    local_bytes: Counter[int] = Counter()
    pair_bytes: Counter[Pair] = Counter()
    for bundle in bundles:
        for receiver, sender in bundle.senders.items():
            if sender == receiver:
                local_bytes[receiver] += bundle.bytes
            else:
                sent_bytes[sender] += bundle.bytes
                received_bytes[receiver] += bundle.bytes
                pair_bytes[sender, receiver] += bundle.bytes

    plan = ReshardPlan(
        sources=tuple(sources),
        destinations=tuple(destinations),
        bundles=tuple(bundles),
        received=dict(received_bytes),
        sent=dict(sent_bytes),
        local=dict(local_bytes),
        needed=needed_bytes(destinations),
        pair_bytes=dict(pair_bytes),
    )
    check_plan(plan)
    return plan


def check_plan(plan: ReshardPlan) -> None:
    """Check that each rank gets every needed byte once, and receives no byte that it already holds.

    Raises PlanError.
    """
    arriving_bytes: Counter[int] = Counter()
    missing_bytes: Counter[int] = Counter()
    for bundle in plan.bundles:
        region = bundle.regions[0]
        holders = set(region.holders)
        for receiver, sender in bundle.senders.items():
            if sender not in holders:
                raise PlanError(f"rank {sender} would send {region.name}, which it does not hold")
            arriving_bytes[receiver] += bundle.bytes
            if receiver not in holders:
                missing_bytes[receiver] += bundle.bytes

    # Every needed byte arrives; only bytes that the rank does not hold arrive over the wire.
    for rank, num_needed in plan.needed.items():
        num_arriving = arriving_bytes[rank]
        if num_arriving != num_needed:
            raise PlanError(f"rank {rank} needs {num_needed} bytes and would get {num_arriving}")

        num_received = plan.received.get(rank, 0)
        if num_received != missing_bytes[rank]:
            raise PlanError(f"rank {rank} would receive {num_received} bytes, not {missing_bytes[rank]}")


def _total_bytes(group: Sequence[Region]) -> int:
    """Return the bytes of all regions of a group."""
    return sum(region.bytes for region in group)


def _group_by_ranks(all_regions: Sequence[Region]) -> list[list[Region]]:
    """Group the regions with equal holders and receivers, in the order in which senders are chosen.

    Groups with the fewest holders come first, since they have the least choice of senders. Groups with more
    holders can then even out the load of the senders. Among groups with equally many holders, the largest
    come first: smaller groups can then reuse the connections of the larger groups.
    """
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in all_regions:
        # Equal tuples of ranks are one object: see `compute_regions`.
        key = (id(region.holders), id(region.receivers))
        groups.setdefault(key, []).append(region)

    return sorted(
        groups.values(),
        key=lambda group: (len(group[0].holders), -_total_bytes(group)),
    )


def _split_into_bundles(group: Sequence[Region], shares: SharesByReceiver) -> Iterator[Bundle]:
    """Split a group of regions into bundles, within which each receiver has a single sender.

    ``shares`` maps each receiver to the list of its senders, with the number of bytes that each sender sends.
    The first sender sends the first regions of the group, the next sender the regions that follow. A region
    has one sender, so the bytes of a sender are rounded to the nearest region boundary.
    """
    ends = list(itertools.accumulate(region.bytes for region in group))

    # Receiver -> index of the first region of a sender -> sender.
    sender_starts: dict[int, dict[int, int]] = {}
    for receiver, receiver_shares in shares.items():
        offset = 0
        sender_starts[receiver] = {}
        for sender, num_bytes in receiver_shares:
            index = _nearest_boundary(ends, offset)
            # If the bytes of two senders are rounded to the same boundary, the earlier sender gets no region:
            # the later one replaces it.
            if index < len(group):
                sender_starts[receiver][index] = sender
            offset += num_bytes

    # A new bundle begins at each region at which any receiver changes its sender.
    bundle_starts: set[int] = set()
    for starts in sender_starts.values():
        bundle_starts.update(starts)

    current_senders: dict[int, int] = {}
    bounds = [*sorted(bundle_starts), len(group)]
    for first, end in itertools.pairwise(bounds):
        for receiver, starts in sender_starts.items():
            if first in starts:
                current_senders[receiver] = starts[first]

        bundle_regions = tuple(group[first:end])
        yield Bundle(
            bundle_regions,
            senders=dict(current_senders),
            bytes=_total_bytes(bundle_regions),
        )


def _nearest_boundary(ends: Sequence[int], offset: int) -> int:
    """Return the number of regions before the region boundary that is nearest to a byte offset.

    ``ends``: byte at which each region ends, ascending. ``offset``: a byte before the last end.
    """
    if offset == 0:
        return 0

    # The region with this byte ends at or after it; the previous region ends before it.
    index = bisect.bisect_left(ends, offset)
    begin = 0
    if index:
        begin = ends[index - 1]
    if ends[index] - offset <= offset - begin:
        return index + 1
    return index
