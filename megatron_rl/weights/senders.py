"""Choice of senders: which holder sends a group of regions to which receiver.

Every rank computes the same choice. Holders share the bytes evenly, and a receiver prefers holders with which
it exchanges messages anyway, since each further peer costs a connection and messages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_PART_BYTES = 2**20
"""Smallest part, in bytes, for which a receiver gets one more sender: a smaller message saves no time."""
SLACK = 0.02
"""Share of the busiest sender's bytes that a holder may send beyond its even share, to save peers."""


@dataclass(frozen=True)
class Demand:
    """Receivers of one group of regions, to which the same holders may send it.

    Example: ranks 4 and 6 each lack the same 100 bytes, which ranks 0 and 2 of their host hold::

        Demand(group=0, receivers=(4, 6), holders=(0, 2), bytes=100)
    """

    group: int
    """Index of the group of regions."""
    receivers: tuple[int, ...]
    """Global ranks, sorted; none of them holds the regions."""
    holders: tuple[int, ...]
    """Global ranks of the possible senders, sorted."""
    bytes: int
    """Bytes that each receiver needs."""


class RegionGroup(NamedTuple):
    """Regions with the same holders and the same receivers.

    Example: rank 2 of ``RegionGroup(holders=(0, 2), receivers=(2, 4), bytes=64)`` copies, rank 4 receives.
    """

    holders: Sequence[int]
    """Global ranks that hold the regions, sorted."""
    receivers: Sequence[int]
    """Global ranks that need the regions, sorted; some may be holders."""
    bytes: int
    """Bytes of the regions, counted once for all receivers."""


class Share(NamedTuple):
    """Part of a group's bytes that one sender sends to one receiver.

    Example: rank 4 gets 64 bytes from two senders, ``[Share(0, 40), Share(2, 24)]``.
    """

    sender: int
    """Global rank of the sender; equal to the receiver's for a local copy."""
    bytes: int
    """Number of bytes that this sender sends to the receiver."""


SharesByReceiver = dict[int, list[Share]]
"""Receiver -> its senders, whose bytes add up to the group's."""
Budgets = dict[tuple[int, ...], dict[int, float]]
"""Set of holders -> holder -> bytes that it should still send, of the regions with this set of holders."""


def choose_senders(
    groups: Sequence[RegionGroup],
    nodes: Mapping[int, int],
) -> list[SharesByReceiver]:
    """Return for each group the senders of each receiver, with the bytes of each sender.

    ``groups`` with the fewest holders must come first. ``nodes``: node by rank; ranks of one node count as
    near, and so do all ranks without an entry.

    A receiver that holds the regions is its own sender. Otherwise only holders on its node send, if there are
    any. Among these, ranks that are already its peers are preferred, then ranks with its local rank, which
    are on the same rail of the network.
    """
    result: list[SharesByReceiver] = []
    demands: list[Demand] = []
    for index, group in enumerate(groups):
        local_shares: SharesByReceiver = {}
        remote_receivers: list[int] = []
        holder_set = set(group.holders)
        for rank in group.receivers:
            if rank in holder_set:
                local_shares[rank] = [Share(rank, group.bytes)]
            else:
                remote_receivers.append(rank)

        result.append(local_shares)
        for holders, receivers in _split_by_distance(group.holders, remote_receivers, nodes):
            demand = Demand(index, receivers, holders, group.bytes)
            demands.append(demand)

    # Compute all budgets before the first choice: an even load depends on every demand.
    assignment = _Assignment(_even_budgets(demands), _local_ranks(nodes))
    for demand in demands:
        result[demand.group].update(assignment.assign(demand))
    return result


