"""Sampled responses for the steps, and the buffer of groups that are not finished or not selected yet.

The one idea: sampling is two calls. `RolloutSource.start` samples on the rollout's ranks and returns at once
on other ranks; `RolloutSource.finish` gathers the new tokens, so that from then on every rank has the same
rows. Between the two calls the other ranks can do something else, such as learning from an earlier batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_rl.algorithms import Algorithm
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import CLOSED, changes_temperature
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import EarlyRewards
from megatron_rl.roles.rollout import RolloutRole
from megatron_rl.rollout.buffer import (
    RolloutBuffer,
    add_early_rewards,
    early_rewards,
)
from megatron_rl.rollout.collate import (
    NewTokens,
    append_new_tokens,
    start_groups,
    to_prompts,
    to_rollouts,
    waiting_groups,
)
from megatron_rl.rollout.limits import AutoLimits, length_metrics
from megatron_rl.rollout.scheduler import GenerationRound
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.types import (
    PromptBatch,
    Rollouts,
    observed_counts,
    row_index,
    turn_starts,
)

_RENDEZVOUS = itertools.count(1)
"""Numbers of the open order's rounds. One counter per process, equal on all ranks, since the rounds of all
sources meet in the same store of the job."""


class StalenessError(RuntimeError):
    """Rollouts that are older, in updates, than `asynchrony.max_staleness` allows."""


@dataclass(frozen=True)
class Pending:
    """A round of generation that is sampled and not gathered yet.

    Example: on a rank without an engine ``new_tokens`` is empty until `RolloutSource.finish` gathers it.
    """

    generation_round: GenerationRound
    """The groups of the round, the same value on every rank."""
    new_tokens: NewTokens
    """Tokens that this rank sampled."""
    greedy: Pending | None = None
    """One greedy response per prompt, for algorithms with a greedy baseline; None for others."""


@dataclass(frozen=True)
class SampledBatch:
    """Responses to prompts, the same value on every rank.

    Example: 4 prompts with 8 samples each are ``prompts`` of length 4 and ``rollouts`` of 32 rows.
    """

    prompts: PromptBatch
    """[P] prompts."""
    rollouts: Rollouts
    """[P * samples] rows, those of a prompt consecutive."""
    greedy: Rollouts | None
    """[P] rows of greedy responses, None unless the algorithm compares with them."""
    metrics: Metrics
    """Metrics of sampling."""
    early: EarlyRewards = field(default_factory=dict)
    """Rewards that were computed while other groups were sampled."""


class RolloutSource:
    """Source of a step's responses, with the buffer of the groups in flight beyond that step.

    With ``rollout.oversample`` that fraction of further prompts is sampled, and the step selects the groups
    that finish first, counted in token rounds of ``rollout.round_tokens`` tokens per sequence. With
    ``rollout.partial`` the next step continues the other groups with its newer weights; the step waits for a
    group whose oldest token would otherwise exceed ``asynchrony.max_staleness``. Without ``rollout.partial``
    the other groups are dropped and the next step starts with their prompts, so prompts with short responses
    are trained on more often.

    The open order has no token rounds: the replicas sample until the learning ranks wait for them and enough
    groups are finished. The next step continues the other groups, started or not.

    ``draw``: returns the next n prompts of the training data.
    ``buffer``: the waiting, running and finished groups; part of the checkpoint.
    ``informative``: numbers of informative and of all groups in the last batch; part of the checkpoint.
    ``limits``: limits of responses that follow earlier lengths; part of the checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        algorithm: Algorithm,
        draw: Callable[[int], PromptBatch],
    ) -> None:
        self.config = config
        self.roles = roles
        self.algorithm = algorithm
        self.draw = draw
        self.buffer = RolloutBuffer()
        self.limits = AutoLimits(config.rollout)
        self.informative = (0, 0)

    def start(self, prompt_count: int, seed: int) -> Pending:
        """Sample a round on the rollout's ranks; other ranks return at once.

        Collective over the rollout's ranks.
        """
        generation_round = self._next_round(prompt_count, seed)
        rollout = self.roles.rollout
        reward = self.roles.reward

        # With token rounds, groups finish only at a gather, so no reward can be computed earlier.
        on_finished = None
        if reward.has_functions and generation_round.token_round is None:
            on_finished = reward.start_early
        pending = Pending(generation_round, rollout.infer(generation_round, on_finished))

        # Greedy responses are sampled from the same weights, before the engine goes to sleep.
        if not self.algorithm.needs_greedy_baseline:
            return pending

        greedy_prompts = with_greedy_sampling(to_prompts(generation_round.groups))
        greedy = start_complete(rollout, greedy_prompts, 1, seed, generation_round.version)
        return replace(pending, greedy=greedy)

    def finish(self, pending: Pending, members: ReplicaGroup) -> SampledBatch:
        """Gather a round and return the groups selected for the step. Collective over the members."""
        rollout = self.roles.rollout
        generation_round = pending.generation_round
        new_tokens = _gather_and_append(rollout, pending, members)
        if generation_round.token_round is None:
            add_early_rewards(
                generation_round.groups,
                self.roles.reward.gather_early(members),
            )

        # All ranks have the same sequences now, and select the same groups.
        selected = self.buffer.select(generation_round.required, generation_round.batch_groups)
        prompts = to_prompts(selected)
        rollouts = to_rollouts(selected)
        early = early_rewards(selected)
        metrics = conversation_metrics(rollouts)
        metrics += length_metrics(prompts, rollouts, self.config.rollout)
        if changes_temperature(self.config.rollout):
            temperatures = rollouts.temperature
            metrics += Metrics.mean("rollout/temperature", float(temperatures.sum()), len(temperatures))
        self.limits.observe(prompts, rollouts)
        if not self.config.rollout.capabilities.in_process:
            metrics += Metrics.of({"rollout/sampled_again": float(new_tokens.resubmitted)})

        # Without oversampling every group was selected, and all tokens are of one version.
        if not self.config.rollout.oversample:
            greedy = None
            if pending.greedy is not None:
                greedy = gather_complete(rollout, pending.greedy, members)
            if self.config.hybrid_engine.every != 1:
                metrics += self._staleness(rollouts)
            return SampledBatch(
                prompts,
                without_token_versions(rollouts),
                greedy,
                metrics,
                early,
            )

        # With oversampling some groups remain, finished or not.
        metrics += self._round_metrics(generation_round, new_tokens)
        metrics += Metrics.of({"rollout/partial_fraction": partial_fraction(rollouts)})
        metrics += self._carry_over_or_restart()

        if self.config.rollout.partial or self.config.hybrid_engine.every != 1:
            metrics += self._staleness(rollouts)
        return SampledBatch(prompts, rollouts, None, metrics, early)

    def _staleness(self, rollouts: Rollouts) -> Metrics:
        """Return the age of the selected rows; see `staleness`."""
        # With sampling ahead, staleness is measured when the sequences are trained on.
        if self._steps_ahead:
            return Metrics()
        return staleness(self.roles.hybrid_engine.version, rollouts, self._max_staleness)

    def _round_metrics(self, generation_round: GenerationRound, new_tokens: NewTokens) -> Metrics:
        """Return the number of token rounds; in the open order, the required and the surplus groups."""
        if generation_round.rendezvous is None:
            token_rounds = new_tokens.shard.values["round"]
            count = float(token_rounds.max()) if len(token_rounds) else 0.0
            return Metrics.of({"rollout/rounds": count})
        return Metrics.of({
            "rollout/due": float(sum(generation_round.required)),
            "rollout/complete": float(len(self.buffer.finished)),
        })  # fmt: skip

    def _carry_over_or_restart(self) -> Metrics:
        """Carry over the groups that were not selected, or restart their prompts; return their counts."""
        # Restart groups without tokens: nothing is lost, and the next weights sample all of their tokens.
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
        return Metrics.of({
            "rollout/discarded_prompts": groups,
            "rollout/discarded_tokens": tokens,
        })  # fmt: skip

    def _next_round(self, prompt_count: int, seed: int) -> GenerationRound:
        """Top up the carried-over groups with new prompts to the in-flight limit; return them as a round."""
        version = self.roles.hybrid_engine.rollout_version
        rollout = self.config.rollout

        # Carried-over groups count towards the limit: only the difference is filled with new prompts.
        in_flight_limit = prompt_count
        if rollout.oversample:
            in_flight_limit = rollout.prompts_in_flight(prompt_count)
        missing_groups = in_flight_limit - len(self.buffer.started)
        if missing_groups > 0:
            waiting = self.limits.with_limits(self._take_prompts(missing_groups))
            self.buffer.add(
                start_groups(
                    waiting,
                    self.config.batch.samples_per_prompt,
                    seed,
                    version,
                )
            )

        groups = tuple(self.buffer.started)
        if not rollout.oversample:
            return GenerationRound(groups, (True,) * len(groups), len(groups), version)

        # Groups that would be too old after one more step must finish in this round.
        required = (False,) * len(groups)
        if rollout.partial:
            required = self.buffer.required(
                self.roles.hybrid_engine.version, ahead=self._steps_ahead, bound=self._max_staleness
            )
        # The closed order has token rounds; the open one ends when enough groups are finished.
        if rollout.order == CLOSED:
            return GenerationRound(
                groups,
                required,
                prompt_count,
                version,
                rollout.round_tokens,
            )
        return GenerationRound(
            groups,
            required,
            prompt_count,
            version,
            rendezvous=next(_RENDEZVOUS),
        )

    def _take_prompts(self, count: int) -> list[SequenceGroup]:
        """Return ``count`` waiting groups: groups of the buffer first, then new ones."""
        groups = self.buffer.take_waiting(count)
        if len(groups) < count:
            groups += waiting_groups(self.draw(count - len(groups)))
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state: groups, counts of informative groups, and lengths of responses."""
        return {
            **self.buffer.state_dict(),
            "informative": self.informative,
            "lengths": self.limits.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; restart the prompt of each group that the current settings cannot continue.

        Such groups exist after a change of ``samples_per_prompt`` or ``rollout.partial``, or if a smaller
        ``max_staleness`` makes groups too old. The hybrid engine's version must be restored before.
        """
        self.informative = tuple(state["informative"])
        # Checkpoints of older versions have no lengths.
        self.limits.load_state_dict(state.get("lengths", {}))
        self.buffer.load_state_dict(state)
        if not self.buffer.started:
            return

        # A group cannot get further sequences, and without `rollout.partial` nothing continues it.
        samples = self.config.batch.samples_per_prompt
        same_samples = all(len(group.sequences) == samples for group in self.buffer.started)
        if self.config.rollout.partial and same_samples:
            max_updates = self._max_staleness - self._steps_ahead
            self.buffer.restart_late(self.roles.hybrid_engine.version, max_updates)
        else:
            self.buffer.restart_all()

    def keep_learnable(self, queue: Sequence[SampledBatch]) -> list[SampledBatch]:
        """Return the queued batches that can still be trained on, in order; restart the other prompts."""
        version = self.roles.hybrid_engine.version
        learnable: list[SampledBatch] = []
        too_old: list[SampledBatch] = []
        for batch in queue:
            age = version - int(batch.rollouts.policy_version.min())
            # A batch is learned from after those before it in the queue, one update each.
            age_when_learned = age + len(learnable)
            if len(learnable) < self._steps_ahead and age_when_learned <= self._max_staleness:
                learnable.append(batch)
            else:
                too_old.append(batch)

        # Each restart puts prompts in front of the others, so that the oldest batch comes last.
        for batch in reversed(too_old):
            self.buffer.restart(waiting_groups(batch.prompts))
        return learnable

    @property
    def _steps_ahead(self) -> int:
        return self.config.asynchrony.steps_ahead

    @property
    def _max_staleness(self) -> int:
        assert self.config.asynchrony.max_staleness is not None
        return self.config.asynchrony.max_staleness


