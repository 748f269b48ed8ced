"""Responses that filters remove before any reward is computed for them."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from config_workspace import write_workspace

from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.sections.filters import FiltersConfig
from megatron_rl.config.sections.rewards import CodeConfig, RewardConfig
from megatron_rl.data.quickstart import build_tokenizer
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.errors import UserError
from megatron_rl.rewards.filters import FILTERED, ResponseFilters, repeated_share
from megatron_rl.rewards.worker import Answer
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import RewardRole
from megatron_rl.rollout.types import Completion, Sequence, SequenceGroup
from megatron_rl.trainer.rewards import ScoredBatch, compute_row_rewards
from megatron_rl.types import FINISH_FAILED, FINISH_STOP, PromptBatch, Rollouts, SamplingParameters, Scores

pytestmark = pytest.mark.usefixtures("functions_load_once")

TOKENIZER = build_tokenizer()
"""The quickstart's, which has a token for each digit and sign."""


def alone() -> ReplicaGroup:
    """Return a group of this process."""
    group = SimpleNamespace(
        ranks=(0,), rank=0, gather_objects=lambda value: [value], gather_rows=lambda shard: shard
    )
    return cast(ReplicaGroup, group)


def batch_of(responses: list[str], failed: tuple[int, ...] = ()) -> tuple[PromptBatch, Rollouts]:
    """Return one prompt per response, and the rows; the engine failed on the rows ``failed``."""
    texts = [[2, *TOKENIZER.encode(response, add_special_tokens=False)] for response in responses]
    tokens = torch.tensor([token for ids in texts for token in ids])
    lengths = torch.tensor([len(ids) for ids in texts])
    mask = torch.tensor([index > 0 for ids in texts for index in range(len(ids))])
    finish = torch.tensor([FINISH_FAILED if row in failed else FINISH_STOP for row in range(len(texts))])
    rollouts = Rollouts(
        tokens=tokens,
        lengths=lengths,
        response_mask=mask,
        rollout_log_probs=torch.zeros(len(tokens)),
        policy_version=torch.zeros(len(texts), dtype=torch.int64),
        group=torch.arange(len(texts)) // 2,
        finish_reason=finish,
        temperature=torch.ones(len(texts)),
    )
    prompts = PromptBatch(
        tokens=torch.ones(len(texts), dtype=torch.int64),
        lengths=torch.ones(len(texts), dtype=torch.int64),
        prompt_ids=torch.arange(len(texts)),
        tasks=("default",) * len(texts),
        prompts=("a",) * len(texts),
        ground_truths=(None,) * len(texts),
        metadata=({},) * len(texts),
        sampling=(SamplingParameters(),) * len(texts),
    )
    return prompts, rollouts


def test_repeated_ngrams_are_those_that_occurred_before() -> None:
    assert repeated_share([], 4) == repeated_share([1, 2, 3], 4) == repeated_share([1, 2, 3, 4], 4) == 0
    assert repeated_share([7] * 10, 4) == pytest.approx(6 / 7)
    for ids in ([1, 2, 1, 2, 1, 2, 3], [1, 1, 2, 1, 1, 2]):
        grams = [tuple(ids[begin : begin + 3]) for begin in range(len(ids) - 2)]
        again = sum(gram in grams[:index] for index, gram in enumerate(grams))
        assert repeated_share(ids, 3) == pytest.approx(again / len(grams))


def test_the_first_filter_that_applies_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def keep(*, response, **_):\n"
        "    if 'z' in response:\n        raise ValueError('z')\n"
        "    if 'y' in response:\n        return 0.5\n"
        "    return 'x' not in response\n"
    )
    config = FiltersConfig(
        empty=True,
        min_tokens=3,
        max_repetition=0.5,
        ngram=2,
        banned=("bad",),
        function=f"{tmp_path}/mine.py:keep",
    )
    assert config.names == ("empty", "min_tokens", "max_repetition", "banned", "function")
    filters = ResponseFilters(config, RewardConfig())
    responses = ["   ", "ab", "ababababab", "a bad day", "xab", "zab", "yab", "fine"]
    ids = [[ord(letter) for letter in response] for response in responses]
    answers = filters.compute_answers([{"prompt": "", "response": text} for text in responses], ids)
    filters.close()
    assert [answer.message for answer in answers[:5]] == list(config.names)
    assert {answer.reason for answer in answers[:5]} == {FILTERED}
    assert answers[5].reason == "exception" and answers[6].reason == "wrong_type"
    assert "True (keep) or False" in answers[6].message
    assert answers[7].reason is None


CODE = (
    "def score(*, response, **_):\n"
    "    assert len(response) >= 3, 'a removed response was scored'\n"
    "    if '9' in response:\n        raise ValueError('9')\n"
    "    return float(len(response))\n"
)


class Model:
    """A reward model that gives each row its number of tokens."""

    name = "judge"
    weight = 0.5

    def __init__(self) -> None:
        self.seen: list[int] = []

    def infer(self, rollouts: Rollouts) -> Any:
        self.seen = rollouts.lengths.tolist()
        return SimpleNamespace(values={"judge": rollouts.lengths.float()})


