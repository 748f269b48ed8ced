"""Where each parameter lies in the flat buffers that Megatron's distributed optimizer saves as they are.

That is its format dp_reshardable. A rank has a buffer for each of its chunks of the model, and one more for
the chunk's experts where those are reduced over ranks of their own. Parameters lie in a buffer from the
module's last to its first. Sources: `ParamAndGradBuffer`, `DistributedDataParallel`, `get_megatron_optimizer`
and `DistributedOptimizer.sharded_param_state_dp_reshardable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.interop.megatron_lm.pickles import Bucket
from megatron_rl.shapes.layer_weights import Weight, outer_weights
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import EMBEDDING, FIRST, LAST, LOSS, stage_chunks

_ALIGNMENT = 64
"""Elements: each parameter of a bucket begins at a multiple of them."""
_STAGES = {
    FIRST: "decoder_first_pipeline_num_layers",
    LAST: "decoder_last_pipeline_num_layers",
    EMBEDDING: "account_for_embedding_in_pipeline_split",
    LOSS: "account_for_loss_in_pipeline_split",
}
"""Arguments of Megatron-LM for the settings that deal layers out."""
_ATTENTION = (
    "linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
    "linear_kv_up_proj", "linear_qkv", "q_layernorm", "k_layernorm", "kv_layernorm",
)  # fmt: skip
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
"""The modules of a layer with parameters, in the order in which Megatron makes them."""
_KINDS = ("layer_norm_weight", "gate_weight", "weight", "bias")


class Order(NamedTuple):
    """Say whose modules a layer has, on which the order of its parameters depends.

    ``fused`` is Transformer Engine's norms inside the linear layers behind them, ``grouped`` its experts in
    one module.
    """

    fused: bool
    grouped: bool


@dataclass(frozen=True)
class FlatParameter:
    """Say where a rank's part of a parameter lies: which elements of a bucket, from ``start``.

    ``name`` counts layers over the whole model and experts on the rank; the rank is named by its places.
    """

    name: str
    shape: tuple[int, ...]
    tensor: int
    expert: int
    expert_tensor: int
    bucket: Bucket
    start: int


class _Part(NamedTuple):
    """A parameter of a rank, before it has a place; a ``copy`` is read from another rank's buffer."""

    name: str
    shape: tuple[int, ...]
    copy: bool


@dataclass(frozen=True)
class _Model:
    """What decides a rank's parameters: the model, the rows of its padded vocabulary, and whose modules."""

    shape: ModelShape
    rows: int
    layout: ParallelLayout
    order: Order


def writer_layout(arguments: Mapping[str, Any]) -> ParallelLayout:
    """Return the layout that wrote a checkpoint, from its arguments."""

    def size(name: str, default: int = 1) -> int:
        return int(arguments.get(name) or default)

    tensor, pipeline = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    context = size("context_parallel_size")
    return ParallelLayout(
        tuple(range(tensor * pipeline * context * size("data_parallel_size"))),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual_pipeline=size("virtual_pipeline_model_parallel_size"),
        expert=size("expert_model_parallel_size"),
        expert_tensor=size("expert_tensor_parallel_size", tensor),
        path="args",
    )


def orders(arguments: Mapping[str, Any], shape: ModelShape) -> list[Order]:
    """Return whose modules may have written a checkpoint, the likeliest first.

    The arguments do not decide it: specs of a user's own are not among them.
    """
    plain, fused = Order(False, False), [Order(True, True), Order(True, False)]
    fused = fused if shape.experts else fused[1:]
    return [plain, *fused] if arguments.get("transformer_impl") == "local" else [*fused, plain]


def flat_parameters(
    arguments: Mapping[str, Any], shape: ModelShape, rows: int, sizes: Mapping[Bucket, int], order: Order
) -> list[FlatParameter]:
    """Return where each part of each parameter lies, once, in buckets of ``sizes`` elements.

    ``rows`` are those of the padded vocabulary. Raises UserError where buckets of these sizes do not come of
    this model on the layout that the ``arguments`` state.
    """
    layout = writer_layout(arguments)
    if arguments.get("pipeline_model_parallel_layout"):
        raise other_buffers("stages that other arguments than this state", "pipeline_model_parallel_layout")
    settings = {name: arguments.get(argument) for name, argument in _STAGES.items()}
    try:
        stages = stage_chunks(shape.layers, layout, settings)
    except UserError as error:
        raise other_buffers(f"{error.message}: {error.expected}", str(error.got)) from error
    model = _Model(shape, rows, layout, order)
    flat: list[FlatParameter] = []
    used: set[Bucket] = set()
    for part, group, places, buffers in _groups(model, stages, apart=any(bucket.part for bucket in sizes)):
        for buffer, parameters in enumerate(filter(None, buffers)):
            for parameter, bucket, start in _laid_out(parameters, Bucket(part, group, buffer, 0), sizes):
                used.add(bucket)
                if not parameter.copy:
                    flat.append(FlatParameter(parameter.name, parameter.shape, *places, bucket, start))
    if used != set(sizes):
        expected = f"{len(used)} buckets, by {layout.short_words()} of its arguments"
        raise other_buffers(expected, f"{len(sizes)}")
    return flat


