"""Conversations of a plain engine with real environments: tokens, masks, log-probs, interruptions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_rl.config.sections.rewards import RewardConfig, RewardLimitsConfig
from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data.chat_format import ChatFormats, ChatTemplate
from megatron_rl.data.quickstart import EOS, SPECIAL, build_tokenizer
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.environments.host import EnvironmentPool
from megatron_rl.errors import UserError
from megatron_rl.roles.reward import RewardRole
from megatron_rl.rollout.collate import to_rollouts
from megatron_rl.rollout.multi_turn import MultiTurnScheduler
from megatron_rl.rollout.scheduler import AdmittedSequence, ReplicaQueue, ReplicaScheduler
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    FINISH_STOP,
    PromptBatch,
    Rollouts,
    SamplingParameters,
    observation_token_counts,
    split_rows,
    tokens_toward_limit,
    turn_starts,
)
from tests.sampling import copied, engine_of, make_prompts, round_of, started, take_in, unfinished

SOURCE = '''
import asyncio, random
from megatron_rl import Environment

class Counting(Environment):
    """Say how long each turn was; some episodes leave out turns, fail, or go on for ever."""
    async def run(self, episode):
        source = random.Random(episode.seed)
        await asyncio.sleep(random.random() * 0.05)  # no two runs are alike in time
        said = []
        while len(said) < episode.ground_truth:
            said.append(await episode.generate(limit=source.randint(2, 5)))
            if len(said) == episode.ground_truth:
                break
            if episode.prompt == "fail":
                raise RuntimeError("no more")
            episode.observe(f"+{len(said[-1])}", f"{source.randint(10, 99)}=")
        return {"reward": len(said), "characters": sum(map(len, said))}
'''
TOKENIZER = build_tokenizer()
STOP = SPECIAL.index(EOS)


def logits(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return logits that depend on every token of a row."""
    rows = []
    for row in tokens.split(lengths.tolist()):
        number = sum((place + 1) * int(token) for place, token in enumerate(row)) % 1009
        rows.append(torch.randn(len(TOKENIZER), generator=torch.Generator().manual_seed(number)))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    file = tmp_path_factory.mktemp("environment") / "env.py"
    file.write_text(SOURCE)
    made = EnvironmentPool(EnvironmentConfig(f"{file}:Counting", workers=2, max_turns=6))
    yield made
    made.close()


def prompts(texts: list[str], turns: list[int], most: int = 60) -> PromptBatch:
    rows = [TOKENIZER.encode("1+2=") for _ in texts]
    sampling = SamplingParameters(0.8, max_response_tokens=most, stop_token_ids=(STOP,))
    return replace(make_prompts(rows, sampling), prompts=tuple(texts), ground_truths=tuple(turns))


def scheduler_of(
    hosts: EnvironmentPool, queue: ReplicaQueue, stop_when: Callable[[], bool] | None = None
) -> Any:
    engine = engine_of(logits, max_model_len=200)
    return MultiTurnScheduler(engine, queue, hosts, ChatFormats(TOKENIZER), stop_when=stop_when)


def sample(
    hosts: EnvironmentPool,
    groups: list[SequenceGroup],
    *limits: int | None,
    stop_when: Callable[[], bool] | None = None,
) -> list[SequenceGroup]:
    """Return the groups after token rounds of so many tokens, with environments made for this call alone."""
    groups = copied(groups)
    queue = ReplicaQueue(round_of(groups, 3), sum(len(group.sequences) for group in groups), 200)
    scheduler = scheduler_of(hosts, queue, stop_when)
    for limit in limits:
        scheduler.run_token_round(limit)
    scheduler.close()
    take_in(scheduler)
    return groups


def same(left: Rollouts, right: Rollouts) -> None:
    for name in ("tokens", "lengths", "response_mask", "finish_reason", "outcomes"):
        mine, truth = getattr(left, name), getattr(right, name)
        assert torch.equal(mine, truth) if isinstance(mine, torch.Tensor) else mine == truth, name
    torch.testing.assert_close(left.rollout_log_probs, right.rollout_log_probs, atol=1e-6, rtol=0)


