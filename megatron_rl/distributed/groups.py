"""Process groups of parallel layouts, and process groups that connect several jobs.

Megatron's process-global groups are not used. The idea: a group is identified by its ranks. Groups of equal
ranks share one communicator, even if the layouts of two roles name them differently. The layouts alone
determine the order in which all ranks create the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d as c10d

from megatron_rl.distributed import device
from megatron_rl.shapes.layout import Coordinates, ParallelLayout

_communicators: dict[tuple[int, ...], Any] = {}
"""Ranks in the order of the group -> process group, or torch's NON_GROUP_MEMBER on ranks outside it."""


def communicator(ranks: tuple[int, ...]) -> Any:
    """Return the process group of ``ranks``, whose order determines the rank numbers in the group.

    Calls with equal ``ranks`` return the same group. For all ranks of the job in ascending order, this is
    torch's default group. Collective over the world: every rank of the job must call this function, also a
    rank outside ``ranks``.
    """
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if ranks not in _communicators:
        _communicators[ranks] = _new_group(ranks)
    return _communicators[ranks]


def create_communicators(rank_groups: Sequence[tuple[int, ...]]) -> None:
    """Create the missing process groups of ``rank_groups``, so that `communicator` returns them.

    The groups must have no rank in common. Collective over the world.
    """
    world = tuple(range(dist.get_world_size()))
    new_groups = [ranks for ranks in rank_groups if ranks != world and ranks not in _communicators]

    # NCCL can split all groups from the world's communicator in one call, if their ranks are ascending.
    are_ascending = all(list(ranks) == sorted(ranks) for ranks in new_groups)
    if device.can_split_groups() and len(new_groups) > 1 and are_ascending:
        _communicators.update(_split_world(new_groups))
        return

    for ranks in new_groups:
        communicator(ranks)


def _new_group(ranks: tuple[int, ...]) -> Any:
    """Create one process group, which connects its ranks at its first use. Collective over the world."""
    # By default torch sorts the ranks, but their order is the order of shards.
    options: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):
        options["sort_ranks"] = False
    return dist.new_group(list(ranks), timeout=device.collective_timeout(), **options)


