"""Lay a role's ranks out along Megatron's parallel dimensions: pure arithmetic, no communicator.

Inside a role ranks are ordered tensor fastest, then context, then data, then pipeline: Megatron's
default order ``tp-cp-ep-dp-pp``. Expert dimensions cut the same ranks of one pipeline stage again:
expert-tensor fastest, then expert, then expert-data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import RoleLayout


@dataclass(frozen=True)
class ParallelLayout(RoleLayout):
    """Lay a role's ranks out; sizes that do not fit raise a UserError that names ``role``.

    Data parallelism is what the other sizes leave of the ranks.
    """

    def __post_init__(self) -> None:
        sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
        for size in sizes:
            if getattr(self, size) < 1:
                raise UserError(
                    "a parallel size must be 1 or more",
                    where=f"{self.role}.{size}",
                    expected="1 or more",
                    got=str(getattr(self, size)),
                    fix=f"set {self.role}.{size} to 1 to switch it off",
                )
        if len(set(self.ranks)) != len(self.ranks):
            raise UserError(
                "a rank appears twice in one layout",
                where=f"{self.role}.ranks",
                expected="distinct ranks",
                got=str(list(self.ranks)),
                fix="name each rank once",
            )
        self._check_product(self.tensor * self.pipeline * self.context, "tensor * pipeline * context")
        product = self.expert * self.expert_tensor * self.pipeline
        self._check_product(product, "expert * expert_tensor * pipeline")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise UserError(
                "a virtual pipeline needs a pipeline",
                where=f"{self.role}.virtual_pipeline",
                expected="1 where pipeline is 1",
                got=str(self.virtual_pipeline),
                fix=f"set {self.role}.pipeline to 2 or more, or virtual_pipeline to 1",
            )

    def _check_product(self, product: int, words: str) -> None:
        if not self.ranks or len(self.ranks) % product:
            raise UserError(
                f"{words} does not divide the number of ranks",
                where=self.role,
                expected=f"a number of ranks divisible by {product}",
                got=f"{len(self.ranks)} ranks",
                fix="change the parallel sizes or the number of processes",
            )

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

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
