"""Place roles on GPUs: predict the step of a placement, and search all placements for the shortest step.

A placement is a set of groups of roles, each on separate GPUs. Roles of a group take turns, and generation
uses the remaining memory; groups work at the same time (HybridFlow, arXiv 2409.19256, section 6 and
algorithm 1). `compose_step` combines the seconds of roles for placements and for configurations.

`Planner` plans one group: a parallel layout for each of its roles. `search_placements` tries the groupings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from megatron_rl.config.roles import ACTOR, CRITIC, INITIAL, REFERENCE, REWARD_MODELS, spec_of
from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.errors import UserError
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
    MAX_PIPELINE,
    RolloutPlan,
    SearchCount,
    TrainPlan,
    context_sizes,
    rollout_plans,
    training_front,
)
from megatron_rl.planning.predict.step import RoleSeconds, StepSeconds, compose_step, planned_sync_seconds
from megatron_rl.shapes.hardware import GB, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.shapes.memory import NETWORK_PEERS_BYTES, RUNTIME_BYTES, OptimizerChoice
from megatron_rl.shapes.model import ModelShape

SYNCHRONOUS = "split"
"""Separate GPUs generate the rows of a step before the other GPUs train on them."""
ONE_STEP_OFF = "split, one step off"
"""Separate GPUs generate the rows of the next step while the other GPUs train."""
OPEN_ORDER = "split, open order"
"""Separate GPUs generate without interruption while the other GPUs train."""
SAMPLING_SCHEDULES = (SYNCHRONOUS, ONE_STEP_OFF, OPEN_ORDER)
"""Sampling schedules of separate GPUs that only generate. A schedule is also the name of its placement."""
OVERSAMPLE = 0.25
"""Extra groups in flight in plans with the open order, as a fraction of the groups of a step.

In the open order the trainer uses each response as soon as it is complete."""

_ACTOR = ACTOR.name
_CRITIC = CRITIC.name
_REFERENCE = REFERENCE.name
_REWARD = REWARD_MODELS.name
ROLES = {"grpo": (_ACTOR, _REFERENCE), "ppo": (_ACTOR, _CRITIC, _REFERENCE, _REWARD)}
"""Roles with a model, by algorithm."""
GROUPINGS: Mapping[str, Sequence[Sequence[Sequence[str]]]] = {
    "grpo": [[[_ACTOR], [_REFERENCE]]],
    "ppo": [
        [[_ACTOR, _REFERENCE], [_CRITIC, _REWARD]],
        [[_ACTOR, _REFERENCE, _REWARD], [_CRITIC]],
        [[_ACTOR, _CRITIC], [_REFERENCE, _REWARD]],
        [[_ACTOR], [_CRITIC], [_REFERENCE], [_REWARD]],
    ],
}
"""Groupings of roles that share GPUs, by algorithm; for PPO they include HybridFlow's figure 12."""

_STATE_LIMIT_FACTORS = (1.0, 1.3, 2.0, 4.0, 1e9)
"""Factors to try for the limit on the memory of a role's states (weights, optimizer) on a GPU.

The limit is the factor times the memory of the states in the role's most compact layout. The last factor
means no limit."""
_MIXED_UNITS = 8
"""Number of units into which the GPUs are divided to size the groups of mixed and split placements."""
_MIN_ENGINE_FRACTION = 0.05
"""Smallest fraction of a GPU's memory with which an engine starts."""
_MAX_ENGINE_FRACTION = 0.9
"""Largest fraction of a GPU's memory for the engine, unless the problem sets another."""
_MAX_SLOWDOWN = 1.5
"""Slowdown, relative to the fastest step, at which the search for jobs with fewer GPUs ends."""

SyncSeconds = Callable[[ModelShape, ParallelLayout, RolloutLayout, Sequence[int], Machine], float]
"""Function that returns the seconds of a weight sync from an actor's layout into an engine on some ranks."""


@dataclass(frozen=True)
class PlacementProblem:
    """Models, batch and machines of a placement search.

    The fields from ``roles_swap`` to ``shared_stage_split`` describe the trainer. Their defaults describe
    this package; to predict published measurements of another system, set them to that system's values.

    Example: ``PlacementProblem({"actor": shape, "reference": shape}, "grpo", batch, machine)``.
    """

    models: Mapping[str, ModelShape]
    """Model of each role."""
    algorithm: str
    """Key of `ROLES`."""
    batch: StepBatch
    """Rows of a step."""
    machine: Machine
    """GPUs of the job, with the constants of predictions."""
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    """Optimizer of the trained roles."""
    lora: Lora | None = None
    """Adapters of the actor that are trained instead of its weights, or None."""
    engine: str = "current"
    """Name of the engine's constants in constants.json."""
    sync_seconds: SyncSeconds = planned_sync_seconds
    """Prediction of a weight sync."""
    memory_fraction: float | None = None
    """Largest fraction of a GPU's memory for the engine, or None for 0.9."""
    max_sequences: int | None = None
    """Largest number of sequences that a replica decodes at a time, or None for the engine's default."""
    rollout_tensor: int | None = None
    """Tensor-parallel size of the engine, or None for any size."""
    roles_swap: bool = False
    """Whether idle roles are moved to host memory if the roles of a group do not fit together."""
    context_parallel: bool = False
    """Whether rows may be sharded over context-parallel ranks."""
    exchanges_heads: bool = True
    """Whether context-parallel ranks exchange heads around attention instead of gathering keys and values."""
    shared_stage_split: bool = True
    """Whether all roles have the same split into uneven pipeline stages: a configuration has only one."""
    max_pipeline: int = MAX_PIPELINE
    """Largest pipeline size to try."""
    whole_nodes: bool = False
    """Whether groups larger than a node occupy complete nodes, and smaller groups divide a node evenly."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the cluster."""
        return self.machine.cluster.num_gpus


