"""Choice of senders: which holder sends a group of regions to which receiver.

Every rank computes the same choice. Holders share the bytes evenly, and a receiver takes all that it can from
holders that it exchanges messages with anyway, since each further peer costs a connection and messages.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_PART_BYTES = 2**20
"""Fewest bytes for which a receiver gets one more sender: smaller parts would be messages without a gain."""
SLACK = 0.02
"""Share of the busiest sender's bytes that a holder may send beyond its even share, to save peers."""


@dataclass(frozen=True)
class Demand:
    """Receivers of a group of regions that choose between the same holders.

    Example: ranks 4 and 6 each lack the same 100 bytes, which ranks 0 and 2 of their host hold::

        Demand(group=0, receivers=(4, 6), holders=(0, 2), bytes=100)
    """

    group: int
    """Index of the group of regions."""
    receivers: tuple[int, ...]
    """Global ranks, sorted; none of them holds the regions."""
    holders: tuple[int, ...]
    """Global ranks to choose from, sorted."""
    bytes: int
    """Bytes that each receiver needs."""


Share = tuple[int, int]
"""A sender and the bytes that it is to send, of one receiver's part of a group."""
Budgets = dict[tuple[int, ...], dict[int, float]]
"""Set of holders -> holder -> bytes that it should still send of the regions that this set holds."""


def choose_senders(
    groups: Sequence[tuple[Sequence[int], Sequence[int], int]],
    nodes: Mapping[int, int],
) -> list[dict[int, list[Share]]]:
    """Return for each group the senders of each receiver, with the bytes of each sender.

    ``groups``: (holders, receivers, bytes of the regions once), in order of decreasing constraint.
    ``nodes``: node by rank; equal, or absent, nodes count as near.

    A receiver that holds the regions is its own sender. Otherwise holders on its node send, if there are
    any; then its present peers, then ranks with its local rank, on the same rail of the network.
    """
    result: list[dict[int, list[Share]]] = []
    demands: list[Demand] = []
    for index, (holders, receivers, num_bytes) in enumerate(groups):
        local_senders: dict[int, list[Share]] = {}
        remote_receivers: list[int] = []
        holder_set = set(holders)
        for rank in receivers:
            if rank in holder_set:
                local_senders[rank] = [(rank, num_bytes)]
            else:
                remote_receivers.append(rank)

        result.append(local_senders)
        for near_holders, near_receivers in _by_distance(holders, remote_receivers, nodes):
            demand = Demand(index, near_receivers, near_holders, num_bytes)
            demands.append(demand)

    # All loads are needed before the first choice: what is even depends on every demand.
    assignment = _Assignment(_even_shares(demands), _local_ranks(nodes))
    for demand in demands:
        result[demand.group].update(assignment.assign(demand))
    return result