def test_tokens_are_the_policys_and_the_environments_each_with_its_own(hosts: EnvironmentPool):
    rollouts = to_rollouts(sample(hosts, started(prompts(["go"] * 6, [3] * 6), 2, seed=5, version=3), None))
    assert rollouts.finish_reason.tolist() == [FINISH_STOP] * 12
    assert rollouts.token_versions is not None and rollouts.outcomes is not None
    assert torch.equal(rollouts.token_versions == 3, rollouts.response_mask)
    assert not rollouts.rollout_log_probs[~rollouts.response_mask].any()
    columns = (rollouts.tokens, rollouts.response_mask, rollouts.rollout_log_probs, turn_starts(rollouts))
    for row, observed, *parts in zip(
        range(12),
        observation_token_counts(rollouts).tolist(),
        *(split_rows(c, rollouts.lengths) for c in columns),
        strict=True,
    ):
        tokens, mask, values, starts = parts
        assert int(starts.sum()) == 3
        said = [TOKENIZER.decode(turn, skip_special_tokens=True) for turn in turns_of(tokens, mask)]
        outcome = rollouts.outcomes[row]
        assert outcome is not None
        assert outcome.reward == 3 and outcome.components == {"characters": float(sum(map(len, said)))}
        heard = [TOKENIZER.decode(turn) for turn in turns_of(tokens[5:], ~mask[5:])]
        assert [text[: len(f"+{len(turn)}")] for text, turn in zip(heard, said, strict=False)] == [
            f"+{len(turn)}" for turn in said[:2]
        ]
        assert observed == sum(map(len, heard))
        for place in mask.nonzero()[:, 0].tolist():
            before = logits(tokens[:place], torch.tensor([place]))[0] / 0.8
            expected = before.log_softmax(0)[tokens[place]]
            assert values[place] == pytest.approx(float(expected), abs=1e-5)


