"""Score placements: groups of roles on GPUs of their own, phases overlapped between groups.

Within a group roles take turns; groups work at the same time. Step = generate (actor's GPUs) +
max over groups of their forward passes + max over groups of their training + weight sync
(HybridFlow, arXiv 2409.19256, section 6 and algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from megatron_rl.planner.constants import GB, Cluster, Constants
from megatron_rl.planner.layout import RolloutLayout
from megatron_rl.planner.memory import OptimizerChoice
from megatron_rl.planner.rl_step import TRAINED_ROLES, Phases, RlBatch, TrainChoice, step_forward_seconds
from megatron_rl.planner.search import (
    RolloutPlan,
    SearchCount,
    TrainPlan,
    forward_memory,
    memory_limit,
    rollout_plans,
    training_front,
)
from megatron_rl.planner.weight_sync import sync_seconds
from megatron_rl.shapes.model import ModelShape

_STATE_SPREADS = (1.0, 1.3, 2.0, 4.0, 1e9)


@dataclass(frozen=True)
class Problem:
    """Hold what a placement must run: models by role, batch, algorithm and machines."""

    models: Mapping[str, ModelShape]
    algorithm: str
    batch: RlBatch
    cluster: Cluster
    constants: Constants
    precision: str = "bf16"
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    engine: str = "current"
    sync_method: str = "planned_peer_to_peer"
    memory_fraction: float | None = None
    max_sequences: int | None = None
    rollout_tensor: int | None = None
    roles_swap: bool = True  # resting roles may wait in host memory; this project's roles do not
    context_parallel: bool = True  # sequences may be cut over ranks; this project's trainer does not
    stages_stated_once: bool = False  # uneven pipeline stages hold for every role, as in this project

    def trained(self, role: str) -> bool:
        """Say whether the algorithm trains a role."""
        return role in TRAINED_ROLES[self.algorithm]


@dataclass(frozen=True)
class GroupPlan:
    """Hold one group of roles on its GPUs."""

    roles: tuple[str, ...]
    gpus: int
    plans: Mapping[str, TrainPlan]
    forward: float
    train: float
    swap: float  # seconds a step spends on moving states between host and GPU
    rollout: RolloutPlan | None = None
    resident: float = 0.0  # training bytes that stay on the GPU during generation
    offloaded: bool = False  # training state leaves the GPU during generation

    @property
    def busy(self) -> float:
        """Return the seconds a step keeps this group's GPUs busy."""
        return self.forward + self.train + self.swap + (self.rollout.seconds if self.rollout else 0.0)


@dataclass(frozen=True)
class PlacementPlan:
    """Hold a scored placement."""

    name: str
    groups: tuple[GroupPlan, ...]
    phases: Phases
    rollout: RolloutPlan
    overlapped: bool = False  # generation of the next step runs during training (one step off policy)
    rollout_gpus: int = 0  # GPUs that only generate

    @property
    def gpus(self) -> int:
        """Count the GPUs in use."""
        return sum(self.gpus_per_group) + self.rollout_gpus

    @property
    def gpus_per_group(self) -> list[int]:
        """Return GPU counts in the order of the groups."""
        return [group.gpus for group in self.groups]

    def plan_of(self, role: str) -> TrainPlan | None:
        """Return a role's training plan."""
        for group in self.groups:
            if role in group.plans:
                return group.plans[role]
        return None