def complete_round(
    prompts: PromptBatch,
    samples: int,
    seed: int,
    version: int,
) -> GenerationRound:
    """Return a round of ``samples`` sequences per prompt in which every sequence is finished."""
    groups = tuple(start_groups(waiting_groups(prompts), samples, seed, version))
    return GenerationRound(groups, (True,) * len(groups), len(groups), version)


def start_complete(
    rollout: RolloutRole,
    prompts: PromptBatch,
    samples: int,
    seed: int,
    version: int,
) -> Pending:
    """Sample ``samples`` complete sequences per prompt on the rollout's ranks; other ranks return at once.

    Collective over the rollout's ranks.
    """
    generation_round = complete_round(prompts, samples, seed, version)
    return Pending(generation_round, rollout.infer(generation_round))


def gather_complete(rollout: RolloutRole, pending: Pending, members: ReplicaGroup) -> Rollouts:
    """Gather a round of `start_complete`; return its rows, grouped by prompt. Collective over the members."""
    _gather_and_append(rollout, pending, members)
    return without_token_versions(to_rollouts(pending.generation_round.groups))


def _gather_and_append(rollout: RolloutRole, pending: Pending, members: ReplicaGroup) -> NewTokens:
    """Append the new tokens of all replicas to a round's sequences. Collective over the members."""
    generation_round = pending.generation_round
    new_tokens = rollout.gather(pending.new_tokens, members, generation_round)
    sequences = [sequence for _, sequence in generation_round.unfinished]
    append_new_tokens(sequences, new_tokens, generation_round.version)
    return new_tokens


