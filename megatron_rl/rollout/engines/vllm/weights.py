"""Say where vLLM's own loader puts every element of a checkpoint, and keep its derived weights true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import check_coverage
from megatron_rl.weights.trace import merge_boxes, meta_sources, trace_copies

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class WeightMap:
    """Hold where checkpoint elements lie in a vLLM model, and which elements no checkpoint fills.

    ``padding`` name -> runs (first, last + 1) of vocabulary padding in the flattened parameter.
    """

    boxes: tuple[TensorBox, ...]
    padding: Mapping[str, tuple[tuple[int, int], ...]]


def trace_weights(model: nn.Module, parameters: Mapping[str, Tensor], shapes: Shapes, rank: int) -> WeightMap:
    """Run vLLM's loader on stand-ins for a checkpoint and record its copies; nothing is loaded.

    A checkpoint's own ``lm_head.weight`` that the loader puts into tied embeddings is read from the
    embedding. Raises CoverageError unless every element of every parameter is written exactly once,
    vocabulary padding apart.
    """
    dtype = next(iter(parameters.values())).dtype

    def load(sources: Mapping[str, Tensor]) -> None:
        model.load_weights(iter(sources.items()))  # pyright: ignore[reportCallIssue]

    boxes = trace_copies(load, meta_sources(shapes, dtype), parameters, rank)
    boxes = _without_tied_duplicates(boxes)
    return WeightMap(tuple(boxes), check_coverage(boxes, parameters, _vocabulary_padding(model, parameters)))


def _without_tied_duplicates(boxes: Sequence[TensorBox]) -> list[TensorBox]:
    """Read a tied output layer from the embedding: both name the same storage, one of them is enough."""
    embedded = {box.storage: box.name for box in boxes if box.name.endswith("embed_tokens.weight")}
    tied = [
        replace(box, name=embedded[box.storage])
        if box.name.endswith("lm_head.weight") and box.storage in embedded
        else box
        for box in boxes
    ]
    return merge_boxes(tied)


def _vocabulary_padding(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return for each vocabulary-parallel parameter the first element that no checkpoint fills."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    result: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            name = f"{path}.weight"
            if name in parameters:
                result[name] = module.shard_indices.num_org_elements * parameters[name].stride(0)
    return result


@torch.no_grad()
def clear_padding(parameters: Mapping[str, Tensor], padding: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Set vocabulary padding to zero: no checkpoint fills it, and fresh storage holds anything."""
    for name, gaps in padding.items():
        for first, last in gaps:
            parameters[name].view(-1)[first:last].zero_()


def model_parameters(model: Any) -> dict[str, Tensor]:
    """Return the live parameters of a vLLM model by name; a tied one appears once.

    What latent attention derives from its weights after loading is left out, though vLLM registers it.
    """
    from vllm.model_executor.layers.attention import MLAAttention

    derived = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, MLAAttention)
        for name, _ in module.named_parameters(recurse=False)
    }
    return {name: parameter.data for name, parameter in model.named_parameters() if name not in derived}
