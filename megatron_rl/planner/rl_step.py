"""Seconds of a reinforcement-learning step, phase by phase, colocated or disaggregated.

Phases: generate, log-probs (every forward pass), train (every optimizer step of actor and critic),
weight sync. Colocated phases add up; disaggregated ones overlap one step off policy:
max(generate, log-probs + train) + sync (HybridFlow section 6, NeMo RL 1-step-off rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log, sqrt

from megatron_rl.planner.constants import Cluster, Constants
from megatron_rl.planner.generation import generate_seconds
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.lengths import Lengths, attended_context
from megatron_rl.planner.memory import OptimizerChoice
from megatron_rl.planner.training import forward_seconds, replica_work, train_seconds
from megatron_rl.planner.weight_sync import sync_seconds
from megatron_rl.shapes.model import ModelShape

# Roles that run a forward pass over every rollout, by algorithm. ``old`` is the actor before the step.
FORWARD_ROLES = {"grpo": ("old", "reference"), "ppo": ("old", "reference", "critic", "reward")}
TRAINED_ROLES = {"grpo": ("actor",), "ppo": ("actor", "critic")}


@dataclass(frozen=True)
class RlBatch:
    """Hold one step's rows: prompts x samples, in ``optimizer_steps`` mini-batches, lengths in tokens."""

    prompts: int
    samples: int
    optimizer_steps: int
    prompt: float
    lengths: Lengths
    longest: float  # cap on prompt plus response
    micro_batch: int = 1
    packing: bool = True

    @property
    def rows(self) -> int:
        """Count responses of a step."""
        return self.prompts * self.samples

    @property
    def mean_row(self) -> float:
        """Return mean tokens of a row, prompt included."""
        return self.prompt + self.lengths.mean

    @property
    def tokens(self) -> float:
        """Return tokens of all rows, prompt included."""
        return self.rows * self.mean_row

    @cached_property
    def context(self) -> float:
        """Return the mean keys a token attends to."""
        return attended_context(self.prompt, self.lengths)


@dataclass(frozen=True)
class Phases:
    """Hold seconds of a step's phases and in total."""

    generate: float
    log_probs: float
    train: float
    weight_sync: float
    total: float


@dataclass(frozen=True)
class TrainChoice:
    """Say how one trained or scored model runs on its GPUs."""

    model: ModelShape
    layout: Layout
    recompute: str = "none"
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    micro_batch: int = 1


def routing_imbalance(model: ModelShape, layout: Layout, spread: float) -> float:
    """Return the tokens of the fullest expert-parallel rank over the mean, which every layer waits for.

    Pretraining benchmarks force an even load; what is trained on in reinforcement learning does not have
    one. With ``spread`` the standard deviation of an expert's load over its mean, a rank of E / ep experts
    has spread / sqrt(E / ep), and the largest of ep such loads lies sqrt(2 ln ep) deviations above the
    mean (expected maximum of normal variables).
    """
    if not model.experts or layout.expert == 1:
        return 1.0
    deviation = spread * sqrt(layout.expert / model.experts)
    return 1.0 + deviation * sqrt(2.0 * log(layout.expert))


def _loop_share(choice: TrainChoice, batch: RlBatch, constants: Constants) -> float:
    """Return the share of a pretraining pace that a reinforcement-learning loop keeps.

    Uneven rows unbalance replicas and leave packed micro-batches partly empty; routing is uneven; the rest
    is fp32 logits, loading and offloading.
    """
    share = constants.efficiency.rl_loop
    if batch.lengths.scale is not None or batch.packing:
        share *= constants.efficiency.rl_uneven_rows
    return share / routing_imbalance(choice.model, choice.layout, constants.efficiency.routing_spread)


def step_train_seconds(
    choice: TrainChoice, batch: RlBatch, cluster: Cluster, constants: Constants, precision: str
) -> float:
    """Return seconds of all optimizer steps of one role."""
    rows = batch.rows / batch.optimizer_steps
    work = replica_work(
        rows,
        batch.mean_row,
        batch.longest,
        batch.context,
        choice.layout.data,
        choice.micro_batch,
        batch.packing,
    )
    one = train_seconds(
        choice.model,
        choice.layout,
        cluster,
        constants,
        precision,
        work,
        choice.recompute,
        choice.optimizer,
        constants.efficiency.rl_train * _loop_share(choice, batch, constants),
    )
    return batch.optimizer_steps * one


def step_forward_seconds(
    choice: TrainChoice, batch: RlBatch, cluster: Cluster, constants: Constants, precision: str
) -> float:
    """Return seconds of one forward pass of one role over a step's rows."""
    work = replica_work(
        batch.rows,
        batch.mean_row,
        batch.longest,
        batch.context,
        choice.layout.data,
        choice.micro_batch,
        batch.packing,
    )
    once = forward_seconds(choice.model, choice.layout, cluster, constants, precision, work)
    return once / (constants.efficiency.rl_log_probs * _loop_share(choice, batch, constants))


def step_generate_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    batch: RlBatch,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    resident: float = 0.0,
) -> float:
    """Return seconds of a step's generation over all replicas (rows are spread evenly)."""
    rows = max(1.0, batch.rows / rollout.replicas)
    once = generate_seconds(
        model,
        rollout,
        cluster,
        constants,
        precision,
        rows,
        batch.prompt,
        batch.lengths,
        min(batch.samples, max(1, round(rows))),
        resident,
    )
    return constants.decode.rl_fixed_seconds + once / (
        constants.decode.rl_generate * constants.engines[rollout.engine].rl_share
    )


def host_swap_seconds(
    choices: list[TrainChoice], cluster: Cluster, constants: Constants, states: float
) -> float:
    """Return seconds to move ``states`` bytes per GPU to the host and back (offload during rollout)."""
    return 2.0 * states / (cluster.gpu.host * constants.efficiency.host) if choices else 0.0


def rl_step(
    algorithm: str,
    roles: Mapping[str, TrainChoice],
    rollout: RolloutLayout,
    batch: RlBatch,
    train_cluster: Cluster,
    rollout_cluster: Cluster,
    constants: Constants,
    precision: str,
    sync_method: str,
    disaggregated: bool,
) -> Phases:
    """Return the phases of one step; ``roles`` has actor, reference, and for PPO critic and reward."""
    actor = roles["actor"]
    generate = step_generate_seconds(actor.model, rollout, batch, rollout_cluster, constants, precision)
    log_probs = 0.0
    for role in FORWARD_ROLES[algorithm]:
        choice = roles["actor" if role == "old" else role]
        log_probs += step_forward_seconds(choice, batch, train_cluster, constants, precision)
    train = sum(
        step_train_seconds(roles[role], batch, train_cluster, constants, precision)
        for role in TRAINED_ROLES[algorithm]
    )
    sync = sync_seconds(
        actor.model,
        actor.layout,
        rollout,
        train_cluster,
        constants,
        sync_method,
        precision,
        rollout.replicas * rollout.gpus,
        actor.layout.size,
    )
    fixed = constants.efficiency.rl_fixed_seconds
    if disaggregated:
        return Phases(generate, log_probs, train, sync, max(generate, log_probs + train) + sync + fixed)
    return Phases(generate, log_probs, train, sync, generate + log_probs + train + sync + fixed)
