"""Weights of a vLLM model in this process, which a `HybridEngine` writes in place.

vLLM's own loader decides how each tensor of a checkpoint is split, fused and sharded. This module does not
repeat these rules: it runs the loader once on meta tensors (tensors without data), and records every copy
that the loader makes (`megatron_rl.weights.trace`). Each copy becomes a `TensorBox`: a region of a checkpoint
tensor and its position in a parameter of this rank. Updates then write to these positions, without the
loader.

Three kinds of storage need further steps: packed modules (`PackedModules`), adapters (`AdapterSlots`), and
tensors that layers derive from their weights (`recompute_derived_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.distributed import device
from megatron_rl.errors import UserError, requirement_error
from megatron_rl.hf.files import read_checkpoint_shapes
from megatron_rl.rollout.engines.vllm import setup
from megatron_rl.shapes.families import BY_MODEL_TYPE
from megatron_rl.shapes.fused_experts import FusedExperts, stored_shapes
from megatron_rl.shapes.layer_weights import is_buffer
from megatron_rl.shapes.lora import PEFT_PREFIX, AdaptedModel
from megatron_rl.types import TensorBox
from megatron_rl.weights.boxes import check_coverage, split_expert_boxes
from megatron_rl.weights.trace import CopyRecorder, make_meta_sources, merge_boxes, trace_copies

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a checkpoint, by its Hugging Face name."""

_ADAPTER_ID = 1
"""vLLM's number of the only adapter; it accepts 1 or more."""


class LiveWeights:
    """Weight store of a vLLM model in this process; see `rollout.engines.base.WeightStore`.

    ``model``: this rank's module inside vLLM.
    ``checkpoint``: Hugging Face folder, or the shapes of its tensors.
    ``reset_cache``: function that drops the prefix cache of older weights and returns whether it succeeded.
    ``loaded``: whether vLLM has read the checkpoint itself.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | Path | Shapes,
        rank: int,
        reset_cache: Callable[[], bool] = lambda: True,
        loaded: bool = False,
    ) -> None:
        self.weights_version = 0 if loaded else -1
        self.needs_weights = not loaded
        self._model = model
        self._checkpoint = checkpoint
        self._rank = rank
        self._reset_cache = reset_cache

        # Without adapter wrappers, parameters have the names that vLLM's loader uses.
        with without_wrappers(model):
            self._packed = PackedModules(model)
            self._parameters = get_model_parameters(model) | self._packed.parameters()
        self._map: WeightMap | None = None

    @classmethod
    def of(cls, llm: Any) -> LiveWeights:
        """Return the weight store of a ``vllm.LLM`` that a user has built in this process.

        Requests in flight survive an update: they continue with the new weights, and their key-value cache
        is recomputed. Raises UserError if `prepare_vllm` was not called before vLLM was imported.
        """
        model = get_vllm_model(llm)
        require_writable(model)
        return cls(
            model,
            llm.llm_engine.model_config.model,
            device.rank(),
            lambda: llm.reset_prefix_cache(reset_running_requests=True),
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of this rank's weights by vLLM's parameter name.

        This is the live storage, except for packed modules; see `PackedModules`.
        """
        return self._parameters

    def boxes(self) -> list[TensorBox]:
        """Return the boxes: regions of Hugging Face tensors, each with its position in ``parameters()``.

        They are traced at the first call. Raises CoverageError unless they fill every element exactly once.
        """
        return list(self.get_map().boxes)

    def get_map(self) -> WeightMap:
        """Return the map of the weights, which is traced at the first call."""
        if self._map is None:
            shapes = self._checkpoint
            if not isinstance(shapes, Mapping):
                shapes = read_checkpoint_shapes(shapes)
            with self._packed.use_loader_parameters(), without_wrappers(self._model):
                self._map = trace_weights(self._model, self._parameters, shapes, self._rank)
        return self._map

    def finish_update(self, version: int) -> None:
        """Set the version of the written weights, and drop the prefix cache of older weights.

        Raises RuntimeError if the cache cannot be dropped because requests are still running.
        """
        # The order matters: packed and derived weights are computed from the written weights, padding
        # included.
        clear_padding(self._parameters, self.get_map().padding)
        self._packed.repack()
        dtype = next(iter(self._parameters.values())).dtype
        recompute_derived_tensors(self._model, dtype)

        if not self._reset_cache():
            raise RuntimeError(f"weights of version {version} are unused: requests are still running")
        self.weights_version = version
        self.needs_weights = False

    def sleep(self) -> None:
        """Do nothing: the user of a ``vllm.LLM`` decides when it sleeps."""

    def wake(self) -> None:
        """Do nothing; see `sleep`."""


