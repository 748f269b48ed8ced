"""The Triton kernel of log-probs and entropy agrees with the chunked version.

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
# Triton's interpreter (3.9.0) multiplies the bits of bfloat16 as integers.
WRONG = (torch.bfloat16,) if os.environ.get("TRITON_INTERPRET") == "1" else ()
ALONE = SimpleNamespace(size=lambda: 1)


def case(
    rows: int,
    width: int,
    padded: int,
    vocabulary: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + width)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(padded, width, generator=generator) / width**0.5
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    temperature = 0.3 + torch.rand(rows, generator=generator)
    accelerator = device.device()
    return (
        hidden.to(accelerator, dtype),
        weight.to(accelerator, dtype),
        targets.to(accelerator),
        temperature.to(accelerator),
    )


def results(stats: torch.Tensor) -> torch.Tensor:
    """Return normaliser, log-prob and entropy, [3, n]."""
    return torch.stack(module._combine(stats))


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in WRONG], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "padded", "vocabulary"),
    [(1, 16, 16, 13), (130, 72, 300, 300), (37, 40, 1040, 1000), (5, 128, 2, 1)],
)
def test_the_kernel_equals_the_chunked_version(
    rows: int,
    width: int,
    padded: int,
    vocabulary: int,
    dtype: torch.dtype,
) -> None:
    hidden, weight, targets, temperature = case(rows, width, padded, vocabulary, dtype)
    shard = VocabularyShard(0, vocabulary, ALONE)
    actual = kernel_statistics(hidden, weight, targets, temperature, shard)
    expected = chunked_statistics(hidden.double(), weight.double(), targets, temperature.double(), shard, 64)
    difference = results(actual[None]).double() - results(expected[None])
    assert float(difference.abs().max()) < 1e-4


@pytest.mark.parametrize("shard_count", [2, 4])
def test_shards_and_splits_merge_to_the_whole(shard_count: int) -> None:
    hidden, weight, targets, temperature = case(19, 24, 1200, 1100, torch.float32)
    rows = len(weight) // shard_count
    shards = [
        kernel_statistics(
            hidden, weight[shard * rows : (shard + 1) * rows], targets, temperature,
            VocabularyShard(shard * rows, 1100, ALONE),
        )
        for shard in range(shard_count)
    ]  # fmt: skip

    complete = chunked_statistics(
        hidden.double(), weight.double(), targets, temperature.double(), VocabularyShard(0, 1100, ALONE), 19
    )
    difference = results(torch.stack(shards)).double() - results(complete[None])
    assert float(difference.abs().max()) < 1e-4
    assert len(split_statistics(hidden, weight, targets, temperature, 1100)) > 1


def test_a_shard_of_padding_alone_adds_nothing() -> None:
    hidden, weight, targets, temperature = case(7, 32, 64, 40, torch.float32)
    statistics = [
        kernel_statistics(
            hidden, weight[start : start + 32], targets, temperature, VocabularyShard(start, 32, ALONE)
        )
        for start in (0, 32)
    ]
    combined = results(torch.stack(statistics))
    without_padding = results(statistics[0][None])
    assert bool(torch.isfinite(combined).all()) and float((combined - without_padding).abs().max()) < 1e-5


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets, temperature = case(9, 32, 200, 200, torch.float32)
    stats = kernel_statistics(hidden * 1e4, weight, targets, temperature, VocabularyShard(0, 200, ALONE))
    expected = chunked_statistics(
        hidden.double() * 1e4, weight.double(), targets, temperature.double(),
        VocabularyShard(0, 200, ALONE), 9,
    )  # fmt: skip
    torch.testing.assert_close(results(stats[None]).double(), results(expected[None]), rtol=1e-5, atol=1e-2)


def test_training_uses_it_and_gradients_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass is the kernel's; the backward pass projects again in chunks."""
    calls = []

    def kernel(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return kernel_statistics(*arguments)  # pyright: ignore

    monkeypatch.setattr(module, "kernel_statistics", kernel)
    monkeypatch.setattr(module, "kernel_applies", lambda *_: True)
    hidden, weight, targets, temperature = case(33, 24, 96, 90, torch.float32)

    shard = VocabularyShard(0, 90, ALONE)

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        states = hidden.to(dtype).requires_grad_()
        vocabulary_weight = weight.to(dtype).requires_grad_()
        log_probs, entropy = module.vocab_parallel_log_probs(
            states, vocabulary_weight, targets, temperature, shard, 8
        )
        mix = torch.linspace(-1, 1, len(targets), dtype=dtype, device=states.device)
        return [
            log_probs,
            *torch.autograd.grad((log_probs * mix + entropy).sum(), (states, vocabulary_weight)),
        ]

    actual = gradients(torch.float32)
    assert calls
    monkeypatch.setattr(module, "kernel_applies", lambda *_: False)

    for value, reference in zip(actual, gradients(torch.float64), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_passes_are_right_for_certain_rare_and_other_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype in WRONG:  # float32 represents the same numbers, and its products and sums equal those of a GPU

        def kernel(hidden: torch.Tensor, weight: torch.Tensor, *arguments: object) -> torch.Tensor:
            return kernel_statistics(hidden.float(), weight.float(), *arguments)  # pyright: ignore

        monkeypatch.setattr(module, "kernel_statistics", kernel)
    values, gradients = module.kernel_errors(dtype)
    assert values < 1e-4 and max(gradients.values()) < 0.02, (values, gradients)


@pytest.mark.parametrize("vocabulary", [1, 63, 129, 517])
def test_values_and_gradients_equal_a_dense_softmax_in_float64(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of low and high temperature, sizes that are no multiple of a block, and strided inputs."""
    monkeypatch.setattr(module, "kernel_applies", lambda *_: True)
    hidden, weight, targets, _ = case(70, 50, vocabulary + 3, vocabulary, torch.float32)
    temperature = torch.logspace(-1, 0.7, 70, device=hidden.device)
    hidden, weight = (torch.cat((value, value), dim=1)[:, :50] for value in (hidden, weight))
    assert hidden.stride(0) == weight.stride(0) == 100

    mix = torch.linspace(-1, 1, len(targets), device=hidden.device)

    states = hidden.detach().requires_grad_()
    vocabulary_weight = weight.detach().requires_grad_()
    shard = VocabularyShard(0, vocabulary, ALONE)
    actual = module.vocab_parallel_log_probs(states, vocabulary_weight, targets, temperature, shard, 32)
    gradients = torch.autograd.grad(
        (actual[0] * mix + actual[1] * mix.flip(0)).sum(), (states, vocabulary_weight)
    )

    x = hidden.double().requires_grad_()
    w = weight.double().requires_grad_()
    log_p = (x @ w[:vocabulary].T / temperature.double()[:, None]).log_softmax(-1)
    dense = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    mix = mix.double()

    expected = torch.autograd.grad((dense[0] * mix + dense[1] * mix.flip(0)).sum(), (x, w))
    for value, reference in zip((*actual, *gradients), (*dense, *expected), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [dtype for dtype in FAST if dtype not in WRONG], ids=str)
def test_it_is_tried_before_it_is_relied_on(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module.kernel_works.cache_clear()
    assert module.kernel_works(dtype)
    module.kernel_works.cache_clear()
    monkeypatch.setattr(
        module, "kernel_statistics", lambda *arguments: chunked_statistics(*arguments, 150) + 0.01
    )
    with pytest.warns(UserWarning, match="is wrong here"):
        assert not module.kernel_works(dtype)
    module.kernel_works.cache_clear()
