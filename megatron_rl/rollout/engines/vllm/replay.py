"""Per-token records of vLLM that the trainer replays: sampling support and routed experts.

*Support*: the token ids that passed the filters at each draw. The trainer normalises over the same tokens, so
that log-probs of both sides belong to one distribution. *Experts*: the experts that each token was routed to,
so that the trainer routes it the same way.

On accelerators vLLM's newer model runner reports both. The host has only the older runner, so hooks of this
module record them there: a logits processor and a capture function of the routers. A hook finds its request's
record in the request's ``extra_args``.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.rollout.sampling import filtered_logits, filters, is_greedy, truncates
from megatron_rl.rollout.types import GenerationRequest
from megatron_rl.types import SamplingParameters

Support = dict[int, list[int]]
"""Support of the draws of one request: number of tokens sampled before -> token ids."""

_SUPPORT_KEY = "megatron_rl"
"""Key of a request's filters and support record in its ``extra_args``."""
_EXPERTS_KEY = "megatron_rl_experts"
"""Key of a request's record of experts in its ``extra_args``."""

_EVERY_TOKEN = 2**31 - 1
"""A top-k without effect: larger than any vocabulary, and the largest int32."""


def support_arguments() -> dict[str, Any]:
    """Return the engine arguments that requests with filters need."""
    if device.on_host():
        return {"logits_processors": [_truncating_processor()]}
    return {"return_sampling_mask": True}


def add_filters(parameters: Any, sampling: SamplingParameters) -> Support | None:
    """Add the filters to a request's vLLM parameters; return the record of its support.

    Returns None if vLLM reports the support itself, or nothing is filtered.
    """
    if device.on_host():
        if not truncates(sampling):
            return None
        support: Support = {}
        parameters.extra_args = {_SUPPORT_KEY: (sampling, support)}
        return support

    # With return_sampling_mask vLLM refuses temperature 0, and requests without top-k.
    if is_greedy(sampling):
        parameters.temperature = 1.0
        parameters.top_k = 1
    else:
        parameters.top_p = sampling.top_p
        parameters.min_p = sampling.min_p
        parameters.top_k = sampling.top_k or _EVERY_TOKEN
    return None


def support_of(
    output: Any,
    support: Support | None,
    sampling: SamplingParameters,
) -> list[list[int]]:
    """Return the support of each token of a vLLM output, empty for a request without filters."""
    if support is not None:
        return [support[position] for position in range(len(output.token_ids))]
    if truncates(sampling):
        return output.sampling_mask.token_ids
    return []


@cache
def _truncating_processor() -> type:
    """Return the class of the host's logits processor; it is defined here because vLLM is imported late."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class TruncatingProcessor(LogitsProcessor):
        """Logits processor that filters the requests with a support record, and fills the record."""

        def __init__(
            self,
            vllm_config: Any,
            device: torch.device,
            is_pin_memory: bool,
        ) -> None:
            self._requests: dict[int, tuple[SamplingParameters, Support, list[int]]] = {}

        # Filters never remove the most likely token, so vLLM may skip them for greedy requests.
        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._requests, batch_update, _truncating_request)

        def apply(self, logits: Tensor) -> Tensor:
            if not self._requests:
                return logits

            # vLLM has applied the temperature already.
            rows = torch.tensor(list(self._requests), device=logits.device)
            sampling = [request_sampling for request_sampling, _, _ in self._requests.values()]
            temperature = torch.ones(len(rows), device=logits.device)
            filtered = filtered_logits(logits[rows], temperature, *filters(sampling, logits.device))
            logits[rows] = filtered

            masks = filtered > -torch.inf
            for mask, (_, support, tokens) in zip(masks, self._requests.values(), strict=True):
                # A chunked prefill passes here after each chunk; the last one overwrites the entry.
                token_ids = mask.nonzero()[:, 0]
                support[len(tokens)] = token_ids.tolist()
            return logits

    return TruncatingProcessor


def _truncating_request(
    parameters: Any,
    _: Any,
    tokens: list[int],
) -> tuple[SamplingParameters, Support, list[int]] | None:
    """Return the processor's entry for a new request, or None if there is no support record.

    vLLM appends to ``tokens`` as it samples, so its length is the number of tokens sampled so far.
    """
    record = (parameters.extra_args or {}).get(_SUPPORT_KEY)
    if record is None:
        return None
    sampling, support = record
    return sampling, support, tokens


def routing_arguments() -> dict[str, Any]:
    """Return the engine arguments that make an engine record the experts of its tokens."""
    if device.on_host():
        # A token with a prefix-cache hit passes through no router.
        return {"enable_prefix_caching": False}
    return {"enable_return_routed_experts": True}


def capture_experts(runner: Any) -> None:
    """Install the capture function in the routers of a model on the host.

    ``runner`` is vLLM's model runner: it has the requests of the tokens of a step.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    # Each MoE layer has a router of its own, which has the experts of a step but not their requests.
    for module in runner.get_model().modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(_record_experts, runner, module.layer_id))


def _record_experts(runner: Any, layer: int, experts: Tensor) -> None:
    """Copy a layer's ``experts`` [tokens of the step, k] into the records of their requests."""
    batch = runner.input_batch
    bounds = runner.query_start_loc.np
    for index, name in enumerate(batch.req_ids):
        extra_arguments = runner.requests[name].sampling_params.extra_args or {}
        record = extra_arguments.get(_EXPERTS_KEY)
        if record is None:
            continue

        # The request's tokens of this step, and their positions in the request.
        first = int(bounds[index])
        last = int(bounds[index + 1])
        start = int(batch.num_computed_tokens_cpu[index])
        end = start + last - first
        record[start:end, layer] = experts[first:last].to(record.dtype)


def add_expert_record(
    parameters: Any,
    request: GenerationRequest,
    layers: int,
    topk: int,
) -> None:
    """Attach a record of experts to a request's vLLM parameters; accelerators need none."""
    if device.on_host():
        # As long as the request can become; -1 for tokens that are never routed.
        shape = (len(request.tokens) + request.limit, layers, topk)
        record = torch.full(shape, -1, dtype=torch.int16)
        parameters.extra_args = {**(parameters.extra_args or {}), _EXPERTS_KEY: record}


def experts_of(output: Any, parameters: Any, request: GenerationRequest) -> Tensor:
    """Return the experts of the tokens of a request and its output: [tokens, layers, k] int16.

    The last token is left out: it was sampled, but never an input of the model.
    """
    count = len(request.tokens) + len(output.token_ids) - 1
    if device.on_host():
        return parameters.extra_args[_EXPERTS_KEY][:count]
    return torch.from_numpy(output.routed_experts.astype("int16"))[:count]
