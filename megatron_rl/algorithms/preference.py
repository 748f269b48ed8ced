"""Losses on pairs of responses, one preferred to the other: reward models (Bradley-Terry) and DPO.

The pure functions take one number per pair [P]. In the micro-batches of the objectives, each chosen row is
followed by its rejected row, and a pair is never split. The loss weights are from ``seq-mean-token-sum``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rl.algorithms.objectives import mask_tokens
from megatron_rl.algorithms.ragged import last_token_in_mask, row_sums
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.types import TrainBatch


@dataclass(frozen=True)
class PreferencePairs:
    """Log-probs of P pairs of responses: the argument of a user's preference loss.

    Example: DPO is ``-logsigmoid(pairs.beta * (pairs.chosen - pairs.ref_chosen - pairs.rejected +
    pairs.ref_rejected))``.
    """

    chosen: Tensor
    """[P], the policy's log-probs of the preferred responses, summed over their tokens, with gradient."""
    rejected: Tensor
    """[P], the policy's log-probs of the rejected responses, summed over their tokens, with gradient."""
    ref_chosen: Tensor
    """[P], the reference policy's log-probs of the preferred responses, summed over their tokens."""
    ref_rejected: Tensor
    """[P], the reference policy's log-probs of the rejected responses, summed over their tokens."""
    chosen_tokens: Tensor
    """[P], number of response tokens of the preferred responses."""
    rejected_tokens: Tensor
    """[P], number of response tokens of the rejected responses."""
    beta: float
    """The setting `preference.beta`."""


@dataclass(frozen=True)
class PreferenceSettings:
    """Settings of a preference loss: its kind and its coefficients.

    Example: ``PreferenceSettings(kind="simpo", beta=2.0, margin=0.5)``.
    """

    kind: str = "sigmoid"
    """``sigmoid``, ``robust``, ``hinge``, ``ipo`` or ``simpo``; see `dpo_loss` and `simpo_loss`."""
    beta: float = 0.1
    """Scale of the implicit reward: 0.1 in DPO (arXiv:2305.18290, section 6) and TRL's IPO, 2.0 in SimPO."""
    label_smoothing: float = 0.0
    """Assumed fraction of flipped labels (``sigmoid``, ``robust``)."""
    margin: float = 0.5
    """SimPO's gamma (arXiv:2405.14734; 0.5 in its authors' code)."""
    sft_coef: float = 0.0
    """Weight of the chosen response's mean negative log-likelihood, added to the loss."""
    function: Callable[[PreferencePairs], Tensor] | None = None
    """A user's function that computes the loss per pair [P] in place of the built-in loss."""


def bradley_terry_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margin: Tensor | float = 0.0,
) -> Tensor:
    """Compute ``-log sigmoid(chosen - rejected - margin)`` per pair: [P].

    Source: InstructGPT, arXiv:2203.02155, equation 1; margin: Llama 2, arXiv:2307.09288, equation 2.

    Example:
        >>> round(bradley_terry_loss(torch.tensor([1.0]), torch.tensor([1.0])).item(), 4)
        0.6931
    """
    return -logsigmoid(chosen_rewards - rejected_rewards - margin)


def dpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    *,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute a DPO loss per pair [P] from the log-probs of both responses.

    The arguments [P] are sums over the response's tokens; for ``ipo`` they are means over the tokens.
    With ``h = (chosen - ref_chosen) - (rejected - ref_rejected)`` and e = ``label_smoothing``:

    - ``sigmoid``: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` (DPO, arXiv:2305.18290,
      equation 7; e > 0: conservative DPO)
    - ``robust``: ``(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)`` (arXiv:2403.00409)
    - ``hinge``: ``max(0, 1 - beta h)`` (SLiC, arXiv:2305.10425)
    - ``ipo``: ``(h - 1 / (2 beta))^2`` (arXiv:2310.12036, equation 17). With means over tokens, as its
      authors advise and TRL does, the target does not depend on the length.

    Example:
        >>> zero = torch.zeros(1)
        >>> round(dpo_loss(torch.tensor([2.0]), zero, zero, zero, beta=0.5).item(), 4)
        0.3133
    """
    chosen_log_ratio = chosen_log_probs - ref_chosen_log_probs
    rejected_log_ratio = rejected_log_probs - ref_rejected_log_probs
    difference = chosen_log_ratio - rejected_log_ratio
    logits = beta * difference

    if kind == "sigmoid":
        return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)

    if kind == "robust":
        # At 0.5 labels carry no information, and the denominator is 0.
        if label_smoothing >= 0.5:
            raise ValueError(f"robust DPO needs label_smoothing below 0.5, got {label_smoothing}")
        loss = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
        return loss / (1 - 2 * label_smoothing)

    if kind == "hinge":
        return torch.relu(1 - logits)

    if kind == "ipo":
        return (difference - 1 / (2 * beta)) ** 2

    raise ValueError(f"unknown DPO loss {kind!r}; known: sigmoid, robust, hinge, ipo")


def simpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    *,
    beta: float = 2.0,
    margin: float = 0.5,
) -> Tensor:
    """Compute ``-log sigmoid(beta (chosen - rejected) - margin)`` from log-probs averaged per token: [P].

    It needs no reference policy. Source: SimPO, arXiv:2405.14734, equation 6.

    Example:
        >>> round(simpo_loss(torch.tensor([-0.5]), torch.tensor([-0.75])).item(), 4)
        0.6931
    """
    return -logsigmoid(beta * (chosen_log_probs - rejected_log_probs) - margin)


def dpo_objective(
    settings: PreferenceSettings,
    micro: TrainBatch,
    log_probs: Tensor,
) -> tuple[Tensor, Metrics]:
    """Compute the DPO loss of a micro-batch of complete pairs, and its metrics.

    ``log_probs`` [N] carries the gradient. Every row must have a response token.
    """
    micro = micro.to(log_probs.device)
    mask = micro.response_mask
    lengths = micro.lengths
    log_probs = mask_tokens(log_probs, mask)

    # Log-prob of each response: the sum over its tokens, or the mean for SimPO and IPO.
    row_log_probs = row_sums(log_probs, lengths)
    token_counts = row_sums(mask.to(row_log_probs.dtype), lengths).clamp(min=1)
    mean_log_probs = row_log_probs / token_counts
    uses_mean = settings.kind in ("simpo", "ipo")
    response_log_probs = row_log_probs
    if uses_mean:
        response_log_probs = mean_log_probs
    chosen_log_probs, rejected_log_probs = _split_pairs(response_log_probs)

    # SimPO's implicit reward is the mean log-prob itself, without a reference (arXiv 2405.14734).
    if settings.kind == "simpo":
        loss = simpo_loss(chosen_log_probs, rejected_log_probs, beta=settings.beta, margin=settings.margin)
        chosen_rewards = settings.beta * chosen_log_probs.detach()
        rejected_rewards = settings.beta * rejected_log_probs.detach()
    else:
        # Reduce the reference's log-probs in the same way as the policy's.
        if micro.ref_log_probs is None:
            raise ValueError("DPO needs ref_log_probs")
        ref_log_probs = torch.where(mask, micro.ref_log_probs, 0).to(row_log_probs.dtype)
        ref_row_log_probs = row_sums(ref_log_probs, lengths)
        if uses_mean:
            ref_row_log_probs = ref_row_log_probs / token_counts
        ref_chosen, ref_rejected = _split_pairs(ref_row_log_probs)
        if settings.function is not None:
            chosen_tokens, rejected_tokens = _split_pairs(token_counts)
            pairs = PreferencePairs(
                chosen_log_probs,
                rejected_log_probs,
                ref_chosen,
                ref_rejected,
                chosen_tokens,
                rejected_tokens,
                settings.beta,
            )
            loss = _call_user_loss(settings.function, pairs)
        else:
            loss = dpo_loss(
                chosen_log_probs,
                rejected_log_probs,
                ref_chosen,
                ref_rejected,
                beta=settings.beta,
                kind=settings.kind,
                label_smoothing=settings.label_smoothing,
            )

        # DPO's implicit rewards, for the metrics.
        chosen_rewards = settings.beta * (chosen_log_probs - ref_chosen).detach()
        rejected_rewards = settings.beta * (rejected_log_probs - ref_rejected).detach()

    # Weighted sum over pairs, exact under any split that keeps pairs together.
    weights = _pair_weights(micro)
    total_loss = (weights * loss).sum()

    # The preference loss depends only on the difference of the two log-probs, so both may fall. The SFT term
    # keeps the chosen response's log-prob from falling.
    if settings.sft_coef:
        chosen_mean_log_probs, _ = _split_pairs(mean_log_probs)
        total_loss = total_loss - settings.sft_coef * (weights * chosen_mean_log_probs).sum()

    return total_loss, _pair_metrics("dpo", total_loss, weights, chosen_rewards, rejected_rewards)


def _call_user_loss(function: Callable[[PreferencePairs], Tensor], pairs: PreferencePairs) -> Tensor:
    """Call a user's preference loss; raise UserError unless it returns one number per pair."""
    loss = function(pairs)
    # A scalar would broadcast in the weighted sum and give a wrong gradient without an error.
    if getattr(loss, "shape", None) != pairs.chosen.shape:
        got = f"{type(loss).__name__} of shape {list(getattr(loss, 'shape', ()))}"
        raise UserError(
            "the preference loss returned a wrong type or shape",
            where="preference.loss",
            expected=f"a tensor with one number per pair, [{len(pairs.chosen)}]",
            got=got,
            fix="return the loss of each pair, neither summed nor averaged",
        )
    return loss


def reward_model_objective(
    micro: TrainBatch,
    values: Tensor,
    *,
    margin: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Compute the Bradley-Terry loss of a micro-batch of complete pairs, and its metrics.

    ``values`` [N] are the reward model's outputs with gradient; a response's reward is the output at its last
    response token. Every row must have a response token.
    """
    # Only the output at the last token depends on the complete response.
    micro = micro.to(values.device)
    rewards = mask_tokens(values, micro.response_mask)[_last_token_positions(micro)]
    chosen_rewards, rejected_rewards = _split_pairs(rewards)

    weights = _pair_weights(micro)
    total_loss = (weights * bradley_terry_loss(chosen_rewards, rejected_rewards, margin)).sum()
    metrics = _pair_metrics(
        "reward_model",
        total_loss,
        weights,
        chosen_rewards.detach(),
        rejected_rewards.detach(),
    )
    return total_loss, metrics


def _split_pairs(row_values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values of alternating chosen and rejected rows [2 P]: return (chosen, rejected), [P] each."""
    if len(row_values) % 2:
        raise ValueError(f"preference rows come in pairs, got {len(row_values)} rows")
    return row_values[0::2], row_values[1::2]


def _pair_weights(micro: TrainBatch) -> Tensor:
    """Compute each pair's weight [P], the sum of its rows' loss weights; a mini-batch's weights sum to 1."""
    # All tokens of a row have the same weight, so the last token's weight is the row's.
    chosen_weights, rejected_weights = _split_pairs(micro.loss_weights[_last_token_positions(micro)])
    return chosen_weights + rejected_weights


def _last_token_positions(micro: TrainBatch) -> Tensor:
    """Return the position in [N] of each row's last response token: [B].

    Raises ValueError for a row without a response token.
    """
    positions = last_token_in_mask(micro.response_mask, micro.lengths)
    if bool((positions < 0).any()):
        raise ValueError("a row of a preference pair has no response token")
    return positions


def _pair_metrics(
    name: str,
    weighted_loss: Tensor,
    weights: Tensor,
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
) -> Metrics:
    """Compute the pairs' loss, accuracy, margin and mean rewards, as metrics with the prefix ``name/``.

    ``weighted_loss`` is the sum of the pairs' losses, each multiplied by its weight in ``weights`` [P].
    """
    # A tensor on the device, like the sums: merging the metrics must not wait for the device.
    pair_count = torch.tensor(len(weights), device=weights.device)
    sums = {
        "loss": (weighted_loss, weights.sum()),
        "accuracy": ((chosen_rewards > rejected_rewards).sum(), pair_count),
        "margin": ((chosen_rewards - rejected_rewards).sum(), pair_count),
        "chosen": (chosen_rewards.sum(), pair_count),
        "rejected": (rejected_rewards.sum(), pair_count),
    }
    return Metrics.of_tensors({f"{name}/{key}": sum_and_count for key, sum_and_count in sums.items()})
