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
"""Fewest bytes for which a receiver gets an additional sender: a smaller message saves no time."""
SLACK = 0.02
"""Fraction of the busiest sender's bytes that a holder may send beyond its budget, to save peers."""


@dataclass(frozen=True)
class Demand:
    """Receivers with the same possible senders, for one group of regions.

    Example: ranks 4 and 6 each need the same 100 bytes, which ranks 0 and 2 of the same node hold::

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

    Example: ``RegionGroup(holders=(0, 2), receivers=(2, 4), bytes=64)``. Rank 2 copies locally, and rank 4
    receives.
    """

    holders: Sequence[int]
    """Global ranks that hold the regions, sorted."""
    receivers: Sequence[int]
    """Global ranks that need the regions, sorted; some may be holders."""
    bytes: int
    """Bytes of the regions, counted once for all receivers."""


class Share(NamedTuple):
    """Number of a group's bytes that one sender sends to one receiver.

    Example: rank 4 gets 64 bytes from two senders, ``[Share(0, 40), Share(2, 24)]``.
    """

    sender: int
    """Global rank of the sender; the receiver itself for a local copy."""
    bytes: int
    """Number of bytes that this sender sends to the receiver."""


SharesByReceiver = dict[int, list[Share]]
"""Receiver -> its senders. The bytes of a receiver's senders add up to the bytes of the group."""
Budgets = dict[tuple[int, ...], dict[int, float]]
"""Remaining bytes that each holder should send, by set of holders: holders -> holder -> bytes.

A budget applies to all regions with exactly this set of holders."""


def choose_senders(
    groups: Sequence[RegionGroup],
    nodes: Mapping[int, int],
) -> list[SharesByReceiver]:
    """Choose the holders that send each group of regions to each receiver, and the bytes of each sender.

    ``groups`` must be sorted by the number of holders, in ascending order. ``nodes`` maps ranks to nodes;
    ranks without an entry count as one node.

    A receiver that holds the regions is its own sender. Otherwise the possible senders are the holders on the
    receiver's node, or all holders if the node has none. The best senders are peers of the receiver: holders
    that already exchange messages with it. The next best are holders with the local rank of the receiver,
    which are on the same rail of the network.
    """
    shares_by_group: list[SharesByReceiver] = []
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

        shares_by_group.append(local_shares)
        for holders, receivers in _split_by_distance(group.holders, remote_receivers, nodes):
            demand = Demand(index, receivers, holders, group.bytes)
            demands.append(demand)

    # Compute all budgets before the first choice: an even load depends on every demand.
    assignment = _Assignment(_even_budgets(demands), _local_ranks(nodes))
    for demand in demands:
        shares_by_group[demand.group].update(assignment.assign(demand))
    return shares_by_group