def turns_of(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    turns: list[list[int]] = []
    for place, (token, here) in enumerate(zip(tokens.tolist(), mask.tolist(), strict=True)):
        if here and (not place or not mask[place - 1]):
            turns.append([])
        if here:
            turns[-1].append(token)
    return turns


@pytest.mark.slow
def test_interruptions_and_environments_made_anew_change_nothing(hosts: EnvironmentPool):
    groups = started(prompts(["go", "fail", "go"], [4, 3, 1]), 2, seed=9, version=3)
    whole = to_rollouts(sample(hosts, groups, None))
    same(to_rollouts(sample(hosts, groups, *[3] * 20)), whole)

    parted = groups
    for _ in range(20):
        if unfinished(parted):
            parted = sample(hosts, parted, 3)
    same(to_rollouts(parted), whole)

    parted, rounds = groups, 0
    while unfinished(parted):
        rounds += 1
        asked = itertools.count()
        parted = sample(hosts, parted, None, stop_when=lambda asked=asked, most=rounds: next(asked) >= most)
    assert rounds > 2  # the first ends soon after it began
    same(to_rollouts(parted), whole)

    other = copied(groups)
    for sequence in unfinished(other):
        sequence.seed += 1
    assert not torch.equal(to_rollouts(sample(hosts, other, None)).tokens, whole.tokens)
    outcomes = whole.outcomes
    assert outcomes is not None and [outcome.failure for outcome in outcomes if outcome] == [
        None, None, "exception", "exception", None, None
    ]  # fmt: skip
    assert (whole.finish_reason == FINISH_FAILED).tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


FIXED = """
from dataclasses import dataclass
from megatron_rl import Environment

@dataclass
class Fixed(Environment):
    text: str

    async def run(self, episode):
        await episode.generate(limit=2)
        if self.text == "none":
            return 1.0
        episode.observe(self.text)
        await episode.generate(limit=9)
        return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [3, 2], ids=["with a token after it", "at the end of the sequence"])
@pytest.mark.parametrize(
    "text", ["+-", "+" * 30, "+", "none"], ids=["another", "a longer one", "a shorter one", "none"]
)
def test_a_replayed_environment_with_another_observation_fails_its_episode(
    tmp_path: Path, text: str, limit: int
):
    (tmp_path / "fixed.py").write_text(FIXED)
    groups = started(prompts(["go"], [0]), 1, seed=4, version=3)
    for observation, failure in (("++", None), (text, "diverged")):
        config = EnvironmentConfig(f"{tmp_path / 'fixed.py'}:Fixed", settings={"text": observation})
        hosts = EnvironmentPool(config)
        groups = sample(hosts, groups, limit)
        hosts.close()
        outcome = groups[0].sequences[0].outcome
        assert (outcome and outcome.failure) == failure
    assert groups[0].sequences[0].finish_reason == FINISH_FAILED


@pytest.mark.parametrize("order", [(0,), (1, 0), (2, 0, 3, 1)])
def test_groups_from_a_queue_are_the_same_whichever_replica_has_them(
    hosts: EnvironmentPool, order: tuple[int, ...]
):
    """Replicas that come one after the other: the first takes all that no other begins with."""
    groups = started(prompts(["go"] * 5, [1, 2, 3, 2, 1]), 2, seed=9, version=3)
    expected = to_rollouts(sample(hosts, groups, None))
    tickets = itertools.count()
    admitted: list[AdmittedSequence] = []
    for replica in order:
        queue = ReplicaQueue(round_of(groups, 3), 2, 200, lambda: next(tickets), replica, len(order))
        scheduler = scheduler_of(hosts, queue)
        scheduler.run_token_round(None)
        admitted += scheduler.admitted
        assert len(scheduler.admitted) == (2 * (6 - len(order)) if replica == order[0] else 2)
    assert sorted(one.position for one in admitted) == list(range(10))

    scheduler = scheduler_of(hosts, ReplicaQueue(round_of(groups, 3), 0, 200))
    scheduler.queue.pop_sequence = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    scheduler.admitted = admitted
    take_in(scheduler)
    same(to_rollouts(groups), expected)


def test_groups_go_on_where_an_engine_has_their_cache():
    groups = started(prompts(["go"] * 5, [1] * 5), 2, seed=9, version=3)
    cached_on = {unfinished(groups)[row].seed: 1 for row in (3, 6, 7)}
    tickets = itertools.count()
    for replica, expected in ((1, [2, 3, 6, 7]), (0, [0, 1, 4, 5])):
        queue = ReplicaQueue(round_of(groups, 3), 4, 200, lambda: next(tickets), replica, 2, cached_on)
        scheduler = ReplicaScheduler(engine_of(logits, max_model_len=200), queue)
        scheduler.admit_sequences(0)
        assert [one.position for one in scheduler.admitted] == expected


def test_a_group_begins_where_one_row_has_room_and_no_more_rows_are_in_flight_than_may_be():
    groups = started(prompts(["go"] * 3, [1] * 3), 2, seed=9, version=3)
    tickets = itertools.count()
    queue = ReplicaQueue(round_of(groups, 3), 3, 200, lambda: next(tickets))
    scheduler = ReplicaScheduler(engine_of(logits, max_model_len=200), queue)
    assert [scheduler.admit_sequences(busy) for busy in (0, 3, 2, 1, 0)] == [[0, 1, 2], [], [3], [4, 5], []]
    assert [one.position for one in scheduler.admitted] == list(range(6))


PATIENT = """
import asyncio, pathlib
from megatron_rl import Environment

class Patient(Environment):
    async def run(self, episode):
        await episode.generate(limit=3)
        while episode.prompt != "first" and not pathlib.Path(episode.metadata["judged"]).exists():
            await asyncio.sleep(0.01)
"""
REWARD = """
import pathlib
def judge(*, prompt, metadata, **_):
    pathlib.Path(metadata["judged"]).touch()
    return float(len(prompt))
"""


def test_a_group_is_judged_when_it_is_complete_while_others_go_on(tmp_path: Path):
    (tmp_path / "env.py").write_text(PATIENT)
    (tmp_path / "reward.py").write_text(REWARD)
    batch = replace(prompts(["first", "x"], [1, 1]), metadata=({"judged": str(tmp_path / "judged")},) * 2)
    patient = EnvironmentPool(EnvironmentConfig(f"{tmp_path / 'env.py'}:Patient", turn_timeout=60))
    settings = RewardConfig(f"{tmp_path / 'reward.py'}:judge", limits=RewardLimitsConfig(write=True))
    reward = RewardRole(settings, TOKENIZER)
    groups = started(batch, 2, seed=1, version=3)
    scheduler = scheduler_of(patient, ReplicaQueue(round_of(groups, 3), 4, 200))

    def judge() -> None:
        for index, group in scheduler.pop_finished_groups():
            reward.start_early_rewards(index, group)

    scheduler.run_token_round(None, judge)
    outcomes = [one.sequence.outcome for one in scheduler.admitted]
    assert [outcome.failure for outcome in outcomes if outcome] == [None] * 4
    alone = cast(ReplicaGroup, SimpleNamespace(ranks=(0,), rank=0, gather_objects=lambda value: [value]))
    early = reward.gather_early_rewards(alone)["function"]
    assert {row: answer.reward for row, answer in early.items()} == {0: 5.0, 1: 5.0, 2: 1.0, 3: 1.0}
    some = {"function": {row: early[row]._replace(reward=9.0) for row in (0, 3)}}
    take_in(scheduler)
    rollouts = to_rollouts(groups)
    (judgement,) = reward.infer(batch.repeat(2), rollouts, alone, some)
    assert judgement.shard.values["rewards"].tolist() == [9.0, 5.0, 1.0, 9.0]  # two rows are known
    patient.close()
    reward.close()


def test_a_function_that_is_not_the_runs_judges_what_an_environment_rewarded(
    hosts: EnvironmentPool, tmp_path: Path
):
    """Evaluators, and a set's own reward: the run's function is asked about nothing here."""
    (tmp_path / "reward.py").write_text("def judge(*, prompt, **_): return 100.0 + len(prompt)\n")
    batch = prompts(["go", "fail"], [1, 3])
    rollouts = to_rollouts(sample(hosts, started(batch, 2, seed=9, version=3), None))
    alone = cast(ReplicaGroup, SimpleNamespace(ranks=(0,), rank=0, gather_objects=lambda value: [value]))
    said = {}
    for key in ("", "evaluation.sets.held_out.evaluators.style"):
        reward = RewardRole(RewardConfig(f"{tmp_path / 'reward.py'}:judge"), TOKENIZER, key)
        (judgement,) = reward.infer(batch.repeat(2), rollouts, alone)
        said[key] = judgement.shard.values["rewards"].tolist()
        reward.close()
    own = said.pop("")
    assert own[:2] == [1.0, 1.0] and said.popitem()[1][:2] == [102.0, 102.0]
    assert all(value != value for value in own[2:]), "a failed episode has no reward"


def test_no_room_and_no_turn_left_truncate_and_are_no_failure(hosts: EnvironmentPool):
    groups = started(prompts(["go"] * 3, [9] * 3, most=12), 1, seed=2, version=3)
    rollouts = to_rollouts(sample(hosts, groups, None))
    assert rollouts.finish_reason.tolist() == [FINISH_LENGTH] * 3
    assert rollouts.outcomes is not None
    assert all(
        outcome and outcome.failure is None and outcome.reward is None for outcome in rollouts.outcomes
    )
    assert (rollouts.lengths <= 5 + 12).all()
    # An observation that found no room counts, too: else such a conversation would seem short enough.
    assert rollouts.max_response_tokens is not None and rollouts.max_response_tokens.tolist() == [12] * 3
    assert (tokens_toward_limit(rollouts) >= 12).all()
    groups = started(prompts(["go"], [9], most=150), 1, seed=2, version=3)
    turns = to_rollouts(sample(hosts, groups, None))
    assert turns.finish_reason.tolist() == [FINISH_LENGTH] and int(turn_starts(turns).sum()) == 6


CHATML = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def test_a_chat_template_closes_the_turn_and_opens_the_next():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    chat = ChatTemplate(tokenizer)
    new = [{"role": "tool", "content": "12"}]
    tail = tokenizer.encode("<eos>\n<bos>tool\n12<eos>\n<bos>assistant\n", add_special_tokens=False)
    assert chat.encode_between_turns(None, new) == tail
    assert chat.encode_between_turns(STOP, new) == tail[1:]  # the policy has closed its turn itself
    assert tail[0] == STOP
    tokenizer.chat_template = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ messages|length if loop.last }}"
    )
    with pytest.raises(UserError, match="the text after a turn depends"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(UserError, match="does not render a turn exactly once"):
        ChatTemplate(tokenizer)