def get_vllm_model(llm: Any) -> nn.Module:
    """Return the model's module inside a ``vllm.LLM`` of this process."""
    return get_model_runner(llm).get_model()


def get_model_runner(llm: Any) -> Any:
    """Return vLLM's model runner inside a ``vllm.LLM`` of this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    # Some executors wrap the worker in another object.
    return getattr(worker, "worker", worker).model_runner


def require_writable(model: nn.Module) -> None:
    """Raise UserError if new weights cannot be written in place.

    vLLM's CPU backend normally packs weights into a layout for its kernels, and computes with these copies.
    Writing the parameters would then have no effect.
    """
    if not device.on_host():
        return
    empty_parameters = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    if empty_parameters or not setup.are_weights_writable():
        raise UserError(
            "vLLM has packed this model's weights, so that they cannot be written in place",
            where="the vLLM engine",
            expected="weight_transfer.register() before vllm is imported, or its worker extension",
            got=f"{empty_parameters[0]} is empty" if empty_parameters else "an engine built without it",
        )


@dataclass(frozen=True)
class WeightMap:
    """Positions of a checkpoint's elements in the parameters of one rank of a vLLM model.

    Example:
        An embedding of 100 tokens of width 8, stored with 104 rows. The elements 800 to 831 are padding::

            WeightMap((TensorBox("model.embed_tokens.weight", (0, 0), (100, 8), ...),),
                      padding={"model.embed_tokens.weight": ((800, 832),)})
    """

    boxes: tuple[TensorBox, ...]
    """Regions of checkpoint tensors with their storage. They cover every element once, except ``padding``."""

    padding: Mapping[str, tuple[tuple[int, int], ...]]
    """Elements that no box fills: parameter -> ranges [start, end) of its flattened elements.

    They are vocabulary padding, and biases that are zero on this rank because another rank adds them.
    """


def trace_weights(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    shapes: Shapes,
    rank: int,
) -> WeightMap:
    """Run vLLM's weight loader on meta tensors of a checkpoint, and record the copies that it makes.

    Each recorded copy is a `TensorBox`: a slice of a checkpoint tensor, and its position in a parameter. If
    the embedding is tied, the boxes of ``lm_head.weight`` are replaced by boxes of the embedding.

    Raises CoverageError unless every element of every parameter is written exactly once. Padding need not be
    written: padding of the vocabulary, and biases that vLLM sets to zero on this rank.
    """
    dtype = next(iter(parameters.values())).dtype
    fused_experts = _find_fused_experts(model)
    if fused_experts is not None:
        # vLLM 0.32's loader of gpt-oss reads fields of `quantization_config` even if it is None, as in
        # checkpoints that are not quantised.
        config: Any = model.config
        if getattr(config, "quantization_config", {}) is None:
            del config.quantization_config

    sources = make_meta_sources(stored_shapes(shapes, fused_experts), dtype)
    recorder = CopyRecorder(sources, parameters, rank)
    with torch.no_grad(), recorder:
        model.load_weights(iter(sources.items()))  # pyright: ignore[reportCallIssue]
    boxes = split_expert_boxes(merge_boxes(recorder.boxes), fused_experts)
    boxes = _merge_tied_duplicates(boxes)

    # Find the index of the first padding element of each parameter. A bias that vLLM sets to zero counts as
    # padding from its first element: in a row-parallel layer, only the first rank adds the bias.
    padding_starts = _find_vocabulary_padding(model, parameters)
    padding_starts |= dict.fromkeys(recorder.zeroed, 0)
    padding = check_coverage(boxes, parameters, padding_starts)
    return WeightMap(tuple(boxes), padding)


def _find_fused_experts(model: Any) -> FusedExperts | None:
    """Return the layout in which vLLM's loader expects all experts of a layer in one tensor.

    Returns None if the loader expects one tensor per expert.
    """
    model_config = getattr(model, "config", None)
    model_type = getattr(model_config, "model_type", "")
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        return None
    return family.fused_experts


def _merge_tied_duplicates(boxes: Sequence[TensorBox]) -> list[TensorBox]:
    """Rename the boxes of a tied output layer to the embedding, and merge the duplicates.

    Both names refer to the same storage, so its elements would otherwise count as written twice.
    """
    embedding_name_by_storage = {}
    for box in boxes:
        if box.name.endswith("embed_tokens.weight"):
            embedding_name_by_storage[box.storage] = box.name

    renamed_boxes = []
    for box in boxes:
        if box.name.endswith("lm_head.weight") and box.storage in embedding_name_by_storage:
            box = replace(box, name=embedding_name_by_storage[box.storage])
        renamed_boxes.append(box)
    return merge_boxes(renamed_boxes)


def _find_vocabulary_padding(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Find the index of the first padding element of each vocabulary-parallel parameter, by name."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    first_padding_by_name: dict[str, int] = {}
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if isinstance(module, VocabParallelEmbedding) and name in parameters:
            row_size = parameters[name].stride(0)
            first_padding_by_name[name] = module.shard_indices.num_org_elements * row_size
    return first_padding_by_name


@torch.no_grad()
def clear_padding(parameters: Mapping[str, Tensor], padding: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Set vocabulary padding to zero: no checkpoint fills it, and new storage is uninitialised.

    ``padding`` is `WeightMap.padding`.
    """
    for name, ranges in padding.items():
        for start, end in ranges:
            parameters[name].view(-1)[start:end].zero_()


