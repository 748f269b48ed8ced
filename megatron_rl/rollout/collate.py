"""Conversions between sequences and ragged tensors.

During generation each `Sequence` has arrays that grow. Training and checkpoints use `Rollouts`, and gathers
between ranks use `RowShard`, both with ragged tensors: the rows are concatenated, not padded. Shapes: B
sequences, N tokens of all sequences, prompts included.
"""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_rl.distributed.exchange import RowShard
from megatron_rl.rollout.sampling import derive_row_seeds, resolve_log_prob_temperature
from megatron_rl.rollout.types import OBSERVED, Sequence, SequenceGroup
from megatron_rl.types import LogitRules, Outcome, PromptBatch, Rollouts, split_rows

RoutingShape = tuple[int, int]
"""(layers, experts per token) of a model whose routing an engine reports."""


def make_waiting_groups(prompts: PromptBatch) -> list[SequenceGroup]:
    """Make a waiting group for each prompt of a batch.

    A waiting group has no sequences, because its sampling has not started.
    """
    if not len(prompts):
        return []

    # A field of a single prompt is a tuple with one value; optional fields that are None stay None.
    tuple_rows: list[Iterable[Any]] = []
    for name in PromptBatch.TUPLE_FIELDS:
        values = getattr(prompts, name)
        if values is None:
            tuple_rows.append([None] * len(prompts))
        else:
            tuple_rows.append(zip(values, strict=True))
    rows = zip(
        split_rows(prompts.tokens, prompts.lengths),
        prompts.lengths.split(1),
        prompts.prompt_ids.split(1),
        *tuple_rows,
        strict=True,
    )

    # Construct the batches directly, which is faster than `PromptBatch.rows`: this runs in every step.
    return [SequenceGroup(PromptBatch(*row)) for row in rows]


def to_prompts(groups: abc.Sequence[SequenceGroup]) -> PromptBatch:
    """Concatenate the prompts of the groups into one batch."""
    if not groups:
        empty = torch.zeros(0, dtype=torch.int64)
        return PromptBatch(empty, empty, empty, (), (), (), (), ())
    return PromptBatch.concatenate([group.prompt for group in groups])


def start_groups(
    groups: abc.Sequence[SequenceGroup],
    samples_per_prompt: int,
    seed: int,
    version: int,
) -> list[SequenceGroup]:
    """Create ``samples_per_prompt`` new sequences for the prompt of each waiting group.

    Returns a new group of these sequences for each of ``groups``. ``version`` is the version of the weights
    that will sample. The seed of a sequence depends only on ``seed`` and on the sequence's index among all
    new sequences.
    """
    # Every rank computes the same seeds.
    seeds = derive_row_seeds(seed, range(len(groups) * samples_per_prompt))
    started = []
    for index, group in enumerate(groups):
        (sampling,) = group.prompt.sampling
        # All samples share the prompt's array, which is never modified in place.
        prompt = array("q", group.prompt.tokens.tolist())

        first_seed = index * samples_per_prompt
        group_seeds = seeds[first_seed : first_seed + samples_per_prompt]
        sequences = [Sequence(prompt, sampling, sequence_seed, version) for sequence_seed in group_seeds]
        started.append(SequenceGroup(group.prompt, sequences))
    return started


