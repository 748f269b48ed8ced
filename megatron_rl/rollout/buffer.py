"""The groups that a run has between two steps, the same value on every rank.

A prompt waits until it is started; its group runs until all its sequences are finished; a finished group
stays until a learner selects it. Prompts whose group is dropped, or was never begun by a replica, wait again,
and come before new ones.
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

    ``started`` has the running and finished ones in the order in which they were started, which the order of
    selection and the numbering of a round depend on. ``waiting`` has those that come next, the first first.
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
        """Return the groups that a learner could take, and has not."""
        return [group for group in self.started if group.is_finished]

    def add(self, groups: abc.Sequence[SequenceGroup]) -> None:
        """Add groups that were started, behind the others."""
        self.started += groups

    def take_waiting(self, most: int) -> list[SequenceGroup]:
        """Remove and return the first waiting groups, at most so many."""
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return taken

    def restart(self, groups: abc.Sequence[SequenceGroup]) -> None:
        """Have the prompts of groups wait in front of the others, without their sequences."""
        self.waiting = [*(SequenceGroup(group.prompt) for group in groups), *self.waiting]

    def required(self, version: int, *, ahead: int, bound: int) -> tuple[bool, ...]:
        """Return which started groups a learner could not take any more after one more step of waiting.

        A group that finishes now is learned from when its tokens are ``ahead`` updates older than now; one
        step later they are one more, and more than ``bound`` is too old.
        """
        return tuple(group.age(version) + ahead + 1 > bound for group in self.started)

    def select(self, required: abc.Sequence[bool], wanted: int) -> list[SequenceGroup]:
        """Remove and return the finished groups for the learner; see `select_groups`."""
        selected = select_groups([group.finished_in for group in self.started], required, wanted)
        groups = [self.started[index] for index in selected]
        self.started = [group for index, group in enumerate(self.started) if index not in set(selected)]
        for group in self.started:
            for sequence in group.sequences:
                sequence.finished_in = 0
        return groups

    def restart_unstarted(self) -> int:
        """Have the groups wait that no replica has begun; return how many these were."""
        unstarted = [group for group in self.started if group.is_unstarted]
        self.started = [group for group in self.started if not group.is_unstarted]
        self.restart(unstarted)
        return len(unstarted)

    def restart_all(self) -> None:
        """Drop all started groups; their prompts wait."""
        self.restart(self.started)
        self.started = []

    def restart_late(self, version: int, most_updates: int) -> None:
        """Drop the started groups that are more than ``most_updates`` older than ``version``."""
        late = [group for group in self.started if group.age(version) > most_updates]
        self.started = [group for group in self.started if group.age(version) <= most_updates]
        self.restart(late)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ragged tensors, None where there are no groups of a kind."""
        seeds = [sequence.seed for group in self.started for sequence in group.sequences]
        started = None
        if self.started:
            started = {
                "prompts": to_prompts(self.started),
                "rollouts": to_rollouts(self.started),
                "seeds": torch.tensor(seeds, dtype=torch.int64),
                "early_rewards": early_rewards(self.started),
            }
        return {"started": started, "waiting": to_prompts(self.waiting) if self.waiting else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        started, waiting = state["started"], state["waiting"]
        self.waiting = [] if waiting is None else waiting_groups(waiting)
        self.started = []
        if started is None:
            return
        self.started = to_groups(started["prompts"], started["rollouts"], started["seeds"])
        note_early_rewards(self.started, started["early_rewards"])


def select_groups(
    finished_in: abc.Sequence[int | None], required: abc.Sequence[bool], wanted: int
) -> list[int]:
    """Return the indices of the groups for the learner, in order: the required, then those that finished
    first.

    ``finished_in`` has the token round in which each group finished (None: not yet); ties go to the group
    that was started earlier. More than ``wanted`` come back only where more are required.

    Example:
        >>> select_groups([2, None, 1, 1], [True, False, False, False], 2)
        [0, 2]
    """
    finished = [
        (not required[index], token_round, index)
        for index, token_round in enumerate(finished_in)
        if token_round is not None
    ]
    return sorted(index for _, _, index in sorted(finished)[: max(wanted, sum(required))])


def early_rewards(groups: abc.Sequence[SequenceGroup]) -> dict[str, dict[int, Any]]:
    """Return the early rewards of all groups, by scorer and row of `to_rollouts`."""
    result: dict[str, dict[int, Any]] = {}
    first = 0
    for group in groups:
        for name, answers in group.early_rewards.items():
            rows = result.setdefault(name, {})
            rows |= {first + sample: answer for sample, answer in answers.items()}
        first += len(group.sequences)
    return result


def note_early_rewards(groups: abc.Sequence[SequenceGroup], rewards: Mapping[str, Mapping[int, Any]]) -> None:
    """Add rewards by scorer and row, as `early_rewards` returns them, to their groups."""
    positions = [(group, sample) for group in groups for sample in range(len(group.sequences))]
    for name, answers in rewards.items():
        for row, answer in answers.items():
            group, sample = positions[row]
            group.early_rewards.setdefault(name, {})[sample] = answer
