"""Rewards of sampled responses, selection of groups by dynamic sampling, and the limit of failed rewards.

The weighted rewards of all scorers and reward models are summed per row. Dynamic sampling selects the groups
whose rewards are not all equal. A run in which too many rewards fail is stopped, since it would train on
hardly any rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.rewards import (
    count_groups,
    informative_groups,
    prompts_to_sample,
    take_groups,
)
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.data.mixture import TrainingPrompts
from megatron_rl.data.sources import PromptSource
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics, merge_metrics
from megatron_rl.rewards.filters import FILTERED, NOTHING_FILTERED, FilteredRows
from megatron_rl.rewards.function import Failure, last_lines
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT, EarlyRewards, ScorerResult, scatter_values
from megatron_rl.trainer.sample import SampledBatch
from megatron_rl.types import (
    FINISH_FAILED,
    Outcome,
    PromptBatch,
    Rollouts,
    Scores,
    tokens_toward_limit,
)

ROUND_CEILING = 4
"""Maximum ratio of the prompts in a round of dynamic sampling to the prompts of a step."""
MAX_SHOWN_FAILURES = 4
"""Maximum number of failed rewards of a step that the console shows; the counts include all failures."""
MAX_MESSAGE_CHARACTERS = 600
"""Maximum length of the example in the error of `FailureWatch`."""

NO_RESPONSE = "the engine gave no response"
NOT_FINITE = "a reward, or the sum of the rewards, is not finite"


@dataclass(frozen=True)
class ScoredBatch:
    """Rows with their rewards, equal on all ranks except for ``metrics`` and ``failures``.

    Example: two responses to one prompt, where the engine failed on the second, have
    ``scores.rewards=[1.0, nan]``, ``scores.valid=[True, False]`` and
    ``reasons=(None, "the engine gave no response")``.
    """

    prompts: PromptBatch
    """Prompt of each row, B entries: a prompt occurs once per response that was sampled for it."""
    rollouts: Rollouts
    """The sampled rows, ragged over N tokens."""
    scores: Scores
    """Rewards of the rows; also log-probs and values after the step has computed them."""
    reasons: tuple[str | None, ...]
    """For each of B rows, why it has no reward from scorers: a failure, or a filter (`FILTERED`); None if it
    has a reward."""
    metrics: Metrics = field(default_factory=Metrics)
    """Metrics of sampling and rewards on this rank."""
    failures: tuple[Failure, ...] = ()
    """Rewards that failed on this rank."""

    @property
    def failed_fraction(self) -> float:
        """Return the fraction of rows whose reward failed; rows that filters dropped have not failed."""
        num_invalid = int((~self.scores.valid).sum())
        return (num_invalid - self._num_dropped) / max(len(self.scores.valid), 1)

    @property
    def _num_dropped(self) -> int:
        """Return the number of the batch's rows that response filters dropped."""
        num_dropped = 0
        for is_valid, reason in zip(self.scores.valid.tolist(), self.reasons, strict=True):
            is_filtered = reason is not None and reason.startswith(f"{FILTERED}:")
            # With `rollout.filters.on_filtered=reward`, a filtered row is valid and is not dropped.
            if is_filtered and not is_valid:
                num_dropped += 1
        return num_dropped

    def require_unfiltered_rows(self, step: int) -> None:
        """Raise UserError if filters dropped every row of the step, so that no row can be trained on."""
        if not self.reasons or self._num_dropped < len(self.reasons):
            return
        counts = Counter(reason for reason in self.reasons if reason is not None)
        raise UserError(
            "filters removed every response of a step",
            where=f"rollout.filters (step {step})",
            expected="responses that are kept",
            got=", ".join(f"{count} {reason}" for reason, count in counts.most_common()),
            fix="loosen the filters, or set rollout.filters.on_filtered=reward to train on them",
        )

    def rows(self, row_indices: Sequence[int]) -> ScoredBatch:
        """Return a batch of the selected rows, in the order of ``row_indices``.

        The metrics and failures of the returned batch still cover all rows.
        """
        # Log-probs and values do not exist yet: the step computes them after rows are selected.
        index_tensor = torch.tensor(row_indices, dtype=torch.long)
        scores = Scores(
            rewards=self.scores.rewards[index_tensor],
            valid=self.scores.valid[index_tensor],
            components={name: values[index_tensor] for name, values in self.scores.components.items()},
            baseline_rewards=_select_rows(self.scores.baseline_rewards, index_tensor),
            baseline_lengths=_select_rows(self.scores.baseline_lengths, index_tensor),
        )

        return ScoredBatch(
            self.prompts.rows(row_indices),
            self.rollouts.rows(row_indices),
            scores,
            tuple(self.reasons[row] for row in row_indices),
            self.metrics,
            self.failures,
        )


