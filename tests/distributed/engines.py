"""Engines, prompts and comparisons for the checks of rollouts."""

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
from megatron_rl.rollout.engines.vllm.weights import (
    get_model_parameters,
)
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.types import (
    Rollouts,
    SamplingParameters,
    split_rows,
)

MAX_LEN = 384
"""Largest number of tokens of a prompt with its response."""


def random_prompts(count: int, seed: int) -> list[list[int]]:
    """Return ``count`` prompts of 2 to 23 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 24, (count,), generator=generator).tolist()
    prompts = []
    for length in lengths:
        tokens = torch.randint(0, 300, (length,), generator=generator)
        prompts.append(tokens.tolist())
    return prompts


# Short responses: a test engine on CPUs takes some milliseconds per token.
GREEDY = SamplingParameters(temperature=0.0, max_response_tokens=20)
SAMPLED = SamplingParameters(temperature=0.8, max_response_tokens=20)


def build_engine(
    path: Path,
    tensor: int,
    ranks: tuple[int, ...] | None = None,
    load: bool = False,
    max_model_len: int = MAX_LEN,
    routing_shape: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
    **rollout: Any,
) -> VllmEngine:
    """Return a vLLM engine on ``ranks``, by default on all ranks; without ``load`` it has no weights yet."""
    if ranks is None:
        ranks = tuple(range(device.world_size()))
    layout = ParallelLayout(ranks, tensor=tensor)

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


def write_weights(engine: VllmEngine, path: Path, scale: float = 1.0) -> None:
    """Write a checkpoint, times ``scale``, into an engine through its boxes, as the weight sync does."""
    # Elements outside all boxes stay NaN and fail the comparison.
    for parameter in engine.parameters().values():
        parameter.fill_(torch.nan)

    tensors = load_file(path / "model.safetensors")
    scaled_tensors = {name: tensor * scale for name, tensor in tensors.items()}
    write_boxes(engine, scaled_tensors)


def write_boxes(storage: Storage, tensors: dict[str, torch.Tensor]) -> None:
    """Copy each box's region of the named tensors into the storage's parameters."""
    parameters = storage.parameters()
    for box in storage.boxes():
        # A box has its position in the full tensor, and offset and strides in the parameter.
        region = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
        parameter = parameters[box.storage]
        offset = parameter.storage_offset() + box.offset
        target = parameter.as_strided(box.size, box.stride, offset)
        target.copy_(tensors[box.name][region])


def response_tokens(rollouts: Rollouts) -> list[list[int]]:
    """Return the response tokens of each row."""
    rows = split_rows(rollouts.tokens, rollouts.lengths)
    masks = split_rows(rollouts.response_mask, rollouts.lengths)
    return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]


def check_equal_weights(first: VllmEngine, second: VllmEngine) -> None:
    """Check that two engines have bitwise equal parameters."""
    expected = get_model_parameters(second._model)
    actual = get_model_parameters(first._model)
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(actual[name], parameter), name


def check_equal_rollouts(first: Rollouts, second: Rollouts) -> None:
    """Check that tokens and finish reasons are equal and log-probs agree to 1e-4."""
    assert torch.equal(first.lengths, second.lengths), (
        first.lengths,
        second.lengths,
    )
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.finish_reason, second.finish_reason)
    check_close(first.rollout_log_probs, second.rollout_log_probs)


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that log-probs of two implementations agree to 1e-4."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def support_mask(rollouts: Rollouts, vocabulary: int) -> torch.Tensor:
    """Return which tokens each position was sampled from: [N, V] bool."""
    sizes = rollouts.support_sizes
    assert sizes is not None and rollouts.support is not None
    # Size 0 stands for the whole vocabulary.
    mask = (sizes == 0)[:, None].repeat(1, vocabulary)
    positions = torch.repeat_interleave(torch.arange(len(mask)), sizes)
    mask[positions, rollouts.support.long()] = True
    return mask


def check_against_transformers(reference: TorchEngine, rollouts: Rollouts) -> None:
    """Check the engine's log-probs against transformers', computed at each token's temperature."""
    temperatures = rollouts.temperature.repeat_interleave(rollouts.lengths)
    if rollouts.rules is not None:
        temperatures = token_temperatures(temperatures, rollouts.lengths, rollouts.rules)

    for tokens, response_mask, log_probs, allowed, temperature in zip(
        split_rows(rollouts.tokens, rollouts.lengths),
        split_rows(rollouts.response_mask, rollouts.lengths),
        split_rows(rollouts.rollout_log_probs, rollouts.lengths),
        split_rows(support_mask(rollouts, 301), rollouts.lengths),
        split_rows(temperatures, rollouts.lengths),
        strict=True,
    ):
        # The logits of a position belong to the next token.
        with torch.no_grad():
            logits = reference._model(tokens[None]).logits[0, :-1].float()  # pyright: ignore
        logits = logits / temperature[1:, None]
        logits = logits.masked_fill(~allowed[1:], -torch.inf)
        expected = logits.log_softmax(1).gather(1, tokens[1:, None])[:, 0]

        in_response = response_mask[1:]
        check_close(log_probs[1:][in_response], expected[in_response])
        assert not log_probs[~response_mask].any()
