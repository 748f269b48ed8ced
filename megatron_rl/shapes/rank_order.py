"""The order of the rollout engine's ranks that leaves the fewest bytes to receive."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.shapes.traffic import SharedBytes

Costs = tuple[tuple[int, ...], ...]
"""Bytes by rank, then by place."""
LARGEST_ISLAND = 64
"""Ranks whose order is optimised together; larger islands keep the order they were given."""


def best_rank_order(shared: SharedBytes, ranks: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """Return ``ranks`` in the order whose replicas, consecutive ranks, lack the fewest bytes of weights.

    The largest receive of any rank is minimised first, then the sum. Replicas stay inside a node where their
    size allows it: global rank r is on node r // gpus_per_node.
    """
    places, ordered = len(shared.needed), tuple(sorted(ranks))
    if places == 1 or not shared.held.keys() & set(ranks):
        return ordered
    result: list[int] = []
    best: dict[Costs, list[int]] = {}  # many islands are alike
    for island in _islands(ordered, places, gpus_per_node):
        if len(island) > LARGEST_ISLAND:
            result += island
            continue
        costs = tuple(tuple(shared.lacking(rank, place) for place in range(places)) for rank in island)
        if costs not in best:
            best[costs] = assign(costs, len(island) // places)
        by_place: list[list[int]] = [[] for _ in range(places)]
        for rank, place in zip(island, best[costs], strict=True):
            by_place[place].append(rank)
        result += [rank for replica in zip(*by_place, strict=True) for rank in replica]
    return tuple(result)


def _islands(ranks: Sequence[int], places: int, gpus_per_node: int) -> list[list[int]]:
    """Divide ranks into the smallest sets of whole nodes whose sizes are multiples of a replica's."""
    islands: list[list[int]] = [[]]
    for index, rank in enumerate(ranks):
        new_node = index and rank // gpus_per_node != ranks[index - 1] // gpus_per_node
        if new_node and len(islands[-1]) % places == 0:
            islands.append([])
        islands[-1].append(rank)
    return islands


def assign(costs: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Return a place for every row of ``costs`` [rows][places]; each place takes ``capacity`` rows.

    Among the assignments with the smallest largest cost it returns one with the smallest sum, and keeps
    row i at place i % places where that costs nothing.
    """
    rows, places = len(costs), len(costs[0])
    if rows != places * capacity:
        raise ValueError(f"{rows} rows do not fill {places} places of {capacity}")
    limits = sorted({cost for row in costs for cost in row})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, capacity, limits[middle]):
            high = middle
        else:
            low = middle + 1
    limit = limits[low]
    forbidden = (sum(max(row) for row in costs) + 1) * (rows + 1)
    matrix = []
    for index, row in enumerate(costs):
        scaled = [
            forbidden if cost > limit else cost * (rows + 1) + (index % places != place)
            for place, cost in enumerate(row)
        ]
        matrix.append([cost for cost in scaled for _ in range(capacity)])
    return [slot // capacity for slot in _cheapest(matrix)]


def _fits(costs: Sequence[Sequence[int]], capacity: int, limit: int) -> bool:
    """Say whether every row finds a place that costs at most ``limit`` (augmenting paths)."""
    taken: list[list[int]] = [[] for _ in costs[0]]

    def place(row: int, seen: set[int]) -> bool:
        for candidate, cost in enumerate(costs[row]):
            if cost > limit or candidate in seen:
                continue
            seen.add(candidate)
            if len(taken[candidate]) < capacity:
                taken[candidate].append(row)
                return True
            for index, other in enumerate(taken[candidate]):
                if place(other, seen):
                    taken[candidate][index] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(costs)))


def _cheapest(matrix: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row in a square matrix's cheapest assignment (Kuhn-Munkres, O(n^3))."""
    size = len(matrix)
    infinity = float("inf")
    row_price, column_price = [0] * (size + 1), [0] * (size + 1)
    row_of, previous = [0] * (size + 1), [0] * (size + 1)
    for row in range(1, size + 1):
        row_of[0], column = row, 0
        slack: list[float] = [infinity] * (size + 1)
        used = [False] * (size + 1)
        while row_of[column]:
            used[column] = True
            current, step, following = row_of[column], infinity, 0
            for other in range(1, size + 1):
                if used[other]:
                    continue
                reduced = matrix[current - 1][other - 1] - row_price[current] - column_price[other]
                if reduced < slack[other]:
                    slack[other], previous[other] = reduced, column
                if slack[other] < step:
                    step, following = slack[other], other
            for other in range(size + 1):
                if used[other]:
                    row_price[row_of[other]] += int(step)
                    column_price[other] -= int(step)
                else:
                    slack[other] -= step
            column = following
        while column:
            row_of[column] = row_of[previous[column]]
            column = previous[column]
    result = [0] * size
    for column in range(1, size + 1):
        result[row_of[column] - 1] = column - 1
    return result
