"""Automatic limits of response lengths, for `rollout.max_response_tokens: auto`.

Lengths are recorded at the end of a round, when every rank has the responses of all ranks. So all ranks
compute the same limits for the next round without communication, and a checkpoint stores one copy of the
lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_rl.config.sections.response_limits import AUTO
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.types import SequenceGroup
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, PromptBatch, Rollouts, tokens_toward_limit

MAX_TASKS = 32
"""Maximum number of tasks in a step; with more tasks there are no metrics per task."""


class AutoLimits:
    """Response limits of tasks whose limit is `AUTO`, computed from the lengths of earlier responses.

    Lengths are recorded per length class, for example for all prompts of the task ``math`` with 3 or 4
    tokens. See `AutoLimitConfig` for the settings.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout = rollout
        self._config = rollout.auto_limit
        # Response lengths in tokens, the oldest first, by the name of the length class.
        self._lengths: dict[str, list[int]] = {}

    def compute_limit(self, task: str, prompt_tokens: int) -> int:
        """Compute the maximum number of response tokens for a task's prompt of ``prompt_tokens`` tokens."""
        config = self._config
        lengths = self._lengths.get(_name_length_class(task, prompt_tokens), [])

        # Use the largest limit while there are too few responses for a quantile.
        if len(lengths) < config.responses:
            return config.at_most

        # The quantile is the smallest length that a fraction `quantile` of the lengths does not exceed.
        # Subtract the rounding error, so that a product that should be an integer is not rounded up.
        rounding_error = 1e-9
        quantile_rank = math.ceil(config.quantile * len(lengths) - rounding_error)
        quantile_length = sorted(lengths)[max(0, quantile_rank - 1)]
        limit = math.ceil(quantile_length * config.margin - rounding_error)
        return min(max(limit, config.at_least), config.at_most)

    def with_limits(self, groups: Sequence[SequenceGroup]) -> list[SequenceGroup]:
        """Return copies of waiting groups with the computed limits in their sampling parameters."""
        return [self._with_limit(group) for group in groups]

    def _with_limit(self, group: SequenceGroup) -> SequenceGroup:
        """Return a copy of a waiting group with the computed limit.

        Returns the group itself if the limit of its profile is not `AUTO`.
        """
        prompt = group.prompt
        (task,) = prompt.tasks
        (profile,) = prompt.profile_names
        if self._rollout.limit_setting(profile) != AUTO:
            return group

        (sampling,) = prompt.sampling
        limit = self.compute_limit(task, int(prompt.lengths))
        sampling = sampling._replace(max_response_tokens=limit)
        return replace(group, prompt=replace(prompt, sampling=(sampling,)))

    def record_lengths(self, prompts: PromptBatch, rollouts: Rollouts) -> None:
        """Record the lengths of finished responses.

        ``rollouts.group`` [B] is the index of each response's prompt in ``prompts``.
        """
        lengths = tokens_toward_limit(rollouts).tolist()
        prompt_tokens = prompts.lengths.tolist()
        profiles = prompts.profile_names
        rows = zip(
            rollouts.group.tolist(),
            rollouts.finish_reason.tolist(),
            lengths,
            strict=True,
        )

        for group, finish_reason, length in rows:
            task = prompts.tasks[group]
            if finish_reason == FINISH_FAILED or self._rollout.limit_setting(profiles[group]) != AUTO:
                continue

            # Retain only the latest lengths: the policy's lengths change during a run.
            length_class = _name_length_class(task, prompt_tokens[group])
            class_lengths = [*self._lengths.get(length_class, []), length]
            self._lengths[length_class] = class_lengths[-self._config.window :]

    def state_dict(self) -> dict[str, list[int]]:
        """Return the recorded lengths by length class."""
        return dict(self._lengths)

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore the recorded lengths; drop the oldest lengths beyond the configured window."""
        self._lengths = {name: list(lengths)[-self._config.window :] for name, lengths in state.items()}


def _name_length_class(task: str, prompt_tokens: int) -> str:
    """Return the name of a length class: the task, and the prompt's length rounded up to a power of two.

    Example:
        >>> [_name_length_class("math", tokens) for tokens in (1, 2, 3, 4, 5)]
        ['math/1', 'math/2', 'math/4', 'math/4', 'math/8']
    """
    return f"{task}/{1 << max(0, prompt_tokens - 1).bit_length()}"


def compute_length_metrics(
    prompts: PromptBatch,
    rollouts: Rollouts,
    rollout: RolloutConfig,
) -> Metrics:
    """Compute each task's fraction of truncated responses, and its mean limit unless the limit is fixed."""
    tasks = sorted(set(prompts.tasks))
    # A data set with a separate task per record would create too many metrics.
    if len(tasks) > MAX_TASKS:
        return Metrics()

    assert rollouts.max_response_tokens is not None
    # Task -> (whether it is truncated, its limit in tokens) of each response.
    responses_by_task: dict[str, list[tuple[bool, int]]] = defaultdict(list)
    finish_reasons = rollouts.finish_reason.tolist()
    limits = rollouts.max_response_tokens.tolist()
    for group, finish_reason, limit in zip(rollouts.group.tolist(), finish_reasons, limits, strict=True):
        task = prompts.tasks[group]
        responses_by_task[task].append((finish_reason == FINISH_LENGTH, limit))

    # Tasks with at least one prompt without a fixed limit.
    varying_tasks: set[str] = set()
    for task, profile in zip(prompts.tasks, prompts.profile_names, strict=True):
        if not isinstance(rollout.limit_setting(profile), int):
            varying_tasks.add(task)

    metrics = Metrics()
    for task in tasks:
        num_responses = len(responses_by_task[task])
        num_truncated = float(sum(is_truncated for is_truncated, _ in responses_by_task[task]))
        metrics += Metrics.mean(f"response/truncated_fraction/{task}", num_truncated, num_responses)

        if task in varying_tasks:
            sum_of_limits = float(sum(limit for _, limit in responses_by_task[task]))
            metrics += Metrics.mean(f"response/limit/{task}", sum_of_limits, num_responses)
    return metrics