@dataclass(frozen=True)
class GroupPlan:
    """Plan of one group of roles that share GPUs.

    Example: ``GroupPlan(16, {"actor": actor, "reference": reference}, rollout=rollout)``.
    """

    gpus: int
    """Number of GPUs of the group."""
    plans: Mapping[str, TrainPlan]
    """Plan of each role; the first role is the lead, whose plan limits the memory of the other roles."""
    swap_seconds: float = 0.0
    """Seconds per step to move the states of idle roles between GPU and host memory."""
    rollout: RolloutPlan | None = None
    """Plan of generation on the group's GPUs, or None if generation is on other GPUs."""
    resident_bytes: float = 0.0
    """Bytes of training states that remain on a GPU during generation."""
    offloaded: bool = False
    """Whether training states are moved to the host during generation."""
    reload_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds to load a role's states from host memory and to store them again, in each phase of the role."""

    @property
    def busy_seconds(self) -> float:
        """Return the seconds of a step in which this group's GPUs work."""
        total_seconds = 0.0
        if self.rollout is not None:
            total_seconds = self.rollout.seconds
        for seconds in self.role_seconds(0):
            total_seconds += seconds.forward + seconds.reload_seconds
            if seconds.learn:
                total_seconds += seconds.learn + seconds.reload_seconds
        return total_seconds

    def role_seconds(self, rank: int) -> list[RoleSeconds]:
        """Return the seconds of each role in a step.

        All ranks of the group take the same time, so the result lists only ``rank`` for each role.
        """
        all_seconds = []
        for index, (role, plan) in enumerate(self.plans.items()):
            # The states of idle roles are moved to host memory and back once per step: add the seconds of
            # these transfers to the first role.
            role_learn_seconds = plan.learn
            if index == 0:
                role_learn_seconds += self.swap_seconds

            seconds = RoleSeconds(
                role,
                (rank,),
                forward=plan.forward,
                learn=role_learn_seconds,
                reload_seconds=self.reload_seconds.get(role, 0.0),
            )
            all_seconds.append(seconds)
        return all_seconds


@dataclass(frozen=True)
class PlacementPlan:
    """Placement of all roles on GPUs, with its predicted step.

    Example: ``PlacementPlan("split", (group,), step, rollout, rollout_gpus=8)``.
    """

    name: str
    """Name of the placement, as printed."""
    groups: tuple[GroupPlan, ...]
    """Groups of roles, each on separate GPUs."""
    step: StepSeconds
    """Seconds of a step."""
    rollout: RolloutPlan
    """Plan of generation."""
    rollout_gpus: int = 0
    """Number of GPUs that only generate."""
    reasons: tuple[str, ...] = ()
    """Reasons why no simpler placement was selected, see `search_simplest_placements`."""

    @property
    def largest_pipeline(self) -> int:
        """Return the largest number of pipeline stages of any role."""
        plans: list[TrainPlan] = []
        for group in self.groups:
            plans += group.plans.values()
        return max(plan.choice.layout.pipeline for plan in plans)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that the placement uses."""
        return sum(self.gpus_per_group) + self.rollout_gpus

    @property
    def gpus_per_group(self) -> list[int]:
        """Return the number of GPUs of each group of roles, in the order of groups."""
        return [group.gpus for group in self.groups]

    def plan_of(self, role: str) -> TrainPlan | None:
        """Return a role's plan, or None if the placement does not have the role."""
        for group in self.groups:
            if role in group.plans:
                return group.plans[role]
        return None