def _select_rows(values: Tensor | None, index: Tensor) -> Tensor | None:
    """Select the elements ``index`` of optional values; return None for None."""
    if values is None:
        return None
    return values[index]


@dataclass(frozen=True)
class RowRewards:
    """Rewards of B rows from all scorers and reward models."""

    scores: Scores
    """Rewards of the rows, equal on all ranks."""
    reasons: tuple[str | None, ...]
    """For each of B rows, why it has no reward from scorers; None if it has a reward."""
    metrics: Metrics
    """Metrics of rewards on this rank."""
    failures: tuple[Failure, ...]
    """Rewards that failed on this rank."""


def compute_rewards(roles: Roles, sampled: SampledBatch, learners: ReplicaGroup) -> ScoredBatch:
    """Filter the responses of a batch, and compute their rewards and the rewards of greedy baselines.

    Collective over the learners.
    """
    # Repeat each prompt for its rows, which are consecutive.
    samples_per_prompt = len(sampled.rollouts) // max(len(sampled.prompts), 1)
    prompts = sampled.prompts.repeat(samples_per_prompt)
    filtered = roles.reward.run_filters(prompts, sampled.rollouts, learners, sampled.early)
    rewards = compute_row_rewards(
        roles,
        prompts,
        sampled.rollouts,
        learners,
        sampled.early,
        filtered,
    )

    scores = rewards.scores
    metrics = sampled.metrics + filtered.metrics + rewards.metrics
    failures = rewards.failures
    # ReMax: the reward of the greedy response is the baseline of all samples of its prompt.
    if sampled.greedy is not None:
        greedy_rewards = compute_row_rewards(roles, sampled.prompts, sampled.greedy, learners)
        greedy_lengths = tokens_toward_limit(sampled.greedy)
        scores = replace(
            scores,
            baseline_rewards=greedy_rewards.scores.rewards.repeat_interleave(samples_per_prompt),
            baseline_lengths=greedy_lengths.repeat_interleave(samples_per_prompt),
        )
        metrics = metrics + greedy_rewards.metrics
        failures = failures + greedy_rewards.failures

    return ScoredBatch(
        prompts,
        sampled.rollouts,
        scores,
        rewards.reasons,
        metrics,
        failures,
    )


def compute_row_rewards(
    roles: Roles,
    prompts: PromptBatch,
    rollouts: Rollouts,
    replica_group: ReplicaGroup,
    early_rewards: EarlyRewards | None = None,
    filtered: FilteredRows = NOTHING_FILTERED,
) -> RowRewards:
    """Compute each row's reward: the weighted sum of the rewards of all scorers and reward models.

    A row is valid if every scorer and reward model returned a finite number. The reward of a single scorer is
    used without its weight, and its components retain their names. With several scorers, the reward of each
    scorer becomes a component ``SCORER``, and its components are named ``SCORER/NAME``.

    Filtered rows are not passed to scorers and reward models. They get the configured reward of filtered
    rows, or are dropped; a dropped row does not count as failed.

    Arguments:
        prompts: prompt of each row.
        rollouts: rows of the whole batch.
        replica_group: ranks that hold the batch.
        early_rewards: rewards that were computed while other groups were sampled, or None.
        filtered: rows that filters removed.

    Collective over the replica group.
    """
    is_unfiltered = torch.ones(len(rollouts), dtype=torch.bool)
    is_unfiltered[list(filtered.filter_by_row)] = False
    # A reward model needs at least one row: if filters removed all rows, run it on all rows and ignore its
    # outputs.
    model_rows = is_unfiltered.nonzero().flatten()
    if not len(model_rows):
        model_rows = torch.arange(len(rollouts))
    model_rollouts = rollouts
    if len(model_rows) < len(rollouts):
        model_rollouts = rollouts.rows(model_rows.tolist())

    # Start all reward models and scorers before any result is gathered, so that reward models on disjoint
    # ranks run in parallel.
    model_shards = [model.infer(model_rollouts) for model in roles.reward_models]
    results = roles.reward.infer(prompts, rollouts, replica_group, early_rewards, filtered)

    # Gather the rewards of scorers.
    weighted_rewards: list[Tensor] = []
    components: dict[str, Tensor] = {}
    for result in results:
        values = dict(replica_group.gather_rows(result.shard).values)
        rewards = values.pop("rewards")
        prefix = ""
        if roles.has_single_scorer:
            weighted_rewards.append(rewards)
        else:
            weighted_rewards.append(result.weight * rewards)
            components[result.name] = rewards
            prefix = f"{result.name}/"
        components |= {prefix + name.removeprefix(COMPONENT): value for name, value in values.items()}

    # Gather the rewards of reward models.
    for model, shard in zip(roles.reward_models, model_shards, strict=True):
        model_rewards = replica_group.gather_rows(shard).values[model.name]
        components[model.name] = scatter_values(model_rewards, model_rows, len(rollouts))
        # The reward of a filtered row does not include reward models.
        weighted_rewards.append(torch.where(is_unfiltered, model.weight * components[model.name], 0.0))

    # A NaN from any scorer makes the sum NaN and the row invalid.
    rewards = weighted_rewards[0]
    for other_rewards in weighted_rewards[1:]:
        rewards = rewards + other_rewards
    valid = rewards.isfinite() & (rollouts.finish_reason != FINISH_FAILED)
    rewards = rewards.masked_fill(~valid, float("nan"))

    # Rows that filters dropped do not count as failed.
    is_failed = ~valid
    is_failed[sorted(filtered.dropped_rows)] = False
    metrics = Metrics.mean("reward/invalid", float(is_failed.sum()), float(len(valid)))
    metrics += merge_metrics(result.metrics for result in results)
    failures: list[Failure] = []
    for result in results:
        failures.extend(result.failures)
    return RowRewards(
        Scores(rewards, valid, components),
        _invalid_reasons(results, rollouts, valid, filtered),
        metrics,
        tuple(failures),
    )


