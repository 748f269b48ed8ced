"""Say where vLLM's own loader puts every element of a checkpoint, and keep its derived weights true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from megatron_rl.parallel.trace import merge_boxes, meta_sources, trace_copies
from megatron_rl.types import TensorBox

Shapes = Mapping[str, tuple[int, ...]]


class CoverageError(RuntimeError):
    """Report engine parameters whose elements are not each written exactly once."""


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


def check_coverage(
    boxes: Sequence[TensorBox], parameters: Mapping[str, Tensor], padding: Mapping[str, int]
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Check that each parameter's elements are written exactly once; return the gaps of padding.

    ``padding`` name -> element of the flattened parameter from which gaps are allowed. Raises
    CoverageError that names every parameter with another gap or a double write.
    """
    by_storage: dict[str, list[TensorBox]] = {}
    for box in boxes:
        by_storage.setdefault(box.storage, []).append(box)
    faults: list[str] = []
    allowed: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, parameter in parameters.items():
        gaps, doubles = _gaps(by_storage.get(name, []), parameter.numel())
        wrong = [gap for gap in gaps if gap[0] < padding.get(name, parameter.numel())]
        if doubles:
            faults.append(f"{name}: {doubles} elements are written more than once")
        if wrong:
            missing = sum(last - first for first, last in wrong)
            faults.append(f"{name}: {missing} of {parameter.numel()} elements are never written")
        if gaps and not wrong:
            allowed[name] = tuple(gaps)
    if faults:
        raise CoverageError("the loader does not fill each parameter exactly once:\n  " + "\n  ".join(faults))
    return allowed


def _gaps(boxes: Sequence[TensorBox], count: int) -> tuple[list[tuple[int, int]], int]:
    """Return the runs of [0, count) outside all boxes, and how many elements lie in several."""
    runs = [_runs(box) for box in boxes]
    first = numpy.concatenate([start for start, _ in runs] + [numpy.array([count])])
    last = numpy.concatenate([start + length for start, length in runs] + [numpy.array([count])])
    order = numpy.argsort(first, kind="stable")
    first, last = first[order], last[order]
    before = numpy.concatenate([[0], numpy.maximum.accumulate(last)[:-1]])
    distance = first - before
    gaps = [(int(before[i]), int(first[i])) for i in numpy.flatnonzero(distance > 0)]
    return gaps, int(-distance[distance < 0].sum())


def _runs(box: TensorBox) -> tuple[numpy.ndarray, int]:
    """Return the first elements of a box's contiguous runs in its storage, and their common length."""
    axes = sorted((stride, size) for stride, size in zip(box.stride, box.size, strict=True) if size > 1)
    length = 1
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    starts = numpy.array([box.offset], dtype=numpy.int64)
    for stride, size in axes:
        starts = (starts[:, None] + numpy.arange(size) * stride).ravel()
    return starts, length


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
