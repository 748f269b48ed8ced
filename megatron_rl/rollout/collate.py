"""Sequences as ragged tensors and back: for the learner, for the ranks that hold a batch, for a checkpoint.

Letters as in `megatron_rl.types`: B sequences, N tokens of all of them together, prompts included.
"""

from __future__ import annotations

from array import array
from collections import abc
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_rl.distributed.exchange import RowShard
from megatron_rl.rollout.sampling import log_prob_temperature, row_seeds
from megatron_rl.rollout.types import OBSERVED, Sequence, SequenceGroup
from megatron_rl.types import Outcome, PromptBatch, Rollouts, split_rows

RoutingShape = tuple[int, int]
"""Layers, and experts per token, of a model whose routing an engine reports."""


def waiting_groups(prompts: PromptBatch) -> list[SequenceGroup]:
    """Return a waiting group for each of the prompts."""
    rows = zip(
        split_rows(prompts.tokens, prompts.lengths),
        prompts.lengths.split(1),
        prompts.prompt_ids.split(1),
        *(zip(getattr(prompts, name), strict=True) for name in PromptBatch.TUPLE_FIELDS),
        strict=True,
    )
    # Fields by position, since a batch of one prompt is made for each prompt of each step.
    return [SequenceGroup(PromptBatch(*row)) for row in rows] if len(prompts) else []


def to_prompts(groups: abc.Sequence[SequenceGroup]) -> PromptBatch:
    """Return the prompts of the groups as one batch."""
    if not groups:
        nothing = torch.zeros(0, dtype=torch.int64)
        return PromptBatch(nothing, nothing, nothing, (), (), (), (), ())
    return PromptBatch.concatenate([group.prompt for group in groups])


def start_groups(
    groups: abc.Sequence[SequenceGroup], samples: int, seed: int, version: int
) -> list[SequenceGroup]:
    """Return the waiting groups with ``samples`` sequences each, to be sampled by weights of ``version``.

    Each sequence's seed follows from ``seed`` and its position alone.
    """
    seeds = row_seeds(seed, range(len(groups) * samples))
    started = []
    for index, group in enumerate(groups):
        (sampling,) = group.prompt.sampling
        prompt = array("q", group.prompt.tokens.tolist())
        first = index * samples
        sequences = [Sequence(prompt, sampling, own, version) for own in seeds[first : first + samples]]
        started.append(SequenceGroup(group.prompt, sequences))
    return started


