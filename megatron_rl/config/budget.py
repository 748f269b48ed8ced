"""What each rank of a run holds in each phase of a step: `shapes.memory` for every role by its own shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.config.adapters import (
    adapters_of,
    is_initial_actor,
    lora_apart,
    own_base_reason,
    shares_actor_base,
)
from megatron_rl.config.derive import BatchPlan, spread
from megatron_rl.config.placement import megatron_settings, sleeping_ranks
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
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.stage_plan import stage_plans
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora, adapted_parameter_count, adapter_parameter_count
from megatron_rl.shapes.memory import (
    RUNTIME_BYTES,
    Layers,
    OptimizerChoice,
    TrainingMemory,
    rollout_parameters,
    scoring_memory,
    training_memory,
)
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape
from megatron_rl.shapes.pipeline_stages import default_stage_layers, stage_layers

PHASES = ("generate", "score", "learn")
_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
"""Bytes of the types in which Megatron keeps moments and master weights."""


@dataclass(frozen=True)
class MemoryItem:
    """Name one contributor, its bytes, the phases in which it is held, and how it was counted.

    What has a ``turn`` is held only while that role works: roles that share ranks work one after the other,
    and one that offloads has nothing on the device meanwhile. What has no phases is held by the host.
    """

    name: str
    bytes: int
    phases: tuple[str, ...]
    how: str
    turn: str | None = None


@dataclass(frozen=True)
class RankMemory:
    """Hold the contributors of one rank."""

    rank: int
    items: tuple[MemoryItem, ...]

    def total(self, phase: str) -> int:
        """Return the most bytes held at once in a phase: what stays, and the largest of the roles' turns."""
        turns = (self._bytes(phase, role) for role in self.turns(phase))
        return self._bytes(phase, None) + max(turns, default=0)

    def _bytes(self, phase: str, turn: str | None) -> int:
        return sum(item.bytes for item in self.items if phase in item.phases and item.turn == turn)

    def turns(self, phase: str) -> list[str]:
        """Return the roles that work one after the other in a phase, in the order of their items."""
        return list(dict.fromkeys(item.turn for item in self.items if phase in item.phases and item.turn))

    @property
    def peak(self) -> int:
        """Return the bytes held in the fullest phase."""
        return max(self.total(phase) for phase in PHASES)


@dataclass
class Usage:
    """Hold what one phase took on a rank: bytes on its device at its begin, at most and at its end; counts.

    ``kernels`` are operators that compute, ``reads`` waits for values of the device. ``calls`` and ``bytes``
    count by kind of group what goes over the network; point-to-point messages are under ``messages``.
    """

    begin: int = 0
    peak: int = 0
    end: int = 0
    kernels: int = 0
    reads: int = 0
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True)
class SimulatedRank:
    """Hold what each phase takes on one rank, and the groups that it is in.

    ``resting`` are the bytes that its models keep on the device while another role works. ``groups`` are
    kinds and numbers of members.
    """

    rank: int
    phases: Mapping[str, Usage]
    resting: int
    groups: Sequence[tuple[str, int]]

    @property
    def connections(self) -> int:
        """Return how many connections of the host's backend the rank comes to have, at most.

        They are made when collectives first need them: with ranks at distances that double.
        """
        return sum(min(members - 1, 2 * (members - 1).bit_length()) for _, members in self.groups)


def memory_plan(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shapes: Mapping[str, ModelShape],
    batch: BatchPlan | None,
) -> list[RankMemory]:
    """Return for each distinct rank what it holds; ranks that hold the same are listed once.

    ``shapes`` are those of the roles that have a model of their own; the others have the actor's. ``batch``
    is None for a job of one stage, which only learns.
    """
    asleep = sleeping_ranks(layouts) if "rollout" in layouts else frozenset[int]()
    first_rank: dict[tuple[MemoryItem, ...], int] = {}
    for rank in sorted({rank for layout in layouts.values() for rank in layout.ranks}):
        first_rank.setdefault(rank_memory(config, layouts, shapes, batch, rank, asleep).items, rank)
    ranks = [RankMemory(rank, items) for items, rank in first_rank.items()]
    return sorted(ranks, key=lambda memory: -memory.peak)


