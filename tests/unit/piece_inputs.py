"""Small inputs on which a piece of an algorithm can be tried by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rl.algorithms.advantages import AdvantageInputs
from megatron_rl.algorithms.ragged import last_masked_token
from megatron_rl.types import TrainBatch


def advantage_inputs(
    rewards: Sequence[float],
    group: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    valid: Sequence[bool] | None = None,
    components: Mapping[str, Sequence[float]] | None = None,
    baseline_rewards: Sequence[float] | None = None,
) -> AdvantageInputs:
    """Return what an advantage estimator is given for rows of response tokens alone, one each by default."""
    score = torch.tensor(rewards, dtype=torch.float64)
    taken = torch.tensor([True] * len(rewards) if valid is None else valid, dtype=torch.bool)
    sizes = torch.tensor([1] * len(rewards) if lengths is None else lengths, dtype=torch.long)
    mask = torch.repeat_interleave(taken, sizes)
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)

    last = last_masked_token(mask, sizes)
    token_rewards[last[last >= 0]] = score[last >= 0]
    return AdvantageInputs(
        rewards=score,
        token_rewards=token_rewards,
        mask=mask,
        lengths=sizes,
        group=torch.tensor(group, dtype=torch.long),
        valid=taken,
        values=None,
        baseline_rewards=None if baseline_rewards is None else torch.tensor(baseline_rewards),
        components={name: torch.tensor(x, dtype=torch.float64) for name, x in (components or {}).items()},
    )


def micro_batch(
    advantages: Any,
    *,
    old_log_probs: Any = None,
    rollout_log_probs: Any = None,
    mask: Any = None,
    lengths: Any = None,
    selected: Any = None,
) -> TrainBatch:
    """Return what a policy loss is given: tokens [N] with their advantages, one row of response tokens."""
    advantage = torch.as_tensor(advantages)
    count = len(advantage)
    sizes = torch.tensor([count]) if lengths is None else lengths

    return TrainBatch(
        tokens=torch.zeros(count, dtype=torch.long),
        lengths=sizes,
        response_mask=torch.ones(count, dtype=torch.bool) if mask is None else mask,
        loss_weights=torch.zeros(count),
        temperature=torch.ones(len(sizes)),
        advantages=advantage,
        old_log_probs=None if old_log_probs is None else torch.as_tensor(old_log_probs),
        rollout_log_probs=None if rollout_log_probs is None else torch.as_tensor(rollout_log_probs),
        selected=selected,
    )
