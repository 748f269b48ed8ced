"""Losses on the ratio of a whole response: GSPO, GMPO, TOPR, and off-policy sequence masking.

Per-token tensors are ragged [N] with ``lengths`` [B] and ``mask`` [N]; rows must be whole. A row with an
empty mask has ratio 1 and takes no part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.policy_losses.clipped import clipped_surrogate
from megatron_rl.algorithms.policy_losses.token_loss import TokenLoss
from megatron_rl.algorithms.ragged import broadcast_rows, masked_row_means, row_sums

MAX_LOG_SEQUENCE_RATIO = 10.0
MAX_LOG_RATIO = 20.0


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Clip by the response's length-normalised ratio, one for all its tokens.

    ``s_i = exp(mean_t(log_probs - old_log_probs))``; each token uses ``sg[s_i] pi_t / sg[pi_t]``, equal to
    s_i in value, in PPO's loss without dual clip. With ``seq-mean-token-mean`` its gradient is that of the
    sequence loss ``max(-A s_i, -A clip(s_i))``. log s_i is kept below 10. Clip ranges are far smaller than
    PPO's: the paper uses 3e-4 and 4e-4.

    Source: GSPO, arXiv:2507.18071, equations 5 to 7, in the form of its GSPO-token.

    Example:
        >>> new, old = torch.tensor([0.2, 0.0]), torch.zeros(2)
        >>> mask, lengths = torch.tensor([True, True]), torch.tensor([2])
        >>> [round(x, 4) for x in gspo(new, old, torch.ones(2), mask, lengths).loss.tolist()]
        [-1.1052, -1.1052]
    """
    mean = masked_row_means(log_probs.detach() - old_log_probs, mask, lengths)
    log_ratio = broadcast_rows(mean, lengths) + log_probs - log_probs.detach()
    ratio = log_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    return clipped_surrogate(ratio, advantages, clip_low, clip_high, None)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """Maximise the geometric mean of the response's ratios, clipped token by token in log space.

    With ``s = sign A`` and ``d_t = log_probs - old_log_probs``:
    ``d'_t = s min(s d_t, s clip(d_t, -clip_low, clip_high))`` and ``l = -mean(A) exp(mean_t d'_t)`` on every
    token of the row. Under ``seq-mean-token-mean`` this is the mean over responses of the paper's loss. A
    token with A = 0 counts as d' = 0.

    Source: GMPO, arXiv:2507.20673; clip range (e^-0.4, e^0.4).

    Example:
        >>> new, old = torch.tensor([1.0, 0.2]), torch.zeros(2)
        >>> mask, lengths = torch.tensor([True, True]), torch.tensor([2])
        >>> [round(x, 4) for x in gmpo(new, old, torch.ones(2), mask, lengths).loss.tolist()]
        [-1.3499, -1.3499]
    """
    sign = advantages.sign()
    difference = log_probs - old_log_probs
    clipped = difference.clamp(-clip_low, clip_high)
    bounded = sign * torch.minimum(sign * difference, sign * clipped)
    ratio = masked_row_means(bounded, mask, lengths).exp()
    advantage = masked_row_means(advantages, mask, lengths)
    outside = sign * difference > sign * clipped
    return TokenLoss(broadcast_rows(-advantage * ratio, lengths), {"clip_fraction": outside})


def topr(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor
) -> TokenLoss:
    """Imitate good responses as they are, push away bad ones only as far as they are still likely.

    Tokens with A > 0: ``l = -A log_prob``. Others: ``l = -sg[min(R_i, 1)] A log_prob`` with the response's
    full ratio ``R_i = exp(clamp(sum_t (log_probs - old_log_probs), +-20))``. Stable off policy without a KL
    term; on policy it is REINFORCE. The paper sums over tokens: ``seq-mean-token-sum``.

    Source: TOPR, arXiv:2503.14286 (canonical tapers a+ = b+ = 1, a- = 0, b- = 1).

    Example:
        >>> new, old = torch.tensor([-1.5, -1.0]), torch.tensor([-1.0, -1.0])
        >>> mask, lengths = torch.tensor([True, True]), torch.tensor([2])
        >>> [round(x, 3) for x in topr(new, old, torch.tensor([-1.0, -1.0]), mask, lengths).loss.tolist()]
        [-0.91, -0.607]
    """
    difference = torch.where(mask, log_probs.detach() - old_log_probs, 0)
    ratio = row_sums(difference, lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tapered = broadcast_rows(ratio.clamp(max=1), lengths)
    weight = torch.where(advantages > 0, 1, tapered)
    return TokenLoss(-weight * advantages * log_probs, {"taper": weight})


def off_policy_sequence_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    delta: float = 1e-4,
) -> Tensor:
    """Mark tokens to keep: [N] bool, false where A < 0 and the response has drifted by more than ``delta``.

    Drift is ``mean_t(old_log_probs - log_probs)`` over the response, an estimate of KL(old || new).
    Bad responses the policy has already left teach nothing and destabilise.

    Source: DeepSeek-V3.2, arXiv:2512.02556 (off-policy sequence masking); slime --use-opsm.

    Example:
        >>> new, old = torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0])
        >>> a, mask = torch.tensor([-1.0, 1.0]), torch.ones(2) > 0
        >>> off_policy_sequence_mask(new, old, a, mask, torch.tensor([2])).tolist()
        [False, True]
    """
    drift = masked_row_means(old_log_probs - log_probs.detach(), mask, lengths)
    return ~((advantages < 0) & broadcast_rows(drift > delta, lengths))
