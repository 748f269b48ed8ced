"""Guard of a role's passes over micro-batches: measure memory, and repeat a pass that runs out of memory.

The idea: ranks can only repeat a pass together, so no rank may be inside a collective when another rank
fails. In layouts whose ranks communicate only to reduce gradients, they exchange before the reduction whether
any of them failed. In all other layouts the failed rank raises an error, which ends the job.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects, max_over_ranks
from megatron_rl.errors import first_line
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.metrics import Metrics

_LISTED_TENSORS = 5
"""Number of tensors that the report of a `Shortage` lists, the largest first."""
_GROUP_FIELDS = ("tensor", "pipeline", "context", "expert", "expert_tensor")
"""Fields of `ParallelLayout` with the sizes of groups whose ranks exchange tensors inside a pass."""

SPLIT_PASSES = "memory/split_passes"
"""Metric: passes of a step that were repeated in smaller micro-batches."""
SPLIT_TOKENS = "memory/split_tokens"
"""Metric: largest number of tokens of a micro-batch in the repeated passes."""
RESIDENT_BYTES = "memory/pass_resident_bytes"
"""Metric: bytes that tensors, CUDA, NCCL and other processes occupied when a pass began."""
BYTES_PER_TOKEN = "memory/pass_bytes_per_token"
"""Metric: bytes that a pass added at its peak, per token of its largest micro-batch."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shortage:
    """Description of a pass that ran out of memory on one rank.

    Example: ``Shortage("actor", 3, 8192, "CUDA out of memory. ...", ("gradients [1000] float32, 4 kB",), "it
    was repeated once already")``.
    """

    role: str
    """Configuration path of the role."""
    rank: int
    """Rank that ran out of memory."""
    tokens: int
    """Largest number of tokens of a micro-batch in the pass."""
    message: str
    """First line of PyTorch's error."""
    tensors: tuple[str, ...]
    """Descriptions of the largest tensors on the device."""
    reason: str = ""
    """Reason why the pass was not repeated, or not repeated a second time."""


