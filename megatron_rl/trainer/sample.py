"""Sampling of the responses for each step, and the buffer of groups that no step has trained on yet.

Sampling is split into two calls. `RolloutSource.start_round` samples on the rollout's ranks, and returns
immediately on other ranks. `RolloutSource.finish_round` gathers the new tokens, after which all ranks have
the same rows. Between the two calls the other ranks can do other work, such as training on an earlier batch.
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
from megatron_rl.rewards.filters import FILTERS
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import EarlyRewards
from megatron_rl.roles.rollout import RolloutRole
from megatron_rl.rollout.buffer import (
    RolloutBuffer,
    merge_early_rewards,
    restore_early_rewards,
)
from megatron_rl.rollout.collate import (
    NewTokens,
    append_new_tokens,
    make_waiting_groups,
    start_groups,
    to_prompts,
    to_rollouts,
)
from megatron_rl.rollout.limits import AutoLimits, compute_length_metrics
from megatron_rl.rollout.sampling import derive_row_seeds
from megatron_rl.rollout.scheduler import GenerationRound
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.types import (
    PromptBatch,
    Rollouts,
    observation_token_counts,
    row_index,
    turn_starts,
)

_OPEN_ROUND_NUMBERS = itertools.count(1)
"""Numbers of the generation rounds with `rollout.order: open`.

All sources of a process use one counter, since their rounds have counters in the same key-value store of the
job. All ranks run the same rounds, so their numbers are equal.
"""


class StalenessError(RuntimeError):
    """Error that is raised if rollouts are older than `asynchrony.max_staleness` weight updates."""


@dataclass(frozen=True)
class PendingRound:
    """Generation round whose tokens have been sampled, but not yet gathered onto the other ranks.

    Example: on a rank without an engine, ``new_tokens`` is empty.
    """

    generation_round: GenerationRound
    """The groups of the round, equal on all ranks."""
    new_tokens: NewTokens
    """Tokens that this rank sampled."""
    greedy: PendingRound | None = None
    """Round with one greedy response per prompt, for algorithms with a greedy baseline; None for others."""


@dataclass(frozen=True)
class SampledBatch:
    """Responses to prompts, equal on all ranks.

    Example: 4 prompts with 8 samples each are ``prompts`` of length 4 and ``rollouts`` of 32 rows.
    """

    prompts: PromptBatch
    """The P prompts, each with the same number of samples."""
    rollouts: Rollouts
    """P * samples rows; the rows of a prompt are consecutive."""
    greedy: Rollouts | None
    """P rows with the prompts' greedy responses; None unless the algorithm has a greedy baseline."""
    metrics: Metrics
    """Metrics of sampling."""
    early: EarlyRewards = field(default_factory=dict)
    """Rewards that were computed while other groups were sampled: name of the scorer -> row -> reward."""


