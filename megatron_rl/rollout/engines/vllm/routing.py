"""The experts that vLLM sent each token to, so that the trainer can send it to the same.

On accelerators vLLM's newer model runner reports them; on the host, which only has the older one, a function
that its routers call notes them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.rollout.types import GenerationRequest

_KEY = "megatron_rl_experts"


def engine_arguments() -> dict[str, Any]:
    """Return what an engine needs that tells the experts of its tokens."""
    if device.on_host():
        # A token that is found in the cache goes through no router.
        return {"enable_prefix_caching": False}
    return {"enable_return_routed_experts": True}


def listen(runner: Any) -> None:
    """Have the routers of a host's model note the experts of requests that ask.

    ``runner`` is vLLM's model runner, which knows whose tokens a step has.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in runner.get_model().modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(_note, runner, module.layer_id))


def _note(runner: Any, layer: int, experts: Tensor) -> None:
    """Write a layer's ``experts`` [tokens of the step, k] where their requests keep them."""
    batch, first = runner.input_batch, 0
    bounds = runner.query_start_loc.np
    for place, name in enumerate(batch.req_ids):
        noted = (runner.requests[name].sampling_params.extra_args or {}).get(_KEY)
        begin, first, last = int(batch.num_computed_tokens_cpu[place]), int(bounds[place]), bounds[place + 1]
        if noted is not None:
            noted[begin : begin + int(last) - first, layer] = experts[first : int(last)].to(noted.dtype)


def ask(parameters: Any, request: GenerationRequest, layers: int, topk: int) -> None:
    """Have the experts of a request's tokens noted; an accelerator does so for all."""
    if device.on_host():
        shape = (len(request.tokens) + request.limit, layers, topk)
        noted = torch.full(shape, -1, dtype=torch.int16)
        parameters.extra_args = {**(parameters.extra_args or {}), _KEY: noted}


def experts_of(output: Any, parameters: Any, request: GenerationRequest) -> Tensor:
    """Return the experts [tokens, layers, k] of all tokens but the last, of a request and vLLM's answer."""
    count = len(request.tokens) + len(output.token_ids) - 1
    if device.on_host():
        return parameters.extra_args[_KEY][:count]
    return torch.from_numpy(output.routed_experts.astype("int16"))[:count]
