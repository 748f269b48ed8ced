"""Bytes that a weight sync from the actor to the rollout engine sends: exact, computed only from sizes.

A rank receives the parts of tensors that it needs and does not have. Layers with the same parameters are
computed once, so that a model of any size on any number of ranks takes milliseconds.

Which shard of the engine a rank needs depends only on its rank in the engine replica, so the order of the
engine's ranks in which the fewest bytes are received (`best_rank_order`) is an assignment problem: ranks to
ranks of a replica, at the cost of the bytes that each pair would receive.
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
"""vLLM pads the vocabulary to a multiple of this before it shards it."""


_REPLICATED = ("whole", "stacked")
"""Cuts of Megatron parameters that are complete on every tensor-parallel rank."""


class Slice(NamedTuple):
    """Part of a tensor: ``start`` to ``stop`` of dimension ``dim``, and all of the other dimensions.

    Example: ``Slice(0, 2, 4)`` are rows 2 and 3 of a matrix.
    """

    dim: int
    start: int
    stop: int


def trainer_slices(weight: Weight, rank: int, rank_count: int) -> tuple[Slice, ...]:
    """Return the slice of each source of a Megatron parameter on one of ``rank_count`` tensor-parallel ranks.

    ``latent`` parameters are sharded, as in Megatron's own layers.
    """
    if weight.cut == "query_key_value":
        group_rows = [source.shape[0] // weight.groups for source in weight.sources]
        return _interleaved_slices(group_rows, weight.groups, rank, rank_count)

    # Replicated parameters are complete on every rank.
    if weight.cut in _REPLICATED:
        rank = 0
        rank_count = 1

    dim = 0
    if weight.cut == "columns":
        dim = 1
    find_share = _rank_share
    if weight.cut == "vocabulary":
        find_share = _padded_rank_share
    return tuple(Slice(dim, *find_share(source.shape[dim], rank, rank_count)) for source in weight.sources)


def _interleaved_slices(
    group_rows: Sequence[int], groups: int, rank: int, rank_count: int
) -> tuple[Slice, ...]:
    """Return the rows of the query, key and value weights in one rank's shard of the fused QKV weight.

    The fused weight has query, key and value rows of the first group, then those of the next group;
    ``group_rows`` are their numbers in a group. The shards of the ``rank_count`` ranks are equal, so one may
    begin and end inside a group.
    """
    group_size = sum(group_rows)

    # The shard is a range of fused rows: count each tensor's rows before both of its ends.
    def count_rows_before(end: int, offset: int, size: int) -> int:
        """Count one tensor's rows among the first ``end`` rows of the fused weight.

        The tensor (query, key or value) has ``size`` rows in each group, from row ``offset`` of the group.
        """
        # All rows of the complete groups, and the part of the last group that is before its end.
        complete_groups, remainder = divmod(end, group_size)
        return complete_groups * size + min(max(remainder - offset, 0), size)

    low, high = _rank_share(groups * group_size, rank, rank_count)
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
    if source.engine == "whole":
        return Slice(0, 0, size)
    if source.engine == "columns":
        return Slice(1, *_rank_share(source.shape[1], rank, replica_size))
    if source.engine == "vocabulary":
        return Slice(0, *_padded_rank_share(size, rank, replica_size, VOCABULARY_MULTIPLE))

    if source.engine == "heads" and source.heads < replica_size:
        # Consecutive ranks hold copies of one head.
        return Slice(0, *_rank_share(size, rank * source.heads // replica_size, source.heads))
    return Slice(0, *_rank_share(size, rank, replica_size))


def engine_experts(experts: int, rank: int, replica_size: int) -> range:
    """Return the experts of a rank under vLLM's expert parallelism, which distributes complete experts.

    The first ranks get one more if the number of experts is not divisible.
    """
    # vLLM's `determine_expert_map` with linear placement.
    quotient, remainder = divmod(experts, replica_size)
    start = rank * quotient + min(rank, remainder)
    expert_count = quotient
    if rank < remainder:
        expert_count += 1
    return range(start, start + expert_count)


def _rank_share(size: int, rank: int, rank_count: int) -> tuple[int, int]:
    """Return start and stop of one rank's share of ``size`` elements, in nearly equal shares."""
    return size * rank // rank_count, size * (rank + 1) // rank_count