class RolloutSource:
    """Source of each step's responses, with the buffer of groups that later steps may use.

    With `rollout.oversample`, a step samples more prompts than it trains on; the setting is the fraction of
    additional prompts. The step samples in token rounds of `rollout.round_tokens` tokens per sequence, and
    selects the groups that finish first.

    With `rollout.partial`, the next step continues the remaining groups with newer weights. A step waits for
    groups that would otherwise become older than `asynchrony.max_staleness`. Without `rollout.partial`, the
    next step restarts the prompts of the remaining groups, so the run trains more often on prompts with short
    responses.

    With `rollout.order: open` there are no token rounds. The replicas sample until enough groups are finished
    and the learners wait for them. The next step continues the remaining groups.

    ``draw_prompts``: function that returns the next n prompts of the training data.
    ``buffer``: the waiting, running and finished groups; checkpoints contain them.
    ``group_counts``: number of informative groups (whose rewards are not all equal), and number of all
        groups, in the last batch; checkpoints contain them.
    ``limits``: automatic limits of response lengths; checkpoints contain their state.
    """

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        algorithm: Algorithm,
        draw_prompts: Callable[[int], PromptBatch],
    ) -> None:
        self.config = config
        self.roles = roles
        self.algorithm = algorithm
        self._draw_prompts = draw_prompts
        self.buffer = RolloutBuffer()
        self.limits = AutoLimits(config.rollout)
        self.group_counts = (0, 0)

    def start_round(self, prompt_count: int, seed: int) -> PendingRound:
        """Sample responses for a batch of ``prompt_count`` prompts on the rollout's ranks.

        `finish_round` gathers the sampled tokens. All other ranks sample nothing and return immediately.
        Collective over the rollout's ranks.
        """
        generation_round = self._make_next_round(prompt_count, seed)
        rollout = self.roles.rollout
        reward = self.roles.reward

        # In a token round, every sequence gets at most `rollout.round_tokens` tokens; then the tokens of all
        # replicas are gathered. Only the gather determines which groups are finished, so no rewards can be
        # computed during sampling.
        on_finished = None
        if reward.has_local_scorers and generation_round.max_round_tokens is None:
            on_finished = reward.start_early_rewards
        pending = PendingRound(generation_round, rollout.infer(generation_round, on_finished))

        # Sample greedy responses from the same weights, while the engine is awake.
        if not self.algorithm.needs_greedy_baseline:
            return pending

        greedy_prompts = with_greedy_sampling(to_prompts(generation_round.groups))
        greedy = start_complete_round(rollout, greedy_prompts, 1, seed, generation_round.version)
        return replace(pending, greedy=greedy)

    def finish_round(self, pending: PendingRound, replica_group: ReplicaGroup) -> SampledBatch:
        """Gather the sampled tokens of all replicas and return the groups that the step trains on.

        ``pending``: result of `start_round` on this rank. Collective over the replica group.
        """
        rollout = self.roles.rollout
        generation_round = pending.generation_round
        new_tokens = _gather_and_append(rollout, pending, replica_group)

        # With token rounds, no rewards are computed during sampling, see `start_round`.
        if generation_round.max_round_tokens is None:
            restore_early_rewards(
                generation_round.groups,
                self.roles.reward.gather_early_rewards(replica_group),
            )

        # All ranks now have the same sequences, so they select the same groups.
        selected = self.buffer.select(generation_round.required, generation_round.batch_groups)
        prompts = to_prompts(selected)
        rollouts = to_rollouts(selected)
        early_rewards = merge_early_rewards(selected)
        metrics = conversation_metrics(rollouts)
        metrics += compute_length_metrics(prompts, rollouts, self.config.rollout)
        if changes_temperature(self.config.rollout):
            temperatures = rollouts.temperature
            metrics += Metrics.mean("rollout/temperature", float(temperatures.sum()), len(temperatures))
        self.limits.record_lengths(prompts, rollouts)
        if not self.config.rollout.capabilities.in_process:
            metrics += Metrics.of({"rollout/sampled_again": float(new_tokens.resubmitted)})

        # Without oversampling, every group has been selected, and all tokens have the same version.
        if not self.config.rollout.oversample:
            greedy = None
            if pending.greedy is not None:
                greedy = gather_complete_round(rollout, pending.greedy, replica_group)
            if self.config.hybrid_engine.every != 1:
                metrics += self._staleness_metrics(rollouts)
            return SampledBatch(
                prompts,
                drop_token_versions(rollouts),
                greedy,
                metrics,
                early_rewards,
            )

        # With oversampling, some groups were not selected.
        metrics += self._round_metrics(generation_round, new_tokens)
        metrics += Metrics.of({"rollout/partial_fraction": mixed_version_fraction(rollouts)})
        metrics += self._carry_over_or_restart()

        if self.config.rollout.partial or self.config.hybrid_engine.every != 1:
            metrics += self._staleness_metrics(rollouts)
        return SampledBatch(prompts, rollouts, None, metrics, early_rewards)

    def _staleness_metrics(self, rollouts: Rollouts) -> Metrics:
        """Return `staleness_metrics` of the selected rows, or no metrics if the run samples ahead."""
        # With sampling ahead, staleness is measured when the sequences are trained on.
        if self._steps_ahead:
            return Metrics()
        return staleness_metrics(self.roles.hybrid_engine.version, rollouts, self._max_staleness)

    def _round_metrics(self, generation_round: GenerationRound, new_tokens: NewTokens) -> Metrics:
        """Return metrics of the sampling in a step; their names depend on `rollout.order`.

        With ``closed``, sequences are sampled in token rounds of `rollout.round_tokens` tokens each, and
        ``rollout/rounds`` is the number of token rounds. With ``open``, sampling continues until the learners
        wait and enough groups are finished. ``rollout/due`` is then the number of groups that had to finish
        in this step, because they would be too old in the next. ``rollout/complete`` is the number of
        finished groups in the buffer.
        """
        if generation_round.open_round_number is None:
            sequence_rounds = new_tokens.shard.values["round"]
            round_count = float(sequence_rounds.max()) if len(sequence_rounds) else 0.0
            return Metrics.of({"rollout/rounds": round_count})
        return Metrics.of({
            "rollout/due": float(sum(generation_round.required)),
            "rollout/complete": float(len(self.buffer.finished)),
        })  # fmt: skip

    def _carry_over_or_restart(self) -> Metrics:
        """Carry over the groups that the step does not train on, or restart their prompts; return metrics.

        With `rollout.partial`, the next step continues these groups with newer weights. Otherwise the groups
        are discarded, and a later step samples new responses to their prompts.
        """
        # Restart groups without tokens, so that newer weights sample all of their tokens.
        unstarted_count = self.buffer.restart_groups_without_progress()
        group_count = float(len(self.buffer.started))
        token_count = float(sum(group.num_sampled_tokens for group in self.buffer.started))
        if self.config.rollout.partial:
            return Metrics.of({
                "rollout/carried": group_count,
                "rollout/carried_tokens": token_count,
                "rollout/not_begun": float(unstarted_count),
            })  # fmt: skip

        self.buffer.restart_all()
        return Metrics.of({
            "rollout/discarded_prompts": group_count,
            "rollout/discarded_tokens": token_count,
        })  # fmt: skip

    def _make_next_round(self, prompt_count: int, seed: int) -> GenerationRound:
        """Make a round of the buffer's running groups, topped up with new groups to the in-flight limit.

        ``prompt_count``: number of groups in the training batch. It is also the in-flight limit, unless
        `rollout.oversample` is set: the limit is then higher.
        """
        version = self.roles.hybrid_engine.rollout_version
        rollout = self.config.rollout

        # Groups from earlier steps count towards the limit.
        in_flight_limit = prompt_count
        if rollout.oversample:
            in_flight_limit = rollout.prompts_in_flight(prompt_count)
        missing_groups = in_flight_limit - len(self.buffer.started)
        if missing_groups > 0:
            waiting_groups = self.limits.with_limits(self._take_waiting_groups(missing_groups))
            self.buffer.add_started(
                start_groups(
                    waiting_groups,
                    self.config.batch.samples_per_prompt,
                    seed,
                    version,
                )
            )

        # Without oversampling, the batch consists of all groups of the round.
        groups = tuple(self.buffer.started)
        if not rollout.oversample:
            return _make_round_of_all(groups, version)

        # Groups that would be too old if they finished in the next step must finish in this round.
        required = (False,) * len(groups)
        if rollout.partial:
            required = self.buffer.flag_required(
                self.roles.hybrid_engine.version,
                updates_ahead=self._steps_ahead,
                max_updates=self._max_staleness,
            )
        # With `rollout.order: closed`, sampling ends after a token round (`rollout.round_tokens` tokens per
        # sequence, then a gather) with enough finished groups. With ``open``, it ends when all learners wait
        # and enough groups are finished.
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
            open_round_number=next(_OPEN_ROUND_NUMBERS),
        )

    def _take_waiting_groups(self, count: int) -> list[SequenceGroup]:
        """Pop ``count`` waiting groups from the buffer; draw new prompts if the buffer has fewer groups."""
        groups = self.buffer.take_waiting(count)
        if len(groups) < count:
            groups += make_waiting_groups(self._draw_prompts(count - len(groups)))
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: groups, numbers of informative groups, response lengths."""
        return {
            **self.buffer.state_dict(),
            "informative": self.group_counts,
            "lengths": self.limits.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; restart prompts whose groups cannot be continued.

        A group can only be continued with `rollout.partial`, and with the same `batch.samples_per_prompt`. It
        must not be too old for `asynchrony.max_staleness`, which may have been reduced. The hybrid engine's
        version must be restored before this call.
        """
        self.group_counts = tuple(state["informative"])
        # Checkpoints of older versions have no lengths.
        self.limits.load_state_dict(state.get("lengths", {}))
        self.buffer.load_state_dict(state)
        if not self.buffer.started:
            return

        # Groups can be continued only with `rollout.partial`, and with the same number of samples.
        samples = self.config.batch.samples_per_prompt
        has_same_samples = all(len(group.sequences) == samples for group in self.buffer.started)
        if self.config.rollout.partial and has_same_samples:
            max_updates = self._max_staleness - self._steps_ahead
            self.buffer.restart_stale(self.roles.hybrid_engine.version, max_updates)
        else:
            self.buffer.restart_all()

    def select_trainable(self, queue: Sequence[SampledBatch]) -> list[SampledBatch]:
        """Return the queued batches that are still usable; restart the prompts of the rejected batches.

        A batch is rejected if it would be too old when it is trained on, or if the queue has more batches
        than `asynchrony.steps_ahead`.
        """
        version = self.roles.hybrid_engine.version
        trainable_batches: list[SampledBatch] = []
        rejected_batches: list[SampledBatch] = []
        for batch in queue:
            age = version - int(batch.rollouts.policy_version.min())
            # Training on each earlier batch of the queue adds one weight update.
            age_when_trained = age + len(trainable_batches)
            if len(trainable_batches) < self._steps_ahead and age_when_trained <= self._max_staleness:
                trainable_batches.append(batch)
            else:
                rejected_batches.append(batch)

        # `restart` inserts prompts at the front: restart in reverse, so that the oldest batch comes first.
        for batch in reversed(rejected_batches):
            self.buffer.restart(make_waiting_groups(batch.prompts))
        return trainable_batches

    @property
    def _steps_ahead(self) -> int:
        """Return `asynchrony.steps_ahead`: number of steps between a batch's sampling and its training."""
        return self.config.asynchrony.steps_ahead

    @property
    def _max_staleness(self) -> int:
        """Return `asynchrony.max_staleness`: the maximum age of a row in training, in weight updates."""
        assert self.config.asynchrony.max_staleness is not None
        return self.config.asynchrony.max_staleness


