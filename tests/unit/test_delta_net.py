"""Gated delta nets: the rule by chunks against the rule by tokens, and the refusals of `check`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.check.model.adapters import check_adapted_model
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.megatron.delta_net import chunked_delta_rule
from megatron_rl.shapes.layout import ParallelLayout, trainer_problems
from megatron_rl.shapes.pretrained import parse_pretrained
from tests.hf_models import config_of


def rule_by_tokens(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor) -> Tensor:
    """Compute the outputs [rows, length, heads, size] one token after the other, in float64."""
    rows, length, heads, key_size = key.shape
    state = torch.zeros(rows, heads, key_size, value.shape[-1], dtype=torch.float64)
    outputs = []
    for token in range(length):
        state = state * log_decay[:, token].exp()[..., None, None]
        read = torch.einsum("rhkv,rhk->rhv", state, key[:, token])
        change = rate[:, token, :, None] * (value[:, token] - read)
        state = state + torch.einsum("rhk,rhv->rhkv", key[:, token], change)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, query[:, token]) / key_size**0.5)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunks_give_what_tokens_give(length: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def random(*size: int) -> Tensor:
        return torch.randn(2, length, 3, *size, generator=generator, dtype=torch.float64)

    query, key = (torch.nn.functional.normalize(random(16), dim=-1) for _ in range(2))
    inputs = (query, key, random(8), -random().abs(), random().sigmoid())
    exact = [values.clone().requires_grad_() for values in inputs]
    rounded = [values.float().requires_grad_() for values in inputs]
    weights = random(8)

    expected, found = rule_by_tokens(*exact), chunked_delta_rule(*rounded)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    (expected * weights).sum().backward()
    (found.double() * weights).sum().backward()
    for one, other in zip(rounded, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, atol=2e-5, rtol=1e-4)


def test_a_strong_decay_does_not_overflow() -> None:
    ones = torch.ones(1, 130, 1, 4)
    output = chunked_delta_rule(ones, ones, ones, torch.full((1, 130, 1), -50.0), torch.ones(1, 130, 1))
    assert torch.isfinite(output).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 2}, "context parallelism is not supported for gated delta nets"),
        ({"tensor": 4}, "needs a key-value head on every tensor-parallel rank"),
    ],
)
def test_layouts_that_delta_nets_cannot_have_are_refused(sizes: dict[str, Any], message: str) -> None:
    shape = parse_pretrained(config_of("qwen3-5").to_dict()).shape
    assert not trainer_problems(shape, ParallelLayout((0, 1, 2, 3), tensor=2, pipeline=2))
    errors = trainer_problems(shape, ParallelLayout((0, 1, 2, 3), **sizes))
    assert [error for error in errors if message in error.message]


def test_adapters_of_delta_nets_are_refused() -> None:
    (error,) = check_adapted_model(LoraConfig(rank=4), parse_pretrained(config_of("qwen3-5").to_dict()))
    assert (error.where, error.fix) == ("actor.lora", "remove actor.lora")
