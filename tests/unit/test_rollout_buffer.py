"""The buffer of sequences between steps: tokens appended, versions kept, groups selected, a checkpoint."""

from __future__ import annotations

import random
from array import array
from collections import abc
from dataclasses import replace

import pytest
import torch
from test_torch_engine import prompts

from megatron_rl.rewards.worker import Answer
from megatron_rl.rollout.buffer import RolloutBuffer, merge_early_rewards, select_groups
from megatron_rl.rollout.collate import append_new_tokens, collect_new_tokens, to_prompts, to_rollouts
from megatron_rl.rollout.scheduler import ReplicaQueue, ReplicaScheduler, enough_groups_finished
from megatron_rl.rollout.types import OBSERVED, Sequence, SequenceGroup
from megatron_rl.types import FINISH_STOP, UNFINISHED, Outcome, PromptBatch, SamplingParameters, split_rows
from tests.sampling import engine_of, round_of, started, unfinished


def groups_of(*rows: list[int], samples: int = 2, version: int = 4) -> list[SequenceGroup]:
    return started(prompts(list(rows)), samples, seed=7, version=version)


def sampled(tokens: list[int], observed: abc.Sequence[int] = (), reason: int = UNFINISHED) -> Sequence:
    """Return a sequence with these tokens; the policy did not sample those at the positions ``observed``."""
    sequence = Sequence(array("q"), SamplingParameters(), seed=0, policy_version=0, finish_reason=reason)
    for position, token in enumerate(tokens):
        is_observed = position in observed
        sequence.tokens.append(token)
        sequence.log_probs.append(0.0 if is_observed else -token / 10)
        sequence.versions.append(OBSERVED if is_observed else 0)
        # The tokens that a multiple of four was drawn from.
        support = [token, 1] if token % 4 == 0 and not is_observed else []
        sequence.support_sizes.append(len(support))
        sequence.support.extend(support)
    return sequence


def append(groups: list[SequenceGroup], version: int, *rows: Sequence, token_round: int = 1) -> None:
    """Append the tokens of ``rows``, one for each unfinished sequence, as a replica would report them."""
    targets = unfinished(groups)
    assert len(rows) == len(targets)
    for row in rows:
        row.finish_round = token_round
    new = collect_new_tokens(list(range(len(rows))), rows, [0] * len(rows), {}, None)
    append_new_tokens(targets, new, version)


def test_appended_tokens_keep_their_versions_and_the_oldest_counts():
    groups = groups_of([1, 2, 3], [4], samples=2)
    assert len(unfinished(groups)) == 4
    append(groups, 4, sampled([10, 11]), sampled([]), sampled([20], reason=FINISH_STOP), sampled([30]))
    assert len(unfinished(groups)) == 3
    append(groups, 6, sampled([12]), sampled([40, 50, 41], observed=[1]), sampled([]))

    rollouts = to_rollouts(groups)
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
    assert [group.compute_age(7) for group in groups] == [3, 3]
    assert sum(group.num_sampled_tokens for group in groups) == 7


def test_an_admitted_sequence_is_a_copy_whose_request_goes_on_behind_its_tokens():
    groups = groups_of([1, 2, 3], samples=2)
    append(groups, 4, sampled([10, 11, 12]), sampled([40, 50, 41], observed=[1]))
    queue = ReplicaQueue(round_of(groups, 6), 2, 8)
    scheduler = ReplicaScheduler(engine_of(lambda *_: torch.zeros(2, 9), max_model_len=8), queue)
    scheduler.admit_sequences(0)
    assert [(one.position, one.start) for one in scheduler.admitted] == [(0, 3), (1, 3)]
    request = scheduler.make_request(1, 9)
    assert (request.tokens, request.limit, request.done) == ([1, 2, 3, 40, 50, 41], 2, 3)
    assert request.seed == unfinished(groups)[1].seed
    scheduler.admitted[0].sequence.append_observed([5])
    assert unfinished(groups)[0].tokens.tolist() == [10, 11, 12]
    assert scheduler.report_new_tokens(None).shard.lengths.tolist() == [1, 0]
    (nothing,) = scheduler.report_new_tokens(None).shard.items.values()
    assert len(nothing.view(torch.uint8)) == 0, "ranks exchange bytes, also where there are none"


def test_required_groups_come_first_and_the_rest_by_token_round():
    assert select_groups([3, 1, 1, None, 2], [False] * 5, 3) == [1, 2, 4]
    assert select_groups([3, 1, 1, None, 2], [True, False, False, False, False], 2) == [0, 1]
    assert select_groups([0, 1, 1], [True, True, True], 1) == [0, 1, 2]  # none may wait any longer
    assert not enough_groups_finished([True, False], [False, True], 1)
    assert enough_groups_finished([True, True], [False, True], 1)


