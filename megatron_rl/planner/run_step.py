"""The step of a run configuration: seconds predicted per phase, and FLOPs to judge them by.

Roles on shared ranks take turns and roles on ranks of their own work at the same time, as in the trainer,
so a phase lasts as long as its busiest rank. Phase names are the trainer's: generate (without the weight
sync), reshard, reward (reward models), score (log-probs and values), learn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_rl.config.derive import token_budget
from megatron_rl.config.placement import role_layouts
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import CriticConfig
from megatron_rl.planner.constants import GB, Cluster, Constants
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.lengths import response_lengths
from megatron_rl.planner.memory import OptimizerChoice
from megatron_rl.planner.rl_step import (
    RlBatch,
    TrainChoice,
    step_forward_seconds,
    step_generate_seconds,
    step_train_seconds,
)
from megatron_rl.planner.search import memory_of
from megatron_rl.planner.weight_sync import sync_seconds
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

PHASES = ("generate", "reshard", "reward", "score", "learn")
TYPICAL_SHARE = 1 / 3
"""Mean response length over the longest, where nothing is known of it."""


@dataclass(frozen=True)
class Observed:
    """Hold mean lengths in tokens that the configuration cannot know; None: see `run_batch`."""

    prompt: float | None = None
    response: float | None = None


@dataclass(frozen=True)
class RunStep:
    """Hold one step of a run: seconds and FLOPs of the whole job per phase, tokens of all rows.

    ``response_tokens`` are sampled, ``tokens`` are those and the prompts'. ``fixed`` seconds belong to no
    phase. With ``ahead`` the rollout samples while the others learn.
    """

    seconds: Mapping[str, float]
    flops: Mapping[str, float]
    tokens: float
    response_tokens: float
    fixed: float
    ahead: bool
    world: int
    peak_flops: float

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        learn = sum(self.seconds[name] for name in ("reward", "score", "learn"))
        generate = self.seconds["generate"]
        both = max(generate, learn) if self.ahead else generate + learn
        return both + self.seconds["reshard"] + self.fixed

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


def planner_layout(layout: ParallelLayout) -> Layout:
    """Return a role's layout in the planner's terms."""
    return Layout(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        data=layout.data,
        sequence_parallel=layout.sequence_parallel,
    )


def run_batch(config: RunConfig, layouts: Mapping[str, ParallelLayout], observed: Observed) -> RlBatch:
    """Return a step's rows.

    What is not observed: prompts are taken at their limit, responses at `TYPICAL_SHARE` of theirs.
    """
    longest = float(config.rollout.max_response_tokens)
    prompt = observed.prompt or float(config.data.max_prompt_tokens)
    mean = min(observed.response or TYPICAL_SHARE * longest, longest)
    budget = config.batch.tokens_per_microbatch or token_budget(config, layouts["actor"])[0]
    return RlBatch(
        prompts=config.batch.prompts_per_step,
        samples=config.batch.samples_per_prompt,
        optimizer_steps=config.batch.optimizer_steps,
        prompt=prompt,
        lengths=response_lengths(max(1.0, mean), longest, "variable"),
        longest=float(budget),
    )


def _choice(config: RunConfig, role: str, layout: ParallelLayout, model: ModelShape) -> TrainChoice:
    section = config.actor
    if role == "critic":
        section = config.critic or CriticConfig()
    optimizer = OptimizerChoice(distributed=section.optimizer.distributed, offload=section.optimizer.offload)
    return TrainChoice(model, planner_layout(layout), section.recompute, optimizer)


def _model_path(config: RunConfig, role: str) -> str:
    section = {"critic": config.critic, "reference": config.reference}.get(role)
    if role.startswith("reward."):
        section = config.reward.models[role.removeprefix("reward.")]
    path = getattr(section, "path", None) if section is not None else None
    # A model that the run itself makes (after a warm-up) has the shape of the one it starts from.
    return config.model.path if path is None or path.startswith(config.run_dir) else path


class _Busy:
    """Add seconds of roles to their ranks; a phase lasts as long as its busiest rank."""

    def __init__(self) -> None:
        self._by_rank: dict[str, dict[int, float]] = {name: {} for name in PHASES}

    def add(self, phase: str, layout: ParallelLayout, seconds: float) -> None:
        ranks = self._by_rank[phase]
        for rank in layout.ranks:
            ranks[rank] = ranks.get(rank, 0.0) + seconds

    def longest(self) -> dict[str, float]:
        return {name: max(ranks.values(), default=0.0) for name, ranks in self._by_rank.items()}


def _offload_seconds(
    config: RunConfig, role: str, choice: TrainChoice, batch: RlBatch, cluster: Cluster, constants: Constants
) -> float:
    """Return seconds to move a role's states to host memory and back, once per phase that it works in."""
    sections = {"actor": config.actor, "critic": config.critic, "reference": config.reference}
    section = sections.get(role)
    if section is None or not section.offload:
        return 0.0
    memory = memory_of(choice, batch, constants)
    states = memory.states if role in ("actor", "critic") else memory.weights_and_gradients / 3
    return 2.0 * states / (cluster.gpu.host * constants.efficiency.host)


