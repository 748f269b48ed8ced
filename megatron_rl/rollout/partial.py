"""Responses in flight, as pure functions: begin them, add tokens of newer weights, choose whole groups.

Letters: P prompts, G samples of each, B = P*G rows; a prompt's G rows are a *group*, complete when all ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.rollout.sampling import NOTHING, Response, row_seeds, to_rollouts
from megatron_rl.types import UNFINISHED, PromptBatch, Rollouts, row_counts, row_index, split_rows


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
        tokens, values = (
            split_rows(chosen.tokens[mask], counts),
            split_rows(chosen.rollout_log_probs[mask], counts),
        )
        return [
            Response(part.tolist(), value.tolist(), reason)
            for part, value, reason in zip(tokens, values, chosen.finish_reason.tolist(), strict=True)
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


def join(parts: Sequence[InFlight]) -> InFlight:
    """Return the prompts of all parts, one after the other, with their rows."""
    rollouts = Rollouts.concatenate([part.rollouts for part in parts])
    samples = max(part.samples for part in parts)
    return InFlight(
        PromptBatch.concatenate([part.prompts for part in parts]),
        replace(rollouts, group=torch.arange(len(rollouts)) // max(samples, 1)),
        torch.cat([part.seeds for part in parts]),
    )


def extended(
    flight: InFlight, added: Tensor, tokens: Tensor, log_probs: Tensor, finish_reason: Tensor, version: int
) -> InFlight:
    """Append tokens that weights of ``version`` sampled.

    ``added`` [B] int64 says how many each row gets; ``tokens`` and ``log_probs`` have them row after row;
    ``finish_reason`` [B] replaces the old. ``policy_version`` becomes each row's oldest version.
    """
    before = flight.rollouts
    assert before.token_versions is not None
    lengths = before.lengths + added
    start = lengths.cumsum(0) - lengths
    old = _places(before.lengths, start)
    new = _places(added, start + before.lengths)

    def merged(kept: Tensor, more: Tensor) -> Tensor:
        result = torch.empty(len(old) + len(new), dtype=kept.dtype)
        result[old], result[new] = kept, more.to(kept.dtype)
        return result

    versions = merged(before.token_versions, torch.full((len(new),), version))
    mask = merged(before.response_mask, torch.ones(len(new), dtype=torch.bool))
    return replace(
        flight,
        rollouts=replace(
            before,
            tokens=merged(before.tokens, tokens),
            response_mask=mask,
            rollout_log_probs=merged(before.rollout_log_probs, log_probs),
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
