"""Low-rank adapters on Megatron's linear layers, over a base that stays as it is.

A layer's output gets ``alpha / rank * B A x`` added. What tensor-parallel ranks exchange for it is as wide as
A x: a layer that is cut by rows has A whole and B cut, one that is cut by columns A cut and B whole. Each
routed expert has an A and a B of its own, and its ranks exchange nothing more: the gradients of what they all
have are added up before the step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.nn import functional

from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import sum_over_ranks
from megatron_rl.errors import UserError
from megatron_rl.megatron.adapter import Adapter, add_change
from megatron_rl.megatron.model import Chunked, ParallelModel, live_parameters, of_experts
from megatron_rl.megatron.model_spec import pretrained
from megatron_rl.megatron.parameter_mapping import (
    EXPERT,
    by_name,
    global_name,
    import_parameters,
    shard_of,
    trace_import,
)
from megatron_rl.shapes.lora import ADAPTER, ATTENTION, MLP, PEFT_PREFIX, adapted
from megatron_rl.shapes.pretrained import LAYER
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import view_of

_HEAD = "output_layer.weight"


class TensorSource(Protocol):
    """Named tensors that are read in slices, such as those of a safetensors file."""

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        ...

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the slice of ``size`` elements per dimension that begins at ``start``."""
        ...


def attach_adapters(
    model: ParallelModel,
    config: LoraConfig,
    seed: int,
    *,
    trainable: bool,
    initial: TensorSource | None = None,
) -> None:
    """Freeze a model that holds its weights and attach adapters to its linear layers.

    ``initial`` gives the values by their PEFT names; adapters that it lacks are new. A new one adds nothing:
    A is uniform as torch starts a linear layer, B is zero. Its numbers depend on ``seed`` and the tensors'
    names alone. Call before the model is wrapped.
    """
    model.adapters = adapted(pretrained(model.hf_config), config.rank, config.alpha, config.targets)
    groups, settings = model.groups, model.transformer_config
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        head = _head(model, chunk)
        if head is not None:
            head.requires_grad_(trainable)
    masks: dict[str, Tensor] = {}

    def make(name: str, weight: Tensor) -> Adapter:
        alike = EXPERT.sub(r"\1{expert}", name)
        if alike not in masks:
            masks[alike] = _row_kinds(model, alike, len(weight))
        assert model.adapters is not None
        adapter = Adapter(
            weight, config.rank, masks[alike], model.adapters.alpha / config.rank, config.dropout
        )
        columns = "linear_proj." in name or "linear_fc2." in name
        if of_experts(name):
            adapter.cut_expert(columns, groups.expert_tensor)
        else:
            adapter.cut(columns, groups.tensor, settings.sequence_parallel)
        return adapter.requires_grad_(trainable)

    for layer, linear in _linear_layers(model, model.adapters.targets):
        name, count = f"{layer}.{ADAPTER}", getattr(linear, "num_gemms", None)
        if count is None:
            linear.adapter = make(name, linear.weight)
        else:  # Transformer Engine's, of all experts
            weights = [getattr(linear, f"weight{number}") for number in range(count)]
            linear.adapter = nn.ModuleList(make(f"{name}.{n}", weight) for n, weight in enumerate(weights))
        # Before whatever else changes the layer's output, such as a norm behind it.
        linear.register_forward_hook(add_change, prepend=True)
    if trainable and settings.recompute_granularity is not None and model.chunks[0].pre_process:
        # What is computed again has a gradient only where an input has one.
        model.chunks[0].embedding.register_forward_hook(_with_gradient)
    start_adapters(model, seed, initial)