def record_groups(batch: ScoredBatch, prompts: TrainingPrompts) -> None:
    """Record for each prompt whether the rewards of its group were all equal, for `data.uniform_share`.

    A group with a failed reward is not recorded, since this reward could have differed from the others.
    ``batch`` has the rows of all ranks, so that all ranks record the same groups.
    """
    group = batch.rollouts.group
    informative = informative_groups(batch.scores.rewards, group, batch.scores.valid)
    groups_with_failures = set(group[~batch.scores.valid].tolist())
    rows = zip(group.tolist(), batch.prompts.prompt_ids.tolist(), informative.tolist(), strict=True)
    for group_number, prompt_id, is_informative in rows:
        if group_number not in groups_with_failures:
            prompts.record_uniform_rewards(prompt_id, is_uniform=not is_informative)


def source_metrics(batch: ScoredBatch | None, prompts: TrainingPrompts) -> Metrics:
    """Return the metrics ``curriculum/*``, and the prompts, mean reward and epoch of each data source.

    The curriculum metrics (`data.uniform_share`) are the fraction of prompts whose responses had equal
    rewards, and the fraction of prompts that the epoch skips. If `data.train` is a single source, only the
    curriculum metrics are returned. ``batch``: rows of all ranks; without a batch the result is empty.
    """
    metrics = Metrics()
    if batch is not None:
        for suffix, (uniform_fraction, skipped_fraction) in prompts.uniform_fractions().items():
            metrics += Metrics.of({
                f"curriculum/uniform{suffix}": uniform_fraction,
                f"curriculum/skipped{suffix}": skipped_fraction,
            })  # fmt: skip
    if batch is None or isinstance(prompts, PromptSource):
        return metrics

    row_sources = batch.prompts.sources or (None,) * len(batch.prompts)
    for name, source in prompts.sources.items():
        is_of_source = torch.tensor([row_source == name for row_source in row_sources], dtype=torch.bool)
        groups = batch.rollouts.group[is_of_source].unique()
        metrics += Metrics.of({
            f"data/prompts/{name}": len(groups),
            f"data/epoch/{name}": source.epoch,
        })  # fmt: skip

        rewards = batch.scores.rewards[is_of_source & batch.scores.valid]
        if len(rewards):
            metrics += Metrics.mean(f"reward/mean/{name}", float(rewards.sum()), len(rewards))
    return metrics


def _invalid_reasons(
    results: Sequence[ScorerResult],
    rollouts: Rollouts,
    valid: Tensor,
    filtered: FilteredRows,
) -> tuple[str | None, ...]:
    """Return for each of B rows the reason for its missing reward, or None if scorers returned a reward."""
    # If several scorers failed on a row, use the reason of the first failed scorer.
    reason_by_row: dict[int, str] = {}
    for result in results:
        reason_by_row = {**result.reasons, **reason_by_row}

    # An invalid row without a scorer's reason has no response, or a reward that is not finite.
    reasons: list[str | None] = []
    for row, is_valid in enumerate(valid.tolist()):
        if row in filtered.filter_by_row:
            reasons.append(f"{FILTERED}: {filtered.filter_by_row[row]}")
        elif is_valid:
            reasons.append(None)
        elif row in reason_by_row:
            reasons.append(reason_by_row[row])
        elif rollouts.finish_reason[row] == FINISH_FAILED:
            reasons.append(NO_RESPONSE)
        else:
            reasons.append(NOT_FINITE)
    return tuple(reasons)


