"""The mapping between Hugging Face tensors and Megatron's parameters, from the table of model families.

`import_parameters` fills parameters only with views and ``copy_``. It can therefore run on meta tensors,
where a recorder converts each copy to a box. Import, export and resharding use these boxes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.megatron.model import ChunkedModel
from megatron_rl.shapes.layer_weights import Source, Weight, outer_weights
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import LAYER, PretrainedModel
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import check_coverage
from megatron_rl.weights.trace import CopyRecorder, merge_boxes


@dataclass(frozen=True)
class Shard:
    """A rank's shard of every parameter: rank and number of ranks in each parallel group.

    Example: ``Shard(tensor=1, tensor_size=2)`` is the second half of each tensor-parallel parameter.
    """

    tensor: int = 0
    """Rank in the tensor-parallel group."""
    tensor_size: int = 1
    """Number of ranks in the tensor-parallel group."""
    expert: int = 0
    """Rank in the expert-parallel group, whose ranks have different experts."""
    expert_size: int = 1
    """Number of ranks in the expert-parallel group."""
    expert_tensor: int = 0
    """Rank in the group that shards the weights of one expert."""
    expert_tensor_size: int = 1
    """Number of ranks in that group."""


@dataclass(frozen=True)
class _ParameterShard:
    """Shard of one parameter on this rank: shard ``index`` of ``count`` equal shards.

    Example: ``_ParameterShard(1, 4)`` is the second of four shards.
    """

    index: int
    """Index of the rank among the ranks that shard the parameter."""
    count: int
    """Number of ranks that shard the parameter."""


@dataclass(frozen=True)
class _SourceRows:
    """Rows that one `Source` selects in a checkpoint tensor."""

    tensor: Tensor
    """The complete checkpoint tensor."""
    source: Source
    """Selection of the rows in the checkpoint tensor."""

    @property
    def row_count(self) -> int:
        """Return the number of rows that the source selects."""
        return self.source.shape[0]

    @property
    def contiguous_rows(self) -> Tensor:
        """Return a view of all rows that the source selects, which must be contiguous in the tensor."""
        assert self.source.num_ranges == 1, self.source
        if len(self.tensor) == self.row_count:
            return self.tensor
        return self.tensor.narrow(0, self.source.first_row, self.row_count)

    def copy_to(self, target: Tensor, first_row: int) -> None:
        """Fill ``target`` with consecutive rows of the source, from the source's row ``first_row`` on."""
        target_row = 0
        for tensor_row, num_rows in self.source.row_ranges(first_row, len(target)):
            tensor_rows = self.tensor.narrow(0, tensor_row, num_rows)
            target.narrow(0, target_row, num_rows).copy_(tensor_rows)
            target_row += num_rows


CopyRule = Callable[[Tensor, Sequence[_SourceRows], _ParameterShard], None]
"""Function that fills this rank's shard of a Megatron parameter from Hugging Face tensors.

Arguments: ``target``, the parameter on this rank; ``sources``, the rows of the Hugging Face tensors that
belong to the complete parameter; ``shard``, the index and the number of its shards."""


