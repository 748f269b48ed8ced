"""Role with a Megatron model: actor, critic, reference and reward models differ only in their arguments."""

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
from megatron_rl.megatron.lora import remove_adapters, use_initial_policy
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.megatron.optimizer import Optimizer
from megatron_rl.megatron.passes import PassGuard
from megatron_rl.megatron.residency import Residency, ResidencyLevel
from megatron_rl.megatron.schedule import (
    TokenOutputs,
    forward_backward,
    forward_loss,
    forward_only,
)
from megatron_rl.metrics import Metrics
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch

Objective = Callable[..., tuple[Tensor, Metrics]]
"""Function that computes loss and metrics from the rows of a micro-batch and the model's outputs for them."""


class ModelRole:
    """Forward passes and optimizer steps of one model on the ranks of its layout.

    On ranks outside the layout every method returns immediately, so roles on disjoint ranks run in parallel.

    ``name``: configuration path of the role's section, such as ``critic`` or ``reward.models.helpful``.
    ``layout``: ranks of the role and their parallelism.
    ``model``: this rank's shard of the model, or None on ranks outside the layout.
    ``tokens_per_microbatch``: maximum number of tokens in a packed micro-batch.
    ``outputs``: names of the model's outputs per token, such as ``log_probs``, in the order of the model's
        head.
    ``top_tokens``: request for the most likely tokens of each distribution, or None to omit these outputs.
    ``top_outputs``: names of the two outputs with the ids and log-probs of the most likely tokens.
    ``optimizer``: optimizer of the model's weights, or None for a role that is not trained.
    ``metric_prefix``: prefix of the optimizer's metrics, by default the name.
    ``offload``: whether the model is moved to host memory while the role does not run.
    ``routing_shape``: (layers, experts per token) if `infer` also returns the routing, or None.
    ``shares_model_with``: role whose model this role uses with the adapters disabled, as a reference does, or
        None if this role has a separate model.
    ``shares_base_with``: role whose base weights this role's adapters use, or None.
    ``squared_probs``: whether `infer` also returns `Scores.squared_probs`.
    ``is_output_rank``: whether this rank returns the outputs of its data-parallel replica.
    ``guard``: handler of forward and backward passes that run out of memory: it repeats them on smaller
        micro-batches. With ``measures_memory`` it also measures the memory of passes.
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
        metric_prefix: str = "",
        offload: bool = False,
        routing_shape: tuple[int, int] | None = None,
        shares_model_with: ModelRole | None = None,
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
        self.routing_shape = routing_shape
        self.shares_model_with = shares_model_with
        self.is_output_rank = device.rank() in layout.output_ranks()
        self.metric_prefix = metric_prefix or name
        self.guard: PassGuard | None = None
        if model is not None:
            self.guard = PassGuard(name, model, measures_memory=measures_memory)

        if shares_model_with is not None:
            # Both roles move the same model between host and device, so they share its residency.
            self.residency = shares_model_with.residency
        else:
            base: Residency | None = None
            if shares_base_with is not None:
                base = shares_base_with.residency
            self.residency = Residency(model, offload=offload, base=base)
        self.optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer | None:
        """Return the optimizer of the model's weights, or None for a role that is not trained."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        self._optimizer = optimizer
        # The residency also moves the optimizer's states. A role that runs another role's model shares its
        # residency, and has no optimizer.
        if self.shares_model_with is None:
            self.residency.optimizer = optimizer

    def resident(self, level: ResidencyLevel = ResidencyLevel.TRAINING) -> AbstractContextManager[None]:
        """Return a context in which some of the role's tensors are in device memory.

        ``level`` selects the tensors: for example, a forward pass needs no optimizer states.
        """
        if not self.residency.can_offload:
            return nullcontext()
        return self.residency.resident(level)

    def infer(self, batch: Any) -> RowShard:
        """Compute the model's outputs for the response tokens of this rank's rows; outputs are 0 elsewhere.

        ``batch`` has ``tokens``, ``lengths``, ``response_mask`` and ``temperature``. If ``routing_shape`` is
        set, the shard also has the ``experts`` of every token: [n, layers, experts per token] int16. Only one
        rank per data-parallel replica returns rows. Collective over the role's ranks.
        """
        micro_outputs = self.forward(
            batch,
            batch.response_mask,
            record_experts=self.routing_shape is not None,
            top_tokens=self.top_tokens,
            squared_probs=self.squared_probs,
        )
        output_names = self.outputs
        if self.squared_probs:
            output_names = (*output_names, "squared_probs")
        shard = self._make_shard(batch, micro_outputs, output_names)

        # Add the columns of the most likely tokens and of the experts.
        columns = dict(shard.tokens)
        if self.top_tokens is not None:
            columns |= self._make_top_columns(self.top_tokens.num_tokens, micro_outputs)
        if self.routing_shape is not None:
            # On a rank without rows the column must have the same dtype and trailing shape as on other ranks.
            no_experts = torch.zeros((0, *self.routing_shape), dtype=torch.int16)
            experts = [micro.experts for micro in micro_outputs if micro.experts is not None]
            columns["experts"] = torch.cat([no_experts, *experts])
        return replace(shard, tokens=columns)

    def _make_shard(
        self,
        batch: Any,
        micro_outputs: list[TokenOutputs],
        output_names: tuple[str, ...],
    ) -> RowShard:
        """Concatenate the outputs of all micro-batches into a shard with a column per output name.

        ``output_names``: names of the columns, in the order of the model's outputs. Outputs after the last
        name, such as the most likely tokens, are ignored.
        """
        row_indices: list[int] = []
        for micro in micro_outputs:
            row_indices.extend(micro.rows)
        rows = torch.tensor(row_indices, dtype=torch.long)

        # A rank without rows returns empty columns: all shards of a gather must have the same columns.
        columns = [torch.zeros(0) for _ in output_names]
        if micro_outputs:
            device_columns = []
            for index in range(len(output_names)):
                device_columns.append(torch.cat([micro.outputs[index] for micro in micro_outputs]))
            # Stack the columns, so that a single copy moves all of them to the host.
            columns = list(torch.stack(device_columns).float().cpu())
        return RowShard(
            rows,
            batch.lengths[rows],
            dict(zip(output_names, columns, strict=True)),
            {},
        )

    def _make_top_columns(self, num_tokens: int, micro_outputs: list[TokenOutputs]) -> dict[str, Tensor]:
        """Concatenate the ids and log-probs of the most likely tokens over all micro-batches.

        The result has two tensors by name, with a row for each of n positions. Ids are [n, num_tokens] int32.
        Log-probs are [n, num_tokens + 1] float32: the last element of a row is the log-prob of all remaining
        tokens of the vocabulary together.
        """
        # Start from empty tensors: a rank without rows must return columns of the same dtypes and shapes.
        ids = [torch.zeros((0, num_tokens), dtype=torch.int32)]
        log_probs = [torch.zeros((0, num_tokens + 1))]
        for micro in micro_outputs:
            # The most likely tokens are the last two outputs of the head.
            micro_log_probs, micro_ids = micro.outputs[-2:]
            ids.append(micro_ids.int().cpu())
            log_probs.append(micro_log_probs.float().cpu())

        ids_name, log_probs_name = self.top_outputs
        return {ids_name: torch.cat(ids), log_probs_name: torch.cat(log_probs)}

    def forward(self, batch: Any, output_mask: Tensor, **options: Any) -> list[TokenOutputs]:
        """Compute the model's outputs for the tokens of this rank's rows that are true in ``output_mask``.

        ``output_mask`` is [N] bool. Returns a result per micro-batch, or [] on ranks that are not output
        ranks. ``options``: ``from_previous_token``, ``record_experts``, ``top_tokens`` and ``squared_probs``
        of `megatron.schedule.forward_only`. Collective over the role's ranks.
        """
        if self.model is None:
            return []

        # A reference that equals the initial actor is the actor's model with its adapters disabled.
        adapter_scope = nullcontext()
        if self.shares_model_with is not None:
            adapter_scope = use_initial_policy(self.model)
            # Drop the recorded experts, which the adapted actor chose: the initial policy routes by itself.
            batch = replace(batch, experts=None)
        with self.resident(ResidencyLevel.READ_WEIGHTS), adapter_scope:
            micro_outputs = forward_only(
                self.model,
                batch,
                self.tokens_per_microbatch,
                output_mask,
                guard=self.guard,
                **options,
            )

        # All ranks of the last pipeline stage have the outputs; one rank per replica returns them.
        if not self.is_output_rank:
            return []
        return micro_outputs

    def update(self, minibatch: TrainBatch, objective: Objective, **options: Any) -> Metrics:
        """Run one optimizer step on a mini-batch, whose loss weights are normalized over all ranks.

        ``options``: ``from_previous_token`` and ``rows_per_unit`` of `megatron.schedule.forward_backward`.
        Returns the metrics of the objective and the optimizer. Collective over the role's ranks.
        """
        with self.resident():
            _, metrics = self.accumulate(minibatch, objective, **options)
            return metrics + self.step()

    def accumulate(
        self, minibatch: TrainBatch, objective: Objective, *, reads_outputs: bool = False, **options: Any
    ) -> tuple[RowShard, Metrics]:
        """Compute the gradients of a mini-batch without an optimizer step; return its outputs and metrics.

        ``reads_outputs``: whether to return the model's outputs, as `infer` does. The host then waits for the
        device. If False, the returned shard has no rows. The metrics are tensors on the device. The caller
        must keep the role `resident` from this call to the end of `step`. Collective over the role's ranks.
        """
        if self.model is None:
            return self._make_shard(minibatch, [], self.outputs), Metrics()
        assert self.optimizer is not None, f"{self.name} has no optimizer"

        # Sum the gradients over micro-batches and ranks, without a division: each loss weight has already
        # been divided by the denominator over all ranks.
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

        # All ranks of a data-parallel replica have equal outputs and metrics; only one rank returns them.
        if not self.is_output_rank:
            return self._make_shard(minibatch, [], self.outputs), Metrics()
        if not reads_outputs:
            micro_outputs = []
        return self._make_shard(minibatch, micro_outputs, self.outputs), metrics

    def step(self, has_next: bool = False) -> Metrics:
        """Run the optimizer step with the gradients from `accumulate`; return the optimizer's metrics.

        ``has_next``: whether the forward pass of another optimizer step follows directly. Only the first of
        the role's ranks returns metrics. Collective over the role's ranks.
        """
        if self.model is None or self.optimizer is None:
            return Metrics()

        metrics = self.optimizer.step(has_next)
        # The optimizer's metrics are equal on all of the role's ranks: only the first rank returns them.
        if self.model.groups.rank != self.layout.ranks[0]:
            return Metrics()
        return Metrics({f"{self.metric_prefix}/{name}": value for name, value in metrics.sums.items()})

    def eval_step(self, batch: TrainBatch, objective: Objective, **options: Any) -> Metrics:
        """Compute the metrics of an objective on a batch without gradients.

        ``options``: see `update`. Collective over the role's ranks.
        """
        if self.model is None:
            return Metrics()

        with self.resident(ResidencyLevel.READ_WEIGHTS):
            metrics = forward_loss(
                self.model,
                batch,
                self.tokens_per_microbatch,
                batch.response_mask,
                objective,
                guard=self.guard,
                **options,
            )

        # All ranks of a data-parallel replica have the same rows, which must be counted once.
        if not self.is_output_rank:
            return Metrics()
        return metrics

    def pass_metrics(self) -> Metrics:
        """Return metrics of this rank's forward and backward passes since the last call.

        The metrics are the number of passes that were repeated after running out of memory, and the memory of
        the passes.
        """
        if self.guard is None:
            return Metrics()
        return self.guard.metrics()

    def freeze(self) -> None:
        """Make the model's parameters untrainable and remove its adapters, which must already be merged."""
        if self.model is not None:
            self.model.freeze()
            remove_adapters(self.model)
