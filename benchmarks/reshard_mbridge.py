"""Export of a model's weights by mbridge's own code, as in verl's Megatron workers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from megatron_rl.distributed import device


def is_available() -> bool:
    """Return whether mbridge is installed (requirements-mbridge.txt)."""
    return find_spec("mbridge") is not None


def make_exporter(model: Any, load: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that exports ``model``, a dense Qwen2, and passes the tensors to ``load``.

    mbridge reads Megatron's process-global groups. They are created here, with the parallel sizes of the
    model. Collective over the world.
    """
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core import parallel_state

    layout = model.groups.layout
    # initialize_model_parallel creates this buffer, and fails if it exists.
    parallel_state.destroy_global_memory_buffer()
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline, create_gloo_process_groups=False)

    # mbridge has the names of norms in Transformer Engine's layers. The model has Megatron's local layers.
    norms = {
        "_MLP_MAPPING": {
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]
        },
        "_OTHER_MAPPING": {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]},
    }
    tables = {name: getattr(Qwen2Bridge, name, {}) | mapping for name, mapping in norms.items()}
    bridge_class: Any = type("LocalNames", (Qwen2Bridge,), tables)
    with device.megatron_mode():
        bridge = bridge_class(model.hf_config, dtype=next(model.chunks[0].parameters()).dtype)

    def export() -> None:
        with device.megatron_mode():
            load(bridge.export_weights(model.chunks))

    return export
