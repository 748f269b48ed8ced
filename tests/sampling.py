"""Responses from one replica, for tests that have an engine in their hands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.rollout.engine import Sampler
from megatron_rl.rollout.episodes import Added, Episodes, Sweep, added_rows, begin, extended, settle
from megatron_rl.rollout.replica import Dealt
from megatron_rl.rollout.sampling import row_seeds
from megatron_rl.rollout.turns import SingleTurns, drive
from megatron_rl.types import PromptBatch, Rollouts, SamplingParameters


def make_prompts(rows: list[list[int]], *sampling: SamplingParameters) -> PromptBatch:
    """Return prompts of these tokens and nothing else; ``sampling`` is one for all, or one each."""
    count = len(rows)
    return PromptBatch(
        tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        prompt_ids=torch.arange(count),
        tasks=("",) * count,
        prompts=("",) * count,
        ground_truths=(None,) * count,
        metadata=({},) * count,
        sampling=sampling if len(sampling) == count else sampling[:1] * count,
    )


def generate(
    engine: Sampler,
    prompts: PromptBatch,
    *,
    seed: int,
    rows: Sequence[int] | None = None,
    records: tuple[int, int] | None = None,
) -> Rollouts:
    """Sample one response per prompt; ``rows`` are their positions in the global batch.

    ``records`` as in `added_rows`.
    """
    version = engine.weights_version  # pyright: ignore[reportAttributeAccessIssue]
    flight = begin(prompts, 1, seed, version)
    if rows is not None:
        flight = replace(flight, seeds=torch.tensor(row_seeds(seed, rows)))
    count = len(prompts)
    sweep = Sweep(flight, (True,) * count, count, version)
    added = advanced(engine, flight, None, records)
    return settle(sweep, added).flight.rollouts


def continued(engine: Sampler, flight: Episodes, tokens: int, version: int) -> Episodes:
    """Add up to ``tokens`` tokens to every row that goes on."""
    return extended(flight, advanced(engine, flight, tokens), version)


def advanced(
    engine: Sampler, flight: Episodes, tokens: int | None, records: tuple[int, int] | None = None
) -> Added:
    """Return up to ``tokens`` tokens for every row that goes on."""
    dealt = Dealt(flight, len(flight.rollouts), engine.max_model_len)
    drive(engine, SingleTurns(dealt), tokens)
    return added_rows(dealt.numbers, dealt.rows, [1] * len(dealt.rows), records)
