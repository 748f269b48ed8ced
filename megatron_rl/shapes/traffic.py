"""Exact number of bytes that a weight sync from the actor to the rollout engine sends, computed from sizes.

A rank receives the elements that it needs and does not have. Layers with the same parameters are computed
once, so that a model of any size on any number of ranks takes milliseconds.

The weights that a rank needs depend only on its rank in the engine replica. `best_rank_order`, which orders
the engine's ranks so that they receive the fewest bytes, therefore solves an assignment problem: it assigns
global ranks to ranks in a replica. The cost of a pair is the number of bytes that the rank would receive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from megatron_rl.shapes.layer_weights import EMBEDDING, Source, Weight, outer_weights
from megatron_rl.shapes.layout import ParallelLayout, stage_layers
from megatron_rl.shapes.lora import Lora, adapter_weights
from megatron_rl.shapes.model import ModelShape

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this number before sharding."""


_REPLICATED = ("whole", "stacked")
"""Values of `Weight.sharding` for parameters that are complete on every tensor-parallel rank."""


class Slice(NamedTuple):
    """Slice of a tensor: ``start`` to ``stop`` of dimension ``dim``, complete in all other dimensions.

    Example: ``Slice(0, 2, 4)`` are rows 2 and 3 of a matrix.
    """

    dim: int
    start: int
    stop: int


