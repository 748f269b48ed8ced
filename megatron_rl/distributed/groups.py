"""Live communicators: of a layout, without Megatron's process-global groups, and across several worlds."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d as c10d

from megatron_rl.distributed import device
from megatron_rl.shapes.layout import Coordinates, ParallelLayout

_communicators: dict[tuple[int, ...], Any] = {}


def communicator(ranks: tuple[int, ...]) -> Any:
    """Return the process group of these ranks, in this order; made once and shared by equal layouts.

    That of all ranks in the job's own order is the job's own. Collective over the world, also for ranks
    outside.
    """
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if ranks not in _communicators:
        # torch would sort the ranks, but their order is the order of shards.
        order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        _communicators[ranks] = dist.new_group(list(ranks), timeout=device.collective_timeout(), **order)
    return _communicators[ranks]


class ParallelGroups:
    """Hold the communicators of one role's layout on this rank.

    Each attribute (``tensor``, ``pipeline``, ``data``, ``context``, ``model`` …) is the group this rank
    belongs to; they are None on ranks outside the layout. Collective over the world.
    """

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout = layout.checked()
        self.rank = device.rank()
        self.member = self.rank in layout.ranks
        self.tensor = self._mine("tensor")
        self.context = self._mine("context")
        self.data = self._mine("data")
        self.pipeline = self._mine("pipeline")
        self.model = self._mine("tensor", "pipeline")
        self.data_context = self._mine("data", "context")
        self.tensor_context = self._mine("tensor", "context")
        self.tensor_data_context = self._mine("tensor", "data", "context")
        self.expert = self._mine("expert")
        self.expert_tensor = self._mine("expert_tensor")
        self.expert_data = self._mine("expert_data")
        self.expert_tensor_and_expert = self._mine("expert_tensor", "expert")
        self.expert_model = self._mine("expert_tensor", "expert", "pipeline")
        self.all = communicator(layout.ranks)
        self.embedding = self._embedding_group()

    def _mine(self, *dimensions: str) -> Any:
        member_of = None
        for ranks in self.layout.groups(*dimensions):
            group = communicator(ranks)
            if self.rank in ranks:
                member_of = group
        return member_of

    def _embedding_group(self) -> Any:
        """Return the group of first and last pipeline stage, which share tied embeddings."""
        member_of = None
        for ranks in self.layout.groups("pipeline"):
            ends = ranks if len(ranks) == 1 else (ranks[0], ranks[-1])
            group = communicator(ends)
            if self.rank in ends:
                member_of = group
        return member_of

    @cached_property
    def coordinates(self) -> Coordinates:
        """Return where this rank stands in the layout; it must be a member."""
        return self.layout.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        """Say whether this rank holds the embedding."""
        return self.coordinates.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        """Say whether this rank holds the output layer."""
        return self.coordinates.pipeline == self.layout.pipeline - 1

    @cached_property
    def megatron(self) -> ProcessGroupCollection:
        """Hold the groups in the form that Megatron-Core's models, optimizer and schedules take."""
        groups = ProcessGroupCollection(
            tp=self.tensor,
            pp=self.pipeline,
            cp=self.context,
            dp=self.data,
            mp=self.model,
            dp_cp=self.data_context,
            tp_cp=self.tensor_context,
            tp_dp_cp=self.tensor_data_context,
            ep=self.expert,
            expt_tp=self.expert_tensor,
            expt_dp=self.expert_data,
            tp_ep=self.expert_tensor_and_expert,
            tp_ep_pp=self.expert_model,
            intra_dp_cp=self.data_context,
            intra_expt_dp=self.expert_data,
            intra_dist_opt=self.all,
        )
        groups.embd = self.embedding
        groups.pos_embd = None  # pyright: ignore[reportAttributeAccessIssue]
        groups.hcp = None  # pyright: ignore[reportAttributeAccessIssue]
        groups.inter_dist_opt = None  # pyright: ignore[reportAttributeAccessIssue]
        return groups


def join_span(address: str, port: int, rank: int, count: int, timeout: float = 600.0) -> Any:
    """Return a span: the group of ``count`` processes that meet at ``address:port``, of whatever worlds.

    Trainers and the workers of a server meet so. Rank 0 opens the port. Inside the group a rank is its own
    global rank. Works with and without a default group. ``timeout`` in seconds bounds the meeting and every
    collective. Collective over the ``count``.
    """
    patience = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, count, is_master=rank == 0, timeout=patience)
    name: Any = f"span {address}:{port}"
    backends = c10d.Backend(device.backends())
    group, _ = c10d._new_process_group_helper(count, rank, [], backends, store, name, timeout=patience)
    # torch looks up global ranks for every collective; a span has none but its own.
    c10d._world.pg_group_ranks[group] = {position: position for position in range(count)}  # pyright: ignore[reportArgumentType]
    return group


def leave_span(group: Any) -> None:
    """End a span on this rank."""
    dist.destroy_process_group(group)


def memberships() -> list[tuple[int, ...]]:
    """Return the ranks of each group made so far that this rank is in, first those of the job's own.

    The host's backend opens a connection to every other rank of each group, whoever is in others too.
    """
    rank, world = device.rank(), tuple(range(dist.get_world_size()))
    return [world, *(ranks for ranks in _communicators if rank in ranks)]
