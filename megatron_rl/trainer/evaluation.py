"""Answer the evaluation set with the current policy and grade the answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel.exchange import Members
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.sample import Pending, gathered, judge, whole
from megatron_rl.types import PromptBatch, Rollouts

FULL_MARKS = 1.0
"""A response counts as right when its reward is at least this."""


@dataclass(frozen=True)
class EvaluationResult:
    """Hold graded answers, the same value on every rank; ``prompts`` has one entry per answer.

    ``synced`` is what bringing the engine's weights up to date moved, of this rank.
    """

    metrics: Metrics
    synced: Metrics
    prompts: PromptBatch
    rollouts: Rollouts
    rewards: torch.Tensor


def evaluate(roles: Roles, prompts: PromptBatch, config: RunConfig) -> EvaluationResult:
    """Sample ``evaluation.samples`` answers per prompt and grade them as training does.

    ``eval/accuracy`` is the share of answers with a reward of 1 or more among all answers: the first
    scorer's own where several judge; an answer whose reward failed is not right.
    ``eval/reward`` is the mean over valid answers, ``eval/pass_at_k`` the share of prompts with at least one
    right answer. Collective over the world.
    """
    samples = config.evaluation.samples
    everyone = Members()
    with roles.hybrid_engine.generation_mode() as synced:
        sweep = whole(prompts, samples, config.seed, roles.hybrid_engine.version)
        rollouts = gathered(roles.rollout, Pending(sweep, roles.rollout.infer(sweep)), everyone)
    rows = prompts.repeat(samples)
    scores, _, _ = judge(roles, rows, rollouts, everyone)
    rewards, valid = scores.rewards, scores.valid
    marks = rewards if roles.one_judge else scores.components[roles.reward.leading]
    right = valid & (marks >= FULL_MARKS)
    metrics = Metrics.mean("eval/accuracy", float(right.sum()), len(rows))
    metrics += Metrics.mean("eval/reward", float(rewards[valid].sum()), float(valid.sum()))
    metrics += Metrics.mean("eval/response_length", float(rollouts.response_mask.sum()), len(rows))
    metrics += Metrics.mean("eval/invalid", float((~valid).sum()), len(rows))
    if samples > 1:
        solved = right.view(-1, samples).any(dim=1)
        metrics += Metrics.mean("eval/pass_at_k", float(solved.sum()), len(solved))
    # Its seconds are part of time/evaluate, not of a step.
    return EvaluationResult(metrics, Metrics({}, synced.maxima), rows, rollouts, rewards)