def trainer_slices(weight: Weight, rank: int, rank_count: int) -> tuple[Slice, ...]:
    """Return the slices of checkpoint tensors that make up one rank's shard of a Megatron parameter.

    A Megatron parameter is built from one or more checkpoint tensors (`Weight.sources`), for example the
    fused QKV weight from three. The result has one slice for each checkpoint tensor. ``rank``: one of
    ``rank_count`` tensor-parallel ranks.

    The down projections of latent attention (``sharding`` "latent") are assumed to be sharded. Megatron's
    layers without Transformer Engine shard these projections.
    """
    if weight.sharding == "query_key_value":
        group_rows = [source.shape[0] // weight.groups for source in weight.sources]
        return _interleaved_slices(group_rows, weight.groups, rank, rank_count)

    # Replicated parameters are complete on every rank.
    if weight.sharding in _REPLICATED:
        rank = 0
        rank_count = 1

    dim = 0
    if weight.sharding == "columns":
        dim = 1
    compute_bounds = _shard_bounds
    if weight.sharding == "vocabulary":
        compute_bounds = _padded_shard_bounds
    return tuple(
        Slice(dim, *compute_bounds(source.shape[dim], rank, rank_count)) for source in weight.sources
    )


def _interleaved_slices(
    group_rows: Sequence[int], groups: int, rank: int, rank_count: int
) -> tuple[Slice, ...]:
    """Return the rows of the query, key and value weights in one rank's shard of the fused QKV weight.

    The fused weight has the query, key and value rows of the first group, then the rows of the next group;
    ``group_rows`` has their numbers of rows per group. All ``rank_count`` shards have the same number of
    rows, so a shard may begin and end inside a group.
    """
    group_size = sum(group_rows)

    # The shard is a range of fused rows: count each tensor's rows before its start and before its end.
    def count_rows_before(end: int, offset: int, size: int) -> int:
        """Count one tensor's rows among the first ``end`` rows of the fused weight.

        The tensor (query, key or value) has ``size`` rows in each group, from row ``offset`` of the group.
        """
        # The tensor's rows in complete groups, then its rows in the incomplete last group.
        complete_groups, remaining_rows = divmod(end, group_size)
        return complete_groups * size + min(max(remaining_rows - offset, 0), size)

    low, high = _shard_bounds(groups * group_size, rank, rank_count)
    slices = []
    offset = 0
    for size in group_rows:
        slices.append(Slice(0, count_rows_before(low, offset, size), count_rows_before(high, offset, size)))
        offset += size
    return tuple(slices)


def engine_slice(source: Source, rank: int, replica_size: int) -> Slice:
    """Return the slice of a checkpoint tensor on a tensor-parallel rank of a vLLM replica."""
    size = source.shape[0]

    # Not sharded, or sharded by a dimension other than the rows.
    if source.engine_sharding == "whole":
        return Slice(0, 0, size)
    if source.engine_sharding == "columns":
        return Slice(1, *_shard_bounds(source.shape[1], rank, replica_size))
    if source.engine_sharding == "vocabulary":
        return Slice(0, *_padded_shard_bounds(size, rank, replica_size, VOCABULARY_MULTIPLE))

    if source.engine_sharding == "heads" and source.heads < replica_size:
        # Consecutive ranks have copies of one head.
        head = rank * source.heads // replica_size
        return Slice(0, *_shard_bounds(size, head, source.heads))
    return Slice(0, *_shard_bounds(size, rank, replica_size))


def engine_experts(experts: int, rank: int, replica_size: int) -> range:
    """Return the experts of a rank under vLLM's expert parallelism, which distributes complete experts.

    If the number of ranks does not divide the number of experts, the first ranks have one expert more.
    """
    # vLLM's `determine_expert_map` with linear placement.
    quotient, remainder = divmod(experts, replica_size)
    start = rank * quotient + min(rank, remainder)
    expert_count = quotient
    if rank < remainder:
        expert_count += 1
    return range(start, start + expert_count)


def _shard_bounds(size: int, rank: int, rank_count: int) -> tuple[int, int]:
    """Return start and stop of one rank's shard of ``size`` elements, in nearly equal shards."""
    return size * rank // rank_count, size * (rank + 1) // rank_count


def _padded_shard_bounds(size: int, rank: int, rank_count: int, multiple: int = 1) -> tuple[int, int]:
    """Return start and stop of one rank's shard of ``size`` rows, in equal shards of a padded tensor.

    The tensor is padded to a multiple of ``multiple`` rows, and then to equal shards. Rows of padding are not
    part of the result.
    """
    padded_size = -(-size // multiple) * multiple

    # The shards of the last ranks may be shorter, or empty.
    rows_per_rank = -(-padded_size // rank_count)
    return min(rank * rows_per_rank, size), min((rank + 1) * rows_per_rank, size)


def _common_elements(source: Source, first_slice: Slice, second_slice: Slice) -> int:
    """Count the elements of a tensor that are in both slices."""
    # Slices of different dimensions intersect in a box of both lengths.
    if first_slice.dim != second_slice.dim:
        first_length = first_slice.stop - first_slice.start
        second_length = second_slice.stop - second_slice.start
        plane_size = source.shape[first_slice.dim] * source.shape[second_slice.dim]
        return first_length * second_length * source.elements // plane_size

    length = min(first_slice.stop, second_slice.stop) - max(first_slice.start, second_slice.start)
    return max(0, length) * source.elements // source.shape[first_slice.dim]


Shard = tuple[str | int, ...]
"""Key of a part of the weights that an actor rank has completely or not at all, such as ``("dense", stage,
tensor)``.

Different shards have no element in common."""


@dataclass(frozen=True)
class SharedBytes:
    """Weight bytes that each rank of an engine replica needs, and how many of them each actor rank has.

    Example: two ranks that both need 100 bytes, and an actor on ranks 0 and 1 with one shard each::

        SharedBytes(
            needed=(100, 100),
            resident={0: [50, 0], 1: [0, 50]},
            model_bytes=200,
            shards={0: frozenset({first}), 1: frozenset({second})},
            shard_bytes={first: [50, 0], second: [0, 50]},
        )
    """

    needed: tuple[int, ...]
    """Bytes that each rank needs, [ranks of a replica]."""
    resident: Mapping[int, Sequence[int]]
    """Global rank of the actor -> bytes that it has and each replica rank needs, [ranks of a replica]."""
    model_bytes: int
    """Bytes of one complete copy of the weights."""
    shards: Mapping[int, frozenset[Shard]]
    """Global rank of the actor -> the shards that it has."""
    shard_bytes: Mapping[Shard, Sequence[int]]
    """Shard -> bytes that it contains and each replica rank needs, [ranks of a replica]."""

    def missing_bytes(self, rank: int, rank_in_replica: int) -> int:
        """Return the bytes that a global rank receives in order to serve as rank ``rank_in_replica``."""
        resident_bytes = self.resident.get(rank)
        # A rank outside the actor receives all that it needs.
        if resident_bytes is None:
            return self.needed[rank_in_replica]
        return self.needed[rank_in_replica] - resident_bytes[rank_in_replica]

    def traffic(self, ranks: Sequence[int], gpus_per_node: int | None = None) -> WeightTraffic:
        """Return the bytes of a weight sync into an engine with ``ranks``.

        The first ranks are the first replica, the next ranks are the second replica, and so on. Global rank
        r is on node r // ``gpus_per_node``; with None, all ranks are on one node.
        """
        replica_size = len(self.needed)
        ranks_in_replica = {rank: index % replica_size for index, rank in enumerate(ranks)}
        received_by_rank = {
            rank: self.missing_bytes(rank, rank_in_replica)
            for rank, rank_in_replica in ranks_in_replica.items()
        }

        # Only bytes that no actor rank of the node has are sent from other nodes, see `choose_senders`.
        across_nodes = dict.fromkeys(received_by_rank, 0)
        if gpus_per_node is not None:
            bytes_by_node = self._bytes_on_nodes(gpus_per_node)
            for rank, rank_in_replica in ranks_in_replica.items():
                if received_by_rank[rank]:
                    node_bytes = bytes_by_node[rank // gpus_per_node]
                    across_nodes[rank] = self.needed[rank_in_replica] - node_bytes[rank_in_replica]

        return WeightTraffic(
            model_bytes=self.model_bytes,
            needed={rank: self.needed[index] for rank, index in ranks_in_replica.items()},
            received=received_by_rank,
            received_across_nodes=across_nodes,
        )

    def _bytes_on_nodes(self, gpus_per_node: int) -> Mapping[int, Sequence[int]]:
        """Count, for each node, the needed bytes that the node's actor ranks already have.

        The result maps a node to a list with one number for each rank of an engine replica: the bytes that
        this rank needs and that an actor rank of the node has.
        """
        shards_of_node: dict[int, set[Shard]] = defaultdict(set)
        for rank, shards in self.shards.items():
            shards_of_node[rank // gpus_per_node] |= shards

        # A node without actor ranks has 0 bytes of the weights.
        bytes_by_node: dict[int, Sequence[int]] = defaultdict(lambda: (0,) * len(self.needed))
        for node, shards in shards_of_node.items():
            bytes_by_node[node] = _sum_by_rank(self.shard_bytes[shard] for shard in shards)
        return bytes_by_node


def max_peers_on_node(
    shared_bytes: SharedBytes, actor: ParallelLayout, ranks: Sequence[int], gpus_per_node: int
) -> int:
    """Return an upper bound of the number of peers of a rank on its own node in a weight sync.

    A peer is a rank to which the rank sends messages, or from which it receives messages. ``ranks`` are the
    engine's ranks, whose replicas are consecutive. The bound assumes that a receiver gets bytes from each of
    these ranks on its node:

    - a rank of another pipeline stage of the actor, if the rank has bytes that the receiver needs;
    - a rank of the receiver's stage with a different shard, if the rank has bytes that the receiver needs and
      that some rank of the stage does not have.
    """
    # Stage -> bytes that every rank of the stage has and each replica rank needs, such as norms.
    common_bytes: dict[int, list[int]] = {}
    stage_by_rank: dict[int, int] = {}
    for stage, stage_ranks in enumerate(actor.groups("tensor", "context", "data")):
        bytes_by_rank = [shared_bytes.resident[rank] for rank in stage_ranks]
        common_bytes[stage] = [min(sizes) for sizes in zip(*bytes_by_rank, strict=True)]
        stage_by_rank |= dict.fromkeys(stage_ranks, stage)

    peers: dict[int, set[int]] = {}
    for index, receiver in enumerate(ranks):
        rank_in_replica = index % len(shared_bytes.needed)
        if not shared_bytes.missing_bytes(receiver, rank_in_replica):
            continue

        node = receiver // gpus_per_node
        for sender in range(node * gpus_per_node, (node + 1) * gpus_per_node):
            stage = stage_by_rank.get(sender)
            # Ranks with the same shards share one list object. Equal numbers of bytes are not enough: they
            # may belong to different experts.
            if stage is None or shared_bytes.resident[sender] is shared_bytes.resident.get(receiver):
                continue

            # A receiver already has the common bytes of its own stage.
            resident_bytes = 0
            if stage == stage_by_rank.get(receiver):
                resident_bytes = common_bytes[stage][rank_in_replica]
            if shared_bytes.resident[sender][rank_in_replica] > resident_bytes:
                peers.setdefault(sender, set()).add(receiver)
                peers.setdefault(receiver, set()).add(sender)
    return max((len(peers_of_rank) for peers_of_rank in peers.values()), default=0)


@dataclass(frozen=True)
class WeightTraffic:
    """Bytes that one weight sync moves, in total and to each rollout rank."""

    model_bytes: int
    """Bytes of one complete copy of the weights."""
    needed: Mapping[int, int]
    """Bytes of the weights that a rank needs to generate, by global rollout rank."""
    received: Mapping[int, int]
    """Bytes that a rank receives, by global rollout rank."""
    received_across_nodes: Mapping[int, int]
    """Bytes of ``received`` that ranks of other nodes send, by global rollout rank."""

    @property
    def inside_nodes(self) -> int:
        """Return the bytes that ranks receive from ranks of the same node, summed over all receivers."""
        return sum(self.received.values()) - self.across_nodes

    @property
    def across_nodes(self) -> int:
        """Return the bytes that ranks receive from ranks of other nodes, summed over all receivers."""
        return sum(self.received_across_nodes.values())

    @property
    def received_most(self) -> int:
        """Return the largest number of bytes that any rollout rank receives."""
        return max(self.received.values())


def byte_text(count: float) -> str:
    """Format bytes as ``1.90 GB``, in powers of ten like the rates of networks."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def shared_bytes(
    shape: ModelShape,
    actor: ParallelLayout,
    replica_size: int,
    itemsize: int,
    *,
    settings: Mapping[str, Any] | None = None,
    whole_experts: bool = False,
    lora: Lora | None = None,
) -> SharedBytes:
    """Count the weight bytes that each engine rank needs, and how many of them each actor rank has.

    A weight sync sends the bytes that a rank needs and does not have.

    ``actor``: layout of the actor. ``replica_size``: number of ranks in a replica of the engine.
    ``itemsize``: bytes of an element in the engine. ``settings``: Megatron's settings for uneven pipeline
    stages. ``whole_experts``: whether each rank of a replica has complete experts (vLLM's expert
    parallelism).

    With ``lora`` only adapters are sent. Each projection then has a separate matrix A, even if checkpoints of
    the model's family fuse the projection with another one, such as gate and up.
    """
    engine = _Engine(shape, replica_size, itemsize, whole_experts, lora)

    # A trainer on a single rank has all weights that the engine needs.
    single_rank = ParallelLayout((0,))
    _, complete_shard_bytes = engine.list_shards(single_rank)
    needed_bytes = _sum_by_rank(complete_shard_bytes.values())

    # The needed bytes of a replica with one rank are the size of the model.
    single_engine = _Engine(shape, 1, itemsize, lora=lora)
    _, model_shard_bytes = single_engine.list_shards(single_rank)
    (model_bytes,) = _sum_by_rank(model_shard_bytes.values())

    # Ranks with the same shards share one list.
    shards, shard_bytes = engine.list_shards(actor, settings)
    resident_bytes = {
        rank_shards: _sum_by_rank(shard_bytes[shard] for shard in rank_shards)
        for rank_shards in set(shards.values())
    }
    return SharedBytes(
        needed=tuple(needed_bytes),
        resident={rank: resident_bytes[rank_shards] for rank, rank_shards in shards.items()},
        model_bytes=model_bytes,
        shards=shards,
        shard_bytes=shard_bytes,
    )


def _sum_by_rank(sizes: Iterable[Sequence[int]]) -> list[int]:
    """Sum lists of bytes [ranks of a replica] element by element."""
    return [sum(sizes_of_rank) for sizes_of_rank in zip(*sizes, strict=True)]


Weights = tuple[Weight, ...]


class _LayerBytes(NamedTuple):
    """Bytes of one layer that are on both a trainer rank and an engine rank.

    A list of numbers has one number per rank of an engine replica.
    """

    replicated: list[int]
    """Bytes outside routed experts that every tensor-parallel rank of the trainer has, such as norms."""
    dense: list[list[int]]
    """Other bytes outside routed experts, by tensor-parallel rank of the trainer."""
    replicated_experts: list[list[int]]
    """Bytes of routed experts that every expert-tensor-parallel rank has, by expert-parallel rank."""
    experts: dict[tuple[int, int], list[int]]
    """Other bytes of routed experts, by expert-parallel and expert-tensor-parallel rank of the trainer."""


@dataclass(frozen=True)
class _Engine:
    """One replica of a rollout engine, which receives the weights of one model in each weight sync."""

    shape: ModelShape
    replica_size: int
    """Ranks of the replica."""
    itemsize: int
    """Bytes of an element."""
    whole_experts: bool = False
    """Whether each rank has complete experts (vLLM's expert parallelism)."""
    lora: Lora | None = None
    """The adapters to sync; None syncs the weights."""

    def list_shards(
        self, trainer: ParallelLayout, settings: Mapping[str, Any] | None = None
    ) -> tuple[dict[int, frozenset[Shard]], dict[Shard, list[int]]]:
        """Return the shards that each trainer rank has, and the bytes that each engine rank needs of a shard.

        The result is (trainer rank -> shards, shard -> bytes [ranks of an engine replica]).

        ``settings``: Megatron's settings for uneven pipeline stages.
        """
        shards: dict[int, frozenset[Shard]] = {}
        shard_bytes: dict[Shard, list[int]] = {}
        layer_bytes: dict[Weights, _LayerBytes] = {}
        stages = stage_layers(self.shape.layers, trainer, settings)

        for stage, ranks in enumerate(trainer.groups("tensor", "context", "data")):
            # Count the equal layers of the stage; the weights outside the layers count as one more layer.
            layer_counts = Counter(self._layer_weights(layer) for layer in stages[stage])
            nonlayer_weights: Weights = ()
            if self.lora is None:
                nonlayer_weights = outer_weights(self.shape, stage == 0, stage == trainer.pipeline - 1)
            # The first stage and a tied last stage have the same embedding: one shard.
            embedding_weights = tuple(
                weight for weight in nonlayer_weights if weight.sources[0].name == EMBEDDING
            )
            other_nonlayer_weights = tuple(
                weight for weight in nonlayer_weights if weight not in embedding_weights
            )
            layer_counts[other_nonlayer_weights] += 1
            for weights in layer_counts.keys() - layer_bytes.keys():
                layer_bytes[weights] = self._count_layer_bytes(weights, trainer)

            if embedding_weights:
                bytes_by_tensor_rank = self._common_bytes(embedding_weights, trainer.tensor)
                for tensor_rank, embedding_bytes in enumerate(bytes_by_tensor_rank):
                    shard_bytes["embedding", tensor_rank] = embedding_bytes
            shard_bytes |= self._stage_shard_bytes(stage, layer_counts, layer_bytes)

            # Ranks with the same coordinates in both grids, dense and expert, have the same shards.
            for index, rank in enumerate(ranks):
                # The expert grid counts its tensor dimension first, then the expert dimension.
                outer_index, expert_tensor_rank = divmod(index, trainer.expert_tensor)
                expert_rank = outer_index % trainer.expert
                tensor_rank = index % trainer.tensor
                rank_shards: list[Shard] = [
                    ("replicated", stage),
                    ("dense", stage, tensor_rank),
                    ("experts", stage, expert_rank),
                    ("experts", stage, expert_rank, expert_tensor_rank),
                ]
                if embedding_weights:
                    rank_shards.append(("embedding", tensor_rank))
                shards[rank] = frozenset(rank_shards)
        return shards, shard_bytes

    def _stage_shard_bytes(
        self, stage: int, layer_counts: Mapping[Weights, int], layer_bytes: Mapping[Weights, _LayerBytes]
    ) -> dict[Shard, list[int]]:
        """Return, for each shard of a pipeline stage, how many of its bytes each engine rank needs.

        A shard is a part of the weights that a trainer rank has completely or not at all. The result maps a
        shard to a list with one number of bytes for each rank of an engine replica.

        ``layer_counts``: parameters of a layer (`Weights`) -> number of layers of the stage with equal
        parameters. ``layer_bytes``: parameters of a layer -> bytes of one such layer.
        """
        sizes_by_shard: dict[Shard, list[list[int]]] = defaultdict(list)
        for weights, count in layer_counts.items():
            one_layer = layer_bytes[weights]
            layer_shards: dict[Shard, list[int]] = {("replicated", stage): one_layer.replicated}
            for tensor_rank, sizes in enumerate(one_layer.dense):
                layer_shards["dense", stage, tensor_rank] = sizes
            for expert_rank, sizes in enumerate(one_layer.replicated_experts):
                layer_shards["experts", stage, expert_rank] = sizes
            for (expert_rank, expert_tensor_rank), sizes in one_layer.experts.items():
                layer_shards["experts", stage, expert_rank, expert_tensor_rank] = sizes

            for shard, sizes in layer_shards.items():
                sizes_by_shard[shard].append([count * size for size in sizes])
        return {shard: _sum_by_rank(sizes) for shard, sizes in sizes_by_shard.items()}

    def _layer_weights(self, layer: int) -> Weights:
        """Return the synced parameters of a layer: its adapters with ``lora``, otherwise all weights."""
        weights = self.shape.weights(layer)
        if self.lora is None:
            return weights
        return adapter_weights(weights, self.lora)

    def _count_layer_bytes(self, weights: Weights, trainer: ParallelLayout) -> _LayerBytes:
        """Count the bytes of ``weights`` that are on both a trainer rank and an engine rank, for all pairs.

        ``weights``: the parameters of a layer, or the parameters outside the layers.
        """
        dense_weights = [weight for weight in weights if not weight.expert]
        routed_weights = [weight for weight in weights if weight.expert]

        # Each expert-parallel rank of the trainer has consecutive experts.
        replicated_experts: list[list[int]] = []
        experts: dict[tuple[int, int], list[int]] = {}
        experts_per_rank = self.shape.experts // trainer.expert
        expert_bytes = self._count_expert_bytes(_sharded_weights(routed_weights), trainer.expert_tensor)
        (replicated_expert_bytes,) = self._count_expert_bytes(_replicated_weights(routed_weights), 1)
        for expert_rank in range(trainer.expert):
            local_experts = range(expert_rank * experts_per_rank, (expert_rank + 1) * experts_per_rank)
            expert_counts = [
                self._count_common_experts(local_experts, engine_rank)
                for engine_rank in range(self.replica_size)
            ]
            replicated_experts.append(_multiply_lists(expert_counts, replicated_expert_bytes))
            for expert_tensor_rank, sizes in enumerate(expert_bytes):
                experts[expert_rank, expert_tensor_rank] = _multiply_lists(expert_counts, sizes)

        (replicated_bytes,) = self._common_bytes(_replicated_weights(dense_weights), 1)
        return _LayerBytes(
            replicated=replicated_bytes,
            dense=self._common_bytes(_sharded_weights(dense_weights), trainer.tensor),
            replicated_experts=replicated_experts,
            experts=experts,
        )

    def _count_expert_bytes(self, weights: Iterable[Weight], trainer_ranks: int) -> list[list[int]]:
        """Count the bytes of one expert that are on both a trainer rank and an engine rank, for all pairs.

        The result is [trainer ranks][engine ranks], as in `_common_bytes`.
        """
        # An expert is complete on one rank of the engine, or sharded over all of them.
        if not self.whole_experts:
            return self._common_bytes(weights, trainer_ranks)
        complete_bytes = replace(self, replica_size=1)._common_bytes(weights, trainer_ranks)

        # Every engine rank has the same bytes of a complete expert: repeat the single column.
        return [sizes * self.replica_size for sizes in complete_bytes]

    def _count_common_experts(self, trainer_experts: range, engine_rank: int) -> int:
        """Count the experts that a trainer rank and an engine rank both have, completely or sharded.

        ``trainer_experts``: experts of the trainer rank. ``engine_rank``: rank in the engine replica.
        """
        if not self.whole_experts:
            return len(trainer_experts)
        local_experts = engine_experts(self.shape.experts, engine_rank, self.replica_size)
        start = max(trainer_experts.start, local_experts.start)
        stop = min(trainer_experts.stop, local_experts.stop)
        return max(0, stop - start)

    def _common_bytes(self, weights: Iterable[Weight], trainer_ranks: int) -> list[list[int]]:
        """Count the bytes of ``weights`` that are on both a trainer rank and an engine rank, for all pairs.

        ``trainer_ranks``: number of tensor-parallel ranks of the trainer. The result is [trainer
        ranks][engine ranks].
        """
        engine_ranks = self.replica_size
        common_bytes = [[0] * engine_ranks for _ in range(trainer_ranks)]

        # Intersect the slices of each trainer rank and each engine rank, tensor by tensor.
        for weight in weights:
            slices_by_rank = [trainer_slices(weight, rank, trainer_ranks) for rank in range(trainer_ranks)]
            for source_index, source in enumerate(weight.sources):
                itemsize = self.itemsize
                if source.float32:
                    itemsize = 4
                for engine_rank in range(engine_ranks):
                    needed_slice = engine_slice(source, engine_rank, engine_ranks)
                    for rank, slices in enumerate(slices_by_rank):
                        elements = _common_elements(source, slices[source_index], needed_slice)
                        common_bytes[rank][engine_rank] += itemsize * elements
        return common_bytes


def _replicated_weights(weights: Iterable[Weight]) -> list[Weight]:
    """Return the parameters that are complete on every tensor-parallel rank of the trainer."""
    return [weight for weight in weights if weight.sharding in _REPLICATED]


def _sharded_weights(weights: Iterable[Weight]) -> list[Weight]:
    """Return the parameters that are sharded over the trainer's tensor-parallel ranks."""
    return [weight for weight in weights if weight.sharding not in _REPLICATED]


def _multiply_lists(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Multiply two lists element by element."""
    return [count * size for count, size in zip(counts, sizes, strict=True)]


def gathered_bytes(model_bytes: float, actor: ParallelLayout, colocated: bool = True) -> float:
    """Return the bytes that each rollout rank receives if complete tensors are gathered or broadcast.

    A colocated rank gathers the actor's tensor- and pipeline-parallel shards that it does not have; a rank
    outside the actor receives the complete model.
    """
    if not colocated:
        return model_bytes
    # All shards except the rank's shard.
    shards = actor.tensor * actor.pipeline
    return model_bytes * (shards - 1) / shards


def received_by_other_projects(
    model_bytes: float, actor: ParallelLayout, tensor: int, colocated: bool = True
) -> dict[str, float]:
    """Return the bytes that a rollout rank receives in a weight sync with the methods of other projects.

    The result maps the name of a method to bytes. ``tensor``: tensor-parallel size of the rollout.

    A rank of a separate engine receives a broadcast of the complete model. For colocated engines the formulas
    are from HybridFlow (arXiv 2409.19256, table 2). If ``tensor`` does not divide the actor's model-parallel
    size, HybridFlow's method is omitted. verl, mbridge, Megatron-Bridge and slime gather the weights, so that
    a rank receives as many bytes as with HybridFlow-V.
    """
    gather_volume = gathered_bytes(model_bytes, actor, colocated)
    if not colocated:
        return {"broadcast of the whole model": gather_volume}

    model_parallel = actor.tensor * actor.pipeline
    all_ranks = model_parallel * actor.data * actor.context
    volumes = {
        "DS-Chat": (all_ranks - 1) / all_ranks * model_bytes,
        "HybridFlow-V": gather_volume,
        "gather-all (verl, mbridge, slime)": gather_volume,
    }
    if model_parallel % tensor == 0:
        volumes["HybridFlow"] = (model_parallel - tensor) / (tensor * model_parallel) * model_bytes
    return volumes


Costs = tuple[tuple[int, ...], ...]
"""Cost matrix [ranks][ranks of a replica]: bytes that a rank would receive in each position of a replica."""
LARGEST_ISLAND = 64
"""Largest number of ranks whose order is optimised together, since the assignment is O(n^3).

Larger islands keep their order."""


def best_rank_order(weights: SharedBytes, ranks: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """Order the engine's ``ranks`` so that a weight sync sends the fewest bytes.

    Consecutive ranks of the result form a replica of the engine. The order minimises the bytes that the
    busiest rank receives, then the sum of bytes over ranks. Global rank r is on node r // ``gpus_per_node``.

    Ranks are reordered only within an island: the shortest run of consecutive nodes whose ranks form a whole
    number of replicas. If the replica size divides the number of ranks on a node, each node is an island. An
    island of more than `LARGEST_ISLAND` ranks keeps its order.
    """
    replica_size = len(weights.needed)
    sorted_ranks = tuple(sorted(ranks))
    if replica_size == 1 or not weights.resident.keys() & set(ranks):
        return sorted_ranks

    ordered_ranks: list[int] = []
    # Cache assignments by cost matrix, since many islands have the same cost matrix.
    assignment_by_costs: dict[Costs, list[int]] = {}
    for island in _divide_into_islands(sorted_ranks, replica_size, gpus_per_node):
        if len(island) > LARGEST_ISLAND:
            ordered_ranks += island
            continue

        # Assign each global rank of the island to a position (rank in a replica). Each position gets as many
        # global ranks as the island has replicas.
        costs = tuple(
            tuple(weights.missing_bytes(rank, index) for index in range(replica_size)) for rank in island
        )
        if costs not in assignment_by_costs:
            assignment_by_costs[costs] = assign_columns(costs, len(island) // replica_size)
        candidates: list[list[int]] = [[] for _ in range(replica_size)]
        for rank, rank_in_replica in zip(island, assignment_by_costs[costs], strict=True):
            candidates[rank_in_replica].append(rank)

        # The i-th candidates of all positions form the island's i-th replica.
        for replica in zip(*candidates, strict=True):
            ordered_ranks += replica
    return tuple(ordered_ranks)


def _divide_into_islands(ranks: Sequence[int], replica_size: int, gpus_per_node: int) -> list[list[int]]:
    """Divide ranks into islands: the shortest runs of nodes whose ranks form a whole number of replicas.

    ``ranks`` are ascending; global rank r is on node r // ``gpus_per_node``.
    """
    islands: list[list[int]] = [[]]
    for index, rank in enumerate(ranks):
        begins_node = index and rank // gpus_per_node != ranks[index - 1] // gpus_per_node
        if begins_node and len(islands[-1]) % replica_size == 0:
            islands.append([])
        islands[-1].append(rank)
    return islands


def assign_columns(costs: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Assign each row of ``costs`` [rows][columns] to a column; each column gets ``capacity`` rows.

    The largest cost of an assigned pair is minimised first, then the sum of costs. Ties are resolved in
    favour of row i in column i % columns. Raises ValueError if the rows do not fill the columns.
    """
    rows = len(costs)
    columns = len(costs[0])
    if rows != columns * capacity:
        raise ValueError(f"{rows} rows do not fill {columns} columns of {capacity} rows")

    # Search for the smallest limit on the largest cost under which an assignment exists.
    limits = sorted(set(chain.from_iterable(costs)))
    low = 0
    high = len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_assignable(costs, capacity, limits[middle]):
            high = middle
        else:
            low = middle + 1
    limit = limits[low]

    # Scale the costs by rows + 1, so that the tie-break, at most 1 per row, decides only between equal sums
    # of costs. A pair above the limit costs more than any allowed assignment.
    forbidden = (sum(max(row) for row in costs) + 1) * (rows + 1)
    matrix = []
    for index, row in enumerate(costs):
        scaled_row: list[int] = []
        for column, cost in enumerate(row):
            tie_break = index % columns != column
            scaled_cost = cost * (rows + 1) + tie_break
            if cost > limit:
                scaled_cost = forbidden
            scaled_row += [scaled_cost] * capacity
        matrix.append(scaled_row)

    # Each column was repeated ``capacity`` times to make the matrix square.
    return [repeated_column // capacity for repeated_column in _cheapest_assignment(matrix)]


def _is_assignable(costs: Sequence[Sequence[int]], capacity: int, limit: int) -> bool:
    """Return whether every row can be assigned to a column at a cost of at most ``limit``.

    A column takes at most ``capacity`` rows. The assignment is built with augmenting paths.
    """
    # Rows that are assigned to each column.
    assigned_rows: list[list[int]] = [[] for _ in costs[0]]

    def try_assign(row: int, visited: set[int]) -> bool:
        """Assign a row and move other rows if necessary; return whether it succeeded.

        Columns in ``visited`` are skipped.
        """
        for column, cost in enumerate(costs[row]):
            if cost > limit or column in visited:
                continue

            visited.add(column)
            if len(assigned_rows[column]) < capacity:
                assigned_rows[column].append(row)
                return True

            # The column is full: move one of its rows to another column.
            for index, assigned_row in enumerate(assigned_rows[column]):
                if try_assign(assigned_row, visited):
                    assigned_rows[column][index] = row
                    return True
        return False

    return all(try_assign(row, set()) for row in range(len(costs)))


def _cheapest_assignment(matrix: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row in a square matrix's cheapest assignment (Kuhn-Munkres, O(n^3))."""
    # Rows and columns are counted from 1; column 0 represents the row that is being inserted. The prices are
    # the dual variables: a pair is tight if its cost is the sum of both prices. ``row_of`` is the row of each
    # column, or 0 for a free column; ``previous_column`` is the preceding column on the path.
    size = len(matrix)
    infinity = float("inf")
    row_price = [0] * (size + 1)
    column_price = [0] * (size + 1)
    row_of = [0] * (size + 1)
    previous_column = [0] * (size + 1)

    for row in range(1, size + 1):
        row_of[0] = row
        column = 0
        slack: list[float] = [infinity] * (size + 1)
        visited = [False] * (size + 1)

        # Grow the tree of cheapest alternating paths until it reaches a free column.
        while row_of[column]:
            visited[column] = True
            tree_row = row_of[column]
            step = infinity
            next_column = 0

            # Relax the columns outside the tree, and select the one with the smallest slack.
            for candidate in range(1, size + 1):
                if visited[candidate]:
                    continue
                reduced_cost = (
                    matrix[tree_row - 1][candidate - 1] - row_price[tree_row] - column_price[candidate]
                )
                if reduced_cost < slack[candidate]:
                    slack[candidate] = reduced_cost
                    previous_column[candidate] = column
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
            row_of[column] = row_of[previous_column[column]]
            column = previous_column[column]

    # Count from 0 again.
    column_by_row = [0] * size
    for column in range(1, size + 1):
        column_by_row[row_of[column] - 1] = column - 1
    return column_by_row
