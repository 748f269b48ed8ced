"""Interrupted responses as pure functions: tokens added, versions kept, groups chosen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_torch_engine import prompts

from megatron_rl.parallel.exchange import RowShard
from megatron_rl.rollout import partial
from megatron_rl.rollout.partial import InFlight, choose, is_enough
from megatron_rl.rollout.sampling import Response
from megatron_rl.types import FINISH_STOP, UNFINISHED, PromptBatch, row_counts, split_rows


def flight_of(*rows: list[int], samples: int = 2, version: int = 4) -> InFlight:
    return partial.begin(prompts(list(rows)), samples, seed=7, version=version)


def grown(tokens: list[int], values: list[float], support: list[list[int]] | tuple[()] = ()) -> RowShard:
    """Return tokens of all rows in the form that they are gathered in."""
    return partial.added_rows([0], [Response(tokens, values, UNFINISHED, support)], [0])


def test_added_tokens_keep_their_versions_and_the_oldest_counts():
    flight = flight_of([1, 2, 3], [4], samples=2)
    assert flight.open_rows() == [0, 1, 2, 3] and flight.samples == 2
    reasons = torch.tensor([UNFINISHED, UNFINISHED, FINISH_STOP, UNFINISHED])
    more = grown([10, 11, 20, 30], [-1.0, -1.1, -2.0, -3.0], [[10, 1], [11], [], [3, 30]])
    first = partial.extended(flight, torch.tensor([2, 0, 1, 1]), more, reasons, 4)
    assert first.open_rows() == [0, 1, 3]
    more = grown([12, 40, 41], [-1.2, -4.0, -4.1], [[12], [], [41, 5]])
    second = partial.extended(first, torch.tensor([1, 2, 0, 0]), more, reasons, 6)
    rollouts = second.rollouts
    assert rollouts.support_sizes is not None and rollouts.support is not None
    assert [row.tolist() for row in split_rows(rollouts.support_sizes, rollouts.lengths)] == [
        [0, 0, 0, 2, 1, 1], [0, 0, 0, 0, 2], [0, 0], [0, 2]
    ]  # fmt: skip
    assert rollouts.support.tolist() == [10, 1, 11, 12, 41, 5, 3, 30]
    assert [row.tolist() for row in split_rows(rollouts.tokens, rollouts.lengths)] == [
        [1, 2, 3, 10, 11, 12], [1, 2, 3, 40, 41], [4, 20], [4, 30]
    ]  # fmt: skip
    assert rollouts.token_versions is not None
    assert [row.tolist() for row in split_rows(rollouts.token_versions, rollouts.lengths)] == [
        [-1, -1, -1, 4, 4, 6], [-1, -1, -1, 6, 6], [-1, 4], [-1, 4]
    ]  # fmt: skip
    assert rollouts.policy_version.tolist() == [4, 6, 4, 4]
    assert rollouts.group.tolist() == [0, 0, 1, 1]
    assert second.responses([0, 3]) == [
        Response([10, 11, 12], torch.tensor([-1.0, -1.1, -1.2]).tolist(), UNFINISHED),
        Response([30], [-3.0], UNFINISHED),
    ]
    assert partial.group_ages(second, 7) == [3, 3]
    last = second.groups([1])
    assert last.prompts.prompt_ids.tolist() == [1] and last.rollouts.group.tolist() == [0, 0]
    assert torch.equal(last.seeds, second.seeds[2:])
    both = partial.join([last, flight_of([5, 6], version=9)])
    assert both.rollouts.group.tolist() == [0, 0, 1, 1] and both.rollouts.policy_version.tolist() == [
        4,
        4,
        9,
        9,
    ]
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
    assert partial.join([nothing, flight_of([3])]).rollouts.group.tolist() == [0, 0]


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
        fresh = partial.begin(numbered(new), 2, seed=version, version=version)
        flight = partial.join([flight, fresh])
        must = partial.must_end(flight, version, ahead=ahead, bound=bound)
        turns, finished = rounds_of(flight, lengths, must, wanted, tokens, version)
        waited += sum(must)
        chosen = partial.choose(turns, must, wanted)
        assert len(chosen) == wanted
        given = finished.groups(chosen)
        assert not given.open_rows()
        assert all(age + ahead <= bound for age in partial.group_ages(given, version))
        taken += given.prompts.prompt_ids.tolist()
        flight = finished.groups([group for group in range(total) if group not in chosen])
    assert sorted([*taken, *flight.prompts.prompt_ids.tolist()]) == list(range(drawn))
    assert waited or bound > ahead + 1


def numbered(ids: list[int]) -> PromptBatch:
    return replace(prompts([[1, 2]] * len(ids)), prompt_ids=torch.tensor(ids, dtype=torch.long))


def rounds_of(
    flight: InFlight,
    lengths: dict[int, list[int]],
    must: Sequence[bool],
    wanted: int,
    tokens: int,
    version: int,
) -> tuple[list[int | None], InFlight]:
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
        have = row_counts(flight.rollouts.response_mask, flight.rollouts.lengths)
        added = torch.minimum(torch.tensor(rows) - have, torch.tensor(tokens))
        reasons = torch.where(have + added < torch.tensor(rows), UNFINISHED, FINISH_STOP)
        count = int(added.sum())
        flight = partial.extended(flight, added, grown([1] * count, [0.0] * count), reasons, version)
