"""Log-probs and entropy straight from hidden states, over vocabulary shards, in bounded memory.

The logits of a micro-batch never exist at once: a chunk of tokens is projected, reduced and dropped,
and projected again in the backward pass. Memory is O(chunk * V / tensor parallel).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_MASKED = -1e30  # finite, so that probability * logit is 0 and not NaN


class VocabularyShard(NamedTuple):
    """Which rows of the output weight a rank holds: from ``start`` on, of ``size`` real ones.

    ``group`` is the tensor-parallel group over which shards add up.
    """

    start: int
    size: int
    group: Any


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor,
        shard: VocabularyShard, chunk: int, reduce_hidden_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        parts = []
        for begin in range(0, len(hidden), chunk):
            end = begin + chunk
            logits = _logits(hidden[begin:end], weight, temperature[begin:end], shard)
            peak = logits.amax(dim=-1)
            local, mine = _local_targets(targets[begin:end], weight, shard)
            target = logits.gather(1, local[:, None])[:, 0].masked_fill(~mine, _MASKED)
            shifted = logits.sub_(peak[:, None])
            exponents = shifted.exp()
            total = exponents.sum(dim=-1)
            weighted = exponents.mul_(shifted).sum(dim=-1)
            parts.append(torch.stack((peak, total, weighted, target)))
        stats = torch.cat(parts, dim=1)
        log_normaliser, log_probs, entropy = _combine(_gather(stats, shard.group))
        ctx.save_for_backward(hidden, weight, targets, temperature, log_normaliser, entropy)
        ctx.shard, ctx.chunk, ctx.reduce = shard, chunk, reduce_hidden_gradient
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        log_prob_gradient, entropy_gradient = gradients
        hidden, weight, targets, temperature, log_normaliser, entropy = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight)
        for begin in range(0, len(hidden), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            logits = _logits(hidden[part], weight, temperature[part], ctx.shard)
            log_p = logits.sub_(log_normaliser[part, None])
            p = log_p.exp()
            slope = log_p.add_(entropy[part, None]).mul_(-entropy_gradient[part, None])
            slope = slope.sub_(log_prob_gradient[part, None]).mul_(p)
            local, mine = _local_targets(targets[part], weight, ctx.shard)
            slope.scatter_add_(1, local[:, None], (log_prob_gradient[part] * mine)[:, None])
            slope = slope.div_(temperature[part, None]).to(weight.dtype)
            hidden_gradient[part] = slope @ weight
            weight_gradient.addmm_(slope.t(), hidden[part])
        if ctx.reduce and ctx.shard.group.size() > 1:
            dist.all_reduce(hidden_gradient, group=ctx.shard.group)
        return hidden_gradient, weight_gradient, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, shard: VocabularyShard) -> Tensor:
    logits = hidden @ weight.t()
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    logits = logits.div_(temperature[:, None])
    real = shard.size - shard.start
    if real < len(weight):
        logits[:, max(real, 0) :] = _MASKED
    return logits


def _local_targets(targets: Tensor, weight: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    local = targets - shard.start
    mine = (local >= 0) & (local < len(weight))
    return local.clamp(0, len(weight) - 1), mine


def _gather(stats: Tensor, group: Any) -> Tensor:
    if group.size() == 1:
        return stats[None]
    gathered = torch.empty((group.size(), *stats.shape), dtype=stats.dtype, device=stats.device)
    dist.all_gather_into_tensor(gathered.view(-1), stats.contiguous().view(-1), group=group)
    return gathered


def _combine(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the shards' (peak, sum of exp, sum of exp * logit, target logit); sums are relative to it."""
    peak, total, weighted, target = stats.unbind(dim=1)
    top = peak.amax(dim=0)
    scale = (peak - top).exp()
    sum_exp = (total * scale).sum(dim=0)
    sum_weighted = ((weighted + (peak - top) * total) * scale).sum(dim=0)
    log_sum = sum_exp.log()
    return top + log_sum, target.amax(dim=0) - top - log_sum, log_sum - sum_weighted / sum_exp


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk: int = 1024,
    reduce_hidden_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of ``targets`` and the entropy of the whole distribution, both [n] float32.

    ``hidden`` [n, h] is the same on all ranks of the group, ``weight`` [V / tp, h] this rank's rows of the
    output projection, ``targets`` [n] token ids, ``temperature`` [n] divides the logits. Gradients of
    ``hidden`` are summed over the group unless ``reduce_hidden_gradient`` is false (where a
    sequence-parallel reduce-scatter follows). Collective over the tensor-parallel group.
    float64 inputs give float64 results.
    """
    if not len(hidden):
        # Keeps the graph connected so that the pipeline's backward pass runs on empty micro-batches too.
        zero = (hidden.sum() + weight.sum() * 0)[None][:0]
        return zero, zero
    temperature = temperature.to(torch.promote_types(hidden.dtype, torch.float32))
    return _VocabParallelLogProbs.apply(
        hidden, weight, targets, temperature, shard, chunk, reduce_hidden_gradient
    )
