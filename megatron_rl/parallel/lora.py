"""Low-rank adapters on Megatron's linear layers, over a base that stays as it is.

A layer's output gets ``alpha / rank * B A x`` added. What tensor-parallel ranks exchange for it is as wide as
A x: a layer that is cut by rows has A whole and B cut, one that is cut by columns A cut and B whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.nn import functional

from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.errors import UserError
from megatron_rl.parallel import device
from megatron_rl.parallel.boxes import view_of
from megatron_rl.parallel.exchange import together
from megatron_rl.parallel.hf.files import CheckpointFiles
from megatron_rl.parallel.hf.importer import import_parameters, trace_import
from megatron_rl.parallel.hf.model_spec import pretrained
from megatron_rl.parallel.hf.weights import fingerprint, global_name, shard_of
from megatron_rl.parallel.model import Chunked, ParallelModel, live_parameters
from megatron_rl.shapes.lora import ADAPTER, MLP, PEFT_PREFIX, adapted
from megatron_rl.shapes.pretrained import LAYER
from megatron_rl.types import TensorBox

_HEAD = "output_layer.weight"


class Adapter(nn.Module):
    """Hold A [kinds x rank, in] and B [out, rank] of one linear layer on this rank.

    The checkpoint's tensors that a layer holds, of which there are ``kinds``, have an A each. ``columns``
    says that the layer's weight is cut by columns over ``group``. ``mask`` [out, kinds] has a 1 where a row
    of B belongs to a kind.
    """

    mask: Tensor
    initial_A: Tensor | None
    initial_B: Tensor | None

    def __init__(self, weight: Tensor, rank: int, mask: Tensor, scale: float, dropout: float) -> None:
        super().__init__()
        rows, inputs = weight.shape
        like = {"dtype": weight.dtype, "device": weight.device}
        self.A = nn.Parameter(torch.empty(mask.shape[1] * rank, inputs, **like))
        self.B = nn.Parameter(torch.empty(rows, rank, **like))
        self.scale, self.dropout, self.state = scale, dropout, "trained"
        self.register_buffer("mask", mask.to(**like), persistent=False)
        self.register_buffer("initial_A", None, persistent=False)
        self.register_buffer("initial_B", None, persistent=False)
        self.columns = self.sequence_parallel = False
        self.group: Any = None

    def cut(self, columns: bool, group: Any, sequence_parallel: bool) -> None:
        """Say how the layer is cut over a tensor-parallel group, and mark whose gradients are partial."""
        self.columns, self.group = columns, group
        self.sequence_parallel = sequence_parallel and group.size() > 1
        shard, whole = (self.A, self.B) if columns else (self.B, self.A)
        set_tensor_model_parallel_attributes(shard, True, int(columns), 1)
        setattr(whole, "sequence_parallel", self.sequence_parallel)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """Return what the adapter adds to the layer's output, None where it adds nothing."""
        down, up = self.A, self.B
        if self.state == "initial":
            if self.initial_A is None or self.initial_B is None:
                return None
            down, up = self.initial_A, self.initial_B
        if self.dropout and self.training:
            hidden = self._dropped(hidden)
        narrow = self._exchanged(functional.linear(hidden, down))
        return functional.linear(narrow, self._wide(up)) * self.scale

    def _dropped(self, hidden: Tensor) -> Tensor:
        # Ranks with parts of the same tokens or features draw numbers of their own, others the same.
        if self.columns or self.sequence_parallel:
            with device.tensor_parallel_generator():
                return functional.dropout(hidden, self.dropout)
        return functional.dropout(hidden, self.dropout)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        if self.columns and self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.group)
        if self.columns:
            return reduce_from_tensor_model_parallel_region(narrow, group=self.group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, group=self.group)
        return copy_to_tensor_model_parallel_region(narrow, group=self.group)

    def _wide(self, up: Tensor) -> Tensor:
        """Return B with a column for every row of A: zero where a row belongs to another kind."""
        if self.mask.shape[1] == 1:
            return up
        return (self.mask[:, :, None] * up[:, None, :]).flatten(1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the weight with the adapter added in, summed in float32."""
        change = self._wide(self.B).float() @ self.A.float()
        return (weight.float() + self.scale * change).to(weight.dtype)


def add_adapters(model: ParallelModel, config: LoraConfig, seed: int, *, trainable: bool) -> None:
    """Freeze a model that holds its weights and give its linear layers adapters, new or from a file.

    A new one adds nothing: A is uniform as torch starts a linear layer, B is zero. Its numbers depend on
    ``seed`` and the tensors' names alone. Call before the model is wrapped.
    """
    model.adapters = adapted(pretrained(model.hf_config), config.rank, config.alpha, config.targets)
    groups, settings = model.groups, model.transformer_config
    scale = model.adapters.alpha / config.rank
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        head = _head(model, chunk)
        if head is not None:
            head.requires_grad_(trainable)
    for prefix, linear in _linear_layers(model, model.adapters.targets):
        mask = _row_kinds(model, prefix, len(linear.weight))
        adapter = Adapter(linear.weight, config.rank, mask, scale, config.dropout)
        adapter.cut(prefix.endswith(("linear_proj", "linear_fc2")), groups.tensor, settings.sequence_parallel)
        linear.adapter = adapter.requires_grad_(trainable)
        # Before whatever else changes the layer's output, such as a norm behind it.
        linear.register_forward_hook(_add, prepend=True)
    if trainable and settings.recompute_granularity is not None and model.chunks[0].pre_process:
        # What is computed again has a gradient only where an input has one.
        model.chunks[0].embedding.register_forward_hook(_with_gradient)
    start_adapters(model, seed, config.path)


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


def start_adapters(model: ParallelModel, seed: int, path: str | None = None) -> None:
    """Give a model's adapters the values that they start from: new ones, or those of a file of PEFT's.

    Tensors that the file lacks are new. A file's values also are those that the reference keeps.
    """
    assert model.adapters is not None
    files = CheckpointFiles(path) if path is not None else None
    held = files.names() if files is not None else set()
    shapes, parameters = model.adapters.tensor_shapes(), adapter_parameters(model)
    for box in adapter_boxes(model):
        view = view_of(parameters[box.storage], box)
        if files is not None and PEFT_PREFIX + box.name in held:
            view.copy_(files.read(PEFT_PREFIX + box.name, box.start, box.size))
        elif box.name.endswith("lora_B.weight"):
            view.zero_()
        else:
            part = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
            view.copy_(_new_values(box.name, shapes[box.name], seed)[part])
    for _, adapter in _adapters(model):
        adapter.initial_A = adapter.A.detach().clone() if files is not None else None
        adapter.initial_B = adapter.B.detach().clone() if files is not None else None


def _new_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = shape[1] ** -0.5
    return torch.rand(shape, generator=generator) * 2 * bound - bound


def _linear_layers(model: ParallelModel, targets: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield each linear layer that is to have an adapter with its name over the whole model."""
    for index, chunk in enumerate(model.chunks):
        for layer_index, layer in enumerate(chunk.decoder.layers):
            for block, linear in ((block, name) for block in ("self_attention", "mlp") for name in targets):
                module = getattr(getattr(layer, block, None), linear, None)
                if module is not None:
                    storage = f"{index}.decoder.layers.{layer_index}.{block}.{linear}"
                    yield global_name(model, storage), module
                elif (block == "mlp") == (linear in MLP):
                    raise UserError(
                        f"a layer of the model provider has no {block}.{linear} to adapt",
                        where="actor.lora.targets",
                        expected="layers that every layer of the model has, called as Megatron's",
                        got=", ".join(targets),
                        fix=f"remove {linear}",
                    )


def _row_kinds(model: ParallelModel, layer: str, rows: int) -> Tensor:
    """Return [rows, kinds] with a 1 where a row of a layer's B belongs to one of the tensors it holds."""
    assert model.adapters is not None
    number, module = layer.removeprefix("decoder.layers.").split(".", 1)
    weights = {weight.name: weight for weight in model.adapters.weights(int(number))}
    names = [source.name for source in weights[f"{module}.{ADAPTER}.A"].sources]
    kinds: dict[str, Tensor] = {}
    for source in weights[f"{module}.{ADAPTER}.B"].sources:
        kind = names.index(source.name.replace("lora_B", "lora_A"))
        size = source.first + source.shape[0]
        kinds[LAYER.format(layer=number) + source.name] = torch.full((size, 1), kind)
    target = torch.empty(rows, 1, dtype=torch.long)
    import_parameters({f"{layer}.{ADAPTER}.B": target}, kinds, model.adapters, shard_of(model))
    return functional.one_hot(target[:, 0], len(names))


def _add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    if not hasattr(linear, ADAPTER):
        return output  # it was removed
    hidden = inputs[0]
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is not None:  # Transformer Engine normalises inside the layer
        gain = weight.float() + (1.0 if linear.zero_centered_gamma else 0.0)
        hidden = functional.rms_norm(hidden.float(), gain.shape, gain, linear.eps).to(hidden.dtype)
    change = linear.adapter(hidden)
    return output if change is None else (output[0] + change, output[1])


def _with_gradient(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adapters(model: Chunked) -> Iterator[tuple[str, Adapter]]:
    """Yield every adapter on this rank with the storage name of its layer."""
    for index, chunk in enumerate(model.chunks):
        for name, module in chunk.named_modules():
            if isinstance(module, Adapter):
                yield f"{index}.{name.removesuffix(f'.{ADAPTER}')}", module


def adapter_parameters(model: Chunked) -> dict[str, Tensor]:
    """Return this rank's weights of adapters by storage name, ``<chunk>.<parameter name>``."""
    return {
        f"{layer}.{ADAPTER}.{name}": parameter.data
        for layer, adapter in _adapters(model)
        for name, parameter in adapter.named_parameters()
    }


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
    for layer, adapter in _adapters(model):
        weights[f"{layer}.weight"] = adapter.merged(weights[f"{layer}.weight"])
    return weights


def note_base(model: ParallelModel, path: str | Path) -> None:
    """Note which weights, those of a checkpoint's folder, lie beneath a model's adapters.

    One rank reads them. Collective over the model's ranks.
    """
    assert model.adapters is not None
    dtype, leads = model.transformer_config.params_dtype, device.rank() == model.groups.layout.ranks[0]
    checksum = together(
        lambda: fingerprint(path, dtype) if leads else None, "read the model's weights", model.groups.all
    )[0]
    model.adapters = replace(model.adapters, base=checksum)


def engine_adapters(model: Chunked) -> dict[str, Tensor]:
    """Return `adapter_parameters` for an engine that adds B A as it is: new Bs hold the factor."""
    parameters = adapter_parameters(model)
    for layer, adapter in _adapters(model):
        if adapter.scale != 1:
            name = f"{layer}.{ADAPTER}.B"
            parameters[name] = parameters[name] * adapter.scale
    return parameters


@torch.no_grad()
def merge_adapters(model: ParallelModel, seed: int) -> None:
    """Add a model's adapters into its base, in place, and start new ones."""
    weights = live_parameters(model)
    for layer, adapter in _adapters(model):
        weights[f"{layer}.weight"].copy_(adapter.merged(weights[f"{layer}.weight"]))
    start_adapters(model, seed)


@contextmanager
def without_adapters(model: ParallelModel | None) -> Iterator[None]:
    """Have a model be one without adapters inside the block, whose weights are copies with them added in.

    One that has none stays as it is. Nothing may train inside the block.
    """
    if model is None:
        yield
        return
    described, layers = model.adapters, []
    for layer, adapter in list(_adapters(model)):
        index, name = layer.split(".", 1)
        linear: Any = model.chunks[int(index)].get_submodule(name)
        layers.append((linear, adapter, linear.weight.data))
        linear.weight.data = adapter.merged(linear.weight.data)
        del linear.adapter
    model.adapters = None
    try:
        yield
    finally:
        model.adapters = described
        for linear, adapter, weight in layers:
            linear.adapter, linear.weight.data = adapter, weight


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
    """Return what of a chunk learns as Megatron's distributed checkpoint stores it, in any layout."""
    index, groups = model.chunks.index(chunk), model.groups
    tensor, size = groups.coordinates.tensor, groups.layout.tensor
    stored: dict[str, Any] = {}
    head = _head(model, chunk)
    if head is not None:
        replica = (0, tensor, groups.data_context.rank())
        stored[_HEAD] = ShardedTensor.from_rank_offsets(_HEAD, head, replica_id=replica)
    for layer, adapter in _adapters(model):
        if not layer.startswith(f"{index}."):
            continue
        for name, parameter in adapter.named_parameters():
            key = global_name(model, f"{layer}.{ADAPTER}.{name}")
            whole = adapter.columns == (name == "B")
            offsets = () if whole else ((int(adapter.columns), tensor, size),)
            replica = (0, tensor if whole else 0, groups.data_context.rank())
            entry: Any = ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=replica)
            if name == "B" and layer.endswith("linear_fc1") and model.transformer_config.gated_linear_unit:
                entry = apply_swiglu_sharded_factory(entry, ())
            stored[key] = entry
    return stored


@torch.no_grad()
def load_adapters(model: ParallelModel, chunk: Any, stored: dict[str, Tensor]) -> None:
    """Take over what `sharded_adapters` had stored."""
    index, head = model.chunks.index(chunk), _head(model, chunk)
    if head is not None:
        head.copy_(stored[_HEAD])
    for storage, parameter in adapter_parameters(model).items():
        if storage.startswith(f"{index}."):
            parameter.copy_(stored[global_name(model, storage)])


def peft_boxes(model: ParallelModel) -> list[TensorBox]:
    """Return `adapter_boxes` with the names that PEFT's files have."""
    return [replace(box, name=PEFT_PREFIX + box.name) for box in adapter_boxes(model)]
