"""Engines, prompts and comparisons that checks of rollouts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.rollout.engines.base import Storage
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.engines.vllm.weights import model_parameters
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.types import (
    Rollouts,
    SamplingParameters,
    split_rows,
)

MAX_LEN = 384


def random_rows(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, 300, (length,), generator=generator).tolist() for length in lengths]


GREEDY = SamplingParameters(temperature=0.0, max_response_tokens=20)
SAMPLED = SamplingParameters(temperature=0.8, max_response_tokens=20)


def build(
    path: Path,
    tensor: int,
    ranks: tuple[int, ...] | None = None,
    load: bool = False,
    max_model_len: int = MAX_LEN,
    records: tuple[int, int] | None = None,
    adapters: AdaptedModel | None = None,
    **rollout: Any,
) -> VllmEngine:
    layout = ParallelLayout(ranks or tuple(range(device.world_size())), tensor=tensor)
    return VllmEngine(
        path,
        RolloutConfig(tensor=tensor, **rollout),
        layout=layout,
        rank=device.rank(),
        dtype="float32",
        max_model_len=max_model_len,
        load=load,
        records=records,
        adapters=adapters,
    )


def write(engine: VllmEngine, path: Path, scale: float = 1.0) -> None:
    """Write a checkpoint into an engine through its boxes alone, as the hybrid engine does."""
    for parameter in engine.parameters().values():
        parameter.fill_(torch.nan)  # what is not written must show
    tensors = load_file(path / "model.safetensors")
    write_boxes(engine, {name: value * scale for name, value in tensors.items()})


def write_boxes(storage: Storage, tensors: dict[str, torch.Tensor]) -> None:
    parameters = storage.parameters()
    for box in storage.boxes():
        region = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
        parameter = parameters[box.storage]
        target = parameter.as_strided(box.size, box.stride, parameter.storage_offset() + box.offset)
        target.copy_(tensors[box.name][region])


def responses(rollouts: Rollouts) -> list[list[int]]:
    rows = split_rows(rollouts.tokens, rollouts.lengths)
    masks = split_rows(rollouts.response_mask, rollouts.lengths)
    return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]


def same_weights(left: VllmEngine, right: VllmEngine) -> None:
    expected = model_parameters(right._model)
    got = model_parameters(left._model)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def close_to(left: Rollouts, right: Rollouts) -> None:
    assert torch.equal(left.lengths, right.lengths), (left.lengths, right.lengths)
    assert torch.equal(left.tokens, right.tokens)
    assert torch.equal(left.finish_reason, right.finish_reason)
    torch.testing.assert_close(left.rollout_log_probs, right.rollout_log_probs, atol=1e-4, rtol=0)


def supports(rollouts: Rollouts, vocabulary: int) -> torch.Tensor:
    """Mark the tokens that each position was drawn from: [N, V] bool."""
    assert rollouts.support_sizes is not None and rollouts.support is not None
    left = (rollouts.support_sizes == 0)[:, None].repeat(1, vocabulary)
    positions = torch.repeat_interleave(torch.arange(len(left)), rollouts.support_sizes)
    left[positions, rollouts.support.long()] = True
    return left


def transformers_agree(reference: TorchEngine, rollouts: Rollouts) -> None:
    """Compare reported log-probs with transformers' own, recomputed row by row at the temperature."""
    for row, mask, values, left, temperature in zip(
        split_rows(rollouts.tokens, rollouts.lengths),
        split_rows(rollouts.response_mask, rollouts.lengths),
        split_rows(rollouts.rollout_log_probs, rollouts.lengths),
        split_rows(supports(rollouts, 301), rollouts.lengths),
        rollouts.temperature.tolist(),
        strict=True,
    ):
        with torch.no_grad():
            logits = reference._model(row[None]).logits[0, :-1].float() / temperature  # pyright: ignore
        logits = logits.masked_fill(~left[1:], -torch.inf)
        expected = logits.log_softmax(1).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(values[1:][mask[1:]], expected[mask[1:]], atol=1e-4, rtol=0)
        assert not values[~mask].any()
