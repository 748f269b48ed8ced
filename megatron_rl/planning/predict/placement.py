"""Score placements: groups of roles on GPUs of their own, and search all of them for the shortest step.

Within a group roles take turns; groups work at the same time (HybridFlow, arXiv 2409.19256, section 6 and
algorithm 1). `step.add_up` makes the step of a placement as it makes that of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.errors import UserError
from megatron_rl.planning.predict.groups import GroupPlan, Planner, Problem
from megatron_rl.planning.predict.search import RolloutPlan, TrainPlan, contexts
from megatron_rl.planning.predict.step import Step, add_up
from megatron_rl.shapes.hardware import GB

BEFORE, BESIDE, ALWAYS = SPLITS = ("split", "split, one step off", "split, open order")
"""When GPUs for generation alone sample: before a step learns, while it does, and always."""
OVERSAMPLE = 0.25
"""Groups that a planned open order has in flight beyond those of a step, as a share of them."""
ROLES = {"grpo": ("actor", "reference"), "ppo": ("actor", "critic", "reference", "reward")}
"""Roles that hold a model, by algorithm."""
# Groupings of roles; within a group roles share GPUs. The PPO ones are those of HybridFlow figure 12
# and the cuts between them.
MIXED: Mapping[str, Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "grpo": {"mixed: reference apart": (("actor",), ("reference",))},
    "ppo": {
        "mixed: critic and reward apart": (("actor", "reference"), ("critic", "reward")),
        "mixed: critic apart": (("actor", "reference", "reward"), ("critic",)),
        "mixed: reference and reward apart": (("actor", "critic"), ("reference", "reward")),
        "mixed: every role apart": (("actor",), ("critic",), ("reference",), ("reward",)),
    },
}


@dataclass(frozen=True)
class PlacementPlan:
    """Hold a scored placement."""

    name: str
    groups: tuple[GroupPlan, ...]
    step: Step
    rollout: RolloutPlan
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


def _score(
    name: str,
    problem: Problem,
    groups: Sequence[GroupPlan],
    rollout: RolloutPlan,
    rollout_gpus: int = 0,
    ahead: bool = False,
) -> PlacementPlan:
    """Return a placement of planned groups with its step."""
    layout = next(group.plans["actor"].choice.layout for group in groups if "actor" in group.plans)
    # Ranks of the actor's own numbering: an engine apart from it shares none of them.
    ranks = range(layout.size, layout.size + rollout_gpus) if rollout_gpus else layout.ranks
    step = add_up(
        [work for place, group in enumerate(groups) for work in group.works(place)],
        generate=rollout.seconds,
        reshard=problem.sync_seconds(problem.models["actor"], layout, rollout.layout, ranks, problem.machine),
        fixed=problem.machine.constants.efficiency.rl_fixed_seconds,
        ahead=ahead,
    )
    return PlacementPlan(name, tuple(groups), step, rollout, rollout_gpus)


def score_groups(name: str, problem: Problem, groups: Sequence[GroupPlan]) -> PlacementPlan:
    """Compose planned groups, one of which generates, into a step."""
    rollout = next(group.rollout for group in groups if group.rollout is not None)
    return _score(name, problem, groups, rollout)


def score_split(
    planner: Planner, sampler: Planner, roles: Sequence[str], train_gpus: int, rollout_gpus: int, way: str
) -> PlacementPlan | None:
    """Score training and generation on disjoint GPUs; None when it does not fit.

    ``sampler`` plans the generation. ``way`` is one of `SPLITS`; unless it is the first, the next step's
    generation runs during training, so the longer of both counts.
    """
    group = planner.group(roles, train_gpus, False)
    rollout = sampler.rollout(rollout_gpus) if group is not None else None
    if group is None or rollout is None:
        return None
    return _score(way, planner.problem, [group], rollout, rollout_gpus, way != BEFORE)


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
    gpus = planner.problem.gpus
    if len(groups) > gpus:
        return None
    unit = max(1, gpus // parts) if len(groups) > 1 else gpus
    planned: dict[tuple[int, int], GroupPlan | None] = {}
    best: PlacementPlan | None = None
    for sizes in compositions(gpus // unit, len(groups)):
        members: list[GroupPlan] = []
        for index, size in enumerate(sizes):
            key = (index, size * unit)
            if key not in planned:
                generates = "actor" in groups[index]
                planned[key] = planner.group(groups[index], size * unit, generates, len(groups) == 1)
            group = planned[key]
            if group is None:
                break
            members.append(group)
        else:
            best = _faster(best, score_groups(name, planner.problem, members))
    return best


@dataclass(frozen=True)
class SearchResult:
    """Hold the best plan of every placement, fastest first, and how many cuts were looked at."""

    plans: tuple[PlacementPlan, ...]
    layouts: int
    evaluated: int


def job_sizes(gpus: int) -> Iterator[int]:
    """Yield GPU counts to try, most first: all, then 2^a and 3 x 2^a below (the rest would idle).

    A count with awkward divisors can lose to a smaller one, and a small batch cannot fill a large job.
    """
    yield gpus
    sizes = {base << power for base in (1, 3) for power in range(gpus.bit_length())}
    yield from sorted((size for size in sizes if size < gpus), reverse=True)


def _colocated(planner: Planner, roles: tuple[str, ...]) -> PlacementPlan | None:
    best: PlacementPlan | None = None
    for size in job_sizes(planner.problem.gpus):
        group = planner.group(roles, size, True)
        if group is None:
            # Fewer GPUs hold even less; an awkward full count is the exception.
            if size < planner.problem.gpus:
                break
            continue
        scored = score_groups("colocated", planner.problem, [group])
        if best is not None and scored.step.total > 1.5 * best.step.total:
            break
        best = _faster(best, scored)
    return best


def _split(planner: Planner, roles: tuple[str, ...], way: str) -> PlacementPlan | None:
    gpus, problem = planner.problem.gpus, planner.problem
    sampler = planner
    if way == ALWAYS:
        sampler = Planner(replace(problem, batch=replace(problem.batch, oversample=OVERSAMPLE)))
    unit = max(1, gpus // 8)
    best: PlacementPlan | None = None
    for rollout in range(unit, gpus, unit):
        best = _faster(best, score_split(planner, sampler, roles, gpus - rollout, rollout, way))
    return best


def _faster(best: PlacementPlan | None, other: PlacementPlan | None) -> PlacementPlan | None:
    if best is None or other is None:
        return best or other
    return other if other.step.total < best.step.total else best


def _placements(planner: Planner, roles: tuple[str, ...], split: str) -> Iterator[PlacementPlan | None]:
    """Yield the best plan of every placement, None where nothing fits."""
    yield _colocated(planner, roles)
    yield _split(planner, roles, split)
    for name, all_groups in MIXED[planner.problem.algorithm].items():
        kept = (tuple(role for role in group if role in roles) for group in all_groups)
        groups = [group for group in kept if group]
        if len(groups) == len(all_groups):  # else the same as a grouping with fewer groups
            yield best_grouping(name, planner, groups, 8)


def search(problem: Problem, split: str = BEFORE) -> SearchResult:
    """Return the best plan of every placement: colocated, split, and mixed; raises UserError if none fits.

    ``split``, of `SPLITS`, says when placements with GPUs for generation alone sample.
    """
    if max(contexts(problem.batch.longest)) >= 4:  # else cutting sequences is not worth the search
        problem = replace(problem, context_parallel=True)
    planner = Planner(problem)
    roles = tuple(role for role in ROLES[problem.algorithm] if role in problem.models)
    plans = [plan for plan in _placements(planner, roles, split) if plan is not None]
    if not plans:
        machine, smallest = problem.machine, _smallest(problem)
        raise UserError(
            f"{problem.models['actor'].name} does not fit on {problem.gpus} {machine.gpu.name}",
            where="--gpus",
            expected=f"at most {machine.usable_memory / GB:.0f} GB on each GPU",
            got=_least_need(problem),
            fix=f"at least {smallest} GPUs should do" if smallest else "use more or larger GPUs",
        )
    plans.sort(key=lambda plan: plan.step.total)
    return SearchResult(tuple(plans), planner.counted.layouts, planner.counted.evaluated)


def _least_need(problem: Problem) -> str:
    model = problem.models["actor"]
    learning = problem.optimizer.gradient_bytes + problem.optimizer.state_bytes
    state = 2 + (learning if problem.lora is None else 0)
    need = state * model.parameters / problem.gpus / GB
    return f"{need:.0f} GB a GPU of weights, gradients and optimizer even when cut evenly"


def _smallest(problem: Problem) -> int | None:
    """Return the smallest job of 2^a GPUs on which everything fits colocated, up to 64 times as many."""
    roles = tuple(role for role in ROLES[problem.algorithm] if role in problem.models)
    size = 1
    while size <= problem.gpus:
        size *= 2
    for _ in range(6):
        cluster = replace(problem.machine.cluster, num_gpus=size)
        larger = replace(problem, machine=replace(problem.machine, cluster=cluster))
        if Planner(larger).group(roles, size, True) is not None:
            return size
        size *= 2
    return None
