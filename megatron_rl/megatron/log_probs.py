"""Log-probs and entropy straight from hidden states, over vocabulary shards, in bounded memory.

The logits of a micro-batch never exist at once: a chunk of tokens is projected, reduced and dropped,
and projected again in the backward pass. Memory is O(chunk * V / tensor parallel). On an accelerator with
Triton the forward pass is one kernel that writes no logits at all (`log_probs_triton`). Logits are float32 in
every pass, whatever the model's dtype: rounded to bfloat16 they would be off by up to 0.06 at 20, and
probabilities of a pass that rounds and one that does not would not sum to 1.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.errors import first_line

_MASKED = -1e30  # finite, so that probability * logit is 0 and not NaN


class VocabularyShard(NamedTuple):
    """Which rows of the output weight a rank holds: from ``start`` on, of ``size`` real ones.

    ``group`` is the tensor-parallel group over which shards add up. A tangent keeps logits within ``cap``,
    before the temperature divides them (Gemma Team 2024, arXiv 2408.00118).
    """

    start: int
    size: int
    group: Any
    cap: float | None = None


class Support(NamedTuple):
    """Say which tokens of the vocabulary each position's distribution is over.

    ``sizes`` [n] counts them, 0 where it is over all; ``tokens`` [k] are their ids, position after position.
    """

    sizes: Tensor
    tokens: Tensor

    def mask(self, part: slice, columns: int, start: int) -> Tensor:
        """Mark what is outside: [positions of ``part``, columns] bool, for ids from ``start`` on."""
        ends = self.sizes.cumsum(0)
        sizes = self.sizes[part]
        last = int(ends[part][-1])
        tokens = self.tokens[last - int(sizes.sum()) : last] - start
        positions = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
        in_shard = (tokens >= 0) & (tokens < columns)
        outside = (sizes > 0)[:, None].repeat(1, columns)
        outside[positions[in_shard], tokens[in_shard]] = False
        return outside


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor,
        shard: VocabularyShard, chunk: int, reduce_hidden_gradient: bool, support: Support | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if support is None and shard.cap is None and kernel_applies(hidden, weight):
            stats = kernel_statistics(hidden, weight, targets, temperature, shard)
        else:
            stats = chunked_statistics(hidden, weight, targets, temperature, shard, chunk, support)
        log_normaliser, log_probs, entropy = _combine(_gather(stats, shard.group))
        ctx.save_for_backward(hidden, weight, targets, temperature, log_normaliser, entropy)
        ctx.shard, ctx.chunk, ctx.reduce, ctx.support = shard, chunk, reduce_hidden_gradient, support
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given: Any = (*ctx.saved_tensors, *gradients)
        hidden_gradient, weight_gradient = _gradients(
            *given, shard=ctx.shard, chunk=ctx.chunk, support=ctx.support, frozen=not ctx.needs_input_grad[1]
        )
        if ctx.reduce and ctx.shard.group.size() > 1:
            dist.all_reduce(hidden_gradient, group=ctx.shard.group)
        return hidden_gradient, weight_gradient, *(None,) * 6


def _gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, log_normaliser: Tensor,
    entropy: Tensor, log_prob_gradient: Tensor, entropy_gradient: Tensor,
    shard: VocabularyShard, chunk: int, support: Support | None = None, frozen: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of hidden states and weight, this shard's alone; None of a frozen weight."""
    hidden_gradient = torch.empty_like(hidden)
    weight_gradient = None if frozen else torch.zeros_like(weight)
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, begin + chunk)
        logits = _logits(hidden[part], weight, temperature[part], shard, support, part)
        _add_gradients(
            logits, hidden[part], targets[part], temperature[part], log_normaliser[part], entropy[part],
            log_prob_gradient[part], entropy_gradient[part],
            weight, shard, hidden_gradient[part], weight_gradient,
        )  # fmt: skip
        del logits
    return hidden_gradient, weight_gradient


