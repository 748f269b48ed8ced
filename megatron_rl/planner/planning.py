"""Search every placement of a model's roles on a cluster for the shortest step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_rl.errors import UserError
from megatron_rl.planner.constants import GB
from megatron_rl.planner.placement import (
    PlacementPlan,
    Planner,
    Problem,
    best_grouping,
    score_groups,
    score_split,
)
from megatron_rl.planner.search import memory_limit

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
ROLES = {"grpo": ("actor", "reference"), "ppo": ("actor", "critic", "reference", "reward")}


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


def _colocated(planner: Planner, roles: tuple[str, ...]) -> Iterator[PlacementPlan]:
    best: PlacementPlan | None = None
    for size in job_sizes(planner.problem.cluster.num_gpus):
        group = planner.group(roles, size, True)
        if group is None:
            # Fewer GPUs hold even less; an awkward full count is the exception.
            if size < planner.problem.cluster.num_gpus:
                break
            continue
        scored = score_groups("colocated", planner.problem, [group])
        if best is not None and scored.phases.total > 1.5 * best.phases.total:
            break
        if best is None or scored.phases.total < best.phases.total:
            best = scored
    if best is not None:
        yield best


def _split(planner: Planner, roles: tuple[str, ...], one_step_off: bool) -> Iterator[PlacementPlan]:
    gpus = planner.problem.cluster.num_gpus
    unit = max(1, gpus // 8)
    best: PlacementPlan | None = None
    for rollout in range(unit, gpus, unit):
        scored = score_split(planner, roles, gpus - rollout, rollout, one_step_off)
        if scored is not None and (best is None or scored.phases.total < best.phases.total):
            best = scored
    if best is not None:
        yield best


def search(problem: Problem, one_step_off: bool = False) -> SearchResult:
    """Return the best plan of every placement: colocated, split, and mixed; raises UserError if none fits."""
    planner = Planner(problem)
    roles = tuple(role for role in ROLES[problem.algorithm] if role in problem.models)
    plans = list(_colocated(planner, roles))
    if problem.cluster.num_gpus > 1:
        plans += _split(planner, roles, one_step_off)
    for name, all_groups in MIXED[problem.algorithm].items():
        kept = (tuple(role for role in group if role in problem.models) for group in all_groups)
        groups = [group for group in kept if group]
        if len(groups) < len(all_groups):
            continue  # the same as a grouping with fewer groups
        found = best_grouping(name, planner, groups, 8)
        if found is not None:
            plans.append(found)
    if not plans:
        cluster, smallest = problem.cluster, _smallest(problem)
        raise UserError(
            f"{problem.models['actor'].name} does not fit on {cluster.num_gpus} {cluster.gpu.name}",
            where="--gpus",
            expected=f"at most {memory_limit(cluster, problem.constants) / GB:.0f} GB on each GPU",
            got=_least_need(problem),
            fix=f"at least {smallest} GPUs should do" if smallest else "use more or larger GPUs",
        )
    plans.sort(key=lambda plan: plan.phases.total)
    return SearchResult(tuple(plans), planner.counted.layouts, planner.counted.evaluated)


def _least_need(problem: Problem) -> str:
    model = problem.models["actor"]
    state = problem.optimizer.gradient_bytes + problem.optimizer.state_bytes + 2
    need = state * model.parameters / problem.cluster.num_gpus / GB
    return f"{need:.0f} GB a GPU of weights, gradients and optimizer even when cut evenly"


def _smallest(problem: Problem) -> int | None:
    """Return the smallest job of 2^a GPUs on which everything fits colocated, up to 64 times as many."""
    roles = tuple(role for role in ROLES[problem.algorithm] if role in problem.models)
    size = 1
    while size <= problem.cluster.num_gpus:
        size *= 2
    for _ in range(6):
        larger = replace(problem, cluster=problem.cluster.resized(size))
        if Planner(larger).group(roles, size, True) is not None:
            return size
        size *= 2
    return None
