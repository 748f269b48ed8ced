"""What a step learns from: responses to prompts, sampled once or in rounds, and what their rewards are."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from megatron_rl.algorithms import Algorithm
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.metrics import Metrics, merge
from megatron_rl.rewards.function import Failure
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT, EarlyAnswers
from megatron_rl.roles.rollout import RolloutRole
from megatron_rl.rollout.buffer import RolloutBuffer, early_rewards, note_early_rewards
from megatron_rl.rollout.collate import (
    NewTokens,
    append_new_tokens,
    start_groups,
    to_prompts,
    to_rollouts,
    waiting_groups,
)
from megatron_rl.rollout.scheduler import GenerationRound
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.trainer.reward_failures import NO_RESPONSE
from megatron_rl.types import (
    FINISH_FAILED,
    PromptBatch,
    Rollouts,
    Scores,
    limited_counts,
    observed_counts,
    row_index,
    turn_starts,
)

_RENDEZVOUS = itertools.count(1)
"""Numbers of the rounds of the open order, equal on all ranks, of all sources that use the job's store."""


class StalenessError(RuntimeError):
    """Report rollouts that are older than the run allows."""


@dataclass(frozen=True)
class Pending:
    """A round that was sampled on this rank and is not gathered yet: ``new_tokens`` are this rank's alone."""

    generation_round: GenerationRound
    new_tokens: NewTokens
    greedy: Pending | None = None


@dataclass(frozen=True)
class SampledBatch:
    """Hold the responses to ``prompts``, the same value on every rank; ``greedy`` has one row per prompt."""

    prompts: PromptBatch
    rollouts: Rollouts
    greedy: Rollouts | None
    metrics: Metrics
    early: EarlyAnswers = field(default_factory=dict)


NO_SCORE = "a score, or their sum, is not finite"
BASELINES = ("baseline_rewards", "baseline_lengths")


@dataclass(frozen=True)
class ScoredBatch:
    """Hold rows with their rewards, the same value on every rank; ``prompts`` has one entry per row.

    ``reasons`` [B] say why a row has no reward, None where it has one. ``metrics`` are of making the rows,
    and with ``failures``, the rewards that failed, of this rank alone.
    """

    prompts: PromptBatch
    rollouts: Rollouts
    scores: Scores
    reasons: tuple[str | None, ...]
    metrics: Metrics = field(default_factory=Metrics)
    failures: tuple[Failure, ...] = ()

    def rows(self, ids: Sequence[int]) -> ScoredBatch:
        """Return the rows ``ids``, in that order, with metrics and failures of all."""
        index = torch.tensor(ids, dtype=torch.long)
        baselines = {name: getattr(self.scores, name) for name in BASELINES}
        scores = Scores(
            rewards=self.scores.rewards[index],
            valid=self.scores.valid[index],
            components={name: values[index] for name, values in self.scores.components.items()},
            **{name: values[index] for name, values in baselines.items() if values is not None},
        )
        rollouts = self.rollouts.rows(ids)
        reasons = tuple(self.reasons[row] for row in ids)
        return ScoredBatch(self.prompts.rows(ids), rollouts, scores, reasons, self.metrics, self.failures)


