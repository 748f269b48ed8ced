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
"""Largest number of logits of one position that a Triton program loads at once."""


@triton.jit
def _statistics_kernel(
    logits,
    targets,
    temperature,
    stats,
    num_tokens,
    num_columns,
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
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        scaled_logits = tl.load(token_logits + column, mask=column < num_columns, other=MASKED) / divisor
        new_peak = tl.maximum(peak, tl.max(scaled_logits, axis=0))
        shifted = scaled_logits - new_peak
        exponentials = tl.where(column < num_columns, tl.exp(shifted), 0.0)

        # Rescale the sums to the new peak, then add this block. The peak is -inf before the first block.
        scale = tl.exp(peak - new_peak)
        weighted_sum = tl.where(exp_sum > 0, (weighted_sum + (peak - new_peak) * exp_sum) * scale, 0.0)
        weighted_sum += tl.sum(exponentials * shifted, axis=0)
        exp_sum = exp_sum * scale + tl.sum(exponentials, axis=0)
        peak = new_peak

    in_tile = (target >= 0) & (target < num_columns)
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
    num_columns,
    cap,
    logits_stride,
    gradient_stride,
    IS_CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of a block of a token's logits, by the equations of `log_probs.tile_gradient`."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_tile = column < num_columns
    divisor = tl.load(temperature + token)
    token_log_prob_gradient = tl.load(log_prob_gradient + token)
    token_entropy_gradient = tl.load(entropy_gradient + token)

    values = tl.load(logits + token.to(tl.int64) * logits_stride + column, mask=in_tile, other=0.0)
    log_p = values / divisor - tl.load(log_normaliser + token)
    entropy_term = (log_p + tl.load(entropy + token)) * token_entropy_gradient
    result = -tl.exp(log_p) * (entropy_term + token_log_prob_gradient)
    result = tl.where(column == tl.load(targets + token), result + token_log_prob_gradient, result)
    if IS_CAPPED:
        # d(capped logit) / d(logit) = 1 - (capped / cap)^2. The formula gives -inf for a masked logit, and
        # the product of -inf with the gradient 0 would be NaN.
        ratio = values / cap
        result *= tl.maximum(1.0 - ratio * ratio, 0.0)

    output = logit_gradient + token.to(tl.int64) * gradient_stride + column
    tl.store(output, (result / divisor).to(logit_gradient.dtype.element_ty), mask=in_tile)


def tile_statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
) -> Tensor:
    """Reduce a tile of float32 logits [n, columns] to four softmax statistics per position, [4, n].

    A tile has the logits of n positions for consecutive token ids, one column per token id. The
    statistics are defined at `log_probs.tile_statistics`, which computes the same statistics with PyTorch and
    overwrites the logits. This function does not change the logits.
    """
    num_tokens, num_columns = logits.shape
    stats = torch.empty((4, num_tokens), dtype=torch.float32, device=logits.device)
    kernel: Any = _statistics_kernel
    kernel[(num_tokens,)](
        logits, targets, temperature, stats, num_tokens, num_columns, logits.stride(0),
        BLOCK=_block_size(num_columns), MASKED=MASKED, num_warps=8,
    )  # fmt: skip
    return stats


def tile_gradient(logits: Tensor, inputs: GradientInputs) -> Tensor:
    """Compute the loss's gradient [n, columns] with respect to a tile of float32 logits [n, columns].

    A tile has the logits of n positions for consecutive token ids, one column per token id. The
    equations are at `log_probs.tile_gradient`, which computes the gradient with PyTorch and overwrites the
    logits. This function does not change the logits.
    """
    num_tokens, num_columns = logits.shape
    logit_gradient = torch.empty((num_tokens, num_columns), dtype=inputs.dtype, device=logits.device)
    block = _block_size(num_columns)

    kernel: Any = _gradient_kernel
    kernel[(num_tokens, triton.cdiv(num_columns, block))](
        logits, inputs.targets, inputs.temperature, inputs.log_normaliser, inputs.entropy,
        inputs.log_prob_gradient.contiguous(), inputs.entropy_gradient.contiguous(), logit_gradient,
        num_columns, inputs.cap or 1.0, logits.stride(0), logit_gradient.stride(0),
        IS_CAPPED=inputs.cap is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return logit_gradient


def _block_size(num_columns: int) -> int:
    """Return the number of logits per block, which must be a power of two for Triton's ranges."""
    return min(BLOCK, int(triton.next_power_of_2(num_columns)))
