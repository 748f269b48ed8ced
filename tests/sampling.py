"""Sample responses from one replica, for tests that drive an engine directly."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.rollout.collate import append_new_tokens, make_waiting_groups, start_groups, to_rollouts
from megatron_rl.rollout.engines.base import Generator
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.sampling import derive_row_seeds
from megatron_rl.rollout.scheduler import GenerationRound, ReplicaQueue, ReplicaScheduler
from megatron_rl.rollout.types import Sequence, SequenceGroup
from megatron_rl.types import PromptBatch, Rollouts, SamplingParameters

LastLogits = Callable[[Tensor, Tensor], Tensor]
"""``logits(tokens [N], lengths [B]) -> [B, V]``: logits after the last token of each ragged row."""


class RecomputingDecoder:
    """Decoder without a cache: recomputes every prefix through a callable."""

    def __init__(self, logits: LastLogits) -> None:
        self._logits = logits
        self._rows: list[list[int]] = []

    def prefill(self, prompts: abc.Sequence[abc.Sequence[int]]) -> Tensor:
        self._rows = [list(prompt) for prompt in prompts]
        return self._last()

    def append_tokens(self, tokens: Tensor) -> Tensor:
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._last()

    def select_rows(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def _last(self) -> Tensor:
        tokens = [token for row in self._rows for token in row]
        lengths = [len(row) for row in self._rows]
        return self._logits(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.int64),
        )


def engine_of(logits: LastLogits, **settings: Any) -> TorchEngine:
    """Return an engine that samples from the logits of a callable."""
    return TorchEngine(lambda: RecomputingDecoder(logits), **settings)


def make_prompts(rows: list[list[int]], *sampling: SamplingParameters) -> PromptBatch:
    """Return a prompt batch of these tokens; ``sampling`` is one value for all rows, or one each."""
    count = len(rows)
    # One set of parameters stands for all prompts.
    if len(sampling) != count:
        sampling = sampling[:1] * count

    return PromptBatch(
        tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        prompt_ids=torch.arange(count),
        tasks=("",) * count,
        prompts=("",) * count,
        ground_truths=(None,) * count,
        metadata=({},) * count,
        sampling=sampling,
    )


def started(
    prompts: PromptBatch,
    samples: int,
    seed: int,
    version: int,
) -> list[SequenceGroup]:
    """Return groups of ``samples`` sequences without a token yet."""
    return start_groups(make_waiting_groups(prompts), samples, seed, version)


def copied(groups: abc.Sequence[SequenceGroup]) -> list[SequenceGroup]:
    """Return copies of the groups, so that extending them leaves the originals unchanged."""
    return [replace(group, sequences=[sequence.copy() for sequence in group.sequences]) for group in groups]


def round_of(groups: abc.Sequence[SequenceGroup], version: int = 0) -> GenerationRound:
    """Return a generation round that waits for all of these groups."""
    return GenerationRound(tuple(groups), (True,) * len(groups), len(groups), version)


def unfinished(groups: abc.Sequence[SequenceGroup]) -> list[Sequence]:
    """Return the unfinished sequences, group after group."""
    return [sequence for _, sequence in round_of(groups).unfinished]


def take_in(scheduler: ReplicaScheduler, routing: tuple[int, int] | None = None) -> None:
    """Append the new tokens of the only replica to the sequences of its round."""
    scheduler.admit_remaining()
    # `append_new_tokens` expects tokens in the order of the round, not in the order of admission.
    order = sorted(range(len(scheduler.admitted)), key=lambda index: scheduler.admitted[index].position)
    scheduler.admitted = [scheduler.admitted[index] for index in order]

    generation_round = scheduler.queue.round
    sequences = [sequence for _, sequence in generation_round.unfinished]
    append_new_tokens(sequences, scheduler.report_new_tokens(routing), generation_round.version)


def generate(
    engine: Generator,
    prompts: PromptBatch,
    *,
    seed: int,
    rows: abc.Sequence[int] | None = None,
    routing: tuple[int, int] | None = None,
) -> Rollouts:
    """Sample one response per prompt; ``rows`` are the prompts' positions in the global batch.

    ``routing`` is ``routing_shape`` of `ReplicaScheduler.report_new_tokens`.
    """
    # Weights that an engine loaded itself have version -1; they count as the first version here.
    version = max(0, engine.weights_version)  # pyright: ignore[reportAttributeAccessIssue]
    groups = started(prompts, 1, seed, version)
    # Seeds depend on the position in the global batch, so a part of it samples as the full batch does.
    if rows is not None:
        for group, row_seed in zip(groups, derive_row_seeds(seed, rows), strict=True):
            group.sequences[0].seed = row_seed
    continue_all(engine, groups, None, version, routing)
    return to_rollouts(groups)


def continue_all(
    engine: Generator,
    groups: abc.Sequence[SequenceGroup],
    tokens: int | None,
    version: int,
    routing: tuple[int, int] | None = None,
) -> None:
    """Add up to ``tokens`` tokens to every unfinished sequence."""
    # The queue offers all unfinished sequences to the only replica at once.
    queue = ReplicaQueue(round_of(groups, version), len(unfinished(groups)), engine.max_model_len)
    scheduler = ReplicaScheduler(engine, queue)
    scheduler.run_token_round(tokens)
    take_in(scheduler, routing)