def to_rollouts(groups: abc.Sequence[SequenceGroup]) -> Rollouts:
    """Concatenate the sequences of all groups into one ragged batch, in the order of the groups."""
    sequences = [sequence for group in groups for sequence in group.sequences]

    # Concatenate the per-token values. `support` has the token ids that the sampling filters (such as top-p)
    # left for each sampled token, and `support_sizes` their number. No filter applies to a prompt token, so
    # its size is 0. Its version is `OBSERVED`, and its log-prob 0.
    tokens = array("q")
    log_probs = array("d")
    versions = array("i")
    support_sizes = array("i")
    support = array("i")
    for sequence in sequences:
        prompt_length = len(sequence.prompt)
        tokens += sequence.prompt + sequence.tokens
        # Zero bytes are the float 0.0: faster than a list of zeros.
        log_probs.frombytes(bytes(prompt_length * log_probs.itemsize))
        log_probs += sequence.log_probs
        versions += array("i", [OBSERVED]) * prompt_length + sequence.versions
        support_sizes.frombytes(bytes(prompt_length * support_sizes.itemsize))
        support_sizes += sequence.support_sizes
        support += sequence.support
    token_versions = _to_tensor(versions, torch.int32)

    # Per-sequence values.
    lengths = _make_length_tensor(sequences)
    group_indices: list[int] = []
    for index, group in enumerate(groups):
        group_indices += [index] * len(group.sequences)
    finish_reasons = [sequence.finish_reason for sequence in sequences]
    policy_versions = [sequence.policy_version for sequence in sequences]
    temperatures = [resolve_log_prob_temperature(sequence.sampling) for sequence in sequences]
    limits = [sequence.sampling.max_response_tokens for sequence in sequences]

    # Optional values are None unless at least one sequence has them.
    outcomes: tuple[Outcome | None, ...] | None = None
    if any(sequence.outcome is not None for sequence in sequences):
        outcomes = tuple(sequence.outcome for sequence in sequences)
    rules: tuple[LogitRules | None, ...] | None = None
    if any(_needs_logit_rules(sequence) for sequence in sequences):
        rules = tuple(_make_logit_rules(sequence) for sequence in sequences)
    experts = None
    routing_shape = _find_routing_shape(sequences)
    if routing_shape is not None:
        experts = _concatenate_experts(sequences, lengths, routing_shape)

    return Rollouts(
        tokens=_to_tensor(tokens, torch.int64),
        lengths=lengths,
        response_mask=token_versions != OBSERVED,
        rollout_log_probs=_to_tensor(log_probs, torch.float32),
        group=torch.tensor(group_indices, dtype=torch.int64),
        finish_reason=torch.tensor(finish_reasons, dtype=torch.int64),
        policy_version=torch.tensor(policy_versions, dtype=torch.int64),
        temperature=torch.tensor(temperatures, dtype=torch.float32),
        token_versions=token_versions,
        support_sizes=_to_tensor(support_sizes, torch.int32),
        support=_to_tensor(support, torch.int32),
        experts=experts,
        outcomes=outcomes,
        rules=rules,
        max_response_tokens=torch.tensor(limits, dtype=torch.int64),
    )


