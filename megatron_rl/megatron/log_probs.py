"""Log-probs and entropy directly from hidden states, over vocabulary shards, in bounded memory.

The logits of a micro-batch are never in memory all at once. The forward pass computes one tile at a time (a
block of the logits [tokens, vocabulary]), reduces it to four numbers per token and frees it. The backward
pass computes each tile again. Memory is O(chunk_tokens * V / tensor parallel). On an accelerator with Triton
every pass reads a tile once (`log_probs_triton`).

Logits are float32 in every pass, even for a bfloat16 model. Rounding to bfloat16 would change a logit of 20
by up to 0.06. If only one of two passes rounded, probabilities computed from the logits of one pass and the
normaliser of the other pass would not sum to 1.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.errors import first_line
from megatron_rl.megatron.logit_rules import RowRules, apply_rules, scales_logits
from megatron_rl.shapes.memory import TILE_TOKENS

_MASKED = -1e30
"""Logit of padding and of tokens that top-k/top-p excluded: finite, so that probability * logit is 0, not
NaN."""
_LARGEST_EXPONENT = 60.0
"""Largest exponent in the computation of 1 / (probability of the other tokens), to avoid overflow."""
_SELF_TEST_TOKENS = 150
"""Number of positions on which `measure_kernel_errors` compares the kernels with float64."""
_SELF_TEST_ROWS = 690
"""Vocabulary size of `measure_kernel_errors`; the weight has 10 more rows, which are padding."""


class VocabularyShard(NamedTuple):
    """Shard of the vocabulary: the rows of the output projection on one rank.

    Example: 32,000 tokens padded to 32,128 on two ranks: ``VocabularyShard(16064, 32000, group)`` on the
    second.
    """

    start: int
    """Token id of the shard's first row."""
    vocabulary_size: int
    """Number of tokens in the vocabulary; rows of the weight from this id on are padding."""
    group: Any
    """Tensor-parallel group that shards the vocabulary."""
    cap: float | None = None
    """Bound of the logits before the temperature: cap * tanh(logit / cap) (Gemma Team 2024, arXiv
    2408.00118)."""


class Support(NamedTuple):
    """Tokens to which truncated sampling (top-k, top-p, min-p) restricted each position's distribution.

    Example, for the full vocabulary at the first position and two tokens at the second:
    ``Support(sizes=tensor([0, 2]), tokens=tensor([17, 5]), offsets=array([0, 0, 2]))``.
    """

    sizes: Tensor
    """[n] number of tokens of each position, 0 for the full vocabulary."""
    tokens: Tensor
    """[sum of sizes] token ids, position after position."""
    offsets: numpy.ndarray
    """[n + 1] index in ``tokens`` of each position's first token; on the host, to slice without reading the
    device."""

    def make_exclusion_mask(
        self,
        span: slice,
        column_count: int,
        first_token: int,
    ) -> Tensor:
        """Return a mask [positions of ``span``, column_count] bool of the tokens that sampling excluded.

        Columns are consecutive token ids, and ``first_token`` is the token id of the first column. The mask
        is True for tokens that top-k, top-p or min-p excluded. For a position that was sampled from the full
        vocabulary, the mask is False in all columns.
        """
        sizes = self.sizes[span]
        first_index = int(self.offsets[:-1][span][0])
        end_index = int(self.offsets[1:][span][-1])
        tokens = self.tokens[first_index:end_index].long() - first_token

        # Pass the output size, and collect tokens of other shards in an extra column. Without the size, or
        # with a boolean index, the host would read the number of selected tokens from the device.
        positions = torch.repeat_interleave(
            torch.arange(len(sizes), device=sizes.device), sizes, output_size=end_index - first_index
        )
        column = torch.where((tokens >= 0) & (tokens < column_count), tokens, column_count)

        # Mark every column of the positions whose distribution was restricted, then clear the columns of the
        # tokens that sampling allowed.
        is_excluded = (sizes > 0)[:, None].repeat(1, column_count + 1)
        is_excluded.view(-1).index_fill_(0, positions * (column_count + 1) + column, False)
        return is_excluded[:, :column_count]


class TopTokens(NamedTuple):
    """Request for the most likely tokens of each distribution.

    Example: ``TopTokens(num_tokens=64, vocabulary_size=151_643)``.
    """

    num_tokens: int
    """Number of most likely tokens to return for each distribution."""
    vocabulary_size: int
    """Number of tokens in the vocabulary: ids from this number on are never returned, even if the model has
    logits for them."""


class TopTokenGradients(NamedTuple):
    """Log-probs of k top tokens and of all other tokens, with the loss's gradients with respect to them.

    The top tokens are k tokens of each distribution that the caller chose, such as a teacher's most likely
    tokens. All other tokens of the vocabulary together have one log-prob, in the last column.
    """

    ids: Tensor
    """[n, k] ids of the top tokens, -1 in an unused column."""
    log_probs: Tensor
    """[n, k + 1] log-probs from the forward pass: of each top token, then of all other tokens together."""
    gradients: Tensor
    """[n, k + 1] gradients of the loss with respect to ``log_probs``."""