class Planner:
    """Plan groups of roles for one problem, keeping what was searched for a model on a GPU count."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.counted = SearchCount()
        self._fronts: dict[tuple[ModelShape, bool, int, bool], list[TrainPlan]] = {}
        self._rollouts: dict[tuple[int, float], RolloutPlan | None] = {}

    def front(self, role: str, gpus: int, even: bool = False) -> list[TrainPlan]:
        """Return the undominated ways to run a role on ``gpus`` GPUs, fastest first; ``even`` stages only."""
        problem = self.problem
        key = (problem.models[role], problem.trained(role), gpus, even)
        if key not in self._fronts:
            self._fronts[key] = training_front(
                problem.models[role],
                gpus,
                problem.cluster.resized(gpus),
                problem.constants,
                problem.batch,
                problem.precision,
                problem.optimizer,
                trained=problem.trained(role),
                context_allowed=problem.context_parallel,
                even_stages=even,
                counted=self.counted,
            )
        return self._fronts[key]

    def group(self, roles: Sequence[str], gpus: int, generates: bool, alone: bool = True) -> GroupPlan | None:
        """Plan a group of roles on ``gpus`` GPUs for its least seconds; None when it does not fit.

        A role's limit is what the other roles' resting states leave; when that is too little, resting
        roles wait in host memory and every step pays for the transfers. ``alone``: no model is elsewhere.
        """
        # The lead is the role whose choice decides what the others, and generation, have left.
        order = sorted(roles, key=lambda name: (not self.problem.trained(name), name != "actor"))
        best: GroupPlan | None = None
        even = self.problem.stages_stated_once and not alone
        for lead in self.front(order[0], gpus, even):
            for spread in _STATE_SPREADS if len(order) > 1 else _STATE_SPREADS[:1]:
                bound = best.busy if best is not None else inf
                found = self._with_lead(order, lead, gpus, generates, spread, bound)
                if found is not None and found.busy < bound:
                    best = found
        return best

    def _with_lead(
        self, order: Sequence[str], lead: TrainPlan, gpus: int, generates: bool, spread: float, bound: float
    ) -> GroupPlan | None:
        """Plan a group around its lead; the others take their fastest way within ``spread`` times their
        least resting state, so that the set of combinations does not depend on the memory limit. None
        when it does not fit, or already takes ``bound`` seconds without generating.
        """
        problem = self.problem
        limit = memory_limit(problem.cluster, problem.constants)
        plans: dict[str, TrainPlan] = {order[0]: lead}
        uneven = lead.choice.model.layers % lead.choice.layout.pipeline > 0
        for role in order[1:]:
            if problem.stages_stated_once and uneven:
                plan = self._like(role, lead)
                if plan is None:
                    return None
                plans[role] = plan
                continue
            front = self.front(role, gpus, problem.stages_stated_once)
            if not front:
                return None
            most = spread * min(plan.memory.states for plan in front)
            plans[role] = next(plan for plan in front if plan.memory.states <= most)
        resting = sum(plan.memory.states for plan in plans.values())
        host = problem.cluster.gpu.host * problem.constants.efficiency.host
        peak = max(plan.memory.total - plan.memory.states for plan in plans.values()) + resting
        swap = 0.0
        if peak > limit:
            if not problem.roles_swap:
                return None
            swap = 2.0 * (resting - min(plan.memory.states for plan in plans.values())) / host
            resting = max(plan.memory.states for plan in plans.values())
        forward = sum(plan.forward for plan in plans.values())
        train = sum(plan.train for plan in plans.values())
        group = GroupPlan(tuple(order), gpus, plans, forward, train, swap)
        if group.busy >= bound:
            return None
        if not generates:
            return group
        frozen = sum(plan.memory.states for role, plan in plans.items() if not problem.trained(role))
        frozen = 0.0 if problem.roles_swap else frozen
        chosen = self.rollout(gpus, resting, frozen)
        if chosen is None:
            return None
        rollout, moved, offloaded = chosen
        kept = frozen if offloaded else resting
        return replace(group, swap=swap + moved, rollout=rollout, resident=kept, offloaded=offloaded)

    def _like(self, role: str, lead: TrainPlan) -> TrainPlan | None:
        """Return a role's plan with its lead's layout; None where its model is another."""
        problem = self.problem
        if problem.models[role] != lead.choice.model:
            return None
        if problem.trained(role):
            return lead
        choice = TrainChoice(lead.choice.model, lead.choice.layout)
        cluster = problem.cluster.resized(choice.layout.size)
        forward = step_forward_seconds(choice, problem.batch, cluster, problem.constants, problem.precision)
        memory = forward_memory(choice, problem.batch, problem.constants)
        return TrainPlan(choice, 0.0, forward, memory)

    def rollout(
        self, gpus: int, states: float, frozen: float = 0.0
    ) -> tuple[RolloutPlan, float, bool] | None:
        """Choose the rollout beside ``states`` training bytes: keep them, or swap them to the host.

        ``frozen`` of these bytes stay on the GPU in any case; without states the rollout is alone.
        Returns (plan, swap seconds, offloaded), or None when neither fits.
        """
        problem, memory = self.problem, self.problem.constants.memory
        gpu, alone = problem.cluster.gpu, states == 0.0
        options = []
        for offloaded in (False,) if alone else (False, True):
            resident = frozen + memory.after_offload_gigabytes * GB if offloaded else states
            # The trainer's own context and communicators stay beside the engine.
            beside = 0.0 if alone else resident + memory.context_gigabytes * GB
            free = (memory_limit(problem.cluster, problem.constants) - beside) / gpu.memory
            fraction = min(problem.memory_fraction or 0.9, int(100 * free) / 100)
            plan = self._rollout_within(gpus, fraction) if fraction > 0.05 else None
            if plan is not None:
                host = gpu.host * problem.constants.efficiency.host
                options.append((plan, 2.0 * (states - frozen) / host if offloaded else 0.0, offloaded))
        return min(options, key=lambda option: option[0].seconds + option[1], default=None)

    def _rollout_within(self, gpus: int, fraction: float) -> RolloutPlan | None:
        """Return the fastest rollout that takes ``fraction`` of each GPU's memory."""
        key = (gpus, fraction)
        if key not in self._rollouts:
            problem = self.problem
            plans = rollout_plans(
                problem.models["actor"],
                gpus,
                problem.cluster.resized(gpus),
                problem.constants,
                problem.batch,
                problem.precision,
                fraction,
                problem.engine,
                max_sequences=problem.max_sequences,
                counted=self.counted,
            )
            if problem.rollout_tensor:
                plans = [plan for plan in plans if plan.layout.tensor == problem.rollout_tensor]
            self._rollouts[key] = plans[0] if plans else None
        return self._rollouts[key]


