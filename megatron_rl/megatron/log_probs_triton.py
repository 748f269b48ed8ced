"""The softmax statistics of hidden states × output weight in one Triton kernel: no logit leaves the chip.

The kernel walks over the vocabulary with an online softmax (Milakov & Gimelshein, arXiv:1805.02867) that
carries the entropy's sum along. Imports Triton: only `log_probs` should import this module, and only where
there is an accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernel multiplies; sums are always in float32."""

FAST = (torch.bfloat16, torch.float16)
"""Those with matrix units. Products of exact float32 have none: the chunked version's BLAS suits them."""

MASKED = -1e30  # finite, so that probability * logit is 0 and not NaN
PROGRAMS = 256  # at least so many run at once, where there is work: more than any card has processors


@triton.jit
def _statistics(
    hidden, weight, targets, temperature, stats,
    tokens, width, vocabulary, split_size, hidden_stride, weight_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Reduce one block of tokens over one split of the vocabulary to four numbers per token."""
    split = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    target = tl.load(targets + token, mask=inside, other=-1)
    divisor = tl.load(temperature + token, mask=inside, other=1.0)
    column = tl.arange(0, WIDTH)
    word = tl.arange(0, WORDS)
    states = hidden + token.to(tl.int64)[:, None] * hidden_stride
    begin = split * split_size
    end = tl.minimum(begin + split_size, vocabulary)

    peak = tl.full((TOKENS,), MASK, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    weighted = tl.zeros((TOKENS,), tl.float32)
    chosen = tl.full((TOKENS,), MASK, tl.float32)
    for first in range(begin, end, WORDS):
        row = first + word
        real = row < end
        rows = weight + row.to(tl.int64)[None, :] * weight_stride
        logits = tl.zeros((TOKENS, WORDS), tl.float32)
        for depth in range(0, width, WIDTH):
            offsets = depth + column
            left = tl.load(
                states + offsets[None, :], mask=inside[:, None] & (offsets < width)[None, :], other=0.0
            )
            right = tl.load(
                rows + offsets[:, None], mask=real[None, :] & (offsets < width)[:, None], other=0.0
            )
            logits = tl.dot(left, right, logits, input_precision=PRECISION)
        logits = tl.where(real[None, :], logits / divisor[:, None], MASK)
        hit = row[None, :] == target[:, None]
        chosen = tl.maximum(chosen, tl.max(tl.where(hit, logits, MASK), axis=1))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        shifted = logits - higher[:, None]
        exponents = tl.exp(shifted)
        scale = tl.exp(peak - higher)
        weighted = (weighted + (peak - higher) * total) * scale + tl.sum(exponents * shifted, axis=1)
        total = total * scale + tl.sum(exponents, axis=1)
        peak = higher

    place = stats + split.to(tl.int64) * 4 * tokens + token
    tl.store(place, peak, mask=inside)
    tl.store(place + tokens, total, mask=inside)
    tl.store(place + 2 * tokens, weighted, mask=inside)
    tl.store(place + 3 * tokens, chosen, mask=inside)


def split_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, vocabulary: int
) -> Tensor:
    """Return [splits, 4, n] float32: over each split of the rows of ``weight``, what a softmax needs.

    The four are the peak of logits, the sum of exp(logit - peak), the sum of exp(logit - peak) * (logit -
    peak), and the target's logit (a very low number where it is in another split). ``hidden`` [n, h] and
    ``weight`` [V, h] are of one of `DTYPES`, contiguous in their last dimension; of the weight the first
    ``vocabulary`` rows are real. ``targets`` [n] are row numbers, those outside count as absent;
    ``temperature`` [n] float32 divides logits.
    """
    tokens, width = hidden.shape
    block_tokens, block_words, block_width = _blocks(hidden.dtype)
    token_blocks, word_blocks = triton.cdiv(tokens, block_tokens), triton.cdiv(vocabulary, block_words)
    splits = max(1, min(triton.cdiv(PROGRAMS, token_blocks), word_blocks))
    split_size = max(1, triton.cdiv(word_blocks, splits)) * block_words
    splits = max(1, triton.cdiv(vocabulary, split_size))
    stats = torch.empty((splits, 4, tokens), dtype=torch.float32, device=hidden.device)
    kernel: Any = _statistics
    kernel[(token_blocks, splits)](
        hidden, weight, targets, temperature, stats,
        tokens, width, vocabulary, split_size, hidden.stride(0), weight.stride(0),
        TOKENS=block_tokens, WORDS=block_words, WIDTH=block_width,
        PRECISION="ieee", MASK=MASKED, num_warps=8, num_stages=3,
    )  # fmt: skip
    return stats


def _blocks(dtype: torch.dtype) -> tuple[int, int, int]:
    """Return tokens, rows of the weight and columns of one block; three stages take 96 KiB at most."""
    return (64, 64, 32) if dtype == torch.float32 else (128, 128, 64)