def _padded_rank_share(size: int, rank: int, rank_count: int, multiple: int = 1) -> tuple[int, int]:
    """Return start and stop of one rank's share of ``size`` rows, as equal shares of a padded tensor.

    The tensor is padded to a multiple of ``multiple`` rows, and then to equal shares; a share ends before the
    padding.
    """
    padded = -(-size // multiple) * multiple

    # The last ranks have fewer rows of the tensor, or none.
    rows = -(-padded // rank_count)
    return min(rank * rows, size), min((rank + 1) * rows, size)


def _common_elements(source: Source, first_slice: Slice, second_slice: Slice) -> int:
    """Count the elements of a tensor that are in both slices."""
    # Slices of different dimensions always intersect, in a box of both lengths.
    if first_slice.dim != second_slice.dim:
        first_length = first_slice.stop - first_slice.start
        second_length = second_slice.stop - second_slice.start
        plane_size = source.shape[first_slice.dim] * source.shape[second_slice.dim]
        return first_length * second_length * source.elements // plane_size

    length = min(first_slice.stop, second_slice.stop) - max(first_slice.start, second_slice.start)
    return max(0, length) * source.elements // source.shape[first_slice.dim]


Shard = tuple[str | int, ...]
"""Part of the weights that an actor rank has completely or not at all, such as ``("dense", stage, tensor)``.

Different shards have no element in common."""


@dataclass(frozen=True)
class SharedBytes:
    """Bytes of weights that each rank of an engine replica needs, and how many of them each actor rank has.

    Example, two ranks that both need 100 bytes, and an actor on ranks 0 and 1 with one shard each::

        SharedBytes(
            needed=(100, 100),
            resident={0: [50, 0], 1: [0, 50]},
            model_bytes=200,
            shards={0: frozenset({first}), 1: frozenset({second})},
            shard_bytes={first: [50, 0], second: [0, 50]},
        )
    """

    needed: tuple[int, ...]
    """Bytes, [ranks of a replica]."""
    resident: Mapping[int, Sequence[int]]
    """Global rank of the actor -> bytes of each replica rank's weights that it has, [ranks of a replica]."""
    model_bytes: int
    """Bytes of one complete copy of the weights."""
    shards: Mapping[int, frozenset[Shard]]
    """Global rank of the actor -> the shards that it has."""
    shard_bytes: Mapping[Shard, Sequence[int]]
    """Shard -> bytes of each replica rank's weights in it, [ranks of a replica]."""

    def missing_bytes(self, rank: int, rank_in_replica: int) -> int:
        """Return the bytes of weights that a global rank lacks to serve as ``rank_in_replica`` of a replica.

        It receives them in a weight sync.
        """
        resident = self.resident.get(rank)
        # A rank outside the actor receives everything.
        if resident is None:
            return self.needed[rank_in_replica]
        return self.needed[rank_in_replica] - resident[rank_in_replica]

    def traffic(self, ranks: Sequence[int], gpus_per_node: int | None = None) -> WeightTraffic:
        """Return the bytes of a weight sync into an engine whose replicas are consecutive ``ranks``.

        Global rank r is on node r // ``gpus_per_node``; with None, all ranks are on one node.
        """
        replica_size = len(self.needed)
        # Replicas are consecutive, so the position in a replica repeats.
        ranks_in_replica = {rank: index % replica_size for index, rank in enumerate(ranks)}
        received = {rank: self.missing_bytes(rank, index) for rank, index in ranks_in_replica.items()}

        # Only what no rank of the receiver's node has comes from another node, see `choose_senders`.
        across_nodes = dict.fromkeys(received, 0)
        if gpus_per_node is not None:
            on_node = self._bytes_on_nodes(gpus_per_node)
            for rank, index in ranks_in_replica.items():
                if received[rank]:
                    across_nodes[rank] = self.needed[index] - on_node[rank // gpus_per_node][index]

        return WeightTraffic(
            model_bytes=self.model_bytes,
            needed={rank: self.needed[index] for rank, index in ranks_in_replica.items()},
            received=received,
            received_across_nodes=across_nodes,
        )

    def _bytes_on_nodes(self, gpus_per_node: int) -> Mapping[int, Sequence[int]]:
        """Return node -> bytes of each replica rank's weights that its actor ranks have between them."""
        shards_of_node: dict[int, set[Shard]] = defaultdict(set)
        for rank, shards in self.shards.items():
            shards_of_node[rank // gpus_per_node] |= shards

        # Without a rank of the actor, a node has none of the weights.
        result: dict[int, Sequence[int]] = defaultdict(lambda: (0,) * len(self.needed))
        for node, shards in shards_of_node.items():
            result[node] = _sum_by_rank(self.shard_bytes[shard] for shard in shards)
        return result


def max_peers_on_node(
    shared_bytes: SharedBytes, actor: ParallelLayout, ranks: Sequence[int], gpus_per_node: int
) -> int:
    """Return an upper bound of the number of ranks of its node that a rank exchanges weights with.

    ``ranks`` are the engine's, whose replicas are consecutive. A rank of the receiver's node counts as a
    sender in two cases: it has layers of another pipeline stage, or its shard differs from the receiver's and
    has needed bytes beyond the ones that every rank of its stage has.
    """
    # By stage, the bytes that all of its ranks have for each rank of a replica, such as norms.
    common_bytes: dict[int, list[int]] = {}
    stage_by_rank: dict[int, int] = {}
    for stage, stage_ranks in enumerate(actor.groups("tensor", "context", "data")):
        bytes_by_rank = [shared_bytes.resident[rank] for rank in stage_ranks]
        common_bytes[stage] = [min(sizes) for sizes in zip(*bytes_by_rank, strict=True)]
        stage_by_rank |= dict.fromkeys(stage_ranks, stage)

    peers: dict[int, set[int]] = {}
    for position, receiver in enumerate(ranks):
        rank_in_replica = position % len(shared_bytes.needed)
        if not shared_bytes.missing_bytes(receiver, rank_in_replica):
            continue

        node = receiver // gpus_per_node
        for sender in range(node * gpus_per_node, (node + 1) * gpus_per_node):
            stage = stage_by_rank.get(sender)
            # Ranks with the same shards share one list; equal bytes may be of different experts.
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
        """Return the bytes that all ranks together receive from ranks of their nodes."""
        return sum(self.received.values()) - self.across_nodes

    @property
    def across_nodes(self) -> int:
        """Return the bytes that all ranks together receive from ranks of other nodes."""
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
    """Count the bytes that each rank of an engine replica needs, and how many of them each actor rank has.

    ``replica_size`` is the number of its ranks, ``itemsize`` the bytes of an element in the engine,
    ``settings`` are Megatron's for uneven stages. ``whole_experts`` selects vLLM's expert parallelism. With
    ``lora`` only adapters are sent; tensors that a family fuses into one are counted with an A each.
    """
    engine = _Engine(shape, replica_size, itemsize, whole_experts, lora)

    # A trainer on one rank holds everything that the engine needs.
    single_rank = ParallelLayout((0,))
    needed = _sum_by_rank(engine.shards(single_rank)[1].values())
    model = _Engine(shape, 1, itemsize, lora=lora)
    (model_bytes,) = _sum_by_rank(model.shards(single_rank)[1].values())

    # Ranks with the same shards share one list.
    shards, shard_bytes = engine.shards(actor, settings)
    resident_bytes = {
        rank_shards: _sum_by_rank(shard_bytes[shard] for shard in rank_shards)
        for rank_shards in set(shards.values())
    }
    return SharedBytes(
        needed=tuple(needed),
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
    """Bytes of one layer that a trainer rank and an engine rank both hold: [ranks of a replica] per list."""

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
    """Whether each rank holds complete experts (vLLM's expert parallelism)."""
    lora: Lora | None = None
    """The adapters to sync; None syncs the weights."""

    def shards(
        self, trainer: ParallelLayout, settings: Mapping[str, Any] | None = None
    ) -> tuple[dict[int, frozenset[Shard]], dict[Shard, list[int]]]:
        """Return two mappings: trainer rank -> its shards, and shard -> bytes that each replica rank needs.

        ``settings``: Megatron's settings for uneven pipeline stages.
        """
        shards: dict[int, frozenset[Shard]] = {}
        sizes: dict[Shard, list[int]] = {}
        layer_bytes: dict[Weights, _LayerBytes] = {}
        stages = stage_layers(self.shape.layers, trainer, settings)

        for stage, ranks in enumerate(trainer.groups("tensor", "context", "data")):
            # Count the equal layers of the stage; embedding and output layer are one more entry.
            counts = Counter(self._layer_weights(layer) for layer in stages[stage])
            outer: Weights = ()
            if self.lora is None:
                outer = outer_weights(self.shape, stage == 0, stage == trainer.pipeline - 1)
            # The first stage and a tied last stage have the same embedding: one shard.
            embedding = tuple(weight for weight in outer if weight.sources[0].name == EMBEDDING)
            counts[tuple(weight for weight in outer if weight not in embedding)] += 1
            for weights in counts.keys() - layer_bytes.keys():
                layer_bytes[weights] = self._count_layer_bytes(weights, trainer)

            if embedding:
                for tensor, embedding_bytes in enumerate(self._common_bytes(embedding, trainer.tensor)):
                    sizes["embedding", tensor] = embedding_bytes
            for shard, parts in self._stage_parts(stage, counts, layer_bytes).items():
                sizes[shard] = _sum_by_rank(parts)

            # Ranks with the same coordinates in both grids, dense and expert, have the same shards.
            for position, rank in enumerate(ranks):
                # The expert grid counts its tensor dimension first, then the expert dimension.
                expert_position, expert_tensor = divmod(position, trainer.expert_tensor)
                expert = expert_position % trainer.expert
                tensor = position % trainer.tensor
                rank_shards: list[Shard] = [("replicated", stage), ("dense", stage, tensor)]
                rank_shards += [("experts", stage, expert), ("experts", stage, expert, expert_tensor)]
                if embedding:
                    rank_shards.append(("embedding", tensor))
                shards[rank] = frozenset(rank_shards)
        return shards, sizes

    def _stage_parts(
        self, stage: int, counts: Mapping[Weights, int], layer_bytes: Mapping[Weights, _LayerBytes]
    ) -> dict[Shard, list[list[int]]]:
        """Return the bytes of each weight shard of a pipeline stage: shard -> one list per kind of layer.

        Each list has the bytes that each rank of an engine replica uses of the shard. ``counts``: parameters
        of a kind of layer -> number of such layers in the stage. ``layer_bytes``: bytes of one such layer.
        """
        parts: dict[Shard, list[list[int]]] = defaultdict(list)
        for weights, count in counts.items():
            one_layer = layer_bytes[weights]
            layer_parts: dict[Shard, list[int]] = {("replicated", stage): one_layer.replicated}
            for tensor, sizes in enumerate(one_layer.dense):
                layer_parts["dense", stage, tensor] = sizes
            for expert, sizes in enumerate(one_layer.replicated_experts):
                layer_parts["experts", stage, expert] = sizes
            for (expert, expert_tensor), sizes in one_layer.experts.items():
                layer_parts["experts", stage, expert, expert_tensor] = sizes

            for shard, sizes in layer_parts.items():
                parts[shard].append([count * size for size in sizes])
        return parts

    def _layer_weights(self, layer: int) -> Weights:
        """Return the parameters of a layer that are synced."""
        weights = self.shape.weights(layer)
        if self.lora is None:
            return weights
        return adapter_weights(weights, self.lora)

    def _count_layer_bytes(self, weights: Weights, trainer: ParallelLayout) -> _LayerBytes:
        """Return the bytes of ``weights`` that each pair of a trainer rank and an engine rank both hold.

        ``weights``: the parameters of a layer, or those outside the layers.
        """
        dense = [weight for weight in weights if not weight.expert]
        routed = [weight for weight in weights if weight.expert]

        # Each expert-parallel rank of the trainer holds consecutive experts.
        replicated_experts: list[list[int]] = []
        experts: dict[tuple[int, int], list[int]] = {}
        experts_per_rank = self.shape.experts // trainer.expert
        one_expert = self._count_expert_bytes(_sharded_weights(routed), trainer.expert_tensor)
        (one_replicated,) = self._count_expert_bytes(_replicated_weights(routed), 1)
        for expert in range(trainer.expert):
            local = range(expert * experts_per_rank, (expert + 1) * experts_per_rank)
            local_counts = [self._count_common_experts(local, index) for index in range(self.replica_size)]
            replicated_experts.append(_multiply_lists(local_counts, one_replicated))
            for expert_tensor, sizes in enumerate(one_expert):
                experts[expert, expert_tensor] = _multiply_lists(local_counts, sizes)

        (replicated,) = self._common_bytes(_replicated_weights(dense), 1)
        return _LayerBytes(
            replicated=replicated,
            dense=self._common_bytes(_sharded_weights(dense), trainer.tensor),
            replicated_experts=replicated_experts,
            experts=experts,
        )

    def _count_expert_bytes(self, weights: Iterable[Weight], trainer_ranks: int) -> list[list[int]]:
        """Return the bytes of one expert that a trainer rank and an engine rank both hold.

        The result is [trainer ranks][engine ranks], as that of `_common_bytes`.
        """
        # An expert is complete on one rank of the engine, or sharded over all of them.
        if not self.whole_experts:
            return self._common_bytes(weights, trainer_ranks)
        complete = replace(self, replica_size=1)._common_bytes(weights, trainer_ranks)
        return [sizes * self.replica_size for sizes in complete]

    def _count_common_experts(self, local: range, index: int) -> int:
        """Count the experts that a trainer rank and an engine rank both hold, completely or in part.

        ``local``: experts of the trainer rank. ``index``: rank in the engine replica.
        """
        if not self.whole_experts:
            return len(local)
        resident = engine_experts(self.shape.experts, index, self.replica_size)
        return max(0, min(local.stop, resident.stop) - max(local.start, resident.start))

    def _common_bytes(self, weights: Iterable[Weight], trainer_ranks: int) -> list[list[int]]:
        """Return the bytes of ``weights`` that a trainer rank and an engine rank both hold.

        ``trainer_ranks``: number of tensor-parallel ranks of the trainer. The result is [trainer
        ranks][engine ranks].
        """
        engine_ranks = self.replica_size
        common_bytes = [[0] * engine_ranks for _ in range(trainer_ranks)]

        # Intersect the slice of each trainer rank with that of each engine rank, tensor by tensor.
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
    return [weight for weight in weights if weight.cut in _REPLICATED]


def _sharded_weights(weights: Iterable[Weight]) -> list[Weight]:
    """Return the parameters of which tensor-parallel ranks of the trainer hold different parts."""
    return [weight for weight in weights if weight.cut not in _REPLICATED]


def _multiply_lists(counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Multiply two lists element by element."""
    return [count * size for count, size in zip(counts, sizes, strict=True)]


def gathered_bytes(model_bytes: float, actor: ParallelLayout, colocated: bool = True) -> float:
    """Return the bytes that each generating rank receives if complete tensors are gathered or broadcast.

    A colocated rank gathers the actor's tensor- and pipeline-parallel shards that it does not hold; a rank
    outside the actor receives the whole model.
    """
    if not colocated:
        return model_bytes
    # All shards but the rank's own.
    shards = actor.tensor * actor.pipeline
    return model_bytes * (shards - 1) / shards


def received_by_other_projects(
    model_bytes: float, actor: ParallelLayout, tensor: int, colocated: bool = True
) -> dict[str, float]:
    """Return the bytes that each generating rank receives in other projects: name of the method -> bytes.

    ``tensor``: tensor-parallel size of the rollout. Colocated: HybridFlow (arXiv 2409.19256) table 2, with
    HybridFlow's own method only if ``tensor`` divides the actor's model parallelism; projects that gather
    (verl, mbridge, Megatron-Bridge, slime) receive as much as HybridFlow-V. Otherwise only the broadcast of
    the whole model applies.
    """
    gathered = gathered_bytes(model_bytes, actor, colocated)
    if not colocated:
        return {"broadcast of the whole model": gathered}

    model_parallel = actor.tensor * actor.pipeline
    all_ranks = model_parallel * actor.data * actor.context
    volumes = {
        "DS-Chat": (all_ranks - 1) / all_ranks * model_bytes,
        "HybridFlow-V": gathered,
        "gather-all (verl, mbridge, slime)": gathered,
    }
    if model_parallel % tensor == 0:
        volumes["HybridFlow"] = (model_parallel - tensor) / (tensor * model_parallel) * model_bytes
    return volumes


Costs = tuple[tuple[int, ...], ...]
"""Bytes to receive, [ranks][ranks of an engine replica]."""
LARGEST_ISLAND = 64
"""Ranks whose order is optimised together: the assignment is O(n^3). Larger islands keep their order."""


def best_rank_order(weights: SharedBytes, ranks: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """Order ``ranks`` so that the replicas, which are consecutive ranks, receive the fewest bytes of weights.

    The largest number of bytes that any rank receives is minimised first, then the sum over ranks. Replicas
    stay inside a node if their size allows it: global rank r is on node r // ``gpus_per_node``.
    """
    replica_size = len(weights.needed)
    sorted_ranks = tuple(sorted(ranks))
    if replica_size == 1 or not weights.resident.keys() & set(ranks):
        return sorted_ranks

    ordered_ranks: list[int] = []
    assignments: dict[Costs, list[int]] = {}  # many islands have the same costs
    for island in _divide_into_islands(sorted_ranks, replica_size, gpus_per_node):
        if len(island) > LARGEST_ISLAND:
            ordered_ranks += island
            continue

        # Assign each rank of the island to a rank in a replica.
        costs = tuple(
            tuple(weights.missing_bytes(rank, index) for index in range(replica_size)) for rank in island
        )
        if costs not in assignments:
            assignments[costs] = assign_columns(costs, len(island) // replica_size)
        candidates: list[list[int]] = [[] for _ in range(replica_size)]
        for rank, rank_in_replica in zip(island, assignments[costs], strict=True):
            candidates[rank_in_replica].append(rank)

        # The i-th candidates of all ranks in a replica make up the island's i-th replica.
        for replica in zip(*candidates, strict=True):
            ordered_ranks += replica
    return tuple(ordered_ranks)


def _divide_into_islands(ranks: Sequence[int], replica_size: int, gpus_per_node: int) -> list[list[int]]:
    """Divide ranks into the smallest sets of whole nodes whose numbers of ranks are multiples of a replica's.

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
    """Assign each row of ``costs`` [rows][columns] to a column; each column takes ``capacity`` rows.

    The largest cost of a pair is minimised first, then the sum of costs. Among equal assignments, one that
    keeps row i in column i % columns as often as possible is returned. Raises ValueError for rows that do not
    fill the columns.
    """
    rows = len(costs)
    columns = len(costs[0])
    if rows != columns * capacity:
        raise ValueError(f"{rows} rows do not fill {columns} places of {capacity}")

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
    return [repeated_column // capacity for repeated_column in _cheapest_assignment(matrix)]


def _is_assignable(costs: Sequence[Sequence[int]], capacity: int, limit: int) -> bool:
    """Return whether all rows can be assigned to columns that cost at most ``limit`` (augmenting paths)."""
    # Rows of each column.
    assigned: list[list[int]] = [[] for _ in costs[0]]

    def try_assign(row: int, visited: set[int]) -> bool:
        """Assign a row, and move other rows if necessary; skip the columns that were ``visited``."""
        for column, cost in enumerate(costs[row]):
            if cost > limit or column in visited:
                continue

            visited.add(column)
            if len(assigned[column]) < capacity:
                assigned[column].append(row)
                return True

            # The column is full: move one of its rows to another column.
            for index, occupant in enumerate(assigned[column]):
                if try_assign(occupant, visited):
                    assigned[column][index] = row
                    return True
        return False

    return all(try_assign(row, set()) for row in range(len(costs)))


def _cheapest_assignment(matrix: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row in a square matrix's cheapest assignment (Kuhn-Munkres, O(n^3))."""
    # Rows and columns are counted from 1; column 0 stands for the row that is being inserted. The prices are
    # the dual variables: a pair is tight if its cost is the sum of both prices. ``row_of`` is the row of each
    # column, 0 for a free one; ``previous`` is the column before it on the path.
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
            tree_row = row_of[column]
            step = infinity
            next_column = 0

            # Relax the columns outside the tree, and select the one with the smallest slack.
            for candidate in range(1, size + 1):
                if visited[candidate]:
                    continue
                reduced = matrix[tree_row - 1][candidate - 1] - row_price[tree_row] - column_price[candidate]
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

    # Count from 0 again.
    result = [0] * size
    for column in range(1, size + 1):
        result[row_of[column] - 1] = column - 1
    return result
