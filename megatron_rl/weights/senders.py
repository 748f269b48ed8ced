"""Choice of senders: which holder sends a group of regions to which receiver.

Every rank computes the same choice. Holders share the bytes evenly, and a receiver takes all that it can from
holders that it exchanges messages with anyway, since each further peer costs a connection and messages.
"""

from __future__ import annotations

import math
from collections import defaultdict
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


def choose_senders(
    groups: Sequence[tuple[Sequence[int], Sequence[int], int]], nodes: Mapping[int, int]
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
        holder_set = set(holders)
        lacking = [receiver for receiver in receivers if receiver not in holder_set]
        result.append({rank: [(rank, num_bytes)] for rank in receivers if rank in holder_set})
        for near_holders, near_receivers in _by_distance(holders, lacking, nodes):
            demands.append(Demand(index, near_receivers, near_holders, num_bytes))

    shares = _even_shares(demands)
    assignment = _Assignment(shares, _local_ranks(nodes))
    for demand in demands:
        result[demand.group].update(assignment.assign(demand))
    return result


def _by_distance(
    holders: Sequence[int], receivers: Sequence[int], nodes: Mapping[int, int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return receivers by the holders that they choose from: those on their node, else all."""
    holders_by_node: dict[int | None, list[int]] = defaultdict(list)
    for rank in holders:
        holders_by_node[nodes.get(rank)].append(rank)

    receivers_by_node: dict[int | None, list[int]] = defaultdict(list)
    remote: list[int] = []
    for rank in receivers:
        node = nodes.get(rank)
        chosen = receivers_by_node[node] if node in holders_by_node else remote
        chosen.append(rank)

    near = [(tuple(holders_by_node[node]), tuple(ranks)) for node, ranks in receivers_by_node.items()]
    return [*near, (tuple(holders), tuple(remote))] if remote else near


def _local_ranks(nodes: Mapping[int, int]) -> dict[int, int]:
    """Return the index of each rank among the ranks of its node."""
    count: dict[int, int] = defaultdict(int)
    result: dict[int, int] = {}
    for rank in sorted(nodes):
        result[rank] = count[nodes[rank]]
        count[nodes[rank]] += 1
    return result


def _even_shares(demands: Sequence[Demand]) -> dict[tuple[int, ...], dict[int, float]]:
    """Return for each set of holders the bytes that each holder should send, so that loads are even.

    The demands of equal holders share one budget: which receiver takes whose share is free.
    """
    totals: dict[tuple[int, ...], int] = defaultdict(int)
    for demand in demands:
        totals[demand.holders] += demand.bytes * len(demand.receivers)

    loads: dict[int, float] = defaultdict(float)
    shares: dict[tuple[int, ...], dict[int, float]] = {}
    for holders, total in sorted(totals.items(), key=lambda item: len(item[0])):
        # Fill the least loaded holders up to a common level, like water in a vessel.
        ordered = sorted(holders, key=lambda rank: (loads[rank], rank))
        filled = 0.0
        level = 0.0
        for index, rank in enumerate(ordered, 1):
            filled += loads[rank]
            level = (total + filled) / index
            if index == len(ordered) or level <= loads[ordered[index]]:
                break

        shares[holders] = {rank: max(0.0, level - loads[rank]) for rank in holders}
        for rank, share in shares[holders].items():
            loads[rank] += share
    return shares


class _Assignment:
    """Senders chosen so far: the peers of each rank, and what holders sent beyond their shares."""

    def __init__(
        self, shares: dict[tuple[int, ...], dict[int, float]], local_ranks: Mapping[int, int]
    ) -> None:
        loads: dict[int, float] = defaultdict(float)
        for budget in shares.values():
            for rank, share in budget.items():
                loads[rank] += share

        self._shares = shares
        self._slack_bytes = SLACK * max(loads.values(), default=0.0)
        self._local_ranks = local_ranks
        self._excess: dict[int, float] = defaultdict(float)
        self._peers: dict[int, set[int]] = defaultdict(set)

    def assign(self, demand: Demand) -> dict[int, list[Share]]:
        """Return the senders of each receiver of a demand."""
        # A receiver with few peers among the holders chooses before one that may take any of them.
        receivers = demand.receivers
        if len(demand.holders) > 1:
            holder_set = set(demand.holders)
            counts = {rank: len(holder_set & self._peers[rank]) or math.inf for rank in receivers}
            receivers = tuple(sorted(receivers, key=lambda rank: (counts[rank], rank)))
        return {receiver: self._senders(receiver, demand) for receiver in receivers}

    def _senders(self, receiver: int, demand: Demand) -> list[Share]:
        if len(demand.holders) == 1:
            chosen = [(demand.holders[0], demand.bytes)]
        else:
            chosen = self._split(receiver, demand)

        shares = self._shares[demand.holders]
        for sender, num_bytes in chosen:
            self._peers[sender].add(receiver)
            self._peers[receiver].add(sender)
            remaining = shares[sender] - num_bytes
            self._excess[sender] += max(0.0, -remaining)
            shares[sender] = max(0.0, remaining)
        return chosen

    def _split(self, receiver: int, demand: Demand) -> list[Share]:
        """Return one holder with room for all bytes of a receiver, else as few as have room together."""
        peers = self._peers[receiver]
        local_rank = self._local_ranks.get(receiver)
        shares = self._shares[demand.holders]

        def preference(rank: int) -> tuple[bool, bool, float, int]:
            is_other_rail = self._local_ranks.get(rank) != local_rank
            return (rank not in peers, is_other_rail, -shares[rank], rank)

        # Slack counts for whole parts alone: it saves a second sender.
        with_room = [
            rank
            for rank in demand.holders
            if shares[rank] + self._slack_bytes - self._excess[rank] >= demand.bytes
        ]
        if with_room:
            return [(min(with_room, key=preference), demand.bytes)]

        chosen: list[Share] = []
        missing = demand.bytes
        for rank in sorted(demand.holders, key=lambda rank: (rank not in peers, -shares[rank], rank)):
            num_bytes = min(missing, round(shares[rank]))
            if num_bytes >= min(missing, MIN_PART_BYTES):
                chosen.append((rank, num_bytes))
                missing -= num_bytes
            if not missing:
                return chosen

        # The first sender takes the rest: rounded bytes, and shares that are too small for a part.
        if not chosen:
            return [(min(demand.holders, key=preference), demand.bytes)]
        sender, num_bytes = chosen[0]
        return [(sender, num_bytes + missing), *chosen[1:]]