def _groups(
    model: _Model, stages: Sequence[Sequence[list[int]]], apart: bool
) -> Iterator[tuple[int, int, tuple[int, int, int], list[list[_Part]]]]:
    """Yield part, group, the rank's places and what each of its chunks has, for every group of ranks.

    Ranks that hold the same parameters are a group. ``apart`` are experts with an optimizer of their own.
    """
    layout = model.layout
    for stage, chunks in enumerate(stages):
        ends = [(stage == 0 and index == 0, stage == len(stages) - 1 and index == len(chunks) - 1)
                for index in range(len(chunks))]  # fmt: skip
        for tensor in range(layout.tensor):
            places = (tensor, 0, tensor % layout.expert_tensor)
            buffers = [
                _chunk(model, layers, places, first, last, (False,) if apart else (False, True))
                for layers, (first, last) in zip(chunks, ends, strict=True)
            ]
            yield 0, tensor + layout.tensor * stage, places, buffers
        for index in range(layout.expert * layout.expert_tensor if apart else 0):
            expert, expert_tensor = divmod(index, layout.expert_tensor)
            places = (0, expert, expert_tensor)
            buffers = [_chunk(model, layers, places, False, False, (True,)) for layers in chunks]
            yield 1, index + layout.expert * layout.expert_tensor * stage, places, buffers


def _chunk(
    model: _Model,
    layers: Sequence[int],
    places: tuple[int, int, int],
    first: bool,
    last: bool,
    kinds: Sequence[bool],
) -> list[_Part]:
    """Return a chunk's parameters in the module's order; ``kinds`` says whether others, and experts."""
    outer = []
    for weight in outer_weights(model.shape, first, last):
        tied = model.shape.tied and weight.name == "output_layer.weight"
        outer.append(_part(model, weight.name, weight, places[0], tied))
    before = [part for part in outer if part.name.startswith("embedding.")]
    behind = [part for part in outer if not part.name.startswith("embedding.")]
    between: list[_Part] = []
    for layer in layers:
        ordered: list[tuple[tuple[int, ...], _Part]] = []
        for weight in model.shape.weights(layer):
            if weight.expert in kinds and not weight.name.endswith("expert_bias"):
                ordered += _of_layer(model, layer, weight, places)
        between += [part for _, part in sorted(ordered, key=lambda item: item[0])]
    return before + between + behind


def _of_layer(
    model: _Model, layer: int, weight: Weight, places: tuple[int, int, int]
) -> Iterator[tuple[tuple[int, ...], _Part]]:
    """Yield a layer's parameters of a kind, each with its position among the layer's."""
    tensor, _, expert_tensor = places
    if not weight.expert:
        name = weight.name
        modules = {other.name.rpartition(".")[0] for other in model.shape.weights(layer)}
        if model.order.fused and weight.fused.rpartition(".")[0] in modules:
            name = weight.fused
        module, _, kind = name.rpartition(".")
        position = (_place(_MODULES, module), _place(_KINDS, kind))
        yield position, _part(model, f"decoder.layers.{layer}.{name}", weight, tensor)
        return
    linear, kind = weight.name.split(".")[-2:]
    inside = int(linear == "linear_fc2")
    spread = tensor >= model.layout.expert_tensor
    for expert in range(model.shape.experts // model.layout.expert):
        name = (weight.fused if model.order.grouped and weight.fused else weight.name).format(expert=expert)
        among = (inside, expert) if model.order.grouped else (expert, inside)
        part = _part(model, f"decoder.layers.{layer}.{name}", weight, expert_tensor, spread)
        yield (_place(_MODULES, "mlp.experts"), *among, _place(_KINDS, kind)), part


def _part(model: _Model, name: str, weight: Weight, index: int, copy: bool = False) -> _Part:
    """Return the part of a parameter that the ``index``-th of the ranks holds that it is cut over."""
    count = model.layout.expert_tensor if weight.expert else model.layout.tensor
    whole = weight.local_shape(1)
    if weight.cut == "vocabulary":
        shape = (model.rows // count, *whole[1:])
    else:
        shape = whole if weight.cut == "latent" and model.order.fused else weight.local_shape(count)
    return _Part(name, shape, copy or (index > 0 and shape == whole))


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _laid_out(
    parameters: Sequence[_Part], begin: Bucket, sizes: Mapping[Bucket, int]
) -> Iterator[tuple[_Part, Bucket, int]]:
    """Yield each parameter of a buffer with its bucket, ``begin`` the first, and its place there."""
    bucket, end = begin, 0
    for parameter in reversed(parameters):
        count = math.prod(parameter.shape)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        # One that has the next bucket to itself, as a tied embedding has, still pads the bucket before.
        if end and start + count > sizes.get(bucket, 0) and sizes.get(bucket) in (end, start):
            bucket, start = bucket._replace(number=bucket.number + 1), 0
        end = start + count
        if end > sizes.get(bucket, 0):
            break
        yield parameter, bucket, start
    if end != sizes.get(bucket) or bucket._replace(number=bucket.number + 1) in sizes:
        held = [size for key, size in sorted(sizes.items()) if key[:3] == begin[:3]]
        total = sum(math.prod(parameter.shape) for parameter in parameters)
        raise other_buffers(
            f"in {begin.words()} {len(parameters)} parameters of together {total} elements",
            f"buckets of {' + '.join(map(str, held)) or 'no'} elements",
        )


def other_buffers(expected: str, got: str) -> UserError:
    """Return the error of buffers that are not those of a checkpoint's model and layout."""
    return UserError(
        "the optimizer's buffers in the Megatron checkpoint are not those of its model and layout",
        expected=expected,
        got=got,
        fix="load and save it with Megatron-LM on that layout, with --dist-ckpt-optim-fully-reshardable",
    )
