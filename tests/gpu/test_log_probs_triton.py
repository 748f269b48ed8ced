"""The Triton kernels of log-probs and entropy agree with PyTorch, in values and gradients.

Needs Triton and an accelerator, or Triton's interpreter on the host:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_log_probs_triton.py
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.distributed import device
from megatron_rl.megatron import log_probs as module
from megatron_rl.megatron.log_probs import TORCH, VocabularyShard, make_support, triton_reductions

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALONE = SimpleNamespace(size=lambda: 1)


def case(
    rows: int,
    width: int,
    padded: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
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
    return torch.stack(module._compute_outputs(stats))


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, *labels: torch.Tensor, shard: VocabularyShard
) -> torch.Tensor:
    """Return the statistics in float64 and in PyTorch, [1, 4, n]."""
    targets, temperature = labels
    return module.softmax_statistics(
        hidden.double(), weight.double(), targets, temperature.double(), shard, 64, reductions=TORCH
    )[None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "padded", "vocabulary"),
    [(1, 16, 16, 13), (130, 72, 300, 300), (37, 40, 9040, 9000), (5, 128, 2, 1)],
)
def test_the_kernel_equals_pytorch(
    rows: int,
    width: int,
    padded: int,
    vocabulary: int,
    dtype: torch.dtype,
) -> None:
    hidden, weight, *labels = case(rows, width, padded, vocabulary, dtype)
    shard = VocabularyShard(0, vocabulary, ALONE)
    actual = module.softmax_statistics(hidden, weight, *labels, shard, 64, reductions=triton_reductions())
    expected = exact(hidden, weight, *labels, shard=shard)
    difference = results(actual[None]).double() - results(expected)
    assert float(difference.abs().max()) < 1e-4


@pytest.mark.parametrize("shard_count", [2, 4])
def test_shards_merge_to_the_whole(shard_count: int) -> None:
    hidden, weight, *labels = case(19, 24, 1200, 1100)
    rows = len(weight) // shard_count
    shards = [
        module.softmax_statistics(
            hidden, weight[shard * rows : (shard + 1) * rows], *labels,
            VocabularyShard(shard * rows, 1100, ALONE), 64, reductions=triton_reductions(),
        )
        for shard in range(shard_count)
    ]  # fmt: skip
    expected = exact(hidden, weight, *labels, shard=VocabularyShard(0, 1100, ALONE))
    assert float((results(torch.stack(shards)).double() - results(expected)).abs().max()) < 1e-4


def test_a_shard_of_padding_alone_adds_nothing() -> None:
    hidden, weight, *labels = case(7, 32, 64, 40)
    statistics = [
        module.softmax_statistics(
            hidden, weight[start : start + 32], *labels, VocabularyShard(start, 32, ALONE), 64,
            reductions=triton_reductions(),
        )
        for start in (0, 32)
    ]  # fmt: skip
    combined = results(torch.stack(statistics))
    without_padding = results(statistics[0][None])
    assert bool(torch.isfinite(combined).all()) and float((combined - without_padding).abs().max()) < 1e-5


def test_large_logits_stay_finite() -> None:
    hidden, weight, *labels = case(9, 32, 200, 200)
    shard = VocabularyShard(0, 200, ALONE)
    stats = module.softmax_statistics(
        hidden * 1e4, weight, *labels, shard, 64, reductions=triton_reductions()
    )
    expected = exact(hidden * 1e4, weight, *labels, shard=shard)
    torch.testing.assert_close(results(stats[None]).double(), results(expected), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_passes_are_right_for_certain_rare_and_other_tokens(dtype: torch.dtype) -> None:
    values, gradients = module.measure_kernel_errors(dtype)
    assert values < 1e-4 and max(gradients.values()) < 0.02, (values, gradients)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 63, 129, 517, 5000])
def test_values_and_gradients_equal_those_of_pytorch_in_float64(
    vocabulary: int, truncated: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of low and high temperature, sizes that are no multiple of a block, and strided inputs."""
    hidden, weight, targets, _ = case(70, 50, vocabulary + 3, vocabulary)
    temperature = torch.logspace(-1, 0.7, 70, device=hidden.device)
    hidden, weight = (torch.cat((value, value), dim=1)[:, :50] for value in (hidden, weight))
    assert hidden.stride(0) == weight.stride(0) == 100

    mix = torch.linspace(-1, 1, len(targets), device=hidden.device)
    support = None
    if truncated:
        # The target alone, but for every other position, which has the whole vocabulary.
        sizes = torch.arange(70) % 2
        support = make_support(sizes, targets.cpu()[sizes.bool()])
        support = support._replace(sizes=sizes.to(hidden.device), tokens=support.tokens.to(hidden.device))

    def both_passes(dtype: torch.dtype, reductions: module.Reductions) -> list[torch.Tensor]:
        monkeypatch.setattr(module, "choose_reductions", lambda _: reductions)
        states = hidden.detach().to(dtype).requires_grad_()
        rows = weight.detach().to(dtype).requires_grad_()
        shard = VocabularyShard(0, vocabulary, ALONE, cap)
        log_probs, entropy = module.vocab_parallel_log_probs(
            states, rows, targets, temperature.to(dtype), shard, 32, support=support
        )
        loss = (log_probs * mix.to(dtype) + entropy * mix.to(dtype).flip(0)).sum()
        return [log_probs, entropy, *torch.autograd.grad(loss, (states, rows))]

    found = both_passes(torch.float32, triton_reductions())
    expected = both_passes(torch.float64, TORCH)
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_tried_before_they_are_relied_on(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.kernels_work.cache_clear()
    assert module.kernels_work(dtype)
    module.kernels_work.cache_clear()
    wrong = TORCH._replace(statistics=lambda *tile: module.tile_statistics(*tile) + 0.01)
    monkeypatch.setattr(module, "triton_reductions", lambda: wrong)
    with pytest.warns(UserWarning, match="are wrong here"):
        assert not module.kernels_work(dtype)
    module.kernels_work.cache_clear()