def _add_gradients(
    logits: Tensor, hidden: Tensor, targets: Tensor, temperature: Tensor,
    log_normaliser: Tensor, entropy: Tensor,
    log_prob_gradient: Tensor, entropy_gradient: Tensor, weight: Tensor, shard: VocabularyShard,
    hidden_gradient: Tensor, weight_gradient: Tensor | None,
) -> None:  # fmt: skip
    """Add the gradients of one chunk of tokens; overwrites its logits, and holds one more [chunk, V / tp]."""
    # What a change of the projection changes of a capped logit: 1 - (logit / cap)^2.
    slack = None if shard.cap is None else 1 - (logits * temperature[:, None] / shard.cap).square_()
    log_p = logits.sub_(log_normaliser[:, None])
    p = log_p.exp()
    slope = log_p.add_(entropy[:, None]).mul_(-entropy_gradient[:, None])
    slope = slope.sub_(log_prob_gradient[:, None]).mul_(p)
    del p
    local, in_shard = _local_targets(targets, len(weight), shard)
    slope.scatter_add_(1, local[:, None], (log_prob_gradient * in_shard)[:, None])
    if slack is not None:
        slope = slope.mul_(slack.clamp_(min=0.0))  # where a token takes no part both are 0
    slope = slope.div_(temperature[:, None]).to(weight.dtype)
    torch.mm(slope, weight, out=hidden_gradient)
    if weight_gradient is not None:
        weight_gradient.addmm_(slope.t(), hidden)


def chunked_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk: int,
    support: Support | None = None,
) -> Tensor:
    """Return [4, n]: what a softmax over this shard needs, from logits of ``chunk`` tokens at a time.

    The four are the peak of logits, the sum of exp(logit - peak), the sum of exp(logit - peak) * (logit -
    peak), and the target's logit (a very low number where another shard holds it).
    """
    parts = [slice(begin, begin + chunk) for begin in range(0, len(hidden), chunk)]
    return torch.cat(
        [
            _statistics(
                _logits(hidden[part], weight, temperature[part], shard, support, part), targets[part], shard
            )
            for part in parts
        ],
        dim=1,
    )


def _statistics(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
    """Reduce one chunk of tokens, overwriting its logits; another tensor [chunk, V / tp] lives meanwhile."""
    peak = logits.amax(dim=-1)
    local, in_shard = _local_targets(targets, logits.shape[1], shard)
    target = logits.gather(1, local[:, None])[:, 0].masked_fill(~in_shard, _MASKED)
    shifted = logits.sub_(peak[:, None])
    exponents = shifted.exp()
    total = exponents.sum(dim=-1)
    weighted = exponents.mul_(shifted).sum(dim=-1)
    return torch.stack((peak, total, weighted, target))


def kernel_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, shard: VocabularyShard
) -> Tensor:
    """Return what `chunked_statistics` returns, from the Triton kernel; needs an accelerator."""
    from megatron_rl.megatron.log_probs_triton import split_statistics

    real = min(max(shard.size - shard.start, 0), len(weight))
    return _merge(split_statistics(hidden, weight, targets - shard.start, temperature, real))


def kernel_applies(hidden: Tensor, weight: Tensor) -> bool:
    """Say whether the Triton kernel serves these tensors: half precision on an accelerator where it works."""
    if device.on_host() or device.simulated() or importlib.util.find_spec("triton") is None:
        return False
    from megatron_rl.megatron.log_probs_triton import FAST

    rows = hidden.stride(-1) == weight.stride(-1) == 1
    return hidden.dtype == weight.dtype and hidden.dtype in FAST and rows and kernel_works(hidden.dtype)


@functools.cache
def kernel_works(dtype: torch.dtype) -> bool:
    """Say whether forward and backward of the kernel are right here; warn where they are not.

    Tried once per process and dtype on a small problem, before training relies on it.
    """
    try:
        values, gradients = kernel_errors(dtype)
    except Exception as error:  # Triton's own errors: no compiler, an unknown card, too little memory on it
        warnings.warn(f"the Triton kernel of log-probs does not run here: {first_line(error)}", stacklevel=2)
        return False
    if values < 1e-3 and max(gradients.values()) < 0.02:
        return True
    worst = ", ".join(f"{name} tokens {error:.1%}" for name, error in gradients.items())
    warnings.warn(
        f"the Triton kernel of log-probs is wrong here by {values:.3g}, and its gradients by: {worst}",
        stacklevel=2,
    )
    return False


