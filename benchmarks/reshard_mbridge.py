"""Export by mbridge's own code from a model of ours, as verl's Megatron workers export."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from megatron_rl.distributed import device


def available() -> bool:
    """Return whether mbridge is installed (requirements-mbridge.txt)."""
    return find_spec("mbridge") is not None


def exporter(model: Any, load: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that exports ``model``, a dense Qwen2, tensor by tensor into ``load_weights``.

    mbridge reads Megatron's process-global groups, which are made here with the sizes of the model's own.
    Collective over the world.
    """
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core import parallel_state

    layout = model.groups.layout
    # initialize_model_parallel makes this buffer, too, and refuses a second one.
    parallel_state.destroy_global_memory_buffer()
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, create_gloo_process_groups=False)

    # mbridge names the norms of Transformer Engine's layers; these are Megatron's local ones.
    norms = {
        "_MLP_MAPPING": {
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]
        },
        "_OTHER_MAPPING": {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]},
    }
    tables = {name: getattr(Qwen2Bridge, name, {}) | mapping for name, mapping in norms.items()}
    local: Any = type("LocalNames", (Qwen2Bridge,), tables)
    with device.megatron_mode():
        bridge = local(model.hf_config, dtype=next(model.chunks[0].parameters()).dtype)

    def export() -> None:
        with device.megatron_mode():
            load(bridge.export_weights(model.chunks))

    return export
