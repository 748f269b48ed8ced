"""Seconds of a step, combined from the seconds of each role in each phase.

Phase names are the trainer's: generate (without the weight sync), reshard, reward (reward models), score
(log-probs and values), learn. As in the trainer, roles on shared ranks take turns, and roles on separate
ranks work at the same time. So a phase takes as many seconds as its busiest rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_rl.algorithms.lookup import algorithm_of, scoring_pass_reason
from megatron_rl.check.configuration import CheckReport
from megatron_rl.config.derive import token_budget
from megatron_rl.config.placement import role_layouts, shared_weights, with_ranks
from megatron_rl.config.roles import ACTOR, explicit_model_paths, role_of, role_sections, section_of, spec_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import OPEN
from megatron_rl.errors import UserError
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.generate import RolloutLayout, generate_seconds
from megatron_rl.planning.predict.learn import (
    TrainChoice,
    learn_memory,
    learn_seconds,
    score_memory,
    score_seconds,
)
from megatron_rl.shapes.hardware import Constants, Machine, load_constants
from megatron_rl.shapes.layout import ParallelLayout, end_settings
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.memory import OptimizerChoice
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.traffic import SharedBytes, WeightTraffic, shared_bytes

PHASES = ("generate", "reshard", "reward", "score", "learn")
TYPICAL_SHARE = 1 / 3
"""Assumed ratio of mean response length to the limit, without measured lengths."""
ASSUMED_GPU = "h100"
"""GPU for predictions if the configuration names no GPU."""


@dataclass(frozen=True)
class RoleSeconds:
    """Predicted seconds of a role's work in one step, and its ranks.

    Example: ``RoleSeconds("actor", range(8), forward=2.1, learn=6.4)``.
    """

    role: str
    """Name of the role."""
    ranks: Iterable[int]
    """Ranks of the role; roles with a rank in common take turns."""
    forward: float
    """Seconds of the forward pass over the step's rows; 0 if no phase needs its outputs."""
    learn: float = 0.0
    """Seconds of the optimizer steps."""
    reload_seconds: float = 0.0
    """Seconds to load offloaded states from host memory and store them again, in each phase of the role."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step by phase.

    Example: a step of 31 s, with 20 s of generation::

        StepSeconds({"generate": 20.0, "reshard": 1.0, "reward": 0.0, "score": 3.0, "learn": 6.0}, fixed=1.0)
    """

    seconds: Mapping[str, float]
    """Seconds of each of `PHASES`."""
    fixed: float
    """Seconds outside of all phases."""
    samples_ahead: bool = False
    """Whether the rollout samples the next step's rows while the other roles work."""

    @property
    def total(self) -> float:
        """Return the seconds of the complete step, in which generation may overlap with other phases."""
        generation_seconds = self.seconds["generate"]
        # The phases after generation run one after another.
        training_seconds = self.seconds["reward"] + self.seconds["score"] + self.seconds["learn"]
        if self.samples_ahead:
            sampling_and_training = max(generation_seconds, training_seconds)
        else:
            sampling_and_training = generation_seconds + training_seconds
        return sampling_and_training + self.seconds["reshard"] + self.fixed


def compose_step(
    roles: Iterable[RoleSeconds],
    generate: float,
    reshard: float,
    fixed: float,
    samples_ahead: bool = False,
) -> StepSeconds:
    """Combine the seconds of all roles into the seconds of a step.

    On each rank the seconds of the rank's roles add up; the seconds of a phase are the maximum over ranks.
    ``generate`` and ``reshard`` are the seconds of these phases. ``fixed`` are the seconds outside of all
    phases. ``samples_ahead``: whether the rollout samples the next step's rows while the other roles work.
    """
    # Phase -> rank -> seconds: the times of roles that share a rank add up.
    rank_seconds: dict[str, dict[int, float]] = {
        "reward": defaultdict(float),
        "score": defaultdict(float),
        "learn": defaultdict(float),
    }
    for role_seconds in roles:
        forward_phase = spec_of(role_seconds.role).phase
        for rank in role_seconds.ranks:
            # A role's offloaded states are loaded and stored again in each phase in which it works.
            if role_seconds.forward:
                rank_seconds[forward_phase][rank] += role_seconds.forward + role_seconds.reload_seconds
            if role_seconds.learn:
                rank_seconds["learn"][rank] += role_seconds.learn + role_seconds.reload_seconds

    seconds = {"generate": generate, "reshard": reshard}
    for phase, seconds_by_rank in rank_seconds.items():
        seconds[phase] = max(seconds_by_rank.values(), default=0.0)
    return StepSeconds(seconds, fixed, samples_ahead)