def to_rollouts(groups: abc.Sequence[SequenceGroup]) -> Rollouts:
    """Return all sequences as one ragged batch, group after group, with the version of every token."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    tokens, log_probs, versions, sizes, support = (array(kind) for kind in "qdiii")
    for sequence in sequences:
        prompt = len(sequence.prompt)
        tokens += sequence.prompt + sequence.tokens
        log_probs.frombytes(bytes(prompt * log_probs.itemsize))
        log_probs += sequence.log_probs
        versions += array("i", [OBSERVED]) * prompt + sequence.versions
        sizes.frombytes(bytes(prompt * sizes.itemsize))
        sizes += sequence.support_sizes
        support += sequence.support

    lengths = torch.tensor([len(one.prompt) + len(one.tokens) for one in sequences], dtype=torch.int64)
    group_of = [index for index, group in enumerate(groups) for _ in group.sequences]
    token_versions = _tensor(versions, torch.int32)
    routing = _routing_shape(sequences)
    temperatures = [log_prob_temperature(sequence.sampling) for sequence in sequences]
    outcomes = tuple(sequence.outcome for sequence in sequences)
    limits = [sequence.sampling.max_response_tokens for sequence in sequences]
    return Rollouts(
        tokens=_tensor(tokens, torch.int64),
        lengths=lengths,
        response_mask=token_versions != OBSERVED,
        rollout_log_probs=_tensor(log_probs, torch.float32),
        group=torch.tensor(group_of, dtype=torch.int64),
        finish_reason=torch.tensor([one.finish_reason for one in sequences], dtype=torch.int64),
        policy_version=torch.tensor([one.policy_version for one in sequences], dtype=torch.int64),
        temperature=torch.tensor(temperatures, dtype=torch.float32),
        token_versions=token_versions,
        support_sizes=_tensor(sizes, torch.int32),
        support=_tensor(support, torch.int32),
        experts=None if routing is None else _experts(sequences, lengths, routing),
        outcomes=outcomes if any(outcome is not None for outcome in outcomes) else None,
        max_response_tokens=torch.tensor(limits, dtype=torch.int64),
    )


def to_groups(prompts: PromptBatch, rollouts: Rollouts, seeds: Tensor) -> list[SequenceGroup]:
    """Return the groups of which `to_prompts` and `to_rollouts` made these; ``seeds`` [B] int64."""
    assert rollouts.token_versions is not None
    assert rollouts.support_sizes is not None and rollouts.support is not None
    groups = waiting_groups(prompts)
    samples = len(rollouts) // max(len(groups), 1)
    supports = split_rows(rollouts.support, _sums(rollouts.support_sizes, rollouts.lengths))
    experts = rollouts.experts
    rows = zip(
        split_rows(rollouts.tokens, rollouts.lengths),
        split_rows(rollouts.rollout_log_probs, rollouts.lengths),
        split_rows(rollouts.token_versions, rollouts.lengths),
        split_rows(rollouts.support_sizes, rollouts.lengths),
        supports,
        [None] * len(rollouts) if experts is None else split_rows(experts, rollouts.lengths),
        rollouts.finish_reason.tolist(),
        rollouts.policy_version.tolist(),
        seeds.tolist(),
        rollouts.outcomes or [None] * len(rollouts),
        strict=True,
    )
    for index, (
        tokens,
        log_probs,
        versions,
        sizes,
        support,
        expert,
        reason,
        version,
        seed,
        outcome,
    ) in enumerate(rows):
        group = groups[index // samples]
        (sampling,) = group.prompt.sampling
        sampled = versions != OBSERVED
        # The policy's first token follows the prompt, which may be an environment's own.
        start = int(sampled.int().argmax()) if bool(sampled.any()) else len(tokens)
        sequence = Sequence(
            prompt=_array("q", tokens[:start]),
            sampling=sampling,
            seed=seed,
            policy_version=version,
            tokens=_array("q", tokens[start:]),
            log_probs=_array("d", log_probs[start:].double()),
            versions=_array("i", versions[start:]),
            support_sizes=_array("i", sizes[start:]),
            support=_array("i", support),
            experts=expert,
            finish_reason=reason,
            outcome=outcome,
        )
        group.sequences.append(sequence)
    return groups


class NewTokens(NamedTuple):
    """Tokens that one replica, or after a gather all of them, added to the unfinished sequences of a round.

    Example:
        Two tokens for the first unfinished sequence of a round, finished in the second token round::

            NewTokens(RowShard([0], [2], ..., values={"finish_reason": [0], "round": [2]}), {}, {})
    """

    shard: RowShard
    """The new tokens, with ``mask`` (true where sampled) and ``log_probs`` for each; ``finish_reason`` and
    token ``round`` for each sequence. ``rows`` are positions among `GenerationRound.unfinished`."""

    outcomes: dict[int, Outcome]
    """Outcomes of the environments that ended, by the same positions."""

    prompts: dict[int, list[int]]
    """Token ids of prompts that environments opened with, in place of the record's."""

    experts: RowShard | None = None
    """Experts of all tokens of these sequences, prompts included; None unless the engine was asked."""

    resubmitted: int = 0
    """Requests that went to another server because theirs was lost."""


