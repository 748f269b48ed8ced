"""Score placements: groups of roles on GPUs of their own, phases overlapped between groups.

Within a group roles take turns; groups work at the same time. Step = generate (actor's GPUs) +
max over groups of their forward passes + max over groups of their training + weight sync
(HybridFlow, arXiv 2409.19256, section 6 and algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.planner.constants import Cluster, Constants
from megatron_rl.planner.layout import RolloutLayout
from megatron_rl.planner.memory import OptimizerChoice
from megatron_rl.planner.model_shape import ModelShape
from megatron_rl.planner.rl_step import TRAINED_ROLES, Phases, RlBatch
from megatron_rl.planner.search import (
    RolloutPlan,
    SearchCount,
    TrainPlan,
    memory_limit,
    rollout_plans,
    training_front,
)
from megatron_rl.planner.weight_sync import sync_seconds


_LEAD_CHOICES = 12


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
        self._fronts: dict[tuple[ModelShape, bool, int], list[TrainPlan]] = {}

    def front(self, role: str, gpus: int) -> list[TrainPlan]:
        """Return the undominated ways to run a role on ``gpus`` GPUs, fastest first."""
        problem = self.problem
        key = (problem.models[role], problem.trained(role), gpus)
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
                counted=self.counted,
            )
        return self._fronts[key]

    def group(self, roles: Sequence[str], gpus: int, generates: bool) -> GroupPlan | None:
        """Plan a group of roles on ``gpus`` GPUs for its least seconds; None when it does not fit.

        A role's limit is what the other roles' resting states leave; when that is too little, resting
        roles wait in host memory and every step pays for the transfers.
        """
        # The lead is the role whose choice decides what the others, and generation, have left.
        order = sorted(roles, key=lambda name: (not self.problem.trained(name), name != "actor"))
        options = self.front(order[0], gpus)[:_LEAD_CHOICES]
        plans = [self._with_lead(order, lead, gpus, generates) for lead in options]
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.busy, default=None)

    def _with_lead(
        self, order: Sequence[str], lead: TrainPlan, gpus: int, generates: bool
    ) -> GroupPlan | None:
        problem = self.problem
        limit = memory_limit(problem.cluster, problem.constants)
        plans: dict[str, TrainPlan] = {order[0]: lead}
        resting = lead.memory.states
        for role in order[1:]:
            front = self.front(role, gpus)
            if not front:
                return None
            plans[role] = next((p for p in front if p.memory.total <= limit - resting), front[0])
            resting += plans[role].memory.states
        host = problem.cluster.gpu.host * problem.constants.efficiency.host
        peak = max(plan.memory.total - plan.memory.states for plan in plans.values()) + resting
        swap = 0.0
        if peak > limit:
            swap = 2.0 * (resting - min(plan.memory.states for plan in plans.values())) / host
            resting = max(plan.memory.states for plan in plans.values())
        forward = sum(plan.forward for plan in plans.values())
        train = sum(plan.train for plan in plans.values())
        group = GroupPlan(tuple(order), gpus, plans, forward, train, swap)
        if not generates:
            return group
        chosen = rollout_choice(problem, gpus, resting, False, self.counted)
        if chosen is None:
            return None
        rollout, moved, offloaded = chosen
        kept = 0.0 if offloaded else resting
        return replace(group, swap=swap + moved, rollout=rollout, resident=kept, offloaded=offloaded)


def rollout_choice(
    problem: Problem, gpus: int, states: float, alone: bool, counted: SearchCount | None = None
) -> tuple[RolloutPlan, float, bool] | None:
    """Choose the rollout beside ``states`` training bytes: keep them, or swap them to the host.

    Returns (plan, swap seconds, offloaded), or None when neither fits.
    """
    model, constants = problem.models["actor"], problem.constants
    cluster = problem.cluster.resized(gpus)
    options = []
    for offloaded in (False,) if alone else (False, True):
        resident = constants.memory.after_offload_gigabytes * 1e9 if offloaded else states
        free = (memory_limit(cluster, constants) - (0.0 if alone else resident)) / cluster.gpu.memory
        fraction = min(problem.memory_fraction or 0.9, round(free - 0.005, 2))
        if fraction <= 0.05:
            continue
        plans = rollout_plans(
            model,
            gpus,
            cluster,
            constants,
            problem.batch,
            problem.precision,
            fraction,
            problem.engine,
            resident=0.0 if alone else resident,
            max_sequences=problem.max_sequences,
            counted=counted,
        )
        if problem.rollout_tensor:
            plans = [plan for plan in plans if plan.layout.tensor == problem.rollout_tensor]
        if plans:
            moved = 2.0 * states / (cluster.gpu.host * constants.efficiency.host) if offloaded else 0.0
            options.append((plans[0], moved, offloaded))
    return min(options, key=lambda option: option[0].seconds + option[1], default=None)


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
    chosen = rollout_choice(problem, rollout_gpus, 0.0, True, planner.counted)
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
                planned[key] = planner.group(groups[index], size * unit, "actor" in groups[index])
            members.append(planned[key])
        found = [member for member in members if member is not None]
        if len(found) < len(members):
            continue
        scored = score_groups(name, planner.problem, found)
        if best is None or scored.phases.total < best.phases.total:
            best = scored
    return best