def weight_transfer_seconds(machine: Machine, remote_bytes: float, domain_bytes: float = 0.0) -> float:
    """Return the seconds of a weight sync on the GPU that sends or receives the most bytes.

    The messages of the sync are planned in advance: each rank receives only the slices of tensors that it
    needs and does not have. ``remote_bytes`` leave the NVLink domain of the sender, ``domain_bytes`` do not.

    The constants ``planned_*`` of constants.json are the fixed seconds of such a sync, and the fractions of
    the network's and of NVLink's rate that it reaches. They are fitted to published times of weight syncs.
    """
    cluster = machine.cluster
    weight_sync = machine.constants.weight_sync
    network_rate = cluster.network * weight_sync.planned_network
    nvlink_rate = cluster.gpu.nvlink * weight_sync.planned_nvlink

    # Assume that a rank's network and NVLink transfers do not overlap.
    transfer_seconds = remote_bytes / network_rate + domain_bytes / nvlink_rate
    return weight_sync.planned_fixed_seconds + transfer_seconds


def sync_seconds(traffic: WeightTraffic, num_senders: int, machine: Machine) -> float:
    """Return the seconds of one weight sync from ``num_senders`` ranks.

    The trainer sends each byte once, and replicas relay it to one another. Unless all ranks are in one NVLink
    domain, all bytes are assumed to be received over the network.
    """
    # Receivers send the relayed copies, so the trainer sends at most one copy of the model.
    sent_bytes = min(sum(traffic.received.values()), traffic.model_bytes)
    busiest_bytes = max(traffic.received_most, sent_bytes / num_senders)
    if machine.cluster.num_gpus <= machine.cluster.domain:
        return weight_transfer_seconds(machine, 0.0, busiest_bytes)
    return weight_transfer_seconds(machine, busiest_bytes)


@lru_cache(maxsize=4096)
def _shared_bytes(model: ModelShape, layout: ParallelLayout, tensor: int, itemsize: int) -> SharedBytes:
    """Compute `shared_bytes`; cached, since a search evaluates the same layouts repeatedly."""
    settings = end_settings(model.layers, layout.pipeline)
    return shared_bytes(model, layout, tensor, itemsize, settings=settings)


def planned_sync_seconds(
    model: ModelShape,
    layout: ParallelLayout,
    rollout: RolloutLayout,
    ranks: Sequence[int],
    machine: Machine,
) -> float:
    """Return the seconds of one weight sync into an engine whose replicas are consecutive ``ranks``."""
    rank_bytes = _shared_bytes(model, layout, rollout.tensor, machine.bytes_per_weight)
    return sync_seconds(rank_bytes.traffic(ranks), layout.size, machine)


@dataclass(frozen=True)
class RunStats:
    """Measured mean lengths of a run's rows, in tokens; see `build_step_batch`.

    Example: ``RunStats(prompt_length=310.0, response_length=1250.0)``.
    """

    prompt_length: float | None = None
    """Mean length of a prompt, or None if it was not measured."""
    response_length: float | None = None
    """Mean length of a response, or None if it was not measured."""