def to_groups(
    prompts: PromptBatch,
    rollouts: Rollouts,
    seeds: Tensor,
) -> list[SequenceGroup]:
    """Restore the groups of a checkpoint; the inverse of `to_prompts` and `to_rollouts`.

    ``prompts`` is the result of `to_prompts`, ``rollouts`` of `to_rollouts`, and ``seeds`` [B] are the seeds
    of the B sequences.
    """
    assert rollouts.token_versions is not None
    assert rollouts.support_sizes is not None and rollouts.support is not None

    # Split the per-token values into one slice per sequence. A sequence's slice of `rollouts.support` has the
    # token ids that the sampling filters left for each of its tokens, so its length is the sum of the sizes.
    lengths = rollouts.lengths
    tokens = split_rows(rollouts.tokens, lengths)
    log_probs = split_rows(rollouts.rollout_log_probs, lengths)
    versions = split_rows(rollouts.token_versions, lengths)
    support_sizes = split_rows(rollouts.support_sizes, lengths)
    support_lengths = _sum_rows(rollouts.support_sizes, lengths)
    supports = split_rows(rollouts.support, support_lengths)
    experts: abc.Sequence[Tensor | None] = [None] * len(rollouts)
    if rollouts.experts is not None:
        experts = split_rows(rollouts.experts, lengths)

    finish_reasons = rollouts.finish_reason.tolist()
    policy_versions = rollouts.policy_version.tolist()
    seed_list = seeds.tolist()
    assert len(seed_list) == len(rollouts)
    outcomes = rollouts.outcomes or [None] * len(rollouts)

    groups = make_waiting_groups(prompts)
    samples_per_prompt = len(rollouts) // max(len(groups), 1)
    for row in range(len(rollouts)):
        group = groups[row // samples_per_prompt]
        (sampling,) = group.prompt.sampling

        # The prompt ends before the first sampled token. The prompt in `prompts` can have another length: an
        # environment may have replaced it.
        is_sampled = versions[row] != OBSERVED
        prompt_length = len(tokens[row])
        if bool(is_sampled.any()):
            prompt_length = int(is_sampled.int().argmax())
        sequence = Sequence(
            prompt=_to_array("q", tokens[row][:prompt_length]),
            sampling=sampling,
            seed=seed_list[row],
            policy_version=policy_versions[row],
            tokens=_to_array("q", tokens[row][prompt_length:]),
            log_probs=_to_array("d", log_probs[row][prompt_length:].double()),
            versions=_to_array("i", versions[row][prompt_length:]),
            support_sizes=_to_array("i", support_sizes[row][prompt_length:]),
            support=_to_array("i", supports[row]),
            experts=experts[row],
            finish_reason=finish_reasons[row],
            outcome=outcomes[row],
        )
        group.sequences.append(sequence)
    return groups


class NewTokens(NamedTuple):
    """New tokens of a round's sequences, from one replica or (after the gather) from all replicas.

    Example:
        Two tokens for the first unfinished sequence of a round, which finished in the second token round::

            NewTokens(RowShard([0], [2], ..., values={"finish_reason": [0], "round": [2]}), {}, {})
    """

    shard: RowShard
    """The new tokens. ``rows`` are positions in `GenerationRound.unfinished`. Per token: ``tokens``, ``mask``
    (true if sampled), ``log_probs``, ``support_sizes``. Per sequence: ``finish_reason`` and ``round``, the
    token round in which it finished."""

    outcomes: dict[int, Outcome]
    """Outcomes of environments that have ended, by position in `GenerationRound.unfinished`."""

    replaced_prompts: dict[int, list[int]]
    """Token ids of prompts that environments replaced, by position in `GenerationRound.unfinished`."""

    experts: RowShard | None = None
    """Experts of all tokens of these sequences, prompts included; None unless the engine records them."""

    resubmitted: int = 0
    """Number of requests that were sent to a second server because the first server failed."""


def collect_new_tokens(
    positions: abc.Sequence[int],
    sequences: abc.Sequence[Sequence],
    old_lengths: abc.Sequence[int],
    replaced_prompts: dict[int, list[int]],
    routing_shape: RoutingShape | None,
) -> NewTokens:
    """Collect the tokens that a replica has added to ``sequences`` in a round, for the gather.

    ``positions`` are the sequences' positions in `GenerationRound.unfinished`, and ``old_lengths`` their
    numbers of response tokens before the round. ``replaced_prompts`` maps positions to the token ids of
    prompts that environments replaced. ``routing_shape`` is (layers, experts per token) if the engine records
    the experts of each token, or None.
    """
    # `support` has, for each sampled token, the token ids that the sampling filters (such as top-p) left, and
    # `support_sizes` has their number.
    tokens = array("q")
    log_probs = array("d")
    versions = array("i")
    support_sizes = array("i")
    support = array("i")
    for sequence, start in zip(sequences, old_lengths, strict=True):
        tokens += sequence.tokens[start:]
        log_probs += sequence.log_probs[start:]
        versions += sequence.versions[start:]
        support_sizes += sequence.support_sizes[start:]
        support_start = sum(sequence.support_sizes[:start])
        support += sequence.support[support_start:]

    rows = torch.tensor(positions, dtype=torch.int64)
    new_token_counts = []
    for sequence, start in zip(sequences, old_lengths, strict=True):
        new_token_counts.append(len(sequence.tokens) - start)
    finish_reasons = [sequence.finish_reason for sequence in sequences]
    finish_rounds = [sequence.finish_round for sequence in sequences]
    shard = RowShard(
        rows,
        torch.tensor(new_token_counts, dtype=torch.int64),
        {
            "tokens": _to_tensor(tokens, torch.int64),
            # True for sampled tokens, False for observations of an environment.
            "mask": _to_tensor(versions, torch.int32) != OBSERVED,
            "log_probs": _to_tensor(log_probs, torch.float32),
            "support_sizes": _to_tensor(support_sizes, torch.int32),
        },
        {
            "finish_reason": torch.tensor(finish_reasons, dtype=torch.int64),
            "round": torch.tensor(finish_rounds, dtype=torch.int64),
        },
        {"support_sizes": _to_tensor(support, torch.int32)},
    )

    outcomes = {
        position: sequence.outcome
        for position, sequence in zip(positions, sequences, strict=True)
        if sequence.outcome is not None
    }
    if routing_shape is None:
        return NewTokens(shard, outcomes, replaced_prompts)

    # Report the experts of all tokens, not only of new tokens: an engine records them per request.
    lengths = _make_length_tensor(sequences)
    experts = _concatenate_experts(sequences, lengths, routing_shape)
    expert_shard = RowShard(rows, lengths, {"experts": experts}, {})
    return NewTokens(shard, outcomes, replaced_prompts, expert_shard)


def append_new_tokens(
    sequences: abc.Sequence[Sequence],
    new_tokens: NewTokens,
    version: int,
) -> None:
    """Append the gathered tokens of a generation round to the buffer's ``sequences``.

    ``version`` is the version of the weights that sampled them. ``sequences`` are all sequences in
    `GenerationRound.unfinished`, in order. Only this function changes sequences of the buffer. Every rank
    calls it with the same ``new_tokens``, so the buffer stays equal on all ranks.
    """
    shard = new_tokens.shard
    lengths = shard.lengths
    mask = shard.tokens["mask"]
    token_versions = torch.where(mask, version, OBSERVED).to(torch.int32)

    # Split the per-token values into one slice per sequence. `tokens["support_sizes"]` has, for each token,
    # the number of candidate ids that passed top-k, top-p and min-p. `items["support_sizes"]` has these
    # candidate ids of all tokens, concatenated.
    tokens = split_rows(shard.tokens["tokens"], lengths)
    log_probs = split_rows(shard.tokens["log_probs"].double(), lengths)
    versions = split_rows(token_versions, lengths)
    support_sizes = split_rows(shard.tokens["support_sizes"], lengths)
    support_lengths = _sum_rows(shard.tokens["support_sizes"], lengths)
    supports = split_rows(shard.items["support_sizes"], support_lengths)
    finish_reasons = shard.values["finish_reason"].tolist()
    finish_rounds = shard.values["round"].tolist()
    assert len(tokens) == len(sequences), "one replica must report each unfinished sequence"

    for row, sequence in enumerate(sequences):
        if not sequence.num_sampled_tokens:
            sequence.policy_version = version
        sequence.tokens += _to_array("q", tokens[row])
        sequence.log_probs += _to_array("d", log_probs[row])
        sequence.versions += _to_array("i", versions[row])
        sequence.support_sizes += _to_array("i", support_sizes[row])
        sequence.support += _to_array("i", supports[row])
        sequence.finish_reason = finish_reasons[row]
        sequence.finish_round = finish_rounds[row]

    # Optional values: outcomes and prompts of environments, experts of models with routing replay.
    for position, outcome in new_tokens.outcomes.items():
        sequences[position].outcome = outcome
    for position, prompt in new_tokens.replaced_prompts.items():
        sequences[position].prompt = array("q", prompt)
    if new_tokens.experts is not None:
        expert_shard = new_tokens.experts
        experts_per_sequence = split_rows(expert_shard.tokens["experts"], expert_shard.lengths)
        for sequence, experts in zip(sequences, experts_per_sequence, strict=True):
            sequence.experts = experts


def _needs_logit_rules(sequence: Sequence) -> bool:
    """Return whether a sequence has logit rules or a temperature schedule, which training must reapply."""
    return sequence.sampling.has_rules or sequence.sampling.temperature_tokens > 0


def _make_logit_rules(sequence: Sequence) -> LogitRules | None:
    """Return the rules that training must reapply to a sequence's logits, or None without rules."""
    if not _needs_logit_rules(sequence):
        return None
    turn_starts: tuple[int, ...] = ()
    if sequence.sampling.temperature_tokens:
        turn_starts = _find_turn_starts(sequence)
    return LogitRules(sequence.sampling, len(sequence.prompt), turn_starts)


def _find_turn_starts(sequence: Sequence) -> tuple[int, ...]:
    """Return the index of each policy turn's first token, counted from the start of the prompt."""
    # A turn starts at a sampled token that follows the prompt or an observed token.
    is_sampled = numpy.asarray(sequence.versions) != OBSERVED
    is_first = is_sampled.copy()
    is_first[1:] &= ~is_sampled[:-1]
    response_indices = is_first.nonzero()[0]
    return tuple((response_indices + len(sequence.prompt)).tolist())


def _make_length_tensor(sequences: abc.Sequence[Sequence]) -> Tensor:
    """Return the number of tokens of each sequence, including the prompt: [B] int64."""
    lengths = [len(sequence.prompt) + len(sequence.tokens) for sequence in sequences]
    return torch.tensor(lengths, dtype=torch.int64)


def _find_routing_shape(sequences: abc.Sequence[Sequence]) -> RoutingShape | None:
    """Return (layers, experts per token) of the recorded experts, or None if no sequence has any."""
    for sequence in sequences:
        if sequence.experts is not None:
            _, layers, experts_per_token = sequence.experts.shape
            return layers, experts_per_token
    return None


def _concatenate_experts(
    sequences: abc.Sequence[Sequence],
    lengths: Tensor,
    routing_shape: RoutingShape,
) -> Tensor:
    """Concatenate the experts of all tokens: [N, layers, experts per token] int16, -1 if not recorded.

    ``lengths`` [B] are the sequences' numbers of tokens, prompts included.
    """
    num_tokens = int(lengths.sum())
    experts = torch.full((num_tokens, *routing_shape), -1, dtype=torch.int16)
    # The rows are views of the tensor, so assigning to a row fills the tensor.
    rows = split_rows(experts, lengths)
    for row, sequence in zip(rows, sequences, strict=True):
        if sequence.experts is not None:
            row[: len(sequence.experts)] = sequence.experts
    return experts


def _sum_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of ``values`` [N] over each row of a ragged batch: [B] int64."""
    zero = torch.zeros(1, dtype=torch.int64)
    cumulative = torch.cat([zero, values.long().cumsum(0)])
    row_ends = lengths.cumsum(0)
    row_starts = row_ends - lengths
    return cumulative[row_ends] - cumulative[row_starts]


def _to_tensor(values: array, dtype: torch.dtype) -> Tensor:
    """Return a copy of an array as a tensor."""
    # Not torch.from_numpy: the gather views tensors as bytes, which fails for a tensor that was made from an
    # empty NumPy array.
    return torch.tensor(numpy.asarray(values), dtype=dtype)


def _to_array(type_code: str, values: Tensor) -> array:
    """Return a copy of a tensor as an array, whose ``type_code`` must match the tensor's dtype."""
    result: Any = array(type_code)
    result.frombytes(values.contiguous().numpy().tobytes())
    return result