def rank_memory(
    config: RunConfig,
    layouts: Mapping[str, ParallelLayout],
    shapes: Mapping[str, ModelShape],
    batch: BatchPlan | None,
    rank: int,
    asleep: frozenset[int] = frozenset(),
) -> RankMemory:
    """Return what one rank holds; arguments as in `memory_plan`. Engines of ranks ``asleep`` sleep."""
    learners = _stage_learners(config, layouts) if batch is None else _learners(config, batch)
    items: list[MemoryItem] = []
    for role, layout in layouts.items():
        if rank not in layout.ranks:
            continue
        shape = shapes.get(role, shapes["actor"])
        if role in learners:
            items += _trained(config, role, learners[role], layout, rank, shape)
            continue
        assert batch is not None
        if role == "rollout" and not config.rollout.capabilities.in_process:
            continue  # the servers' memory is not the job's
        if role == "rollout":
            awake = ("generate",) if rank in asleep else PHASES
            items += _rollout(config, layout, shape, batch, awake)
        else:
            items += _frozen(config, role, layout, rank, shape, batch)
    if config.gpu_memory_gib is not None:
        phases = ("learn",) if batch is None else PHASES
        items.append(MemoryItem("runtime", RUNTIME_BYTES, phases, "CUDA, NCCL, fragmentation"))
    return RankMemory(rank, tuple(items))


@dataclass(frozen=True)
class _Learner:
    """Say how a role learns, from how many micro-batches of ``tokens`` tokens; ``alone``: in a stage."""

    recompute: str
    optimizer: OptimizerConfig
    tokens: int
    microbatches: int
    offload: bool = False
    alone: bool = False


def _learners(config: RunConfig, batch: BatchPlan) -> dict[str, _Learner]:
    return {
        role_of(path): _Learner(
            section.recompute,
            section.optimizer,
            batch.tokens_per_microbatch,
            batch.microbatches,
            section.offload,
        )
        for path, section in learner_sections(config).items()
    }