class Planner:
    """Planner of groups of roles for one problem, with caches by model and number of GPUs."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.counter = SearchCount()
        self._fronts: dict[tuple[ModelShape, bool, Lora | None, int, bool], list[TrainPlan]] = {}
        self._rollouts: dict[tuple[int, float], RolloutPlan | None] = {}

    def plans_of_role(self, role: str, gpus: int, needs_even_stages: bool = False) -> list[TrainPlan]:
        """Return the Pareto front of a role's plans on ``gpus`` GPUs, fastest first.

        ``needs_even_stages`` excludes layouts whose pipeline stages have different numbers of layers.
        """
        problem = self.problem
        model = problem.models[role]
        is_trained = spec_of(role).trains
        # The critic and frozen roles have no adapters in a plan.
        lora = None
        if role == _ACTOR:
            lora = problem.lora

        # Cache by model, since roles with equal models have the same front.
        key = (model, is_trained, lora, gpus, needs_even_stages)
        if key not in self._fronts:
            self._fronts[key] = training_front(
                model,
                gpus,
                problem.machine,
                problem.batch,
                problem.optimizer,
                trained=is_trained,
                context_allowed=problem.context_parallel,
                exchanges_heads=problem.exchanges_heads,
                even_stages=needs_even_stages,
                lora=lora,
                counter=self.counter,
                max_pipeline=problem.max_pipeline,
            )
        return self._fronts[key]

    def plan_group(
        self,
        roles: Sequence[str],
        gpus: int,
        generates: bool,
        is_only_group: bool = True,
    ) -> GroupPlan | None:
        """Return the fastest plan of a group of roles on ``gpus`` GPUs, or None if the group does not fit.

        Each role may use the memory that the states of the other roles leave free. If that is too little and
        the problem allows it, idle roles are moved to host memory, and every step includes these transfers.
        ``generates``: whether the group also generates. ``is_only_group``: whether the placement has no other
        group of roles.
        """
        # The first role leads: all its plans are tried, and the other roles get the memory that its plan
        # leaves free. Trained roles come first, and the actor before the critic.
        ordered_roles = sorted(roles, key=lambda name: (not spec_of(name).trains, name != _ACTOR))
        # More memory for states can make a role faster, but leaves less memory for the other roles. A group
        # of one role needs no limits.
        limit_factors = _STATE_LIMIT_FACTORS
        if len(ordered_roles) == 1:
            limit_factors = _STATE_LIMIT_FACTORS[:1]
        # A configuration has one setting for uneven pipeline stages, which applies to one layout. Groups have
        # different layouts, so with several groups try only layouts with equal stages.
        needs_even_stages = self.problem.shared_stage_split and not is_only_group

        fastest_group: GroupPlan | None = None
        shortest_seconds = inf
        for lead in self.plans_of_role(ordered_roles[0], gpus, needs_even_stages):
            for state_limit_factor in limit_factors:
                group = self._plan_group_with_lead(
                    ordered_roles, lead, gpus, generates, state_limit_factor, shortest_seconds
                )
                if group is not None and group.busy_seconds < shortest_seconds:
                    fastest_group = group
                    shortest_seconds = group.busy_seconds
        return fastest_group

    def _plan_group_with_lead(
        self,
        ordered_roles: Sequence[str],
        lead: TrainPlan,
        gpus: int,
        generates: bool,
        state_limit_factor: float,
        max_seconds: float,
    ) -> GroupPlan | None:
        """Return the plan of a group in which the first role has the plan ``lead``.

        Every other role gets its fastest plan under a limit on the memory of the role's weights and optimizer
        states. The limit is ``state_limit_factor`` times the memory that the states need in the role's most
        compact plan.

        ``generates``: whether the group also generates. Returns None if the group does not fit in memory, or
        if the group takes at least ``max_seconds`` seconds without generation.
        """
        problem = self.problem
        plans = {ordered_roles[0]: lead}
        for role in ordered_roles[1:]:
            plan = self._plan_other_role(role, lead, gpus, state_limit_factor)
            if plan is None:
                return None
            plans[role] = plan

        # One role works at a time, and the states of all roles are resident.
        state_bytes = [plan.memory.states for plan in plans.values()]
        work_bytes = max(plan.memory.total - plan.memory.states for plan in plans.values())
        resident_bytes = sum(state_bytes)
        swap_seconds = 0.0
        # If the states do not fit together, idle states are moved to host memory while another role works.
        if work_bytes + resident_bytes > problem.machine.usable_memory:
            if not problem.roles_swap:
                return None
            swap_seconds = 2.0 * (resident_bytes - min(state_bytes)) / problem.machine.host_rate
            resident_bytes = max(state_bytes)

        group = GroupPlan(gpus, plans, swap_seconds)
        if group.busy_seconds >= max_seconds:
            return None
        if not generates:
            return group
        return self._with_generation(group, resident_bytes)

    def _plan_other_role(
        self,
        role: str,
        lead: TrainPlan,
        gpus: int,
        state_limit_factor: float,
    ) -> TrainPlan | None:
        """Return the plan of ``role`` in a group whose first role has the plan ``lead``.

        Returns the role's fastest plan under a limit on the memory of the role's weights and optimizer
        states. The limit is ``state_limit_factor`` times the memory that the states need in the role's most
        compact plan. Returns None if no plan fits.
        """
        # The role must have the lead's layout in two cases. First, if the lead's pipeline stages are uneven:
        # a configuration has one setting for uneven stages, which applies to all roles. Second, if the lead
        # trains adapters and the role (a reference) runs the lead's base weights without them.
        choice = lead.choice
        has_uneven_stages = choice.model.layers % choice.layout.pipeline > 0
        shares_split = self.problem.shared_stage_split and has_uneven_stages
        shares_base = spec_of(role).shares == INITIAL and choice.lora is not None
        if shares_split or shares_base:
            return self._with_layout_of(role, lead)

        # Plans are sorted by time, so the first plan within the limit is the fastest.
        plans = self.plans_of_role(role, gpus, self.problem.shared_stage_split)
        if not plans:
            return None
        max_state_bytes = state_limit_factor * min(plan.memory.states for plan in plans)
        return next(plan for plan in plans if plan.memory.states <= max_state_bytes)

    def _with_layout_of(self, role: str, lead: TrainPlan) -> TrainPlan | None:
        """Return the plan of ``role`` in the layout of ``lead``, the plan of the group's first role.

        Returns None if the model of ``role`` differs from the model of the first role. If the actor trains
        adapters, the reference uses the actor's base weights, so the reference's plan counts no memory for
        weights.
        """
        batch = self.problem.batch
        machine = self.problem.machine
        lead_choice = lead.choice
        if self.problem.models[role] != lead_choice.model:
            return None

        if spec_of(role).trains:
            choice = replace(lead_choice, lora=None)
            learn = learn_seconds(choice, batch, machine)
            return TrainPlan(choice, learn, lead.forward, learn_memory(choice, batch))

        choice = TrainChoice(
            lead_choice.model,
            lead_choice.layout,
            exchanges_heads=lead_choice.exchanges_heads,
        )
        memory = score_memory(choice, batch)
        if spec_of(role).shares == INITIAL and lead_choice.lora is not None:
            memory = RoleMemory(replace(memory.fullest, weights=0.0), states=0.0)
        forward = score_seconds(choice, batch, machine)
        return TrainPlan(choice, learn=0.0, forward=forward, memory=memory)

    def _with_generation(self, group: GroupPlan, state_bytes: float) -> GroupPlan | None:
        """Add generation to a group of roles, with the faster of two plans.

        The first plan keeps the states of all roles (weights, gradients and optimizer states) on the GPU
        during generation. The second plan moves the states of trained roles to host memory. With
        `PlacementProblem.roles_swap` the second plan also moves frozen models.

        ``state_bytes``: bytes of the group's states on each GPU. Returns None if neither plan fits.
        """
        problem = self.problem
        machine = problem.machine
        resident_plan = replace(group, resident_bytes=state_bytes)

        # The second plan moves the states of trained roles to the host during generation.
        reload_seconds = {}
        frozen_bytes = 0.0
        for role, plan in group.plans.items():
            if spec_of(role).trains:
                reload_seconds[role] = 2.0 * plan.memory.states / machine.host_rate
            else:
                frozen_bytes += plan.memory.states

        # With ``roles_swap`` the states of idle roles are in host memory. During generation all roles are
        # idle, so frozen models are moved, too.
        if problem.roles_swap:
            frozen_bytes = 0.0
            swap_seconds = group.swap_seconds + 2.0 * state_bytes / machine.host_rate
            offloaded_plan = replace(group, swap_seconds=swap_seconds)
        else:
            offloaded_plan = replace(group, reload_seconds=reload_seconds)
        offloaded_plan = replace(offloaded_plan, resident_bytes=frozen_bytes, offloaded=True)
        offloaded_bytes = frozen_bytes + machine.constants.memory.after_offload_gigabytes * GB

        # During a weight sync the actor's merged weights are on the GPU too.
        merged_weight_bytes = 0.0
        actor = group.plans.get(_ACTOR)
        if actor is not None:
            merged_weight_bytes = merged_bytes(actor.choice)

        # The trainer's CUDA context and communicators remain on the GPU during generation, and so do the
        # weight sync's connections across nodes. Staging buffers exist during a sync. Connections within the
        # node depend on the layouts, which are not selected yet: no memory is reserved for them.
        sync_bytes = HybridEngineConfig.staging_bytes + NETWORK_PEERS_BYTES
        other_bytes = merged_weight_bytes + RUNTIME_BYTES + sync_bytes

        plans = []
        for plan, resident_bytes in ((resident_plan, state_bytes), (offloaded_plan, offloaded_bytes)):
            rollout = self.plan_rollout(group.gpus, resident_bytes + other_bytes)
            if rollout is not None:
                plans.append(replace(plan, rollout=rollout))
        return min(plans, key=lambda plan: plan.busy_seconds, default=None)

    def plan_rollout(self, gpus: int, reserved_bytes: float = 0.0) -> RolloutPlan | None:
        """Return the fastest rollout that leaves ``reserved_bytes`` of each GPU free; None if none fits."""
        machine = self.problem.machine
        free_fraction = (machine.usable_memory - reserved_bytes) / machine.gpu.memory
        # Round down to hundredths, as configurations do, so that the cached search below is reused.
        free_fraction = int(100 * free_fraction) / 100

        max_fraction = self.problem.memory_fraction or _MAX_ENGINE_FRACTION
        fraction = min(max_fraction, free_fraction)
        if fraction <= _MIN_ENGINE_FRACTION:
            return None
        return self._plan_rollout_within(gpus, fraction)

    def _plan_rollout_within(self, gpus: int, fraction: float) -> RolloutPlan | None:
        """Return the fastest rollout with ``fraction`` of each GPU's memory, or None if no rollout fits."""
        key = (gpus, fraction)
        if key not in self._rollouts:
            problem = self.problem
            plans = rollout_plans(
                problem.models[_ACTOR],
                gpus,
                problem.machine,
                problem.batch,
                fraction,
                problem.engine,
                max_sequences=problem.max_sequences,
                counter=self.counter,
            )
            # Skip other tensor-parallel sizes if the problem sets one.
            if problem.rollout_tensor:
                plans = [plan for plan in plans if plan.layout.tensor == problem.rollout_tensor]

            # Plans are sorted, fastest first.
            fastest = None
            if plans:
                fastest = plans[0]
            self._rollouts[key] = fastest
        return self._rollouts[key]


