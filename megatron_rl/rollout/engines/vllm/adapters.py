"""The actor's adapters in a vLLM engine of this process: one slot, written in place, for every request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.rollout.engines.vllm.live import model_runner
from megatron_rl.shapes.lora import PEFT_PREFIX, AdaptedModel
from megatron_rl.types import TensorBox
from megatron_rl.weights.trace import meta_sources, trace_copies

_NUMBER = 1
"""vLLM's number of the only adapter."""


def engine_arguments(adapters: AdaptedModel, dtype: str) -> dict[str, Any]:
    """Return what vLLM must be told to have room for adapters; raises UserError for what its kernels lack."""
    if dtype == "float32" and not device.on_host():
        raise UserError(
            "vLLM's kernels of adapters take no float32 (vllm/lora/ops/triton_ops/lora_shrink_op.py)",
            where="actor.lora.sync",
            expected="model.dtype=bfloat16, or merged",
            got="adapter with model.dtype=float32",
            fix="set actor.lora.sync=merged",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": adapters.engine_rank,
        "lora_target_modules": adapters.modules(),
    }


class AdapterSlots:
    """Say where vLLM keeps each part of PEFT's tensors; they start at zero, and add nothing.

    vLLM's own loader takes stand-ins for them, so that the adapter counts as loaded and stays. Nothing
    multiplies what is written: an adapter adds B A.
    """

    def __init__(self, llm: Any, adapters: AdaptedModel, rank: int) -> None:
        from vllm.lora.request import LoRARequest

        self.request = LoRARequest("policy", _NUMBER, "memory")
        self._manager = model_runner(llm).lora_manager._adapter_manager
        self._storages: dict[str, Tensor] = {
            f"{name}.lora_{kind}.{index}": stacked
            for name, module in self._manager.modules.items()
            for kind, slices in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked))
            for index, stacked in enumerate(slices)
        }
        dtype = next(iter(self._storages.values())).dtype
        shapes = {PEFT_PREFIX + name: shape for name, shape in adapters.tensor_shapes().items()}
        self._boxes = trace_copies(
            lambda sources: self._load(sources, adapters), meta_sources(shapes, dtype), self._storages, rank
        )
        missing = sorted(shapes.keys() - {box.name for box in self._boxes})
        if missing:
            raise UserError(
                "vLLM has no room for an adapter of some layers",
                where="actor.lora.sync",
                expected="a slot for each of PEFT's tensors",
                got=f"none for {len(missing)} of {len(shapes)}, {missing[0]} among them",
                fix="set actor.lora.sync=merged",
            )

    def _load(self, sources: Mapping[str, Tensor], adapters: AdaptedModel) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        settings = {**adapters.peft_config(), "lora_alpha": adapters.rank}
        renamed = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            _NUMBER,
            dict(sources),
            PEFTHelper.from_dict(settings),
            device="meta",
            weights_mapper=None if renamed is None else renamed.get_rename_mapper(),
        )
        self._manager.add_adapter(lora)
        self._manager.activate_adapter(_NUMBER)

    def boxes(self) -> list[TensorBox]:
        """Return where each box of PEFT's tensors lies in this rank's ``parameters()``."""
        return list(self._boxes)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of the adapters by vLLM's name of the layer."""
        return self._storages
