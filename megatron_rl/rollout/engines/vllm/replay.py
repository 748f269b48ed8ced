"""Per-token records of vLLM that the trainer replays: sampling support and routed experts.

*Support*: the token ids that passed the filters at each draw. The trainer normalises over the same tokens, so
that log-probs of both sides belong to one distribution. *Experts*: the experts that each token was routed to,
so that the trainer routes it the same way.

On accelerators vLLM's newer model runner reports both. The host has only the older runner, so hooks of this
module record them there: a logits processor and a capture function of the routers. A hook finds its request's
record in the request's ``extra_args``.

vLLM's temperature and filters are constant in a request. For requests whose temperature or top-p changes over
tokens, the logits processors of this module apply both in vLLM's place.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.rollout.sampling import (
    apply_temperature_and_filters,
    extract_support_ids,
    has_filters,
    has_schedule,
    is_greedy,
    resolve_schedules,
)
from megatron_rl.rollout.types import GenerationRequest
from megatron_rl.types import SamplingParameters

Support = dict[int, list[int]]
"""Support of the draws of one request: number of tokens sampled before -> token ids."""

_SAMPLING_KEY = "megatron_rl"
"""Key of a request's sampling parameters and support record in its ``extra_args``."""
_EXPERTS_KEY = "megatron_rl_experts"
"""Key of a request's record of experts in its ``extra_args``."""

_EVERY_TOKEN = 2**31 - 1
"""A top-k without effect: larger than any vocabulary, and the largest int32."""


def make_support_arguments() -> dict[str, Any]:
    """Return the engine arguments that requests with filters need, besides `logits_processors`."""
    if device.on_host():
        return {}
    return {"return_sampling_mask": True}


def logits_processors(config: RolloutConfig) -> list[type]:
    """Return the classes of logits processors that an engine needs for filters and schedules over tokens."""
    if device.on_host():
        if config.truncates or config.changes_over_tokens:
            return [_make_host_processor_class()]
    elif config.changes_over_tokens:
        return [make_accelerator_processor_class()]
    return []


def add_filters(parameters: Any, request: GenerationRequest) -> Support | None:
    """Add filters and schedules over tokens to a request's vLLM parameters; return the record of its support.

    Returns None if vLLM reports the support itself, or if vLLM's own sampling is that of the request.
    """
    sampling = request.sampling
    if device.on_host():
        if not has_filters(sampling) and not has_schedule(sampling):
            return None
        # The processor divides by the temperature, and filters.
        support: Support = {}
        parameters.temperature = 1.0
        parameters.extra_args = {_SAMPLING_KEY: (sampling, request.turn_tokens, support)}
        return support

    if has_schedule(sampling):
        parameters.temperature = 1.0
        parameters.top_k = _EVERY_TOKEN
        turn_start = len(request.tokens) - request.turn_tokens
        parameters.extra_args = {_SAMPLING_KEY: (sampling, turn_start)}
        return None

    # With return_sampling_mask vLLM refuses temperature 0, and requests without top-k.
    if is_greedy(sampling):
        parameters.temperature = 1.0
        parameters.top_k = 1
    else:
        parameters.top_p = sampling.top_p
        parameters.min_p = sampling.min_p
        parameters.top_k = sampling.top_k or _EVERY_TOKEN
    return None


def extract_support(
    output: Any,
    support: Support | None,
    request: GenerationRequest,
) -> list[list[int]]:
    """Return the support of each token of a vLLM output, empty for a request without filters."""
    sampling = request.sampling
    if not has_filters(sampling):
        return []
    if support is not None:
        return [support[position] for position in range(len(output.token_ids))]
    if not sampling.changes_over_tokens:
        return output.sampling_mask.token_ids

    # A filter may begin or end within a turn: the other tokens have the full vocabulary.
    supports = []
    for position, token_ids in enumerate(output.sampling_mask.token_ids, start=request.turn_tokens):
        is_filtered = has_filters(resolve_schedules(sampling, position))
        supports.append(token_ids if is_filtered else [])
    return supports


