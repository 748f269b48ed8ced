"""The order of the rollout engine's ranks in which the fewest bytes of weights are received.

A colocated rank already holds a shard of the actor's weights. Which shard of the engine it needs depends on
its rank in the engine replica alone, so choosing the order is an assignment problem: ranks to ranks of a
replica, at the cost of the bytes that each pair would receive.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.shapes.traffic import SharedBytes

Costs = tuple[tuple[int, ...], ...]
"""Bytes to receive, [ranks][ranks of an engine replica]."""
LARGEST_ISLAND = 64
"""Ranks whose order is optimised together: the assignment is O(n^3). Larger islands keep their order."""


def best_rank_order(weights: SharedBytes, ranks: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """Return ``ranks`` in the order whose replicas, consecutive ranks, receive the fewest bytes of weights.

    The largest receive of any rank is minimised first, then the sum. Replicas stay inside a node where their
    size allows it: global rank r is on node r // gpus_per_node.
    """
    replica_size = len(weights.needed)
    ordered = tuple(sorted(ranks))
    if replica_size == 1 or not weights.held.keys() & set(ranks):
        return ordered

    result: list[int] = []
    solved: dict[Costs, list[int]] = {}  # many islands have the same costs
    for island in _islands(ordered, replica_size, gpus_per_node):
        if len(island) > LARGEST_ISLAND:
            result += island
            continue

        # Assign each rank of the island to a rank in a replica.
        costs = tuple(tuple(weights.lacking(rank, index) for index in range(replica_size)) for rank in island)
        if costs not in solved:
            solved[costs] = assign(costs, len(island) // replica_size)
        candidates: list[list[int]] = [[] for _ in range(replica_size)]
        for rank, rank_in_replica in zip(island, solved[costs], strict=True):
            candidates[rank_in_replica].append(rank)

        # The i-th candidates of all ranks in a replica make up the island's i-th replica.
        result += [rank for replica in zip(*candidates, strict=True) for rank in replica]
    return tuple(result)


def _islands(ranks: Sequence[int], replica_size: int, gpus_per_node: int) -> list[list[int]]:
    """Divide ranks into the smallest sets of whole nodes whose sizes are multiples of a replica's."""
    islands: list[list[int]] = [[]]
    for index, rank in enumerate(ranks):
        new_node = index and rank // gpus_per_node != ranks[index - 1] // gpus_per_node
        if new_node and len(islands[-1]) % replica_size == 0:
            islands.append([])
        islands[-1].append(rank)
    return islands


def assign(costs: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Assign each row of ``costs`` [rows][columns] to a column; each column takes ``capacity`` rows.

    Among the assignments with the smallest largest cost it returns one with the smallest sum, and keeps
    row i at column i % columns where that costs nothing. Raises ValueError for rows that do not fill the
    columns.
    """
    rows = len(costs)
    columns = len(costs[0])
    if rows != columns * capacity:
        raise ValueError(f"{rows} rows do not fill {columns} places of {capacity}")

    # Search the smallest limit on the largest cost under which an assignment exists.
    limits = sorted({cost for row in costs for cost in row})
    low = 0
    high = len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_assignable(costs, capacity, limits[middle]):
            high = middle
        else:
            low = middle + 1
    limit = limits[low]

    # Costs are scaled by more than the number of rows, so that keeping a row in its column (at most 1 per
    # row) breaks ties only; a pair above the limit costs more than any allowed assignment.
    forbidden = (sum(max(row) for row in costs) + 1) * (rows + 1)
    matrix = []
    for index, row in enumerate(costs):
        scaled = []
        for column, cost in enumerate(row):
            tie_break = index % columns != column
            if cost > limit:
                scaled.append(forbidden)
            else:
                scaled.append(cost * (rows + 1) + tie_break)
        matrix.append([cost for cost in scaled for _ in range(capacity)])

    # Each column was repeated ``capacity`` times to make the matrix square.
    return [slot // capacity for slot in _cheapest(matrix)]


def _is_assignable(costs: Sequence[Sequence[int]], capacity: int, limit: int) -> bool:
    """Return whether all rows can be assigned to columns that cost at most ``limit`` (augmenting paths)."""
    assigned: list[list[int]] = [[] for _ in costs[0]]

    def augment(row: int, visited: set[int]) -> bool:
        for column, cost in enumerate(costs[row]):
            if cost > limit or column in visited:
                continue

            visited.add(column)
            if len(assigned[column]) < capacity:
                assigned[column].append(row)
                return True

            # The column is full: move one of its rows to another column.
            for index, occupant in enumerate(assigned[column]):
                if augment(occupant, visited):
                    assigned[column][index] = row
                    return True
        return False

    return all(augment(row, set()) for row in range(len(costs)))


def _cheapest(matrix: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row in a square matrix's cheapest assignment (Kuhn-Munkres, O(n^3)).

    Rows and columns are counted from 1; column 0 stands for the row that is being inserted.
    """
    size = len(matrix)
    infinity = float("inf")
    row_price = [0] * (size + 1)
    column_price = [0] * (size + 1)
    row_of = [0] * (size + 1)
    previous = [0] * (size + 1)

    for row in range(1, size + 1):
        row_of[0] = row
        column = 0
        slack: list[float] = [infinity] * (size + 1)
        visited = [False] * (size + 1)

        # Grow the tree of cheapest alternating paths until it reaches a free column.
        while row_of[column]:
            visited[column] = True
            current = row_of[column]
            step = infinity
            next_column = 0

            # Relax the columns outside the tree, and select the one with the smallest slack.
            for candidate in range(1, size + 1):
                if visited[candidate]:
                    continue
                reduced = matrix[current - 1][candidate - 1] - row_price[current] - column_price[candidate]
                if reduced < slack[candidate]:
                    slack[candidate] = reduced
                    previous[candidate] = column
                if slack[candidate] < step:
                    step = slack[candidate]
                    next_column = candidate

            # Change the prices so that the edge to this column becomes tight.
            for candidate in range(size + 1):
                if visited[candidate]:
                    row_price[row_of[candidate]] += int(step)
                    column_price[candidate] -= int(step)
                else:
                    slack[candidate] -= step
            column = next_column

        # Flip the path: each column on it takes the row of its predecessor.
        while column:
            row_of[column] = row_of[previous[column]]
            column = previous[column]

    result = [0] * size
    for column in range(1, size + 1):
        result[row_of[column] - 1] = column - 1
    return result
