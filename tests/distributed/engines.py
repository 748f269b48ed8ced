"""Engines, prompts and comparisons shared by the checks of rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.megatron.logit_rules import token_temperatures
from megatron_rl.rollout.engines.base import Storage
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.engines.vllm.weights import get_model_parameters
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.types import (
    Rollouts,
    SamplingParameters,
    split_rows,
)

MAX_LEN = 384
"""Most tokens of a prompt with its response."""


def random_rows(count: int, seed: int) -> list[list[int]]:
    """Return ``count`` rows of 2 to 23 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, 300, (length,), generator=generator).tolist() for length in lengths]


# Short responses: a test engine on CPUs takes some milliseconds per token.
GREEDY = SamplingParameters(temperature=0.0, max_response_tokens=20)
SAMPLED = SamplingParameters(temperature=0.8, max_response_tokens=20)


def build(
    path: Path,
    tensor: int,
    ranks: tuple[int, ...] | None = None,
    load: bool = False,
    max_model_len: int = MAX_LEN,
    routing_shape: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
    **rollout: Any,
) -> VllmEngine:
    """Return a vLLM engine on ``ranks``, by default on all; without ``load`` its weights are not set."""
    layout = ParallelLayout(ranks or tuple(range(device.world_size())), tensor=tensor)
    # float32, so that comparisons with transformers are exact up to summation order.
    return VllmEngine(
        path,
        RolloutConfig(tensor=tensor, **rollout),
        layout=layout,
        rank=device.rank(),
        dtype="float32",
        max_model_len=max_model_len,
        load=load,
        routing_shape=routing_shape,
        adapters=adapters,
    )


def write(engine: VllmEngine, path: Path, scale: float = 1.0) -> None:
    """Write a checkpoint into an engine through its boxes alone, as the weight sync does."""
    for parameter in engine.parameters().values():
        parameter.fill_(torch.nan)  # elements outside all boxes stay NaN and fail the comparison
    tensors = load_file(path / "model.safetensors")
    write_boxes(engine, {name: value * scale for name, value in tensors.items()})


def write_boxes(storage: Storage, tensors: dict[str, torch.Tensor]) -> None:
    """Copy each box's region of the named tensors into the storage's parameters."""
    parameters = storage.parameters()
    for box in storage.boxes():
        # A box has its position in the full tensor, and offset and strides in the parameter.
        region = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
        parameter = parameters[box.storage]
        target = parameter.as_strided(box.size, box.stride, parameter.storage_offset() + box.offset)
        target.copy_(tensors[box.name][region])


def responses(rollouts: Rollouts) -> list[list[int]]:
    """Return the response tokens of each row."""
    rows = split_rows(rollouts.tokens, rollouts.lengths)
    masks = split_rows(rollouts.response_mask, rollouts.lengths)
    return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]


def same_weights(first: VllmEngine, second: VllmEngine) -> None:
    """Assert that two engines hold bitwise equal parameters."""
    expected = get_model_parameters(second._model)
    actual = get_model_parameters(first._model)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def close_to(first: Rollouts, second: Rollouts) -> None:
    """Assert that tokens and finish reasons are equal and log-probs agree to 1e-4."""
    assert torch.equal(first.lengths, second.lengths), (
        first.lengths,
        second.lengths,
    )
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.finish_reason, second.finish_reason)
    torch.testing.assert_close(first.rollout_log_probs, second.rollout_log_probs, atol=1e-4, rtol=0)


def supports(rollouts: Rollouts, vocabulary: int) -> torch.Tensor:
    """Return which tokens each position was sampled from: [N, V] bool."""
    assert rollouts.support_sizes is not None and rollouts.support is not None
    # Size 0 stands for the whole vocabulary.
    allowed = (rollouts.support_sizes == 0)[:, None].repeat(1, vocabulary)
    positions = torch.repeat_interleave(torch.arange(len(allowed)), rollouts.support_sizes)
    allowed[positions, rollouts.support.long()] = True
    return allowed


def transformers_agree(reference: TorchEngine, rollouts: Rollouts) -> None:
    """Compare the engine's log-probs with transformers' own, computed at each token's temperature."""
    temperatures = rollouts.temperature.repeat_interleave(rollouts.lengths)
    if rollouts.rules is not None:
        temperatures = token_temperatures(temperatures, rollouts.lengths, rollouts.rules)
    for row, mask, values, allowed, temperature in zip(
        split_rows(rollouts.tokens, rollouts.lengths),
        split_rows(rollouts.response_mask, rollouts.lengths),
        split_rows(rollouts.rollout_log_probs, rollouts.lengths),
        split_rows(supports(rollouts, 301), rollouts.lengths),
        split_rows(temperatures, rollouts.lengths),
        strict=True,
    ):
        with torch.no_grad():
            logits = reference._model(row[None]).logits[0, :-1].float()  # pyright: ignore
        logits = logits / temperature[1:, None]
        logits = logits.masked_fill(~allowed[1:], -torch.inf)
        expected = logits.log_softmax(1).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(values[1:][mask[1:]], expected[mask[1:]], atol=1e-4, rtol=0)
        assert not values[~mask].any()
