"""What every role answers: rows in, rows out; and for those that learn, a mini-batch in, metrics out."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import RowShard
from megatron_rl.types import TrainBatch


class Role(Protocol):
    """Answer for the rows of a batch that is the same value on every rank.

    A role shards the rows over its own ranks and returns at once on ranks that do not hold it, so roles
    on disjoint ranks work at the same time.
    """

    def infer(self, batch: Any) -> RowShard:
        """Return this rank's answers; `gather_rows` makes them the same value everywhere."""
        ...


class TrainableRole(Role, Protocol):
    """A role that also learns."""

    def update(self, minibatch: TrainBatch, objective: Any) -> Metrics:
        """Take one optimizer step on a mini-batch with global loss weights.

        Collective over the role's ranks.
        """
        ...