def make_support(sizes: Tensor, tokens: Tensor) -> Support:
    """Build the `Support` of n positions: the tokens that top-k, top-p and min-p left at each position.

    ``sizes`` [n] is the number of these tokens at each position, 0 for the full vocabulary. ``tokens`` are
    their ids, position after position. Both are CPU tensors.
    """
    offsets = numpy.zeros(len(sizes) + 1, dtype=numpy.int64)
    numpy.cumsum(sizes.numpy(), out=offsets[1:])
    return Support(sizes, tokens, offsets)


class _VocabParallelLogProbs(torch.autograd.Function):
    """Log-probs and entropy whose backward pass projects the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Tensor,
        shard: VocabularyShard,
        chunk_tokens: int,
        reduce_hidden_gradient: bool,
        support: Support | None,
        rules: Sequence[RowRules] | None,
        top_ids: Tensor | None,
    ) -> tuple[Tensor, ...]:
        stats = softmax_statistics(
            hidden,
            weight,
            targets,
            temperature,
            shard,
            chunk_tokens,
            support,
            rules=rules,
            top_ids=top_ids,
        )
        stats = _gather_shards(stats, shard.group)
        if top_ids is None:
            log_normaliser, *outputs = _compute_outputs(stats)
        else:
            log_normaliser, *outputs = _compute_top_token_outputs(stats, targets, top_ids)

        entropy = outputs[1]
        ctx.save_for_backward(hidden, weight, targets, temperature, log_normaliser, entropy)
        ctx.top_ids = top_ids
        ctx.top_log_probs = None
        if top_ids is not None:
            # Detach: an output that is stored in its own context would keep the graph alive.
            ctx.top_log_probs = outputs[2].detach()
        ctx.shard = shard
        ctx.chunk_tokens = chunk_tokens
        ctx.reduce = reduce_hidden_gradient
        ctx.support = support
        ctx.rules = rules
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, targets, temperature, log_normaliser, entropy = ctx.saved_tensors
        top_tokens = None
        if ctx.top_ids is not None:
            top_tokens = TopTokenGradients(ctx.top_ids, ctx.top_log_probs, gradients[2])
        hidden_gradient, weight_gradient = _compute_gradients(
            hidden,
            weight,
            targets,
            temperature,
            log_normaliser,
            entropy,
            log_prob_gradient=gradients[0],
            entropy_gradient=gradients[1],
            shard=ctx.shard,
            chunk_tokens=ctx.chunk_tokens,
            support=ctx.support,
            frozen=not ctx.needs_input_grad[1],
            rules=ctx.rules,
            top_tokens=top_tokens,
        )

        # Each rank has computed only the gradient through its own rows of the output projection.
        if ctx.reduce and ctx.shard.group.size() > 1:
            dist.all_reduce(hidden_gradient, group=ctx.shard.group)

        # One result per argument of `forward`; the last eight have no gradient.
        return hidden_gradient, weight_gradient, *(None,) * 8


def _compute_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    log_prob_gradient: Tensor,
    entropy_gradient: Tensor,
    shard: VocabularyShard,
    chunk_tokens: int,
    support: Support | None = None,
    frozen: bool = False,
    reductions: Reductions | None = None,
    rules: Sequence[RowRules] | None = None,
    top_tokens: TopTokenGradients | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of the hidden states [n, h] and of this shard's weight [V / tp, h].

    ``log_normaliser`` and ``entropy`` [n] are results of the forward pass. ``log_prob_gradient`` and
    ``entropy_gradient`` [n], and ``top_tokens``, have the loss's gradients with respect to the outputs of the
    forward pass. For a ``frozen`` weight, None is returned in place of its gradient. About ``chunk_tokens`` *
    V / tp logits exist at a time.

    Both gradients are sums over tiles of logits, in float32 at least: summed in bfloat16 over 75 chunks of
    tokens, the weight's gradient would be off by 1 %.
    """
    reductions = reductions or choose_reductions(weight.dtype)
    tile_tokens, tile_rows = _choose_tile_size(hidden, weight, chunk_tokens, frozen)

    # With several tiles of weight rows, every tile adds to the gradient of all hidden states.
    hidden_gradient = torch.zeros_like(hidden)
    hidden_sum = hidden_gradient
    if tile_rows < len(weight):
        hidden_sum = _make_sum_buffer(hidden_gradient)
    weight_gradient = None
    if not frozen:
        weight_gradient = torch.zeros_like(weight)

    # With rules, ``slope`` already includes the derivative of the cap.
    cap = shard.cap
    if rules:
        cap = None

    # The outer loop is over rows: the float32 sum of the weight's gradient then has the rows of one tile.
    for tile_shard, row_span in _row_tiles(shard, len(weight), tile_rows):
        tile_weight = weight[row_span]
        tile_weight_gradient = None
        if weight_gradient is not None:
            tile_weight_gradient = weight_gradient[row_span]
        tile_weight_sum = tile_weight_gradient
        if tile_weight_gradient is not None and tile_tokens < len(hidden):
            tile_weight_sum = _make_sum_buffer(tile_weight_gradient)

        for begin in range(0, len(hidden), tile_tokens):
            span = slice(begin, begin + tile_tokens)
            logits, slope = _compute_logits_and_slope(
                hidden[span], tile_weight, tile_shard, support, span, rules
            )
            inputs = GradientInputs(
                targets=targets[span] - tile_shard.start,
                temperature=temperature[span],
                log_normaliser=log_normaliser[span],
                entropy=entropy[span],
                log_prob_gradient=log_prob_gradient[span],
                entropy_gradient=entropy_gradient[span],
                cap=cap,
                dtype=weight.dtype,
            )
            if top_tokens is None:
                logit_gradient = reductions.gradient(logits, inputs)
            else:
                tile_top_tokens = TopTokenGradients(
                    ids=top_tokens.ids[span] - tile_shard.start,
                    log_probs=top_tokens.log_probs[span],
                    gradients=top_tokens.gradients[span],
                )
                logit_gradient = _top_token_gradient(reductions, logits, inputs, tile_top_tokens)
            if slope is not None:
                logit_gradient.mul_(slope)
            del logits, slope

            # Chain rule through logits = hidden @ weight^T.
            _add_product(hidden_sum[span], logit_gradient, tile_weight)
            if tile_weight_sum is not None:
                _add_product(tile_weight_sum, logit_gradient.t(), hidden[span])
            del logit_gradient  # free the memory before the next tile's logits are allocated

        # In float32 the sum is the gradient itself; both are None for a frozen weight.
        has_separate_sum = tile_weight_sum is not tile_weight_gradient
        if has_separate_sum and tile_weight_gradient is not None and tile_weight_sum is not None:
            tile_weight_gradient.copy_(tile_weight_sum)

    if hidden_sum is not hidden_gradient:
        hidden_gradient.copy_(hidden_sum)
    return hidden_gradient, weight_gradient