def _split_by_distance(
    holders: Sequence[int],
    receivers: Sequence[int],
    nodes: Mapping[int, int],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (holders, receivers) pairs: receivers choose from the holders on their node, else from all."""
    holders_by_node: dict[int | None, list[int]] = defaultdict(list)
    for rank in holders:
        holders_by_node[nodes.get(rank)].append(rank)

    # Messages inside a node do not use the network, so near holders are preferred even if they are few.
    receivers_by_node: dict[int | None, list[int]] = defaultdict(list)
    remote_receivers: list[int] = []
    for rank in receivers:
        node = nodes.get(rank)
        if node in holders_by_node:
            receivers_by_node[node].append(rank)
        else:
            remote_receivers.append(rank)

    result = []
    for node, ranks in receivers_by_node.items():
        near_holders = tuple(holders_by_node[node])
        result.append((near_holders, tuple(ranks)))
    if remote_receivers:
        result.append((tuple(holders), tuple(remote_receivers)))
    return result


def _local_ranks(nodes: Mapping[int, int]) -> dict[int, int]:
    """Return the index of each rank among the ranks of its node; ``nodes`` maps a rank to its node."""
    ranks_on_node: Counter[int] = Counter()
    result: dict[int, int] = {}
    for rank in sorted(nodes):
        node = nodes[rank]
        result[rank] = ranks_on_node[node]
        ranks_on_node[node] += 1
    return result


def _even_budgets(demands: Sequence[Demand]) -> Budgets:
    """Return for each set of holders the bytes that each holder should send, so that loads are even.

    Demands with the same holders share one budget, which any of their receivers may use.
    """
    total_bytes: Counter[tuple[int, ...]] = Counter()
    for demand in demands:
        total_bytes[demand.holders] += demand.bytes * len(demand.receivers)

    # Small sets of holders first: they have the least choice, and larger sets balance the load after them.
    loads: dict[int, float] = defaultdict(float)
    budgets: Budgets = {}
    for holders in sorted(total_bytes, key=len):
        holder_loads = [loads[rank] for rank in holders]
        level = _fill_level(holder_loads, total_bytes[holders])
        budgets[holders] = {}
        for rank in holders:
            budget = max(0.0, level - loads[rank])
            budgets[holders][rank] = budget
            loads[rank] += budget
    return budgets


def _fill_level(loads: Sequence[float], total: float) -> float:
    """Return the common level up to which ``total`` fills the lowest loads, like water in a vessel."""
    ascending = sorted(loads)
    load_sum = 0.0
    level = 0.0
    for count, load in enumerate(ascending, start=1):
        load_sum += load
        level = (total + load_sum) / count

        # The water does not reach the next load.
        if count < len(ascending) and level <= ascending[count]:
            break
    return level


class _Assignment:
    """State of the choice of senders: the peers of each rank, and the remaining budgets of holders."""

    def __init__(
        self,
        budgets: Budgets,
        local_ranks: Mapping[int, int],
    ) -> None:
        loads: dict[int, float] = defaultdict(float)
        for budget in budgets.values():
            for rank, num_bytes in budget.items():
                loads[rank] += num_bytes

        self._budgets = budgets
        self._local_ranks = local_ranks
        # A transfer lasts as long as its busiest sender, so slack is a share of that sender's bytes.
        self._slack_bytes = SLACK * max(loads.values(), default=0.0)
        # Bytes that each holder sends beyond its budgets.
        self._excess: dict[int, float] = defaultdict(float)
        self._peers: dict[int, set[int]] = defaultdict(set)

    def assign(self, demand: Demand) -> SharesByReceiver:
        """Return the senders of each receiver of a demand, and subtract their bytes from the budgets."""
        result: SharesByReceiver = {}
        for receiver in self._order_receivers(demand):
            shares = self._choose_shares(receiver, demand)
            self._record_choice(receiver, demand, shares)
            result[receiver] = shares
        return result

    def _order_receivers(self, demand: Demand) -> Sequence[int]:
        """Return the receivers in the order in which their senders are chosen."""
        if len(demand.holders) == 1:
            return demand.receivers

        # Receivers with few peers among the holders come first. Receivers without such peers come last, since
        # all holders are equally good for them.
        holder_set = set(demand.holders)
        peer_counts: dict[int, float] = {}
        for rank in demand.receivers:
            peer_counts[rank] = len(holder_set & self._peers[rank]) or math.inf
        return sorted(demand.receivers, key=lambda rank: (peer_counts[rank], rank))

    def _record_choice(
        self,
        receiver: int,
        demand: Demand,
        shares: Sequence[Share],
    ) -> None:
        """Record the peers of a choice, and the remaining budgets of its senders."""
        budget = self._budgets[demand.holders]
        for sender, num_bytes in shares:
            self._peers[sender].add(receiver)
            self._peers[receiver].add(sender)

            remaining = budget[sender] - num_bytes
            budget[sender] = max(0.0, remaining)
            self._excess[sender] += max(0.0, -remaining)

    def _choose_shares(
        self,
        receiver: int,
        demand: Demand,
    ) -> list[Share]:
        """Return one receiver's shares: from one holder whose budget permits all bytes, else from several."""
        if len(demand.holders) == 1:
            return [Share(demand.holders[0], demand.bytes)]

        peers = self._peers[receiver]
        local_rank = self._local_ranks.get(receiver)
        budget = self._budgets[demand.holders]

        def preference(rank: int) -> tuple[bool, bool, float, int]:
            is_other_rail = self._local_ranks.get(rank) != local_rank
            return rank not in peers, is_other_rail, -budget[rank], rank

        # Only a single sender of all bytes may use the slack, since it saves a second message.
        candidates: list[int] = []
        for rank in demand.holders:
            room = budget[rank] + self._slack_bytes - self._excess[rank]
            if room >= demand.bytes:
                candidates.append(rank)
        if candidates:
            sender = min(candidates, key=preference)
            return [Share(sender, demand.bytes)]

        shares, remaining = self._split_bytes(demand, peers)
        if not shares:
            sender = min(demand.holders, key=preference)
            return [Share(sender, demand.bytes)]

        # Bytes remain because budgets are rounded, or too small for a part: the first sender sends them, too.
        first = shares[0]
        shares[0] = Share(first.sender, first.bytes + remaining)
        return shares

    def _split_bytes(
        self,
        demand: Demand,
        peers: set[int],
    ) -> tuple[list[Share], int]:
        """Divide a receiver's bytes over several holders; return the shares and the bytes that remain."""
        # Current peers first, then the largest budgets, so that there are few parts.
        budget = self._budgets[demand.holders]
        holders = sorted(
            demand.holders,
            key=lambda rank: (rank not in peers, -budget[rank], rank),
        )

        shares: list[Share] = []
        remaining = demand.bytes
        for rank in holders:
            num_bytes = min(remaining, round(budget[rank]))
            if num_bytes >= min(remaining, MIN_PART_BYTES):
                shares.append(Share(rank, num_bytes))
                remaining -= num_bytes
            if not remaining:
                break
        return shares, remaining
