"""Estimate of the memory of each rank in each phase of a step, from the shapes of every role's model.

A rank's memory is a list of items, each with the phases in which it is resident. Roles that share a rank run
one after another in a phase, and some items are resident only while their role runs. The peak of a phase is
the bytes of the items that are resident in the complete phase, plus the bytes of the largest role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.config.adapters import (
    adapters_of,
    is_initial_actor,
    separate_base_reason,
    separate_lora,
    shares_actor_base,
)
from megatron_rl.config.checkpoint_meta import ANY
from megatron_rl.config.derive import BatchPlan, even_shares
from megatron_rl.config.placement import megatron_settings, shared_weights, sleeping_ranks
from megatron_rl.config.roles import (
    ADAPTED,
    NUMBER,
    learner_sections,
    role_of,
    role_sections,
    section_of,
    spec_of,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import LoraConfig, OptimizerConfig
from megatron_rl.config.stage_plan import stage_plans
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout, default_stage_layers, stage_layers
from megatron_rl.shapes.lora import Lora, adapted_parameter_count, adapter_parameter_count
from megatron_rl.shapes.memory import (
    NETWORK_PEERS_BYTES,
    NVLINK_PEER_BYTES,
    RUNTIME_BYTES,
    LayerImplementation,
    OptimizerChoice,
    TrainingMemory,
    forward_only_memory,
    rollout_parameters,
    training_memory,
)
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape
from megatron_rl.shapes.traffic import max_peers_on_node

# Phases of a step, as the table of `check` prints them.
PHASES = ("generate", "score", "learn")

# Name of the memory item for the connections of a weight sync.
SYNC_CONNECTIONS = "sync connections"

# Bytes per second that a node is assumed to write to a shared file system.
CHECKPOINT_BANDWIDTH = 10**9

# dtype of a moment or a master weight in Megatron's settings -> bytes.
_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


@dataclass(frozen=True)
class MemoryItem:
    """One contributor to a rank's memory.

    Example: ``MemoryItem("actor weights", 988_000_000, PHASES, "494.0M parameters x 2 B")``.
    """

    name: str
    """Role and content, as printed in the table of ``check``."""
    bytes: int
    """Size in bytes."""
    phases: tuple[str, ...]
    """Phases in which the item is resident on the device; empty if it is in host memory."""
    how: str
    """How the bytes were counted, as text for the table."""
    active_role: str | None = None
    """Role that must be running for the item to be resident; None if it is resident in the complete phase.

    Roles that share ranks run one after another. An offloaded role is in CPU memory while it does not run.
    """


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank.

    Example: ``RankMemory(0, items).phase_peak("learn")`` is the largest number of bytes that are resident at
    once in that phase.
    """

    rank: int
    """Rank in the world, the lowest of the estimated ranks with the same items."""
    items: tuple[MemoryItem, ...]
    """All contributors to the rank's memory."""

    def phase_peak(self, phase: str) -> int:
        """Return the largest number of bytes that are resident at once in a phase.

        Only one role runs at a time. The peak therefore consists of the items that are resident in the
        complete phase, and of the items of one active role: the role with the most bytes.
        """
        bytes_by_role = [self._resident_bytes(phase, role) for role in self.active_roles(phase)]
        return self._resident_bytes(phase, None) + max(bytes_by_role, default=0)

    def _resident_bytes(self, phase: str, active_role: str | None) -> int:
        """Return the bytes that are resident in a phase only while ``active_role`` runs.

        With None, return the bytes that are resident in the complete phase.
        """
        return sum(
            item.bytes for item in self.items if phase in item.phases and item.active_role == active_role
        )

    def active_roles(self, phase: str) -> list[str]:
        """Return the roles that run one after another in a phase, in the order of their items."""
        roles = [item.active_role for item in self.items if phase in item.phases and item.active_role]
        return list(dict.fromkeys(roles))

    @property
    def peak(self) -> int:
        """Return the largest peak of all phases, in bytes."""
        return max(self.phase_peak(phase) for phase in PHASES)