@torch.no_grad()
def share_base(model: ParallelModel, other: ParallelModel) -> None:
    """Let frozen weights of a model be those of another that holds the same checkpoint in the same layout.

    Both have adapters over them. Call before the model is wrapped; its own copies are freed.
    """
    for chunk, twin in zip(model.chunks, other.chunks, strict=True):
        frozen = {name: value for name, value in twin.named_parameters() if not value.requires_grad}
        for name, parameter in chunk.named_parameters():
            base = frozen.get(name)
            if base is not None and not parameter.requires_grad and parameter.shape == base.shape:
                parameter.data = base.data


def _head(model: ParallelModel, chunk: Any) -> Tensor | None:
    """Return the weight of a head of one number, which learns beside adapters."""
    return chunk.output_layer.weight if model.spec.model.shape.scalar_head and chunk.post_process else None


def start_adapters(model: ParallelModel, seed: int, initial: TensorSource | None = None) -> None:
    """Set a model's adapters to their initial values: new ones, or those of ``initial`` by their PEFT names.

    Tensors that ``initial`` lacks are new. The reference keeps the values of ``initial``.
    """
    assert model.adapters is not None
    stored_names = set() if initial is None else initial.names()
    shapes, parameters = model.adapters.tensor_shapes(), adapter_parameters(model)
    for box in adapter_boxes(model):
        view = view_of(parameters[box.storage], box)
        if initial is not None and PEFT_PREFIX + box.name in stored_names:
            view.copy_(initial.read(PEFT_PREFIX + box.name, box.start, box.size))
        elif box.name.endswith("lora_B.weight"):
            view.zero_()
        else:
            part = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
            view.copy_(_new_values(box.name, shapes[box.name], seed)[part])
    for _, adapter in _adapters(model):
        adapter.initial_A = adapter.A.detach().clone() if initial is not None else None
        adapter.initial_B = adapter.B.detach().clone() if initial is not None else None


def _new_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = shape[1] ** -0.5
    return torch.rand(shape, generator=generator) * 2 * bound - bound