def predict_run(
    config: RunConfig,
    constants: Constants,
    gpu: str,
    model_of: Callable[[str], ModelShape],
    observed: Observed | None = None,
) -> RunStep:
    """Predict one step of a configuration whose ``world_size`` is stated.

    ``model_of`` returns the shape of the model at a path of the configuration. Raises UserError on an
    unknown GPU.
    """
    world = config.world_size or 1
    layouts = role_layouts(config, world)
    gigabits = config.network_gigabits_per_gpu
    cluster = constants.cluster(gpu, world, config.gpus_per_node, gigabits)
    batch = run_batch(config, layouts, observed or Observed())
    busy = _Busy()
    flops: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for role, layout in layouts.items():
        if role == "rollout":
            continue
        choice = _choice(config, role, layout, model_of(_model_path(config, role)))
        own = cluster.resized(len(layout.ranks))
        offload = _offload_seconds(config, role, choice, batch, own, constants)
        scores = "reward" if role.startswith("reward.") else "score"
        forward = choice.model.forward_flops(batch.context)
        busy.add(scores, layout, step_forward_seconds(choice, batch, own, constants, "bf16") + offload)
        flops[scores] += forward * batch.tokens
        if role in ("actor", "critic"):
            epochs = config.batch.epochs
            train = epochs * step_train_seconds(choice, batch, own, constants, "bf16")
            busy.add("learn", layout, train + offload)
            flops["learn"] += 3.0 * epochs * forward * batch.tokens
    actor = model_of(config.model.path)
    rollout = _rollout(config, layouts["rollout"])
    ranks = cluster.resized(len(layouts["rollout"].ranks))
    generate = step_generate_seconds(actor, rollout, batch, ranks, constants, "bf16")
    busy.add("generate", layouts["rollout"], generate)
    flops["generate"] = actor.forward_flops(batch.context) * batch.tokens
    sync = _reshard_seconds(actor, layouts, rollout, cluster, constants)
    busy.add("reshard", layouts["rollout"], sync)
    return RunStep(
        seconds=busy.longest(),
        flops=flops,
        tokens=batch.tokens,
        response_tokens=batch.rows * batch.lengths.mean,
        fixed=constants.efficiency.rl_fixed_seconds,
        ahead=config.asynchrony.steps_ahead > 0,
        world=world,
        peak_flops=cluster.gpu.bf16_flops,
    )


def _reshard_seconds(
    model: ModelShape,
    layouts: Mapping[str, ParallelLayout],
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
) -> float:
    return sync_seconds(
        model,
        planner_layout(layouts["actor"]),
        rollout,
        cluster,
        constants,
        "planned_peer_to_peer",
        "bf16",
        len(layouts["rollout"].ranks),
        len(layouts["actor"].ranks),
    )


def _rollout(config: RunConfig, layout: ParallelLayout) -> RolloutLayout:
    limit = config.rollout.vllm.get("max_num_seqs")
    expert = layout.tensor if config.rollout.vllm.get("enable_expert_parallel") else 1
    return RolloutLayout(
        tensor=layout.tensor,
        expert=expert,
        replicas=max(1, layout.data),
        max_sequences=int(limit) if isinstance(limit, int) else None,
        memory_fraction=config.rollout.memory_fraction,
    )


def fullest_gigabytes(config: RunConfig, constants: Constants, model: ModelShape) -> float:
    """Return gigabytes (1e9 bytes) on the actor's fullest GPU while it learns."""
    layouts = role_layouts(config, config.world_size or 1)
    choice = _choice(config, "actor", layouts["actor"], model)
    return memory_of(choice, run_batch(config, layouts, Observed()), constants).total / GB


def without_sync(step: Mapping[str, float]) -> dict[str, float]:
    """Return the disjoint seconds per phase of one line of metrics.jsonl; generate there holds the sync."""
    reshard = step.get("time/reshard", 0.0) + step.get("time/reshard_verify", 0.0)
    found = {name: float(step[f"time/{name}"]) for name in PHASES if f"time/{name}" in step}
    if "generate" in found:
        found["generate"] = max(0.0, found["generate"] - reshard)
    return found | ({"reshard": reshard} if reshard else {})