@dataclass
class Usage:
    """Resources that one phase of a simulated step used on a rank."""

    begin: int = 0
    """Bytes on the device when the phase began."""
    peak: int = 0
    """Largest number of bytes on the device."""
    end: int = 0
    """Bytes on the device when the phase ended."""
    kernels: int = 0
    """Number of operators that compute."""
    microbatches: int = 0
    """Number of micro-batches that passed through the rank."""
    reads: int = 0
    """Number of values that the host read from the device; each read waits for all earlier kernels."""
    copies: int = 0
    """Number of copies from pageable host memory to the device, for which the host waits too."""
    selections: int = 0
    """Number of operators whose result size depends on values, such as boolean indices: the host waits."""
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Kind of group -> number of collectives; ``messages`` -> number of point-to-point messages."""
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Kind of group, or ``messages`` -> bytes that its calls transfer."""

    @property
    def waits(self) -> int:
        """Return the number of times that the host waited for the device."""
        return self.reads + self.copies + self.selections


@dataclass(frozen=True)
class SyncMessages:
    """Messages of one rank in a weight sync."""

    peers: int
    """Number of ranks that the rank exchanges messages with."""
    sent: int
    """Number of messages that the rank sends."""
    received: int
    """Number of messages that the rank receives."""


@dataclass(frozen=True)
class SimulatedRank:
    """Result of the simulation of one rank."""

    rank: int
    """Rank in the world."""
    phases: Mapping[str, Usage]
    """Phase -> resources that the rank used."""
    resting: int
    """Bytes of the rank's models that remain on the device while another role works."""
    groups: Sequence[tuple[str, int]]
    """Kind and number of ranks of each process group that the rank belongs to."""
    sync: SyncMessages | None = None
    """Messages of the rank in a weight sync; None for engines outside the ranks."""

    @property
    def connections(self) -> int:
        """Return an upper bound on the Gloo connections that the rank opens.

        With lazy initialisation, Gloo connects two ranks when they exchange their first message. In a Gloo
        collective, a rank exchanges messages with the ranks at distances of 1, 2, 4 and so on in both
        directions.
        """
        peer_counts = [num_ranks - 1 for _, num_ranks in self.groups]
        return sum(min(num_peers, 2 * num_peers.bit_length()) for num_peers in peer_counts)


def memory_plan(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shapes: Mapping[str, ModelShape],
    batch: BatchPlan | None,
    ranks: Iterable[int] | None = None,
) -> list[RankMemory]:
    """Estimate the memory of ranks; return the ranks with the largest peak first.

    If several ranks have the same memory items, only the lowest of these ranks is returned. ``layouts`` maps
    each role to its layout. ``shapes`` maps each role to the shape of its model; a role without a shape has
    the actor's model. A job without RL, which runs only a training stage such as SFT, has no ``batch``.
    ``ranks``: ranks whose memory is estimated; None for all.
    """
    sleeping = sleeping_ranks(layouts) if "rollout" in layouts else frozenset[int]()

    connection_items: list[MemoryItem] = []
    if batch is not None and config.gpu_memory_gib is not None and config.rollout.capabilities.in_process:
        connection_items.append(_sync_connections_item(config, layouts, shapes["actor"]))

    if ranks is None:
        all_ranks: set[int] = set()
        for layout in layouts.values():
            all_ranks.update(layout.ranks)
        ranks = all_ranks

    # Thousands of ranks may have only a few distinct lists of items, such as one for each pipeline stage.
    lowest_rank_by_items: dict[tuple[MemoryItem, ...], int] = {}
    for rank in sorted(ranks):
        memory = rank_memory(config, layouts, shapes, batch, rank, sleeping, connection_items)
        lowest_rank_by_items.setdefault(memory.items, rank)
    memories = [RankMemory(rank, items) for items, rank in lowest_rank_by_items.items()]
    return sorted(memories, key=lambda memory: -memory.peak)


