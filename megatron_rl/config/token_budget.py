"""Tokens of a micro-batch from a share of the GPU's memory, `batch.memory_target`.

The one idea: a pass needs its resident bytes plus bytes per token of its largest micro-batch. `check`
estimates both, so a run has a budget before its first step. Each step then measures both, as maxima over all
ranks, so every rank computes the same next budget without a message.
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
"""Smallest factor by which a budget rises: measured peaks vary, which must not change it in every step."""
_LARGEST_RISE = 2.0
"""Largest factor by which a budget rises in a step: small micro-batches predict much larger ones badly."""


def estimate_tokens(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], shapes: Mapping[str, ModelShape]
) -> tuple[int, str]:
    """Return the largest number of tokens per micro-batch within the memory target, and the reason for it.

    ``config`` is resolved, with ``memory_target`` and ``gpu_memory_gib``; ``shapes`` as for `memory_plan`.
    """
    target = config.batch.memory_target
    gpu_gib = config.gpu_memory_gib
    assert target is not None and gpu_gib is not None, "checked before"
    allowed_bytes = target * gpu_gib * _GIB
    bounds = microbatch_bounds(config, role_layout(config.actor.layout, "actor.layout"))
    min_tokens = bounds.row_tokens
    max_tokens = max(min_tokens, bounds.share)

    # Few kinds of ranks are distinct, and connections of a weight sync do not depend on micro-batches.
    ranks_asleep = frozenset[int]()
    batch = None
    if config.job == TRAIN:
        ranks_asleep = sleeping_ranks(layouts)
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
                candidate, layouts, shapes, candidate_batch, plan.rank, ranks_asleep, connection_items
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
        share_text = "a mini-batch"
        if bounds.microbatches > 1:
            share_text = f"a mini-batch in {bounds.microbatches} micro-batches, which keep the pipeline busy,"
        return max_tokens, f"{share_text} is estimated within {target_text}"

    # The largest number within the target: ``low`` fits, ``high`` does not.
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
    """Tokens per micro-batch of a run with a memory target, from one step to the next.

    Example: 8,192 tokens, estimated for 0.92 of a GPU with 80 GiB::

        TokenBudget(tokens=8192, min_tokens=2048, max_tokens=65536, allowed=0.92 * 80 * 2**30, estimate=8192)
    """

    tokens: int
    """Largest number of tokens of a micro-batch in the next step."""
    min_tokens: int
    """Tokens of the longest row."""
    max_tokens: int
    """Upper bound of later budgets: a rank's share of a mini-batch, or less once a pass ran out of memory."""
    allowed: float
    """Bytes of a GPU that may be occupied."""
    estimate: int
    """Tokens that `estimate_tokens` returned."""

    def after_step(
        self, resident_bytes: float | None, bytes_per_token: float | None, split_tokens: float | None
    ) -> TokenBudget:
        """Return the budget of the next step, from measurements of this one that are maxima over all ranks.

        Args:
            resident_bytes: Bytes on the device when a pass began; None if no pass was measured.
            bytes_per_token: Bytes that a pass added per token of its largest micro-batch; None likewise.
            split_tokens: Tokens of the smaller micro-batches with which passes that ran out of memory were
                repeated; None if no pass ran out of memory.

        Example:
            >>> budget = TokenBudget(4096, min_tokens=512, max_tokens=65536, allowed=80e9, estimate=4096)
            >>> budget.after_step(resident_bytes=20e9, bytes_per_token=10e6, split_tokens=None).tokens
            6000
        """
        # Never again as large as a micro-batch that did not fit.
        max_tokens = self.max_tokens
        if split_tokens is not None:
            max_tokens = max(self.min_tokens, min(max_tokens, int(split_tokens)))

        tokens = self.tokens
        if resident_bytes is not None and bytes_per_token:
            fitting_tokens = int((self.allowed - resident_bytes) / bytes_per_token)
            # Ignore small rises, and limit large ones; a fall takes effect at once.
            if fitting_tokens < tokens or fitting_tokens >= _SMALLEST_RISE * tokens:
                tokens = min(fitting_tokens, int(_LARGEST_RISE * tokens))
        return replace(self, tokens=max(self.min_tokens, min(tokens, max_tokens)), max_tokens=max_tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a checkpoint."""
        return asdict(self)

    def restore(self, saved: Mapping[str, Any] | None) -> TokenBudget:
        """Return the budget that a checkpoint has saved; this one if the saved one is of a different job.

        On other GPUs, in another layout or with another target, the estimate or the limit differs. ``saved``
        is the `state_dict` in the checkpoint; None if it has none.
        """
        if saved is None:
            return self

        saved_budget = TokenBudget(**saved)
        job = (self.estimate, self.min_tokens, self.allowed)
        if (saved_budget.estimate, saved_budget.min_tokens, saved_budget.allowed) != job:
            return self
        return saved_budget


def initial_budget(config: RunConfig) -> TokenBudget | None:
    """Return the budget of the first step of a run, or None without `batch.memory_target`.

    ``config`` is resolved: its tokens per micro-batch are those of `estimate_tokens`.
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
        max_tokens=max(bounds.row_tokens, bounds.share),
        allowed=target * config.gpu_memory_gib * _GIB,
        estimate=tokens,
    )
