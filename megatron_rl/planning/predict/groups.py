"""Plan a group of roles that share GPUs: each role's cut, and generation in the memory they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from megatron_rl.config.roles import spec_of
from megatron_rl.planning.predict.batch import StepBatch
from megatron_rl.planning.predict.generate import RolloutLayout
from megatron_rl.planning.predict.learn import (
    RoleMemory,
    TrainChoice,
    learn_memory,
    learn_seconds,
    merged_bytes,
    score_memory,
    score_seconds,
)
from megatron_rl.planning.predict.search import (
    RolloutPlan,
    SearchCount,
    TrainPlan,
    rollout_plans,
    training_front,
)
from megatron_rl.planning.predict.step import RoleSeconds, planned_seconds
from megatron_rl.shapes.hardware import GB, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.memory import RUNTIME_BYTES, OptimizerChoice
from megatron_rl.shapes.model import ModelShape

_STATE_SPREADS = (1.0, 1.3, 2.0, 4.0, 1e9)
"""Multiples of a role's least resting state within which it takes its fastest cut."""


Sync = Callable[[ModelShape, ParallelLayout, RolloutLayout, Sequence[int], Machine], float]
"""Return the seconds of a weight sync from an actor's layout into an engine on some ranks."""


@dataclass(frozen=True)
class Problem:
    """Hold what a placement must run: models by role, algorithm, batch and machines."""

    models: Mapping[str, ModelShape]
    algorithm: str
    batch: StepBatch
    machine: Machine
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    lora: Lora | None = None  # what the actor learns, in the place of its weights
    engine: str = "current"
    sync_seconds: Sync = planned_seconds
    memory_fraction: float | None = None
    max_sequences: int | None = None
    rollout_tensor: int | None = None
    # What this project's trainer does, and other systems may do otherwise.
    roles_swap: bool = False  # resting roles wait in host memory
    context_parallel: bool = False  # sequences are cut over ranks
    exchanges_heads: bool = True  # where they are, around attention; others gather keys and values
    stages_stated_once: bool = True  # uneven pipeline stages hold for every role

    @property
    def gpus(self) -> int:
        """Count the GPUs."""
        return self.machine.cluster.num_gpus


@dataclass(frozen=True)
class GroupPlan:
    """Hold one group of roles on its GPUs; the first role is the one whose choice the others follow.

    ``swap`` seconds of a step go to roles that take turns in GPU memory. ``moving`` has, by role, the
    seconds to bring a state from host memory and back each time the role works.
    """

    gpus: int
    plans: Mapping[str, TrainPlan]
    swap: float = 0.0
    rollout: RolloutPlan | None = None
    resident: float = 0.0  # training bytes that stay on the GPU during generation
    offloaded: bool = False  # training state leaves the GPU during generation
    moving: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Return the seconds a step keeps this group's GPUs busy."""
        generate = self.rollout.seconds if self.rollout else 0.0
        return generate + sum(
            work.forward + work.moving + (work.learn + work.moving if work.learn else 0.0)
            for work in self.works(0)
        )

    def works(self, place: int) -> list[RoleSeconds]:
        """Return what each role does in a step; ``place`` stands for the group's ranks."""
        lead = next(iter(self.plans))
        return [
            RoleSeconds(
                role,
                (place,),
                forward=plan.forward,
                learn=plan.learn + (self.swap if role == lead else 0.0),
                moving=self.moving.get(role, 0.0),
            )
            for role, plan in self.plans.items()
        ]