def rank_memory(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shapes: Mapping[str, ModelShape],
    batch: BatchPlan | None,
    rank: int,
    ranks_asleep: frozenset[int] = frozenset(),
    connection_items: Sequence[MemoryItem] = (),
) -> RankMemory:
    """Estimate the memory of one rank.

    The first four arguments are documented in `memory_plan`. On ``ranks_asleep`` the engine releases its
    memory while other roles work. ``connection_items`` are the buffers of NCCL's connections, which only
    ranks with an engine have.
    """
    items: list[MemoryItem] = []
    if batch is None:
        learners = _stage_learner_settings(config, layouts)
    else:
        learners = _learner_settings(config, batch)

    for role, layout in layouts.items():
        if rank not in layout.ranks:
            continue

        shape = shapes.get(role, shapes["actor"])
        if role in learners:
            items += _trained_role_items(config, role, learners[role], layout, rank, shape)
            continue

        assert batch is not None
        if role != "rollout":
            items += _frozen_role_items(config, role, layout, rank, shape, batch)
        elif config.rollout.capabilities.in_process:
            awake_phases = ("generate",) if rank in ranks_asleep else PHASES
            items += _engine_items(config, layout, shape, batch, awake_phases)
            items += connection_items
        # Other engines run in servers outside the job's ranks.

    # Include the overhead of the runtime only if the estimate is compared with the memory of a GPU.
    if config.gpu_memory_gib is not None:
        phases = ("learn",) if batch is None else PHASES
        items.append(MemoryItem("runtime", RUNTIME_BYTES, phases, "CUDA, NCCL, fragmentation"))
    return RankMemory(rank, tuple(items))


@dataclass(frozen=True)
class _LearnerSettings:
    """Settings of a role's training that its memory depends on."""

    recompute: str
    """Activations that the backward pass recomputes: none, selective or full."""
    optimizer: OptimizerConfig
    """Settings of the optimizer."""
    tokens: int
    """Largest number of tokens of a micro-batch."""
    microbatches: int
    """Micro-batches of a mini-batch on one rank."""
    offload: bool = False
    """Whether the role's state is in CPU memory while the role does not run."""
    is_single_stage: bool = False
    """Whether the job is only a training stage, such as SFT, which has no other roles in memory."""


def _learner_settings(config: RunConfig, batch: BatchPlan) -> dict[str, _LearnerSettings]:
    """Return the training settings of each role that an RL step trains, by role name."""
    learners = {}
    for path, section in learner_sections(config).items():
        learners[role_of(path)] = _LearnerSettings(
            section.recompute,
            section.optimizer,
            batch.tokens_per_microbatch,
            batch.microbatches,
            section.offload,
        )
    return learners