@dataclass(frozen=True)
class RunStep:
    """Predicted seconds and FLOPs of one step of a run."""

    step: StepSeconds
    """Predicted seconds of one step, by phase."""
    flops: Mapping[str, float]
    """Model FLOPs of the complete job by phase."""
    tokens: float
    """Number of tokens of all rows, prompts included."""
    response_tokens: float
    """Number of sampled tokens of all rows."""
    world: int
    """Number of ranks of the job."""
    peak_flops: float
    """Peak of one GPU in bfloat16, FLOP/s."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each phase of the step, by phase."""
        return self.step.seconds

    @property
    def total(self) -> float:
        """Return the seconds of the complete step."""
        return self.step.total

    def rates(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the throughput of each phase in tokens/s per GPU; ``seconds`` are by phase.

        Generation counts the tokens of responses; the other phases also count the tokens of prompts.
        """
        rates = {}
        for phase in ("generate", "reward", "score", "learn"):
            tokens = self.tokens
            if phase == "generate":
                tokens = self.response_tokens

            # A phase without work has no rate.
            if seconds.get(phase):
                rates[phase] = tokens / seconds[phase] / self.world
        return rates

    def utilization(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the model FLOPs utilization (causal attention) of each phase; ``seconds`` are by phase."""
        job_peak = self.world * self.peak_flops
        utilization = {}
        for phase, flops in self.flops.items():
            if flops and seconds.get(phase):
                utilization[phase] = flops / seconds[phase] / job_peak
        return utilization


@dataclass(frozen=True)
class CheckedStep:
    """Prediction of one step of a checked configuration.

    Example: ``CheckedStep("H100-80GB", response_tokens=1024.0, step=step)``, or, without a prediction,
    ``CheckedStep(reason="the configuration has errors")``.
    """

    gpu: str | None = None
    """Name of the GPU in constants.json; None without a prediction."""
    is_gpu_assumed: bool = False
    """Whether the GPU is `ASSUMED_GPU`, because the configuration has none."""
    response_tokens: float = 0.0
    """Assumed mean length of a response, in tokens."""
    step: RunStep | None = None
    """Seconds and FLOPs of the step; None without a prediction."""
    reason: str = ""
    """Reason for a missing prediction; otherwise empty."""


def build_step_batch(config: RunConfig, layouts: Mapping[str, ParallelLayout], stats: RunStats) -> StepBatch:
    """Build the batch of one step: the number of rows, and the distribution of their lengths.

    Without measured lengths, prompts have the configured maximum length. The mean response length is
    `TYPICAL_SHARE` of the configured maximum.
    """
    response_limit = float(config.rollout.response_limit)
    mean_response = min(stats.response_length or TYPICAL_SHARE * response_limit, response_limit)
    lengths = response_lengths(max(1.0, mean_response), response_limit, "variable")

    # Micro-batches are packed up to this many tokens.
    token_limit = config.batch.tokens_per_microbatch
    if not token_limit:
        token_limit = token_budget(config, layouts["actor"])[0]

    oversample = None
    if config.rollout.order == OPEN:
        oversample = config.rollout.oversample
    return StepBatch(
        prompts=config.batch.prompts_per_step,
        samples=config.batch.samples_per_prompt,
        optimizer_steps=config.batch.optimizer_steps,
        prompt_length=stats.prompt_length or float(config.data.max_prompt_tokens),
        lengths=lengths,
        row_limit=float(token_limit),
        epochs=config.batch.epochs,
        oversample=oversample,
    )


def train_choice(
    config: RunConfig,
    role: str,
    layout: ParallelLayout,
    model: ModelShape,
) -> TrainChoice:
    """Return the layout and training settings of a role's model.

    For a frozen role only the layout has an effect.
    """
    # A frozen role has no training settings: read the actor's, which have no effect.
    spec = spec_of(role)
    section: Any = config.actor
    lora = None
    if spec.trains:
        section = role_sections(config).get(section_of(role)) or spec.section_class()
        lora = section.lora

    adapters = None
    if lora is not None:
        adapters = Lora.for_model(model, lora.rank, lora.targets)

    optimizer = section.optimizer
    return TrainChoice(
        model,
        layout,
        section.recompute,
        OptimizerChoice(distributed=optimizer.distributed, offload=optimizer.offload),
        transformer_engine=config.model.attention != "torch",
        lora=adapters,
    )


def role_shapes(config: RunConfig, shape_of: Callable[[str], ModelShape]) -> dict[str, ModelShape]:
    """Return the shape of every role's model; ``shape_of`` returns the shape of the model at a path."""
    actor = shape_of(config.model.path)
    shapes = {"actor": actor, "rollout": actor}
    for section, model_path in explicit_model_paths(config).items():
        path = model_path or config.model.path
        # An earlier stage of the run trains this model. It begins with the actor's model, so both have the
        # same shape.
        if path.startswith(config.run_dir):
            shapes[role_of(section)] = actor
        else:
            shapes[role_of(section)] = shape_of(path)
    return shapes


def _reload_seconds(
    config: RunConfig,
    role: str,
    choice: TrainChoice,
    batch: StepBatch,
    machine: Machine,
) -> float:
    """Return the seconds to load a role's states from the host and to store them there; 0 without offload."""
    section = role_sections(config).get(section_of(role))
    if section is None or not section.offload:
        return 0.0

    if spec_of(role).trains:
        memory = learn_memory(choice, batch)
    else:
        memory = score_memory(choice, batch)
    # Load and store.
    return 2.0 * memory.states / machine.host_rate


def _rollout_layout(config: RunConfig, layout: ParallelLayout) -> RolloutLayout:
    """Convert the configured layout of the rollout engine to a `RolloutLayout`."""
    # vLLM distributes experts over the tensor-parallel ranks of a replica.
    expert = 1
    if config.rollout.vllm.get("enable_expert_parallel"):
        expert = layout.tensor
    return RolloutLayout(
        tensor=layout.tensor,
        expert=expert,
        replicas=max(1, layout.data),
        max_sequences=config.rollout.in_flight_limit,
        memory_fraction=config.rollout.memory_fraction,
    )


def predict_run(
    config: RunConfig,
    constants: Constants,
    gpu: str,
    shapes: Mapping[str, ModelShape],
    stats: RunStats | None = None,
    precision: str = "bf16",
) -> RunStep:
    """Predict one step of a configuration whose ``world_size`` is set.

    ``shapes`` are the models' shapes by role, ``stats`` the measured lengths of a run. Raises UserError for
    an unknown GPU.
    """
    world_size = config.world_size or 1
    layouts = role_layouts(config, world_size)
    cluster = constants.cluster(gpu, world_size, config.gpus_per_node, config.network_gigabits_per_gpu)
    machine = Machine(cluster, constants, precision)
    batch = build_step_batch(config, layouts, stats or RunStats())

    # For every role with a Megatron model: forward pass, optimizer steps, and transfers to and from the host.
    flops: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    role_seconds = []
    for role, layout in layouts.items():
        # The rollout has no Megatron model.
        spec = spec_of(role)
        if spec.head is None:
            continue

        choice = train_choice(config, role, layout, shapes[role])
        forward_flops = choice.model.forward_flops(batch.context) * batch.tokens

        # The actor needs no separate forward pass if the first optimizer step computes the same log-probs.
        needs_forward = role != ACTOR.name or scoring_pass_reason(config, algorithm_of(config)) is not None
        forward_seconds = 0.0
        if needs_forward:
            forward_seconds = score_seconds(choice, batch, machine)
            flops[spec.phase] += forward_flops

        optimizer_seconds = 0.0
        if spec.trains:
            optimizer_seconds = learn_seconds(choice, batch, machine)
            # Forward pass, gradients of the inputs, and gradients of the weights unless only adapters train.
            num_passes = 2
            if choice.lora is None:
                num_passes = 3
            flops["learn"] += num_passes * batch.epochs * forward_flops

        reload_seconds = _reload_seconds(config, role, choice, batch, machine)
        role_seconds.append(
            RoleSeconds(role, layout.ranks, forward_seconds, optimizer_seconds, reload_seconds)
        )

    # Generation and the weight sync.
    actor = shapes["actor"]
    rollout = _rollout_layout(config, layouts["rollout"])
    flops["generate"] = actor.forward_flops(batch.context) * batch.tokens
    rank_bytes = shared_weights(with_ranks(config, world_size), actor)
    traffic = rank_bytes.traffic(layouts["rollout"].ranks)

    step = compose_step(
        role_seconds,
        generate=generate_seconds(actor, rollout, batch, machine),
        reshard=sync_seconds(traffic, layouts["actor"].size, machine),
        fixed=constants.efficiency.rl_fixed_seconds,
        samples_ahead=config.asynchrony.steps_ahead > 0,
    )
    return RunStep(
        step=step,
        flops=flops,
        tokens=batch.tokens,
        response_tokens=batch.rows * batch.lengths.mean,
        world=world_size,
        peak_flops=cluster.gpu.bf16_flops,
    )


def predict_checked_step(report: CheckReport) -> CheckedStep:
    """Predict the time of one training step of a checked configuration.

    The GPU is that of the configuration, or `ASSUMED_GPU` if the configuration names none. If no prediction
    is possible, the result contains the reason instead.
    """
    config = report.config
    if report.errors or report.layouts is None:
        return CheckedStep(reason="the configuration has errors")
    if report.batch is None:
        return CheckedStep(reason="the job has no steps of reinforcement learning")
    if report.shape is None:
        return CheckedStep(reason="the model's config.json is not on this machine")
    if not config.rollout.capabilities.in_process:
        return CheckedStep(reason="generation takes as long as the servers need")
    # The planner's constants are rates of GPUs in half precision. In float32 models run only on CPUs.
    if config.model.dtype == "float32":
        return CheckedStep(reason="constants are for bfloat16 on GPUs, and model.dtype is float32")

    constants = load_constants()
    try:
        gpu = constants.gpu(config.gpu or ASSUMED_GPU)
    except UserError:
        return CheckedStep(reason=f"the planner has no constants of {config.gpu}")

    # The prediction imports the algorithm. The check may have accepted an algorithm that only other machines
    # can import.
    try:
        algorithm_of(config)
    except UserError:
        return CheckedStep(reason="a piece of the algorithm cannot be imported here")

    shapes = {role: report.shapes.get(role, report.shape) for role in report.layouts}
    step = predict_run(config, constants, gpu.name, shapes)
    rows = report.batch.prompts * report.batch.samples
    return CheckedStep(gpu.name, config.gpu is None, step.response_tokens / rows, step)
