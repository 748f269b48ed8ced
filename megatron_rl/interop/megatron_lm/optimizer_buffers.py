"""Offset of each parameter in the flat buffers of Megatron's distributed optimizer (dp_reshardable).

In this format buffers are saved as they are in memory, so this module computes their arrangement in the same
way as Megatron. A rank has a buffer for each of its model chunks, and a separate buffer for the chunk's
experts if they are reduced over a different data-parallel group. A buffer contains the parameters in reverse
order of the modules, and is divided into buckets. Sources: `ParamAndGradBuffer`, `DistributedDataParallel`,
`get_megatron_optimizer` and `DistributedOptimizer.sharded_param_state_dp_reshardable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.pickles import Bucket
from megatron_rl.shapes.layer_weights import Weight, outer_weights
from megatron_rl.shapes.layout import EMBEDDING, FIRST, LAST, LOSS, ParallelLayout, stage_chunks
from megatron_rl.shapes.model import ModelShape

_ALIGNMENT = 64
"""Alignment of the parameters in a bucket, in elements."""
_STAGE_ARGUMENTS = {
    FIRST: "decoder_first_pipeline_num_layers",
    LAST: "decoder_last_pipeline_num_layers",
    EMBEDDING: "account_for_embedding_in_pipeline_split",
    LOSS: "account_for_loss_in_pipeline_split",
}
"""Megatron-LM's arguments for the settings of uneven pipeline stages."""
_ATTENTION = (
    "linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
    "linear_kv_up_proj", "linear_qkv", "q_layernorm", "k_layernorm", "kv_layernorm",
)  # fmt: skip
"""Modules of attention that have parameters, in the order in which Megatron constructs them."""
_MODULES = (
    "input_layernorm",
    *(f"self_attention.{name}" for name in _ATTENTION),
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer that have parameters, in the order in which Megatron constructs them."""
_PARAMETER_NAMES = ("layer_norm_weight", "gate_weight", "weight", "bias")
"""Parameters of a module, in the order in which Megatron registers them."""


class LayerImplementation(NamedTuple):
    """Implementation of a layer's modules, which determines the order of the layer's parameters."""

    fused: bool
    """Whether norms are part of the linear layers that follow them, as in Transformer Engine."""
    grouped: bool
    """Whether all experts are one module, as in Transformer Engine."""


@dataclass(frozen=True)
class FlatParameter:
    """Location of a rank's shard of a parameter in the flat buffers of the optimizer.

    Example: the lower half of a [16, 8] weight on tensor-parallel rank 1, which follows 128 elements of other
    parameters: ``FlatParameter("output_layer.weight", (8, 8), 1, 0, 0, Bucket(0, 1, 0, 0), start=128)``.
    """

    name: str
    """Megatron's name, with layers counted over the whole model and experts counted on the rank."""
    shape: tuple[int, ...]
    """Shape of the shard."""
    tensor_rank: int
    """Tensor-parallel rank."""
    expert_rank: int
    """Expert-parallel rank."""
    expert_tensor_rank: int
    """Expert-tensor-parallel rank."""
    bucket: Bucket
    """Bucket that contains the shard."""
    start: int
    """First element in the bucket."""


class _LocalParameter(NamedTuple):
    """A rank's shard of a parameter, before its location in the buffers is computed."""

    name: str
    """Megatron's name, as in `FlatParameter`."""
    shape: tuple[int, ...]
    """Shape of the shard."""
    is_replica: bool
    """Whether the values are a copy, which is not read: another rank's buffer has the same values."""


@dataclass(frozen=True)
class _WriterModel:
    """Model whose distributed optimizer wrote the flat buffers."""

    shape: ModelShape
    """Sizes of the model."""
    vocabulary_rows: int
    """Number of rows of the padded vocabulary."""
    layout: ParallelLayout
    """Parallel layout of the run that wrote the checkpoint."""
    implementation: LayerImplementation
    """Implementation of the layers."""


def writer_layout(arguments: Mapping[str, Any]) -> ParallelLayout:
    """Return the parallel layout of the run that wrote a checkpoint, from the checkpoint's arguments."""

    def read_size(name: str, default: int = 1) -> int:
        return int(arguments.get(name) or default)

    tensor = read_size("tensor_model_parallel_size")
    pipeline = read_size("pipeline_model_parallel_size")
    context = read_size("context_parallel_size")
    world_size = tensor * pipeline * context * read_size("data_parallel_size")
    return ParallelLayout(
        tuple(range(world_size)),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual_pipeline=read_size("virtual_pipeline_model_parallel_size"),
        expert=read_size("expert_model_parallel_size"),
        expert_tensor=read_size("expert_tensor_parallel_size", tensor),
        path="args",
    )


def list_possible_implementations(
    arguments: Mapping[str, Any], shape: ModelShape
) -> list[LayerImplementation]:
    """Return the layer implementations that may have written a checkpoint, most likely first.

    Layers are built with Transformer Engine or with Megatron's local layer spec. The arguments do not
    determine the implementation, since they do not include a user's own layer specs.
    """
    local = LayerImplementation(fused=False, grouped=False)
    fused = [LayerImplementation(fused=True, grouped=False)]
    if shape.experts:
        fused.insert(0, LayerImplementation(fused=True, grouped=True))

    if arguments.get("transformer_impl") == "local":
        return [local, *fused]
    return [*fused, local]


def arrange_parameters(
    arguments: Mapping[str, Any],
    shape: ModelShape,
    vocabulary_rows: int,
    bucket_sizes: Mapping[Bucket, int],
    implementation: LayerImplementation,
) -> list[FlatParameter]:
    """Compute the bucket and the offset of each rank's shard of each parameter.

    ``bucket_sizes`` has the number of elements of each bucket in the checkpoint. ``vocabulary_rows`` is the
    number of rows of the padded vocabulary. ``arguments`` are the checkpoint's Megatron-LM arguments, which
    include the parallel layout.

    Raises UserError if the buckets computed for the model and this layout differ from ``bucket_sizes``.
    """
    # An explicit layout string can distribute layers in any way, and is not parsed.
    layout = writer_layout(arguments)
    if arguments.get("pipeline_model_parallel_layout"):
        expected = "pipeline stages without an explicit layout string"
        raise mismatched_buffers_error(expected, "pipeline_model_parallel_layout")

    stage_settings = {name: arguments.get(argument) for name, argument in _STAGE_ARGUMENTS.items()}
    try:
        stages = stage_chunks(shape.layers, layout, stage_settings)
    except UserError as error:
        raise mismatched_buffers_error(f"{error.message}: {error.expected}", str(error.got)) from error

    # Arrange the buffers of each group of ranks with the same parameters.
    model = _WriterModel(shape, vocabulary_rows, layout, implementation)
    arrangement: list[FlatParameter] = []
    expected_buckets: set[Bucket] = set()
    has_separate_experts = any(bucket.optimizer for bucket in bucket_sizes)
    rank_groups = _iterate_rank_groups(model, stages, has_separate_experts)
    for optimizer_index, group_index, shard, parameters_by_chunk in rank_groups:
        # Megatron creates no buffer for a chunk without parameters.
        non_empty_buffers = [parameters for parameters in parameters_by_chunk if parameters]
        for buffer_index, parameters in enumerate(non_empty_buffers):
            first_bucket = Bucket(optimizer_index, group_index, buffer_index, 0)
            for parameter, bucket, start in _locate_parameters(parameters, first_bucket, bucket_sizes):
                expected_buckets.add(bucket)
                if not parameter.is_replica:
                    arrangement.append(FlatParameter(parameter.name, parameter.shape, *shard, bucket, start))

    # A bucket without parameters means that the checkpoint belongs to a different model or layout.
    if expected_buckets != set(bucket_sizes):
        layout_text = layout.short_text()
        expected = f"{len(expected_buckets)} buckets, for {layout_text} in the checkpoint's arguments"
        raise mismatched_buffers_error(expected, f"{len(bucket_sizes)}")
    return arrangement


def _iterate_rank_groups(
    model: _WriterModel, stages: Sequence[Sequence[list[int]]], has_separate_experts: bool
) -> Iterator[tuple[int, int, tuple[int, int, int], list[list[_LocalParameter]]]]:
    """Yield the parameters of each group of ranks that have the same parameters.

    Yields (optimizer index, group index, shard, parameters of each model chunk). The optimizer index and the
    group index are the fields ``optimizer`` and ``group`` of the parameters' buckets. ``shard`` is the
    (tensor, expert, expert-tensor) rank.

    ``stages`` has the layers of each chunk of each pipeline stage. If ``has_separate_experts`` is true, a
    second optimizer updates the experts, and the experts' parameters have separate groups. Otherwise the
    first optimizer updates all parameters.
    """
    layout = model.layout
    expert_shard_count = layout.expert * layout.expert_tensor

    for stage, chunks in enumerate(stages):
        is_last_stage = stage == len(stages) - 1

        # Ranks with the same tensor-parallel index have the same parameters outside of experts.
        for tensor_rank in range(layout.tensor):
            shard = (tensor_rank, 0, tensor_rank % layout.expert_tensor)
            parameters_by_chunk = []
            for index, layers in enumerate(chunks):
                # The first chunk of the first stage has the embedding, the last chunk of the last stage the
                # output layer.
                is_first = stage == 0 and index == 0
                is_last = is_last_stage and index == len(chunks) - 1
                chunk_parameters = _chunk_parameters(
                    model,
                    layers,
                    shard,
                    is_first,
                    is_last,
                    include_dense=True,
                    include_experts=not has_separate_experts,
                )
                parameters_by_chunk.append(chunk_parameters)
            yield 0, tensor_rank + layout.tensor * stage, shard, parameters_by_chunk

        if not has_separate_experts:
            continue
        for index in range(expert_shard_count):
            expert_rank, expert_tensor_rank = divmod(index, layout.expert_tensor)
            shard = (0, expert_rank, expert_tensor_rank)
            parameters_by_chunk = []
            for layers in chunks:
                chunk_parameters = _chunk_parameters(
                    model,
                    layers,
                    shard,
                    is_first_chunk=False,
                    is_last_chunk=False,
                    include_dense=False,
                    include_experts=True,
                )
                parameters_by_chunk.append(chunk_parameters)
            yield 1, index + expert_shard_count * stage, shard, parameters_by_chunk


def _chunk_parameters(
    model: _WriterModel,
    layers: Sequence[int],
    shard: tuple[int, int, int],
    is_first_chunk: bool,
    is_last_chunk: bool,
    *,
    include_dense: bool,
    include_experts: bool,
) -> list[_LocalParameter]:
    """Return a chunk's parameters in the order of the chunk's modules.

    ``shard`` is the (tensor, expert, expert-tensor) rank. Of the parameters of ``layers``, the result has
    experts if ``include_experts`` is true, and all other parameters if ``include_dense`` is true. The first
    chunk also has the embedding, and the last chunk the output layer.
    """
    # The modules of a GPTModel have the order embedding, decoder, output layer.
    embedding: list[_LocalParameter] = []
    output_layer: list[_LocalParameter] = []
    tensor_rank = shard[0]
    for weight in outer_weights(model.shape, is_first_chunk, is_last_chunk):
        is_tied = model.shape.tied and weight.name == "output_layer.weight"
        parameter = _shard_parameter(model, weight.name, weight, tensor_rank, is_tied)
        if weight.name.startswith("embedding."):
            embedding.append(parameter)
        else:
            output_layer.append(parameter)

    decoder: list[_LocalParameter] = []
    for layer in layers:
        keyed_parameters: list[tuple[tuple[int, ...], _LocalParameter]] = []
        for weight in model.shape.weights(layer):
            is_included = include_experts if weight.expert else include_dense
            # Module buffers, such as the router's expert biases, have no gradients.
            if is_included and not weight.is_buffer:
                keyed_parameters += _layer_parameters(model, layer, weight, shard)
        keyed_parameters.sort(key=lambda keyed_parameter: keyed_parameter[0])
        decoder += [parameter for _, parameter in keyed_parameters]
    return embedding + decoder + output_layer


def _layer_parameters(
    model: _WriterModel,
    layer: int,
    weight: Weight,
    shard: tuple[int, int, int],
) -> Iterator[tuple[tuple[int, ...], _LocalParameter]]:
    """Yield (sort key, local parameter) for each parameter that ``weight`` describes in a transformer layer.

    The keys sort the parameters of the layer into Megatron's order. A weight of experts has one parameter for
    each expert. ``shard`` is the (tensor, expert, expert-tensor) rank.
    """
    tensor_rank, _, expert_tensor_rank = shard
    if not weight.expert:
        # Transformer Engine fuses a norm with the linear module that follows it. The norm's parameter then
        # belongs to the linear module, and `weight.fused` is its name there. In a layer without this linear
        # module, the norm is a separate module.
        name = weight.name
        module_names = {_module_name(sibling.name) for sibling in model.shape.weights(layer)}
        if model.implementation.fused and _module_name(weight.fused) in module_names:
            name = weight.fused

        module_name, _, parameter_name = name.rpartition(".")
        sort_key = (_index_or_end(_MODULES, module_name), _index_or_end(_PARAMETER_NAMES, parameter_name))
        yield sort_key, _shard_parameter(model, f"decoder.layers.{layer}.{name}", weight, tensor_rank)
        return

    # In a grouped module each linear layer has the weights of all experts. Otherwise each expert is a module
    # with two linear layers.
    linear_name, parameter_name = weight.name.split(".")[-2:]
    linear_index = int(linear_name == "linear_fc2")
    is_replica = tensor_rank >= model.layout.expert_tensor

    for expert in range(model.shape.experts // model.layout.expert):
        name = weight.name
        expert_order = (expert, linear_index)
        if model.implementation.grouped:
            name = weight.fused or weight.name
            expert_order = (linear_index, expert)

        name = f"decoder.layers.{layer}.{name.format(expert=expert)}"
        sort_key = (
            _index_or_end(_MODULES, "mlp.experts"),
            *expert_order,
            _index_or_end(_PARAMETER_NAMES, parameter_name),
        )
        yield sort_key, _shard_parameter(model, name, weight, expert_tensor_rank, is_replica)


def _module_name(name: str) -> str:
    """Return the name of the module that contains a parameter, both relative to the layer."""
    return name.rpartition(".")[0]


def _shard_parameter(
    model: _WriterModel,
    name: str,
    weight: Weight,
    shard_index: int,
    is_replica: bool = False,
) -> _LocalParameter:
    """Return one tensor-parallel shard of a parameter in the model that wrote the checkpoint.

    ``shard_index`` is the (expert-)tensor-parallel rank. If ``is_replica`` is true, another rank has the same
    values, so this shard is not read.
    """
    num_shards = model.layout.tensor
    if weight.expert:
        num_shards = model.layout.expert_tensor
    complete_shape = weight.local_shape(1)
    shape = weight.local_shape(num_shards)

    # The checkpoint has more rows of the vocabulary than the model: Megatron-LM adds rows as padding.
    if weight.sharding == "vocabulary":
        shape = (model.vocabulary_rows // num_shards, *complete_shape[1:])
    elif weight.sharding == "latent" and model.implementation.fused:
        # Transformer Engine's layers replicate the projections to latents.
        shape = complete_shape

    # If every rank has the complete parameter, only the first rank's copy is read.
    if shard_index > 0 and shape == complete_shape:
        is_replica = True
    return _LocalParameter(name, shape, is_replica)


def _index_or_end(names: Sequence[str], name: str) -> int:
    """Return the index of ``name`` in ``names``, or the length of ``names`` for an unlisted name."""
    if name not in names:
        return len(names)
    return names.index(name)


def _locate_parameters(
    parameters: Sequence[_LocalParameter],
    first_bucket: Bucket,
    size_by_bucket: Mapping[Bucket, int],
) -> Iterator[tuple[_LocalParameter, Bucket, int]]:
    """Yield (parameter, bucket, index of its first element in the bucket) for each parameter of a buffer.

    ``first_bucket`` is the buffer's first bucket, and ``size_by_bucket`` the number of elements of every
    bucket. Raises UserError if the parameters do not fill the buckets exactly.
    """
    bucket = first_bucket
    end = 0

    # Parameters are reversed, since the backward pass completes the gradients of the last layer first.
    for parameter in reversed(parameters):
        num_elements = math.prod(parameter.shape)
        padding = -end % _ALIGNMENT
        start = end + padding

        # Continue in the next bucket if this bucket is full. A bucket also counts as full if only alignment
        # padding follows its last parameter: Megatron adds this padding before a parameter that gets a bucket
        # of its own, such as a tied embedding.
        bucket_size = size_by_bucket.get(bucket, 0)
        is_full = bucket_size in (end, start)
        if end and is_full and start + num_elements > bucket_size:
            bucket = _next_bucket(bucket)
            start = 0

        end = start + num_elements
        if end > size_by_bucket.get(bucket, 0):
            break
        yield parameter, bucket, start

    # The last parameter must end at the end of the last bucket.
    if end != size_by_bucket.get(bucket) or _next_bucket(bucket) in size_by_bucket:
        # The first three numbers of a bucket's name identify its buffer.
        buffer_bucket_sizes: list[int] = []
        for other_bucket, size in sorted(size_by_bucket.items()):
            if other_bucket[:3] == first_bucket[:3]:
                buffer_bucket_sizes.append(size)
        total_elements = sum(math.prod(parameter.shape) for parameter in parameters)
        raise mismatched_buffers_error(
            f"in {first_bucket.buffer_name()} {len(parameters)} parameters with {total_elements} elements "
            "in total",
            f"buckets of {' + '.join(map(str, buffer_bucket_sizes)) or 'no'} elements",
        )


def _next_bucket(bucket: Bucket) -> Bucket:
    """Return the name of the next bucket in the same buffer."""
    return bucket._replace(number=bucket.number + 1)


def mismatched_buffers_error(expected: str, got: str) -> UserError:
    """Return the error for buffers that do not belong to a checkpoint's model and layout."""
    return UserError(
        "the optimizer's buffers in the Megatron checkpoint do not belong to its model and layout",
        expected=expected,
        got=got,
        fix="load the checkpoint in Megatron-LM with the parallel layout that it was saved with, and save it "
        "with --dist-ckpt-optim-fully-reshardable",
    )