def _stage_learners(config: RunConfig, layouts: Mapping[str, ParallelLayout]) -> dict[str, _Learner]:
    learners, tokens = {}, config.batch.tokens_per_microbatch
    assert tokens is not None
    for plan in stage_plans(config):
        role, settings = role_of(plan.role), plan.settings
        assert settings.max_row_tokens is not None
        rows = spread(settings.per_step * len(settings.RESPONSES), layouts[role].data)[1]
        learners[role] = _Learner(
            config.actor.recompute if role == "actor" else "none",
            settings.optimizer,
            tokens,
            -(-rows // max(1, tokens // settings.max_row_tokens)),
            alone=True,
        )
    return learners


def _stages(config: RunConfig, layout: ParallelLayout, shape: ModelShape) -> Sequence[Sequence[int]]:
    """Return the layers of each stage, also where Megatron's settings deal them out in a way of their own."""
    try:
        return stage_layers(shape.layers, layout, megatron_settings(config, layout)[1])
    except UserError:
        return default_stage_layers(shape.layers, layout.pipeline)


def _built(config: RunConfig, shape: ModelShape, recompute: str) -> Layers:
    fused = config.model.attention == "transformer_engine" and not shape.plain_layers
    return Layers(DTYPE_BYTES[config.model.dtype], fused, recompute)


def state_bytes(optimizer: OptimizerConfig, weight_bytes: int) -> int:
    """Return an optimizer's bytes per parameter: its moments, and a master copy of weights of fewer bytes.

    On the host it has a copy of all weights and of their gradients too.
    """
    if optimizer.offload:
        return 16

    def stated(field: str) -> int:
        return _STATE_BYTES.get(str(optimizer.megatron.get(field, "float32")).removeprefix("torch."), 4)

    moments = ("exp_avg_dtype", "exp_avg_sq_dtype") if optimizer.name == "adam" else ("momentum",)
    master = 0 if weight_bytes == 4 else stated("main_params_dtype")
    return master + sum(stated(moment) for moment in moments)


def saved_bytes(held: int, optimizer: OptimizerConfig, weight_bytes: int) -> int:
    """Return the bytes in a checkpoint of an optimizer that holds so many: a distributed one adds weights."""
    states = state_bytes(optimizer, weight_bytes)
    if optimizer.offload:
        return held * 12 // states  # without gradients
    return held * (states + 4 * (optimizer.distributed and weight_bytes == 4)) // states


def _trained(
    config: RunConfig, role: str, learner: _Learner, layout: ParallelLayout, rank: int, shape: ModelShape
) -> list[MemoryItem]:
    spec, path = spec_of(role), section_of(role)
    shape = shape.with_scalar_head() if spec.head == NUMBER else shape

    def named(item: str) -> str:
        return item if role == "actor" else f"{role} {item}"

    built = _built(config, shape, learner.recompute)
    stages, stage = _stages(config, layout, shape), layout.coordinates(rank).pipeline
    states = state_bytes(learner.optimizer, built.dtype_bytes)
    optimizer = OptimizerChoice(distributed=learner.optimizer.distributed, state_bytes=states)
    tokens = learner.tokens
    adapters, merged, lora = None, 0, adapters_of(config).get(path)
    if lora is not None:
        learned = Lora.of(shape, lora.rank, lora.targets)
        dense, experts = adapter_parameter_count(shape, layout, stages[stage], learned)
        if shape.scalar_head and stage == len(stages) - 1:
            dense += shape.hidden  # the head
        adapters = dense, experts
        if role == "actor" and lora_apart(config) is None:
            merged = built.dtype_bytes * adapted_parameter_count(
                shape, layout, stages[stage], learned.targets
            )
    memory = training_memory(
        shape, layout, stages, stage, optimizer, built, tokens, learner.microbatches, adapters
    )
    scoring = scoring_memory(shape, layout, stages, stage, built, tokens)
    scored, learned = (("score", "learn"), ("learn",)) if learner.offload else (PHASES, PHASES)
    turn = role if learner.offload else None
    count = f"{memory.weights / built.dtype_bytes / 1e6:,.1f}M parameters"
    learning = count if adapters is None else f"{sum(adapters) / 1e6:,.1f}M parameters of adapters"
    how = f"{count} x {built.dtype_bytes} B"
    own_turn = None if role == "actor" and _is_base(config) else turn
    weights = MemoryItem(f"{role} weights", int(memory.weights), scored, how, own_turn)
    if spec.shares == ADAPTED and adapters is not None:
        weights = _with_base(config, path, weights, built.dtype_bytes * sum(adapters), learning)
    items = [
        weights,
        MemoryItem(named("gradients"), int(memory.gradients), learned, f"{learning} x 4 B (float32)", turn),
    ]
    if merged and not learner.alone:
        how = "with the adapters added in, while weights move"
        items.append(MemoryItem("merged weights", merged, ("generate",), how))
    shared = f"shared by {layout.data * layout.context}" if optimizer.distributed else "not shared"
    how = f"{states} B per parameter, {shared}"
    held = () if learner.optimizer.offload else learned
    items.append(MemoryItem(named("optimizer"), int(memory.optimizer), held, how, turn))
    part = f"{tokens // layout.context} tokens"
    how = f"{part} x {len(stages[stage])} layers x micro-batches in flight, recompute {learner.recompute}"
    items.append(MemoryItem(named("activations"), int(memory.activations), ("learn",), how, role))
    items += _forward(role, named, scoring, ("score", "learn"), part, layout, built.fused)
    if not learner.alone:
        return items
    # Nobody else is there, and the models that one job trains come one after the other.
    learns = [replace(item, phases=("learn",), turn=role) for item in items if "learn" in item.phases]
    return learns + [item for item in items if not item.phases]


def _is_base(config: RunConfig) -> bool:
    """Return whether another role computes with the actor's weights in its own turn."""
    return any(
        is_initial_actor(config, path) or shares_actor_base(config, path) for path in role_sections(config)
    )


def _with_base(
    config: RunConfig, path: str, weights: MemoryItem, added_bytes: int, learning: str
) -> MemoryItem:
    """Return a role's weights where its adapters learn: ``added_bytes`` alone over the actor's base."""
    reason = own_base_reason(config, path)
    if reason is None:
        return replace(weights, bytes=added_bytes, how=f"{learning} and the head, over the actor's base")
    return replace(weights, how=f"{learning} and the head, and a base of its own: {reason}")


def _forward(
    role: str,
    named: Callable[[str], str],
    scoring: TrainingMemory,
    phases: tuple[str, ...],
    part: str,
    layout: ParallelLayout,
    fused: bool,
) -> list[MemoryItem]:
    """Return what a forward pass holds; a chunk of logits exists in all of ``phases``."""
    how = f"{part}, {'2 layers' if fused else 'a layer'}"
    items = [MemoryItem(named("forward activations"), int(scoring.activations), ("score",), how, role)]
    if scoring.logits:
        how = f"a chunk of tokens x vocabulary / {layout.tensor} x 2 float32 copies"
        items.append(MemoryItem(named("logits chunk"), int(scoring.logits), phases, how, role))
    return items


def _frozen(
    config: RunConfig, role: str, layout: ParallelLayout, rank: int, shape: ModelShape, batch: BatchPlan
) -> list[MemoryItem]:
    path = section_of(role)
    offload = role_sections(config)[path].offload
    if spec_of(role).head == NUMBER:
        shape = shape.with_scalar_head()

    built = _built(config, shape, "none")
    stages, stage = _stages(config, layout, shape), layout.coordinates(rank).pipeline
    tokens = batch.tokens_per_microbatch
    memory = scoring_memory(shape, layout, stages, stage, built, tokens)
    how = f"{memory.weights / built.dtype_bytes / 1e6:,.1f}M parameters x {built.dtype_bytes} B"
    phases, turn = (("score",), role) if offload else (PHASES, None)
    weights = MemoryItem(f"{role} weights", int(memory.weights), phases, how, turn)
    if is_initial_actor(config, path):
        weights = MemoryItem(f"{role} weights", 0, PHASES, "the actor's own, its adapters off")
    part = f"{tokens // layout.context} tokens"
    return [
        weights,
        *_forward(role, lambda item: f"{role} {item}", memory, ("score",), part, layout, built.fused),
    ]


def episodes_in_flight(config: RunConfig, batch: BatchPlan) -> int:
    """Return the most episodes that a replica samples at once, as far as settings bound them."""
    rows, most = batch.rows_per_replica[1], config.rollout.most_in_flight
    return rows if most is None else min(rows, max(most, batch.samples))


def _rollout(
    config: RunConfig, layout: ParallelLayout, shape: ModelShape, batch: BatchPlan, awake: tuple[str, ...]
) -> list[MemoryItem]:
    """Return what an engine holds that is ``awake`` in these phases."""
    size = DTYPE_BYTES[config.model.dtype]
    parameters = rollout_parameters(shape, layout.tensor)
    weights = size * parameters
    staging = min(config.hybrid_engine.staging_bytes, 2 * weights)
    per_token = int(shape.kv_bytes_per_gpu(layout.tensor, size))
    rows = episodes_in_flight(config, batch)
    cache = per_token * rows * batch.longest_row
    how = f"{rows} rows x {batch.longest_row} tokens x {per_token} B: all at full length"
    if config.gpu_memory_gib is not None:
        room = max(0, int(config.rollout.memory_fraction * config.gpu_memory_gib * 2**30) - weights)
        if room < cache:
            cache, how = (
                room,
                f"what memory_fraction leaves; holds {room // max(1, per_token):,} tokens at once",
            )
    return [
        MemoryItem("rollout weights", weights, awake, f"{parameters / 1e6:,.1f}M parameters x {size} B"),
        MemoryItem("key-value cache", cache, awake, how),
        MemoryItem("sync staging", staging, ("generate",), "at most, while weights move"),
    ]
