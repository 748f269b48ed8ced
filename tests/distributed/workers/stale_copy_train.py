"""Run the command line with a vLLM engine that computes with old copies of some weights.

The variable ``STALE`` selects the weights: the packed weights of ``experts``, or the weights of the
attention's ``output``. A sync writes the original weights, so its checksums are right although the copies are
stale.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.rollout.engines.vllm import setup, weights


def leave_experts_packed(_: Any) -> None:
    """Do nothing in place of `PackedModules.repack`, so the packed weights stay old."""


def copy_output_after_loading() -> None:
    """Make the attention output of the first layer compute with a copy of its weight."""
    # vLLM reads its environment while it is imported, so that is prepared first.
    setup.prepare_vllm()
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process_weights = UnquantizedLinearMethod.process_weights_after_loading

    def process_and_copy(method: Any, layer: Any) -> None:
        process_weights(method, layer)
        if not layer.prefix.endswith("layers.0.self_attn.o_proj"):
            return

        weight_copy = layer.weight.detach().clone()

        def multiply_with_copy(hidden: Any, _: Any, bias: Any = None) -> Any:
            return setup.apply_linear(hidden, weight_copy, bias)

        layer.cpu_linear = multiply_with_copy

    setattr(UnquantizedLinearMethod, "process_weights_after_loading", process_and_copy)


if __name__ == "__main__":
    if os.environ["STALE"] == "experts":
        weights.PackedModules.repack = leave_experts_packed
    else:
        copy_output_after_loading()
    sys.exit(main())
