"""Buffer of a run's sequence groups between two steps, equal on every rank.

A prompt waits until it is started. Its group is running until all its sequences are finished, and a finished
group remains in the buffer until it is selected for a training batch. If a group is dropped, or has no tokens
at the end of a step, its prompt returns to the front of the waiting prompts.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.rollout.collate import make_waiting_groups, to_groups, to_prompts, to_rollouts
from megatron_rl.rollout.types import SequenceGroup


class RolloutBuffer:
    """Buffer of the waiting, running and finished groups of a run.

    ``waiting``: groups without sequences, in the order in which they are started.
    ``started``: running and finished groups, in the order in which they were started. This order determines
        which groups are selected and how the sequences of a round are numbered, so it must be equal on every
        rank.
    """

    def __init__(self) -> None:
        self.waiting: list[SequenceGroup] = []
        self.started: list[SequenceGroup] = []

    @property
    def running(self) -> list[SequenceGroup]:
        """Return the groups with at least one unfinished sequence."""
        return [group for group in self.started if not group.is_finished]

    @property
    def finished(self) -> list[SequenceGroup]:
        """Return the groups whose sequences are all finished, which can be trained on."""
        return [group for group in self.started if group.is_finished]

    def add_started(self, groups: abc.Sequence[SequenceGroup]) -> None:
        """Append groups that have been started to ``started``."""
        self.started += groups

    def take_waiting(self, count: int) -> list[SequenceGroup]:
        """Remove and return the first ``count`` waiting groups, or all if there are fewer."""
        groups = self.waiting[:count]
        self.waiting = self.waiting[count:]
        return groups

    def restart(self, groups: abc.Sequence[SequenceGroup]) -> None:
        """Discard the sequences of groups, and insert the prompts at the front of ``waiting``."""
        # Make new groups: a restarted prompt gets new seeds, and has no early rewards.
        restarted = [SequenceGroup(group.prompt) for group in groups]
        self.waiting = [*restarted, *self.waiting]

    def flag_required(
        self,
        version: int,
        *,
        updates_ahead: int,
        max_updates: int,
    ) -> tuple[bool, ...]:
        """Return, for each started group, whether it must finish in this step.

        A group that finishes in the next step is trained on one weight update later than a group that
        finishes in this step. If it would then be too old, it must finish in this step.

        ``updates_ahead``: number of weight updates from ``version`` to the training on the groups that finish
            in this step.
        ``max_updates``: maximum age at training: number of updates since the oldest token was sampled.
        """
        # Age of each group at its training, if it finishes in the next step.
        next_step_ages = [group.compute_age(version) + updates_ahead + 1 for group in self.started]
        return tuple(age > max_updates for age in next_step_ages)

    def select(
        self,
        required: abc.Sequence[bool],
        count: int,
    ) -> list[SequenceGroup]:
        """Remove and return ``count`` finished groups for the training batch; see `select_groups`.

        ``required`` has the flags of `flag_required`. The groups that remain are carried over to the next
        step.
        """
        finish_rounds = [group.finish_round for group in self.started]
        selected_indices = set(select_groups(finish_rounds, required, count))

        selected = []
        remaining = []
        for index, group in enumerate(self.started):
            if index in selected_indices:
                selected.append(group)
            else:
                remaining.append(group)
        self.started = remaining

        # Give the remaining finished groups priority in the next step: `select_groups` prefers a lower round,
        # and the rounds of a step are numbered from 1.
        for group in self.started:
            for sequence in group.sequences:
                sequence.finish_round = 0
        return selected

    def restart_groups_without_progress(self) -> int:
        """Restart the groups that have no sampled tokens and no finished sequence; return their number.

        Restarting a group discards its sequences, and moves its prompt back to ``waiting``.
        """
        without_progress = [group for group in self.started if group.has_no_progress]
        self.started = [group for group in self.started if not group.has_no_progress]
        self.restart(without_progress)
        return len(without_progress)

    def restart_all(self) -> None:
        """Drop all started groups and move their prompts back to ``waiting``."""
        self.restart(self.started)
        self.started = []

    def restart_stale(self, version: int, max_updates: int) -> None:
        """Restart the groups whose age at weights ``version`` is more than ``max_updates`` updates."""
        stale = []
        remaining = []
        for group in self.started:
            if group.compute_age(version) > max_updates:
                stale.append(group)
            else:
                remaining.append(group)

        self.started = remaining
        self.restart(stale)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups as ragged tensors for a checkpoint; an empty list is stored as None."""
        waiting = None
        if self.waiting:
            waiting = to_prompts(self.waiting)

        started = None
        if self.started:
            seeds = [sequence.seed for group in self.started for sequence in group.sequences]
            started = {
                "prompts": to_prompts(self.started),
                "rollouts": to_rollouts(self.started),
                "seeds": torch.tensor(seeds, dtype=torch.int64),
                "early_rewards": merge_early_rewards(self.started),
            }
        return {"started": started, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups from a `state_dict`."""
        started = state["started"]
        waiting = state["waiting"]

        self.waiting = []
        if waiting is not None:
            self.waiting = make_waiting_groups(waiting)

        self.started = []
        if started is not None:
            self.started = to_groups(
                started["prompts"],
                started["rollouts"],
                started["seeds"],
            )
            # Restore the rewards instead of computing them again: a reward function may be slow or random.
            restore_early_rewards(self.started, started["early_rewards"])


def select_groups(
    finish_rounds: abc.Sequence[int | None],
    required: abc.Sequence[bool],
    count: int,
) -> list[int]:
    """Select ``count`` finished groups for the training batch; return their indices in ascending order.

    ``finish_rounds`` has, for each group, the number of the token round in which the group finished, or None
    if it is unfinished. A step samples in one or more token rounds, each with a maximum number of tokens per
    sequence. ``required`` has the flags of `RolloutBuffer.flag_required`.

    Required groups have priority, then groups with an earlier finish round, then groups that were started
    earlier. More than ``count`` groups are selected only if more are required.

    Example:
        >>> select_groups([2, None, 1, 1], [True, False, False, False], 2)
        [0, 2]
    """
    # Candidates are sorted by (not required, finish round, index): False sorts before True.
    candidates = [
        (not required[index], finish_round, index)
        for index, finish_round in enumerate(finish_rounds)
        if finish_round is not None
    ]
    num_selected = max(count, sum(required))
    selected = sorted(candidates)[:num_selected]
    return sorted(index for _, _, index in selected)


def merge_early_rewards(groups: abc.Sequence[SequenceGroup]) -> dict[str, dict[int, Any]]:
    """Merge the early rewards of all groups: name of the scorer -> row of the sequence -> reward.

    Early rewards are rewards that were computed while other groups were still sampled. A sequence has the
    same row as in the batch of `to_rollouts`.
    """
    merged_rewards: dict[str, dict[int, Any]] = {}
    first_row = 0

    for group in groups:
        for scorer, reward_by_sample in group.early_rewards.items():
            reward_by_row = merged_rewards.setdefault(scorer, {})
            for sample, reward in reward_by_sample.items():
                reward_by_row[first_row + sample] = reward
        first_row += len(group.sequences)

    return merged_rewards


def restore_early_rewards(
    groups: abc.Sequence[SequenceGroup],
    rewards: Mapping[str, Mapping[int, Any]],
) -> None:
    """Set the early rewards of groups from ``rewards``, the result of `merge_early_rewards`.

    Early rewards are rewards that were computed while other groups were still sampled.
    """
    # For each row, its group and the index of its sample in the group.
    group_and_sample = []
    for group in groups:
        group_and_sample += [(group, sample) for sample in range(len(group.sequences))]

    for scorer, reward_by_row in rewards.items():
        for row, reward in reward_by_row.items():
            group, sample = group_and_sample[row]
            group.early_rewards.setdefault(scorer, {})[sample] = reward
