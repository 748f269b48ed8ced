"""Small inputs for tests of single components of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rl.algorithms.advantages import AdvantageInputs
from megatron_rl.algorithms.ragged import last_token_in_mask
from megatron_rl.types import TrainBatch


def optional_tensor(values: Any) -> torch.Tensor | None:
    """Return the values as a tensor, or None."""
    if values is None:
        return None
    return torch.as_tensor(values)


def advantage_inputs(
    rewards: Sequence[float],
    group: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    valid: Sequence[bool] | None = None,
    components: Mapping[str, Sequence[float]] | None = None,
    baseline_rewards: Sequence[float] | None = None,
) -> AdvantageInputs:
    """Return an advantage estimator's inputs for rows of response tokens.

    By default a row has one token, and all rows are valid.
    """
    # float64, since references are exact.
    score = torch.tensor(rewards, dtype=torch.float64)
    if valid is None:
        valid = [True] * len(rewards)
    if lengths is None:
        lengths = [1] * len(rewards)
    is_valid = torch.tensor(valid, dtype=torch.bool)
    sizes = torch.tensor(lengths, dtype=torch.long)

    # Tokens of invalid rows are no part of the loss.
    mask = torch.repeat_interleave(is_valid, sizes)
    token_rewards = torch.zeros(len(mask), dtype=torch.float64)

    last_tokens = last_token_in_mask(mask, sizes)
    # Rewards are on the last response token; rows without one have index -1.
    token_rewards[last_tokens[last_tokens >= 0]] = score[last_tokens >= 0]
    return AdvantageInputs(
        rewards=score,
        token_rewards=token_rewards,
        mask=mask,
        lengths=sizes,
        group=torch.tensor(group, dtype=torch.long),
        valid=is_valid,
        values=None,
        baseline_rewards=optional_tensor(baseline_rewards),
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
    """Return a policy loss's inputs: tokens [N] with advantages, in one row of response tokens."""
    advantage = torch.as_tensor(advantages)
    count = len(advantage)
    # By default all tokens are in one row.
    sizes = lengths
    if sizes is None:
        sizes = torch.tensor([count])

    return TrainBatch(
        tokens=torch.zeros(count, dtype=torch.long),
        lengths=sizes,
        response_mask=torch.ones(count, dtype=torch.bool) if mask is None else mask,
        loss_weights=torch.zeros(count),
        temperature=torch.ones(len(sizes)),
        advantages=advantage,
        old_log_probs=optional_tensor(old_log_probs),
        rollout_log_probs=optional_tensor(rollout_log_probs),
        selected=selected,
    )