def _row_tiles(
    shard: VocabularyShard,
    row_count: int,
    tile_rows: int,
) -> Iterator[tuple[VocabularyShard, slice]]:
    """Yield (shard, rows of the weight) for consecutive tiles of the weight's ``row_count`` rows.

    A tile has ``tile_rows`` rows; the last tile may have fewer. Each tile is described as a smaller shard, so
    that the code for shards can be used for tiles.
    """
    for first_row in range(0, row_count, tile_rows):
        yield shard._replace(start=shard.start + first_row), slice(first_row, first_row + tile_rows)


def _choose_tile_size(
    hidden: Tensor,
    weight: Tensor,
    chunk_tokens: int,
    frozen: bool,
) -> tuple[int, int]:
    """Choose the numbers of tokens and weight rows in a tile of about ``chunk_tokens`` * V / tp logits.

    In half precision, gradients are summed in separate float32 buffers: every tile of the backward pass reads
    and writes the sums of its tokens and of its rows. Square tiles move the fewest bytes, and need no float32
    buffer for the whole weight.
    """
    # A float32 gradient needs no separate buffer, and a frozen weight has no gradient: tiles have all rows.
    if frozen or hidden.dtype.itemsize >= 4:
        return chunk_tokens, len(weight)

    num_tokens = min(len(hidden), TILE_TOKENS)
    num_rows = max(1, chunk_tokens * len(weight) // num_tokens)
    return num_tokens, min(len(weight), num_rows)


def _make_sum_buffer(gradient: Tensor) -> Tensor:
    """Return the tensor in which to sum a gradient.

    The result is ``gradient`` itself, or float32 zeros of its shape for a gradient in half precision.
    """
    if gradient.dtype.itemsize >= 4:
        return gradient
    return torch.zeros_like(gradient, dtype=torch.float32)


def _add_product(
    total: Tensor,
    first: Tensor,
    second: Tensor,
) -> None:
    """Add ``first @ second`` to ``total`` in the precision of ``total``."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    else:
        total.add_(_multiply(first, second))


def softmax_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk_tokens: int,
    support: Support | None = None,
    reductions: Reductions | None = None,
    rules: Sequence[RowRules] | None = None,
    top_ids: Tensor | None = None,
) -> Tensor:
    """Compute the four softmax statistics [4, n] of this vocabulary shard; `tile_statistics` defines them.

    ``support`` has the tokens that top-k/top-p left at each position. ``top_ids`` [n, k] are ids of k tokens
    whose log-probs are needed, too. With ``top_ids`` the four statistics exclude these tokens. The logits of
    these tokens, divided by the temperature, follow as k more rows: [4 + k, n]. At most ``chunk_tokens`` *
    V / tp logits exist at a time.
    """
    reductions = reductions or choose_reductions(weight.dtype)
    tile_tokens, tile_rows = _choose_tile_size(hidden, weight, chunk_tokens, frozen=False)

    stats_by_span = []
    for begin in range(0, len(hidden), tile_tokens):
        span = slice(begin, begin + tile_tokens)
        stats_by_tile = []
        for tile_shard, row_span in _row_tiles(shard, len(weight), tile_rows):
            # Bind the logits to no variable, so that they are freed before the next tile is computed.
            if top_ids is None:
                tile_stats = reductions.statistics(
                    _compute_logits(hidden[span], weight[row_span], tile_shard, support, span, rules),
                    targets[span] - tile_shard.start,
                    temperature[span],
                )
            else:
                tile_stats = _top_token_statistics(
                    reductions,
                    _compute_logits(hidden[span], weight[row_span], tile_shard, support, span, rules),
                    targets[span] - tile_shard.start,
                    temperature[span],
                    top_ids[span] - tile_shard.start,
                )
            stats_by_tile.append(tile_stats)
        stats_by_span.append(_merge_statistics(torch.stack(stats_by_tile)))
    return torch.cat(stats_by_span, dim=1)


class GradientInputs(NamedTuple):
    """Inputs of the backward pass over one tile, in addition to the tile's logits [n, columns]."""

    targets: Tensor
    """[n] column of each target in the tile; any other number if the target is in another tile."""
    temperature: Tensor
    """[n] divisor of the logits."""
    log_normaliser: Tensor
    """[n] logarithm of the sum of exp(logit / temperature) over the whole vocabulary."""
    entropy: Tensor
    """[n] entropy of each distribution."""
    log_prob_gradient: Tensor
    """[n] gradient of the loss with respect to the target's log-prob."""
    entropy_gradient: Tensor
    """[n] gradient of the loss with respect to the entropy."""
    cap: float | None
    """Bound of the logits, as in `VocabularyShard`; None if they are not capped."""
    dtype: torch.dtype
    """Dtype of the result."""


class Reductions(NamedTuple):
    """Implementation of the passes over a tile of logits: `TORCH`, or the kernels of `log_probs_triton`."""

    statistics: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function for the forward pass, see `tile_statistics`."""
    gradient: Callable[[Tensor, GradientInputs], Tensor]
    """Function for the backward pass, see `tile_gradient`."""


def tile_statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
) -> Tensor:
    """Reduce a tile of logits [n, columns] to four softmax statistics per position, [4, n].

    A tile has the logits of n positions for consecutive token ids, one column per token id.

    1. the largest logit, the "peak"
    2. the sum of exp(logit - peak)
    3. the sum of exp(logit - peak) * (logit - peak)
    4. the target's logit, or a very low number if the target is not in the tile

    ``targets`` [n] are the columns of the target tokens; the number of a target in another tile is negative
    or too large. ``temperature`` [n] divides the logits first. Overwrites the logits and allocates one more
    tensor of their size.
    """
    logits.div_(temperature[:, None])
    peak = logits.amax(dim=-1)
    column, in_tile = _tile_columns(targets, logits.shape[1])
    target = logits.gather(1, column[:, None])[:, 0].masked_fill(~in_tile, _MASKED)

    # To save memory, `shifted` overwrites the logits and the weighted terms overwrite the exponentials.
    shifted = logits.sub_(peak[:, None])
    exponentials = shifted.exp()
    total = exponentials.sum(dim=-1)
    weighted = exponentials.mul_(shifted).sum(dim=-1)
    return torch.stack((peak, total, weighted, target))


def tile_gradient(logits: Tensor, inputs: GradientInputs) -> Tensor:
    """Compute the loss's gradient with respect to one tile of logits, both [n, columns].

    A tile has the logits of n positions for consecutive token ids, one column per token id. Let x_j be the
    logit of token j divided by the temperature, and p_j its probability. The log-prob of the target has the
    gradient ``1[j == target] - p_j`` with respect to x_j. The entropy H has the gradient
    ``-p_j (log p_j + H)`` with respect to x_j.

    With a ``cap``, ``logits`` are capped, and the gradient is with respect to the uncapped logits. Overwrites
    the logits and allocates one more tensor of their size.
    """
    # d(capped logit) / d(logit) = 1 - (capped / cap)^2; computed before the logits are overwritten.
    cap_derivative = None
    if inputs.cap is not None:
        cap_derivative = 1 - (logits / inputs.cap).square_()

    # (-entropy_gradient (log p + H) - log_prob_gradient) p, plus log_prob_gradient at the target.
    divisor = inputs.temperature[:, None]
    log_p = logits.div_(divisor).sub_(inputs.log_normaliser[:, None])
    p = log_p.exp()
    gradient = log_p.add_(inputs.entropy[:, None]).mul_(-inputs.entropy_gradient[:, None])
    gradient = gradient.sub_(inputs.log_prob_gradient[:, None]).mul_(p)
    del p
    column, in_tile = _tile_columns(inputs.targets, gradient.shape[1])
    gradient.scatter_add_(1, column[:, None], (inputs.log_prob_gradient * in_tile)[:, None])

    if cap_derivative is not None:
        # The formula gives -inf for a masked logit, and the product of -inf with the gradient 0 would be NaN.
        gradient = gradient.mul_(cap_derivative.clamp_(min=0.0))
    return gradient.div_(divisor).to(inputs.dtype)


def _top_token_statistics(
    reductions: Reductions,
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    top_ids: Tensor,
) -> Tensor:
    """Compute the softmax statistics of a tile without the top tokens, and the logits of the top tokens.

    ``top_ids`` [n, k] are the columns of the top tokens (see `TopTokenGradients`) in the tile's ``logits``
    [n, columns]. Returns [4 + k, n]: the four statistics over all other columns, then the k logits, divided
    by the temperature. Overwrites the logits.
    """
    # Mask the top tokens before the sum. Subtracting their terms from the sum over all tokens would be wrong
    # for a confident model: the probability of all other tokens may be below the rounding error of the sum.
    top_logits, _, in_tile = _extract_columns(logits, top_ids)
    top_logits = (top_logits / temperature[:, None]).masked_fill(~in_tile, _MASKED)
    return torch.cat((reductions.statistics(logits, targets, temperature), top_logits.t()))


def _extract_columns(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of the columns ``ids`` [n, k] of a tile, and mask these columns in place.

    A tile has the logits [n, columns] of consecutive tokens of the vocabulary. Also returns ``ids`` clamped
    to the tile's columns, and whether each id is in the tile.
    """
    columns, in_tile = _tile_columns(ids, logits.shape[1])
    column_logits = logits.gather(1, columns)

    # An id outside the tile was clamped to a column of another token. Adding 0 leaves this column unchanged.
    logits.scatter_add_(1, columns, torch.where(in_tile, _MASKED - column_logits, 0))
    return column_logits, columns, in_tile


def _top_token_gradient(
    reductions: Reductions,
    logits: Tensor,
    inputs: GradientInputs,
    top_tokens: TopTokenGradients,
) -> Tensor:
    """Compute the loss's gradient with respect to a tile of logits, including the terms of ``top_tokens``.

    The result is the gradient of `tile_gradient` plus the terms of the log-probs of the top tokens and of all
    other tokens together. Overwrites the logits.

    Let p_j be the probability of the token in column j. The log-prob of a top token t has the gradient
    ``1[j == t] - p_j`` with respect to logit j. If the other tokens have the probability r together, log r
    has the gradient ``1[j is no top token] p_j / r - p_j``.
    """
    # Read the logits of targets and top tokens before they are masked or overwritten.
    target_columns, target_in_tile = _tile_columns(inputs.targets[:, None], logits.shape[1])
    target_logits = logits.gather(1, target_columns)
    top_logits, columns, in_tile = _extract_columns(logits, top_tokens.ids)

    # Every log-prob subtracts the log normaliser, whose derivative with respect to logit j is p_j. A log-prob
    # with the gradient g therefore adds -g p_j at every token j.
    token_gradients = top_tokens.gradients[:, :-1]
    other_gradient = top_tokens.gradients[:, -1]
    total_gradient = inputs.log_prob_gradient + top_tokens.gradients.sum(dim=1)
    inverse_other_prob = (-top_tokens.log_probs[:, -1]).clamp(max=_LARGEST_EXPONENT).exp()
    tile_inputs = inputs._replace(
        targets=torch.full_like(inputs.targets, -1),  # outside the tile: the target's term is added below
        log_prob_gradient=total_gradient - other_gradient * inverse_other_prob,
        dtype=inputs.log_normaliser.dtype,  # rounded once, after the terms below
    )
    gradient = reductions.gradient(logits, tile_inputs)

    # Add the terms of single tokens: the top tokens, and the target.
    divisor = inputs.temperature[:, None]
    log_p = top_tokens.log_probs[:, :-1]
    entropy_term = inputs.entropy_gradient[:, None] * (log_p + inputs.entropy[:, None])
    prob_factor = entropy_term + total_gradient[:, None]
    top_gradient = (token_gradients - prob_factor * log_p.exp()) * in_tile
    target_gradient = inputs.log_prob_gradient[:, None] * target_in_tile
    if inputs.cap is not None:
        top_gradient = top_gradient * (1 - (top_logits / inputs.cap).square()).clamp(min=0)
        target_gradient = target_gradient * (1 - (target_logits / inputs.cap).square()).clamp(min=0)
    gradient.scatter_add_(1, columns, top_gradient / divisor)
    gradient.scatter_add_(1, target_columns, target_gradient / divisor)
    return gradient.to(inputs.dtype)


def _tile_columns(targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return each target's column, clamped to the columns of a tile, and whether it is in the tile.

    ``targets`` may have any shape.
    """
    in_tile = (targets >= 0) & (targets < num_columns)
    return targets.clamp(0, num_columns - 1), in_tile


TORCH = Reductions(tile_statistics, tile_gradient)
"""Reductions by PyTorch's operations, for every device and dtype."""


def triton_reductions() -> Reductions:
    """Return the Triton kernels that compute `tile_statistics` and `tile_gradient` of float32 logits.

    Requires Triton, and an accelerator or Triton's interpreter.
    """
    from megatron_rl.megatron import log_probs_triton

    return Reductions(log_probs_triton.tile_statistics, log_probs_triton.tile_gradient)


def choose_reductions(dtype: torch.dtype) -> Reductions:
    """Return the implementation of `tile_statistics` and `tile_gradient` for this machine.

    These are the Triton kernels if they run and are correct here, otherwise `TORCH`. ``dtype`` is the model's
    dtype; the kernels do not support float64.
    """
    if device.on_host() or device.is_simulated() or importlib.util.find_spec("triton") is None:
        return TORCH
    if dtype == torch.float64 or not kernels_work(dtype):
        return TORCH
    return triton_reductions()


@functools.cache
def kernels_work(dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels compute correct values and gradients on this machine; warn if not.

    The kernels are tested once per process and dtype, on a small problem.
    """
    try:
        value_error, gradient_errors = measure_kernel_errors(dtype)
    except Exception as error:  # such as a missing compiler, or too little GPU memory
        warnings.warn(f"the Triton kernels of log-probs do not run here: {first_line(error)}", stacklevel=2)
        return False

    # Values are in float32, gradients in the model's dtype: bfloat16 rounds each by up to 0.4 %.
    if value_error < 1e-3 and max(gradient_errors.values()) < 0.02:
        return True

    errors = ", ".join(f"{name} tokens {error:.1%}" for name, error in gradient_errors.items())
    warnings.warn(
        f"the Triton kernels of log-probs are wrong here by {value_error:.3g}, and gradients by: {errors}",
        stacklevel=2,
    )
    return False


def measure_kernel_errors(
    dtype: torch.dtype, reductions: Reductions | None = None
) -> tuple[float, dict[str, float]]:
    """Measure the errors of log-probs and their gradient against a dense softmax in float64.

    The forward and backward passes with ``reductions``, by default the Triton kernels, run on this machine's
    device in ``dtype``.

    Returns the largest absolute error of any normaliser, log-prob or entropy, and the relative error of the
    output weight's gradient for each class of tokens: ``certain`` (p > 0.99), ``rare`` (p < 0.01), ``other``.
    """
    # The weight has a row per token and 10 rows of padding, so the last block of the kernels is not full.
    # A growing multiple of the target's row is added to 100 hidden states, so that the probabilities of the
    # targets range from rare to certain.
    reductions = reductions or triton_reductions()
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, _SELF_TEST_ROWS, (_SELF_TEST_TOKENS,), generator=generator)
    weight = torch.randn(_SELF_TEST_ROWS + 10, 192, generator=generator) / 4
    hidden = torch.randn(_SELF_TEST_TOKENS, 192, generator=generator) / 4
    hidden[:100] += weight[targets[:100]] * torch.linspace(0.2, 2.5, 100)[:, None]
    temperature = 0.5 + torch.rand(_SELF_TEST_TOKENS, generator=generator)

    # Run the tested passes on this machine's device and in the model's dtype.
    tested_device = device.device()
    shard = VocabularyShard(0, _SELF_TEST_ROWS, None)
    targets_and_temperature = (targets.to(tested_device), temperature.to(tested_device))
    tested_hidden = hidden.to(tested_device, dtype)
    tested_weight = weight.to(tested_device, dtype)
    stats = softmax_statistics(
        tested_hidden, tested_weight, *targets_and_temperature, shard, 64, reductions=reductions
    )
    results = _compute_outputs(stats[None])
    log_normaliser, _, entropy = results

    # Compute the reference from dense logits of the rounded inputs, in float64 on CPU.
    dense_weight = tested_weight[:_SELF_TEST_ROWS].double().cpu().requires_grad_()
    logits = tested_hidden.double().cpu() @ dense_weight.t() / temperature.double()[:, None]
    log_p = logits.log_softmax(1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    expected = (logits.logsumexp(1), log_probs, -(log_p.exp() * log_p).sum(1))
    value_error = max(
        float((actual.double().cpu() - reference.detach()).abs().max())
        for actual, reference in zip(results, expected, strict=True)
    )

    # Compare one class at a time: the tiny gradients of certain tokens would vanish in a common norm.
    probability = log_probs.detach().exp()
    classes = {"certain": probability > 0.99, "rare": probability < 0.01}
    classes["other"] = ~(classes["certain"] | classes["rare"])
    gradient_errors = {}
    for name, in_class in classes.items():
        (dense_gradient,) = torch.autograd.grad(log_probs[in_class].sum(), dense_weight, retain_graph=True)

        # The loss sums the log-probs of the class: their gradient is 1, the entropy's is 0.
        log_prob_gradient = in_class.to(tested_device, torch.float32)
        entropy_gradient = torch.zeros(_SELF_TEST_TOKENS, device=tested_device)
        _, gradient = _compute_gradients(
            tested_hidden,
            tested_weight,
            *targets_and_temperature,
            log_normaliser,
            entropy,
            log_prob_gradient,
            entropy_gradient,
            shard,
            64,
            reductions=reductions,
        )
        assert gradient is not None
        difference = gradient[:_SELF_TEST_ROWS].double().cpu() - dense_gradient
        gradient_errors[name] = float(difference.norm() / dense_gradient.norm())
    return value_error, gradient_errors


def _compute_logits(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    support: Support | None = None,
    span: slice = slice(None),
    rules: Sequence[RowRules] | None = None,
) -> Tensor:
    """Compute the float32 logits of the positions ``span`` for the tokens of a vocabulary shard.

    ``hidden`` are the hidden states of these positions, ``weight`` the rows of the output projection that
    belong to ``shard``. ``support`` has the tokens that top-k/top-p left at each position. The logits of all
    other tokens, and of padding, are `_MASKED`.
    """
    return _compute_logits_and_slope(hidden, weight, shard, support, span, rules, needs_slope=False)[0]


def _compute_logits_and_slope(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    support: Support | None,
    span: slice,
    rules: Sequence[RowRules] | None,
    needs_slope: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute the logits as `_compute_logits` does, and their derivative if logit ``rules`` changed them.

    Logits ``hidden @ weight^T`` are first bounded by the model's cap (``shard.cap``), if it has one. Then the
    rules of sampling, such as penalties and biases, change them. The second result (slope) is the derivative
    of each final logit with respect to the same element of ``hidden @ weight^T``, or None for 1 everywhere.

    Without rules no derivative is returned, even if the model has a cap: `tile_gradient` then computes the
    derivative of the cap from the logits.
    """
    logits = _multiply(hidden, weight.t())
    if shard.cap is not None:
        logits = logits.div_(shard.cap).tanh_().mul_(shard.cap)

    slope = None
    if rules:
        # d(capped logit) / d(logit) = 1 - (capped / cap)^2, before the rules change the capped logits.
        if shard.cap is not None and needs_slope:
            slope = 1 - (logits / shard.cap).square_()
        elif scales_logits(rules) and needs_slope:
            slope = torch.ones_like(logits)
        apply_rules(rules, logits, span.start or 0, shard.start, slope)

    # Rows of the weight after the last token pad the vocabulary.
    row_count = shard.vocabulary_size - shard.start
    if row_count < len(weight):
        logits[:, max(row_count, 0) :] = _MASKED
    if support is not None:
        is_excluded = support.make_exclusion_mask(span, len(weight), shard.start)
        logits.masked_fill_(is_excluded, _MASKED)
    return logits, slope


def _multiply(first: Tensor, second: Tensor) -> Tensor:
    """Return ``first @ second``, accumulated and stored in float32 or float64."""
    if first.dtype in (torch.float32, torch.float64):
        return first @ second

    # On CPU, PyTorch has no half-precision product with a float32 result.
    if device.on_host():
        return first.float() @ second.float()
    return torch.mm(first, second, out_dtype=torch.float32)


def _gather_shards(stats: Tensor, group: Any) -> Tensor:
    """All-gather ``stats``, of equal shape on all ranks, into [ranks, ...]. Collective over ``group``."""
    if group.size() == 1:
        return stats[None]
    gathered = torch.empty((group.size(), *stats.shape), dtype=stats.dtype, device=stats.device)
    dist.all_gather_into_tensor(gathered.view(-1), stats.contiguous().view(-1), group=group)
    return gathered


def _merge_statistics(stats: Tensor) -> Tensor:
    """Merge the statistics of shards, [shards, 4, n], into statistics of the whole vocabulary, [4, n].

    `tile_statistics` defines the four statistics. The logits of k more tokens may follow them: then the input
    is [shards, 4 + k, n] and the result [4 + k, n].
    """
    shard_peaks, shard_totals, shard_weighted_totals = stats[:, :3].unbind(dim=1)

    # Rescale each shard's sums from the shard's largest logit to the largest logit of all, then add the sums.
    peak = shard_peaks.amax(dim=0)
    scales = (shard_peaks - peak).exp()
    weighted_total = ((shard_weighted_totals + (shard_peaks - peak) * shard_totals) * scales).sum(dim=0)
    total = (shard_totals * scales).sum(dim=0)

    # The remaining statistics are the logits of single tokens: the target and the k tokens. Each token is in
    # one shard, and all other shards have `_MASKED` as its logit: the maximum is the token's logit.
    token_logits = stats[:, 3:].amax(dim=0)
    return torch.cat((torch.stack((peak, total, weighted_total)), token_logits))


def _compute_outputs(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log normaliser, log-prob of the target and entropy, each [n], from all shards' statistics.

    With x = logit - peak and Z = sum exp(x), the entropy is log Z - sum exp(x) x / Z.
    """
    peak, total, weighted_total, target_logit = _merge_statistics(stats)
    log_sum = total.log()
    log_probs = target_logit - peak - log_sum
    entropy = log_sum - weighted_total / total
    return peak + log_sum, log_probs, entropy


def _compute_top_token_outputs(
    stats: Tensor,
    targets: Tensor,
    top_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute log normaliser, log-prob of the target and entropy, each [n], and top log-probs [n, k + 1].

    The top log-probs are of the k tokens ``top_ids`` [n, k], and of all other tokens together. ``stats``
    [shards, 4 + k, n] has, for each vocabulary shard, the four statistics of the tokens other than the top
    tokens, followed by the logits of the top tokens (`_top_token_statistics`).
    """
    # Merge the vocabulary shards.
    merged_stats = _merge_statistics(stats)
    other_stats = merged_stats[:4]
    top_logits = merged_stats[4:].t()

    # Treat the top tokens as another shard of the vocabulary, which may contain the target.
    is_target = top_ids == targets[:, None]
    target_column = torch.where(is_target.any(dim=1), is_target.int().argmax(dim=1), -1)
    unit_temperature = torch.ones_like(top_logits[:, 0])
    top_stats = tile_statistics(top_logits.clone(), target_column, unit_temperature)
    log_normaliser, log_probs, entropy = _compute_outputs(torch.stack((other_stats, top_stats)))

    # The unnormalised log-prob of all other tokens is the log of the sum of their exp(logit).
    other_log_sum = other_stats[0] + other_stats[1].log()
    unnormalised_log_probs = torch.cat((top_logits, other_log_sum[:, None]), dim=1)
    top_log_probs = unnormalised_log_probs - log_normaliser[:, None]
    return log_normaliser, log_probs, entropy, top_log_probs


def vocab_parallel_top_tokens(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabularyShard,
    request: TopTokens,
    chunk_tokens: int = 1024,
    support: Support | None = None,
    rules: Sequence[RowRules] | None = None,
) -> Tensor:
    """Return the ids of the k most likely tokens of each distribution, [n, k], most likely first.

    ``request`` has the number k. The other arguments are as in `vocab_parallel_log_probs`. Collective over
    the tensor-parallel group.
    """
    local_count = min(request.num_tokens, len(weight))
    top_logits = hidden.new_empty(
        (len(hidden), local_count), dtype=torch.promote_types(hidden.dtype, torch.float32)
    )
    ids = torch.empty((len(hidden), local_count), dtype=torch.long, device=hidden.device)
    for begin in range(0, len(hidden), chunk_tokens):
        span = slice(begin, begin + chunk_tokens)
        logits = _compute_logits(hidden[span], weight, shard, support, span, rules)
        logits[:, max(request.vocabulary_size - shard.start, 0) :] = _MASKED
        top_logits[span], columns = logits.topk(local_count, dim=1)
        ids[span] = columns + shard.start

    # The most likely tokens of the vocabulary are among the most likely tokens of the shards.
    top_logits = torch.cat(tuple(_gather_shards(top_logits, shard.group)), dim=1)
    ids = torch.cat(tuple(_gather_shards(ids, shard.group)), dim=1)
    return ids.gather(1, top_logits.topk(request.num_tokens, dim=1).indices)


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk_tokens: int = 1024,
    reduce_hidden_gradient: bool = True,
    support: Support | None = None,
    rules: Sequence[RowRules] | None = None,
    top_ids: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return log-probs of ``targets`` and the entropy of the distribution, both [n] float32.

    With ``top_ids`` [n, k], the function also returns the log-probs of these k tokens and of all other tokens
    together, [n, k + 1] float32. The ids of a position are distinct, or -1 in an unused column.

    ``hidden`` [n, h] is the same on all ranks of the group. ``weight`` [V / tp, h] are this rank's rows of
    the output projection, which ``shard`` describes. ``targets`` [n] are token ids; ``temperature`` [n]
    divides the logits. At most ``chunk_tokens`` * V / tp logits exist at a time.

    Gradients of ``hidden`` are summed over the group unless ``reduce_hidden_gradient`` is false, for a caller
    whose sequence-parallel reduce-scatter sums them. ``support`` restricts each distribution to the tokens
    that top-k/top-p left. ``rules``, such as penalties, change the logits before the temperature. Results are
    float64 for float64 inputs. Collective over the tensor-parallel group.
    """
    result_dtype = torch.promote_types(hidden.dtype, torch.float32)
    if not len(hidden):
        # An empty result that depends on both inputs keeps the graph connected, so that the pipeline's
        # backward pass runs on empty micro-batches too. It is added to the results of other context-parallel
        # ranks, so it must have their dtype.
        empty_result = (hidden.sum() + weight.sum() * 0)[None][:0].to(result_dtype)
        if top_ids is None:
            return empty_result, empty_result
        return empty_result, empty_result, empty_result[:, None].expand(0, top_ids.shape[1] + 1)

    temperature = temperature.to(result_dtype)
    return _VocabParallelLogProbs.apply(
        hidden,
        weight,
        targets,
        temperature,
        shard,
        chunk_tokens,
        reduce_hidden_gradient,
        support,
        rules,
        top_ids,
    )
