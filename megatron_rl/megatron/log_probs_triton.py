"""The softmax statistics of hidden states × output weight in one Triton kernel: no logit leaves the chip.

The kernel walks over the vocabulary with an online softmax (Milakov & Gimelshein, arXiv:1805.02867) that
carries the entropy's sum along. It imports Triton: only `log_probs` should import this module, and only on a
machine with an accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the factors; sums are always in float32."""
FAST = (torch.bfloat16, torch.float16)
"""Dtypes with matrix units. Exact products of float32 have none: the chunked version's BLAS suits them."""
MASKED = -1e30
"""Logit of an absent row: finite, so that probability * logit is 0 and not NaN."""
PROGRAMS = 256
"""Programs to run at once if there is enough work: more than any GPU has multiprocessors."""


@triton.jit
def _statistics(
    hidden, weight, targets, temperature, stats,
    tokens, width, vocabulary, split_size, hidden_stride, weight_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Reduce one block of tokens over one split of the vocabulary to four numbers per token."""
    split = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    target = tl.load(targets + token, mask=is_token, other=-1)
    divisor = tl.load(temperature + token, mask=is_token, other=1.0)
    column = tl.arange(0, WIDTH)
    row_in_block = tl.arange(0, ROWS)
    states = hidden + token.to(tl.int64)[:, None] * hidden_stride
    begin = split * split_size
    end = tl.minimum(begin + split_size, vocabulary)

    peak = tl.full((TOKENS,), MASK, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    weighted = tl.zeros((TOKENS,), tl.float32)
    target_logit = tl.full((TOKENS,), MASK, tl.float32)
    for first in range(begin, end, ROWS):
        # Logits [TOKENS, ROWS] of a block of rows of the weight.
        row = first + row_in_block
        is_row = row < end
        rows = weight + row.to(tl.int64)[None, :] * weight_stride
        logits = tl.zeros((TOKENS, ROWS), tl.float32)
        for depth in range(0, width, WIDTH):
            offsets = depth + column
            state_block = tl.load(
                states + offsets[None, :], mask=is_token[:, None] & (offsets < width)[None, :], other=0.0
            )
            weight_block = tl.load(
                rows + offsets[:, None], mask=is_row[None, :] & (offsets < width)[:, None], other=0.0
            )
            logits = tl.dot(state_block, weight_block, logits, input_precision=PRECISION)
        logits = tl.where(is_row[None, :], logits / divisor[:, None], MASK)

        is_target = row[None, :] == target[:, None]
        target_logit = tl.maximum(target_logit, tl.max(tl.where(is_target, logits, MASK), axis=1))

        # Rescale the sums to the new peak, then add this block's.
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        shifted = logits - new_peak[:, None]
        exponents = tl.exp(shifted)
        scale = tl.exp(peak - new_peak)
        weighted = (weighted + (peak - new_peak) * total) * scale + tl.sum(exponents * shifted, axis=1)
        total = total * scale + tl.sum(exponents, axis=1)
        peak = new_peak

    output = stats + split.to(tl.int64) * 4 * tokens + token
    tl.store(output, peak, mask=is_token)
    tl.store(output + tokens, total, mask=is_token)
    tl.store(output + 2 * tokens, weighted, mask=is_token)
    tl.store(output + 3 * tokens, target_logit, mask=is_token)


def split_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    vocabulary: int,
) -> Tensor:
    """Return the terms of a softmax over each split of the weight's rows, [splits, 4, n] float32.

    The four are the peak of logits, the sum of exp(logit - peak), the sum of exp(logit - peak) * (logit -
    peak), and the target's logit (`MASKED` if it is in another split).

    Arguments:
        hidden: hidden states [n, h] of one of `DTYPES`, contiguous in the last dimension.
        weight: output weight [V, h], likewise; only the first ``vocabulary`` rows are read.
        targets: rows of the targets [n]; those outside of the weight count as absent.
        temperature: divisor of the logits [n] float32.
    """
    tokens, width = hidden.shape
    block_tokens, block_rows, block_width = _blocks(hidden.dtype)
    token_blocks = triton.cdiv(tokens, block_tokens)
    row_blocks = triton.cdiv(vocabulary, block_rows)

    # Split the vocabulary so that there are at least PROGRAMS programs, into equal numbers of blocks.
    splits = max(1, min(triton.cdiv(PROGRAMS, token_blocks), row_blocks))
    split_size = max(1, triton.cdiv(row_blocks, splits)) * block_rows
    splits = max(1, triton.cdiv(vocabulary, split_size))

    stats = torch.empty((splits, 4, tokens), dtype=torch.float32, device=hidden.device)
    kernel: Any = _statistics
    kernel[(token_blocks, splits)](
        hidden, weight, targets, temperature, stats,
        tokens, width, vocabulary, split_size, hidden.stride(0), weight.stride(0),
        TOKENS=block_tokens, ROWS=block_rows, WIDTH=block_width,
        PRECISION="ieee", MASK=MASKED, num_warps=8, num_stages=3,
    )  # fmt: skip
    return stats


def _blocks(dtype: torch.dtype) -> tuple[int, int, int]:
    """Return tokens, rows of the weight and columns of one block; three stages take 96 KiB at most."""
    return (64, 64, 32) if dtype == torch.float32 else (128, 128, 64)
