"""How old rollouts are, and what trainer and engine are compared on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_workspace import CONFIG
from ragged_batches import Batch
from whole_steps import algorithm_of, policy
from whole_steps import step as whole_step

from megatron_rl.algorithms import build_train_batch, minibatches, policy_objective
from megatron_rl.config.load import load_text
from megatron_rl.config.sections.rollout import AsynchronyConfig, MismatchConfig, RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.worker import Answer
from megatron_rl.rollout.buffer import RolloutBuffer
from megatron_rl.rollout.collate import to_prompts, to_rollouts
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.trainer.loop import (
    MismatchError,
    check_mismatch,
    fresh_log_prob_difference,
    require_loss_tokens,
)
from megatron_rl.trainer.sample import (
    RolloutSource,
    SampledBatch,
    StalenessError,
    mixed_version_fraction,
    staleness_metrics,
)
from megatron_rl.types import FINISH_LENGTH, Rollouts, SamplingParameters, Scores
from tests.sampling import make_prompts, started

MIXED = Rollouts(
    tokens=torch.arange(7),
    lengths=torch.tensor([4, 3]),
    response_mask=torch.tensor([False, True, True, True, False, True, True]),
    rollout_log_probs=torch.tensor([0.0, -1.0, -1.0, -1.0, 0.0, -1.0, -1.0]),
    group=torch.tensor([0, 0]),
    finish_reason=torch.tensor([0, 0]),
    policy_version=torch.tensor([3, 5]),
    temperature=torch.ones(2),
    token_versions=torch.tensor([-1, 3, 4, 5, -1, 5, 5], dtype=torch.int32),
)


def test_a_row_is_as_old_as_its_oldest_token():
    values = staleness_metrics(5, MIXED, max_updates=2).values()
    assert values == {"staleness/mean": 1.0, "staleness/max": 2.0, "staleness/token_mean": pytest.approx(0.6)}
    assert mixed_version_fraction(MIXED) == 0.5
    with pytest.raises(StalenessError, match=r"version 3 .* version 5; asynchrony.max_staleness allows 1"):
        staleness_metrics(5, MIXED, max_updates=1)
    whole = replace(MIXED, token_versions=None)
    values = staleness_metrics(5, whole, 2).values()
    assert mixed_version_fraction(whole) == 0.0 and "staleness/token_mean" not in values


def test_trainer_and_engine_are_compared_on_tokens_of_the_same_weights():
    old = MIXED.rollout_log_probs + torch.tensor([9.0, 9.0, 9.0, 0.25, 9.0, 0.5, 0.75])
    scores = Scores(torch.zeros(2), torch.tensor([True, True]), {}, old_log_probs=old)
    assert fresh_log_prob_difference(MIXED, scores, scores.valid, version=5) == pytest.approx(0.5)
    one_valid = torch.tensor([True, False])
    assert fresh_log_prob_difference(MIXED, scores, one_valid, version=5) == pytest.approx(0.25)
    assert fresh_log_prob_difference(MIXED, scores, scores.valid, version=6) is None
    whole = replace(MIXED, token_versions=None)
    assert fresh_log_prob_difference(whole, scores, scores.valid, version=5) == pytest.approx(0.625)
    limits = MismatchConfig(warn=0.3, stop=0.6)
    for difference in (None, 0.3, 0.5):
        check_mismatch(difference, limits)
    for difference in (0.7, float("nan")):
        with pytest.raises(MismatchError, match="differ by"):
            check_mismatch(difference, limits)


@pytest.mark.parametrize("bypass", [False, True])
def test_a_step_without_a_token_to_learn_from_stops_the_run(bypass):
    batch = Batch([0, 0], [1.0, 0.0], [True, True], [[True] * 3, [True] * 2], 3)
    rollouts, scores = whole_step(batch)
    rollouts = replace(rollouts, finish_reason=torch.tensor([FINISH_LENGTH, FINISH_LENGTH]))

    def estimated(**pieces):
        algorithm = algorithm_of("grpo", **pieces)
        made, metrics = build_train_batch(rollouts, scores, algorithm)
        if bypass:
            (mini,) = minibatches(made, algorithm, 1, 1, seed=0)
            metrics += policy_objective(algorithm, mini, *policy(batch))[1]
        return made, metrics

    require_loss_tokens(*estimated(correction={"rejection": {"seq_mean_k3": 9.0}, "bypass": bypass}))
    with pytest.raises(UserError, match="no token of this step's responses is left") as raised:
        require_loss_tokens(*estimated(correction={"rejection": {"seq_mean_k3": 1e-9}, "bypass": bypass}))
    assert raised.value.where == "algorithm.correction.rejection" and "100% of the tokens" in str(
        raised.value
    )
    if not bypass:
        with pytest.raises(UserError, match="100% of the responses cut off"):
            require_loss_tokens(*estimated(overlong={"filter": True}))
        scores = replace(scores, valid=torch.tensor([False, False]))
        require_loss_tokens(*estimated())  # another watch counts rewards that fail


def test_prompts_in_flight():
    shares = {0.0: 8, 0.1: 9, 0.25: 10, 0.3: 11, 1.0: 16}
    assert {share: RolloutConfig(oversample=share).prompts_in_flight(8) for share in shares} == shares
    assert RolloutConfig(oversample=0.1).prompts_in_flight(10) == 11


def test_what_a_smaller_bound_makes_too_old_is_sampled_anew():
    def begun(first: int, versions: list[int]) -> list[SequenceGroup]:
        prompts = make_prompts([[1, 2]] * len(versions), SamplingParameters())
        prompts = replace(prompts, prompt_ids=torch.arange(first, first + len(versions)))
        groups = started(prompts, 1, seed=1, version=0)
        for group, version in zip(groups, versions, strict=True):
            group.sequences[0].policy_version = version
        return groups

    def resumed(ahead: int, bound: int) -> tuple[list[list[int]], ...]:
        """Return the prompts in flight, in the queue and repeated, at version 5."""
        config = load_text(CONFIG).valid()
        config = replace(
            config,
            rollout=replace(config.rollout, partial=True, oversample=1.0),
            batch=replace(config.batch, samples_per_prompt=1),
            asynchrony=AsynchronyConfig(ahead, bound),
        )
        roles: Any = SimpleNamespace(hybrid_engine=SimpleNamespace(version=5))
        algorithm: Any = None
        draw: Any = None  # nothing new is drawn
        source = RolloutSource(config, roles, algorithm, draw)
        groups = begun(0, [2, 3, 4])
        groups[0].early_rewards = {"tests": {0: Answer("old", "")}}
        groups[2].early_rewards = {"tests": {0: Answer("young", "")}}
        saved = RolloutBuffer()
        saved.add_started(groups)
        source.load_state_dict({**saved.state_dict(), "informative": (0, 0)})
        queue = [
            SampledBatch(to_prompts(batch), to_rollouts(batch), None, Metrics())
            for batch in (begun(3, [3]), begun(4, [4]))
        ]
        queued = [batch.prompts for batch in source.select_trainable(queue)]
        parts = ([to_prompts(source.buffer.started)], queued, [to_prompts(source.buffer.waiting)])
        assert source.buffer.started[-1].early_rewards["tests"][0].reason == "young"
        return tuple([number for part in each for number in part.prompt_ids.tolist()] for each in parts)

    assert resumed(2, 5) == ([0, 1, 2], [3, 4], [])
    assert resumed(2, 4) == ([1, 2], [3, 4], [0])
    assert resumed(1, 2) == ([2], [3], [4, 0, 1])