# ---------------------------------------------------------------- placements


def _build_placement(
    name: str,
    problem: PlacementProblem,
    groups: Sequence[GroupPlan],
    rollout: RolloutPlan,
    rollout_gpus: int = 0,
    samples_ahead: bool = False,
) -> PlacementPlan:
    """Combine planned groups and a rollout into a placement, and predict its step.

    ``rollout_gpus``: number of GPUs that only generate. ``samples_ahead``: whether they sample the next
    step's rows.
    """
    actor_group = next(group for group in groups if _ACTOR in group.plans)
    layout = actor_group.plans[_ACTOR].choice.layout
    # The engine is on the actor's ranks, or on the ranks after them.
    ranks = layout.ranks
    if rollout_gpus:
        ranks = range(layout.size, layout.size + rollout_gpus)

    # One rank represents each group, since groups are on separate GPUs and their ranks are equally busy.
    role_seconds: list[RoleSeconds] = []
    for index, group in enumerate(groups):
        role_seconds += group.role_seconds(index)

    model = problem.models[_ACTOR]
    step = compose_step(
        role_seconds,
        generate=rollout.seconds,
        reshard=problem.sync_seconds(model, layout, rollout.layout, ranks, problem.machine),
        fixed=problem.machine.constants.efficiency.rl_fixed_seconds,
        samples_ahead=samples_ahead,
    )
    return PlacementPlan(name, tuple(groups), step, rollout, rollout_gpus)


