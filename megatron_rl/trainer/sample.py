"""What a step learns from: responses to prompts, sampled once or in rounds, and what their rewards are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from megatron_rl.algorithms import Algorithm
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED
from megatron_rl.metrics import Metrics, merge
from megatron_rl.parallel.exchange import Members
from megatron_rl.rewards.function import Failure
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT, EarlyAnswers
from megatron_rl.roles.rollout import RolloutRole
from megatron_rl.rollout import episodes
from megatron_rl.rollout.episodes import Added, Episodes, Settled, Sweep
from megatron_rl.trainer.reward_failures import NO_RESPONSE
from megatron_rl.types import FINISH_FAILED, PromptBatch, Rollouts, Scores, row_counts

_RENDEZVOUS = itertools.count(1)
"""Numbers of open sweeps, equal on all ranks, of all sources that use the job's store."""


class StalenessError(RuntimeError):
    """Report rollouts that are older than the run allows."""


@dataclass(frozen=True)
class Pending:
    """Hold what this rank's engine has added to the episodes of ``sweep``, before it is gathered."""

    sweep: Sweep
    added: Added
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
    """Give the responses to a wanted number of prompts, and hold what was begun beyond them.

    With ``rollout.oversample`` that fraction of further prompts is sampled beside the wanted ones, and the
    step takes the groups that are complete first, counted in rounds of ``rollout.round_tokens`` tokens per
    response. With ``rollout.partial`` the others are continued in the next step by its newer weights; a group
    whose oldest token would otherwise get older than ``asynchrony.max_staleness`` is waited for instead.
    Without, the others are discarded and their prompts come first in the next step; prompts with short
    responses are then learned from more often.

    In the open order nobody counts rounds: the rollout samples until the ranks that learn wait for it and the
    wanted groups are complete. All others go on in the next step, those that nobody began as prompts.

    ``draw(n)`` gives the next n prompts. ``carried``, what is ``judged`` of it, ``waiting`` and
    ``informative`` (groups that taught something, groups sampled) are state of the run.
    """

    def __init__(
        self, config: RunConfig, roles: Roles, algorithm: Algorithm, draw: Callable[[int], PromptBatch]
    ) -> None:
        self.config, self.roles, self.algorithm, self.draw = config, roles, algorithm, draw
        self.carried: Episodes | None = None
        self.waiting: PromptBatch | None = None
        self.judged: EarlyAnswers = {}
        self.informative = (0, 0)

    def start(self, wanted: int, seed: int) -> Pending:
        """Sample on the ranks of the rollout; others return at once. Collective over the rollout's ranks."""
        sweep = self._sweep(wanted, seed)
        rollout, reward = self.roles.rollout, self.roles.reward
        on_complete = reward.begin if reward.judges_early and sweep.tokens is None else None
        pending = Pending(sweep, rollout.infer(sweep, on_complete))
        if not self.algorithm.needs_greedy_baseline:
            return pending
        greedy = whole(_greedy(sweep.flight.prompts), 1, seed, sweep.version)
        return replace(pending, greedy=Pending(greedy, rollout.infer(greedy)))

    def finish(self, pending: Pending, members: Members) -> SampledBatch:
        """Gather what was sampled and keep what is not given away. Collective over the members."""
        rollout, sweep = self.roles.rollout, pending.sweep
        added = rollout.gather(pending.added, members, sweep.rendezvous)
        settled = episodes.settle(sweep, added)
        taken, left = settled.flight.groups(settled.taken), settled.flight.groups(settled.left)
        metrics = episodes.conversation_metrics(taken.rollouts)
        if not self.config.rollout.capabilities.in_process:
            metrics += Metrics.of({"rollout/sampled_again": float(added.sampled_again)})
        early = self._early(settled, members) if sweep.tokens is None else {}
        if not self.config.rollout.oversample:
            greedy = None if pending.greedy is None else gathered(rollout, pending.greedy, members)
            return SampledBatch(taken.prompts, of_one_version(taken.rollouts), greedy, metrics, early)
        if sweep.rendezvous is None:
            rounds = added.shard.values["round"]
            metrics += Metrics.of({"rollout/rounds": float(rounds.max()) if len(rounds) else 0.0})
        else:
            open_groups = {row // left.samples for row in left.open_rows()}
            metrics += Metrics.of({
                "rollout/due": float(sum(sweep.must)),
                "rollout/complete": float(len(left.prompts) - len(open_groups)),
            })  # fmt: skip
        metrics += Metrics.of({"rollout/partial_fraction": partial_fraction(taken.rollouts)})
        self._give_back(settled.flight.prompts.rows(settled.untouched))
        if self.config.rollout.partial:
            self.carried = left
            metrics += Metrics.of({
                "rollout/carried": float(len(left.prompts)),
                "rollout/carried_tokens": float(left.response_tokens()),
                "rollout/not_begun": float(len(settled.untouched)),
            })  # fmt: skip
        else:
            self._give_back(left.prompts)
            metrics += Metrics.of({
                "rollout/discarded_prompts": float(len(left.prompts)),
                "rollout/discarded_tokens": float(left.response_tokens()),
            })  # fmt: skip
        if self.config.rollout.partial and not self.config.asynchrony.steps_ahead:
            # Rows that are sampled ahead get older still: they are measured when they are learned from.
            assert self.config.asynchrony.max_staleness is not None
            version = self.roles.hybrid_engine.version
            metrics += staleness(version, taken.rollouts, self.config.asynchrony.max_staleness)
        return SampledBatch(taken.prompts, taken.rollouts, None, metrics, early)

    def _early(self, settled: Settled, members: Members) -> EarlyAnswers:
        """Return what is known of the rows that are taken, and keep what is of those that are left.

        Collective over the members.
        """
        known = {name: dict(answers) for name, answers in self.judged.items()}
        for name, answers in self.roles.reward.early(members).items():
            known.setdefault(name, {}).update(answers)
        self.judged = of_groups(known, settled.left, settled.flight.samples)
        return of_groups(known, settled.taken, settled.flight.samples)

    def _sweep(self, wanted: int, seed: int) -> Sweep:
        """Return what was carried with as many new prompts as are to be in flight beside it."""
        version, asynchrony = self.roles.hybrid_engine.version, self.config.asynchrony
        samples = self.config.batch.samples_per_prompt
        if not self.config.rollout.oversample:
            return whole(self._prompts(wanted), samples, seed, version)
        carried, self.carried = self.carried, None
        flights = [carried] if carried is not None and len(carried.prompts) else []
        count = self.config.rollout.prompts_in_flight(wanted) - sum(len(f.prompts) for f in flights)
        if count > 0:
            flights.append(episodes.begin(self._prompts(count), samples, seed, version))
        flight = episodes.join(flights)
        must = (False,) * len(flight.prompts)
        if self.config.rollout.partial:
            assert asynchrony.max_staleness is not None
            bound = asynchrony.max_staleness
            must = episodes.must_end(flight, version, ahead=asynchrony.steps_ahead, bound=bound)
        if self.config.rollout.order == CLOSED:
            return Sweep(flight, must, wanted, version, self.config.rollout.round_tokens)
        return Sweep(flight, must, wanted, version, rendezvous=next(_RENDEZVOUS))

    def _prompts(self, count: int) -> PromptBatch:
        """Return ``count`` prompts: those that came back first, then new ones."""
        back, self.waiting = self.waiting, None
        if back is None or not len(back):
            return self.draw(count)
        if len(back) > count:
            self.waiting = back.rows(range(count, len(back)))
        first = back.rows(range(min(count, len(back))))
        if len(first) == count:
            return first
        return PromptBatch.concatenate([first, self.draw(count - len(first))])

    def _give_back(self, prompts: PromptBatch) -> None:
        if not len(prompts):
            return
        self.waiting = prompts if self.waiting is None else PromptBatch.concatenate([prompts, self.waiting])

    def state_dict(self) -> dict[str, Any]:
        """Return what is begun and what is known of it, what waits, and the number of informative groups."""
        names = ("carried", "judged", "waiting", "informative")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; under settings that cannot continue a response its prompt starts anew.

        They cannot where a smaller bound makes its group too old. The engine's version is there already.
        """
        self.carried, self.judged, self.waiting = state["carried"], state["judged"], state["waiting"]
        self.informative = tuple(state["informative"])
        if self.carried is None:
            return
        same = self.carried.samples in (0, self.config.batch.samples_per_prompt)
        if not (self.config.rollout.partial and same):
            self._give_back(self.carried.prompts)
            self.carried, self.judged = None, {}
        elif len(self.carried.prompts):
            ages = episodes.group_ages(self.carried, self.roles.hybrid_engine.version)
            late = [group for group, age in enumerate(ages) if self._too_old(age, self._ahead)]
            kept = sorted(set(range(len(ages))) - set(late))
            self._give_back(self.carried.prompts.rows(late))
            self.judged = of_groups(self.judged, kept, self.carried.samples)
            self.carried = self.carried.groups(kept)

    def still_wanted(self, queue: Sequence[SampledBatch]) -> list[SampledBatch]:
        """Return the batches that can be learned from, each in its turn; the prompts of others start anew."""
        version, kept, left = self.roles.hybrid_engine.version, [], []
        for batch in queue:
            age = version - int(batch.rollouts.policy_version.min())
            fits = len(kept) < self._ahead and not self._too_old(age, len(kept))
            (kept if fits else left).append(batch)
        for batch in reversed(left):
            self._give_back(batch.prompts)
        return kept

    @property
    def _ahead(self) -> int:
        return self.config.asynchrony.steps_ahead

    def _too_old(self, age: int, later: int) -> bool:
        """Say whether tokens of this age may not be learned from ``later`` updates from now."""
        assert self.config.asynchrony.max_staleness is not None
        return age + later > self.config.asynchrony.max_staleness


def whole(prompts: PromptBatch, samples: int, seed: int, version: int) -> Sweep:
    """Return the sweep that begins and ends ``samples`` episodes of every prompt."""
    flight = episodes.begin(prompts, samples, seed, version)
    return Sweep(flight, (True,) * len(prompts), len(prompts), version)


def gathered(rollout: RolloutRole, pending: Pending, members: Members) -> Rollouts:
    """Return the rows of a sweep that has ended, grouped by prompt. Collective over the members."""
    flight, taken, *_ = episodes.settle(pending.sweep, rollout.gather(pending.added, members))
    return of_one_version(flight.groups(taken).rollouts)


def of_groups(answers: EarlyAnswers, groups: Sequence[int], samples: int) -> EarlyAnswers:
    """Return what is known of the rows of ``groups``, by their rows where only these groups are."""
    places = {
        group * samples + sample: place * samples + sample
        for place, group in enumerate(groups)
        for sample in range(samples)
    }
    return {
        name: {places[row]: answer for row, answer in known.items() if row in places}
        for name, known in answers.items()
    }


def of_one_version(rollouts: Rollouts) -> Rollouts:
    """Return rows without a version per token: all are of their row's."""
    return replace(rollouts, token_versions=None)


def partial_fraction(rollouts: Rollouts) -> float:
    """Return the share of rows with tokens of more than one version of the weights."""
    if rollouts.token_versions is None or not len(rollouts):
        return 0.0
    mask = rollouts.response_mask
    newest = -episodes.oldest_versions(-rollouts.token_versions, mask, rollouts.lengths, 0)
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


def grade(roles: Roles, sampled: SampledBatch, members: Members) -> ScoredBatch:
    """Judge the responses, and the greedy ones that they are compared with. Collective over the members."""
    samples = len(sampled.rollouts) // max(len(sampled.prompts), 1)
    prompts = sampled.prompts.repeat(samples)
    judged = judge(roles, prompts, sampled.rollouts, members, sampled.early)
    scores, metrics, failures = judged.scores, sampled.metrics + judged.metrics, judged.failures
    if sampled.greedy is not None:
        greedy = judge(roles, sampled.prompts, sampled.greedy, members)
        counts = row_counts(sampled.greedy.response_mask, sampled.greedy.lengths)
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
    members: Members,
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