def _stage_learner_settings(
    config: RunConfig, layouts: Mapping[str, ParallelLayout]
) -> dict[str, _LearnerSettings]:
    """Return the training settings of each role that a job without RL trains, by role name.

    Such a job runs only one kind of training stage: SFT, preference optimization, or the training of reward
    models. Names of roles are, for example, ``actor`` and ``reward.judge``.
    """
    tokens = config.batch.tokens_per_microbatch
    assert tokens is not None
    learners = {}
    for plan in stage_plans(config):
        role = role_of(plan.role)
        settings = plan.settings
        assert settings.max_row_tokens is not None

        # A training record has one row for each field in `RESPONSES`, such as two for a preference pair.
        num_rows = settings.records_per_step * len(settings.RESPONSES)
        _, rows_per_rank = even_shares(num_rows, layouts[role].data)
        rows_per_microbatch = max(1, tokens // settings.max_row_tokens)

        learners[role] = _LearnerSettings(
            config.actor.recompute if role == "actor" else "none",
            settings.optimizer,
            tokens,
            -(-rows_per_rank // rows_per_microbatch),
            is_single_stage=True,
        )
    return learners


def layers_by_stage(config: RunConfig, layout: ParallelLayout, shape: ModelShape) -> Sequence[Sequence[int]]:
    """Return the indices of the layers in each pipeline stage."""
    _, settings = megatron_settings(config, layout)
    try:
        return stage_layers(shape.layers, layout, settings)
    except UserError:
        # Megatron accepts layer distributions that `stage_layers` does not model: assume an even split.
        return default_stage_layers(shape.layers, layout.pipeline)


def _layer_properties(config: RunConfig, shape: ModelShape, recompute: str) -> LayerImplementation:
    """Return the properties of a model's layers on which its memory depends.

    ``recompute`` names the activations that the backward pass recomputes: none, selective or full.
    """
    is_fused = config.model.attention == "transformer_engine" and not shape.needs_plain_layers
    return LayerImplementation(DTYPE_BYTES[config.model.dtype], is_fused, recompute)


def optimizer_bytes_per_parameter(optimizer: OptimizerConfig, weight_bytes: int) -> int:
    """Return the bytes of optimizer state per model parameter.

    The state consists of the moments, and of float32 master weights if the model has a different dtype.
    ``weight_bytes`` is the size of one model weight in bytes.
    """
    if optimizer.offload:
        # Two moments, weights and gradients in float32, for any dtype of the model.
        return 16

    def dtype_bytes(setting: str) -> int:
        """Return the bytes of an element of the dtype in the optimizer's ``setting``."""
        dtype = str(optimizer.megatron.get(setting, "float32")).removeprefix("torch.")
        return _STATE_BYTES.get(dtype, 4)

    total = dtype_bytes("momentum")
    if optimizer.name == "adam":
        total = dtype_bytes("exp_avg_dtype") + dtype_bytes("exp_avg_sq_dtype")
    # float32 weights need no separate master weights.
    if weight_bytes != 4:
        total += dtype_bytes("main_params_dtype")
    return total


def optimizer_checkpoint_bytes(bytes_in_memory: int, optimizer: OptimizerConfig, weight_bytes: int) -> int:
    """Return the bytes of an optimizer's state in a checkpoint, from the state's bytes in memory.

    ``weight_bytes`` is the size of one model weight in bytes.
    """
    bytes_per_parameter = optimizer_bytes_per_parameter(optimizer, weight_bytes)
    if optimizer.offload:
        # Gradients, 4 of the 16 bytes, are not saved.
        return bytes_in_memory * 12 // bytes_per_parameter

    # A distributed optimizer also saves the weights of a float32 model, which are not part of its state.
    saved_per_parameter = bytes_per_parameter
    if optimizer.distributed and weight_bytes == 4:
        saved_per_parameter += 4
    return bytes_in_memory * saved_per_parameter // bytes_per_parameter


@dataclass(frozen=True)
class CheckpointMemory:
    """Size of a checkpoint on the rank that writes the most bytes, and the cost of a save on one node.

    Example: a model of 1e9 bfloat16 parameters with Adam on 8 data-parallel ranks of a node has ``shards`` of
    1.5e9 bytes, ``gathered`` of 12e9, and ``weights`` of 0.25e9.
    """

    shards: int
    """Bytes of the optimizer states on a rank, sharded as in memory."""
    gathered: int
    """Bytes of the optimizer states of all ranks that have the same parameters, gathered on one rank."""
    weights: int
    """Bytes of the weights that a rank writes."""
    ranks: int
    """Number of the job's ranks on a node."""

    @property
    def write_seconds(self) -> float:
        """Return the seconds that a node needs to write the shards of its ranks at `CHECKPOINT_BANDWIDTH`."""
        return self.ranks * (self.shards + self.weights) / CHECKPOINT_BANDWIDTH

    def host_bytes(self, optimizer_layout: str) -> int:
        """Return the bytes of host memory that one node needs to save a checkpoint.

        ``optimizer_layout`` is `ANY` if complete optimizer states are saved, and `SAME` if their shards are
        saved as they are.

        For `ANY`, Megatron gathers complete parameters in every rank, and copies a third of them at a time to
        add the padding of its buffers. Loading such a checkpoint allocates as much. For `SAME`, each rank
        copies its shards to the host once.
        """
        bytes_per_rank = self.shards + self.weights
        if optimizer_layout == ANY:
            bytes_per_rank += self.gathered * 4 // 3
        return self.ranks * bytes_per_rank


def checkpoint_memory(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], rank_memories: Sequence[RankMemory]
) -> CheckpointMemory | None:
    """Estimate the memory of a checkpoint during a save; return None if no role has an optimizer.

    ``rank_memories`` is the result of `memory_plan`.
    """
    # Bytes on one rank, summed over the roles.
    total_shard_bytes = 0
    total_gathered_bytes = 0
    total_weight_bytes = 0
    ranks: set[int] = set()
    for path, section in learner_sections(config).items():
        role = role_of(path)
        optimizer_name = "optimizer" if role == "actor" else f"{role} optimizer"
        items = [item for rank in rank_memories for item in rank.items]
        optimizer_sizes = [item.bytes for item in items if item.name == optimizer_name]
        weight_sizes = [item.bytes for item in items if item.name == f"{role} weights"]
        if not optimizer_sizes:
            continue

        # A distributed optimizer is sharded over the data-parallel and context-parallel ranks, which have
        # the same weights. Each of these ranks writes an equal part of the weights.
        layout = layouts[role]
        num_replicas = layout.data * layout.context
        num_shards = 1
        if section.optimizer.distributed:
            num_shards = num_replicas
        dtype_bytes = DTYPE_BYTES[config.model.dtype]
        shard_bytes = optimizer_checkpoint_bytes(max(optimizer_sizes), section.optimizer, dtype_bytes)
        total_shard_bytes += shard_bytes
        total_gathered_bytes += shard_bytes * num_shards
        total_weight_bytes += max(weight_sizes) // num_replicas
        ranks.update(layout.ranks)

    if not total_gathered_bytes:
        return None
    ranks_on_node = min(config.gpus_per_node, len(ranks))
    return CheckpointMemory(total_shard_bytes, total_gathered_bytes, total_weight_bytes, ranks_on_node)


def _trained_role_items(
    config: RunConfig,
    role: str,
    learner: _LearnerSettings,
    layout: ParallelLayout,
    rank: int,
    shape: ModelShape,
) -> list[MemoryItem]:
    """Return the memory items of a trained role: weights, gradients, optimizer state and activations."""
    spec = spec_of(role)
    path = section_of(role)
    if spec.head == NUMBER:
        shape = shape.with_scalar_head()

    def item_name(content: str) -> str:
        """Return the name of a memory item: the role, which is omitted for the actor, and the content."""
        return content if role == "actor" else f"{role} {content}"

    layers = _layer_properties(config, shape, learner.recompute)
    stages = layers_by_stage(config, layout, shape)
    stage = layout.coordinates(rank).pipeline
    state_bytes = optimizer_bytes_per_parameter(learner.optimizer, layers.dtype_bytes)
    optimizer = OptimizerChoice(distributed=learner.optimizer.distributed, state_bytes=state_bytes)
    tokens = learner.tokens

    # With adapters, only the adapters and a scalar head have gradients and optimizer state.
    adapters = None
    merged_bytes = 0
    lora = adapters_of(config).get(path)
    if lora is not None:
        adapters, adapted_count = _adapter_counts(lora, shape, layout, stages, stage)
        if role == "actor" and separate_lora(config) is None:
            merged_bytes = layers.dtype_bytes * adapted_count

    memory = training_memory(
        shape, layout, stages, stage, optimizer, layers, tokens, learner.microbatches, adapters
    )
    forward_memory = forward_only_memory(shape, layout, stages, stage, layers, tokens)

    # Offloaded gradients and optimizer state are only resident while the role trains.
    training_phases = PHASES
    active_role = None
    if learner.offload:
        training_phases = ("learn",)
        active_role = role

    parameters_text = f"{memory.weights / layers.dtype_bytes / 1e6:,.1f}M parameters"
    if adapters is not None:
        parameters_text = f"{sum(adapters) / 1e6:,.1f}M parameters of adapters"
    weights = _trained_weights_item(config, role, int(memory.weights), layers, learner.offload)
    if adapters is not None and spec.shares == ADAPTED:
        weights = _adapted_weights_item(
            config, path, weights, layers.dtype_bytes * sum(adapters), parameters_text
        )
    items = [weights]

    detail = f"{parameters_text} x 4 B (float32)"
    items.append(
        MemoryItem(item_name("gradients"), int(memory.gradients), training_phases, detail, active_role)
    )
    if merged_bytes and not learner.is_single_stage:
        detail = "with the adapters merged into them, during a weight sync"
        items.append(MemoryItem("merged weights", merged_bytes, ("generate",), detail))

    sharing = "not shared"
    if optimizer.distributed:
        sharing = f"shared by {layout.data * layout.context}"
    detail = f"{state_bytes} B per parameter, {sharing}"
    # The state of an optimizer on the host is never resident on the device.
    optimizer_phases = training_phases
    if learner.optimizer.offload:
        optimizer_phases = ()
    items.append(
        MemoryItem(item_name("optimizer"), int(memory.optimizer), optimizer_phases, detail, active_role)
    )

    tokens_per_rank = f"{tokens // layout.context} tokens"
    layer_count = len(stages[stage])
    detail = (
        f"{tokens_per_rank} x {layer_count} layers x micro-batches in flight, recompute {learner.recompute}"
    )
    items.append(MemoryItem(item_name("activations"), int(memory.activations), ("learn",), detail, role))
    phases = ("score", "learn")
    items += _forward_items(role, item_name, forward_memory, phases, tokens_per_rank, layout, layers.fused)

    # In addition to the logits, training accumulates the gradients of the output layer in float32.
    head_gradient_bytes = int(memory.logits - forward_memory.logits)
    if head_gradient_bytes:
        detail = f"float32 sums of the output layer's gradients, {tokens_per_rank}"
        items.append(MemoryItem(item_name("head gradients"), head_gradient_bytes, ("learn",), detail, role))
    if not learner.is_single_stage:
        return items

    # A job of only a training stage has no other phases. It trains several models one after another.
    device_items = [
        replace(item, phases=("learn",), active_role=role) for item in items if "learn" in item.phases
    ]
    return device_items + [item for item in items if not item.phases]


def _trained_weights_item(
    config: RunConfig, role: str, weight_bytes: int, layers: LayerImplementation, offload: bool
) -> MemoryItem:
    """Return the entry of the memory table for the weights of a trained role.

    ``weight_bytes`` is the size of the role's weights on the rank. If ``offload`` is true, the weights are in
    CPU memory while the role does not run.
    """
    phases = PHASES
    active_role = None
    if offload:
        phases = ("score", "learn")
        active_role = role
    # If another role uses the actor's weights, they are resident even while the actor does not run.
    if role == "actor" and _is_shared_base(config):
        active_role = None
    detail = f"{weight_bytes / layers.dtype_bytes / 1e6:,.1f}M parameters x {layers.dtype_bytes} B"
    return MemoryItem(f"{role} weights", weight_bytes, phases, detail, active_role)


def _adapter_counts(
    lora: LoraConfig, shape: ModelShape, layout: ParallelLayout, stages: Sequence[Sequence[int]], stage: int
) -> tuple[tuple[int, int], int]:
    """Count the parameters that a rank of pipeline stage ``stage`` trains with adapters.

    Returns the pair (trained parameters outside of experts, trained parameters of experts), and the number of
    base parameters in the adapted layers.
    """
    adapter = Lora.for_model(shape, lora.rank, lora.targets)
    num_dense, num_expert = adapter_parameter_count(shape, layout, stages[stage], adapter)
    # A scalar head has no adapter: all its parameters are trained, on the last stage.
    if shape.scalar_head and stage == len(stages) - 1:
        num_dense += shape.hidden
    num_base = adapted_parameter_count(shape, layout, stages[stage], adapter.targets)
    return (num_dense, num_expert), num_base


def _is_shared_base(config: RunConfig) -> bool:
    """Return whether another role uses the actor's weights as base weights."""
    return any(
        is_initial_actor(config, path) or shares_actor_base(config, path) for path in role_sections(config)
    )


def _adapted_weights_item(
    config: RunConfig, path: str, weights: MemoryItem, adapter_bytes: int, parameters_text: str
) -> MemoryItem:
    """Return the memory item for the weights of a role with adapters; ``path`` is the role's section.

    A role that shares the actor's base weights needs memory only for its adapters. ``weights`` is the item
    for adapters and base weights together. ``adapter_bytes`` is the size of the adapters alone, and
    ``parameters_text`` is the number of trained parameters as text.
    """
    reason = separate_base_reason(config, path)
    if reason is None:
        detail = f"{parameters_text} and the head, over the actor's base"
        return replace(weights, bytes=adapter_bytes, how=detail)
    return replace(weights, how=f"{parameters_text} and the head, and a separate base: {reason}")


def _forward_items(
    role: str,
    item_name: Callable[[str], str],
    forward_memory: TrainingMemory,
    phases: tuple[str, ...],
    tokens_per_rank: str,
    layout: ParallelLayout,
    fused: bool,
) -> list[MemoryItem]:
    """Return the memory items of a role's forward passes: activations, and a chunk of logits.

    ``item_name`` prefixes the name of an item with the role. ``forward_memory`` is the memory of a forward
    pass, and ``tokens_per_rank`` is the number of its tokens as text. The chunk of logits is resident in
    ``phases``. ``fused`` is true for layers of Transformer Engine: ``forward_memory`` then has the
    activations of two layers instead of one.
    """
    detail = f"{tokens_per_rank}, {'2 layers' if fused else 'a layer'}"
    activations = int(forward_memory.activations)
    items = [MemoryItem(item_name("forward activations"), activations, ("score",), detail, role)]

    # Only the last pipeline stage computes logits.
    if forward_memory.logits:
        detail = f"a chunk of tokens x vocabulary / {layout.tensor} x 2 float32 copies"
        items.append(MemoryItem(item_name("logits chunk"), int(forward_memory.logits), phases, detail, role))
    return items


def _frozen_role_items(
    config: RunConfig, role: str, layout: ParallelLayout, rank: int, shape: ModelShape, batch: BatchPlan
) -> list[MemoryItem]:
    """Return the memory items of a frozen role: weights, and the activations of a forward pass."""
    path = section_of(role)
    if spec_of(role).head == NUMBER:
        shape = shape.with_scalar_head()

    layers = _layer_properties(config, shape, "none")
    stages = layers_by_stage(config, layout, shape)
    stage = layout.coordinates(rank).pipeline
    tokens = batch.tokens_per_microbatch
    memory = forward_only_memory(shape, layout, stages, stage, layers, tokens)

    # An offloaded role is in CPU memory while it does not run.
    phases = PHASES
    active_role = None
    if role_sections(config)[path].offload:
        phases = ("score",)
        active_role = role
    detail = f"{memory.weights / layers.dtype_bytes / 1e6:,.1f}M parameters x {layers.dtype_bytes} B"
    weights = MemoryItem(f"{role} weights", int(memory.weights), phases, detail, active_role)
    # If the role is the initial actor, it uses the actor's weights with the adapters off. Report 0 bytes for
    # its weights, so that the table of `check` shows the reason.
    if is_initial_actor(config, path):
        weights = MemoryItem(f"{role} weights", 0, PHASES, "the actor's weights, with adapters off")

    def item_name(content: str) -> str:
        """Return the name of a memory item: the role and the content."""
        return f"{role} {content}"

    tokens_per_rank = f"{tokens // layout.context} tokens"
    forward = _forward_items(role, item_name, memory, ("score",), tokens_per_rank, layout, layers.fused)
    return [weights, *forward]


def _sync_connections_item(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], shape: ModelShape
) -> MemoryItem:
    """Return the memory item for NCCL's connection buffers, which remain after the first weight sync."""
    rollout = layouts["rollout"]
    actor = layouts["actor"]
    node_peers = max_peers_on_node(shared_weights(config, shape), actor, rollout.ranks, config.gpus_per_node)
    connection_bytes = node_peers * NVLINK_PEER_BYTES
    detail = f"at most {node_peers} ranks of the node x {NVLINK_PEER_BYTES >> 20} MiB"

    # On several nodes, NCCL also has buffers for the network.
    if max(*rollout.ranks, *actor.ranks) >= config.gpus_per_node:
        connection_bytes += NETWORK_PEERS_BYTES
        detail += f", {NETWORK_PEERS_BYTES >> 20} MiB for all others"
    return MemoryItem(SYNC_CONNECTIONS, connection_bytes, PHASES, detail)