def place_groups(name: str, problem: PlacementProblem, groups: Sequence[GroupPlan]) -> PlacementPlan:
    """Build the placement of planned groups; one of the groups also generates."""
    rollout = next(group.rollout for group in groups if group.rollout is not None)
    return _build_placement(name, problem, groups, rollout)


def place_split(
    planner: Planner,
    rollout_planner: Planner,
    roles: Sequence[str],
    train_gpus: int,
    rollout_gpus: int,
    sampling_schedule: str,
) -> PlacementPlan | None:
    """Return the placement of training and generation on disjoint GPUs, or None if it does not fit.

    ``rollout_planner`` plans the generation. Unless ``sampling_schedule`` (one of `SAMPLING_SCHEDULES`) is
    `SYNCHRONOUS`, the next step is generated during training, so the longer of these two phases determines
    the time.
    """
    group = planner.plan_group(roles, train_gpus, False)
    if group is None:
        return None

    # Training and generation are on separate GPUs, so neither reserves memory for the other.
    rollout = rollout_planner.plan_rollout(rollout_gpus)
    if rollout is None:
        return None

    samples_ahead = sampling_schedule != SYNCHRONOUS
    return _build_placement(sampling_schedule, planner.problem, [group], rollout, rollout_gpus, samples_ahead)


def compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``total`` as an ordered sum of ``count`` positive integers."""
    if count == 1:
        yield (total,)
        return
    for first in range(1, total - count + 2):
        for other_terms in compositions(total - first, count - 1):
            yield (first, *other_terms)


def plan_grouping(
    name: str,
    planner: Planner,
    groups: Sequence[Sequence[str]],
    num_units: int = 16,
) -> PlacementPlan | None:
    """Try all sizes of these groups of roles; return the fastest placement, or None if no sizes fit.

    Group sizes are multiples of 1/``num_units`` of the GPUs.
    """
    gpus = planner.problem.gpus
    if len(groups) > gpus:
        return None
    gpus_per_unit = gpus
    if len(groups) > 1:
        gpus_per_unit = max(1, gpus // num_units)

    # Try every division of the GPUs. A group's plan is cached by its index and its size.
    cached_plans: dict[tuple[int, int], GroupPlan | None] = {}
    fastest: PlacementPlan | None = None
    for num_units_by_group in compositions(gpus // gpus_per_unit, len(groups)):
        sizes = [units * gpus_per_unit for units in num_units_by_group]
        if not all(_is_allowed_size(planner.problem, size) for size in sizes):
            continue
        planned_groups = _plan_groups(planner, groups, sizes, cached_plans)
        if planned_groups is not None:
            fastest = _faster_placement(fastest, place_groups(name, planner.problem, planned_groups))
    return fastest


def _plan_groups(
    planner: Planner,
    groups: Sequence[Sequence[str]],
    sizes: Sequence[int],
    cached_plans: dict[tuple[int, int], GroupPlan | None],
) -> list[GroupPlan] | None:
    """Plan each group of roles on its number of GPUs, or return None if a group does not fit.

    ``cached_plans`` maps (index of a group, GPUs) to its plan; new plans are added.
    """
    planned_groups: list[GroupPlan] = []
    for index, (roles, size) in enumerate(zip(groups, sizes, strict=True)):
        key = (index, size)
        if key not in cached_plans:
            generates = _ACTOR in roles
            is_only_group = len(groups) == 1
            cached_plans[key] = planner.plan_group(roles, size, generates, is_only_group)
        group = cached_plans[key]
        if group is None:
            return None
        planned_groups.append(group)
    return planned_groups


@dataclass(frozen=True)
class SearchResult:
    """Result of a search over all placements, with the numbers of tried layouts and settings."""

    plans: tuple[PlacementPlan, ...]
    """Best plan of every placement that fits, fastest first."""
    layouts: int
    """Number of layouts that were tried."""
    evaluated: int
    """Number of combinations of a layout and settings whose seconds were predicted."""


def job_sizes(gpus: int) -> Iterator[int]:
    """Yield the numbers of GPUs to try, in descending order: all GPUs, then smaller numbers 2^a and 3 x 2^a.

    Fewer GPUs can be faster, since a number with few divisors allows few layouts, and a small batch does not
    fill a large job.
    """
    yield gpus

    sizes: set[int] = set()
    for power in range(gpus.bit_length()):
        sizes |= {1 << power, 3 << power}
    yield from sorted((size for size in sizes if size < gpus), reverse=True)


def _plan_colocated(planner: Planner, roles: Sequence[str]) -> PlacementPlan | None:
    """Return the fastest placement of all roles and generation on the same GPUs."""
    fastest: PlacementPlan | None = None
    for size in job_sizes(planner.problem.gpus):
        if not _is_allowed_size(planner.problem, size):
            continue
        group = planner.plan_group(roles, size, True)
        if group is None:
            # The size of the complete job may have too few divisors for any layout, so try smaller sizes.
            # Smaller sizes have many divisors. If no layout fits a smaller size, its GPUs have too little
            # memory, and the remaining sizes have even less memory.
            if size < planner.problem.gpus:
                break
            continue

        # Stop at a much slower step: the remaining sizes are smaller and even slower.
        placement = place_groups("colocated", planner.problem, [group])
        if fastest is not None and placement.step.total > _MAX_SLOWDOWN * fastest.step.total:
            break
        fastest = _faster_placement(fastest, placement)
    return fastest


def _plan_split(planner: Planner, roles: Sequence[str], sampling_schedule: str) -> PlacementPlan | None:
    """Return the fastest placement with separate GPUs that only generate, or None if none fits.

    ``sampling_schedule``: schedule of these GPUs, one of `SAMPLING_SCHEDULES`.
    """
    problem = planner.problem
    gpus = problem.gpus
    rollout_planner = planner
    if sampling_schedule == OPEN_ORDER:
        batch = replace(problem.batch, oversample=OVERSAMPLE)
        rollout_planner = Planner(replace(problem, batch=batch))

    # Divide the GPUs in units of an eighth.
    gpus_per_unit = max(1, gpus // _MIXED_UNITS)
    fastest: PlacementPlan | None = None
    for rollout_gpus in range(gpus_per_unit, gpus, gpus_per_unit):
        if not _is_allowed_size(problem, rollout_gpus) or not _is_allowed_size(problem, gpus - rollout_gpus):
            continue
        placement = place_split(
            planner, rollout_planner, roles, gpus - rollout_gpus, rollout_gpus, sampling_schedule
        )
        fastest = _faster_placement(fastest, placement)
    return fastest


def _is_allowed_size(problem: PlacementProblem, size: int) -> bool:
    """Return whether the problem allows a group of ``size`` GPUs.

    With `PlacementProblem.whole_nodes` a group occupies complete nodes, or an even fraction of one node, such
    as 4 of 8 GPUs.
    """
    gpus_per_node = problem.machine.cluster.gpus_per_node
    if not problem.whole_nodes:
        return True
    return size % gpus_per_node == 0 or (size < gpus_per_node and gpus_per_node % size == 0)


def _faster_placement(best: PlacementPlan | None, candidate: PlacementPlan | None) -> PlacementPlan | None:
    """Return the faster of two placements, ``best`` if both are equal; None is an absent placement."""
    if candidate is None:
        return best
    if best is None or candidate.step.total < best.step.total:
        return candidate
    return best


def _grouping_name(groups: Sequence[Sequence[str]]) -> str:
    """Return the name of a mixed placement, with the roles that are not on the actor's GPUs."""
    if len(groups) > 2:
        return "mixed: every role on its own GPUs"
    return f"mixed: {' and '.join(groups[-1])} on other GPUs"


