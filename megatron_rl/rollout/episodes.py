"""Episodes in flight: begin them, add tokens of newer weights in rounds, choose whole groups.

An episode is one sample of one prompt, and becomes one row for the learner. A step makes a `Sweep` of what is
in flight, has the rollout's ranks add tokens to it (`roles.rollout`), and calls `settle` with their answers.
Letters: P prompts, G samples of each, B = P*G rows; a prompt's G rows are a *group*, complete when all ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.distributed.exchange import RowShard
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.sampling import log_prob_temperature, row_seeds
from megatron_rl.rollout.turns import Row
from megatron_rl.types import (
    UNFINISHED,
    Outcome,
    PromptBatch,
    Rollouts,
    observed_counts,
    row_counts,
    row_index,
    split_rows,
    token_index,
    turn_starts,
)


@dataclass(frozen=True)
class Episodes:
    """Hold P prompts whose episodes were begun, the same value on every rank.

    ``rollouts`` has their P*G rows, grouped by prompt, with ``token_versions``; rows with the finish reason
    ``UNFINISHED`` go on. ``seeds`` [B] int64 are the rows' own, kept until an episode ends.
    """

    prompts: PromptBatch
    rollouts: Rollouts
    seeds: Tensor

    @property
    def samples(self) -> int:
        """Return G, the rows per prompt."""
        return len(self.rollouts) // max(len(self.prompts), 1)

    def groups(self, groups: Sequence[int]) -> Episodes:
        """Return what belongs to the prompts ``groups``, in that order."""
        rows = [group * self.samples + sample for group in groups for sample in range(self.samples)]
        rollouts = self.rollouts.rows(rows)
        rollouts = replace(rollouts, group=torch.arange(len(rows)) // max(self.samples, 1))
        return Episodes(self.prompts.rows(groups), rollouts, self.seeds[rows])

    def open_rows(self) -> list[int]:
        """Return the rows to be continued."""
        return (self.rollouts.finish_reason == UNFINISHED).nonzero()[:, 0].tolist()

    def response_tokens(self) -> int:
        """Return how many tokens were sampled for these prompts."""
        return int(self.rollouts.response_mask.sum())


def begin(prompts: PromptBatch, samples: int, seed: int, version: int) -> Episodes:
    """Return ``samples`` rows per prompt without a token yet; their seeds follow from ``seed``.

    ``temperature`` of a row is the one at which its log-probs hold, see `log_prob_temperature`.
    """
    rows = prompts.repeat(samples)
    count, tokens = len(rows), len(rows.tokens)
    rollouts = Rollouts(
        tokens=rows.tokens,
        lengths=rows.lengths,
        response_mask=torch.zeros(tokens, dtype=torch.bool),
        rollout_log_probs=torch.zeros(tokens),
        group=torch.arange(count) // samples,
        finish_reason=torch.full((count,), UNFINISHED),
        policy_version=torch.full((count,), version),
        temperature=torch.tensor([log_prob_temperature(s) for s in rows.sampling], dtype=torch.float32),
        token_versions=torch.full((tokens,), -1, dtype=torch.int32),
        support_sizes=torch.zeros(tokens, dtype=torch.int32),
        support=torch.zeros(0, dtype=torch.int32),
        max_response_tokens=torch.tensor([s.max_response_tokens for s in rows.sampling], dtype=torch.long),
    )
    return Episodes(prompts, rollouts, torch.tensor(row_seeds(seed, range(count)), dtype=torch.int64))


def join(flights: Sequence[Episodes]) -> Episodes:
    """Return the prompts of all flights, one after the other, with their rows."""
    parts = [flight.rollouts for flight in flights]
    known = next((part.experts for part in parts if part.experts is not None), None)
    if known is not None:
        parts = [replace(part, experts=_experts(part, known.shape[1:])) for part in parts]
    rollouts = Rollouts.concatenate(parts)
    samples = max(flight.samples for flight in flights)
    return Episodes(
        PromptBatch.concatenate([flight.prompts for flight in flights]),
        replace(rollouts, group=torch.arange(len(rollouts)) // max(samples, 1)),
        torch.cat([flight.seeds for flight in flights]),
    )


def _experts(rollouts: Rollouts, shape: Sequence[int]) -> Tensor:
    """Return the rows' experts, unknown ones [N, *shape] where they have none."""
    unknown = torch.full((len(rollouts.tokens), *shape), -1, dtype=torch.int16)
    return unknown if rollouts.experts is None else rollouts.experts


