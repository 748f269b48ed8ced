"""How old the policies are that sampled a batch, measured and bounded."""

from __future__ import annotations

from megatron_rl.metrics import Metrics
from megatron_rl.types import Rollouts


class StalenessError(RuntimeError):
    """Report rollouts that are older than the run allows."""


def staleness(version: int, rollouts: Rollouts, bound: int) -> Metrics:
    """Return how many updates old the rows' policies are; raise StalenessError beyond ``bound``.

    A row is as old as its oldest token; ``staleness/token_mean`` is over tokens.
    """
    age = (version - rollouts.policy_version).float()
    if len(age) and int(age.max()) > bound:
        raise StalenessError(
            f"rollouts of version {int(rollouts.policy_version.min())} came to a learner at version "
            f"{version}; asynchrony.max_staleness allows {bound} updates between them"
        )
    metrics = Metrics.mean("staleness/mean", float(age.sum()), len(age))
    metrics += Metrics.maximum("staleness/max", float(age.max()) if len(age) else 0.0)
    if rollouts.token_versions is not None:
        ages = version - rollouts.token_versions[rollouts.response_mask].double()
        metrics += Metrics.mean("staleness/token_mean", float(ages.sum()), len(ages))
    return metrics