def _plan_placements(
    planner: Planner, roles: Sequence[str], sampling_schedule: str
) -> Iterator[PlacementPlan | None]:
    """Yield the best plan of every placement; None for a placement that does not fit.

    ``sampling_schedule`` is used in the placement with separate GPUs for generation. It is one of
    `SAMPLING_SCHEDULES`, and determines whether these GPUs generate while the other GPUs train.
    """
    yield _plan_colocated(planner, roles)
    yield _plan_split(planner, roles, sampling_schedule)
    for grouping in GROUPINGS[planner.problem.algorithm]:
        groups = [[role for role in group if role in roles] for group in grouping]
        # A grouping with an empty group equals a grouping with fewer groups.
        if all(groups):
            yield plan_grouping(_grouping_name(grouping), planner, groups, _MIXED_UNITS)


def _role_names(problem: PlacementProblem) -> tuple[str, ...]:
    """Return the names of the algorithm's roles for which the problem has a model."""
    return tuple(role for role in ROLES[problem.algorithm] if role in problem.models)


def search_placements(problem: PlacementProblem, sampling_schedule: str = SYNCHRONOUS) -> SearchResult:
    """Return the best plan of each placement (colocated, split, mixed); raises UserError if none fits.

    ``sampling_schedule``: schedule of GPUs that only generate, one of `SAMPLING_SCHEDULES`.
    """
    result = _search_fitting_placements(problem, sampling_schedule)
    if not result.plans:
        raise _does_not_fit_error(problem)
    return result


def _search_fitting_placements(problem: PlacementProblem, sampling_schedule: str) -> SearchResult:
    """Return the best plan of every placement that fits; the result is empty if no placement fits."""
    # Search context parallelism only for rows that are long enough for 4 or more ranks.
    if max(context_sizes(problem.batch.row_limit)) >= 4:
        problem = replace(problem, context_parallel=True)

    planner = Planner(problem)
    placements = _plan_placements(planner, _role_names(problem), sampling_schedule)
    plans = [plan for plan in placements if plan is not None]
    plans.sort(key=lambda plan: plan.step.total)
    return SearchResult(tuple(plans), planner.counter.layouts, planner.counter.evaluated)


MIN_GAIN = 0.05
"""Smallest predicted gain, as a fraction of a step, that justifies more pipeline stages or shared nodes.

Published measurements differ from predictions by 15 % and more, and the phase model omits one cause of slow
deep pipelines: micro-batches of packed rows take different times, so stages wait for one another."""

_RestrictedSearch = tuple[bool, int, Mapping[str, PlacementPlan]]
"""Result of a search with limits: (`PlacementProblem.whole_nodes`, `PlacementProblem.max_pipeline`, name of a
placement -> best plan of the placement)."""


def search_simplest_placements(
    problem: PlacementProblem, sampling_schedule: str = SYNCHRONOUS
) -> SearchResult:
    """Return for every placement the simplest plan that is nearly as fast as the fastest plan.

    A plan in which groups of roles occupy complete nodes (`PlacementProblem.whole_nodes`) is simpler than a
    plan in which groups share nodes. If two plans are equal in this respect, the plan with fewer pipeline
    stages is simpler. `PlacementPlan.reasons` states how much slower the simpler plans are, or that no
    simpler plan fits. Raises UserError if no plan fits.
    """
    fastest_result = search_placements(problem, sampling_schedule)
    num_layouts = fastest_result.layouts
    num_evaluated = fastest_result.evaluated

    # Order the searches from the simplest plans to all plans. No group of a job on one node crosses nodes, so
    # such a job is not searched with ``whole_nodes``.
    max_stages = max(plan.largest_pipeline for plan in fastest_result.plans)
    pipeline_limits = [1 << power for power in range(MAX_PIPELINE.bit_length()) if 1 << power < max_stages]
    pipeline_limits.append(MAX_PIPELINE)
    spans_nodes = problem.gpus > problem.machine.cluster.gpus_per_node
    restrictions = [(spans_nodes, pipeline_limit) for pipeline_limit in pipeline_limits]
    if spans_nodes:
        restrictions += [(False, pipeline_limit) for pipeline_limit in pipeline_limits[:-1]]

    # Stop as soon as every placement has a plan that is nearly as fast as its fastest plan.
    searches: list[_RestrictedSearch] = []
    simplest_by_name: dict[str, PlacementPlan] = {}
    for whole_nodes, pipeline_limit in restrictions:
        restricted_problem = replace(problem, whole_nodes=whole_nodes, max_pipeline=pipeline_limit)
        restricted_result = _search_fitting_placements(restricted_problem, sampling_schedule)
        plans_by_name = {plan.name: plan for plan in restricted_result.plans}
        searches.append((whole_nodes, pipeline_limit, plans_by_name))
        num_layouts += restricted_result.layouts
        num_evaluated += restricted_result.evaluated

        for plan in fastest_result.plans:
            simpler_plan = plans_by_name.get(plan.name)
            if simpler_plan is None or plan.name in simplest_by_name:
                continue
            if simpler_plan.step.total <= (1.0 + MIN_GAIN) * plan.step.total:
                simplest_by_name[plan.name] = _add_reasons(simpler_plan, whole_nodes, searches)
        if len(simplest_by_name) == len(fastest_result.plans):
            break

    # A placement without a simpler plan keeps its fastest plan.
    selected_plans: list[PlacementPlan] = []
    for plan in fastest_result.plans:
        if plan.name in simplest_by_name:
            selected_plans.append(simplest_by_name[plan.name])
        else:
            selected_plans.append(_add_reasons(plan, False, searches))
    selected_plans.sort(key=lambda plan: plan.step.total)
    return SearchResult(tuple(selected_plans), num_layouts, num_evaluated)


