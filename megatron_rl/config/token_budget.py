"""Tokens per micro-batch that fill the fraction `batch.memory_target` of the GPU's memory.

A pass runs the micro-batches of a phase through a model. Its memory is ``resident bytes + bytes per token *
tokens of the largest micro-batch``. `check` estimates the resident bytes and the bytes per token, so a run
has a budget before its first step. Each step then measures both as maxima over all ranks, so every rank
computes the same next budget without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.config.budget import SYNC_CONNECTIONS, memory_plan, rank_memory
from megatron_rl.config.derive import batch_plan, microbatch_bounds
from megatron_rl.config.placement import role_layout, sleeping_ranks
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.setting import with_value
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

_GIB = 2**30
_PASSES = ("score", "learn")
"""Phases with passes over micro-batches."""
_SMALLEST_RISE = 1.1
"""Smallest factor by which a budget rises. Measured peaks vary, and the budget should not follow each one."""
_LARGEST_RISE = 2.0
"""Largest factor by which a budget rises in a step. The memory per token of small micro-batches is a bad
prediction for much larger ones."""


def estimate_tokens(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], shapes: Mapping[str, ModelShape]
) -> tuple[int, str]:
    """Return the largest number of tokens per micro-batch within the memory target, and its reason as text.

    A number of tokens is within the target if the estimated peak memory is at most the fraction
    `batch.memory_target` of the GPU's memory.

    ``config`` is resolved and sets ``memory_target`` and ``gpu_memory_gib``. ``shapes`` is documented in
    `memory_plan`.
    """
    target = config.batch.memory_target
    gpu_gib = config.gpu_memory_gib
    assert target is not None and gpu_gib is not None, "checked before"
    allowed_bytes = target * gpu_gib * _GIB
    bounds = microbatch_bounds(config, role_layout(config.actor.layout, "actor.layout"))
    min_tokens = bounds.row_tokens
    max_tokens = max(min_tokens, bounds.even_tokens)

    # Evaluate one rank of each distinct memory plan. The connections of a weight sync do not depend on
    # micro-batches, so they are computed once.
    sleeping = frozenset[int]()
    batch = None
    if config.job == TRAIN:
        sleeping = sleeping_ranks(layouts)
        batch = batch_plan(config, layouts)
    plans = memory_plan(config, layouts, shapes, batch)
    connection_items = [item for plan in plans for item in plan.items if item.name == SYNC_CONNECTIONS][:1]

    def estimate_peak(tokens: int) -> float:
        """Return the largest peak in bytes of any rank with micro-batches of ``tokens``."""
        candidate = with_value(config, "batch.tokens_per_microbatch", tokens)
        candidate_batch = None
        if config.job == TRAIN:
            candidate_batch = batch_plan(candidate, layouts)

        peaks: list[int] = []
        for plan in plans:
            memory = rank_memory(
                candidate, layouts, shapes, candidate_batch, plan.rank, sleeping, connection_items
            )
            peaks.extend(memory.phase_peak(phase) for phase in _PASSES)
        return max(peaks)

    target_text = f"{target:.0%} of {gpu_gib:g} GiB"
    smallest_peak = estimate_peak(min_tokens)
    if smallest_peak > allowed_bytes:
        return min_tokens, (
            f"the longest row has {min_tokens} tokens; it is estimated to need "
            f"{smallest_peak / _GIB:.1f} GiB, more than {target_text}"
        )
    if estimate_peak(max_tokens) <= allowed_bytes:
        batch_text = "a mini-batch"
        if bounds.microbatches > 1:
            batch_text = f"a mini-batch split into {bounds.microbatches} micro-batches (to fill the pipeline)"
        return max_tokens, f"{batch_text} is estimated within {target_text}"

    # Bisect: `low` tokens fit into the target, and `high` tokens do not.
    low = min_tokens
    high = max_tokens
    while high - low > 1:
        middle = (low + high) // 2
        if estimate_peak(middle) <= allowed_bytes:
            low = middle
        else:
            high = middle
    return low, f"estimated to fill {target_text}"


@dataclass(frozen=True)
class TokenBudget:
    """Current tokens per micro-batch of a run with a memory target, and the bounds of later values.

    Example: 8,192 tokens, estimated for 0.92 of a GPU with 80 GiB::

        TokenBudget(tokens=8192, min_tokens=2048, max_tokens=65536, allowed=0.92 * 80 * 2**30, estimate=8192)
    """

    tokens: int
    """Largest number of tokens of a micro-batch in the next step."""
    min_tokens: int
    """Tokens of the longest row."""
    max_tokens: int
    """Upper bound of later budgets: a rank's tokens of a mini-batch, or less after running out of memory."""
    allowed: float
    """Bytes of the GPU's memory that the run may use."""
    estimate: int
    """Initial budget, from `estimate_tokens`."""

    def after_step(
        self, resident_bytes: float | None, bytes_per_token: float | None, split_tokens: float | None
    ) -> TokenBudget:
        """Compute the budget of the next step from the measurements of this step.

        Args:
            resident_bytes: Allocated bytes at the start of a pass, maximum over all ranks; None if no pass
                was measured.
            bytes_per_token: Bytes that a pass allocated per token of its largest micro-batch, maximum over
                all ranks; None if no pass was measured.
            split_tokens: Tokens per micro-batch after a pass ran out of memory and was repeated with smaller
                micro-batches; None if no pass ran out of memory.

        Example:
            >>> budget = TokenBudget(4096, min_tokens=512, max_tokens=65536, allowed=80e9, estimate=4096)
            >>> budget.after_step(resident_bytes=20e9, bytes_per_token=10e6, split_tokens=None).tokens
            6000
        """
        # A micro-batch size that ran out of memory is never tried again.
        max_tokens = self.max_tokens
        if split_tokens is not None:
            max_tokens = max(self.min_tokens, min(max_tokens, int(split_tokens)))

        tokens = self.tokens
        if resident_bytes is not None and bytes_per_token:
            fitting_tokens = int((self.allowed - resident_bytes) / bytes_per_token)
            # Ignore small rises and limit large rises. A lower budget takes effect at once.
            if fitting_tokens < tokens or fitting_tokens >= _SMALLEST_RISE * tokens:
                tokens = min(fitting_tokens, int(_LARGEST_RISE * tokens))
        return replace(self, tokens=max(self.min_tokens, min(tokens, max_tokens)), max_tokens=max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint."""
        return asdict(self)

    def restore(self, saved: Mapping[str, Any] | None) -> TokenBudget:
        """Return the budget saved in a checkpoint, or this budget if the job has changed since then.

        A change of GPU, layout or memory target changes ``estimate``, ``min_tokens`` or ``allowed``.
        ``saved`` is the `state_dict` in the checkpoint; None if the checkpoint contains no budget.
        """
        if saved is None:
            return self

        saved_budget = TokenBudget(**saved)
        is_same_job = (
            saved_budget.estimate == self.estimate
            and saved_budget.min_tokens == self.min_tokens
            and saved_budget.allowed == self.allowed
        )
        return saved_budget if is_same_job else self


def initial_budget(config: RunConfig) -> TokenBudget | None:
    """Return the budget of the first step of a run, or None without `batch.memory_target`.

    ``config`` is resolved, so its tokens per micro-batch were computed by `estimate_tokens`.
    """
    target = config.batch.memory_target
    if target is None:
        return None

    tokens = config.batch.tokens_per_microbatch
    assert tokens is not None and config.gpu_memory_gib is not None, "the configuration is resolved"

    bounds = microbatch_bounds(config, role_layout(config.actor.layout, "actor.layout"))
    return TokenBudget(
        tokens=tokens,
        min_tokens=bounds.row_tokens,
        max_tokens=max(bounds.row_tokens, bounds.even_tokens),
        allowed=target * config.gpu_memory_gib * _GIB,
        estimate=tokens,
    )
