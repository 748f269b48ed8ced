"""Lay a role's ranks out along Megatron's parallel dimensions: pure arithmetic, no communicator.

Inside a role ranks are ordered tensor fastest, then context, then data, then pipeline: Megatron's
default order ``tp-cp-ep-dp-pp``. Expert dimensions cut the same ranks of one pipeline stage again:
expert-tensor fastest, then expert, then expert-data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.errors import UserError

SHORT_NAMES = {
    "tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "context": "cp",
    "expert": "ep", "expert_tensor": "etp", "data": "dp",
}  # fmt: skip
"""Size of a layout -> its usual abbreviation."""


class Coordinates(NamedTuple):
    """Where a rank stands in its role's layout."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class ParallelLayout:
    """Lay a role's ranks out; data parallelism is what the other sizes leave of the ranks.

    ``path`` is the configuration path that errors name. Sizes that do not fit together are kept as they
    are: `problems` lists what is wrong with them, `checked` refuses them.
    """

    ranks: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    path: str = "layout"

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def model_ranks(self) -> int:
        """Return how many ranks hold one copy of the model's work."""
        return self.tensor * self.pipeline * self.context

    @property
    def token_shards(self) -> int:
        """Return over how many tensor ranks tokens are cut between layers: by sequence parallelism alone."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def data(self) -> int:
        """Return the number of data-parallel copies."""
        return self.size // self.model_ranks

    @property
    def expert_data(self) -> int:
        """Return the number of copies of each expert shard."""
        return max(1, self.size // (self.expert * self.expert_tensor * self.pipeline))

    def checked(self) -> ParallelLayout:
        """Return the layout itself; raises the first of its `problems`."""
        for error in problems(self):
            raise error
        return self

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a global rank of this role stands."""
        index = self.ranks.index(rank)
        index, tensor = divmod(index, self.tensor)
        index, context = divmod(index, self.context)
        pipeline, data = divmod(index, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def rank_of(self, tensor: int = 0, context: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """Return the global rank at these coordinates."""
        index = ((pipeline * self.data + data) * self.context + context) * self.tensor + tensor
        return self.ranks[index]

    def groups(self, *dimensions: str) -> list[tuple[int, ...]]:
        """Return the rank groups that span the named dimensions and agree in all others.

        Dimensions are ``tensor context data pipeline`` or, for the expert cut of the same ranks,
        ``expert_tensor expert expert_data pipeline``; the two sets do not mix. Ranks inside a group
        keep the layout's order.
        """
        dense = [("tensor", self.tensor), ("context", self.context), ("data", self.data)]
        sparse = [("expert_tensor", self.expert_tensor), ("expert", self.expert)]
        sparse.append(("expert_data", self.expert_data))
        names = {name for name, _ in sparse}
        grid = (sparse if names & set(dimensions) else dense) + [("pipeline", self.pipeline)]
        return _slices(self.ranks, grid, dimensions)

    def outputs(self) -> tuple[int, ...]:
        """Return for each data-parallel replica the one rank that holds the model's outputs."""
        last = self.pipeline - 1
        return tuple(self.rank_of(data=data, pipeline=last) for data in range(self.data))

    def words(self, copies: str = "data") -> str:
        """Return the layout as ``tensor 2 x pipeline 2 x data 4``, with ``copies`` for the word "data"."""
        sizes = [("tensor", self.tensor), ("context", self.context), ("pipeline", self.pipeline)]
        sizes.append((copies, self.data))
        return _product(sizes, shown=("tensor", copies))

    def short_words(self) -> str:
        """Return the layout as ``TP2 PP2 DP4``, leaving out what is 1; experts are taken to be whole."""
        sizes = {short: getattr(self, name) for name, short in SHORT_NAMES.items() if name != "expert_tensor"}
        shown = (
            f"{short.upper()}{size}" for short, size in sizes.items() if size > 1 or short in ("tp", "dp")
        )
        return " ".join(shown)


def _slices(
    ranks: Sequence[int], grid: list[tuple[str, int]], dimensions: Sequence[str]
) -> list[tuple[int, ...]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(ranks):
        key = []
        for name, size in grid:
            position, coordinate = divmod(position, size)
            if name not in dimensions:
                key.append(coordinate)
        groups.setdefault(tuple(key), []).append(rank)
    return [tuple(group) for group in groups.values()]


def problems(
    layout: ParallelLayout, world_size: int | None = None, smallest_world: int | None = None
) -> list[UserError]:
    """Return everything that is wrong between a layout's sizes, its ranks and the number of processes.

    ``smallest_world`` is the smallest number of processes that every role's sizes divide, where it is known.
    """
    errors = _size_problems(layout) + _rank_problems(layout, world_size)
    if errors:
        return errors
    path = layout.path
    errors = _copy_problems(layout, smallest_world)
    product = layout.expert * layout.expert_tensor * layout.pipeline
    if not errors and layout.size % product:
        errors.append(
            UserError(
                f"expert {layout.expert} x expert_tensor {layout.expert_tensor} x pipeline {layout.pipeline} "
                f"= {product} does not divide {_ranks(layout)}",
                where=f"{path}.expert",
                expected=f"a number of ranks divisible by {product}, the ranks of one copy of the experts",
                got=_ranks(layout),
                fix=f"lower {path}.expert or {path}.expert_tensor",
            )
        )
    if layout.virtual_pipeline > 1 and layout.pipeline == 1:
        errors.append(
            UserError(
                "a virtual pipeline needs a pipeline",
                where=f"{path}.virtual_pipeline",
                expected="1, since pipeline is 1",
                got=str(layout.virtual_pipeline),
                fix=f"set {path}.pipeline to 2 or more, or virtual_pipeline to 1",
            )
        )
    if layout.sequence_parallel and layout.tensor == 1:
        errors.append(
            UserError(
                "sequence parallelism needs tensor parallelism",
                where=f"{path}.sequence_parallel",
                expected="false, since tensor is 1",
                got="true",
                fix=f"remove {path}.sequence_parallel: it is derived from tensor",
            )
        )
    return errors


def _size_problems(layout: ParallelLayout) -> list[UserError]:
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    return [
        UserError(
            "a parallel size must be 1 or more",
            where=f"{layout.path}.{name}",
            expected="1 or more",
            got=str(getattr(layout, name)),
            fix=f"set {layout.path}.{name} to 1 to switch it off",
        )
        for name in sizes
        if getattr(layout, name) < 1
    ]


def _rank_problems(layout: ParallelLayout, world_size: int | None) -> list[UserError]:
    where, ranks, errors = f"{layout.path}.ranks", layout.ranks, []
    if not ranks:
        return [
            UserError(
                f"{layout.path} has no ranks",
                where=where,
                expected="at least one rank",
                got="an empty list",
                fix=f"name ranks, or remove {where} to use every rank",
            )
        ]
    outside = [rank for rank in ranks if rank < 0 or (world_size is not None and rank >= world_size)]
    if outside:
        count = "" if world_size is None else f" to {world_size - 1}: the job has {world_size} processes"
        errors.append(
            UserError(
                f"{layout.path} uses ranks that do not exist",
                where=where,
                expected=f"ranks from 0{count}",
                got=", ".join(map(str, outside[:8])) + (" ..." if len(outside) > 8 else ""),
                fix=f"start at least {max(outside) + 1} processes, or name other ranks",
            )
        )
    seen: set[int] = set()
    twice = sorted({rank for rank in ranks if rank in seen or seen.add(rank)})
    if twice:
        errors.append(
            UserError(
                f"{layout.path} names a rank twice",
                where=where,
                expected="each rank once",
                got=f"twice: {', '.join(map(str, twice[:8]))}",
                fix="name each rank once",
            )
        )
    return errors


def _copy_problems(layout: ParallelLayout, smallest_world: int | None) -> list[UserError]:
    count, product = layout.size, layout.model_ranks
    if count % product == 0:
        return []
    path, fitting = layout.path, smallest_world or product
    if product == layout.tensor:
        words, where = f"tensor {product}", f"{path}.tensor"
        choice = f"set {where} to {math.gcd(product, count)}"
    else:
        sizes = [("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context)]
        words, where = f"{_product(sizes, shown=('tensor', 'pipeline'))} = {product}", path
        choice = f"choose sizes whose product divides {count}"
    return [
        UserError(
            f"{words} does not divide {_ranks(layout)}",
            where=where,
            expected=f"a number of ranks divisible by {product}, the ranks of one copy of the model",
            got=_ranks(layout),
            fix=f"start {fitting} processes or a multiple of it, or {choice}",
        )
    ]


def _ranks(layout: ParallelLayout) -> str:
    return f"{layout.size} rank{'' if layout.size == 1 else 's'}"


def _product(sizes: Sequence[tuple[str, int]], shown: Sequence[str] = ()) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name in shown)