def _add_reasons(
    plan: PlacementPlan, whole_nodes: bool, searches: Sequence[_RestrictedSearch]
) -> PlacementPlan:
    """Return the plan with its `reasons`: how much slower simpler plans of the same placement are.

    A plan with several pipeline stages has one reason: the slowdown with fewer stages. A plan whose groups of
    roles share nodes has another reason: the slowdown if groups occupy complete nodes.

    ``whole_nodes``: `PlacementProblem.whole_nodes` of the search that returned the plan. ``searches``:
    results of the searches for simpler plans.
    """
    placement = plan.name
    reasons: list[str] = []

    # Compare with plans that have fewer pipeline stages.
    if plan.largest_pipeline > 1:
        shallower_plans = [
            plans[placement]
            for search_whole_nodes, max_pipeline, plans in searches
            if search_whole_nodes == whole_nodes
            and max_pipeline < plan.largest_pipeline
            and placement in plans
        ]
        slowdown = _slowdown_text(plan, shallower_plans, "plans with fewer stages")
        reasons.append(f"{plan.largest_pipeline} pipeline stages: {slowdown}")

    # Compare with plans whose groups occupy complete nodes, if there was a search for such plans.
    if not whole_nodes and any(search_whole_nodes for search_whole_nodes, _, _ in searches):
        whole_node_plans = [
            plans[placement]
            for search_whole_nodes, _, plans in searches
            if search_whole_nodes and placement in plans
        ]
        slowdown = _slowdown_text(plan, whole_node_plans, "plans with whole nodes")
        reasons.append(f"groups that share nodes: {slowdown}")
    return replace(plan, reasons=tuple(reasons))


def _slowdown_text(plan: PlacementPlan, simpler_plans: Sequence[PlacementPlan], description: str) -> str:
    """Describe how much slower the fastest of ``simpler_plans`` is than ``plan``.

    An example is "plans with whole nodes take 5% longer". ``description``: the beginning of the text, such as
    "plans with whole nodes".
    """
    if not simpler_plans:
        return f"{description} do not fit"
    fastest_plan = min(simpler_plans, key=lambda candidate: candidate.step.total)
    return f"{description} take {fastest_plan.step.total / plan.step.total - 1.0:.0%} longer"


def _does_not_fit_error(problem: PlacementProblem) -> UserError:
    """Return the error for a job that fits in no placement; the fix names a sufficient number of GPUs."""
    machine = problem.machine
    fix = "use more or larger GPUs"
    smallest_size = _smallest_job_size(problem)
    if smallest_size:
        fix = f"use at least {smallest_size} GPUs"
    return UserError(
        f"{problem.models[_ACTOR].name} does not fit on {problem.gpus} {machine.gpu.name}",
        where="--gpus",
        expected=f"at most {machine.usable_memory / GB:.0f} GB on each GPU",
        got=_memory_need_text(problem),
        fix=fix,
    )


def _memory_need_text(problem: PlacementProblem) -> str:
    """Format a lower bound of the memory that each GPU needs, for an error."""
    model = problem.models[_ACTOR]
    # Weights in bfloat16. Gradients and optimizer states of adapters are negligible.
    bytes_per_parameter = 2
    if problem.lora is None:
        bytes_per_parameter += problem.optimizer.gradient_bytes + problem.optimizer.state_bytes
    gigabytes = bytes_per_parameter * model.parameters / problem.gpus / GB
    return f"{gigabytes:.0f} GB a GPU of weights, gradients and optimizer states, if they are split evenly"


def _smallest_job_size(problem: PlacementProblem) -> int | None:
    """Return the smallest power of 2, above the problem's number of GPUs, on which all colocated roles fit.

    At most 64 times the problem's number of GPUs are tried. Returns None if the roles do not fit on any of
    these numbers.
    """
    roles = _role_names(problem)
    size = 1
    while size <= problem.gpus:
        size *= 2

    # Six doublings are a factor of 64.
    for _ in range(6):
        cluster = replace(problem.machine.cluster, num_gpus=size)
        larger_problem = replace(problem, machine=replace(problem.machine, cluster=cluster))
        if Planner(larger_problem).plan_group(roles, size, True) is not None:
            return size
        size *= 2
    return None