def extended(flight: Episodes, added: Added, version: int) -> Episodes:
    """Append what was added to each of ``flight.open_rows()``, sampled by weights of ``version``.

    ``policy_version`` becomes each row's oldest version.
    """
    before, shard = flight.rollouts, added.shard
    if added.prompts:
        before = _opened(before, {flight.open_rows()[index]: ids for index, ids in added.prompts.items()})
    assert before.token_versions is not None
    assert before.support is not None and before.support_sizes is not None
    rows = torch.tensor(flight.open_rows(), dtype=torch.long)
    counts = torch.zeros_like(before.lengths).index_copy_(0, rows, shard.lengths)
    lengths = before.lengths + counts
    start = lengths.cumsum(0) - lengths
    old = _places(before.lengths, start)
    new = _places(counts, start + before.lengths)

    def merged(kept: Tensor, more: Tensor) -> Tensor:
        result = torch.empty(len(old) + len(new), dtype=kept.dtype)
        result[old], result[new] = kept, more.to(kept.dtype)
        return result

    sizes = torch.cat([before.support_sizes, shard.tokens["support_sizes"]])
    order = merged(torch.arange(len(old)), len(old) + torch.arange(len(new)))
    support = torch.cat([before.support, shard.items["support_sizes"]])[token_index(sizes, order)]
    sampled = shard.tokens["mask"]
    versions = merged(before.token_versions, torch.where(sampled, version, -1))
    mask = merged(before.response_mask, sampled)
    experts = None
    if added.experts is not None:
        latest = added.experts.tokens["experts"]
        experts = torch.full((len(old) + len(new), *latest.shape[1:]), -1, dtype=latest.dtype)
        experts[old] = _experts(before, latest.shape[1:])
        experts[token_index(lengths, rows)] = latest
    outcomes = before.outcomes
    if added.outcomes:
        known = {int(rows[index]): outcome for index, outcome in added.outcomes.items()}
        earlier = outcomes or (None,) * len(lengths)
        outcomes = tuple(known.get(row, outcome) for row, outcome in enumerate(earlier))
    rollouts = replace(
        before,
        tokens=merged(before.tokens, shard.tokens["tokens"]),
        response_mask=mask,
        rollout_log_probs=merged(before.rollout_log_probs, shard.tokens["log_probs"]),
        support_sizes=sizes[order],
        support=support,
        experts=experts,
        token_versions=versions,
        lengths=lengths,
        finish_reason=before.finish_reason.index_copy(0, rows, shard.values["finish_reason"]),
        policy_version=oldest_versions(versions, mask, lengths, version),
        outcomes=outcomes,
    )
    return replace(flight, rollouts=rollouts)


def _opened(rollouts: Rollouts, prompts: Mapping[int, Sequence[int]]) -> Rollouts:
    """Return the rows with other ``prompts``, of rows that have nothing else."""
    lengths = rollouts.lengths.clone()
    for row, tokens in prompts.items():
        lengths[row] = len(tokens)

    def with_prompts(values: Tensor | None, filler: int) -> Tensor | None:
        if values is None:
            return None
        rows = list(split_rows(values, rollouts.lengths))
        for row, tokens in prompts.items():
            rows[row] = torch.full((len(tokens), *values.shape[1:]), filler, dtype=values.dtype)
            if values is rollouts.tokens:
                rows[row] = torch.tensor(tokens, dtype=values.dtype)
        return torch.cat(rows)

    fillers = {"token_versions": -1, "experts": -1}
    fields = {
        name: with_prompts(getattr(rollouts, name), fillers.get(name, 0)) for name in rollouts.TOKEN_FIELDS
    }
    return replace(rollouts, lengths=lengths, **fields)  # pyright: ignore[reportArgumentType]