def _by_distance(
    holders: Sequence[int],
    receivers: Sequence[int],
    nodes: Mapping[int, int],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (holders, receivers) pairs: receivers choose from the holders on their node, else from all."""
    holders_by_node: dict[int | None, list[int]] = defaultdict(list)
    for rank in holders:
        holders_by_node[nodes.get(rank)].append(rank)

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
    """Return the index of each rank among the ranks of its node."""
    ranks_on_node: Counter[int] = Counter()
    result: dict[int, int] = {}
    for rank in sorted(nodes):
        node = nodes[rank]
        result[rank] = ranks_on_node[node]
        ranks_on_node[node] += 1
    return result


def _even_shares(demands: Sequence[Demand]) -> Budgets:
    """Return for each set of holders the bytes that each holder should send, so that loads are even.

    The demands of equal holders share one budget: which receiver takes whose share is free.
    """
    total_bytes: Counter[tuple[int, ...]] = Counter()
    for demand in demands:
        total_bytes[demand.holders] += demand.bytes * len(demand.receivers)

    # Small sets of holders first: they have the least choice, and larger sets balance the load after them.
    loads: dict[int, float] = defaultdict(float)
    shares: Budgets = {}
    for holders in sorted(total_bytes, key=len):
        level = _fill_level([loads[rank] for rank in holders], total_bytes[holders])
        shares[holders] = {}
        for rank in holders:
            share = max(0.0, level - loads[rank])
            shares[holders][rank] = share
            loads[rank] += share
    return shares


def _fill_level(loads: Sequence[float], total: float) -> float:
    """Return the common level up to which ``total`` fills the lowest loads, like water in a vessel."""
    ascending = sorted(loads)
    filled = 0.0
    level = 0.0
    for count, load in enumerate(ascending, start=1):
        filled += load
        level = (total + filled) / count

        # The water does not reach the next load.
        if count < len(ascending) and level <= ascending[count]:
            break
    return level


class _Assignment:
    """Senders chosen so far: the peers of each rank, and what holders sent beyond their shares."""

    def __init__(self, shares: Budgets, local_ranks: Mapping[int, int]) -> None:
        loads: dict[int, float] = defaultdict(float)
        for budget in shares.values():
            for rank, share in budget.items():
                loads[rank] += share

        self._shares = shares
        self._local_ranks = local_ranks
        # A transfer lasts as long as its busiest sender, so slack is measured against that one.
        self._slack_bytes = SLACK * max(loads.values(), default=0.0)
        # Bytes that each holder sent beyond its shares.
        self._excess: dict[int, float] = defaultdict(float)
        self._peers: dict[int, set[int]] = defaultdict(set)

    def assign(self, demand: Demand) -> dict[int, list[Share]]:
        """Return the senders of each receiver of a demand."""
        receivers = demand.receivers
        if len(demand.holders) == 1:
            sender = demand.holders[0]
            return {rank: self._book(rank, demand, [(sender, demand.bytes)]) for rank in receivers}

        # A receiver with few peers among the holders chooses before one without any, which may take all.
        holder_set = set(demand.holders)
        peer_counts: dict[int, float] = {}
        for rank in receivers:
            peer_counts[rank] = len(holder_set & self._peers[rank]) or math.inf

        result: dict[int, list[Share]] = {}
        for rank in sorted(receivers, key=lambda rank: (peer_counts[rank], rank)):
            senders = self._choose(rank, demand)
            result[rank] = self._book(rank, demand, senders)
        return result

    def _book(self, receiver: int, demand: Demand, senders: list[Share]) -> list[Share]:
        """Subtract the bytes of a receiver's senders from their budgets, and return the senders."""
        shares = self._shares[demand.holders]
        for sender, num_bytes in senders:
            self._peers[sender].add(receiver)
            self._peers[receiver].add(sender)

            remaining = shares[sender] - num_bytes
            shares[sender] = max(0.0, remaining)
            self._excess[sender] += max(0.0, -remaining)
        return senders

    def _choose(self, receiver: int, demand: Demand) -> list[Share]:
        """Return one holder with room for all bytes of a receiver, else as few as have room together."""
        peers = self._peers[receiver]
        local_rank = self._local_ranks.get(receiver)
        shares = self._shares[demand.holders]

        def preference(rank: int) -> tuple[bool, bool, float, int]:
            is_other_rail = self._local_ranks.get(rank) != local_rank
            return (rank not in peers, is_other_rail, -shares[rank], rank)

        # Slack counts for one sender of all bytes: it saves the second sender.
        candidates: list[int] = []
        for rank in demand.holders:
            room = shares[rank] + self._slack_bytes - self._excess[rank]
            if room >= demand.bytes:
                candidates.append(rank)
        if candidates:
            sender = min(candidates, key=preference)
            return [(sender, demand.bytes)]

        # Several senders: present peers first, then the largest shares, so that there are few parts.
        senders: list[Share] = []
        remaining = demand.bytes
        for rank in sorted(demand.holders, key=lambda rank: (rank not in peers, -shares[rank], rank)):
            num_bytes = min(remaining, round(shares[rank]))
            if num_bytes >= min(remaining, MIN_PART_BYTES):
                senders.append((rank, num_bytes))
                remaining -= num_bytes
            if not remaining:
                return senders

        # The first sender takes the rest: rounded bytes, and shares that are too small for a part.
        if not senders:
            return [(min(demand.holders, key=preference), demand.bytes)]
        first_sender, first_bytes = senders[0]
        return [(first_sender, first_bytes + remaining), *senders[1:]]