def _linear_layers(model: ParallelModel, targets: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield each linear layer that is to have an adapter with its name over the whole model."""
    for index, chunk in enumerate(model.chunks):
        for number, layer in enumerate(chunk.decoder.layers):
            for place, block, kinds in _blocks(layer):
                for name in (target for target in targets if target in kinds):
                    linear = getattr(block, name, None)
                    if linear is None:
                        raise _without_layer(f"{place}.{name}", name, targets)
                    yield global_name(model, f"{index}.decoder.layers.{number}.{place}.{name}"), linear


def _blocks(layer: Any) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield what of a decoder layer holds linear layers, with its name there and theirs."""
    yield "self_attention", getattr(layer, "self_attention", None), ATTENTION
    mlp: Any = getattr(layer, "mlp", None)
    experts = getattr(mlp, "experts", None)
    if experts is None:
        yield "mlp", mlp, MLP
        return
    if getattr(mlp, "shared_experts", None) is not None:
        yield "mlp.shared_experts", mlp.shared_experts, MLP
    alone = getattr(experts, "local_experts", None)
    if alone is None:
        yield "mlp.experts", experts, MLP
    for number, expert in enumerate(alone or ()):
        yield f"mlp.experts.local_experts.{number}", expert, MLP


def _without_layer(name: str, target: str, targets: Iterable[str]) -> UserError:
    return UserError(
        f"a layer of the model provider has no {name} to adapt",
        where="actor.lora.targets",
        expected="layers that every layer of the model has, called as Megatron's",
        got=", ".join(targets),
        fix=f"remove {target}",
    )


def _row_kinds(model: ParallelModel, name: str, rows: int) -> Tensor:
    """Return [rows, kinds] with a 1 where a row of an adapter's B belongs to one of the tensors it is for.

    ``name`` is the adapter's over the whole model, with ``{expert}`` for the number of an expert: all are
    alike.
    """
    assert model.adapters is not None
    number, module = name.removeprefix("decoder.layers.").split(".", 1)
    weights = by_name(model.adapters.weights(int(number)))
    names = [source.name for source in weights[f"{module}.A"].sources]
    shard = shard_of(model)
    first = shard.expert * (model.adapters.shape.experts // shard.expert_size)
    kinds: dict[str, Tensor] = {}
    for source in weights[f"{module}.B"].sources:
        kind = names.index(source.name.replace("lora_B", "lora_A"))
        size = source.first + source.shape[0]
        stored = LAYER.format(layer=number) + source.name.format(expert=first)
        kinds[stored] = torch.full((size, 1), kind)
    target = torch.empty(rows, 1, dtype=torch.long)
    import_parameters({f"{name.format(expert=0)}.B": target}, kinds, model.adapters, shard)
    return functional.one_hot(target[:, 0], len(names))


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adapters(model: Chunked) -> Iterator[tuple[str, Adapter]]:
    """Yield every adapter on this rank with its storage name."""
    for index, chunk in enumerate(model.chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, Adapter):
                yield f"{index}.{name}", module


def _weight_of(adapter: str) -> str:
    """Return the storage name of the weight that an adapter is for."""
    layer, _, expert = adapter.rpartition(f".{ADAPTER}")
    return f"{layer}.weight{expert.removeprefix('.')}"


def adapter_parameters(model: Chunked) -> dict[str, Tensor]:
    """Return this rank's weights of adapters by storage name, ``<chunk>.<parameter name>``."""
    return {
        f"{name}.{factor}": parameter.data
        for name, adapter in _adapters(model)
        for factor, parameter in adapter.named_parameters()
    }


def sum_partial_gradients(chunks: Iterable[nn.Module]) -> None:
    """Add up what the ranks of an expert find for the factors of its adapters that all of them have.

    Collective over the experts' tensor-parallel group.
    """
    partial = [
        (gradient, module.group)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Adapter) and (gradient := module.partial_gradient()) is not None
    ]
    if not partial:
        return
    total = sum_over_ranks(torch.cat([gradient.flatten() for gradient, _ in partial]), partial[0][1])
    begin = 0
    for gradient, _ in partial:
        gradient.copy_(total[begin : begin + gradient.numel()].view_as(gradient))
        begin += gradient.numel()


def adapter_boxes(model: ParallelModel) -> list[TensorBox]:
    """Return where each part of PEFT's tensors lies in this rank's `adapter_parameters`."""
    assert model.adapters is not None
    parameters = adapter_parameters(model)
    names = {global_name(model, storage): storage for storage in parameters}
    stand_ins = {
        name: torch.empty_like(parameters[storage], device="meta") for name, storage in names.items()
    }
    return trace_import(stand_ins, model.adapters, shard_of(model), device.rank(), names)


def policy_weights(model: Chunked) -> dict[str, Tensor]:
    """Return `live_parameters`, with new tensors for weights that have an adapter: the two as one."""
    weights = live_parameters(model)
    for name, adapter in _adapters(model):
        weight = _weight_of(name)
        weights[weight] = adapter.merged(weights[weight])
    return weights


def engine_adapters(model: Chunked) -> dict[str, Tensor]:
    """Return `adapter_parameters` for an engine that adds B A as it is: new Bs hold the factor."""
    parameters = adapter_parameters(model)
    for name, adapter in _adapters(model):
        if adapter.scale != 1:
            parameters[f"{name}.B"] = parameters[f"{name}.B"] * adapter.scale
    return parameters


@torch.no_grad()
def merge_adapters(model: ParallelModel, seed: int) -> None:
    """Add a model's adapters into its base, in place, and start new ones."""
    weights = live_parameters(model)
    for name, adapter in _adapters(model):
        weight = weights[_weight_of(name)]
        weight.copy_(adapter.merged(weight))
    start_adapters(model, seed)


def remove_adapters(model: ParallelModel) -> list[tuple[Any, Any]]:
    """Take a model's adapters off, whatever they have learned; return the layers, each with its own."""
    modules = [module for chunk in model.chunks for module in chunk.modules() if hasattr(module, ADAPTER)]
    linears: list[tuple[Any, Any]] = [(module, module.adapter) for module in modules]
    for linear, _ in linears:
        del linear.adapter
    model.adapters = None
    return linears


@contextmanager
def without_adapters(model: ParallelModel | None) -> Iterator[None]:
    """Have a model be one without adapters inside the block, whose weights are copies with them added in.

    One that has none stays as it is. Nothing may train inside the block.
    """
    if model is None:
        yield
        return
    described, merged = model.adapters, []
    for name, adapter in _adapters(model):
        index, weight = _weight_of(name).split(".", 1)
        parameter = model.chunks[int(index)].get_parameter(weight)
        merged.append((parameter, parameter.data))
        parameter.data = adapter.merged(parameter.data)
    linears = remove_adapters(model)
    try:
        yield
    finally:
        model.adapters = described
        for linear, adapter in linears:
            linear.adapter = adapter
        for parameter, weight in merged:
            parameter.data = weight


@contextmanager
def initial_policy(model: Chunked) -> Iterator[None]:
    """Have a model be the policy it started as inside the block: its base, with an adapter as it was read."""
    for _, adapter in _adapters(model):
        adapter.state = "initial"
    try:
        yield
    finally:
        for _, adapter in _adapters(model):
            adapter.state = "trained"


def sharded_adapters(model: ParallelModel, chunk: Any) -> dict[str, Any]:
    """Return what of a chunk learns as Megatron's distributed checkpoint stores it, in any layout.

    The experts of a layer are one tensor there, each a row of it.
    """
    index, groups = model.chunks.index(chunk), model.groups
    stored: dict[str, Any] = {}
    head = _head(model, chunk)
    if head is not None:
        replica = (0, groups.coordinates.tensor, groups.data_context.rank())
        stored[_HEAD] = ShardedTensor.from_rank_offsets(_HEAD, head, replica_id=replica)
    for adapter_name, adapter in _adapters(model):
        if not adapter_name.startswith(f"{index}."):
            continue
        tensor = adapter.group.rank(), adapter.group.size()
        copy = (groups.expert_data if adapter.expert else groups.data_context).rank()
        for factor, parameter in adapter.named_parameters():
            name = global_name(model, f"{adapter_name}.{factor}")
            key, row = _row_of(model, name)
            whole = adapter.columns == (factor == "B")
            cut = () if whole else ((len(row) + int(adapter.columns), *tensor),)
            replica = (0, tensor[0] if whole else 0, copy)
            entry: Any = ShardedTensor.from_rank_offsets(
                key, parameter, *row, *cut, replica_id=replica, prepend_axis_num=len(row)
            )
            if factor == "B" and ".linear_fc1." in name and model.transformer_config.gated_linear_unit:
                entry = apply_swiglu_sharded_factory(entry, row)
            stored[name] = entry
    return stored


def _row_of(model: ParallelModel, name: str) -> tuple[str, tuple[tuple[int, int, int], ...]]:
    """Return under which key a checkpoint has a parameter of adapters, and which row is the expert's."""
    expert = EXPERT.search(name)
    if expert is None:
        return name, ()
    shard, count = shard_of(model), model.spec.model.shape.experts
    number = shard.expert * (count // shard.expert_size) + int(expert.group(2))
    return EXPERT.sub(r"\1", name).replace("..", "."), ((0, number, count),)


@torch.no_grad()
def load_adapters(model: ParallelModel, chunk: Any, stored: dict[str, Tensor]) -> None:
    """Take over what `sharded_adapters` had stored."""
    index, head = model.chunks.index(chunk), _head(model, chunk)
    if head is not None:
        head.copy_(stored[_HEAD])
    for storage, parameter in adapter_parameters(model).items():
        if storage.startswith(f"{index}."):
            parameter.copy_(stored[global_name(model, storage)])