def _split_by_distance(
    holders: Sequence[int],
    receivers: Sequence[int],
    nodes: Mapping[int, int],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Group receivers by possible senders: the holders on their node, or all holders if the node has none.

    Returns (holders, receivers) pairs.
    """
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

    groups = []
    for node, node_receivers in receivers_by_node.items():
        near_holders = tuple(holders_by_node[node])
        groups.append((near_holders, tuple(node_receivers)))
    if remote_receivers:
        groups.append((tuple(holders), tuple(remote_receivers)))
    return groups


def _local_ranks(nodes: Mapping[int, int]) -> dict[int, int]:
    """Return the index of each rank among the ranks of its node; ``nodes`` maps a rank to its node."""
    rank_counts: Counter[int] = Counter()
    local_ranks: dict[int, int] = {}
    for rank in sorted(nodes):
        node = nodes[rank]
        local_ranks[rank] = rank_counts[node]
        rank_counts[node] += 1
    return local_ranks


def _even_budgets(demands: Sequence[Demand]) -> Budgets:
    """Compute the bytes that each holder should send to even out the load, by set of holders.

    Demands with the same holders share one budget, which any of their receivers may use.
    """
    total_bytes: Counter[tuple[int, ...]] = Counter()
    for demand in demands:
        total_bytes[demand.holders] += demand.bytes * len(demand.receivers)

    # Small sets of holders come first, since they have the least choice. Larger sets then even out the load.
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
    """Return the common load to which ``total`` raises the lowest ``loads`` (water filling)."""
    ascending_loads = sorted(loads)
    load_sum = 0.0
    level = 0.0
    for count, load in enumerate(ascending_loads, start=1):
        load_sum += load
        level = (total + load_sum) / count

        # The level does not reach the next load: this load and all higher loads stay as they are.
        if count < len(ascending_loads) and level <= ascending_loads[count]:
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
        # A transfer lasts as long as its busiest sender, so slack is a fraction of that sender's bytes.
        self._slack_bytes = SLACK * max(loads.values(), default=0.0)
        # Bytes that each holder sends beyond its budgets.
        self._excess: dict[int, float] = defaultdict(float)
        self._peers: dict[int, set[int]] = defaultdict(set)

    def assign(self, demand: Demand) -> SharesByReceiver:
        """Choose the senders of each receiver of a demand, and subtract their bytes from the budgets."""
        shares_by_receiver: SharesByReceiver = {}
        for receiver in self._order_receivers(demand):
            shares = self._choose_shares(receiver, demand)
            self._record_shares(receiver, demand, shares)
            shares_by_receiver[receiver] = shares
        return shares_by_receiver

    def _order_receivers(self, demand: Demand) -> Sequence[int]:
        """Return the receivers of a demand in the order in which their senders are chosen.

        The peers of a rank are the ranks that already send to it or receive from it.
        """
        if len(demand.holders) == 1:
            return demand.receivers

        # A budget is the number of bytes that a holder should still send. Receivers with few peers among the
        # holders come first, before other receivers use up the budgets of these peers. Receivers without a
        # peer among the holders come last, because all holders are equally good for them.
        holder_set = set(demand.holders)
        peer_counts: dict[int, float] = {}
        for rank in demand.receivers:
            num_peers = len(holder_set & self._peers[rank])
            peer_counts[rank] = num_peers if num_peers else math.inf
        return sorted(demand.receivers, key=lambda rank: (peer_counts[rank], rank))

    def _record_shares(
        self,
        receiver: int,
        demand: Demand,
        shares: Sequence[Share],
    ) -> None:
        """Register a receiver and its senders as peers, and subtract the bytes from the senders' budgets."""
        budget_by_holder = self._budgets[demand.holders]
        for sender, num_bytes in shares:
            self._peers[sender].add(receiver)
            self._peers[receiver].add(sender)

            remaining_bytes = budget_by_holder[sender] - num_bytes
            budget_by_holder[sender] = max(0.0, remaining_bytes)
            self._excess[sender] += max(0.0, -remaining_bytes)

    def _choose_shares(
        self,
        receiver: int,
        demand: Demand,
    ) -> list[Share]:
        """Choose the senders of one receiver: one holder if its budget covers all bytes, else several."""
        if len(demand.holders) == 1:
            return [Share(demand.holders[0], demand.bytes)]

        peers = self._peers[receiver]
        local_rank = self._local_ranks.get(receiver)
        budget_by_holder = self._budgets[demand.holders]

        def preference(rank: int) -> tuple[bool, bool, float, int]:
            """Return the sort key of a holder: peers first, then the same rail, then the largest budget."""
            is_other_rail = self._local_ranks.get(rank) != local_rank
            return rank not in peers, is_other_rail, -budget_by_holder[rank], rank

        # Only a single sender of all bytes may use the slack, since it saves a second message.
        candidates: list[int] = []
        for rank in demand.holders:
            available_bytes = budget_by_holder[rank] + self._slack_bytes - self._excess[rank]
            if available_bytes >= demand.bytes:
                candidates.append(rank)
        if candidates:
            sender = min(candidates, key=preference)
            return [Share(sender, demand.bytes)]

        shares, remaining_bytes = self._split_bytes(demand, peers)
        if not shares:
            sender = min(demand.holders, key=preference)
            return [Share(sender, demand.bytes)]

        # Bytes remain if budgets are rounded or below `MIN_PART_BYTES`: the first sender sends them, too.
        first = shares[0]
        shares[0] = Share(first.sender, first.bytes + remaining_bytes)
        return shares

    def _split_bytes(
        self,
        demand: Demand,
        peers: set[int],
    ) -> tuple[list[Share], int]:
        """Divide a receiver's bytes over several holders; return the shares and the remaining bytes.

        ``peers`` are the ranks that already exchange messages with the receiver.
        """
        # Prefer holders that are peers, then holders with large budgets, so that few senders are needed.
        budget_by_holder = self._budgets[demand.holders]
        holders = sorted(
            demand.holders,
            key=lambda rank: (rank not in peers, -budget_by_holder[rank], rank),
        )

        shares: list[Share] = []
        remaining_bytes = demand.bytes
        for rank in holders:
            num_bytes = min(remaining_bytes, round(budget_by_holder[rank]))
            if num_bytes >= min(remaining_bytes, MIN_PART_BYTES):
                shares.append(Share(rank, num_bytes))
                remaining_bytes -= num_bytes
            if not remaining_bytes:
                break
        return shares, remaining_bytes
