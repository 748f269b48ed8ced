"""Let Megatron's expert layers run where Transformer Engine, or an accelerator, is absent."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

from megatron_rl.parallel import device


def prepare_experts() -> None:
    """Define what Megatron-Core's router and dispatcher leave undefined on this machine. May be repeated."""
    utilities: Any = moe_utils
    if not hasattr(utilities, "te_general_gemm"):
        utilities.te_general_gemm = None  # the router asks whether it is None
    if device.on_host():
        dispatcher: Any = token_dispatcher
        dispatcher.maybe_move_tensor_to_cpu = _on_host


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a host tensor as the dispatcher wants it: Megatron converts only what comes from a device."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