def episodes_in_flight(config: RunConfig, batch: BatchPlan) -> int:
    """Return an upper bound on the number of episodes that a replica samples at the same time."""
    _, most_rows = batch.rows_per_replica
    in_flight_limit = config.rollout.in_flight_limit
    if in_flight_limit is None:
        return most_rows
    # All samples of a prompt start together, even if they exceed the limit.
    return min(most_rows, max(in_flight_limit, batch.samples))


def _engine_items(
    config: RunConfig,
    layout: ParallelLayout,
    shape: ModelShape,
    batch: BatchPlan,
    awake_phases: tuple[str, ...],
) -> list[MemoryItem]:
    """Return the memory items of an in-process engine, whose weights are resident in ``awake_phases``."""
    element_bytes = DTYPE_BYTES[config.model.dtype]
    parameter_count = rollout_parameters(shape, layout.tensor)
    weight_bytes = element_bytes * parameter_count
    # Staging never needs more than one copy of the weights to send and one to receive.
    staging_bytes = min(config.hybrid_engine.staging_bytes, 2 * weight_bytes)

    bytes_per_token = int(shape.kv_bytes_per_gpu(layout.tensor, element_bytes))
    rows = episodes_in_flight(config, batch)
    bytes_per_row = int(shape.state_bytes_per_row(layout.tensor, element_bytes))
    cache_bytes = (bytes_per_token * batch.longest_row + bytes_per_row) * rows
    detail = f"{rows} rows x {batch.longest_row} tokens x {bytes_per_token} B: all at full length"
    if bytes_per_row:
        detail += f"; {bytes_per_row} B a row for the states of delta nets"
    if config.gpu_memory_gib is not None:
        # vLLM's cache fills the rest of `memory_fraction`. Count only what the rows need, up to this limit.
        engine_limit = int(config.rollout.memory_fraction * config.gpu_memory_gib * 2**30)
        cache_limit = max(0, engine_limit - weight_bytes)
        if cache_limit < cache_bytes:
            cache_bytes = cache_limit
            tokens = cache_limit // max(1, bytes_per_token)
            detail = f"memory_fraction without the weights; has room for {tokens:,} tokens"

    weight_detail = f"{parameter_count / 1e6:,.1f}M parameters x {element_bytes} B"
    return [
        MemoryItem("rollout weights", weight_bytes, awake_phases, weight_detail),
        MemoryItem("key-value cache", cache_bytes, awake_phases, detail),
        MemoryItem("sync staging", staging_bytes, ("generate",), "at most, during a weight sync"),
    ]
