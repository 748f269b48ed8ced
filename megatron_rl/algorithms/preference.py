"""Losses on pairs of responses, one preferred to the other: reward models (Bradley-Terry) and DPO.

The pure functions take one number per pair [P]. The objectives take micro-batches whose rows come in
pairs, chosen then rejected, with loss weights of ``seq-mean-token-sum``; a pair is never split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rl.algorithms.objectives import masked, means
from megatron_rl.algorithms.ragged import last_masked_token, row_sums
from megatron_rl.metrics import Metrics
from megatron_rl.types import TrainBatch


@dataclass(frozen=True)
class PreferenceSettings:
    """Set a DPO loss: ``kind`` is sigmoid, robust, hinge, ipo or simpo; ``beta`` its strength.

    Strengths: 0.1 is DPO's (arXiv:2305.18290, section 6) and TRL's for IPO; SimPO takes 2.0 with a margin of
    0.5 (arXiv:2405.14734, its authors' code).

    ``label_smoothing`` is the assumed share of flipped labels (sigmoid, robust); ``margin`` is SimPO's gamma.
    ``sft_coef`` adds the chosen response's mean negative log-likelihood.
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.5
    sft_coef: float = 0.0


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return ``-log sigmoid(chosen - rejected - margin)`` per pair: [P].

    Source: InstructGPT, arXiv:2203.02155, equation 1; margin: Llama 2, arXiv:2307.09288, equation 2.

    Example:
        >>> round(bradley_terry_loss(torch.tensor([1.0]), torch.tensor([1.0])).item(), 4)
        0.6931
    """
    return -logsigmoid(chosen - rejected - margin)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return a DPO loss per pair [P] from the responses' summed log-probs, for ``ipo`` their means per token.

    With ``h = (chosen - ref_chosen) - (rejected - ref_rejected)`` and e = ``label_smoothing``:

    - ``sigmoid``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` (DPO, arXiv:2305.18290,
      equation 7; e > 0: conservative DPO)
    - ``robust``: ``(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)`` (arXiv:2403.00409)
    - ``hinge``: ``max(0, 1 - beta h)`` (SLiC, arXiv:2305.10425)
    - ``ipo``: ``(h - 1 / (2 beta))^2`` (arXiv:2310.12036, equation 17; averaged per token, as its authors
      advise and TRL does, so that the target does not depend on the length)

    Example:
        >>> zero = torch.zeros(1)
        >>> round(dpo_loss(torch.tensor([2.0]), zero, zero, zero, beta=0.5).item(), 4)
        0.3133
    """
    difference = (chosen - ref_chosen) - (rejected - ref_rejected)
    scaled = beta * difference
    if kind == "sigmoid":
        return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
    if kind == "robust":
        if label_smoothing >= 0.5:
            raise ValueError(f"robust DPO needs label_smoothing below 0.5, got {label_smoothing}")
        loss = -(1 - label_smoothing) * logsigmoid(scaled) + label_smoothing * logsigmoid(-scaled)
        return loss / (1 - 2 * label_smoothing)
    if kind == "hinge":
        return torch.relu(1 - scaled)
    if kind == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    raise ValueError(f"unknown DPO loss {kind!r}; known: sigmoid, robust, hinge, ipo")


def simpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, margin: float = 0.5) -> Tensor:
    """Return ``-log sigmoid(beta (chosen - rejected) - margin)`` from log-probs averaged per token: [P].

    No reference policy. Source: SimPO, arXiv:2405.14734, equation 6.

    Example:
        >>> round(simpo_loss(torch.tensor([-0.5]), torch.tensor([-0.75])).item(), 4)
        0.6931
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


def dpo_objective(
    settings: PreferenceSettings, micro: TrainBatch, log_probs: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the DPO loss of a micro-batch of whole pairs, and its metrics.

    ``log_probs`` [N] with gradient. Every row must have a response token.
    """
    micro = micro.to(log_probs.device)
    mask, lengths = micro.response_mask, micro.lengths
    log_probs = masked(log_probs, mask)
    sums = row_sums(log_probs, lengths)
    counts = row_sums(mask.to(sums.dtype), lengths).clamp(min=1)
    per_token = settings.kind in ("simpo", "ipo")
    chosen, rejected = _pairs(sums / counts if per_token else sums)
    if settings.kind == "simpo":
        loss = simpo_loss(chosen, rejected, beta=settings.beta, margin=settings.margin)
        rewards = (settings.beta * chosen.detach(), settings.beta * rejected.detach())
    else:
        if micro.ref_log_probs is None:
            raise ValueError("DPO needs ref_log_probs")
        ref_sums = row_sums(torch.where(mask, micro.ref_log_probs, 0).to(sums.dtype), lengths)
        ref = _pairs(ref_sums / counts if per_token else ref_sums)
        loss = dpo_loss(
            chosen, rejected, *ref,
            beta=settings.beta, kind=settings.kind, label_smoothing=settings.label_smoothing,
        )  # fmt: skip
        rewards = tuple(
            settings.beta * (new - old).detach() for new, old in zip((chosen, rejected), ref, strict=True)
        )
    weights = _pair_weights(micro)
    total = (weights * loss).sum()
    if settings.sft_coef:
        total = total - settings.sft_coef * (weights * _pairs(sums / counts)[0]).sum()
    return total, _pair_metrics("dpo", total, weights, *rewards)


def reward_model_objective(
    micro: TrainBatch, values: Tensor, *, margin: float = 0.0
) -> tuple[Tensor, Metrics]:
    """Return the Bradley-Terry loss of a micro-batch of whole pairs, and its metrics.

    ``values`` [N] are the reward model's outputs with gradient; a response's score is the one at its last
    response token. Every row must have one.
    """
    micro = micro.to(values.device)
    scores = masked(values, micro.response_mask)[_last_tokens(micro)]
    chosen, rejected = _pairs(scores)
    weights = _pair_weights(micro)
    total = (weights * bradley_terry_loss(chosen, rejected, margin)).sum()
    return total, _pair_metrics("reward_model", total, weights, chosen.detach(), rejected.detach())


def _pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    if len(rows) % 2:
        raise ValueError(f"preference rows come in pairs, got {len(rows)} rows")
    return rows[0::2], rows[1::2]


def _pair_weights(micro: TrainBatch) -> Tensor:
    """Add up the weights of a pair's two rows, each constant over its tokens: 1 / P in all."""
    chosen, rejected = _pairs(micro.loss_weights[_last_tokens(micro)])
    return chosen + rejected


def _last_tokens(micro: TrainBatch) -> Tensor:
    last = last_masked_token(micro.response_mask, micro.lengths)
    if bool((last < 0).any()):
        raise ValueError("a row of a preference pair has no response token")
    return last


def _pair_metrics(name: str, total: Tensor, weights: Tensor, chosen: Tensor, rejected: Tensor) -> Metrics:
    pairs = torch.tensor(len(weights), device=weights.device)
    sums = {
        "loss": (total, weights.sum()),
        "accuracy": ((chosen > rejected).sum(), pairs),
        "margin": ((chosen - rejected).sum(), pairs),
        "chosen": (chosen.sum(), pairs),
        "rejected": (rejected.sum(), pairs),
    }
    return means({f"{name}/{key}": pair for key, pair in sums.items()})
