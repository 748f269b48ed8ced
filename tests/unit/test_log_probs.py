"""Chunked vocab-parallel log-probs and entropy equal the dense softmax, values and gradients."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.megatron import log_probs as module
from megatron_rl.megatron.log_probs import VocabularyShard, make_support, vocab_parallel_log_probs

ALONE = SimpleNamespace(size=lambda: 1)


def _case(rows=11, hidden=6, vocabulary=13, padded=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(padded, hidden, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    temperature = 0.5 + torch.rand(rows, generator=generator, dtype=dtype)
    return states, weight, targets, temperature, vocabulary


def _dense(states, weight, targets, temperature, vocabulary, cap=None):
    logits = states @ weight[:vocabulary].T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = (logits / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_values_and_gradients_equal_the_dense_softmax(chunk, cap):
    states, weight, targets, temperature, vocabulary = _case()
    shard = VocabularyShard(0, vocabulary, ALONE, cap)
    found = vocab_parallel_log_probs(states, weight, targets, temperature, shard, chunk)
    wanted = _dense(states, weight, targets, temperature, vocabulary, cap)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    mix = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    mine = torch.autograd.grad((found[0] * mix + found[1] * mix.flip(0)).sum(), (states, weight))
    theirs = torch.autograd.grad((wanted[0] * mix + wanted[1] * mix.flip(0)).sum(), (states, weight))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def _truncated():
    """Return the case, supports of its rows (one has all tokens), and the excluded tokens, [n, V] bool."""
    case = _case()
    targets, vocabulary = case[2], case[4]
    generator = torch.Generator().manual_seed(1)
    left = torch.rand(len(targets), vocabulary, generator=generator) < 0.3
    left[torch.arange(len(targets)), targets] = True
    sizes = left.sum(1)
    sizes[3] = 0
    left[3] = False
    support = make_support(sizes.int(), left.nonzero()[:, 1].int())
    left[3] = True
    return case, support, ~left


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_distributions_over_some_tokens_only(chunk):
    (states, weight, targets, temperature, vocabulary), support, outside = _truncated()
    shard = VocabularyShard(0, vocabulary, ALONE)
    found = vocab_parallel_log_probs(states, weight, targets, temperature, shard, chunk, support=support)
    logits = ((states @ weight[:vocabulary].T) / temperature[:, None]).masked_fill(outside, -torch.inf)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(outside, 0)).sum(-1)
    wanted = log_p.gather(1, targets[:, None])[:, 0], entropy
    mix = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        gradients = [
            torch.autograd.grad((value * mix).sum(), (states, weight), retain_graph=True)
            for value in (mine, theirs)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_pass_at_half_the_temperature_gives_the_sum_of_squared_probabilities(cap):
    states, weight, targets, temperature, vocabulary = _case()
    shard = VocabularyShard(0, vocabulary, ALONE, cap)
    log_probs, _ = vocab_parallel_log_probs(states, weight, targets, temperature, shard)
    sharp, _ = vocab_parallel_log_probs(states, weight, targets, temperature / 2, shard)
    logits = states @ weight[:vocabulary].T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    wanted = (logits / temperature[:, None]).softmax(-1).square().sum(-1)
    torch.testing.assert_close((2 * log_probs - sharp).exp(), wanted, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    states, weight, targets, temperature, vocabulary = _case(rows=4, hidden=3, vocabulary=5, padded=6)
    shard = VocabularyShard(0, vocabulary, ALONE)
    assert torch.autograd.gradcheck(
        lambda s, w: vocab_parallel_log_probs(s, w, targets, temperature, shard, 3), (states, weight)
    )


@pytest.mark.parametrize("parts", [2, 4, 16])
@pytest.mark.parametrize("truncated", [False, True])
def test_shards_combine_to_the_whole(parts, truncated):
    (states, weight, targets, temperature, vocabulary), support, _ = _truncated()
    support = support if truncated else None
    rows = len(weight) // parts
    stats = []
    for part in range(parts):
        shard = VocabularyShard(part * rows, vocabulary, ALONE)
        local = weight[part * rows : (part + 1) * rows].detach()
        stats.append(
            module.softmax_statistics(states.detach(), local, targets, temperature, shard, 4, support)
        )
    _, found, entropy = module._compute_outputs(torch.stack(stats))
    wanted, wanted_entropy = vocab_parallel_log_probs(
        states, weight, targets, temperature, VocabularyShard(0, vocabulary, ALONE), support=support
    )
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, wanted_entropy.detach(), rtol=1e-12, atol=1e-12)


def test_parts_of_shards_merge_in_any_order():
    states, weight, targets, temperature, vocabulary = (
        value.detach() if isinstance(value, torch.Tensor) else value for value in _case()
    )

    def part(first: int, last: int) -> torch.Tensor:
        shard = VocabularyShard(first, min(last, vocabulary), ALONE)
        return module.softmax_statistics(states, weight[first:last], targets, temperature, shard, 4)

    parts = [part(first, first + 4) for first in (0, 4, 8, 12)]
    halves = [module._merge_statistics(torch.stack(parts[half : half + 2])) for half in (0, 2)]
    for one, other in zip(
        module._compute_outputs(torch.stack(halves)), module._compute_outputs(part(0, 16)[None]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "precise"), [(torch.bfloat16, torch.float32), (torch.float64,) * 2])
def test_no_token_keeps_the_graph(dtype, precise):
    states, weight, *_ = _case(dtype=dtype)
    found, _ = vocab_parallel_log_probs(
        states[:0], weight, torch.zeros(0, dtype=torch.long), torch.ones(0), VocabularyShard(0, 13, ALONE)
    )
    assert found.shape == (0,) and found.requires_grad
    assert found.dtype == precise  # that of other context-parallel ranks, which have tokens
    gradients = torch.autograd.grad(found.sum(), (states, weight))
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_logits_of_half_precision_are_float32():
    states, weight, targets, temperature, vocabulary = _case(dtype=torch.bfloat16)
    found, entropy = vocab_parallel_log_probs(
        states, weight, targets, temperature.float(), VocabularyShard(0, vocabulary, ALONE)
    )
    assert found.dtype == entropy.dtype == torch.float32
    wanted, _ = _dense(states.double(), weight.double(), targets, temperature.double(), vocabulary)
    assert (found.double() - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("tokens", [8192, 16384])  # in chunks of 220 tokens: 38 and 75
def test_the_gradient_of_a_half_precision_head_is_summed_in_float32(tokens):
    vocabulary, width, chunk = 1024, 64, 220
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.arange(1, vocabulary + 1).float().reciprocal()
    targets = torch.multinomial(frequencies, tokens, replacement=True, generator=generator)
    states = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 4).bfloat16().requires_grad_()
    slopes = torch.randn(tokens, generator=generator) / 2 + 0.2
    shard = VocabularyShard(0, vocabulary, ALONE)
    found, entropy = vocab_parallel_log_probs(states, weight, targets, torch.ones(tokens), shard, chunk)
    mine = torch.autograd.grad((found * slopes + entropy * 0.01).sum(), (states, weight))

    precise = [tensor.detach().double().requires_grad_() for tensor in (states, weight)]
    wanted = [torch.zeros_like(tensor) for tensor in precise]
    for part in torch.arange(tokens).split(1024):
        values, entropies = _dense(
            precise[0][part], precise[1], targets[part], torch.ones(len(part)).double(), vocabulary
        )
        loss = (values * slopes[part] + entropies * 0.01).sum()
        for total, gradient in zip(wanted, torch.autograd.grad(loss, precise), strict=True):
            total += gradient
    for one, other in zip(mine, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() / other.norm() < 0.0025


def test_a_backward_pass_of_other_logits_than_the_forward_pass_is_noticed(monkeypatch):
    values, gradients = module.measure_kernel_errors(torch.bfloat16, module.TORCH)
    assert values < 1e-3 and gradients.keys() == {"certain", "rare", "other"}
    assert max(gradients.values()) < 0.02, gradients
    monkeypatch.setattr(module, "triton_reductions", lambda: module.TORCH)
    module.kernels_work.cache_clear()
    assert module.kernels_work(torch.bfloat16)

    exact = module.softmax_statistics
    monkeypatch.setattr(
        module,
        "softmax_statistics",
        lambda hidden, weight, *rest, **options: exact(hidden.float(), weight.float(), *rest, **options),
    )
    monkeypatch.setattr(module, "_multiply", lambda left, right: (left @ right).float())
    _, gradients = module.measure_kernel_errors(torch.bfloat16)
    assert gradients["certain"] > 1, gradients
    module.kernels_work.cache_clear()
    with pytest.warns(UserWarning, match="gradients by: certain tokens"):
        assert not module.kernels_work(torch.bfloat16)
    module.kernels_work.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "chunk", "rows"), [(512, 64, 2048), (2048, 64, 2048), (512, 128, 2048), (512, 64, 1024)]
)
def test_memory_is_two_chunks_of_logits_whatever_the_tokens(tokens, chunk, rows, monkeypatch):
    """What both passes hold at once beyond inputs and gradients, but for a few numbers per token."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from live_bytes import LiveBytes

    width = 16
    states, weight, targets, temperature, _ = _case(tokens, width, rows, rows, torch.float32)
    with LiveBytes() as live:
        found = vocab_parallel_log_probs(
            states, weight, targets, temperature, VocabularyShard(0, rows, ALONE), chunk
        )
        (found[0].sum() + found[1].sum()).backward()
    logits = 4 * chunk * rows
    gradients, per_token = states.nbytes + weight.nbytes, 100 * tokens
    assert live.peak < 2 * logits + 2 * gradients + per_token
    assert live.peak > logits
    sys.modules.pop("live_bytes")
