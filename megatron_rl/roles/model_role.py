"""A role that holds a Megatron model: actor, critic and reference differ in what is plugged in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import RowShard
from megatron_rl.megatron.lora import initial_policy, remove_adapters
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.megatron.residency import Residency, Use
from megatron_rl.megatron.schedule import TokenScores, forward_backward, forward_loss, forward_only
from megatron_rl.metrics import Metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch

Objective = Callable[..., tuple[Tensor, Metrics]]


class ModelRole:
    """Score rows with a model and, where it has an optimizer, learn from them.

    ``outputs`` names the per-token fields of `infer`, one for each output of the model's head, so that
    several roles' answers can stand in one batch. ``prefix`` groups the metrics of `update`. ``model`` is
    None on ranks outside the role's ``layout``. With ``offload`` the model is in host memory except while
    the role works. ``answers`` says whether this rank holds the outputs of its data-parallel replica.
    ``records`` are the layers, and experts per token, of a model whose routing `infer` is to tell.
    A role that is the ``base_of`` another has that one's model, and scores as it was before its adapters
    learned; one with weights ``over`` another's base has them where that one is, see `Residency`.
    """

    def __init__(
        self,
        name: str,
        layout: ParallelLayout,
        model: ParallelModel | None,
        *,
        tokens_per_microbatch: int,
        outputs: tuple[str, ...],
        optimizer: Optimizer | None = None,
        prefix: str = "",
        offload: bool = False,
        records: tuple[int, int] | None = None,
        base_of: ModelRole | None = None,
        over: ModelRole | None = None,
    ) -> None:
        self.name = name
        self.records = records
        self.layout = layout
        self.answers = device.rank() in layout.outputs()
        self.model = model
        self.tokens_per_microbatch = tokens_per_microbatch
        self.outputs = outputs
        self.base_of = base_of
        base = None if over is None else over.residency
        residency = Residency(model, offload=offload, base=base)
        self.residency = residency if base_of is None else base_of.residency
        self.optimizer = optimizer
        self.prefix = prefix or name

    @property
    def optimizer(self) -> Optimizer | None:
        """Return what steps the model's weights, None where the role does not learn."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        if self.base_of is None:
            self.residency.optimizer = optimizer

    def resident(self, use: Use = Use.LEARN) -> AbstractContextManager[None]:
        """Have what ``use`` names on the device inside the block; where the role offloads, only there."""
        return self.residency.resident(use) if self.residency.moves else nullcontext()

    def infer(self, batch: Any) -> RowShard:
        """Return the head's outputs for response tokens, 0 elsewhere, for this rank's rows.

        ``batch`` has ``tokens``, ``lengths``, ``response_mask`` and ``temperature``. With ``records`` the
        ``experts`` of all tokens are among the answers. Only one rank per data-parallel replica answers.
        Collective over the role's ranks.
        """
        scored = self.score(batch, batch.response_mask, record=self.records is not None)
        shard = self._shard(batch, scored)
        if self.records is None:
            return shard
        none = torch.zeros((0, *self.records), dtype=torch.int16)
        experts = torch.cat([none, *(micro.experts for micro in scored if micro.experts is not None)])
        return replace(shard, tokens={**shard.tokens, "experts": experts})

    def _shard(self, batch: Any, scored: list[TokenScores]) -> RowShard:
        rows = torch.tensor([row for micro in scored for row in micro.rows], dtype=torch.long)
        outputs = [torch.zeros(0) for _ in self.outputs]
        if scored:
            by_output = zip(*(micro.outputs for micro in scored), strict=True)
            outputs = [torch.cat(values).float().cpu() for values in by_output]
        return RowShard(rows, batch.lengths[rows], dict(zip(self.outputs, outputs, strict=True)), {})

    def score(self, batch: Any, select: Tensor, **how: bool) -> list[TokenScores]:
        """Return what the head says of the ``select``-ed tokens of the rows that this rank answers for.

        ``how`` are the ``before`` and ``record`` of `megatron.schedule.forward_only`. Collective over the
        role's ranks.
        """
        if self.model is None:
            return []
        policy = nullcontext()
        if self.base_of is not None:
            # The experts that a batch gives are the actor's; a model of its own would choose.
            policy, batch = initial_policy(self.model), replace(batch, experts=None)
        with self.resident(Use.READ), policy:
            scored = forward_only(self.model, batch, self.tokens_per_microbatch, select, **how)
        return scored if self.answers else []

    def update(self, minibatch: TrainBatch, objective: Objective, **how: Any) -> Metrics:
        """Take one optimizer step down ``objective``, whose loss weights are global.

        ``how`` are the ``before`` and ``unit`` of `learn`. Collective over the role's ranks.
        """
        with self.resident():
            _, metrics = self.accumulate(minibatch, objective, **how)
            return metrics + self.step()

    def accumulate(self, minibatch: TrainBatch, objective: Objective, **how: Any) -> tuple[RowShard, Metrics]:
        """Compute a step's gradient without taking it; return what `infer` would, and the loss's metrics.

        The role stays `resident` from here to `step`. Collective over the role's ranks.
        """
        if self.model is None:
            return self._shard(minibatch, []), Metrics()
        assert self.optimizer is not None, f"{self.name} does not learn"
        self.optimizer.zero_grad()
        scored, metrics = forward_backward(
            self.model, minibatch, self.tokens_per_microbatch, minibatch.response_mask, objective, **how
        )
        # One rank of each data-parallel replica speaks for it.
        return self._shard(minibatch, scored if self.answers else []), metrics if self.answers else Metrics()

    def step(self, more: bool = False) -> Metrics:
        """Take the step that `accumulate` has the gradient of; ``more`` say that another follows at once.

        Collective over the role's ranks.
        """
        if self.model is None or self.optimizer is None:
            return Metrics()
        stepped = self.optimizer.step(more)
        if self.model.groups.rank != self.layout.ranks[0]:
            return Metrics()
        return Metrics({f"{self.prefix}/{name}": value for name, value in stepped.sums.items()})

    def measure(self, batch: TrainBatch, objective: Objective, **how: Any) -> Metrics:
        """Return the metrics of ``objective`` on rows that are not learned from.

        ``how`` as in `update`. Collective over the role's ranks.
        """
        if self.model is None:
            return Metrics()
        with self.resident(Use.READ):
            metrics = forward_loss(
                self.model, batch, self.tokens_per_microbatch, batch.response_mask, objective, **how
            )
        return metrics if self.answers else Metrics()

    def freeze(self) -> None:
        """End the role's training: it only scores from now on. Adapters go: its weights have taken them."""
        if self.model is not None:
            self.model.freeze()
            remove_adapters(self.model)