class OutOfMemory(RuntimeError):
    """Error for a pass that ran out of memory and cannot be repeated; ``shortage`` describes the pass."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(f"{shortage.role} on rank {shortage.rank}: {shortage.message}")
        self.shortage = shortage


class _OtherRankFailed(RuntimeError):
    """Exception that ends a successful pass on this rank because the pass failed on another rank."""


class PassGuard:
    """Guard that measures the memory of one role's passes, and repeats a pass that runs out of memory.

    ``role``: configuration path of the role, for reports.
    ``measures_memory``: whether the memory of passes is measured for `batch.memory_target`.
    """

    def __init__(self, role: str, model: ParallelModel, *, measures_memory: bool = False) -> None:
        self.role = role
        self.model = model
        self.measures_memory = measures_memory
        self._maxima: dict[str, float] = {}

        # State of the current pass.
        self._budget = 0
        self._microbatch_tokens = 0
        self._reading: device.MemoryReading | None = None
        self._retry_obstacle: str | None = None
        self._shortage: Shortage | None = None
        self._has_exchanged_status = False
        # Results of `_exchange_status`: whether any rank ran out of memory, and the tokens of the largest
        # micro-batch of all ranks.
        self._has_failed_rank = False
        self._largest_microbatch = 0

    def run_pass(
        self,
        compute: Callable[[int], Result],
        budget: int,
        unit_tokens: int,
        *,
        clear: Callable[[], None] | None = None,
    ) -> Result:
        """Return ``compute(budget)``, repeated once with smaller micro-batches if it runs out of memory.

        ``budget`` is the largest number of tokens of a micro-batch. ``unit_tokens`` is the largest number of
        tokens of a unit: of a single row, or of rows that must stay in one micro-batch. Both are equal on all
        ranks of the role. ``clear`` zeroes the gradients of a training pass. The result of a repeated pass
        equals the result of a first pass with the smaller micro-batches. Raises OutOfMemory. Collective over
        the role's ranks.
        """
        self._retry_obstacle = find_retry_obstacle(self.model, is_training=clear is not None)
        if self._retry_obstacle is not None:
            result, _ = self._try_pass(compute, budget)
            return result

        generator_states = device.generator_states()
        result, has_failed = self._try_pass(compute, budget)
        if not has_failed:
            return result

        # Every rank halves the same number: the size of the largest micro-batch of all ranks. It is 0 if all
        # ranks failed before their first micro-batch.
        microbatch_tokens = budget
        if self._largest_microbatch:
            microbatch_tokens = min(budget, self._largest_microbatch)
        smaller_budget = max(unit_tokens, microbatch_tokens // 2)
        if microbatch_tokens <= unit_tokens:
            self._raise_on_all_ranks("each micro-batch is one row already")

        # Repeat the pass from the same random state.
        self._discard_pass(clear)
        device.set_generator_states(generator_states)
        result, has_failed = self._try_pass(compute, smaller_budget)
        if has_failed:
            self._raise_on_all_ranks(
                f"it was repeated once already, after micro-batches of up to {microbatch_tokens:,} tokens"
            )

        self._maxima[SPLIT_PASSES] = self._maxima.get(SPLIT_PASSES, 0.0) + 1
        self._record_maximum(SPLIT_TOKENS, smaller_budget)
        return result

    def _try_pass(self, compute: Callable[[int], Result], budget: int) -> tuple[Any, bool]:
        """Run ``compute(budget)``; return its result, and whether any rank ran out of memory."""
        self._budget = budget
        self._microbatch_tokens = 0
        self._has_exchanged_status = False
        self._shortage = None
        try:
            return compute(budget), False
        except torch.OutOfMemoryError as error:
            shortage = Shortage(
                self.role, device.rank(), budget, first_line(error), describe_largest_tensors(self.model)
            )
            reason = self._retry_obstacle
            if self._has_exchanged_status:
                reason = "it ended its micro-batches, and other ranks reduce gradients"
            # Raise without notifying the other ranks, which may be inside a collective.
            if reason is not None:
                raise OutOfMemory(replace(shortage, reason=reason)) from error
            self._shortage = shortage
        except _OtherRankFailed:
            return None, True

        # Leave the handler first: its traceback keeps the tensors of the pass in memory.
        self._exchange_status(failed=True)
        return None, True

    def begin_microbatches(self, microbatch_tokens: int) -> None:
        """Start to measure the memory of a pass with micro-batches of at most ``microbatch_tokens``."""
        self._microbatch_tokens = microbatch_tokens
        if self.measures_memory:
            self._reading = device.read_memory(reset_peak=True)

    def end_microbatches(self) -> None:
        """Record the memory of a pass, and check whether another rank ran out of memory in this pass.

        Call after the last micro-batch of the pass, before gradients are reduced. In layouts in which a pass
        that ran out of memory can be retried (`find_retry_obstacle`), all ranks exchange whether they failed.
        Raises _OtherRankFailed if another rank failed. This exchange is collective over the role's ranks.
        """
        if self.measures_memory:
            self._record_memory()
        if self._retry_obstacle is None:
            self._exchange_status(failed=False)
            self._has_exchanged_status = True
            if self._has_failed_rank:
                raise _OtherRankFailed

    def metrics(self) -> Metrics:
        """Return the metrics since the last call, and reset them.

        The metrics are the number of passes that were repeated after an out-of-memory error, the largest
        micro-batch of the repeated passes, and two maxima over passes: the bytes in use at the start of a
        pass, and the bytes per token that a pass added.
        """
        metrics = Metrics({}, self._maxima)
        self._maxima = {}
        return metrics

    def _record_memory(self) -> None:
        """Record the bytes in use at the start of the pass, and the added bytes per token at its peak."""
        begin_reading = self._reading
        end_reading = device.read_memory()
        if begin_reading is None or end_reading is None:
            return

        # Skip short micro-batches: the memory that does not depend on tokens would be divided by few tokens.
        if 2 * self._microbatch_tokens < self._budget:
            return
        added_bytes = max(0, end_reading.peak - begin_reading.allocated)
        self._record_maximum(RESIDENT_BYTES, begin_reading.allocated + begin_reading.other_bytes)
        self._record_maximum(BYTES_PER_TOKEN, added_bytes / self._microbatch_tokens)

    def _record_maximum(self, name: str, value: float) -> None:
        """Update the maximum of the metric ``name``, which `metrics` reports and resets."""
        self._maxima[name] = max(self._maxima.get(name, 0.0), float(value))

    def _exchange_status(self, *, failed: bool) -> None:
        """Compute whether any rank ``failed``, and the largest micro-batch of all ranks; store both.

        The maximum over ranks is computed on CPU tensors, so that no rank waits for its GPU. Collective over
        the role's ranks.
        """
        status = torch.tensor([int(failed), self._microbatch_tokens], dtype=torch.int64, device=device.host())
        if len(self.model.groups.layout.ranks) > 1:
            max_over_ranks(status, self.model.groups.all)
        has_failed_rank, self._largest_microbatch = status.tolist()
        self._has_failed_rank = bool(has_failed_rank)

    def _discard_pass(self, clear: Callable[[], None] | None) -> None:
        """Free the tensors of a failed pass, and reset the state of the model that the pass changed.

        ``clear`` zeroes the gradients of a training pass.
        """
        for chunk in self.model.wrapped:
            # With overlap_grad_reduce, bucket groups of Megatron-Core 0.19 count the gradients of a step, and
            # expect all of them at the next reset. Waiting for a reduction cannot hang here: a pass with
            # overlapped reductions is repeated only if the data-parallel group has one rank.
            for bucket_group in _bucket_groups(chunk):
                if bucket_group.grad_reduce_handle is not None:
                    bucket_group.grad_reduce_handle.wait()
                    bucket_group.grad_reduce_handle = None
                bucket_group.per_param_grad_ready_counts = {}
        for chunk in self.model.chunks:
            # Routers with balancing biases count tokens from one optimizer step to the next.
            for name, buffer in chunk.named_buffers():
                if name.endswith("local_tokens_per_expert"):
                    buffer.zero_()

        if clear is not None:
            clear()
        gc.collect()
        device.empty_cache()

    def _raise_on_all_ranks(self, reason: str) -> None:
        """Raise OutOfMemory with the first failed rank's report on every rank.

        ``reason`` is the reason why the pass is not repeated. Collective over the role's ranks.
        """
        shortages: list[Shortage | None] = [self._shortage]
        if len(self.model.groups.layout.ranks) > 1:
            shortages = gather_objects(self._shortage, self.model.groups.all)

        reports = [shortage for shortage in shortages if shortage is not None]
        raise OutOfMemory(replace(reports[0], reason=reason))


def find_retry_obstacle(model: ParallelModel, *, is_training: bool) -> str | None:
    """Return why a model's ranks cannot retry a pass after one rank ran out of memory, or None if they can.

    A pass is a forward pass, or with ``is_training`` a forward and a backward pass. Ranks that exchange
    tensors inside a pass cannot retry it: the peers of the failed rank may be inside a collective, where they
    would wait for the failed rank forever.
    """
    if device.is_simulated():
        # A simulated rank computes no values, and never runs out of memory.
        return "a simulation has no memory"

    layout = model.groups.layout
    group_sizes = [f"{name} {getattr(layout, name)}" for name in _GROUP_FIELDS if getattr(layout, name) > 1]
    if group_sizes:
        return f"its ranks exchange tensors inside a pass ({', '.join(group_sizes)})"

    if is_training and layout.data > 1:
        for chunk in model.wrapped:
            if any(group.ddp_config.overlap_grad_reduce for group in _bucket_groups(chunk)):
                return "gradients are reduced during the backward pass (`ddp.overlap_grad_reduce`)"
    return None


def _bucket_groups(chunk: Any) -> list[Any]:
    """Return the groups of gradient buckets of a chunk; empty for a model without gradients."""
    if not isinstance(chunk, DistributedDataParallel):
        return []
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def describe_largest_tensors(model: ParallelModel | None) -> tuple[str, ...]:
    """Return the largest tensors on the device as text: name or shape, dtype and bytes.

    Only tensors that Python can reach are included; autograd's saved tensors are not.
    """
    name_by_address = {tensor.untyped_storage().data_ptr(): name for name, tensor in _named_tensors(model)}
    device_type = device.device().type

    # Tensors that share a storage count once.
    tensor_by_address: dict[int, Tensor] = {}
    for python_object in gc.get_objects():
        # Check the type without `isinstance`, which reads the attribute __class__: lazy objects of some
        # libraries would import or compute something.
        if not issubclass(type(python_object), Tensor):
            continue
        # `untyped_storage` raises for tensors without a storage.
        with contextlib.suppress(RuntimeError):
            storage = python_object.untyped_storage()
            if python_object.device.type == device_type and storage.nbytes():
                tensor_by_address.setdefault(storage.data_ptr(), python_object)

    largest_first = sorted(
        tensor_by_address.items(),
        key=lambda address_and_tensor: -address_and_tensor[1].untyped_storage().nbytes(),
    )
    descriptions = []
    for address, tensor in largest_first[:_LISTED_TENSORS]:
        name = name_by_address.get(address, f"a tensor {list(tensor.shape)}")
        num_bytes = tensor.untyped_storage().nbytes()
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        descriptions.append(f"{name}, {dtype_name}, {num_bytes / 2**20:,.1f} MiB")
    return tuple(descriptions)


def _named_tensors(model: ParallelModel | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a model's weights, and of DDP's buffers of all weights and all gradients."""
    if model is None:
        return
    for chunk in model.chunks:
        yield from chunk.named_parameters()
    ddp_chunks: list[Any] = [chunk for chunk in model.wrapped if isinstance(chunk, DistributedDataParallel)]
    for chunk in ddp_chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if buffer.param_data is not None:
                yield f"all weights [{buffer.param_data.numel()}]", buffer.param_data
            yield f"all gradients [{buffer.grad_data.numel()}]", buffer.grad_data