def get_model_parameters(model: Any) -> dict[str, Tensor]:
    """Return the live weights of a vLLM model by name; a tied weight appears once.

    Tensors that latent attention derives from its weights after loading are omitted: vLLM registers them as
    parameters, but no checkpoint has them.
    """
    from vllm.model_executor.layers.attention import MLAAttention

    derived_names: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, MLAAttention):
            derived_names.update(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))

    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name not in derived_names:
            weights[name] = parameter.data

    # Some weights are buffers in vLLM's model.
    for name, buffer in model.named_buffers():
        if is_buffer(name):
            weights[name] = buffer
    return weights


@torch.no_grad()
def recompute_derived_tensors(model: nn.Module, dtype: torch.dtype) -> None:
    """Recompute the tensors that latent attention derives from its weights."""
    from vllm.model_executor.layers.attention import MLAAttention

    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)


class PackedModules:
    """Modules whose weights vLLM packs: after loading, it converts them to the layout of a kernel.

    vLLM's CPU backend packs experts, so weight updates cannot write the live parameters. Instead, this class
    allocates *loader parameters*: parameters with the shapes that vLLM's weight loader fills before the
    packing. Updates write them, and `repack` packs them into the live parameters. Both stay allocated, so
    experts take twice their memory. On accelerators the engine uses a kernel that reads experts in the
    checkpoint's layout, so no module is packed.
    """

    def __init__(self, model: nn.Module) -> None:
        _require_unquantised(model)
        self._modules: dict[str, nn.Module] = {}
        for path, module in model.named_modules():
            if _is_packed(module):
                self._modules[path] = module
        # Path of the module -> name -> loader parameter.
        self._loader_parameters: dict[str, dict[str, Any]] = {}
        for path, module in self._modules.items():
            self._loader_parameters[path] = _make_loader_parameters(module)

    def parameters(self) -> dict[str, Tensor]:
        """Return the loader parameters of all packed modules, which weight updates write.

        A loader parameter has the shape from before vLLM's packing. `repack` computes the packed parameter
        of the model from it. Both parameters have the same name, which is the key in the returned dict.
        """
        storages = {}
        for path, parameters in self._loader_parameters.items():
            for name, parameter in parameters.items():
                storages[f"{path}.{name}"] = parameter.data
        return storages

    @contextmanager
    def use_loader_parameters(self) -> Iterator[None]:
        """Register the loader parameters in the modules during the context.

        vLLM's weight loader cannot fill packed parameters. The loader parameters have the shapes from before
        the packing (vLLM's ``process_weights_after_loading``).
        """
        packed_parameters: dict[str, dict[str, Any]] = {}
        for path in self._modules:
            packed_parameters[path] = self._swap_parameters(path, self._loader_parameters[path])
        try:
            yield
        finally:
            for path, parameters in packed_parameters.items():
                self._swap_parameters(path, parameters)

    def _swap_parameters(self, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Register parameters in the module at ``path``; return the replaced parameters by name."""
        module: Any = self._modules[path]
        replaced_parameters = {name: module._parameters[name] for name in parameters}
        module._parameters.update(parameters)
        return replaced_parameters

    @torch.no_grad()
    def repack(self) -> None:
        """Pack the loader parameters again, into the live parameters that kernels already use."""
        for path, module in self._modules.items():
            loader_aliases = {
                name: _make_alias(parameter) for name, parameter in self._loader_parameters[path].items()
            }
            live_parameters = self._swap_parameters(path, loader_aliases)

            method: Any = module.quant_method
            method.moe_kernel = None  # vLLM skips the packing of a module that has a kernel
            method.process_weights_after_loading(module)

            # Kernels have references to the live storage: copy the newly packed weights into it.
            for name, packed in self._swap_parameters(path, live_parameters).items():
                live_parameters[name].data.copy_(packed)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Remove vLLM's adapter wrappers within the context: vLLM's loader expects the wrapped layers."""
    manager: Any = getattr(model, "lora_manager", None)
    wrappers: dict[str, Any] = {}
    if manager is not None:
        wrappers = dict(manager.modules)

    # vLLM replaces each layer that has an adapter by a wrapper around it.
    for path, wrapper in wrappers.items():
        _set_submodule(model, path, wrapper.base_layer)
    try:
        yield
    finally:
        for path, wrapper in wrappers.items():
            _set_submodule(model, path, wrapper)


def _set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the submodule of a model at a dotted ``path``."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def _is_packed(module: nn.Module) -> bool:
    """Return whether a module stores its weights in a different order than the checkpoint.

    Only experts can be packed, depending on their kernel. The shapes of the weights do not show whether they
    are packed, since packing may not change the shapes.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(module, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return False
    # Triton's kernels read the checkpoint's layout.
    return method.unquantized_backend.name not in ("TRITON", "BATCHED_TRITON")


def _require_unquantised(model: nn.Module) -> None:
    """Raise UserError if a module of the engine stores quantised weights."""
    unquantised_methods = {
        "UnquantizedLinearMethod",
        "UnquantizedEmbeddingMethod",
        "UnquantizedFusedMoEMethod",
    }
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # Compare names, since the classes are in several modules of vLLM.
        if method is not None and type(method).__name__ not in unquantised_methods:
            raise UserError(
                "a quantised rollout engine cannot take weights from the actor",
                where=f"rollout.vllm, module {path}",
                expected="no quantization",
                got=type(method).__name__,
                fix="remove the quantization from rollout.vllm",
            )


def _make_loader_parameters(module: nn.Module) -> dict[str, Any]:
    """Make the loader parameters of a packed module, by name.

    vLLM has packed the module's parameters in ``process_weights_after_loading``. The loader parameters have
    the shapes from before the packing, which vLLM stores for its own reload of weights.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    info = get_layerwise_info(module)
    loader_parameters: dict[str, Any] = {}
    with info.restore_device:
        for name, meta_tensor in info.restore_metadata[0].items():
            loader_parameters[name] = restore_layer_refs(materialize_meta_tensor(meta_tensor), module)
    return loader_parameters


def _make_alias(parameter: Any) -> Any:
    """Make a parameter that shares the storage of ``parameter``, and whose data vLLM can replace."""
    alias = parameter.data.view_as(parameter)
    alias.__class__ = parameter.__class__
    alias.__dict__ = parameter.__dict__.copy()
    return alias


def make_adapter_arguments(adapters: AdaptedModel, dtype: str) -> dict[str, Any]:
    """Make the engine arguments that reserve storage for an adapter.

    Raises UserError for a dtype that vLLM's adapter kernels do not support.
    """
    # vLLM's Triton kernels refuse float32 (vllm/lora/ops/triton_ops/lora_shrink_op.py). On CPUs, vLLM
    # computes adapters without Triton kernels.
    if dtype == "float32" and not device.on_host():
        raise requirement_error(
            "actor.lora.sync",
            "adapter",
            "model.dtype=bfloat16, since vLLM's adapter kernels do not support float32",
            got="model.dtype=float32",
            fix="set actor.lora.sync=merged",
        )

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": adapters.engine_rank,
        "lora_target_modules": adapters.modules(),
    }


