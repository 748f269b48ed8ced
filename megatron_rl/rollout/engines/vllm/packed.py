"""Modules whose weights vLLM rewrites after loading: give them a raw copy to write into, and pack it anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.errors import UserError


class PackedModules:
    """Hold raw storage for every packed module of a vLLM model, by parameter name.

    Experts on the host are packed into a layout of the same shape that only vLLM's kernel reads, so
    their live storage cannot be written. Their raw copy stays allocated: twice the experts' memory.
    On accelerators the default kernel of this project reads experts as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_quantised(model)
        self._modules = {path: module for path, module in model.named_modules() if _is_packed(module)}
        self._raw = {path: _raw_parameters(module) for path, module in self._modules.items()}

    def parameters(self) -> dict[str, Tensor]:
        """Return the raw storage of the packed parameters, by their names in the model."""
        return {f"{path}.{name}": raw.data for path, raws in self._raw.items() for name, raw in raws.items()}

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Let the modules show their raw parameters, as vLLM's loader expects them."""
        packed = {path: self._show(path, self._raw[path]) for path in self._modules}
        try:
            yield
        finally:
            for path, parameters in packed.items():
                self._show(path, parameters)

    def _show(self, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Put parameters into a module and return those they replace."""
        module: Any = self._modules[path]
        replaced = {name: module._parameters[name] for name in parameters}
        module._parameters.update(parameters)
        return replaced

    @torch.no_grad()
    def pack(self) -> None:
        """Rewrite the packed weights from their raw copies, into the storage that kernels already use."""
        for path, module in self._modules.items():
            kept = self._show(path, {name: _same_storage(raw) for name, raw in self._raw[path].items()})
            method: Any = module.quant_method
            method.moe_kernel = None  # with a kernel in place vLLM would skip the packing
            method.process_weights_after_loading(module)
            for name, fresh in self._show(path, kept).items():
                kept[name].data.copy_(fresh)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Have a vLLM model's layers stand where its loader expects them, no layer of adapters around them."""
    manager: Any = getattr(model, "lora_manager", None)
    wrappers: dict[str, Any] = {} if manager is None else dict(manager.modules)
    for path, wrapper in wrappers.items():
        _put(model, path, wrapper.base_layer)
    try:
        yield
    finally:
        for path, wrapper in wrappers.items():
            _put(model, path, wrapper)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


@torch.no_grad()
def refresh_derived(model: nn.Module, dtype: torch.dtype) -> None:
    """Recompute what attention layers derived from their weights when they were loaded."""
    from vllm.model_executor.layers.attention import MLAAttention

    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)


def _is_packed(module: nn.Module) -> bool:
    """Say whether a module's weights are not the checkpoint's numbers in the checkpoint's order.

    Shapes do not tell: packing may keep them. Only experts are packed; which way is their kernel's choice.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(module, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return False
    return method.unquantized_backend.name not in ("TRITON", "BATCHED_TRITON")


def _refuse_quantised(model: nn.Module) -> None:
    """Raise UserError where a module stores anything but the checkpoint's own numbers."""
    plain = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in plain:
            raise UserError(
                "a quantised rollout engine cannot take weights from the actor",
                where=f"rollout.vllm, module {path}",
                expected="no quantization",
                got=type(method).__name__,
                fix="remove the quantization from rollout.vllm and from the checkpoint's config.json",
            )


def _raw_parameters(module: nn.Module) -> dict[str, Any]:
    """Make fresh parameters in the format that vLLM recorded before it packed the module."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    info = get_layerwise_info(module)
    with info.restore_device:
        return {
            name: restore_layer_refs(materialize_meta_tensor(recorded), module)
            for name, recorded in info.restore_metadata[0].items()
        }


def _same_storage(parameter: Any) -> Any:
    """Return another parameter object on the same storage, which vLLM may replace or rebind."""
    other = parameter.data.view_as(parameter)
    other.__class__ = parameter.__class__
    other.__dict__ = parameter.__dict__.copy()
    return other