def _split_world(rank_groups: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    """Split the world's communicator into disjoint groups; return them by ranks. Collective over the world.

    The groups share the world's bootstrap and its discovery of the topology.
    """
    # The world's communicator must exist and be bound to a device while it is split. The binding is removed
    # after the split. With a binding, each later `new_group` makes the ranks outside the new group call
    # `ncclCommSplit`, which waits for all ranks. If the new group has another backend, such as Gloo, the
    # ranks inside it do not call `ncclCommSplit`, and the job would hang.
    dist.all_reduce(torch.zeros(1, device=device.device()))
    world: Any = dist.group.WORLD
    world.bound_device_id = device.device()
    try:
        group = dist.split_group(
            split_ranks=[list(ranks) for ranks in rank_groups],
            timeout=device.collective_timeout(),
        )
    finally:
        world.bound_device_id = None

    # On ranks outside a group, torch's NON_GROUP_MEMBER replaces the group.
    rank = device.rank()
    groups: dict[tuple[int, ...], Any] = dict.fromkeys(rank_groups, dist.GroupMember.NON_GROUP_MEMBER)
    for ranks in rank_groups:
        if rank in ranks:
            groups[ranks] = group
    return groups


class ParallelGroups:
    """Process groups of one role's layout that this rank belongs to.

    Each attribute (``tensor``, ``pipeline``, ``data``, ``context``, ``model`` …) is this rank's group for one
    type of parallelism, or None on ranks outside the layout. Collective over the world.
    """

    def __init__(self, layout: ParallelLayout) -> None:
        self.layout = layout.checked()
        self.rank = device.rank()
        self.is_member = self.rank in layout.ranks

        # Creating a group is collective over the world, so every rank creates all groups, in this order.
        self._groups: dict[str, Any] = {}
        for name, rank_groups in layout.process_groups().items():
            self._groups[name] = self._group_of_this_rank(rank_groups)

        self.tensor = self._groups["tensor"]
        self.context = self._groups["context"]
        self.data = self._groups["data"]
        self.pipeline = self._groups["pipeline"]
        self.model = self._groups["model"]
        self.data_context = self._groups["data_context"]
        self.tensor_context = self._groups["tensor_context"]
        self.tensor_data_context = self._groups["tensor_data_context"]
        self.expert = self._groups["expert"]
        self.expert_tensor = self._groups["expert_tensor"]
        self.expert_data = self._groups["expert_data"]
        self.expert_tensor_and_expert = self._groups["expert_tensor_and_expert"]
        self.expert_model = self._groups["expert_model"]
        self.all = self._groups["all"]
        self.embedding = self._groups["embedding"]

    def _group_of_this_rank(self, rank_groups: Sequence[tuple[int, ...]]) -> Any:
        """Create all groups of one type, such as tensor-parallel groups; return the group of this rank.

        Returns None on ranks outside the layout. Collective over the world.
        """
        create_communicators(rank_groups)
        for ranks in rank_groups:
            if self.rank in ranks:
                return communicator(ranks)
        return None

    @cached_property
    def coordinates(self) -> Coordinates:
        """Return the coordinates of this rank in the layout, which must include it."""
        return self.layout.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank's pipeline stage has the embedding."""
        return self.coordinates.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank's pipeline stage has the output layer."""
        return self.coordinates.pipeline == self.layout.pipeline - 1

    @cached_property
    def megatron(self) -> ProcessGroupCollection:
        """Return the groups as a collection for Megatron-Core's models, optimizer and schedules."""
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

        # Megatron-Core 0.19 has further groups for generalised tensor parallelism. Without that feature they
        # equal the usual groups. 0.16 has no such fields and ignores them.
        groups.dp_cp_gtp_remat = self.data_context  # pyright: ignore[reportAttributeAccessIssue]
        groups.expt_dp_gtp_remat = self.expert_data  # pyright: ignore[reportAttributeAccessIssue]
        groups.tp_ep_pp_with_egtp_remat = self.expert_model  # pyright: ignore[reportAttributeAccessIssue]
        groups.gtp_remat = None  # pyright: ignore[reportAttributeAccessIssue]
        groups.expt_gtp_remat = None  # pyright: ignore[reportAttributeAccessIssue]

        # Set these to None: an unset field has no attribute, and Megatron reads some of them in any case.
        groups.pos_embd = None  # pyright: ignore[reportAttributeAccessIssue]
        groups.hcp = None  # pyright: ignore[reportAttributeAccessIssue]
        groups.inter_dist_opt = None  # pyright: ignore[reportAttributeAccessIssue]
        return groups


def join_cross_job_group(
    address: str,
    port: int,
    rank: int,
    num_processes: int,
    timeout: float = 600.0,
) -> Any:
    """Create a process group across jobs, such as trainers and the workers of a rollout server.

    The ``num_processes`` processes of the group rendezvous at ``address:port``, which rank 0 opens; ``rank``
    is this process's rank in the group. torch treats the ranks in this group as global ranks. A default group
    is not needed. ``timeout`` in seconds bounds the rendezvous and every collective. Collective over the
    processes of the group.
    """
    timeout_delta = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, num_processes, is_master=rank == 0, timeout=timeout_delta)
    name: Any = f"span {address}:{port}"
    backends = c10d.Backend(device.backends())
    group, _ = c10d._new_process_group_helper(
        num_processes, rank, [], backends, store, name, timeout=timeout_delta
    )

    # torch maps group ranks to global ranks in every collective; in this group both are the same.
    identity = {rank_in_group: rank_in_group for rank_in_group in range(num_processes)}
    c10d._world.pg_group_ranks[group] = identity  # pyright: ignore[reportArgumentType]
    return group


def leave_cross_job_group(group: Any) -> None:
    """Destroy a process group of `join_cross_job_group` on this rank."""
    dist.destroy_process_group(group)


def groups_of_this_rank() -> list[tuple[int, ...]]:
    """Return the ranks of each existing process group that has this rank; the default group comes first.

    The groups determine this rank's number of connections, since gloo connects all pairs of ranks in a group.
    """
    rank = device.rank()
    world = tuple(range(dist.get_world_size()))
    groups_of_rank = [ranks for ranks in _communicators if rank in ranks]
    return [world, *groups_of_rank]
