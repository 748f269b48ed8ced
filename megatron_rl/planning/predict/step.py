"""Seconds of a step: what each role does in each phase, added up in one place.

Phase names are the trainer's: generate (without the weight sync), reshard, reward (reward models), score
(log-probs and values), learn. Roles on shared ranks take turns and roles on ranks of their own work at the
same time, as in the trainer, so a phase lasts as long as its busiest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_rl.algorithms.lookup import algorithm_of, scoring_reason
from megatron_rl.config.derive import token_budget
from megatron_rl.config.placement import placed, role_layouts, shared_weights
from megatron_rl.config.roles import role_of, role_sections, section_of, spec_of, stated_models
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import OPEN
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.generate import RolloutLayout, generate_seconds
from megatron_rl.planning.predict.learn import (
    TrainChoice,
    learn_memory,
    learn_seconds,
    score_memory,
    score_seconds,
)
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.memory import OptimizerChoice
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import end_settings
from megatron_rl.shapes.traffic import SharedBytes, WeightTraffic, shared_bytes

PHASES = ("generate", "reshard", "reward", "score", "learn")
TYPICAL_SHARE = 1 / 3
"""Mean response length over the longest, where nothing is known of it."""


@dataclass(frozen=True)
class RoleSeconds:
    """Hold the seconds a role works in a step: one forward pass, learning, and ``moving`` each time it works.

    ``forward`` is 0 where nobody asks the role before it learns. ``moving`` brings its state from host memory
    and back. ``ranks`` says whom it keeps busy: roles with a rank in common take turns.
    """

    role: str
    ranks: Iterable[int]
    forward: float
    learn: float = 0.0
    moving: float = 0.0


@dataclass(frozen=True)
class Step:
    """Hold the seconds of each phase; ``fixed`` seconds belong to none.

    With ``ahead`` the rollout samples the next step's rows while the other roles work.
    """

    seconds: Mapping[str, float]
    fixed: float
    ahead: bool = False

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        generate = self.seconds["generate"]
        train = self.seconds["reward"] + self.seconds["score"] + self.seconds["learn"]
        both = max(generate, train) if self.ahead else generate + train
        return both + self.seconds["reshard"] + self.fixed


def add_up(
    roles: Iterable[RoleSeconds], generate: float, reshard: float, fixed: float, ahead: bool = False
) -> Step:
    """Return the step that these roles make, each phase as long as its busiest rank."""
    busy: dict[str, dict[int, float]] = {"reward": {}, "score": {}, "learn": {}}
    for work in roles:
        phase = spec_of(work.role).phase
        for rank in work.ranks:
            if work.forward:
                busy[phase][rank] = busy[phase].get(rank, 0.0) + work.forward + work.moving
            if work.learn:
                busy["learn"][rank] = busy["learn"].get(rank, 0.0) + work.learn + work.moving
    longest = {phase: max(seconds.values(), default=0.0) for phase, seconds in busy.items()}
    return Step({"generate": generate, "reshard": reshard, **longest}, fixed, ahead)


def copy_seconds(machine: Machine, across: float, inside: float = 0.0) -> float:
    """Return seconds of planned copies, until the card that receives or sends most is done with its bytes.

    ``across`` leave the NVLink domain of the sender, ``inside`` do not. The fixed part and the network's
    share are fitted to published refit times (constants.json).
    """
    constants, cluster = machine.constants, machine.cluster
    seconds = across / (cluster.network * constants.weight_sync.planned_network)
    seconds += inside / (cluster.gpu.nvlink * constants.weight_sync.planned_nvlink)
    return constants.weight_sync.planned_fixed_seconds + seconds


def sync_seconds(traffic: WeightTraffic, senders: int, machine: Machine) -> float:
    """Return seconds of one weight sync out of ``senders`` ranks.

    Each byte that moves leaves the trainer at least once, and replicas relay it to one another. Ranks that
    do not lie in one NVLink domain are taken to receive everything over the network.
    """
    moved = min(sum(traffic.received.values()), traffic.model_bytes)
    busiest = max(traffic.received_most, moved / senders)
    together = machine.cluster.num_gpus <= machine.cluster.domain
    return copy_seconds(machine, 0.0, busiest) if together else copy_seconds(machine, busiest)


@lru_cache(maxsize=4096)
def _shared(model: ModelShape, layout: ParallelLayout, tensor: int, itemsize: int) -> SharedBytes:
    return shared_bytes(model, layout, tensor, itemsize, settings=end_settings(model.layers, layout.pipeline))


def planned_seconds(
    model: ModelShape,
    layout: ParallelLayout,
    rollout: RolloutLayout,
    ranks: Sequence[int],
    machine: Machine,
) -> float:
    """Return seconds of one weight sync into an engine on ``ranks``, in the order they are given."""
    traffic = _shared(model, layout, rollout.tensor, machine.weight_bytes).traffic(ranks)
    return sync_seconds(traffic, layout.size, machine)


@dataclass(frozen=True)
class Observed:
    """Hold mean lengths in tokens that the configuration cannot know; None: see `run_batch`."""

    prompt: float | None = None
    response: float | None = None


@dataclass(frozen=True)
class RunStep:
    """Hold one step of a run, and the FLOPs of the whole job per phase to judge it by.

    ``response_tokens`` are sampled, ``tokens`` are those and the prompts'.
    """

    step: Step
    flops: Mapping[str, float]
    tokens: float
    response_tokens: float
    world: int
    peak_flops: float

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each phase."""
        return self.step.seconds

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return self.step.total

    def rates(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return tokens per second and GPU of each phase that took ``seconds``; generate counts responses."""
        counted = {"generate": self.response_tokens}
        return {
            name: counted.get(name, self.tokens) / seconds[name] / self.world
            for name in ("generate", "reward", "score", "learn")
            if seconds.get(name)
        }

    def utilization(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return model FLOPs over what the GPUs could do in ``seconds``, by phase (causal attention)."""
        could = self.world * self.peak_flops
        return {
            name: flops / seconds[name] / could
            for name, flops in self.flops.items()
            if flops and seconds.get(name)
        }


def run_batch(config: RunConfig, layouts: Mapping[str, ParallelLayout], observed: Observed) -> StepBatch:
    """Return a step's rows.

    What is not observed: prompts are taken at their limit, responses at `TYPICAL_SHARE` of theirs.
    """
    longest = float(config.rollout.max_response_tokens)
    mean = min(observed.response or TYPICAL_SHARE * longest, longest)
    budget = config.batch.tokens_per_microbatch or token_budget(config, layouts["actor"])[0]
    return StepBatch(
        prompts=config.batch.prompts_per_step,
        samples=config.batch.samples_per_prompt,
        optimizer_steps=config.batch.optimizer_steps,
        prompt=observed.prompt or float(config.data.max_prompt_tokens),
        lengths=response_lengths(max(1.0, mean), longest, "variable"),
        longest=float(budget),
        epochs=config.batch.epochs,
        oversample=config.rollout.oversample if config.rollout.order == OPEN else None,
    )


def _choice(config: RunConfig, role: str, layout: ParallelLayout, model: ModelShape) -> TrainChoice:
    spec, sections = spec_of(role), role_sections(config)
    section: Any = config.actor
    if spec.trains:
        section = sections.get(section_of(role)) or spec.section_class()
    optimizer = OptimizerChoice(distributed=section.optimizer.distributed, offload=section.optimizer.offload)
    engine = config.model.attention != "torch"
    lora = section.lora if spec.trains else None
    adapters = None if lora is None else Lora.of(model, lora.rank, lora.targets)
    return TrainChoice(model, layout, section.recompute, optimizer, transformer_engine=engine, lora=adapters)


def role_shapes(config: RunConfig, shape_of: Callable[[str], ModelShape]) -> dict[str, ModelShape]:
    """Return the shape of every role's model; ``shape_of`` returns that of the model at a path."""
    actor = shape_of(config.model.path)
    shapes = {"actor": actor, "rollout": actor}
    for where, stated in stated_models(config).items():
        path = stated or config.model.path
        # A model that the run itself makes (after a warm-up) has the shape of the one it starts from.
        shapes[role_of(where)] = actor if path.startswith(config.run_dir) else shape_of(path)
    return shapes


def _moving_seconds(
    config: RunConfig, role: str, choice: TrainChoice, batch: StepBatch, machine: Machine
) -> float:
    """Return seconds to bring a role's state from host memory and back, 0 where it stays on the GPU."""
    section = role_sections(config).get(section_of(role))
    if section is None or not section.offload:
        return 0.0
    memory_of = learn_memory if spec_of(role).trains else score_memory
    return 2.0 * memory_of(choice, batch).resting / machine.host_rate


def _rollout(config: RunConfig, layout: ParallelLayout) -> RolloutLayout:
    return RolloutLayout(
        tensor=layout.tensor,
        expert=layout.tensor if config.rollout.vllm.get("enable_expert_parallel") else 1,
        replicas=max(1, layout.data),
        max_sequences=config.rollout.most_in_flight,
        memory_fraction=config.rollout.memory_fraction,
    )


def predict_run(
    config: RunConfig,
    constants: Constants,
    gpu: str,
    shapes: Mapping[str, ModelShape],
    observed: Observed | None = None,
    precision: str = "bf16",
) -> RunStep:
    """Predict one step of a configuration whose ``world_size`` is stated; ``shapes`` are by role.

    Raises UserError on an unknown GPU.
    """
    world = config.world_size or 1
    layouts = role_layouts(config, world)
    cluster = constants.cluster(gpu, world, config.gpus_per_node, config.network_gigabits_per_gpu)
    machine = Machine(cluster, constants, precision)
    batch = run_batch(config, layouts, observed or Observed())
    flops: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    works = []
    for role, layout in layouts.items():
        spec = spec_of(role)
        if spec.head is None:
            continue
        choice = _choice(config, role, layout, shapes[role])
        trained = spec.trains
        scores = role != "actor" or scoring_reason(config, algorithm_of(config)) is not None
        works.append(
            RoleSeconds(
                role,
                layout.ranks,
                forward=score_seconds(choice, batch, machine) if scores else 0.0,
                learn=learn_seconds(choice, batch, machine) if trained else 0.0,
                moving=_moving_seconds(config, role, choice, batch, machine),
            )
        )
        forward_flops = choice.model.forward_flops(batch.context) * batch.tokens
        flops[spec.phase] += forward_flops if scores else 0.0
        # Weights that learn cost a product of their own in the backward pass.
        passes = 0 if not trained else 3 if choice.lora is None else 2
        flops["learn"] += passes * batch.epochs * forward_flops
    actor, rollout = shapes["actor"], _rollout(config, layouts["rollout"])
    flops["generate"] = actor.forward_flops(batch.context) * batch.tokens
    traffic = shared_weights(placed(config, world), actor).traffic(layouts["rollout"].ranks)
    step = add_up(
        works,
        generate=generate_seconds(actor, rollout, batch, machine),
        reshard=sync_seconds(traffic, layouts["actor"].size, machine),
        fixed=constants.efficiency.rl_fixed_seconds,
        ahead=config.asynchrony.steps_ahead > 0,
    )
    return RunStep(
        step=step,
        flops=flops,
        tokens=batch.tokens,
        response_tokens=batch.rows * batch.lengths.mean,
        world=world,
        peak_flops=cluster.gpu.bf16_flops,
    )
