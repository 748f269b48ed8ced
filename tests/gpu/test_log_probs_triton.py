"""The Triton kernel of log-probs and entropy equals the chunked version.

Needs Triton and an accelerator, or Triton's interpreter on the host:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_log_probs_triton.py
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.distributed import device
from megatron_rl.megatron import log_probs as module
from megatron_rl.megatron.log_probs import VocabularyShard, chunked_statistics, kernel_statistics
from megatron_rl.megatron.log_probs_triton import DTYPES, FAST, split_statistics

pytestmark = pytest.mark.gpu
# The interpreter (3.9.0) multiplies the bits of bfloat16 as if they were whole numbers.
WRONG = (torch.bfloat16,) if os.environ.get("TRITON_INTERPRET") == "1" else ()
ALONE = SimpleNamespace(size=lambda: 1)


def case(rows: int, width: int, padded: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + width)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(padded, width, generator=generator) / width**0.5
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    temperature = 0.3 + torch.rand(rows, generator=generator)
    here = device.device()
    return hidden.to(here, dtype), weight.to(here, dtype), targets.to(here), temperature.to(here)


def results(stats: torch.Tensor) -> torch.Tensor:
    """Return normaliser, log-prob and entropy, [3, n]."""
    return torch.stack(module._combine(stats))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in WRONG], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "padded", "vocabulary"),
    [(1, 16, 16, 13), (130, 72, 300, 300), (37, 40, 1040, 1000), (5, 128, 2, 1)],
)
def test_the_kernel_equals_the_chunked_version(
    rows: int, width: int, padded: int, vocabulary: int, dtype: torch.dtype
) -> None:
    hidden, weight, targets, temperature = case(rows, width, padded, vocabulary, dtype)
    shard = VocabularyShard(0, vocabulary, ALONE)
    found = kernel_statistics(hidden, weight, targets, temperature, shard)
    wanted = chunked_statistics(hidden.double(), weight.double(), targets, temperature.double(), shard, 64)
    difference = results(found[None]).double() - results(wanted[None])
    assert float(difference.abs().max()) < 1e-4


@pytest.mark.parametrize("parts", [2, 4])
def test_shards_and_splits_merge_to_the_whole(parts: int) -> None:
    hidden, weight, targets, temperature = case(19, 24, 1200, 1100, torch.float32)
    rows = len(weight) // parts
    shards = [
        kernel_statistics(
            hidden, weight[part * rows : (part + 1) * rows], targets, temperature,
            VocabularyShard(part * rows, 1100, ALONE),
        )
        for part in range(parts)
    ]  # fmt: skip
    whole = chunked_statistics(
        hidden.double(), weight.double(), targets, temperature.double(), VocabularyShard(0, 1100, ALONE), 19
    )
    difference = results(torch.stack(shards)).double() - results(whole[None])
    assert float(difference.abs().max()) < 1e-4
    assert len(split_statistics(hidden, weight, targets, temperature, 1100)) > 1


def test_a_shard_of_padding_alone_adds_nothing() -> None:
    hidden, weight, targets, temperature = case(7, 32, 64, 40, torch.float32)
    parts = [
        kernel_statistics(
            hidden, weight[start : start + 32], targets, temperature, VocabularyShard(start, 32, ALONE)
        )
        for start in (0, 32)
    ]
    both, first = results(torch.stack(parts)), results(parts[0][None])
    assert bool(torch.isfinite(both).all()) and float((both - first).abs().max()) < 1e-5


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets, temperature = case(9, 32, 200, 200, torch.float32)
    stats = kernel_statistics(hidden * 1e4, weight, targets, temperature, VocabularyShard(0, 200, ALONE))
    wanted = chunked_statistics(
        hidden.double() * 1e4, weight.double(), targets, temperature.double(),
        VocabularyShard(0, 200, ALONE), 9,
    )  # fmt: skip
    torch.testing.assert_close(results(stats[None]).double(), results(wanted[None]), rtol=1e-5, atol=1e-2)


def test_training_uses_it_and_gradients_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass is the kernel's, the backward pass projects again in chunks."""
    called = []

    def kernel(*given: object) -> torch.Tensor:
        called.append(given)
        return kernel_statistics(*given)  # pyright: ignore

    monkeypatch.setattr(module, "kernel_statistics", kernel)
    monkeypatch.setattr(module, "kernel_applies", lambda *_: True)
    hidden, weight, targets, temperature = case(33, 24, 96, 90, torch.float32)
    shard = VocabularyShard(0, 90, ALONE)

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        states, words = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        log_probs, entropy = module.vocab_parallel_log_probs(states, words, targets, temperature, shard, 8)
        mix = torch.linspace(-1, 1, len(targets), dtype=dtype, device=states.device)
        return [log_probs, *torch.autograd.grad((log_probs * mix + entropy).sum(), (states, words))]

    found = gradients(torch.float32)
    assert called
    monkeypatch.setattr(module, "kernel_applies", lambda *_: False)
    for one, other in zip(found, gradients(torch.float64), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_passes_are_right_for_certain_rare_and_other_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype in WRONG:  # float32 holds the same numbers, and products and sums are as on a card

        def kernel(hidden: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
            return kernel_statistics(hidden.float(), weight.float(), *rest)  # pyright: ignore

        monkeypatch.setattr(module, "kernel_statistics", kernel)
    values, gradients = module.kernel_errors(dtype)
    assert values < 1e-4 and max(gradients.values()) < 0.02, (values, gradients)


@pytest.mark.parametrize("vocabulary", [1, 63, 129, 517])
def test_values_and_gradients_equal_a_dense_softmax_in_float64(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold and hot rows, no size a multiple of a block, inputs that are columns of wider tensors."""
    monkeypatch.setattr(module, "kernel_applies", lambda *_: True)
    hidden, weight, targets, _ = case(70, 50, vocabulary + 3, vocabulary, torch.float32)
    temperature = torch.logspace(-1, 0.7, 70, device=hidden.device)
    hidden, weight = (torch.cat((value, value), dim=1)[:, :50] for value in (hidden, weight))
    assert hidden.stride(0) == weight.stride(0) == 100
    mix = torch.linspace(-1, 1, len(targets), device=hidden.device)

    states, words = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    shard = VocabularyShard(0, vocabulary, ALONE)
    found = module.vocab_parallel_log_probs(states, words, targets, temperature, shard, 32)
    gradients = torch.autograd.grad((found[0] * mix + found[1] * mix.flip(0)).sum(), (states, words))

    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (x @ w[:vocabulary].T / temperature.double()[:, None]).log_softmax(-1)
    wanted = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    mix = mix.double()
    expected = torch.autograd.grad((wanted[0] * mix + wanted[1] * mix.flip(0)).sum(), (x, w))
    for one, other in zip((*found, *gradients), (*wanted, *expected), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [dtype for dtype in FAST if dtype not in WRONG], ids=str)
def test_it_is_tried_before_it_is_relied_on(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module.kernel_works.cache_clear()
    assert module.kernel_works(dtype)
    module.kernel_works.cache_clear()
    monkeypatch.setattr(module, "kernel_statistics", lambda *given: chunked_statistics(*given, 150) + 0.01)
    with pytest.warns(UserWarning, match="is wrong here"):
        assert not module.kernel_works(dtype)
    module.kernel_works.cache_clear()