def kernel_errors(dtype: torch.dtype) -> tuple[float, dict[str, float]]:
    """Compare the kernel, and the backward pass that follows it, with a dense softmax in float64.

    Returns the largest difference of normaliser, log-prob and entropy, and the relative error of the weight's
    gradient from tokens that the model is certain of (p > 0.99), rare ones (p < 0.01) and others.
    """
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 690, (150,), generator=generator)
    weight = torch.randn(700, 192, generator=generator) / 4
    hidden = torch.randn(150, 192, generator=generator) / 4
    hidden[:100] += weight[targets[:100]] * torch.linspace(0.2, 2.5, 100)[:, None]
    temperature = 0.5 + torch.rand(150, generator=generator)
    place, shard = device.device(), VocabularyShard(0, 690, None)
    rest = (targets.to(place), temperature.to(place))
    states, words = hidden.to(place, dtype), weight.to(place, dtype)
    statistics = _combine(kernel_statistics(states, words, *rest, shard)[None])

    dense = (words[:690].double().cpu()).requires_grad_()
    logits = states.double().cpu() @ dense.t() / temperature.double()[:, None]
    log_p = logits.log_softmax(1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    wanted = (logits.logsumexp(1), chosen, -(log_p.exp() * log_p).sum(1))
    pairs = zip(statistics, wanted, strict=True)
    values = max(float((one.double().cpu() - other.detach()).abs().max()) for one, other in pairs)
    probability = chosen.detach().exp()
    kinds = {"certain": probability > 0.99, "rare": probability < 0.01}
    kinds["other"] = ~(kinds["certain"] | kinds["rare"])
    errors = {}
    for name, kind in kinds.items():
        (truth,) = torch.autograd.grad(chosen[kind].sum(), dense, retain_graph=True)
        slopes = (kind.to(place, torch.float32), torch.zeros(150, device=place))
        _, gradient = _gradients(states, words, *rest, statistics[0], statistics[2], *slopes, shard, 64)
        assert gradient is not None
        errors[name] = float((gradient[:690].double().cpu() - truth).norm() / truth.norm())
    return values, errors


def _logits(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    support: Support | None = None,
    part: slice = slice(None),
) -> Tensor:
    """Return the logits of the positions ``part``, a very low number where a token does not take part."""
    logits = _project(hidden, weight)
    if shard.cap is not None:
        logits = logits.div_(shard.cap).tanh_().mul_(shard.cap)
    logits = logits.div_(temperature[:, None])
    real = shard.size - shard.start
    if real < len(weight):
        logits[:, max(real, 0) :] = _MASKED
    if support is not None:
        logits.masked_fill_(support.mask(part, len(weight), shard.start), _MASKED)
    return logits


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return ``hidden @ weight.T`` with sums and results in float32 at least."""
    if hidden.dtype in (torch.float32, torch.float64):
        return hidden @ weight.t()
    if device.on_host():  # which has no product of half precision with another result
        return hidden.float() @ weight.float().t()
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


def _local_targets(targets: Tensor, words: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    local = targets - shard.start
    in_shard = (local >= 0) & (local < words)
    return local.clamp(0, words - 1), in_shard


def _gather(stats: Tensor, group: Any) -> Tensor:
    if group.size() == 1:
        return stats[None]
    gathered = torch.empty((group.size(), *stats.shape), dtype=stats.dtype, device=stats.device)
    dist.all_gather_into_tensor(gathered.view(-1), stats.contiguous().view(-1), group=group)
    return gathered


def _merge(stats: Tensor) -> Tensor:
    """Merge parts of a vocabulary, [parts, 4, n] of `chunked_statistics`, to those of the whole, [4, n]."""
    peak, total, weighted, target = stats.unbind(dim=1)
    top = peak.amax(dim=0)
    scale = (peak - top).exp()
    weighted = ((weighted + (peak - top) * total) * scale).sum(dim=0)
    return torch.stack((top, (total * scale).sum(dim=0), weighted, target.amax(dim=0)))


def _combine(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log normaliser, log-prob of the target and entropy from all parts of the vocabulary."""
    top, total, weighted, target = _merge(stats)
    log_sum = total.log()
    return top + log_sum, target - top - log_sum, log_sum - weighted / total


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    shard: VocabularyShard,
    chunk: int = 1024,
    reduce_hidden_gradient: bool = True,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of ``targets`` and the entropy of the distribution, both [n] float32.

    ``hidden`` [n, h] is the same on all ranks of the group, ``weight`` [V / tp, h] this rank's rows of the
    output projection, ``targets`` [n] token ids, ``temperature`` [n] divides the logits. Gradients of
    ``hidden`` are summed over the group unless ``reduce_hidden_gradient`` is false (where a
    sequence-parallel reduce-scatter follows). ``support`` says over which tokens each distribution is, None
    over all. Collective over the tensor-parallel group. float64 inputs give float64 results.
    """
    precise = torch.promote_types(hidden.dtype, torch.float32)
    if not len(hidden):
        # Keeps the graph connected so that the pipeline's backward pass runs on empty micro-batches too. Its
        # type is that of other context-parallel ranks' tokens, which it is summed with.
        zero = (hidden.sum() + weight.sum() * 0)[None][:0].to(precise)
        return zero, zero
    temperature = temperature.to(precise)
    return _VocabParallelLogProbs.apply(
        hidden, weight, targets, temperature, shard, chunk, reduce_hidden_gradient, support
    )
