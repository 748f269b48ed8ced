"""Loss aggregation as one weight per token, so that a loss is a plain weighted sum under any split."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.names import AGGREGATIONS
from megatron_rl.algorithms.ragged import broadcast_rows, row_sums
from megatron_rl.errors import UserError


def loss_weights(
    mask: Tensor,
    lengths: Tensor,
    mode: str,
    *,
    counts: Tensor | None = None,
    scale_factor: float | None = None,
) -> Tensor:
    """Return w [N] float32 so that the aggregated loss is ``sum_t w_t l_t``; 0 outside ``mask`` [N].

    With n_i the masked-in tokens of row i, N their sum and B the number of rows with n_i > 0:

    - ``token-mean``: 1 / N (DAPO, arXiv:2503.14476, equation 12)
    - ``token-sum``: 1
    - ``seq-mean-token-sum``: 1 / B
    - ``seq-mean-token-sum-norm``: 1 / (B scale_factor) (Dr.GRPO, arXiv:2503.20783, with the longest
      possible response as the constant)
    - ``seq-mean-token-mean``: 1 / (B n_i) (GRPO, arXiv:2402.03300, equation 3)

    ``counts`` [B] replaces n_i in the denominators only, so that tokens and rows which were masked out
    later still count. An empty mask gives all zeros.

    Example:
        >>> mask, lengths = torch.tensor([True, True, True, False]), torch.tensor([1, 3])
        >>> [round(w, 4) for w in loss_weights(mask, lengths, "seq-mean-token-mean").tolist()]
        [0.5, 0.25, 0.25, 0.0]
    """
    present = mask.to(torch.float64)
    counts = row_sums(present, lengths) if counts is None else counts.to(torch.float64)
    tokens, rows = counts.sum().clamp(min=1), (counts > 0).sum().clamp(min=1)
    if mode == "token-mean":
        weights = present / tokens
    elif mode == "token-sum":
        weights = present
    elif mode == "seq-mean-token-sum":
        weights = present / rows
    elif mode == "seq-mean-token-sum-norm":
        if not scale_factor:
            raise UserError(
                "seq-mean-token-sum-norm needs a constant to divide by",
                where="algorithm.settings.loss_scale_factor",
                fix="set loss_scale_factor or max_response_tokens",
            )
        weights = present / (rows * scale_factor)
    elif mode == "seq-mean-token-mean":
        weights = present / broadcast_rows(counts.clamp(min=1) * rows, lengths)
    else:
        raise UserError(f"unknown loss aggregation {mode!r}", expected=", ".join(AGGREGATIONS))
    return weights.to(torch.float32)