def conversation_metrics(rollouts: Rollouts) -> Metrics:
    """Return the means per row of turns, observed tokens and failures, for rows that are conversations."""
    if rollouts.outcomes is None:
        return Metrics()

    rows = float(len(rollouts))
    metrics = Metrics.mean("environment/turns", float(turn_starts(rollouts).sum()), rows)
    metrics += Metrics.mean(
        "environment/observed_tokens",
        float(observed_counts(rollouts).sum()),
        rows,
    )

    # By reason, so that a timeout is not mistaken for an error of the environment.
    failures = Counter(outcome.failure for outcome in rollouts.outcomes if outcome and outcome.failure)
    metrics += Metrics.mean("environment/failed", float(failures.total()), rows)
    for reason, count in failures.items():
        metrics += Metrics.mean(f"environment/failed_{reason}", float(count), rows)
    return metrics


def without_token_versions(rollouts: Rollouts) -> Rollouts:
    """Return rows whose tokens are all of the row's policy version, without a version per token."""
    return replace(rollouts, token_versions=None)


def partial_fraction(rollouts: Rollouts) -> float:
    """Return the fraction of rows with tokens of more than one policy version."""
    if rollouts.token_versions is None or not len(rollouts):
        return 0.0

    # The newest version among the response tokens of each row: [B].
    mask = rollouts.response_mask
    rows = row_index(rollouts.lengths)[mask]
    newest = torch.zeros(len(rollouts), dtype=torch.int64)
    newest = newest.scatter_reduce(0, rows, rollouts.token_versions[mask].long(), "amax")
    # A row's policy version is that of its oldest token.
    return float((newest > rollouts.policy_version).float().mean())


def staleness(version: int, rollouts: Rollouts, max_updates: int) -> Metrics:
    """Return the age of rows in updates; raise StalenessError if one is older than ``max_updates``.

    A row is as old as its oldest token; ``staleness/token_mean`` is the mean over tokens.
    """
    # Raised before the metrics: rows that are too old must not be learned from.
    age = (version - rollouts.policy_version).float()
    if len(age) and int(age.max()) > max_updates:
        raise StalenessError(
            f"rollouts of version {int(rollouts.policy_version.min())} reached a learner at version "
            f"{version}; asynchrony.max_staleness allows {max_updates} updates between them"
        )

    metrics = Metrics.mean("staleness/mean", float(age.sum()), len(age))
    metrics += Metrics.maximum("staleness/max", float(age.max()) if len(age) else 0.0)
    if rollouts.token_versions is not None:
        token_age = version - rollouts.token_versions[rollouts.response_mask].double()
        metrics += Metrics.mean("staleness/token_mean", float(token_age.sum()), len(token_age))
    return metrics


def with_greedy_sampling(prompts: PromptBatch) -> PromptBatch:
    """Return the prompts with greedy decoding."""
    return replace(
        prompts,
        sampling=tuple(sampling.greedy() for sampling in prompts.sampling),
    )