@cache
def _make_host_processor_class() -> type:
    """Return the class of the host's logits processor; it is defined here because vLLM is imported late."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class SamplingProcessor(LogitsProcessor):
        """Logits processor that applies a request's temperature and filters, and records its support."""

        def __init__(
            self,
            vllm_config: Any,
            device: torch.device,
            is_pin_memory: bool,
        ) -> None:
            self._requests: dict[int, _HostRequest] = {}

        # Filters never remove the most likely token, so vLLM may skip them for greedy requests.
        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._requests, batch_update, _make_host_request)

        def apply(self, logits: Tensor) -> Tensor:
            if not self._requests:
                return logits

            requests = self._requests.values()
            rows = torch.tensor(list(self._requests), device=logits.device)
            sampling = [request.sampling_now for request in requests]
            processed = apply_temperature_and_filters(logits[rows], sampling)
            logits[rows] = processed

            masks = processed > -torch.inf
            for mask, parameters, request in zip(masks, sampling, requests, strict=True):
                # A chunked prefill passes here after each chunk; the last one overwrites the entry.
                request.support[len(request.tokens)] = extract_support_ids(mask, parameters)
            return logits

    return SamplingProcessor


class _HostRequest(NamedTuple):
    """Entry of the host's logits processor for one request."""

    sampling: SamplingParameters
    """Sampling parameters of the request."""
    turn_tokens: int
    """Number of tokens that were sampled in the turn before the request."""
    support: Support
    """Record of the support."""
    tokens: list[int]
    """Tokens sampled so far, to which vLLM appends."""

    @property
    def sampling_now(self) -> SamplingParameters:
        """Return the parameters of the token that is sampled next."""
        return resolve_schedules(self.sampling, self.turn_tokens + len(self.tokens))


def _make_host_request(parameters: Any, _: Any, tokens: list[int]) -> _HostRequest | None:
    """Return what the logits processor needs for a new request, or None if vLLM samples it by itself."""
    record = (parameters.extra_args or {}).get(_SAMPLING_KEY)
    if record is None:
        return None
    sampling, turn_tokens, support = record
    return _HostRequest(sampling, turn_tokens, support, tokens)


@cache
def make_accelerator_processor_class() -> type:
    """Return the class of the processor for vLLM's newer model runner, which it uses on accelerators."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    class ScheduleProcessor(LogitsProcessor):
        """Logits processor for temperatures and filters that change over tokens, in place of vLLM's."""

        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            # Slot of a request -> its sampling parameters, and the index of its turn's first token.
            self._requests: dict[int, tuple[SamplingParameters, int]] = {}

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            # Slots are used again, so a request without a schedule removes an entry, too.
            self._requests.pop(req_idx, None)
            record = (sampling_params.extra_args or {}).get(_SAMPLING_KEY)
            if record is None:
                return False
            self._requests[req_idx] = record
            return True

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            # A request has one row, since nothing is drafted, and the bound of its length is then exact.
            lengths = ctx.seq_lens_upper_bound_np.tolist()
            rows: list[int] = []
            sampling: list[SamplingParameters] = []
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                if slot in self._requests:
                    parameters, turn_start = self._requests[slot]
                    rows.append(row)
                    # Within a chunked prefill nothing is sampled, and the position would be negative.
                    sampling.append(resolve_schedules(parameters, max(0, lengths[row] - turn_start)))
            if rows:
                index = torch.tensor(rows, device=logits.device)
                logits[index] = apply_temperature_and_filters(logits[index], sampling)
            return logits

    return ScheduleProcessor


def make_routing_arguments() -> dict[str, Any]:
    """Return the engine arguments that make an engine record the experts of its tokens."""
    if device.on_host():
        # A token with a prefix-cache hit passes through no router.
        return {"enable_prefix_caching": False}
    return {"enable_return_routed_experts": True}


def install_expert_capture(runner: Any) -> None:
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


def extract_experts(output: Any, parameters: Any, request: GenerationRequest) -> Tensor:
    """Return the experts of the tokens of a request and its output: [tokens, layers, k] int16.

    The last token is left out: it was sampled, but never an input of the model.
    """
    count = len(request.tokens) + len(output.token_ids) - 1
    if device.on_host():
        return parameters.extra_args[_EXPERTS_KEY][:count]
    return torch.from_numpy(output.routed_experts.astype("int16"))[:count]
