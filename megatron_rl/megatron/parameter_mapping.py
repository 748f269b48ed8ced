"""Fill Megatron's parameters from Hugging Face tensors, as the table of families says they correspond.

`import_parameters` fills parameters with views and ``copy_`` only. Run on meta tensors under the copy
recorder it becomes a map of boxes, which serves import, export and resharding alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.megatron.model import Chunked
from megatron_rl.shapes.layer_weights import Source, Weight, outer_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import LAYER, PretrainedModel
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import check_coverage
from megatron_rl.weights.trace import CopyRecorder, merge_boxes


@dataclass(frozen=True)
class Shard:
    """Say which of the equal parts of every parameter a rank holds."""

    tensor: int = 0
    tensor_size: int = 1
    expert: int = 0
    expert_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1


@dataclass(frozen=True)
class _Cut:
    """One part of a parameter, ``index`` of ``count``, and the attention shape that orders its rows."""

    index: int
    count: int
    groups: int
    heads_per_group: int
    head_dim: int


Place = Callable[[Tensor, Sequence[Tensor], _Cut], None]


def _whole(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    (source,) = sources
    target.copy_(source)


def _rows(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    (source,) = sources
    if target.shape == source.shape:  # duplicated instead of cut, as Transformer Engine does for MLA
        target.copy_(source)
        return
    rows = source.shape[0] // cut.count
    target.copy_(source.narrow(0, cut.index * rows, rows))


def _columns(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    (source,) = sources
    columns = source.shape[1] // cut.count
    target.copy_(source.narrow(1, cut.index * columns, columns))


def _gate_up(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    for half, source in zip(target.chunk(2), sources, strict=True):
        _rows(half, [source], cut)


def _query_key_value(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    """Interleave by group: the queries of a group, its key, its value, then the next group."""
    rows = target.shape[0]
    begin, position = cut.index * rows, 0
    parts = (cut.heads_per_group * cut.head_dim, cut.head_dim, cut.head_dim)
    for group in range(cut.groups):
        for source, size in zip(sources, parts, strict=True):
            low, high = max(position, begin), min(position + size, begin + rows)
            if low < high:
                piece = source.narrow(0, group * size + low - position, high - low)
                target.narrow(0, low - begin, high - low).copy_(piece)
            position += size


def _stacked(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    for part, source in zip(target.chunk(len(sources)), sources, strict=True):
        part.copy_(source)


def _vocabulary(target: Tensor, sources: Sequence[Tensor], cut: _Cut) -> None:
    """Fill the rows that exist; the rest pads the vocabulary to equal parts."""
    (source,) = sources
    begin = cut.index * target.shape[0]
    rows = min(source.shape[0] - begin, target.shape[0])
    if rows > 0:
        target.narrow(0, 0, rows).copy_(source.narrow(0, begin, rows))


_PLACES: Mapping[str, Place] = {
    "whole": _whole,
    "rows": _rows,
    "latent": _rows,
    "columns": _columns,
    "gate_up": _gate_up,
    "query_key_value": _query_key_value,
    "vocabulary": _vocabulary,
    "stacked": _stacked,
}
EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc[12]\.(?:weight|bias|adapter\.))(\d+)")
"""One module per expert, or one grouped module with one weight, and one adapter, per expert."""


def import_parameters(
    parameters: Mapping[str, Tensor],
    sources: Mapping[str, Tensor],
    model: PretrainedModel,
    shard: Shard,
) -> None:
    """Fill Megatron parameters from Hugging Face tensors with views and ``copy_`` alone.

    ``parameters`` are named ``decoder.layers.N.…`` with N counted over the whole model. ``sources`` holds
    whole tensors (or meta stand-ins) by checkpoint name. Rows that pad the vocabulary are left alone.
    Raises UserError for a parameter without a rule.
    """
    shape = model.shape
    heads = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    dense = _Cut(shard.tensor, shard.tensor_size, *heads)
    sparse = _Cut(shard.expert_tensor, shard.expert_tensor_size, *heads)
    # Tied to the embedding, an output layer is a parameter where the embedding is on another stage.
    outer = by_name([weight for first in (True, False) for weight in outer_weights(shape, first, True)])
    weights: dict[int, dict[str, Weight]] = {}
    for name, target in parameters.items():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)
        if match is None:
            if name not in outer:
                raise _unknown(name, outer)
            tensors = [sources[source.name] for source in outer[name].sources]
            _PLACES[outer[name].cut](target, tensors, dense)
            continue
        layer = int(match.group(1))
        if layer not in weights:
            weights[layer] = by_name(model.weights(layer))
        below = name[match.end() :]
        weight = weights[layer].get(EXPERT.sub(r"\1{expert}", below))
        if weight is None:
            raise _unknown(name, weights[layer])
        expert = EXPERT.search(below)
        number = shard.expert * (shape.experts // shard.expert_size) + int(expert.group(2)) if expert else 0
        prefix = LAYER.format(layer=layer)
        tensors = [
            _part(sources[prefix + source.name.format(expert=number)], source) for source in weight.sources
        ]
        _PLACES[weight.cut](target, tensors, sparse if weight.expert else dense)


def _unknown(parameter: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"nothing says which of the checkpoint's tensors the parameter {parameter} holds",
        where="model.weights",
        expected=f"a parameter called as Megatron's own: {', '.join(known)}",
        got=parameter,
        fix='write NAMES = {"your name": "Megatron\'s name"} into a file, without decoder.layers.N. in both, '
        "and set model.weights=that_file.py:NAMES",
    )


def trace_import(
    parameters: Mapping[str, Tensor],
    model: PretrainedModel,
    shard: Shard,
    rank: int,
    storages: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[TensorBox]:
    """Return the boxes of meta parameters named over the whole model; ``storages`` renames them there.

    ``shapes`` are those of the checkpoint, where they are known already. Raises CoverageError unless every
    element but the padding of the vocabulary is filled exactly once.
    """
    renamed = {(storages or {}).get(name, name): tensor for name, tensor in parameters.items()}
    recorder = CopyRecorder({}, renamed, rank)
    with torch.no_grad(), recorder:
        sources = _StandIns(shapes or model.tensor_shapes(), recorder)
        import_parameters(parameters, sources, model, shard)
    boxes = merge_boxes(recorder.boxes)
    padding: dict[str, int] = {}
    for name in vocabulary_names(model.shape) & parameters.keys():
        rows, width = parameters[name].shape
        real = min(max(model.shape.vocab - shard.tensor * rows, 0), rows)
        padding[(storages or {}).get(name, name)] = real * width
    check_coverage(boxes, renamed, padding)
    return boxes


class _StandIns(Mapping[str, Tensor]):
    """Meta tensors for a checkpoint's, made when they are asked for: a large model has very many."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], recorder: CopyRecorder) -> None:
        self._shapes, self._recorder = shapes, recorder
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = torch.empty(self._shapes[name], device="meta")
            self._recorder.add_source(name, self._made[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def vocabulary_names(shape: ModelShape) -> set[str]:
    """Return Megatron's names of the parameters whose rows are the vocabulary's, on whatever stage."""
    weights = (weight for first in (True, False) for weight in outer_weights(shape, first, True))
    return {weight.name for weight in weights if weight.cut == "vocabulary"}


def _part(tensor: Tensor, source: Source) -> Tensor:
    """Return the rows of a checkpoint tensor that are a source's."""
    rows = source.shape[0]
    return tensor if len(tensor) == rows else tensor.narrow(0, source.first, rows)


def by_name(weights: Sequence[Weight]) -> dict[str, Weight]:
    """Return a layer's weights by the names of Megatron's own layers and of Transformer Engine's."""
    fused = {weight.fused: weight for weight in weights if weight.fused}
    return fused | {weight.name: weight for weight in weights}


def shard_of(model: Chunked) -> Shard:
    """Read from a model's process groups which part of every parameter this rank holds."""
    groups = model.chunks[0].pg_collection

    def place(name: str) -> tuple[int, int]:
        group = getattr(groups, name, None)
        return (group.rank(), group.size()) if group is not None else (0, 1)

    return Shard(*place("tp"), *place("ep"), *place("expt_tp"))


def global_name(model: Chunked, storage: str) -> str:
    """Count layers over the whole model, not inside their chunk, and name parameters as Megatron does."""
    index, name = storage.split(".", 1)
    names: Mapping[str, str] = getattr(model, "names", {})
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return names.get(name, name)
    layer = model.chunks[int(index)].decoder.layers[int(match.group(1))].layer_number - 1
    below = name[match.end() :]
    return f"decoder.layers.{layer}.{names.get(below, below)}"