class Planner:
    """Plan groups of roles for one problem, keeping what was searched for a model on a GPU count."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.counted = SearchCount()
        self._fronts: dict[tuple[ModelShape, bool, Lora | None, int, bool], list[TrainPlan]] = {}
        self._rollouts: dict[tuple[int, float], RolloutPlan | None] = {}

    def front(self, role: str, gpus: int, even: bool = False) -> list[TrainPlan]:
        """Return the undominated ways to run a role on ``gpus`` GPUs, fastest first; ``even`` stages only."""
        problem = self.problem
        lora = problem.lora if role == "actor" else None
        key = (problem.models[role], spec_of(role).trains, lora, gpus, even)
        if key not in self._fronts:
            self._fronts[key] = training_front(
                problem.models[role],
                gpus,
                problem.machine,
                problem.batch,
                problem.optimizer,
                trained=spec_of(role).trains,
                context_allowed=problem.context_parallel,
                exchanges_heads=problem.exchanges_heads,
                even_stages=even,
                lora=lora,
                counted=self.counted,
            )
        return self._fronts[key]

    def group(self, roles: Sequence[str], gpus: int, generates: bool, alone: bool = True) -> GroupPlan | None:
        """Plan a group of roles on ``gpus`` GPUs for its least seconds; None when it does not fit.

        A role's limit is what the other roles' resting states leave; when that is too little, resting
        roles wait in host memory and every step pays for the transfers. ``alone``: no model is elsewhere.
        """
        # The lead is the role whose choice decides what the others, and generation, have left.
        order = sorted(roles, key=lambda name: (not spec_of(name).trains, name != "actor"))
        best: GroupPlan | None = None
        even = self.problem.stages_stated_once and not alone
        for lead in self.front(order[0], gpus, even):
            for spread in _STATE_SPREADS if len(order) > 1 else _STATE_SPREADS[:1]:
                bound = best.busy if best is not None else inf
                group = self._with_lead(order, lead, gpus, generates, spread, bound)
                if group is not None and group.busy < bound:
                    best = group
        return best

    def _with_lead(
        self, order: Sequence[str], lead: TrainPlan, gpus: int, generates: bool, spread: float, bound: float
    ) -> GroupPlan | None:
        """Plan a group around its lead; the others take their fastest way within ``spread`` times their
        least resting state, so that the set of combinations does not depend on the memory limit. None
        when it does not fit, or already takes ``bound`` seconds without generating.
        """
        problem = self.problem
        plans: dict[str, TrainPlan] = {order[0]: lead}
        uneven = lead.choice.model.layers % lead.choice.layout.pipeline > 0
        for role in order[1:]:
            if (problem.stages_stated_once and uneven) or (role == "reference" and lead.choice.lora):
                plan = self._like(role, lead)
                if plan is None:
                    return None
                plans[role] = plan
                continue
            front = self.front(role, gpus, problem.stages_stated_once)
            if not front:
                return None
            most = spread * min(plan.memory.resting for plan in front)
            plans[role] = next(plan for plan in front if plan.memory.resting <= most)
        states = [plan.memory.resting for plan in plans.values()]
        working = max(plan.memory.total - plan.memory.resting for plan in plans.values())
        resting, swap = sum(states), 0.0
        if working + resting > problem.machine.usable_memory:
            if not problem.roles_swap:
                return None
            swap = 2.0 * (resting - min(states)) / problem.machine.host_rate
            resting = max(states)
        group = GroupPlan(gpus, plans, swap)
        if group.busy >= bound:
            return None
        return self._generating(group, resting) if generates else group

    def _like(self, role: str, lead: TrainPlan) -> TrainPlan | None:
        """Return a role's plan with its lead's layout; None where its model is another.

        The reference of adapters is their base, which the lead has in memory.
        """
        batch, machine, like = self.problem.batch, self.problem.machine, lead.choice
        if self.problem.models[role] != like.model:
            return None
        if spec_of(role).trains:
            choice = replace(like, lora=None)
            learn, memory = learn_seconds(choice, batch, machine), learn_memory(choice, batch)
            return TrainPlan(choice, learn, lead.forward, memory)
        choice = TrainChoice(like.model, like.layout, exchanges_heads=like.exchanges_heads)
        memory = score_memory(choice, batch)
        if role == "reference" and like.lora is not None:
            memory = RoleMemory(replace(memory.fullest, weights=0.0), 0.0)
        return TrainPlan(choice, 0.0, score_seconds(choice, batch, machine), memory)

    def _generating(self, group: GroupPlan, resting: float) -> GroupPlan | None:
        """Add generation beside ``resting`` bytes of the group, which stay on the GPU or leave for the host.

        Models that only score stay in any case where roles do not swap. None when neither fits.
        """
        problem, machine = self.problem, self.problem.machine
        moving = {
            role: 2.0 * plan.memory.resting / machine.host_rate
            for role, plan in group.plans.items()
            if spec_of(role).trains
        }
        frozen = sum(plan.memory.resting for role, plan in group.plans.items() if not spec_of(role).trains)
        if problem.roles_swap:
            frozen, away = 0.0, replace(group, swap=group.swap + 2.0 * resting / machine.host_rate)
        else:
            away = replace(group, moving=moving)
        away = replace(away, resident=frozen, offloaded=True)
        left = frozen + machine.constants.memory.after_offload_gigabytes * GB
        options, merged = [], 0.0
        if (actor := group.plans.get("actor")) is not None:
            merged = merged_bytes(actor.choice)  # while weights move
        for option, resident in ((replace(group, resident=resting), resting), (away, left)):
            # The trainer's own context and communicators stay beside the engine.
            rollout = self.rollout(group.gpus, resident + merged + RUNTIME_BYTES)
            if rollout is not None:
                options.append(replace(option, rollout=rollout))
        return min(options, key=lambda option: option.busy, default=None)

    def rollout(self, gpus: int, beside: float = 0.0) -> RolloutPlan | None:
        """Return the fastest rollout that leaves ``beside`` bytes of each GPU alone; None: none fits."""
        machine = self.problem.machine
        free = (machine.usable_memory - beside) / machine.gpu.memory
        fraction = min(self.problem.memory_fraction or 0.9, int(100 * free) / 100)
        return self._rollout_within(gpus, fraction) if fraction > 0.05 else None

    def _rollout_within(self, gpus: int, fraction: float) -> RolloutPlan | None:
        """Return the fastest rollout that takes ``fraction`` of each GPU's memory."""
        key = (gpus, fraction)
        if key not in self._rollouts:
            problem = self.problem
            plans = rollout_plans(
                problem.models["actor"],
                gpus,
                problem.machine,
                problem.batch,
                fraction,
                problem.engine,
                max_sequences=problem.max_sequences,
                counted=self.counted,
            )
            if problem.rollout_tensor:
                plans = [plan for plan in plans if plan.layout.tensor == problem.rollout_tensor]
            self._rollouts[key] = plans[0] if plans else None
        return self._rollouts[key]
