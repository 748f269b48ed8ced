"""Run the command line with a vLLM engine that computes with old copies of some weights.

``STALE`` names them: the packed weights of ``experts``, or the weights of the attention's ``output``. A sync
writes the weights that they were copied from, so its checksums are right.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.rollout.engines.vllm import setup, weights


def leave_experts_packed(_: Any) -> None:
    """Do not pack the experts' raw weights again."""


def copy_output_after_loading() -> None:
    """Make the attention output of the first layer compute with a copy of its weight."""
    setup.prepare_vllm()
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    store = UnquantizedLinearMethod.process_weights_after_loading

    def store_and_copy(method: Any, layer: Any) -> None:
        store(method, layer)
        if layer.prefix.endswith("layers.0.self_attn.o_proj"):
            copy = layer.weight.detach().clone()
            layer.cpu_linear = lambda values, _, bias=None: setup.apply_linear(values, copy, bias)

    setattr(UnquantizedLinearMethod, "process_weights_after_loading", store_and_copy)


if __name__ == "__main__":
    if os.environ["STALE"] == "experts":
        weights.PackedModules.repack = leave_experts_packed
    else:
        copy_output_after_loading()
    sys.exit(main())