class RolloutSource:
    """The responses to a wanted number of prompts, and the buffer of what was begun beyond them.

    With ``rollout.oversample`` that fraction of further prompts is sampled beside the wanted ones, and the
    step takes the groups that finish first, counted in token rounds of ``rollout.round_tokens`` tokens per
    sequence. With ``rollout.partial`` the others are continued in the next step by its newer weights; a group
    whose oldest token would otherwise get older than ``asynchrony.max_staleness`` is waited for instead.
    Without, the others are dropped and their prompts come first in the next step; prompts with short
    responses are then learned from more often.

    In the open order there are no token rounds: the replicas sample until the ranks that learn wait for them
    and the wanted groups are finished. All others go on in the next step, those that no replica began as
    prompts.

    ``draw(n)`` gives the next n prompts. The ``buffer`` and ``informative`` (groups that taught something,
    groups sampled) are state of the run.
    """

    def __init__(
        self, config: RunConfig, roles: Roles, algorithm: Algorithm, draw: Callable[[int], PromptBatch]
    ) -> None:
        self.config, self.roles, self.algorithm, self.draw = config, roles, algorithm, draw
        self.buffer = RolloutBuffer()
        self.informative = (0, 0)

    def start(self, wanted: int, seed: int) -> Pending:
        """Sample on the ranks of the rollout; others return at once. Collective over the rollout's ranks."""
        generation_round = self._next_round(wanted, seed)
        rollout, reward = self.roles.rollout, self.roles.reward
        on_finished = None
        if reward.judges_early and generation_round.token_round is None:
            on_finished = reward.begin
        pending = Pending(generation_round, rollout.infer(generation_round, on_finished))
        if not self.algorithm.needs_greedy_baseline:
            return pending
        greedy = whole(_greedy(to_prompts(generation_round.groups)), 1, seed, generation_round.version)
        return replace(pending, greedy=Pending(greedy, rollout.infer(greedy)))

    def finish(self, pending: Pending, members: ReplicaGroup) -> SampledBatch:
        """Gather what was sampled, and return the groups that the step takes. Collective over the members."""
        rollout, generation_round = self.roles.rollout, pending.generation_round
        new_tokens = _append(rollout, pending, members)
        if generation_round.token_round is None:
            note_early_rewards(generation_round.groups, self.roles.reward.early(members))

        selected = self.buffer.select(generation_round.required, generation_round.wanted)
        prompts, rollouts, early = to_prompts(selected), to_rollouts(selected), early_rewards(selected)
        metrics = conversation_metrics(rollouts)
        if not self.config.rollout.capabilities.in_process:
            metrics += Metrics.of({"rollout/sampled_again": float(new_tokens.resubmitted)})
        if not self.config.rollout.oversample:
            greedy = None if pending.greedy is None else gathered(rollout, pending.greedy, members)
            return SampledBatch(prompts, of_one_version(rollouts), greedy, metrics, early)

        metrics += self._round_metrics(generation_round, new_tokens)
        metrics += Metrics.of({"rollout/partial_fraction": partial_fraction(rollouts)})
        metrics += self._keep_or_restart()
        if self.config.rollout.partial and not self.config.asynchrony.steps_ahead:
            # Rows that are sampled ahead get older still: they are measured when they are learned from.
            assert self.config.asynchrony.max_staleness is not None
            version = self.roles.hybrid_engine.version
            metrics += staleness(version, rollouts, self.config.asynchrony.max_staleness)
        return SampledBatch(prompts, rollouts, None, metrics, early)

    def _round_metrics(self, generation_round: GenerationRound, new_tokens: NewTokens) -> Metrics:
        """Return the number of token rounds, or in the open order what was finished and not selected."""
        if generation_round.rendezvous is None:
            token_rounds = new_tokens.shard.values["round"]
            return Metrics.of({"rollout/rounds": float(token_rounds.max()) if len(token_rounds) else 0.0})
        return Metrics.of({
            "rollout/due": float(sum(generation_round.required)),
            "rollout/complete": float(len(self.buffer.finished)),
        })  # fmt: skip

    def _keep_or_restart(self) -> Metrics:
        """Keep the groups that were not selected, or have their prompts wait; return how many these are."""
        unstarted = self.buffer.restart_unstarted()
        groups = float(len(self.buffer.started))
        tokens = float(sum(group.sampled_tokens for group in self.buffer.started))
        if self.config.rollout.partial:
            return Metrics.of({
                "rollout/carried": groups,
                "rollout/carried_tokens": tokens,
                "rollout/not_begun": float(unstarted),
            })  # fmt: skip
        self.buffer.restart_all()
        return Metrics.of({"rollout/discarded_prompts": groups, "rollout/discarded_tokens": tokens})

    def _next_round(self, wanted: int, seed: int) -> GenerationRound:
        """Top up the started groups with new prompts to the in-flight limit; return them as a round."""
        version, asynchrony = self.roles.hybrid_engine.version, self.config.asynchrony
        rollout, samples = self.config.rollout, self.config.batch.samples_per_prompt
        in_flight = rollout.prompts_in_flight(wanted) if rollout.oversample else wanted
        count = in_flight - len(self.buffer.started)
        if count > 0:
            self.buffer.add(start_groups(self._take_prompts(count), samples, seed, version))

        groups = tuple(self.buffer.started)
        if not rollout.oversample:
            return GenerationRound(groups, (True,) * len(groups), len(groups), version)
        required = (False,) * len(groups)
        if rollout.partial:
            assert asynchrony.max_staleness is not None
            required = self.buffer.required(
                version, ahead=asynchrony.steps_ahead, bound=asynchrony.max_staleness
            )
        if rollout.order == CLOSED:
            return GenerationRound(groups, required, wanted, version, rollout.round_tokens)
        return GenerationRound(groups, required, wanted, version, rendezvous=next(_RENDEZVOUS))

    def _take_prompts(self, count: int) -> list[SequenceGroup]:
        """Return ``count`` waiting groups: those of the buffer first, then new ones."""
        groups = self.buffer.take_waiting(count)
        if len(groups) < count:
            groups += waiting_groups(self.draw(count - len(groups)))
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer's state, and the number of informative groups."""
        return {**self.buffer.state_dict(), "informative": self.informative}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; where the settings cannot continue a group, its prompt starts anew.

        They cannot where a smaller bound makes the group too old. The engine's version is restored before.
        """
        self.informative = tuple(state["informative"])
        self.buffer.load_state_dict(state)
        if not self.buffer.started:
            return
        samples = self.config.batch.samples_per_prompt
        is_same = all(len(group.sequences) == samples for group in self.buffer.started)
        if self.config.rollout.partial and is_same:
            assert self.config.asynchrony.max_staleness is not None
            most_updates = self.config.asynchrony.max_staleness - self._ahead
            self.buffer.restart_late(self.roles.hybrid_engine.version, most_updates)
        else:
            self.buffer.restart_all()

    def still_wanted(self, queue: Sequence[SampledBatch]) -> list[SampledBatch]:
        """Return the batches that can be learned from, each in its turn; the prompts of others start anew."""
        version, kept, left = self.roles.hybrid_engine.version, [], []
        for batch in queue:
            age = version - int(batch.rollouts.policy_version.min())
            fits = len(kept) < self._ahead and not self._too_old(age, len(kept))
            (kept if fits else left).append(batch)
        for batch in reversed(left):
            self.buffer.restart(waiting_groups(batch.prompts))
        return kept

    @property
    def _ahead(self) -> int:
        return self.config.asynchrony.steps_ahead

    def _too_old(self, age: int, later: int) -> bool:
        """Return whether tokens of this age may not be learned from ``later`` updates from now."""
        assert self.config.asynchrony.max_staleness is not None
        return age + later > self.config.asynchrony.max_staleness


def whole(prompts: PromptBatch, samples: int, seed: int, version: int) -> GenerationRound:
    """Return a round of ``samples`` sequences of every prompt, all of which are waited for."""
    groups = tuple(start_groups(waiting_groups(prompts), samples, seed, version))
    return GenerationRound(groups, (True,) * len(groups), len(groups), version)


def gathered(rollout: RolloutRole, pending: Pending, members: ReplicaGroup) -> Rollouts:
    """Return the rows of a round of `whole`, grouped by prompt. Collective over the members."""
    _append(rollout, pending, members)
    return of_one_version(to_rollouts(pending.generation_round.groups))


def _append(rollout: RolloutRole, pending: Pending, members: ReplicaGroup) -> NewTokens:
    """Append the new tokens of all replicas to a round; return them. Collective over the members."""
    generation_round = pending.generation_round
    new_tokens = rollout.gather(pending.new_tokens, members, generation_round)
    sequences = [sequence for _, sequence in generation_round.unfinished]
    append_new_tokens(sequences, new_tokens, generation_round.version)
    return new_tokens


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


def of_one_version(rollouts: Rollouts) -> Rollouts:
    """Return rows without a version per token: all are of their row's."""
    return replace(rollouts, token_versions=None)