# Dynamic sampling: a group whose rewards are all equal has zero gradient, so another group is sampled
# instead.


def count_prompts_to_add(rounds: Sequence[ScoredBatch], algorithm: Algorithm, config: RunConfig) -> int:
    """Return the number of prompts to sample in the next round of a step, or 0 if no round follows.

    ``rounds``: batches of the step's rounds so far. With dynamic sampling, at most
    ``dynamic_sampling.further_rounds`` rounds follow the first one. They replace groups whose rewards are all
    equal.
    """
    prompts_per_step = config.batch.prompts_per_step
    if not rounds:
        return prompts_per_step
    if len(rounds) > algorithm.dynamic_sampling.further_rounds:
        return 0

    # Use the fraction of informative groups so far, so that one further round is probably enough.
    num_informative = 0
    num_groups = 0
    for batch in rounds:
        round_informative, round_groups = count_informative(batch)
        num_informative += round_informative
        num_groups += round_groups
    return prompts_to_sample(
        prompts_per_step,
        num_informative,
        num_groups,
        ceiling=ROUND_CEILING * prompts_per_step,
    )


def combine_rounds(rounds: Sequence[ScoredBatch], algorithm: Algorithm, config: RunConfig) -> ScoredBatch:
    """Combine a step's rounds of sampling into its batch, with the metrics of all rounds.

    With dynamic sampling, the batch has only informative groups, whose rewards are not all equal. Surplus
    groups are dropped. With too few informative groups the batch is smaller. If no group is informative, the
    batch has the groups of the first round.
    """
    if not algorithm.dynamic_sampling.further_rounds:
        return rounds[0]

    metrics = Metrics.of({"sampling/rounds": float(len(rounds))})
    batch = select_informative_groups(
        concatenate_batches(rounds),
        config.batch.prompts_per_step,
        fallback=rounds[0],
    )
    return replace(batch, metrics=batch.metrics + metrics)


def count_informative(batch: ScoredBatch) -> tuple[int, int]:
    """Return the numbers of informative groups (whose rewards are not all equal) and of all groups."""
    group = batch.rollouts.group
    informative = informative_groups(batch.scores.rewards, group, batch.scores.valid)
    return count_groups(informative, group), len(torch.unique(group))


def select_informative_groups(batch: ScoredBatch, group_count: int, *, fallback: ScoredBatch) -> ScoredBatch:
    """Return a batch of at most ``group_count`` informative groups, in the order of sampling.

    If no group is informative, returns the rows of ``fallback``. The returned batch has the metrics and
    failures of ``batch``.
    """
    num_informative, num_groups = count_informative(batch)

    # Select in the order of sampling, not by reward.
    group = batch.rollouts.group
    rows = take_groups(
        informative_groups(batch.scores.rewards, group, batch.scores.valid),
        group,
        group_count,
    )

    metrics = Metrics.of({
        "sampling/prompts": float(num_groups),
        "sampling/informative_fraction": num_informative / num_groups,
        "sampling/dropped_groups": float(max(num_informative - group_count, 0)),
        "sampling/missing_groups": float(max(group_count - num_informative, 0)),
    })  # fmt: skip

    selected = fallback
    if rows:
        selected = batch.rows(rows)
    return replace(selected, metrics=batch.metrics + metrics, failures=batch.failures)


def concatenate_batches(rounds: Sequence[ScoredBatch]) -> ScoredBatch:
    """Concatenate the rows of a step's rounds into one batch with consecutive group numbers.

    A reward component that a round lacks is NaN for the rows of that round.
    """
    if len(rounds) == 1:
        return rounds[0]

    # Each round numbers its groups from 0, but advantages need unique numbers in the whole batch.
    renumbered_rollouts: list[Rollouts] = []
    next_group = 0
    for batch in rounds:
        rollouts = replace(batch.rollouts, group=batch.rollouts.group + next_group)
        next_group = int(rollouts.group.max()) + 1
        renumbered_rollouts.append(rollouts)

    # A function may return a component in one round and not in another.
    component_names = sorted({name for batch in rounds for name in batch.scores.components})
    scores = Scores(
        rewards=torch.cat([batch.scores.rewards for batch in rounds]),
        valid=torch.cat([batch.scores.valid for batch in rounds]),
        components={name: _concatenate_component(rounds, name) for name in component_names},
        baseline_rewards=_concatenate_baselines(rounds, "baseline_rewards"),
        baseline_lengths=_concatenate_baselines(rounds, "baseline_lengths"),
    )
    return ScoredBatch(
        PromptBatch.concatenate([batch.prompts for batch in rounds]),
        Rollouts.concatenate(renumbered_rollouts),
        scores,
        tuple(reason for batch in rounds for reason in batch.reasons),
        merge_metrics(batch.metrics for batch in rounds),
        tuple(failure for batch in rounds for failure in batch.failures),
    )


