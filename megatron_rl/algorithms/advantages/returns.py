"""Advantages along one response: discounted returns (REINFORCE++, ReMax), GAE, VAPO's lambda, whitening.

Per-token tensors are ragged [N] with ``lengths`` [B]; ``mask`` [N] marks response tokens. Tokens outside
the mask (prompts, tool output between turns) are skipped: the recursion goes from one response token to
the next across them, and their result is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages.inputs import Advantages
from megatron_rl.algorithms.ragged import broadcast_rows, discounted_sums, row_sums


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Sum the rewards from each response token on: ``G_t = r_t + gamma G_(t+1)``, [N].

    With gamma = 1 and the reward on the last token this is REINFORCE++'s return before whitening.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        The middle token is a tool's: it is skipped, not discounted.

        >>> r, mask = torch.tensor([0.0, 9.0, 1.0]), torch.tensor([True, False, True])
        >>> discounted_returns(r, mask, torch.tensor([3]), gamma=0.5).tolist()
        [0.5, 0.0, 1.0]
    """
    return _scan(rewards, mask, lengths, gamma)


def remax(
    rewards: Tensor, mask: Tensor, lengths: Tensor, baseline_rewards: Tensor, *, gamma: float = 1.0
) -> Advantages:
    """Subtract the reward of the greedy response to the same prompt from the returns.

    ``A_t = G_t - b``, ``baseline_rewards`` b [B]; the returns are G.

    Source: ReMax, arXiv:2310.10505.

    Example:
        >>> r, mask = torch.tensor([0.0, 1.0]), torch.tensor([True, True])
        >>> remax(r, mask, torch.tensor([2]), torch.tensor([0.25])).advantages.tolist()
        [0.75, 0.75]
    """
    returns = discounted_returns(rewards, mask, lengths, gamma=gamma)
    baseline = broadcast_rows(baseline_rewards.to(returns.dtype), lengths)
    return Advantages(torch.where(mask, returns - baseline, 0), returns)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    gamma: float = 1.0,
    lam: Tensor | float = 1.0,
) -> Advantages:
    """Estimate advantages from rewards and values [N] with the trade-off lambda (a number or [B]).

    ``delta_t = r_t + gamma V_next - V_t`` and ``A_t = delta_t + gamma lam A_next``, where *next* is the next
    response token of the row and both are 0 after the last: an episode ends with its row. The critic's
    targets are ``A + V``. ``values[t]`` is the critic's estimate before token t is produced.

    Source: GAE, arXiv:1506.02438, equation 16; skipping of other tokens as in verl.

    Example:
        >>> r, v = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
        >>> a, g = gae(r, v, torch.tensor([True, True]), torch.tensor([2]), lam=0.5)
        >>> a.tolist(), g.tolist()
        ([0.125, 0.75], [0.625, 1.0])
    """
    kept = row_sums(mask.to(torch.float64), lengths).long()
    r, v = rewards[mask], values[mask]
    following = torch.cat([v[1:], v.new_zeros(1)]) if len(v) else v
    last = torch.cumsum(kept, 0)[kept > 0] - 1
    following[last] = 0
    decay = gamma * torch.as_tensor(lam, dtype=v.dtype, device=v.device)
    advantages = torch.zeros_like(values)
    advantages[mask] = discounted_sums(r + gamma * following - v, kept, decay)
    return Advantages(advantages, torch.where(mask, advantages + values, 0))


def length_adaptive_lambda(response_lengths: Tensor, *, alpha: float = 0.05) -> Tensor:
    """Return VAPO's lambda for each row [B]: ``1 - 1 / (alpha l)``, kept within [0, 1].

    It makes the sum of GAE's weights proportional to the length l: ``1 / (1 - lambda) = alpha l``.
    Responses shorter than 1 / alpha tokens get 0, and so do empty ones.

    Source: VAPO, arXiv:2504.05118, length-adaptive GAE, with alpha = 0.05.

    Example:
        >>> length_adaptive_lambda(torch.tensor([10, 100, 1000])).tolist()
        [0.0, 0.8, 0.98]
    """
    lengths = response_lengths.to(torch.float64).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(0, 1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale masked-in values to mean 0 and variance 1 over the whole batch: [N].

    ``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance; 0 outside the mask. Fewer than two
    values cannot be whitened and are returned as they are.

    Source: verl torch_functional.masked_whiten.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()[2]
        0.0
    """
    kept = values[mask]
    if len(kept) < 2:
        return torch.where(mask, values, 0)
    whitened = (values - kept.mean()) * torch.rsqrt(kept.var(correction=1) + 1e-8)
    return torch.where(mask, whitened, 0)


def _scan(values: Tensor, mask: Tensor, lengths: Tensor, discount: Tensor | float) -> Tensor:
    """Run `discounted_sums` over the masked-in tokens of each row alone."""
    kept = row_sums(mask.to(torch.float64), lengths).long()
    result = torch.zeros_like(values)
    result[mask] = discounted_sums(values[mask], kept, discount)
    return result