def partial_fraction(rollouts: Rollouts) -> float:
    """Return the share of rows with tokens of more than one version of the weights."""
    if rollouts.token_versions is None or not len(rollouts):
        return 0.0
    mask = rollouts.response_mask
    rows = row_index(rollouts.lengths)[mask]
    newest = torch.zeros(len(rollouts), dtype=torch.int64)
    newest = newest.scatter_reduce(0, rows, rollouts.token_versions[mask].long(), "amax")
    return float((newest > rollouts.policy_version).float().mean())


def staleness(version: int, rollouts: Rollouts, bound: int) -> Metrics:
    """Return how many updates old the rows' policies are; raise StalenessError beyond ``bound``.

    A row is as old as its oldest token; ``staleness/token_mean`` is over tokens.
    """
    age = (version - rollouts.policy_version).float()
    if len(age) and int(age.max()) > bound:
        raise StalenessError(
            f"rollouts of version {int(rollouts.policy_version.min())} came to a learner at version "
            f"{version}; asynchrony.max_staleness allows {bound} updates between them"
        )
    metrics = Metrics.mean("staleness/mean", float(age.sum()), len(age))
    metrics += Metrics.maximum("staleness/max", float(age.max()) if len(age) else 0.0)
    if rollouts.token_versions is not None:
        ages = version - rollouts.token_versions[rollouts.response_mask].double()
        metrics += Metrics.mean("staleness/token_mean", float(ages.sum()), len(ages))
    return metrics