def _copy_replicated(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Copy all rows of a single source into a replicated parameter.

    ``sources`` has exactly one element.
    """
    (source,) = sources
    target.copy_(source.contiguous_rows)


def _copy_rows(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Copy this rank's shard of a single source's rows into a parameter, or all rows if it is replicated.

    ``sources`` has exactly one element. A parameter is replicated if it has as many rows as the source.
    """
    (source,) = sources
    if len(target) == source.row_count:
        # Transformer Engine replicates the projections of latent attention instead of sharding them.
        source.copy_to(target, 0)
        return
    source.copy_to(target, shard.index * (source.row_count // shard.count))


def _copy_columns(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Copy this rank's shard of a single source's columns into a parameter.

    ``sources`` has exactly one element.
    """
    (source,) = sources
    columns = source.contiguous_rows.shape[1] // shard.count
    target.copy_(source.contiguous_rows.narrow(1, shard.index * columns, columns))


def _copy_sections(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Fill a concatenated parameter with this rank's shard of the rows of each source, in order.

    Example: the gate and up projections, which Megatron fuses into one parameter.
    """
    target_row = 0
    for source in sources:
        num_rows = source.row_count // shard.count
        source.copy_to(target.narrow(0, target_row, num_rows), shard.index * num_rows)
        target_row += num_rows


def _copy_query_key_value(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Fill this rank's shard of a fused query, key and value weight.

    The rows of the complete weight are ordered by group of heads. Each group has the rows of its queries, of
    their gates if the model has gates, of its key, and of its value. ``sources`` are the separate weights in
    this order. All shards have the same number of rows, so a shard may begin and end inside a group.
    """
    shard_rows = target.shape[0]
    shard_begin = shard.index * shard_rows
    # The query weight has as many groups as there are key-value heads.
    num_groups = sources[0].source.heads
    rows_per_group = [source.row_count // num_groups for source in sources]

    # Iterate over the rows of the complete weight, and copy the rows that are in this rank's shard.
    position = 0
    for group in range(num_groups):
        for source, num_rows in zip(sources, rows_per_group, strict=True):
            # Overlap of these rows with the shard.
            overlap_begin = max(position, shard_begin)
            overlap_end = min(position + num_rows, shard_begin + shard_rows)
            if overlap_begin < overlap_end:
                target_rows = target.narrow(0, overlap_begin - shard_begin, overlap_end - overlap_begin)
                source.copy_to(target_rows, group * num_rows + overlap_begin - position)
            position += num_rows


def _copy_stacked(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Fill a replicated parameter, which is not sharded, with the rows of its sources, one after the other.

    ``shard`` is not used: the function has the arguments of a `CopyRule`.
    """
    for target_slice, source in zip(target.chunk(len(sources)), sources, strict=True):
        target_slice.copy_(source.contiguous_rows)


def _copy_vocabulary(
    target: Tensor,
    sources: Sequence[_SourceRows],
    shard: _ParameterShard,
) -> None:
    """Copy this rank's shard of a single source's rows into an embedding or output layer.

    ``sources`` has exactly one element. A row belongs to one token of the vocabulary. The rows of the
    parameter that pad the vocabulary stay unchanged.
    """
    (source,) = sources
    first_row = shard.index * target.shape[0]
    num_rows = min(source.row_count - first_row, target.shape[0])
    if num_rows > 0:
        source.copy_to(target.narrow(0, 0, num_rows), first_row)


_COPY_RULES: Mapping[str, CopyRule] = {
    "whole": _copy_replicated,
    "rows": _copy_rows,
    "latent": _copy_rows,
    "columns": _copy_columns,
    "sections": _copy_sections,
    "query_key_value": _copy_query_key_value,
    "vocabulary": _copy_vocabulary,
    "stacked": _copy_stacked,
}
"""Value of `Weight.sharding` -> function that fills a parameter that is sharded in this way."""
EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc[12]\.(?:weight|bias|adapter\.))(\d+)")
"""Pattern of an expert's number in a parameter's name.

Megatron has one module per expert, or a grouped module with one weight and one adapter per expert."""


def import_parameters(
    parameters: Mapping[str, Tensor],
    sources: Mapping[str, Tensor],
    model: PretrainedModel,
    shard: Shard,
) -> None:
    """Fill Megatron parameters from Hugging Face tensors, only with views and ``copy_``.

    ``parameters`` are named ``decoder.layers.N.…`` with the global layer index N. ``sources`` are complete
    tensors, or meta tensors of the same shapes, by checkpoint name. Rows that pad the vocabulary stay
    unchanged. Raises UserError for an unknown parameter name.
    """
    # The weights of experts and dense weights are sharded over different groups.
    shape = model.shape
    dense_shard = _ParameterShard(shard.tensor, shard.tensor_size)
    expert_shard = _ParameterShard(shard.expert_tensor, shard.expert_tensor_size)
    experts_per_rank = shape.experts // shard.expert_size

    # List the weights outside the layers for both kinds of stages: a stage without the embedding has a tied
    # output layer as a separate parameter.
    outer_table: list[Weight] = []
    for is_first_stage in (True, False):
        outer_table += outer_weights(shape, is_first_stage, True)
    outer_weights_by_name = weights_by_name(outer_table)
    layer_weights: dict[int, dict[str, Weight]] = {}
    for name, target in parameters.items():
        match = re.match(r"decoder\.layers\.(\d+)\.", name)

        # Embedding, final norm and output layer.
        if match is None:
            if name not in outer_weights_by_name:
                raise _unknown_parameter_error(name, outer_weights_by_name)
            weight = outer_weights_by_name[name]
            source_rows = [_SourceRows(sources[source.name], source) for source in weight.sources]
            _COPY_RULES[weight.sharding](target, source_rows, dense_shard)
            continue

        # Build the table of a layer's weights once for all parameters of the layer.
        layer = int(match.group(1))
        if layer not in layer_weights:
            layer_weights[layer] = weights_by_name(model.weights(layer))
        name_in_layer = name[match.end() :]
        weight_name = EXPERT.sub(r"\1{expert}", name_in_layer)
        if weight_name not in layer_weights[layer]:
            raise _unknown_parameter_error(name, layer_weights[layer])
        weight = layer_weights[layer][weight_name]

        # Parameter names have an expert's index on this rank, checkpoint names its index in the whole model.
        expert = 0
        expert_match = EXPERT.search(name_in_layer)
        if expert_match is not None:
            expert = shard.expert * experts_per_rank + int(expert_match.group(2))

        prefix = LAYER.format(layer=layer)
        source_rows = []
        for source in weight.sources:
            tensor_name = prefix + source.name.format(expert=expert)
            source_rows.append(_SourceRows(sources[tensor_name], source))
        parameter_shard = dense_shard
        if weight.expert:
            parameter_shard = expert_shard
        _COPY_RULES[weight.sharding](target, source_rows, parameter_shard)


def _unknown_parameter_error(parameter: str, available: Iterable[str]) -> UserError:
    """Return the error for a parameter of a user's model with a name that Megatron does not use."""
    return UserError(
        f"the checkpoint's tensors for the parameter {parameter} are unknown",
        where="model.weights",
        expected=f"one of Megatron's parameter names: {', '.join(available)}",
        got=parameter,
        fix='write NAMES = {"your name": "Megatron\'s name"} into a file, each name without its prefix '
        "decoder.layers.N., and set model.weights=that_file.py:NAMES",
    )


def trace_import(
    parameters: Mapping[str, Tensor],
    model: PretrainedModel,
    shard: Shard,
    rank: int,
    local_names: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[TensorBox]:
    """Return the slices of Hugging Face tensors that `import_parameters` would copy into ``parameters``.

    This function calls `import_parameters` with meta tensors, which have no data, and records each copy. A
    `TensorBox` describes one slice of a Hugging Face tensor and its location in a parameter.

    ``parameters`` maps Megatron's parameter names, with layer indices of the whole model, to meta tensors.
    ``local_names`` maps the same names to the names of the parameters on this rank (`TensorBox.storage`), by
    default equal names. ``shapes`` are the shapes of the checkpoint's tensors, by default computed from
    ``model``.

    Raises CoverageError unless every element of a parameter is filled exactly once. Elements that pad the
    vocabulary are not filled.
    """
    local_names = local_names or {}
    tensors_by_storage = {local_names.get(name, name): tensor for name, tensor in parameters.items()}
    recorder = CopyRecorder({}, tensors_by_storage, rank)

    # Run the import itself, on tensors without memory: a second implementation of its rules could differ.
    with torch.no_grad(), recorder:
        sources = _MetaTensors(shapes or model.tensor_shapes(), recorder)
        import_parameters(parameters, sources, model, shard)
    boxes = merge_boxes(recorder.boxes)

    # Embedding and output layer have a row for each token of the vocabulary, and rows of padding at the end:
    # count the elements before the padding.
    data_elements: dict[str, int] = {}
    for name in vocabulary_names(model.shape) & parameters.keys():
        rows, width = parameters[name].shape
        token_rows = min(max(model.shape.vocab - shard.tensor * rows, 0), rows)
        data_elements[local_names.get(name, name)] = token_rows * width
    check_coverage(boxes, tensors_by_storage, data_elements)
    return boxes


class _MetaTensors(Mapping[str, Tensor]):
    """Meta tensors of a checkpoint by name, created on first use because large models have many tensors."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        recorder: CopyRecorder,
    ) -> None:
        self._shapes = shapes
        self._recorder = recorder
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(self._shapes[name], device="meta")
            self._recorder.add_source(name, self._tensors[name])
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def vocabulary_names(shape: ModelShape) -> set[str]:
    """Return Megatron's names of all parameters with one row per token of the vocabulary."""
    weights: list[Weight] = []
    for is_first_stage in (True, False):
        weights += outer_weights(shape, is_first_stage, True)
    return {weight.name for weight in weights if weight.sharding == "vocabulary"}


def weights_by_name(weights: Sequence[Weight]) -> dict[str, Weight]:
    """Return a layer's weights by their names in Megatron's layers and in Transformer Engine's layers."""
    weight_by_name = {weight.fused: weight for weight in weights if weight.fused}
    for weight in weights:
        weight_by_name[weight.name] = weight
    return weight_by_name


def shard_of(model: ChunkedModel) -> Shard:
    """Return the `Shard` of this rank, from the model's process groups."""
    groups = model.chunks[0].pg_collection

    # A user's own collection may lack the groups of experts.
    def rank_and_size(name: str) -> tuple[int, int]:
        group = getattr(groups, name, None)
        if group is None:
            return 0, 1
        return group.rank(), group.size()

    return Shard(*rank_and_size("tp"), *rank_and_size("ep"), *rank_and_size("expt_tp"))


def global_name(model: ChunkedModel, local_name: str) -> str:
    """Return Megatron's name of a parameter, with layers counted over the whole model.

    ``local_name`` is ``<chunk>.<parameter name>``, with layers counted in the chunk of the model. In a model
    that the user's model provider built, parameters may have other names than Megatron's; ``model.names``
    maps the provider's names to Megatron's.
    """
    chunk_index, name = local_name.split(".", 1)
    provider_names: Mapping[str, str] = getattr(model, "names", {})
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return provider_names.get(name, name)

    # Megatron numbers layers from 1, over the whole model.
    layer = model.chunks[int(chunk_index)].decoder.layers[int(match.group(1))].layer_number - 1
    name_in_layer = name[match.end() :]
    return f"decoder.layers.{layer}.{provider_names.get(name_in_layer, name_in_layer)}"