def _places(counts: Tensor, start: Tensor) -> Tensor:
    """Return where ragged rows of ``counts`` tokens lie when row r begins at ``start[r]``."""
    shift = start - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift[row_index(counts)]


def oldest_versions(versions: Tensor, mask: Tensor, lengths: Tensor, default: int) -> Tensor:
    """Return the smallest of each row's response tokens' ``versions`` [N], at most ``default``: [B] int64."""
    oldest = torch.full((len(lengths),), default, dtype=torch.int64)
    return oldest.scatter_reduce(0, row_index(lengths)[mask], versions[mask].long(), "amin")


def group_ages(flight: Episodes, version: int) -> list[int]:
    """Return for each group how many updates older than ``version`` its oldest token is."""
    oldest = flight.rollouts.policy_version.view(len(flight.prompts), -1).amin(dim=1)
    return (version - oldest).tolist()


def must_end(flight: Episodes, version: int, *, ahead: int, bound: int) -> tuple[bool, ...]:
    """Say which groups a learner could not take any more after one more step of waiting.

    What weights of ``version`` complete now is learned from when they are ``ahead`` updates older; one step
    later every token is one more, and more than ``bound`` is too old.
    """
    return tuple(age + ahead + 1 > bound for age in group_ages(flight, version))


@dataclass(frozen=True)
class Sweep:
    """Say what one step continues: the open rows of ``flight``, by weights of ``version``.

    It ends when ``wanted`` groups are complete, and with them all that ``must``; which are, is looked at
    after every ``tokens`` sampled tokens of a row, None for a sweep that ends with its last row. An open
    sweep ends by the clock, at the `Rendezvous` of this number.
    """

    flight: Episodes
    must: tuple[bool, ...]
    wanted: int
    version: int
    tokens: int | None = None
    rendezvous: int | None = None


def is_enough(ended: Iterable[bool], must: Sequence[bool], wanted: int) -> bool:
    """Say whether ``wanted`` groups have ended, and every group that ``must``.

    Example:
        >>> is_enough([True, True, False], [False, False, True], 2)
        False
    """
    ended = list(ended)
    return sum(ended) >= wanted and all(done for done, now in zip(ended, must, strict=True) if now)


def choose(rounds: Sequence[int | None], must: Sequence[bool], wanted: int) -> list[int]:
    """Return the groups to give to the learner, in order: all that ``must``, then those that ended first.

    ``rounds`` says in which round each group ended (None: not yet); ties go to the group begun earlier. More
    than ``wanted`` come back only where more must.

    Example:
        >>> choose([2, None, 1, 1], [True, False, False, False], 2)
        [0, 2]
    """
    ended = [(not must[group], turn, group) for group, turn in enumerate(rounds) if turn is not None]
    return sorted(group for _, _, group in sorted(ended)[: max(wanted, sum(must))])


class Added(NamedTuple):
    """Hold what a replica added to the rows that it continued.

    ``shard`` has their tokens with ``mask`` and ``log_probs``, and of each row the ``finish_reason`` and the
    ``round`` in which it ended; ``outcomes`` what environments made of those that ended, by row, and
    ``prompts`` the tokens that they began with in place of the record's. ``experts`` has those of the whole
    rows, prompts and all. ``sampled_again`` counts requests whose server was lost.
    """

    shard: RowShard
    outcomes: dict[int, Outcome]
    prompts: dict[int, list[int]]
    experts: RowShard | None = None
    sampled_again: int = 0


