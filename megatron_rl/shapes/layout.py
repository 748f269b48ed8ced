"""The ranks of a role and how they are cut, with every default filled in: numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.config.schema import LayoutConfig


class Coordinates(NamedTuple):
    """Where a rank stands in its role's layout."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class RoleLayout:
    """Say which ranks a role has and how they are cut.

    Inside a role ranks are ordered tensor fastest, then context, then data, then pipeline.
    """

    ranks: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    role: str = "layout"

    @property
    def model_ranks(self) -> int:
        """Return how many ranks hold one copy of the model's work."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Return the number of data-parallel copies."""
        return len(self.ranks) // self.model_ranks

    @property
    def expert_data(self) -> int:
        """Return the number of copies of each expert shard."""
        return max(1, len(self.ranks) // (self.expert * self.expert_tensor * self.pipeline))

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a global rank of this role stands."""
        index = self.ranks.index(rank)
        index, tensor = divmod(index, self.tensor)
        index, context = divmod(index, self.context)
        pipeline, data = divmod(index, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def words(self) -> str:
        """Return the layout as ``tensor 2 x pipeline 2 x data 4``."""
        if self.role == "rollout":
            return f"tensor {self.tensor} x replicas {self.data}"
        sizes = [("tensor", self.tensor), ("context", self.context), ("pipeline", self.pipeline)]
        sizes.append(("data", self.data))
        return " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name in ("tensor", "data"))


def role_layout(role: str, config: LayoutConfig, world_size: int) -> RoleLayout:
    """Return a layout with ranks, sequence parallelism and expert tensor size derived."""
    return RoleLayout(
        ranks=tuple(range(world_size)) if config.ranks is None else config.ranks,
        tensor=config.tensor,
        pipeline=config.pipeline,
        virtual_pipeline=config.virtual_pipeline,
        context=config.context,
        expert=config.expert,
        expert_tensor=1 if config.expert_tensor is None else config.expert_tensor,
        sequence_parallel=config.tensor > 1 if config.sequence_parallel is None else config.sequence_parallel,
        role=role,
    )