def _concatenate_component(rounds: Sequence[ScoredBatch], name: str) -> Tensor:
    """Concatenate one reward component of all rounds: [B] float32, NaN for rounds without it."""
    values: list[Tensor] = []
    for batch in rounds:
        nan = torch.full_like(batch.scores.rewards, float("nan"))
        values.append(batch.scores.components.get(name, nan))
    return torch.cat(values)


def _concatenate_baselines(rounds: Sequence[ScoredBatch], name: str) -> Tensor | None:
    """Concatenate a baseline field of all rounds: [B]; return None if the algorithm has no baseline."""
    baselines = [getattr(batch.scores, name) for batch in rounds]
    if any(baseline is None for baseline in baselines):
        return None
    return torch.cat(baselines)


# Failed rewards: console lines, and the limit beyond which the run ends.


def distinct_failures(failures: Iterable[Failure]) -> list[Failure]:
    """Return one failure per pair of reason and exception class, at most `MAX_SHOWN_FAILURES`."""
    # The last line of a Python traceback begins with the class of the exception.
    first_failures: dict[tuple[str, str], Failure] = {}
    for failure in failures:
        last_line = failure.message.strip().rpartition("\n")[2]
        exception_class = last_line.partition(":")[0]
        first_failures.setdefault((failure.reason, exception_class), failure)
    return list(first_failures.values())[:MAX_SHOWN_FAILURES]


def unused_scorers_warning(
    reward: RewardConfig,
    outcomes: Sequence[Outcome | None] | None,
    source_rewards: Collection[str] = (),
) -> str | None:
    """Return a warning if environments rewarded every row, so that configured scorers were not called.

    Returns None if any configured scorer was called. ``source_rewards``: names of the data sources with a
    reward function.
    """
    is_rewarded = [outcome is not None and outcome.reward is not None for outcome in outcomes or ()]
    keys = [f"reward.{name}" for name in reward.scorer_weights]
    keys += [f"data.sources.{name}.reward" for name in source_rewards]
    if not is_rewarded or not all(is_rewarded) or not keys:
        return None

    scorer_keys = ", ".join(keys)
    return f"warning: the environment rewards every episode of this step, so {scorer_keys} is never called"


class FailureWatch:
    """Counter of consecutive steps in which more rewards failed than `reward.max_invalid_fraction` allows."""

    def __init__(self, config: RewardConfig) -> None:
        self._max_fraction = config.max_invalid_fraction
        self._max_steps = config.invalid_steps
        self._failing_steps = 0

    def check(
        self,
        step: int,
        invalid_fraction: float,
        reasons: Counter[str],
        examples: Sequence[Failure],
    ) -> None:
        """Count a step; raise UserError if too many rewards failed in `reward.invalid_steps` steps in a row.

        ``invalid_fraction``: fraction of the step's rows whose reward failed.
        ``reasons``: reason -> number of failed rewards of all ranks.
        ``examples``: examples of failures; the error shows one of them.
        """
        # A single step with failures, for example because a server was restarted, must not end the run.
        if invalid_fraction <= self._max_fraction:
            self._failing_steps = 0
            return
        self._failing_steps += 1
        if self._failing_steps < self._max_steps:
            return

        # Report the most common reason, which the user should fix first, with the message of one failure.
        most_common_reason = NO_RESPONSE
        if reasons:
            most_common_reason = reasons.most_common(1)[0][0]
        observed = f"most often: {most_common_reason}"
        messages = [failure.message for failure in examples if failure.reason == most_common_reason]
        if messages and messages[0]:
            observed += f"\n{last_lines(messages[0], MAX_MESSAGE_CHARACTERS)}"
        raise UserError(
            f"rewards fail in {invalid_fraction:.0%} of the samples, "
            f"in {self._failing_steps} consecutive steps",
            where=f"reward (step {step})",
            expected=f"at most {self._max_fraction:.0%} (reward.max_invalid_fraction)",
            got=observed,
            fix="repair the reward function, the environment and its agent, or the server; with "
            "reward.max_invalid_fraction=1 the run continues regardless of failures",
        )