def grade(roles: Roles, sampled: SampledBatch, members: ReplicaGroup) -> ScoredBatch:
    """Judge the responses, and the greedy ones that they are compared with. Collective over the members."""
    samples = len(sampled.rollouts) // max(len(sampled.prompts), 1)
    prompts = sampled.prompts.repeat(samples)
    judged = judge(roles, prompts, sampled.rollouts, members, sampled.early)
    scores, metrics, failures = judged.scores, sampled.metrics + judged.metrics, judged.failures
    if sampled.greedy is not None:
        greedy = judge(roles, sampled.prompts, sampled.greedy, members)
        counts = limited_counts(sampled.greedy)
        scores = replace(
            scores,
            baseline_rewards=greedy.scores.rewards.repeat_interleave(samples),
            baseline_lengths=counts.repeat_interleave(samples),
        )
        metrics, failures = metrics + greedy.metrics, failures + greedy.failures
    return ScoredBatch(prompts, sampled.rollouts, scores, judged.reasons, metrics, failures)


class Judged(NamedTuple):
    """Hold what all judges say of rows, see `ScoredBatch`."""

    scores: Scores
    reasons: tuple[str | None, ...]
    metrics: Metrics
    failures: tuple[Failure, ...]


def judge(
    roles: Roles,
    prompts: PromptBatch,
    rollouts: Rollouts,
    members: ReplicaGroup,
    early: EarlyAnswers | None = None,
) -> Judged:
    """Put what scorers and reward models say of each row together into one reward.

    A row is valid where every judge gave a finite score. Several are summed, each times its weight, and are
    components of their names, beside ``SCORER/NAME`` for what a scorer names. ``prompts`` has one entry per
    row. Metrics and failures are this rank's. Collective over the members.
    """
    # All judges are asked before any answer is gathered: those on ranks of their own work at the same time.
    answers = [model.infer(rollouts) for model in roles.reward_models]
    judgements = roles.reward.infer(prompts, rollouts, members, early)
    parts: list[torch.Tensor] = []
    components: dict[str, torch.Tensor] = {}
    reasons: dict[int, str] = {}
    for name, weight, shard, *_, told in judgements:
        reasons = {**told, **reasons}
        values = dict(members.gather_rows(shard).values)
        score, prefix = values.pop("rewards"), "" if roles.one_judge else f"{name}/"
        parts.append(score if roles.one_judge else weight * score)
        components |= {} if roles.one_judge else {name: score}
        components |= {prefix + key.removeprefix(COMPONENT): value for key, value in values.items()}
    for model, answer in zip(roles.reward_models, answers, strict=True):
        components[model.name] = members.gather_rows(answer).values[model.name]
        parts.append(model.weight * components[model.name])
    rewards = sum(parts[1:], parts[0])
    valid = rewards.isfinite() & (rollouts.finish_reason != FINISH_FAILED)
    rewards = rewards.masked_fill(~valid, float("nan"))
    metrics = Metrics.mean("reward/invalid", float((~valid).sum()), float(len(valid)))
    metrics += merge(judgement.metrics for judgement in judgements)
    said = [NO_RESPONSE if finish == FINISH_FAILED else NO_SCORE for finish in rollouts.finish_reason]
    words = tuple(None if valid[row] else reasons.get(row, said[row]) for row in range(len(valid)))
    failures = sum((one.failures for one in judgements), ())
    return Judged(Scores(rewards, valid, components), words, metrics, failures)


def _greedy(prompts: PromptBatch) -> PromptBatch:
    """Return the prompts with greedy decoding."""
    return replace(prompts, sampling=tuple(sampling.greedy() for sampling in prompts.sampling))
