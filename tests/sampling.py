"""Responses from one replica, for tests that have an engine in their hands."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.rollout.collate import append_new_tokens, start_groups, to_rollouts, waiting_groups
from megatron_rl.rollout.engines.base import Generator
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.sampling import row_seeds
from megatron_rl.rollout.scheduler import GenerationRound, ReplicaQueue, ReplicaScheduler
from megatron_rl.rollout.types import Sequence, SequenceGroup
from megatron_rl.types import PromptBatch, Rollouts, SamplingParameters

LastLogits = Callable[[Tensor, Tensor], Tensor]
"""``logits(tokens [N], lengths [B]) -> [B, V]``: what follows the last token of each ragged row."""


class RecomputingDecoder:
    """Compute every prefix anew through a callable that keeps no cache."""

    def __init__(self, logits: LastLogits) -> None:
        self._logits = logits
        self._rows: list[list[int]] = []

    def start(self, rows: abc.Sequence[abc.Sequence[int]]) -> Tensor:
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


def started(prompts: PromptBatch, samples: int, seed: int, version: int) -> list[SequenceGroup]:
    """Return groups of so many sequences without a token."""
    return start_groups(waiting_groups(prompts), samples, seed, version)


def copied(groups: abc.Sequence[SequenceGroup]) -> list[SequenceGroup]:
    """Return groups that can be extended without a change of these."""
    return [replace(group, sequences=[one.copy() for one in group.sequences]) for group in groups]


def round_of(groups: abc.Sequence[SequenceGroup], version: int = 0) -> GenerationRound:
    """Return the round that waits for all of these groups."""
    return GenerationRound(tuple(groups), (True,) * len(groups), len(groups), version)


def unfinished(groups: abc.Sequence[SequenceGroup]) -> list[Sequence]:
    """Return the sequences that are not finished, group after group."""
    return [sequence for _, sequence in round_of(groups).unfinished]


def take_in(scheduler: ReplicaScheduler, routing: tuple[int, int] | None = None) -> None:
    """Append what a replica, which is the only one, has sampled to the sequences of its round."""
    scheduler.admit_remaining()
    order = sorted(range(len(scheduler.admitted)), key=lambda number: scheduler.admitted[number].position)
    scheduler.admitted = [scheduler.admitted[number] for number in order]
    generation_round = scheduler.queue.round
    sequences = [sequence for _, sequence in generation_round.unfinished]
    append_new_tokens(sequences, scheduler.new_tokens(routing), generation_round.version)


def generate(
    engine: Generator,
    prompts: PromptBatch,
    *,
    seed: int,
    rows: abc.Sequence[int] | None = None,
    routing: tuple[int, int] | None = None,
) -> Rollouts:
    """Sample one response per prompt; ``rows`` are their positions in the global batch.

    ``routing`` as in `ReplicaScheduler.new_tokens`.
    """
    # The weights that an engine was built with have no version: here they are the first.
    version = max(0, engine.weights_version)  # pyright: ignore[reportAttributeAccessIssue]
    groups = started(prompts, 1, seed, version)
    if rows is not None:
        for group, own in zip(groups, row_seeds(seed, rows), strict=True):
            group.sequences[0].seed = own
    continue_all(engine, groups, None, version, routing)
    return to_rollouts(groups)


def continue_all(
    engine: Generator,
    groups: abc.Sequence[SequenceGroup],
    tokens: int | None,
    version: int,
    routing: tuple[int, int] | None = None,
) -> None:
    """Add up to ``tokens`` tokens to every sequence that is not finished."""
    queue = ReplicaQueue(round_of(groups, version), len(unfinished(groups)), engine.max_model_len)
    scheduler = ReplicaScheduler(engine, queue)
    scheduler.run_token_round(tokens)
    take_in(scheduler, routing)