def make_complete_round(
    prompts: PromptBatch,
    samples_per_prompt: int,
    seed: int,
    version: int,
) -> GenerationRound:
    """Make a generation round with new sequences for all prompts.

    The round ends when every sequence of every prompt is finished.
    """
    groups = start_groups(make_waiting_groups(prompts), samples_per_prompt, seed, version)
    return _make_round_of_all(groups, version)


def _make_round_of_all(groups: Sequence[SequenceGroup], version: int) -> GenerationRound:
    """Make a round that ends when all its groups are finished."""
    return GenerationRound(
        tuple(groups),
        required=(True,) * len(groups),
        batch_groups=len(groups),
        version=version,
    )


def start_complete_round(
    rollout: RolloutRole,
    prompts: PromptBatch,
    samples_per_prompt: int,
    seed: int,
    version: int,
) -> PendingRound:
    """Sample complete responses to all prompts on the rollout's ranks, ``samples_per_prompt`` for each.

    `gather_complete_round` gathers the responses. All other ranks sample nothing and return immediately.
    Collective over the rollout's ranks.
    """
    generation_round = make_complete_round(prompts, samples_per_prompt, seed, version)
    return PendingRound(generation_round, rollout.infer(generation_round))


def gather_complete_round(
    rollout: RolloutRole, pending: PendingRound, replica_group: ReplicaGroup
) -> Rollouts:
    """Gather the responses that `start_complete_round` has sampled; return them, grouped by prompt.

    ``pending``: result of `start_complete_round` on this rank. Collective over the replica group.
    """
    _gather_and_append(rollout, pending, replica_group)
    return drop_token_versions(to_rollouts(pending.generation_round.groups))


