"""The sequence groups of a run between two steps, equal on every rank.

A prompt waits until it is started. Its group runs until all its sequences are finished, and a finished group
stays until the learner selects it. When a group is dropped, or no replica has begun it, its prompt returns to
the front of the waiting ones.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.rollout.collate import to_groups, to_prompts, to_rollouts, waiting_groups
from megatron_rl.rollout.types import SequenceGroup


class RolloutBuffer:
    """Waiting, running and finished groups.

    Both lists are ordered. ``waiting`` has the next prompt first. ``started`` has the running and finished
    groups in the order in which they were started: the selection of groups and the numbering of a round
    depend on it, and must be equal on every rank.
    """

    def __init__(self) -> None:
        self.waiting: list[SequenceGroup] = []
        self.started: list[SequenceGroup] = []

    @property
    def running(self) -> list[SequenceGroup]:
        """Return the groups with an unfinished sequence."""
        return [group for group in self.started if not group.is_finished]

    @property
    def finished(self) -> list[SequenceGroup]:
        """Return the groups that are ready for the learner."""
        return [group for group in self.started if group.is_finished]

    def add(self, groups: abc.Sequence[SequenceGroup]) -> None:
        """Append started groups."""
        self.started += groups

    def take_waiting(self, count: int) -> list[SequenceGroup]:
        """Remove and return the first waiting groups, at most ``count``."""
        groups = self.waiting[:count]
        self.waiting = self.waiting[count:]
        return groups

    def restart(self, groups: abc.Sequence[SequenceGroup]) -> None:
        """Put the prompts of groups, without their sequences, in front of the waiting ones."""
        # Fresh groups: a prompt that starts again gets new seeds, and no early rewards.
        prompts = [SequenceGroup(group.prompt) for group in groups]
        self.waiting = [*prompts, *self.waiting]

    def required(
        self,
        version: int,
        *,
        ahead: int,
        bound: int,
    ) -> tuple[bool, ...]:
        """Return for each started group whether it must finish in this step, before it becomes too old.

        A group that finishes in this step is trained on after ``ahead`` further updates, and in the next step
        after one more. ``bound`` is the largest number of updates between a token and its training.
        """
        # Age of a group for the learner, if it finishes in the next step.
        ages = [group.age(version) + ahead + 1 for group in self.started]
        return tuple(age > bound for age in ages)

    def select(
        self,
        required: abc.Sequence[bool],
        count: int,
    ) -> list[SequenceGroup]:
        """Remove and return the finished groups for the learner; see `select_groups`."""
        finished_in = [group.finished_in for group in self.started]
        selected = set(select_groups(finished_in, required, count))

        groups = []
        remaining = []
        for index, group in enumerate(self.started):
            if index in selected:
                groups.append(group)
            else:
                remaining.append(group)
        self.started = remaining

        # Token rounds count from 1 within a step: in the next one the remaining groups come first.
        for group in self.started:
            for sequence in group.sequences:
                sequence.finished_in = 0
        return groups

    def restart_unstarted(self) -> int:
        """Return the groups without a token to the waiting ones; return their number."""
        unstarted = [group for group in self.started if group.is_unstarted]
        self.started = [group for group in self.started if not group.is_unstarted]
        self.restart(unstarted)
        return len(unstarted)

    def restart_all(self) -> None:
        """Drop all started groups and return their prompts to the waiting ones."""
        self.restart(self.started)
        self.started = []

    def restart_late(self, version: int, most_updates: int) -> None:
        """Drop the started groups that are more than ``most_updates`` older than ``version``."""
        late = []
        remaining = []
        for group in self.started:
            if group.age(version) > most_updates:
                late.append(group)
            else:
                remaining.append(group)

        self.started = remaining
        self.restart(late)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups as ragged tensors; None in place of an empty list."""
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
                "early_rewards": early_rewards(self.started),
            }
        return {"started": started, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the groups from a `state_dict`."""
        started = state["started"]
        waiting = state["waiting"]

        self.waiting = []
        if waiting is not None:
            self.waiting = waiting_groups(waiting)

        self.started = []
        if started is not None:
            self.started = to_groups(
                started["prompts"],
                started["rollouts"],
                started["seeds"],
            )
            # Restored, not computed again: a reward function may be slow, or random.
            add_early_rewards(self.started, started["early_rewards"])


def select_groups(
    finished_in: abc.Sequence[int | None],
    required: abc.Sequence[bool],
    count: int,
) -> list[int]:
    """Return the indices of the groups for the learner, sorted.

    Required groups come first, then groups in the order in which they finished. ``finished_in`` is the token
    round in which each group finished (None: unfinished); ties go to the group that was started earlier. More
    than ``count`` groups are returned only if more are required.

    Example:
        >>> select_groups([2, None, 1, 1], [True, False, False, False], 2)
        [0, 2]
    """
    # Sorted as (not required, token round, index): False sorts before True.
    candidates = [
        (not required[index], token_round, index)
        for index, token_round in enumerate(finished_in)
        if token_round is not None
    ]
    selected = sorted(candidates)[: max(count, sum(required))]
    return sorted(index for _, _, index in selected)


def early_rewards(groups: abc.Sequence[SequenceGroup]) -> dict[str, dict[int, Any]]:
    """Return the early rewards of all groups: name of the scorer -> row of `to_rollouts` -> reward."""
    rewards: dict[str, dict[int, Any]] = {}
    # Row of the group's first sequence.
    first_row = 0

    for group in groups:
        for scorer, by_sample in group.early_rewards.items():
            by_row = rewards.setdefault(scorer, {})
            by_row |= {first_row + sample: reward for sample, reward in by_sample.items()}
        first_row += len(group.sequences)

    return rewards


def add_early_rewards(groups: abc.Sequence[SequenceGroup], rewards: Mapping[str, Mapping[int, Any]]) -> None:
    """Add rewards by scorer and row, as `early_rewards` returns them, to their groups."""
    # Row -> its group, and its index in the group.
    rows = []
    for group in groups:
        rows += [(group, sample) for sample in range(len(group.sequences))]

    for scorer, by_row in rewards.items():
        for row, reward in by_row.items():
            group, sample = rows[row]
            group.early_rewards.setdefault(scorer, {})[sample] = reward
