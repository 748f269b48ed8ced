"""Responses from one replica, for tests that have an engine in their hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.roles.rollout import Dealt
from megatron_rl.rollout.engines.base import Generator
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.episodes import Added, Episodes, Sweep, added_rows, begin, extended, settle
from megatron_rl.rollout.sampling import row_seeds
from megatron_rl.rollout.turns import SingleTurns, drive
from megatron_rl.types import PromptBatch, Rollouts, SamplingParameters

LastLogits = Callable[[Tensor, Tensor], Tensor]
"""``logits(tokens [N], lengths [B]) -> [B, V]``: what follows the last token of each ragged row."""


class RecomputingDecoder:
    """Compute every prefix anew through a callable that keeps no cache."""

    def __init__(self, logits: LastLogits) -> None:
        self._logits = logits
        self._rows: list[list[int]] = []

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        self._rows = [list(row) for row in rows]
        return self._last()

    def step(self, tokens: Tensor) -> Tensor:
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._last()

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def _last(self) -> Tensor:
        tokens = torch.tensor([token for row in self._rows for token in row], dtype=torch.int64)
        return self._logits(tokens, torch.tensor([len(row) for row in self._rows], dtype=torch.int64))


def engine_of(logits: LastLogits, **more: Any) -> TorchEngine:
    """Return an engine that samples from a callable."""
    return TorchEngine(lambda: RecomputingDecoder(logits), **more)


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
    engine: Generator,
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


def continued(engine: Generator, flight: Episodes, tokens: int, version: int) -> Episodes:
    """Add up to ``tokens`` tokens to every row that goes on."""
    return extended(flight, advanced(engine, flight, tokens), version)


def advanced(
    engine: Generator, flight: Episodes, tokens: int | None, records: tuple[int, int] | None = None
) -> Added:
    """Return up to ``tokens`` tokens for every row that goes on."""
    dealt = Dealt(flight, len(flight.rollouts), engine.max_model_len)
    drive(engine, SingleTurns(dealt), tokens)
    return added_rows(dealt.numbers, dealt.rows, [1] * len(dealt.rows), records)
