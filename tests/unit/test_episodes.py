"""Interrupted responses as pure functions: tokens added, versions kept, groups chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_torch_engine import prompts

from megatron_rl.roles.rollout import rows_of
from megatron_rl.rollout import episodes
from megatron_rl.rollout.episodes import Added, Episodes, choose, is_enough
from megatron_rl.rollout.turns import Row
from megatron_rl.types import FINISH_STOP, UNFINISHED, PromptBatch, SamplingParameters, row_counts, split_rows


def flight_of(*rows: list[int], samples: int = 2, version: int = 4) -> Episodes:
    return episodes.begin(prompts(list(rows)), samples, seed=7, version=version)


def added(flight: Episodes, *rows: Row, turns: int = 1) -> Added:
    """Return what ``rows``, one for each that is open, have beyond the prompt, as a replica would."""
    assert len(rows) == len(flight.open_rows())
    return episodes.added_rows(list(range(len(rows))), rows, [turns] * len(rows))


def row(tokens: list[int], mask: list[bool] | None = None, reason: int = UNFINISHED) -> Row:
    mask = [True] * len(tokens) if mask is None else mask
    values = [-token / 10 if sampled else 0.0 for token, sampled in zip(tokens, mask, strict=True)]
    # The tokens that a multiple of four was drawn from.
    support = [
        [token, 1] if sampled and token % 4 == 0 else [] for token, sampled in zip(tokens, mask, strict=True)
    ]
    return Row([], SamplingParameters(), 0, 0, 99, tokens, mask, values, support, finish_reason=reason)


def test_added_tokens_keep_their_versions_and_the_oldest_counts():
    flight = flight_of([1, 2, 3], [4], samples=2)
    assert flight.open_rows() == [0, 1, 2, 3] and flight.samples == 2
    first = added(flight, row([10, 11]), row([]), row([20], reason=FINISH_STOP), row([30]))
    flight = episodes.extended(flight, first, 4)
    assert flight.open_rows() == [0, 1, 3]
    second = added(flight, row([12]), row([40, 50, 41], [True, False, True]), row([]))
    flight = episodes.extended(flight, second, 6)
    rollouts = flight.rollouts
    assert [row.tolist() for row in split_rows(rollouts.tokens, rollouts.lengths)] == [
        [1, 2, 3, 10, 11, 12], [1, 2, 3, 40, 50, 41], [4, 20], [4, 30]
    ]  # fmt: skip
    assert rollouts.token_versions is not None
    assert [row.tolist() for row in split_rows(rollouts.token_versions, rollouts.lengths)] == [
        [-1, -1, -1, 4, 4, 6], [-1, -1, -1, 6, -1, 6], [-1, 4], [-1, 4]
    ]  # fmt: skip
    assert torch.equal(rollouts.response_mask, rollouts.token_versions >= 0)
    assert rollouts.support_sizes is not None and rollouts.support is not None
    assert [row.tolist() for row in split_rows(rollouts.support_sizes, rollouts.lengths)] == [
        [0, 0, 0, 0, 0, 2], [0, 0, 0, 2, 0, 0], [0, 2], [0, 0]
    ]  # fmt: skip
    assert rollouts.support.tolist() == [12, 1, 40, 1, 20, 1]
    assert not rollouts.rollout_log_probs[~rollouts.response_mask].any()
    assert rollouts.policy_version.tolist() == [4, 6, 4, 4]
    assert rollouts.group.tolist() == [0, 0, 1, 1]
    again = rows_of(flight, [0, 1], max_model_len=8)
    assert [(r.tokens, r.mask, r.room, r.before) for r in again] == [
        ([10, 11, 12], [True] * 3, 5, 3), ([40, 50, 41], [True, False, True], 5, 3)
    ]  # fmt: skip
    assert again[0].log_probs == torch.tensor([-1.0, -1.1, -1.2]).tolist()
    request = again[1].request(0, 9)
    assert (request.tokens, request.limit, request.done) == ([1, 2, 3, 40, 50, 41], 2, 3)
    assert request.seed == int(flight.seeds[1])
    assert episodes.group_ages(flight, 7) == [3, 3]
    last = flight.groups([1])
    assert last.prompts.prompt_ids.tolist() == [1] and last.rollouts.group.tolist() == [0, 0]
    assert torch.equal(last.seeds, flight.seeds[2:])
    both = episodes.join([last, flight_of([5, 6], version=9)])
    assert both.rollouts.group.tolist() == [0, 0, 1, 1]
    assert both.rollouts.policy_version.tolist() == [4, 4, 9, 9]
    assert both.response_tokens() == 2


def test_groups_that_must_come_first_and_the_rest_by_round():
    assert choose([3, 1, 1, None, 2], [False] * 5, 3) == [1, 2, 4]
    assert choose([3, 1, 1, None, 2], [True, False, False, False, False], 2) == [0, 1]
    assert choose([0, 1, 1], [True, True, True], 1) == [0, 1, 2]  # none may wait any longer
    assert not is_enough([True, False], [False, True], 1)
    assert is_enough([True, True], [False, True], 1)


def test_empty_flight_is_carried_without_harm():
    nothing = flight_of([1, 2]).groups([])
    assert len(nothing.prompts) == 0 and nothing.open_rows() == [] and nothing.samples == 0
    assert episodes.join([nothing, flight_of([3])]).rollouts.group.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_lost_and_none_gets_older_than_the_bound(seed: int):
    """Steps with responses of very different lengths, as the sampler takes them, without an engine."""
    source = random.Random(seed)
    wanted, tokens, ahead = source.randint(1, 6), source.randint(1, 4), source.randint(0, 2)
    bound = ahead + source.randint(1, 3)
    total = wanted + source.randint(1, wanted)
    lengths: dict[int, list[int]] = {}
    taken: list[int] = []
    waited = 0
    flight, drawn = flight_of([1]).groups([]), 0
    for version in range(12):
        new = list(range(drawn, drawn + total - len(flight.prompts)))
        drawn += len(new)
        for prompt in new:
            lengths[prompt] = [source.choice([1, 2, 3, 40]) for _ in range(2)]
        fresh = episodes.begin(numbered(new), 2, seed=version, version=version)
        flight = episodes.join([flight, fresh])
        must = episodes.must_end(flight, version, ahead=ahead, bound=bound)
        turns, finished = rounds_of(flight, lengths, must, wanted, tokens, version)
        waited += sum(must)
        chosen = episodes.choose(turns, must, wanted)
        assert len(chosen) == wanted
        given = finished.groups(chosen)
        assert not given.open_rows()
        assert all(age + ahead <= bound for age in episodes.group_ages(given, version))
        taken += given.prompts.prompt_ids.tolist()
        flight = finished.groups([group for group in range(total) if group not in chosen])
    assert sorted([*taken, *flight.prompts.prompt_ids.tolist()]) == list(range(drawn))
    assert waited or bound > ahead + 1


def numbered(ids: list[int]) -> PromptBatch:
    return replace(prompts([[1, 2]] * len(ids)), prompt_ids=torch.tensor(ids, dtype=torch.long))


def rounds_of(
    flight: Episodes,
    lengths: dict[int, list[int]],
    must: Sequence[bool],
    wanted: int,
    tokens: int,
    version: int,
) -> tuple[list[int | None], Episodes]:
    """Let every response grow in rounds to its own length, until enough groups have ended."""
    turns: list[int | None] = [None] * len(flight.prompts)
    rows = [length for prompt in flight.prompts.prompt_ids.tolist() for length in lengths[prompt]]
    turn = 0
    while True:
        going = (flight.rollouts.finish_reason == UNFINISHED).view(-1, 2).any(dim=1).tolist()
        turns = [turn if old is None and not more else old for old, more in zip(turns, going, strict=True)]
        if is_enough([old is not None for old in turns], must, wanted):
            return turns, flight
        turn += 1
        have = row_counts(flight.rollouts.response_mask, flight.rollouts.lengths).tolist()
        grown = [
            row([1] * min(rows[number] - have[number], tokens),
                reason=UNFINISHED if have[number] + tokens < rows[number] else FINISH_STOP)
            for number in flight.open_rows()
        ]  # fmt: skip
        flight = episodes.extended(flight, added(flight, *grown), version)