def _sync(problem: Problem, actor: TrainPlan, rollout: RolloutLayout) -> float:
    return sync_seconds(
        problem.models["actor"],
        actor.choice.layout,
        rollout,
        problem.cluster,
        problem.constants,
        problem.sync_method,
        problem.precision,
        rollout.replicas * rollout.gpus,
        actor.choice.layout.size,
    )


def score_groups(name: str, problem: Problem, groups: Sequence[GroupPlan]) -> PlacementPlan:
    """Compose planned groups, one of which generates, into a step."""
    actor = next(group for group in groups if group.rollout is not None)
    assert actor.rollout is not None
    forward = max(group.forward for group in groups)
    train = max(group.train + group.swap for group in groups)
    sync = _sync(problem, actor.plans["actor"], actor.rollout.layout)
    total = actor.rollout.seconds + forward + train + sync + problem.constants.efficiency.rl_fixed_seconds
    phases = Phases(actor.rollout.seconds, forward, train, sync, total)
    return PlacementPlan(name, tuple(groups), phases, actor.rollout)


def score_split(
    planner: Planner, roles: Sequence[str], train_gpus: int, rollout_gpus: int, one_step_off: bool
) -> PlacementPlan | None:
    """Score training and generation on disjoint GPUs; None when it does not fit.

    ``one_step_off``: the next step's generation runs during training, so the longer of both counts.
    """
    problem = planner.problem
    group = planner.group(roles, train_gpus, False)
    if group is None:
        return None
    chosen = planner.rollout(rollout_gpus, 0.0)
    if chosen is None:
        return None
    rollout = chosen[0]
    sync = _sync(problem, group.plans["actor"], rollout.layout)
    learn = group.forward + group.train + group.swap
    both = max(rollout.seconds, learn) if one_step_off else rollout.seconds + learn
    total = both + sync + problem.constants.efficiency.rl_fixed_seconds
    phases = Phases(rollout.seconds, group.forward, group.train + group.swap, sync, total)
    name = "split, one step off" if one_step_off else "split"
    return PlacementPlan(name, (group,), phases, rollout, one_step_off, rollout_gpus)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``total`` as an ordered sum of ``parts`` positive integers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def best_grouping(
    name: str, planner: Planner, groups: Sequence[Sequence[str]], parts: int = 16
) -> PlacementPlan | None:
    """Size the groups for the shortest step, in units of 1/``parts`` of the GPUs; None: nothing fits."""
    gpus = planner.problem.cluster.num_gpus
    if len(groups) > gpus:
        return None
    unit = max(1, gpus // parts) if len(groups) > 1 else gpus
    planned: dict[tuple[int, int], GroupPlan | None] = {}
    best: PlacementPlan | None = None
    for sizes in compositions(gpus // unit, len(groups)):
        members = []
        for index, size in enumerate(sizes):
            key = (index, size * unit)
            if key not in planned:
                planned[key] = planner.group(
                    groups[index], size * unit, "actor" in groups[index], len(groups) == 1
                )
            members.append(planned[key])
        found = [member for member in members if member is not None]
        if len(found) < len(members):
            continue
        scored = score_groups(name, planner.problem, found)
        if best is None or scored.phases.total < best.phases.total:
            best = scored
    return best
