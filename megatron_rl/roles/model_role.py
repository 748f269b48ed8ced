"""A role with a Megatron model: actor, critic, reference and reward models differ only in their arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import RowShard
from megatron_rl.megatron.log_probs import TopTokens
from megatron_rl.megatron.lora import initial_policy, remove_adapters
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.megatron.passes import PassGuard
from megatron_rl.megatron.residency import Residency, Use
from megatron_rl.megatron.schedule import (
    TokenScores,
    forward_backward,
    forward_loss,
    forward_only,
)
from megatron_rl.metrics import Metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch

Objective = Callable[..., tuple[Tensor, Metrics]]
"""Function from rows of a batch and the head's outputs for them to their loss and metrics."""


class ModelRole:
    """Forward passes and optimizer steps of one model on the ranks of its layout.

    On ranks outside the layout every method returns at once, so roles on different ranks work at the same
    time.

    ``name``: configuration path of the role's section, such as ``critic`` or ``reward.models.helpful``.
    ``layout``: ranks of the role and their parallelism.
    ``model``: the model, None on ranks outside the layout.
    ``tokens_per_microbatch``: maximum of tokens in a packed micro-batch.
    ``outputs``: per-token columns of the head's outputs, in the head's order.
    ``top_tokens``: request for the most likely tokens of each distribution, None for no such columns.
    ``top_outputs``: columns of their ids and log-probs.
    ``optimizer``: optimizer of the model's weights, None for a frozen role.
    ``prefix``: group of the optimizer's metrics, the name unless given.
    ``offload``: whether the model is in host memory except while the role works.
    ``records``: layers and experts per token, if `infer` also returns the routing; None otherwise.
    ``initial_of``: role whose model this role runs with its adapters switched off, as a reference does.
    ``shares_base_with``: role whose base weights are also the base of this role's adapters.
    ``squared_probs``: whether `infer` also returns the column of this name, see `Scores.squared_probs`.
    ``is_output_rank``: whether this rank returns the outputs of its data-parallel replica.
    ``guard``: guard of the passes, which measures their memory if ``measures_memory``.
    """

    def __init__(
        self,
        name: str,
        layout: ParallelLayout,
        model: ParallelModel | None,
        *,
        tokens_per_microbatch: int,
        outputs: tuple[str, ...],
        top_tokens: TopTokens | None = None,
        top_outputs: tuple[str, ...] = (),
        optimizer: Optimizer | None = None,
        prefix: str = "",
        offload: bool = False,
        records: tuple[int, int] | None = None,
        initial_of: ModelRole | None = None,
        shares_base_with: ModelRole | None = None,
        measures_memory: bool = False,
    ) -> None:
        self.name = name
        self.layout = layout
        self.model = model
        self.tokens_per_microbatch = tokens_per_microbatch
        self.outputs = outputs
        self.top_tokens = top_tokens
        self.top_outputs = top_outputs
        self.squared_probs = False
        self.records = records
        self.initial_of = initial_of
        self.is_output_rank = device.rank() in layout.outputs()
        self.prefix = prefix or name
        self.guard: PassGuard | None = None
        if model is not None:
            self.guard = PassGuard(name, model, measures=measures_memory)

        if initial_of is not None:
            # One model has one residency, whichever of the two roles uses it.
            self.residency = initial_of.residency
        else:
            base: Residency | None = None
            if shares_base_with is not None:
                base = shares_base_with.residency
            self.residency = Residency(model, offload=offload, base=base)
        self.optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer of the model's weights, None for a frozen role."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        # The residency moves the states of the optimizer that owns the model.
        if self.initial_of is None:
            self.residency.optimizer = optimizer

    def resident(self, use: Use = Use.LEARN) -> AbstractContextManager[None]:
        """Keep the parts that ``use`` names in device memory inside the block, if the role offloads them."""
        if not self.residency.moves:
            return nullcontext()
        return self.residency.resident(use)

    def infer(self, batch: Any) -> RowShard:
        """Return the head's outputs for the response tokens of this rank's rows, 0 for other tokens.

        ``batch`` has ``tokens``, ``lengths``, ``response_mask`` and ``temperature``. With ``records`` the
        shard also has the ``experts`` of every token: [n, layers, k] int16. One rank per data-parallel
        replica has rows. Collective over the role's ranks.
        """
        micro_outputs = self.forward(
            batch,
            batch.response_mask,
            record=self.records is not None,
            top_tokens=self.top_tokens,
            squared_probs=self.squared_probs,
        )
        names = self.outputs
        if self.squared_probs:
            names = (*names, "squared_probs")
        shard = self._shard(batch, micro_outputs, names)
        if self.top_tokens is not None:
            columns = {**shard.tokens, **self._top_columns(self.top_tokens.tokens, micro_outputs)}
            shard = replace(shard, tokens=columns)
        if self.records is None:
            return shard

        # Gives a rank without rows the column's dtype and shape, which every rank must have.
        no_experts = torch.zeros((0, *self.records), dtype=torch.int16)
        experts = [micro.experts for micro in micro_outputs if micro.experts is not None]
        columns = {
            **shard.tokens,
            "experts": torch.cat([no_experts, *experts]),
        }
        return replace(shard, tokens=columns)

    def _shard(
        self,
        batch: Any,
        micro_outputs: list[TokenScores],
        names: tuple[str, ...],
    ) -> RowShard:
        """Concatenate the first outputs of micro-batches into a shard with the columns ``names``."""
        # A rank without rows returns empty columns of the same names, as every shard must.
        rows = torch.tensor(
            [row for micro in micro_outputs for row in micro.rows],
            dtype=torch.long,
        )

        outputs = [torch.zeros(0) for _ in names]
        if micro_outputs:
            # From a tuple of outputs per micro-batch to a column per output.
            by_output = zip(*(micro.outputs[: len(names)] for micro in micro_outputs), strict=True)
            columns = torch.stack([torch.cat(values) for values in by_output])
            # One copy from the device for all outputs.
            outputs = list(columns.float().cpu())
        return RowShard(
            rows,
            batch.lengths[rows],
            dict(zip(names, outputs, strict=True)),
            {},
        )

    def _top_columns(self, count: int, micro_outputs: list[TokenScores]) -> dict[str, Tensor]:
        """Concatenate the most likely tokens of micro-batches: ids [n, count], log-probs [n, count + 1]."""
        # Give a rank without rows the columns' dtypes and shapes, which every rank must have.
        ids = [torch.zeros((0, count), dtype=torch.int32)]
        log_probs = [torch.zeros((0, count + 1))]
        for micro in micro_outputs:
            *_, micro_log_probs, micro_ids = micro.outputs
            ids.append(micro_ids.int().cpu())
            log_probs.append(micro_log_probs.float().cpu())

        ids_name, log_probs_name = self.top_outputs
        return {ids_name: torch.cat(ids), log_probs_name: torch.cat(log_probs)}

    def forward(self, batch: Any, select: Tensor, **options: Any) -> list[TokenScores]:
        """Compute the head's outputs for the ``select``-ed tokens ([N] bool) of this rank's rows.

        ``options``: ``before``, ``record``, ``top_tokens`` and ``squared_probs`` of
        `megatron.schedule.forward_only`. Collective over the role's ranks.
        """
        if self.model is None:
            return []

        # A reference that is the initial actor is the same model with its adapters off.
        policy = nullcontext()
        if self.initial_of is not None:
            policy = initial_policy(self.model)
            # The batch has the adapted actor's choices of experts; the initial policy must route by itself.
            batch = replace(batch, experts=None)
        with self.resident(Use.READ), policy:
            micro_outputs = forward_only(
                self.model,
                batch,
                self.tokens_per_microbatch,
                select,
                guard=self.guard,
                **options,
            )

        # All ranks of the last stage have the outputs; one of each replica returns them.
        if not self.is_output_rank:
            return []
        return micro_outputs

    def update(self, minibatch: TrainBatch, objective: Objective, **options: Any) -> Metrics:
        """Run one optimizer step on a mini-batch whose loss weights have global denominators.

        ``options``: ``before`` and ``unit`` of `megatron.schedule.forward_backward`. Collective over the
        role's ranks.
        """
        with self.resident():
            _, metrics = self.accumulate(minibatch, objective, **options)
            return metrics + self.step()

    def accumulate(
        self, minibatch: TrainBatch, objective: Objective, *, reads_outputs: bool = False, **options: Any
    ) -> tuple[RowShard, Metrics]:
        """Compute the gradients of a mini-batch without an optimizer step; return its outputs and metrics.

        With ``reads_outputs`` the outputs are the same as from `infer`, and the host waits for the device to
        copy them; without it the shard has no rows. The metrics stay on the device. The caller keeps the role
        `resident` until `step`. Collective over the role's ranks.
        """
        if self.model is None:
            return self._shard(minibatch, [], self.outputs), Metrics()
        assert self.optimizer is not None, f"{self.name} has no optimizer"

        # Gradients of all micro-batches add up, since loss weights have global denominators.
        self.optimizer.zero_grad()
        micro_outputs, metrics = forward_backward(
            self.model,
            minibatch,
            self.tokens_per_microbatch,
            minibatch.response_mask,
            objective,
            guard=self.guard,
            clear=self.optimizer.zero_grad,
            **options,
        )

        # Every rank of a replica has the same outputs and metrics: one of them returns them.
        if not self.is_output_rank:
            return self._shard(minibatch, [], self.outputs), Metrics()
        if not reads_outputs:
            micro_outputs = []
        return self._shard(minibatch, micro_outputs, self.outputs), metrics

    def step(self, has_next: bool = False) -> Metrics:
        """Run the optimizer step whose gradient `accumulate` has computed.

        ``has_next``: whether another step follows before anything else reads the weights. Collective over the
        role's ranks.
        """
        if self.model is None or self.optimizer is None:
            return Metrics()

        metrics = self.optimizer.step(has_next)
        # The optimizer's numbers are equal on all of the role's ranks: the first one returns them.
        if self.model.groups.rank != self.layout.ranks[0]:
            return Metrics()
        return Metrics({f"{self.prefix}/{name}": value for name, value in metrics.sums.items()})

    def eval_step(self, batch: TrainBatch, objective: Objective, **options: Any) -> Metrics:
        """Compute the metrics of an objective on rows without a gradient; ``options`` as for `update`.

        Collective over the role's ranks.
        """
        if self.model is None:
            return Metrics()

        with self.resident(Use.READ):
            metrics = forward_loss(
                self.model,
                batch,
                self.tokens_per_microbatch,
                batch.response_mask,
                objective,
                guard=self.guard,
                **options,
            )

        # The other ranks of a replica would count the same rows again.
        if not self.is_output_rank:
            return Metrics()
        return metrics

    def pass_metrics(self) -> Metrics:
        """Return the repeated passes and the measured memory of this rank since the last call."""
        if self.guard is None:
            return Metrics()
        return self.guard.metrics()

    def freeze(self) -> None:
        """End the role's training and remove its adapters, which must be merged into the weights before."""
        if self.model is not None:
            self.model.freeze()
            remove_adapters(self.model)
