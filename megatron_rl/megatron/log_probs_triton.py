"""Triton kernels for the softmax statistics of logits and for their gradient, each in one pass over memory.

PyTorch's operations read and write a tile of logits eight times for the gradient alone. The matrix products
before and after are left to cuBLAS, which on an H100 takes a quarter of the time of a product in Triton.
This module imports Triton: only `log_probs` should import it, and only on a machine with an accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.megatron.log_probs import GradientInputs

MASKED = -1e30
"""Logit of a token outside this shard: finite, so that probability * logit is 0 and not NaN."""
BLOCK = 4096
"""Largest number of logits of a token that a Triton program loads at once."""


@triton.jit
def _statistics_kernel(
    logits,
    targets,
    temperature,
    stats,
    num_tokens,
    num_rows,
    logits_stride,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Reduce the logits of one token to the four statistics of `log_probs.tile_statistics`."""
    token = tl.program_id(0)
    target = tl.load(targets + token)
    divisor = tl.load(temperature + token)
    token_logits = logits + token.to(tl.int64) * logits_stride

    # An online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) that also sums the entropy's terms.
    peak = tl.full((), float("-inf"), tl.float32)
    exp_sum = tl.zeros((), tl.float32)
    weighted_sum = tl.zeros((), tl.float32)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        scaled_logits = tl.load(token_logits + row, mask=row < num_rows, other=MASKED) / divisor
        new_peak = tl.maximum(peak, tl.max(scaled_logits, axis=0))
        shifted = scaled_logits - new_peak
        exponentials = tl.where(row < num_rows, tl.exp(shifted), 0.0)

        # Rescale the sums to the new peak, then add this block. The peak is -inf before the first block.
        scale = tl.exp(peak - new_peak)
        weighted_sum = tl.where(exp_sum > 0, (weighted_sum + (peak - new_peak) * exp_sum) * scale, 0.0)
        weighted_sum += tl.sum(exponentials * shifted, axis=0)
        exp_sum = exp_sum * scale + tl.sum(exponentials, axis=0)
        peak = new_peak

    in_tile = (target >= 0) & (target < num_rows)
    target_logit = tl.load(token_logits + target, mask=in_tile, other=0.0) / divisor
    target_logit = tl.where(in_tile, target_logit, MASKED)

    output = stats + token
    tl.store(output, peak)
    tl.store(output + num_tokens, exp_sum)
    tl.store(output + 2 * num_tokens, weighted_sum)
    tl.store(output + 3 * num_tokens, target_logit)


@triton.jit
def _gradient_kernel(
    logits,
    targets,
    temperature,
    log_normaliser,
    entropy,
    log_prob_gradient,
    entropy_gradient,
    logit_gradient,
    num_rows,
    cap,
    logits_stride,
    gradient_stride,
    IS_CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of a block of a token's logits, by the equations of `log_probs.tile_gradient`."""
    token = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    divisor = tl.load(temperature + token)
    token_log_prob_gradient = tl.load(log_prob_gradient + token)
    token_entropy_gradient = tl.load(entropy_gradient + token)

    values = tl.load(logits + token.to(tl.int64) * logits_stride + row, mask=is_row, other=0.0)
    log_p = values / divisor - tl.load(log_normaliser + token)
    entropy_term = (log_p + tl.load(entropy + token)) * token_entropy_gradient
    result = -tl.exp(log_p) * (entropy_term + token_log_prob_gradient)
    result = tl.where(row == tl.load(targets + token), result + token_log_prob_gradient, result)
    if IS_CAPPED:
        # d(capped logit) / d(logit) = 1 - (capped / cap)^2. For a masked logit that is -inf, and the product
        # with 0 would be NaN.
        ratio = values / cap
        result *= tl.maximum(1.0 - ratio * ratio, 0.0)

    output = logit_gradient + token.to(tl.int64) * gradient_stride + row
    tl.store(output, (result / divisor).to(logit_gradient.dtype.element_ty), mask=is_row)


def tile_statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
) -> Tensor:
    """Reduce logits [n, rows] float32 to [4, n] like `log_probs.tile_statistics`, without changing them."""
    num_tokens, rows = logits.shape
    stats = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    kernel: Any = _statistics_kernel
    kernel[(num_tokens,)](
        logits, targets, temperature, stats, num_tokens, rows, logits.stride(0),
        BLOCK=_block_size(rows), MASKED=MASKED, num_warps=8,
    )  # fmt: skip
    return stats


def tile_gradient(logits: Tensor, inputs: GradientInputs) -> Tensor:
    """Compute the gradient with respect to logits [n, rows] float32 as `log_probs.tile_gradient` does.

    The logits stay unchanged.
    """
    num_tokens, rows = logits.shape
    logit_gradient = torch.empty((num_tokens, rows), dtype=inputs.dtype, device=logits.device)
    block = _block_size(rows)

    kernel: Any = _gradient_kernel
    kernel[(num_tokens, triton.cdiv(rows, block))](
        logits, inputs.targets, inputs.temperature, inputs.log_normaliser, inputs.entropy,
        inputs.log_prob_gradient.contiguous(), inputs.entropy_gradient.contiguous(), logit_gradient,
        rows, inputs.cap or 1.0, logits.stride(0), logit_gradient.stride(0),
        IS_CAPPED=inputs.cap is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return logit_gradient


def _block_size(rows: int) -> int:
    """Return the number of logits per block, which must be a power of two for Triton's ranges."""
    return min(BLOCK, int(triton.next_power_of_2(rows)))
