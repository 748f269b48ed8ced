"""The parallel layout of a role: its ranks along Megatron's dimensions, without any communicator.

One formula maps a rank to its coordinates: the ranks of a role are ordered tensor fastest, then context,
then data, then pipeline, which is Megatron's default order ``tp-cp-ep-dp-pp``. The expert dimensions divide
the same ranks of one pipeline stage a second time: expert-tensor fastest, then expert, then expert-data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.errors import UserError

SHORT_NAMES = {
    "tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "context": "cp",
    "expert": "ep", "expert_tensor": "etp", "data": "dp",
}  # fmt: skip
"""Size of a layout -> its usual abbreviation."""
_PROCESS_GROUPS = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data",),
    "pipeline": ("pipeline",),
    "model": ("tensor", "pipeline"),
    "data_context": ("data", "context"),
    "tensor_context": ("tensor", "context"),
    "tensor_data_context": ("tensor", "data", "context"),
    # Expert layers divide the same ranks by the expert dimensions.
    "expert": ("expert",),
    "expert_tensor": ("expert_tensor",),
    "expert_data": ("expert_data",),
    "expert_tensor_and_expert": ("expert_tensor", "expert"),
    "expert_model": ("expert_tensor", "expert", "pipeline"),
}
"""Name of the process groups of a model -> dimensions that they span."""
LISTED_RANKS = 8
"""Ranks that an error lists before it abbreviates."""


class Coordinates(NamedTuple):
    """Coordinates of a rank in the layout of its role, each counted from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of a role's ranks: the parallel sizes; data parallelism is the quotient of ranks and sizes.

    Sizes that do not fit together are accepted: `problems` lists the errors, `checked` raises the first.

    >>> layout = ParallelLayout(tuple(range(8)), tensor=2, pipeline=2)
    >>> layout.data, layout.coordinates(5)
    (2, Coordinates(tensor=1, context=0, data=0, pipeline=1))
    """

    ranks: tuple[int, ...]
    """Global ranks of the role, in the layout's order."""
    tensor: int = 1
    """Tensor-parallel size."""
    pipeline: int = 1
    """Number of pipeline stages."""
    virtual_pipeline: int = 1
    """Model chunks of each stage; above 1 the pipeline schedule is interleaved."""
    context: int = 1
    """Context-parallel size: ranks that share the tokens of a sequence."""
    expert: int = 1
    """Expert-parallel size: ranks over which the routed experts are distributed."""
    expert_tensor: int = 1
    """Tensor-parallel size inside each routed expert."""
    sequence_parallel: bool = False
    """Activations between layers are sharded over the tensor-parallel ranks by tokens."""
    path: str = "layout"
    """Configuration path that errors name."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def model_ranks(self) -> int:
        """Return the ranks of one model replica: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    @property
    def token_shards(self) -> int:
        """Return the number of ranks over which sequence parallelism shards the tokens between layers."""
        if not self.sequence_parallel:
            return 1
        return self.tensor

    @property
    def data(self) -> int:
        """Return the data-parallel size."""
        return self.size // self.model_ranks

    @property
    def expert_data(self) -> int:
        """Return the number of replicas of each expert shard."""
        return max(1, self.size // (self.expert * self.expert_tensor * self.pipeline))

    def checked(self) -> ParallelLayout:
        """Return the layout itself; raises the first of its `problems`."""
        for error in problems(self):
            raise error
        return self

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank of this role."""
        # The inverse of `rank_of`: tensor varies fastest, pipeline slowest.
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

        Dimensions are ``tensor context data pipeline`` or, for the expert division of the same ranks,
        ``expert_tensor expert expert_data pipeline``; the two sets do not mix. Ranks inside a group
        keep the layout's order.
        """
        dense = [("tensor", self.tensor), ("context", self.context), ("data", self.data)]
        sparse = [
            ("expert_tensor", self.expert_tensor),
            ("expert", self.expert),
            ("expert_data", self.expert_data),
        ]

        # ``pipeline`` is in both grids: only the other names select one.
        grid = dense
        if {name for name, _ in sparse} & set(dimensions):
            grid = sparse
        return _slices(self.ranks, [*grid, ("pipeline", self.pipeline)], dimensions)

    def process_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the rank groups that a trained or scoring model communicates in, by name.

        The groups of one name have no rank in common. Different names may have equal groups, which share one
        communicator.
        """
        groups = {name: self.groups(*dimensions) for name, dimensions in _PROCESS_GROUPS.items()}
        groups["all"] = [self.ranks]

        # The first and the last stage of a pipeline share tied embeddings; without stages they are one rank.
        groups["embedding"] = [
            (ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in groups["pipeline"]
        ]
        return groups

    def outputs(self) -> tuple[int, ...]:
        """Return for each data-parallel replica the one rank that holds the model's outputs."""
        last_stage = self.pipeline - 1
        return tuple(self.rank_of(data=data, pipeline=last_stage) for data in range(self.data))

    def words(self, copies: str = "data") -> str:
        """Format the layout as ``tensor 2 x pipeline 2 x data 4``, with ``copies`` for the word "data"."""
        sizes = [
            ("tensor", self.tensor),
            ("context", self.context),
            ("pipeline", self.pipeline),
            (copies, self.data),
        ]
        return _product(sizes, always=("tensor", copies))

    def short_words(self) -> str:
        """Format the layout as ``TP2 PP2 DP4``: TP and DP always, others above 1, never expert-tensor."""
        terms = []
        for name, abbreviation in SHORT_NAMES.items():
            size = getattr(self, name)
            if name in ("tensor", "data") or (size > 1 and name != "expert_tensor"):
                terms.append(f"{abbreviation.upper()}{size}")
        return " ".join(terms)


def _slices(
    ranks: Sequence[int], grid: list[tuple[str, int]], dimensions: Sequence[str]
) -> list[tuple[int, ...]]:
    """Group ranks by their coordinates outside ``dimensions``; ``grid`` is (name, size), fastest first."""
    groups: dict[tuple[int, ...], list[int]] = {}

    for position, rank in enumerate(ranks):
        # The coordinates are the digits of the position, the fastest dimension first.
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
    """Return the errors of a layout: sizes, ranks, and their fit to the number of processes.

    ``world_size`` is the number of processes, ``smallest_world`` the smallest number of processes that every
    role's sizes divide; None for an unknown one.
    """
    # The later rules divide by the sizes and by the number of ranks, so these must be valid first.
    errors = _size_problems(layout) + _rank_problems(layout, world_size)
    if errors:
        return errors

    # A wrong number of ranks is one error: indivisible experts are reported only if the model's ranks divide.
    path = layout.path
    errors = _copy_problems(layout, smallest_world)
    product = layout.expert * layout.expert_tensor * layout.pipeline
    if not errors and layout.size % product:
        errors.append(
            UserError(
                f"expert {layout.expert} x expert_tensor {layout.expert_tensor} x pipeline {layout.pipeline} "
                f"= {product} does not divide {_count_ranks(layout)}",
                where=f"{path}.expert",
                expected=f"a number of ranks divisible by {product}, the ranks of one copy of the experts",
                got=_count_ranks(layout),
                fix=f"lower {path}.expert or {path}.expert_tensor",
            )
        )

    # Sizes that presuppose another one.
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
    """Return an error for each size below 1."""
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
    """Return the errors of an empty list of ranks, of ranks outside the job, and of duplicates."""
    key = f"{layout.path}.ranks"
    if not layout.ranks:
        return [
            UserError(
                f"{layout.path} has no ranks",
                where=key,
                expected="at least one rank",
                got="an empty list",
                fix=f"name ranks, or remove {key} to use every rank",
            )
        ]

    errors = []
    invalid = [rank for rank in layout.ranks if rank < 0 or (world_size is not None and rank >= world_size)]
    if invalid:
        upper_bound = ""
        if world_size is not None:
            upper_bound = f" to {world_size - 1}: the job has {world_size} processes"
        ellipsis = ""
        if len(invalid) > LISTED_RANKS:
            ellipsis = " ..."
        errors.append(
            UserError(
                f"{layout.path} uses ranks that do not exist",
                where=key,
                expected=f"ranks from 0{upper_bound}",
                got=", ".join(map(str, invalid[:LISTED_RANKS])) + ellipsis,
                fix=f"start at least {max(invalid) + 1} processes, or name other ranks",
            )
        )

    counts = Counter(layout.ranks)
    duplicates = sorted(rank for rank, count in counts.items() if count > 1)
    if duplicates:
        errors.append(
            UserError(
                f"{layout.path} names a rank twice",
                where=key,
                expected="each rank once",
                got=f"twice: {', '.join(map(str, duplicates[:LISTED_RANKS]))}",
                fix="name each rank once",
            )
        )
    return errors


def _copy_problems(layout: ParallelLayout, smallest_world: int | None) -> list[UserError]:
    """Return the error of a number of ranks that is no multiple of a model replica's."""
    product = layout.model_ranks
    if layout.size % product == 0:
        return []

    if product == layout.tensor:
        # Tensor parallelism alone: the largest size that divides the ranks is a complete fix.
        sizes_text = f"tensor {product}"
        key = f"{layout.path}.tensor"
        choice = f"set {key} to {math.gcd(product, layout.size)}"
    else:
        sizes = [("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context)]
        sizes_text = f"{_product(sizes, always=('tensor', 'pipeline'))} = {product}"
        key = layout.path
        choice = f"choose sizes whose product divides {layout.size}"

    return [
        UserError(
            f"{sizes_text} does not divide {_count_ranks(layout)}",
            where=key,
            expected=f"a number of ranks divisible by {product}, the ranks of one copy of the model",
            got=_count_ranks(layout),
            fix=f"start {smallest_world or product} processes or a multiple of it, or {choice}",
        )
    ]


def _count_ranks(layout: ParallelLayout) -> str:
    """Format the number of ranks, as in ``1 rank`` and ``8 ranks``."""
    if layout.size == 1:
        return "1 rank"
    return f"{layout.size} ranks"


def _product(sizes: Sequence[tuple[str, int]], always: Sequence[str] = ()) -> str:
    """Format named sizes as a product; a size of 1 appears only under a name in ``always``."""
    return " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name in always)