def collect_new_tokens(
    positions: abc.Sequence[int],
    sequences: abc.Sequence[Sequence],
    starts: abc.Sequence[int],
    prompts: dict[int, list[int]],
    routing: RoutingShape | None,
) -> NewTokens:
    """Return the tokens of a replica's ``sequences`` that follow the first ``starts`` of each."""
    tokens, log_probs, versions, sizes, support = (array(kind) for kind in "qdiii")
    for sequence, start in zip(sequences, starts, strict=True):
        tokens += sequence.tokens[start:]
        log_probs += sequence.log_probs[start:]
        versions += sequence.versions[start:]
        sizes += sequence.support_sizes[start:]
        support += sequence.support[sum(sequence.support_sizes[:start]) :]

    counts = [len(one.tokens) - start for one, start in zip(sequences, starts, strict=True)]
    rows = torch.tensor(positions, dtype=torch.int64)
    shard = RowShard(
        rows,
        torch.tensor(counts, dtype=torch.int64),
        {
            "tokens": _tensor(tokens, torch.int64),
            "mask": _tensor(versions, torch.int32) != OBSERVED,
            "log_probs": _tensor(log_probs, torch.float32),
            "support_sizes": _tensor(sizes, torch.int32),
        },
        {
            "finish_reason": torch.tensor([one.finish_reason for one in sequences], dtype=torch.int64),
            "round": torch.tensor([one.finished_in for one in sequences], dtype=torch.int64),
        },
        {"support_sizes": _tensor(support, torch.int32)},
    )

    outcomes = {
        position: sequence.outcome
        for position, sequence in zip(positions, sequences, strict=True)
        if sequence.outcome is not None
    }
    if routing is None:
        return NewTokens(shard, outcomes, prompts)
    lengths = torch.tensor([len(one.prompt) + len(one.tokens) for one in sequences], dtype=torch.int64)
    experts = _experts(sequences, lengths, routing)
    return NewTokens(shard, outcomes, prompts, RowShard(rows, lengths, {"experts": experts}, {}))


def append_new_tokens(sequences: abc.Sequence[Sequence], new: NewTokens, version: int) -> None:
    """Append what all replicas sampled by weights of ``version`` to the unfinished sequences of a round."""
    shard = new.shard
    mask = shard.tokens["mask"]
    all_sizes = shard.tokens["support_sizes"]
    versions = torch.where(mask, version, OBSERVED).to(torch.int32)
    rows = zip(
        split_rows(shard.tokens["tokens"], shard.lengths),
        split_rows(shard.tokens["log_probs"].double(), shard.lengths),
        split_rows(versions, shard.lengths),
        split_rows(all_sizes, shard.lengths),
        split_rows(shard.items["support_sizes"], _sums(all_sizes, shard.lengths)),
        shard.values["finish_reason"].tolist(),
        shard.values["round"].tolist(),
        strict=True,
    )
    for sequence, (tokens, log_probs, own, sizes, support, reason, finished_in) in zip(
        sequences, rows, strict=True
    ):
        if not sequence.sampled_tokens:
            sequence.policy_version = version
        sequence.tokens += _array("q", tokens)
        sequence.log_probs += _array("d", log_probs)
        sequence.versions += _array("i", own)
        sequence.support_sizes += _array("i", sizes)
        sequence.support += _array("i", support)
        sequence.finish_reason = reason
        sequence.finished_in = finished_in

    for position, outcome in new.outcomes.items():
        sequences[position].outcome = outcome
    for position, prompt in new.prompts.items():
        sequences[position].prompt = array("q", prompt)
    if new.experts is not None:
        whole = split_rows(new.experts.tokens["experts"], new.experts.lengths)
        for sequence, experts in zip(sequences, whole, strict=True):
            sequence.experts = experts


def _routing_shape(sequences: abc.Sequence[Sequence]) -> RoutingShape | None:
    """Return layers and experts per token of the sequences' experts, None where no engine reported any."""
    for sequence in sequences:
        if sequence.experts is not None:
            _, layers, experts_per_token = sequence.experts.shape
            return layers, experts_per_token
    return None


def _experts(sequences: abc.Sequence[Sequence], lengths: Tensor, routing: RoutingShape) -> Tensor:
    """Return the experts of all tokens [N, layers, k] int16, -1 where unknown."""
    experts = torch.full((int(lengths.sum()), *routing), -1, dtype=torch.int16)
    for row, sequence in zip(split_rows(experts, lengths), sequences, strict=True):
        if sequence.experts is not None:
            row[: len(sequence.experts)] = sequence.experts
    return experts


def _sums(sizes: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each row's ``sizes`` [N]: [B] int64."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.long().cumsum(0)])
    last = lengths.cumsum(0)
    return ends[last] - ends[last - lengths]


def _tensor(values: array, dtype: torch.dtype) -> Tensor:
    # A copy: torch cannot view an empty array of numpy's as bytes, as a gather does.
    return torch.tensor(numpy.asarray(values), dtype=dtype)


def _array(kind: str, values: Tensor) -> array:
    numbers: Any = array(kind)
    numbers.frombytes(values.contiguous().numpy().tobytes())
    return numbers