def _gather_and_append(rollout: RolloutRole, pending: PendingRound, replica_group: ReplicaGroup) -> NewTokens:
    """Gather the new tokens of all replicas, append them to the round's sequences, and return them.

    Collective over the replica group.
    """
    generation_round = pending.generation_round
    new_tokens = rollout.gather_new_tokens(pending.new_tokens, replica_group, generation_round)
    sequences = [sequence for _, sequence in generation_round.unfinished]
    append_new_tokens(sequences, new_tokens, generation_round.version)
    return new_tokens


def refill_filtered_rows(
    source: RolloutSource,
    sampled: SampledBatch,
    seed: int,
    replica_group: ReplicaGroup,
) -> SampledBatch:
    """Sample new responses for the rows that filters remove, up to `rollout.filters.refill` times.

    A filter decides about each row independently, so a new response to the same prompt can replace a removed
    row before rewards are computed. The new response's seed depends only on the row and the number of the
    attempt, not on which other rows were removed.

    Returns the batch with the new responses. ``seed``: seed of the round that sampled the batch. The engine
    must be awake. Collective over the replica group, which must be all ranks.
    """
    max_attempts = source.config.rollout.filters.refill
    if not max_attempts:
        return sampled

    rollouts = sampled.rollouts
    row_count = len(rollouts)
    prompts = sampled.prompts.repeat(row_count // max(len(sampled.prompts), 1))
    early_rewards = dict(sampled.early)
    num_refilled = 0
    for attempt in range(1, max_attempts + 1):
        filtered = source.roles.reward.run_filters(prompts, rollouts, replica_group, early_rewards)
        removed_rows = sorted(filtered.filter_by_row)
        if not removed_rows:
            break

        row_seeds = derive_row_seeds(seed, [attempt * row_count + row for row in removed_rows])
        responses = _sample_rows(source, prompts.rows(removed_rows), row_seeds, replica_group)
        rollouts = _replace_rows(rollouts, removed_rows, responses)
        num_refilled += len(removed_rows)

        # The replaced rows have new responses. Drop the filter results of their old responses, and the early
        # rewards: rewards that were already computed during sampling.
        early_rewards[FILTERS] = filtered.verdicts(range(row_count))
        for scorer, result_by_row in early_rewards.items():
            early_rewards[scorer] = {
                row: result for row, result in result_by_row.items() if row not in filtered.filter_by_row
            }

    metrics = sampled.metrics + Metrics.mean("filtered/refilled", float(num_refilled), float(row_count))
    return replace(sampled, rollouts=rollouts, early=early_rewards, metrics=metrics)


def _sample_rows(
    source: RolloutSource,
    prompts: PromptBatch,
    row_seeds: Sequence[int],
    replica_group: ReplicaGroup,
) -> Rollouts:
    """Sample a complete response to each prompt.

    ``row_seeds``: seed of each response. Collective over the replica group.
    """
    rollout = source.roles.rollout
    version = source.roles.hybrid_engine.rollout_version
    groups = start_groups(make_waiting_groups(prompts), samples_per_prompt=1, seed=0, version=version)
    # Replace the seeds that `start_groups` has derived: a response's seed must not depend on the other rows.
    for group, row_seed in zip(groups, row_seeds, strict=True):
        group.sequences[0].seed = row_seed

    generation_round = _make_round_of_all(groups, version)
    pending = PendingRound(generation_round, rollout.infer(generation_round))
    responses = gather_complete_round(rollout, pending, replica_group)
    source.limits.record_lengths(prompts, responses)
    return responses


def _replace_rows(rollouts: Rollouts, rows: Sequence[int], responses: Rollouts) -> Rollouts:
    """Return the batch with row ``rows[i]`` replaced by row ``i`` of ``responses``, for every ``i``."""
    # Concatenate both batches, then select the new response for each replaced row.
    source_rows = list(range(len(rollouts)))
    for index, row in enumerate(rows):
        source_rows[row] = len(rollouts) + index
    combined = Rollouts.concatenate([rollouts, responses]).rows(source_rows)
    return replace(combined, group=rollouts.group)


def conversation_metrics(rollouts: Rollouts) -> Metrics:
    """Return metrics of conversations with environments: mean turns, observed tokens and failures per row.

    Returns no metrics for rows without environments.
    """
    if rollouts.outcomes is None:
        return Metrics()

    row_count = float(len(rollouts))
    metrics = Metrics.mean("environment/turns", float(turn_starts(rollouts).sum()), row_count)
    metrics += Metrics.mean(
        "environment/observed_tokens",
        float(observation_token_counts(rollouts).sum()),
        row_count,
    )

    # Count failures by reason, to distinguish timeouts from errors of the environment.
    failures = Counter(outcome.failure for outcome in rollouts.outcomes if outcome and outcome.failure)
    metrics += Metrics.mean("environment/failed", float(failures.total()), row_count)
    for reason, count in failures.items():
        metrics += Metrics.mean(f"environment/failed_{reason}", float(count), row_count)
    return metrics


def drop_token_versions(rollouts: Rollouts) -> Rollouts:
    """Remove the versions per token from rows whose tokens all have the row's policy version."""
    return replace(rollouts, token_versions=None)


def mixed_version_fraction(rollouts: Rollouts) -> float:
    """Return the fraction of rows with tokens of more than one policy version."""
    if rollouts.token_versions is None or not len(rollouts):
        return 0.0

    # The newest version among the response tokens of each row: [B].
    mask = rollouts.response_mask
    row_of_token = row_index(rollouts.lengths)[mask]
    token_versions = rollouts.token_versions[mask].long()
    zeros = torch.zeros(len(rollouts), dtype=torch.int64)
    newest_versions = zeros.scatter_reduce(0, row_of_token, token_versions, "amax")
    # A row's policy version is the version of its oldest token.
    return float((newest_versions > rollouts.policy_version).float().mean())


def staleness_metrics(version: int, rollouts: Rollouts, max_updates: int) -> Metrics:
    """Return metrics of the rows' age; raise StalenessError if a row is older than ``max_updates``.

    The age of a row is the number of weight updates between its oldest token and ``version``, the version of
    the weights that are trained. ``staleness/token_mean`` is the mean age of single tokens.
    """
    row_ages = (version - rollouts.policy_version).float()
    if len(row_ages) and int(row_ages.max()) > max_updates:
        raise StalenessError(
            f"rollouts of version {int(rollouts.policy_version.min())} reached a learner at version "
            f"{version}; asynchrony.max_staleness allows {max_updates} updates between them"
        )

    metrics = Metrics.mean("staleness/mean", float(row_ages.sum()), len(row_ages))
    metrics += Metrics.maximum("staleness/max", float(row_ages.max()) if len(row_ages) else 0.0)
    if rollouts.token_versions is not None:
        token_ages = version - rollouts.token_versions[rollouts.response_mask].double()
        metrics += Metrics.mean("staleness/token_mean", float(token_ages.sum()), len(token_ages))
    return metrics


def with_greedy_sampling(prompts: PromptBatch) -> PromptBatch:
    """Return the prompts with sampling parameters for greedy decoding."""
    return replace(
        prompts,
        sampling=tuple(sampling.with_greedy_decoding() for sampling in prompts.sampling),
    )