@pytest.mark.parametrize("on_filtered", ["drop", "reward"])
def test_no_scorer_and_no_model_sees_a_removed_response(on_filtered: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(CODE)
    filters = FiltersConfig(min_tokens=3, on_filtered=on_filtered, filtered_reward=-2.0)
    settings = RewardConfig(f"{tmp_path}/reward.py:score")
    reward = RewardRole(settings, TOKENIZER, filters=filters)
    prompts, rollouts = batch_of(["1234", "12", "123", "1294", "1", "12345"], failed=(2,))
    model = Model()
    roles = SimpleNamespace(reward=reward, reward_models=(model,), has_single_scorer=False)
    removed = reward.run_filters(prompts, rollouts, alone())
    assert removed.filter_by_row == {1: "min_tokens", 4: "min_tokens"}
    assert removed.metrics.values() == {"filtered/min_tokens": pytest.approx(2 / 6)}
    found = compute_row_rewards(cast(Roles, roles), prompts, rollouts, alone(), None, removed)
    reward.close()

    assert model.seen == [5, 4, 5, 6], "the model sees the kept rows"
    scored = 4 + 0.5 * 5
    expected = [scored, -2.0, math.nan, math.nan, -2.0, 5 + 0.5 * 6]
    valid = [True, True, False, False, True, True]
    if on_filtered == "drop":
        expected[1] = expected[4] = math.nan
        valid[1] = valid[4] = False
    torch.testing.assert_close(found.scores.rewards, torch.tensor(expected), equal_nan=True)
    assert found.scores.valid.tolist() == valid
    # A dropped row is no failure: of these only the engine's and the function's are.
    metrics = found.metrics.values()
    assert metrics["reward/invalid"] == pytest.approx(2 / 6)
    assert metrics["reward/saved/function"] == pytest.approx(2 / 6)
    assert [failure.reason for failure in found.failures] == ["exception"]
    assert found.reasons[1] == found.reasons[4] == "filtered: min_tokens" and found.reasons[0] is None
    assert found.reasons[3] and found.reasons[3].startswith("exception")


def test_dropped_rows_are_no_failures_of_a_step_but_for_all_of_them() -> None:
    prompts, rollouts = batch_of(["1234", "12", "1"])
    rewards = torch.tensor([math.nan, math.nan, 1.0])
    reasons: tuple[str | None, ...] = ("exception: 9", "filtered: min_tokens", None)
    batch = ScoredBatch(prompts, rollouts, Scores(rewards, rewards.isfinite(), {}), reasons)
    assert batch.failed_fraction == pytest.approx(1 / 3)
    batch.require_unfiltered_rows(3)

    nothing = Scores(torch.full((3,), math.nan), torch.zeros(3, dtype=torch.bool), {})
    batch = replace(batch, scores=nothing, reasons=("filtered: min_tokens",) * 2 + ("filtered: banned",))
    assert batch.failed_fraction == 0
    with pytest.raises(UserError, match="removed every response") as raised:
        batch.require_unfiltered_rows(3)
    assert "2 filtered: min_tokens, 1 filtered: banned" in str(raised.value)


def test_a_group_that_is_scored_early_is_filtered_first(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(CODE)
    settings = RewardConfig(f"{tmp_path}/reward.py:score")
    reward = RewardRole(settings, TOKENIZER, filters=FiltersConfig(min_tokens=3))
    prompts, _ = batch_of(["1234", "12"])
    sequences = []
    for ids in ([5, 6, 7, 8], [5, 6]):
        sequence = Sequence(array("q", [1]), SamplingParameters(), seed=1, policy_version=0)
        sequence.append_sampled(Completion(0, ids, [0.0] * len(ids), FINISH_STOP), version=0)
        sequence.finish_reason = FINISH_STOP
        sequences.append(sequence)
    reward.start_early_rewards(3, SequenceGroup(prompts.rows([0]), sequences))
    early = reward.gather_early_rewards(alone())
    reward.close()
    assert early["function"] == {6: Answer(None, "", 4.0)}
    assert {row: answer.reason for row, answer in early["filters"].items()} == {6: None, 7: FILTERED}


def test_rows_that_a_function_finds_invalid_are_not_sent_on(tmp_path: Path) -> None:
    """The tests of programs come after the function: here each of them would fail the row once more."""
    (tmp_path / "reward.py").write_text(CODE)
    settings = replace(RewardConfig(f"{tmp_path}/reward.py:score"), code=CodeConfig())
    reward = RewardRole(settings, TOKENIZER)
    prompts, rollouts = batch_of(["1294", "1234"])
    function, code = reward.infer(prompts, rollouts, alone())
    reward.close()
    assert set(function.reasons) == {0}
    assert set(code.reasons) <= {1}
    assert code.metrics.values()["reward/saved/code"] == 0.5


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def errors(*overrides: str) -> str:
    report = check_config(load("config.yaml", overrides), 4, patience=0)
    return "\n".join(str(error) for error in report.errors)


def test_check_refuses_filters_that_mean_nothing(workspace: Path) -> None:
    assert not errors("rollout.filters.empty=true", "rollout.filters.max_repetition=0.3")
    assert "at most 1" in errors("rollout.filters.max_repetition=30")
    assert "drop" in errors("rollout.filters.on_filtered=refill")
    assert "the longest response" in errors("rollout.filters.min_tokens=900", "rollout.max_response_tokens=8")
    assert "rollout.filters.function" in errors("rollout.filters.function=missing.py:keep")
    (workspace / "mine.py").write_text("def keep(*, answer):\n    return True\n")
    assert "`answer`" in errors("rollout.filters.function=mine.py:keep") or "answer" in errors(
        "rollout.filters.function=mine.py:keep"
    )