def added_rows(
    numbers: list[int],
    rows: Sequence[Row],
    rounds: Sequence[int],
    records: tuple[int, int] | None = None,
) -> Added:
    """Return what was added to ``rows``, which ended in ``rounds``, under their numbers in the sweep.

    ``records`` are the layers, and experts per token, of an engine that says which these were.
    """

    def added(name: str) -> list:
        return [value for row in rows for value in getattr(row, name)[row.before :]]

    support = added("support")
    shard = RowShard(
        torch.tensor(numbers, dtype=torch.long),
        torch.tensor([len(row.tokens) - row.before for row in rows], dtype=torch.long),
        {
            "tokens": torch.tensor(added("tokens"), dtype=torch.long),
            "mask": torch.tensor(added("mask"), dtype=torch.bool),
            "log_probs": torch.tensor(added("log_probs"), dtype=torch.float32),
            "support_sizes": torch.tensor([len(kept) for kept in support], dtype=torch.int32),
        },
        {
            "finish_reason": torch.tensor([row.finish_reason for row in rows], dtype=torch.long),
            "round": torch.tensor(rounds, dtype=torch.long),
        },
        {"support_sizes": torch.tensor([token for kept in support for token in kept], dtype=torch.int32)},
    )
    outcomes = {n: row.outcome for n, row in zip(numbers, rows, strict=True) if row.outcome is not None}
    prompts = {n: row.prompt for n, row in zip(numbers, rows, strict=True) if row.opened and not row.before}
    if records is None:
        return Added(shard, outcomes, prompts)
    lengths = [len(row.prompt) + len(row.tokens) for row in rows]
    experts = torch.full((sum(lengths), *records), -1, dtype=torch.int16)
    for values, row in zip(experts.split(lengths), rows, strict=True):
        if row.experts is not None:
            values[: len(row.experts)] = row.experts
    whole = RowShard(shard.rows, torch.tensor(lengths, dtype=torch.long), {"experts": experts}, {})
    return Added(shard, outcomes, prompts, whole)


class Settled(NamedTuple):
    """Hold a sweep's ``flight`` after it: ``taken`` groups go to the learner, ``left`` ones go on.

    Of the ``untouched`` groups no row has a token or has ended.
    """

    flight: Episodes
    taken: list[int]
    left: list[int]
    untouched: list[int]


def settle(sweep: Sweep, added: Added) -> Settled:
    """Return what becomes of the sweep's groups, from all that was added."""
    flight = extended(sweep.flight, added, sweep.version)
    groups, samples = len(flight.prompts), max(flight.samples, 1)
    rounds = torch.zeros(len(flight.rollouts), dtype=torch.long)
    rounds[sweep.flight.open_rows()] = added.shard.values["round"]
    last = rounds.view(groups, samples).amax(dim=1).tolist()
    going = (flight.rollouts.finish_reason == UNFINISHED).view(groups, samples)
    ended = [None if is_open else turn for turn, is_open in zip(last, going.any(dim=1).tolist(), strict=True)]
    taken = choose(ended, sweep.must, sweep.wanted)
    tokens = row_counts(flight.rollouts.response_mask, flight.rollouts.lengths).view(groups, samples)
    begun = ((tokens > 0) | ~going).any(dim=1).tolist()
    rest = sorted(set(range(groups)) - set(taken))
    return Settled(flight, taken, [g for g in rest if begun[g]], [g for g in rest if not begun[g]])


def conversation_metrics(rollouts: Rollouts) -> Metrics:
    """Return the turns of rows that are conversations, what was observed in them, and how they failed."""
    if rollouts.outcomes is None:
        return Metrics()
    rows = float(len(rollouts))
    metrics = Metrics.mean("environment/turns", float(turn_starts(rollouts).sum()), rows)
    metrics += Metrics.mean("environment/observed_tokens", float(observed_counts(rollouts).sum()), rows)
    failures = Counter(outcome.failure for outcome in rollouts.outcomes if outcome and outcome.failure)
    metrics += Metrics.mean("environment/failed", float(failures.total()), rows)
    for reason, count in failures.items():
        metrics += Metrics.mean(f"environment/failed_{reason}", float(count), rows)
    return metrics
