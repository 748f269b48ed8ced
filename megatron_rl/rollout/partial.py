"""Responses in flight: begin them, add tokens of newer weights in rounds, choose whole groups.

A step makes a `Sweep` of what is in flight, has `sample_rounds` add tokens on the rollout's ranks, and calls
`settle` with what they answered. Letters: P prompts, G samples of each, B = P*G rows; a prompt's G rows are a
*group*, complete when all ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.parallel.exchange import Members, RowShard
from megatron_rl.rollout.engine import Sampler
from megatron_rl.rollout.sampling import NOTHING, Response, row_seeds, support_sizes, to_rollouts
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import (
    UNFINISHED,
    PromptBatch,
    Rollouts,
    row_counts,
    row_index,
    split_rows,
    token_index,
)


@dataclass(frozen=True)
class InFlight:
    """Hold P prompts whose responses were begun, the same value on every rank.

    ``rollouts`` has their P*G rows, grouped by prompt, with ``token_versions``; rows with the finish reason
    ``UNFINISHED`` go on. ``seeds`` [B] int64 are the rows' own, kept until a response ends.
    """

    prompts: PromptBatch
    rollouts: Rollouts
    seeds: Tensor

    @property
    def samples(self) -> int:
        """Return G, the rows per prompt."""
        return len(self.rollouts) // max(len(self.prompts), 1)

    def groups(self, groups: Sequence[int]) -> InFlight:
        """Return what belongs to the prompts ``groups``, in that order."""
        rows = [group * self.samples + sample for group in groups for sample in range(self.samples)]
        rollouts = self.rollouts.rows(rows)
        rollouts = replace(rollouts, group=torch.arange(len(rows)) // max(self.samples, 1))
        return InFlight(self.prompts.rows(groups), rollouts, self.seeds[rows])

    def open_rows(self) -> list[int]:
        """Return the rows to be continued."""
        return (self.rollouts.finish_reason == UNFINISHED).nonzero()[:, 0].tolist()

    def responses(self, rows: Sequence[int]) -> list[Response]:
        """Return the responses of ``rows`` so far."""
        chosen = self.rollouts.rows(rows)
        mask = chosen.response_mask
        counts = row_counts(mask, chosen.lengths)
        tokens = split_rows(chosen.tokens[mask], counts)
        log_probs = split_rows(chosen.rollout_log_probs[mask], counts)
        reasons = chosen.finish_reason.tolist()
        return [
            Response(row_tokens.tolist(), row_log_probs.tolist(), reason)
            for row_tokens, row_log_probs, reason in zip(tokens, log_probs, reasons, strict=True)
        ]

    def response_tokens(self) -> int:
        """Return how many tokens were sampled for these prompts."""
        return int(self.rollouts.response_mask.sum())


def begin(prompts: PromptBatch, samples: int, seed: int, version: int) -> InFlight:
    """Return ``samples`` rows per prompt without a token yet; their seeds follow from ``seed``."""
    rows = prompts.repeat(samples)
    rollouts = to_rollouts(rows, [NOTHING] * len(rows), version)
    versions = torch.full((len(rollouts.tokens),), -1, dtype=torch.int32)
    rollouts = replace(rollouts, group=torch.arange(len(rows)) // samples, token_versions=versions)
    return InFlight(prompts, rollouts, torch.tensor(row_seeds(seed, range(len(rows))), dtype=torch.int64))


def join(flights: Sequence[InFlight]) -> InFlight:
    """Return the prompts of all flights, one after the other, with their rows."""
    rollouts = Rollouts.concatenate([flight.rollouts for flight in flights])
    samples = max(flight.samples for flight in flights)
    return InFlight(
        PromptBatch.concatenate([flight.prompts for flight in flights]),
        replace(rollouts, group=torch.arange(len(rollouts)) // max(samples, 1)),
        torch.cat([flight.seeds for flight in flights]),
    )


def extended(
    flight: InFlight, added: Tensor, more: RowShard, finish_reason: Tensor, version: int
) -> InFlight:
    """Append tokens that weights of ``version`` sampled.

    ``added`` [B] int64 says how many each row gets; ``more`` has them row after row, as `added_rows` does;
    ``finish_reason`` [B] replaces the old. ``policy_version`` becomes each row's oldest version.
    """
    before = flight.rollouts
    assert before.token_versions is not None
    assert before.support is not None and before.support_sizes is not None
    lengths = before.lengths + added
    start = lengths.cumsum(0) - lengths
    old = _places(before.lengths, start)
    new = _places(added, start + before.lengths)

    def merged(kept: Tensor, more: Tensor) -> Tensor:
        result = torch.empty(len(old) + len(new), dtype=kept.dtype)
        result[old], result[new] = kept, more.to(kept.dtype)
        return result

    sizes = torch.cat([before.support_sizes, more.tokens["support_sizes"]])
    order = merged(torch.arange(len(old)), len(old) + torch.arange(len(new)))
    support = torch.cat([before.support, more.items["support_sizes"]])[token_index(sizes, order)]

    versions = merged(before.token_versions, torch.full((len(new),), version))
    mask = merged(before.response_mask, torch.ones(len(new), dtype=torch.bool))
    return replace(
        flight,
        rollouts=replace(
            before,
            tokens=merged(before.tokens, more.tokens["tokens"]),
            response_mask=mask,
            rollout_log_probs=merged(before.rollout_log_probs, more.tokens["log_probs"]),
            support_sizes=sizes[order],
            support=support,
            token_versions=versions,
            lengths=lengths,
            finish_reason=finish_reason,
            policy_version=oldest_versions(versions, mask, lengths, version),
        ),
    )


def _places(counts: Tensor, start: Tensor) -> Tensor:
    """Return where ragged rows of ``counts`` tokens lie when row r begins at ``start[r]``."""
    shift = start - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + shift[row_index(counts)]


def oldest_versions(versions: Tensor, mask: Tensor, lengths: Tensor, default: int) -> Tensor:
    """Return the smallest of each row's response tokens' ``versions`` [N], at most ``default``: [B] int64."""
    oldest = torch.full((len(lengths),), default, dtype=torch.int64)
    return oldest.scatter_reduce(0, row_index(lengths)[mask], versions[mask].long(), "amin")


def group_ages(flight: InFlight, version: int) -> list[int]:
    """Return for each group how many updates older than ``version`` its oldest token is."""
    oldest = flight.rollouts.policy_version.view(len(flight.prompts), -1).amin(dim=1)
    return (version - oldest).tolist()


def must_end(flight: InFlight, version: int, *, ahead: int, bound: int) -> tuple[bool, ...]:
    """Say which groups a learner could not take any more after one more step of waiting.

    What weights of ``version`` complete now is learned from when they are ``ahead`` updates older; one step
    later every token is one more, and more than ``bound`` is too old.
    """
    return tuple(age + ahead + 1 > bound for age in group_ages(flight, version))


@dataclass(frozen=True)
class Sweep:
    """Say what one step continues: the open rows of ``flight``, by weights of ``version``.

    It ends when ``wanted`` groups are complete, and with them all that ``must``.
    """

    flight: InFlight
    must: tuple[bool, ...]
    wanted: int
    version: int


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


def sample_rounds(engine: Sampler, layout: ParallelLayout, rank: int, sweep: Sweep, tokens: int) -> RowShard:
    """Continue open rows in rounds of ``tokens`` tokens each until the sweep's groups have ended.

    Row i of the answer is what was added to ``flight.open_rows()[i]``: ``tokens``, ``log_probs``,
    ``finish_reason`` and ``turn``, the round in which the row ended. Which groups end in a round depends on
    how long their responses are, not on time, ranks or replicas; the groups are dealt out to the replicas of
    ``layout``. Collective over its ranks, whose communicator must exist.
    """
    flight, members = sweep.flight, Members(layout.ranks)
    replica, samples = layout.coordinates(rank), flight.samples
    rows = flight.open_rows()
    groups = sorted({row // samples for row in rows})
    dealt = set(groups[replica.data :: layout.data])
    mine = [index for index, row in enumerate(rows) if row // samples in dealt]
    work = _Work(engine, flight, [rows[index] for index in mine])
    turns: dict[int, int] = {}
    turn = 0
    while not is_enough(_ended(flight, rows, turns), sweep.must, sweep.wanted):
        turn += 1
        ended = [mine[position] for position in work.advance(tokens)]
        for indices in members.gather_objects(ended if replica.tensor == 0 else []):
            turns |= dict.fromkeys(indices, turn)
    if replica.tensor:
        return added_rows([], [], [])
    return added_rows(mine, work.added, [turns.get(index, 0) for index in mine])


class _Work:
    """Hold the rows that one replica continues."""

    def __init__(self, engine: Sampler, flight: InFlight, rows: list[int]) -> None:
        self._engine = engine
        self._prompts = flight.prompts.rows([row // flight.samples for row in rows])
        self._seeds = flight.seeds[rows].tolist()
        self._begun = flight.responses(rows)
        self.added = [NOTHING] * len(rows)

    def advance(self, tokens: int) -> list[int]:
        """Add up to ``tokens`` tokens to each row that goes on; return the rows that ended."""
        going = [row for row, added in enumerate(self.added) if added.finish_reason == UNFINISHED]
        begun = [_longer(self._begun[row], self.added[row]) for row in going]
        seeds = [self._seeds[row] for row in going]
        responses = self._engine.advance(self._prompts.rows(going), begun, seeds=seeds, tokens=tokens)
        for row, response in zip(going, responses, strict=True):
            self.added[row] = _longer(self.added[row], response)
        return [row for row in going if self.added[row].finish_reason != UNFINISHED]


def _longer(before: Response, more: Response) -> Response:
    return Response(
        [*before.tokens, *more.tokens],
        [*before.log_probs, *more.log_probs],
        more.finish_reason,
        [*before.support, *more.support],
    )


def _ended(flight: InFlight, rows: list[int], turns: dict[int, int]) -> list[bool]:
    """Say of each group whether all its rows ended; ``turns`` knows those of ``rows`` that did."""
    ended = [True] * len(flight.prompts)
    for index, row in enumerate(rows):
        if index not in turns:
            ended[row // flight.samples] = False
    return ended


def added_rows(rows: list[int], added: Sequence[Response], turns: Sequence[int]) -> RowShard:
    """Return what was ``added`` to ``rows`` and in which turn they ended, in the form that is gathered."""
    tokens = [token for response in added for token in response.tokens]
    log_probs = [value for response in added for value in response.log_probs]
    support = [token for response in added for kept in response.support for token in kept]
    sizes = [torch.zeros(0, dtype=torch.int32), *map(support_sizes, added)]
    return RowShard(
        torch.tensor(rows, dtype=torch.long),
        torch.tensor([len(response.tokens) for response in added], dtype=torch.long),
        {
            "tokens": torch.tensor(tokens, dtype=torch.long),
            "log_probs": torch.tensor(log_probs),
            "support_sizes": torch.cat(sizes),
        },
        {
            "finish_reason": torch.tensor([response.finish_reason for response in added], dtype=torch.long),
            "turn": torch.tensor(turns, dtype=torch.long),
        },
        {"support_sizes": torch.tensor(support, dtype=torch.int32)},
    )


def settle(sweep: Sweep, added: RowShard) -> tuple[InFlight, InFlight]:
    """Return the groups that the learner takes and those that are left, from the gathered ``added`` rows."""
    before = sweep.flight
    rows = torch.tensor(before.open_rows(), dtype=torch.long)

    def of_all_rows(values: Tensor, others: Tensor) -> Tensor:
        return others.clone().index_copy_(0, rows, values)

    zeros = torch.zeros(len(before.rollouts), dtype=torch.long)
    reasons = of_all_rows(added.values["finish_reason"], before.rollouts.finish_reason)
    counts, turns = of_all_rows(added.lengths, zeros), of_all_rows(added.values["turn"], zeros)
    flight = extended(before, counts, added, reasons, sweep.version)
    groups = len(flight.prompts)
    last = turns.view(groups, -1).amax(dim=1).tolist()
    open_groups = (reasons == UNFINISHED).view(groups, -1).any(dim=1).tolist()
    ended = [None if is_open else turn for turn, is_open in zip(last, open_groups, strict=True)]
    taken = choose(ended, sweep.must, sweep.wanted)
    left = sorted(set(range(groups)) - set(taken))
    return flight.groups(taken), flight.groups(left)