class AdapterSlots:
    """Storage of the actor's adapter in a vLLM engine; see `rollout.engines.base.Storage`.

    The engine has one adapter slot, which every request uses. The slot is written in place. It starts as
    zeros, which have no effect. vLLM loads meta tensors with the names and shapes of PEFT's tensors, so it
    treats the adapter as loaded and never evicts it. vLLM does not scale the written matrices: the adapter is
    their product B A.
    """

    def __init__(self, llm: Any, adapters: AdaptedModel, rank: int) -> None:
        from vllm.lora.request import LoRARequest

        # vLLM does not read the path "memory": `_load_meta_tensors` loads the adapter.
        self.request = LoRARequest("policy", _ADAPTER_ID, "memory")
        self._manager = get_model_runner(llm).lora_manager._adapter_manager
        self._storages = _collect_adapter_storages(self._manager)

        dtype = next(iter(self._storages.values())).dtype
        shapes = {PEFT_PREFIX + name: shape for name, shape in adapters.tensor_shapes().items()}
        # Record where vLLM copies each tensor of the adapter, by loading tensors without data.
        self._boxes = trace_copies(
            lambda sources: self._load_meta_tensors(sources, adapters),
            make_meta_sources(shapes, dtype),
            self._storages,
            rank,
        )

        names_with_slot = {box.name for box in self._boxes}
        missing_names = sorted(shapes.keys() - names_with_slot)
        if missing_names:
            raise UserError(
                "vLLM has no room for an adapter of some layers",
                where="actor.lora.sync",
                expected="a slot for each of PEFT's tensors",
                got=f"none for {len(missing_names)} of {len(shapes)}, {missing_names[0]} among them",
                fix="set actor.lora.sync=merged",
            )

    def _load_meta_tensors(self, sources: Mapping[str, Tensor], adapters: AdaptedModel) -> None:
        """Load an adapter of meta tensors (tensors without data) through vLLM, and activate it.

        ``sources`` maps the names of PEFT's tensors to meta tensors of the same shapes. The copies that vLLM
        makes of them are traced, to find the position of each tensor in vLLM's adapter slot.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        # With alpha = rank, vLLM's scale alpha / rank is 1.
        settings = {**adapters.peft_config(), "lora_alpha": adapters.rank}
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None:
            mapper = mapper.get_rename_mapper()
        adapter = LoRAModel.from_lora_tensors(
            _ADAPTER_ID,
            dict(sources),
            PEFTHelper.from_dict(settings),
            device="meta",
            weights_mapper=mapper,
        )
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(_ADAPTER_ID)

    def boxes(self) -> list[TensorBox]:
        """Return the boxes: regions of PEFT's tensors, each with its position in ``parameters()``."""
        return list(self._boxes)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of the adapter, by vLLM's name of the layer, matrix and slice."""
        return self._storages


def _collect_adapter_storages(manager: Any) -> dict[str, Tensor]:
    """Return the storage of every adapted layer's A and B matrices, named ``LAYER.lora_MATRIX.SLICE``.

    A fused layer has several slices of each matrix. ``manager`` is vLLM's adapter manager.
    """
    storages: dict[str, Tensor] = {}
    for name, module in manager.modules.items():
        for matrix, slices in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked)):
            for index, stacked_slice in enumerate(slices):
                storages[f"{name}.lora_{matrix}.{index}"] = stacked_slice
    return storages