def test_prompts_of_unstarted_and_dropped_groups_wait_in_front_of_the_others():
    buffer = RolloutBuffer()
    buffer.restart(groups_of([9]))
    buffer.add_started(groups_of([1], [2], [3], samples=1))
    append(buffer.started, 4, sampled([10], reason=FINISH_STOP), sampled([]), sampled([30]))
    assert (len(buffer.finished), len(buffer.running), len(buffer.waiting)) == (1, 2, 1)
    (selected,) = buffer.select((False, False, False), 2)
    assert to_prompts([selected]).tokens.tolist() == [1]
    assert buffer.restart_groups_without_progress() == 1
    buffer.restart_all()
    assert to_prompts(buffer.waiting).tokens.tolist() == [3, 2, 9]
    assert all(group.is_waiting for group in buffer.waiting)
    assert to_prompts(buffer.take_waiting(2)).tokens.tolist() == [3, 2] and len(buffer.waiting) == 1
    assert len(to_prompts([])) == 0 and len(to_rollouts([])) == 0


def test_a_restored_buffer_is_the_saved_one():
    buffer, other = RolloutBuffer(), RolloutBuffer()
    assert buffer.state_dict() == {"started": None, "waiting": None}
    buffer.restart(groups_of([9, 8]))
    buffer.add_started(groups_of([1, 2, 3], [4], samples=2))
    rows = [sampled([10, 12], [1]), sampled([]), sampled([20], reason=FINISH_STOP), sampled([5])]
    rows[2].outcome = Outcome(1.5)
    targets = unfinished(buffer.started)
    append_new_tokens(targets, collect_new_tokens([0, 1, 2, 3], rows, [0] * 4, {3: [7, 7]}, None), 6)
    targets[0].experts = torch.ones(4, 1, 2, dtype=torch.int16)
    buffer.started[1].early_rewards = {"tests": {1: Answer(None, "", 2.0)}}

    other.load_state_dict(buffer.state_dict())
    assert [one.seed for one in unfinished(other.started)] == [one.seed for one in unfinished(buffer.started)]
    assert merge_early_rewards(other.started) == {"tests": {3: Answer(None, "", 2.0)}}
    mine, theirs = buffer.state_dict(), other.state_dict()
    for kind in ("prompts", "rollouts"):
        for name, value in vars(mine["started"][kind]).items():
            restored = getattr(theirs["started"][kind], name)
            assert torch.equal(value, restored) if isinstance(value, torch.Tensor) else value == restored, (
                name
            )
    assert unfinished(other.started)[2].prompt.tolist() == [7, 7], "an environment's own prompt"
    assert to_prompts(other.waiting).tokens.tolist() == [9, 8]


@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_lost_and_none_gets_older_than_the_bound(seed: int):
    """Steps with responses of very different lengths, as the scheduler stops them, without an engine."""
    source = random.Random(seed)
    wanted, tokens, ahead = source.randint(1, 6), source.randint(1, 4), source.randint(0, 2)
    bound = ahead + source.randint(1, 3)
    total = wanted + source.randint(1, wanted)
    lengths: dict[int, list[int]] = {}
    taken: list[int] = []
    waited = drawn = 0
    buffer = RolloutBuffer()
    for version in range(12):
        new = list(range(drawn, drawn + total - len(buffer.started)))
        drawn += len(new)
        for prompt in new:
            lengths[prompt] = [source.choice([1, 2, 3, 40]) for _ in range(2)]
        buffer.add_started(started(numbered(new), 2, seed=version, version=version))
        required = buffer.flag_required(version, updates_ahead=ahead, max_updates=bound)
        waited += sum(required)
        run_token_rounds(buffer.started, lengths, required, wanted, tokens, version)

        selected = buffer.select(required, wanted)
        assert len(selected) == wanted
        assert all(group.is_finished and group.compute_age(version) + ahead <= bound for group in selected)
        taken += [int(group.prompt.prompt_ids) for group in selected]
    assert sorted([*taken, *(int(group.prompt.prompt_ids) for group in buffer.started)]) == list(range(drawn))
    assert waited or bound > ahead + 1


def numbered(ids: list[int]) -> PromptBatch:
    return replace(prompts([[1, 2]] * len(ids)), prompt_ids=torch.tensor(ids, dtype=torch.long))


def run_token_rounds(
    groups: list[SequenceGroup],
    lengths: dict[int, list[int]],
    required: abc.Sequence[bool],
    wanted: int,
    tokens: int,
    version: int,
) -> None:
    """Extend every response in token rounds to its own length, until enough groups are finished."""
    number = 0
    goals = {
        id(sequence): goal
        for group in groups
        for sequence, goal in zip(group.sequences, lengths[int(group.prompt.prompt_ids)], strict=True)
    }
    while not enough_groups_finished([group.is_finished for group in groups], required, wanted):
        number += 1
        rows = []
        for sequence in unfinished(groups):
            left = goals[id(sequence)] - len(sequence.tokens)
            rows.append(sampled([1] * min(left, tokens), reason=UNFINISHED if left > tokens else FINISH_STOP))
        append(groups, version, *rows, token_round=number)
