"""Per-token records of vLLM that the trainer replays: sampling support and routed experts.

*Support*: the ids of the tokens that passed the filters (top-k, top-p, min-p) at each draw. The trainer
normalises over the same tokens, so that trainer and engine compute log-probs of the same distribution.
*Experts*: the experts that each token was routed to, so that the trainer routes the token to the same
experts.

On accelerators vLLM's newer model runner reports both. vLLM's CPU backend has only the older runner. There, a
logits processor of this module records the support, and a function that the routers call records the experts.
Both find the record of a request in the request's ``extra_args``.

vLLM's temperature and filters are constant in a request. If a *schedule* changes the temperature or top-p
from token to token, logits processors of this module apply temperature and filters in vLLM's place.
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
"""Support of each sampled token of a request, by the token's index. For example, ``{0: [7, 9]}`` if only the
token ids 7 and 9 passed the filters when the first token was sampled."""

_SAMPLING_KEY = "megatron_rl"
"""Key of a request's sampling parameters and support record in its ``extra_args``."""
_EXPERTS_KEY = "megatron_rl_experts"
"""Key of a request's record of experts in its ``extra_args``."""

_UNLIMITED_TOP_K = 2**31 - 1
"""A top-k without effect: larger than any vocabulary, and the largest int32."""


def make_sampling_mask_arguments() -> dict[str, Any]:
    """Make the engine arguments that let vLLM return the ids of the tokens that passed the filters.

    Empty on the CPU, where a logits processor of this module records the ids.
    """
    if device.on_host():
        return {}
    return {"return_sampling_mask": True}


def list_logits_processors(config: RolloutConfig) -> list[type]:
    """Return the logits-processor classes that ``config`` needs for its filters and schedules.

    Filters are top-k, top-p and min-p. A schedule changes the temperature or top-p from token to token, which
    vLLM's sampling parameters cannot.
    """
    # vLLM's CPU backend does not report which tokens passed its filters, so a processor applies them.
    if device.on_host():
        if config.truncates or config.changes_over_tokens:
            return [_make_cpu_processor_class()]
        return []

    # On accelerators, vLLM itself applies filters that do not change from token to token.
    if config.changes_over_tokens:
        return [make_accelerator_processor_class()]
    return []


def add_filters(parameters: Any, request: GenerationRequest) -> Support | None:
    """Add the filters and schedules of a request to vLLM's ``parameters`` of the request.

    Filters are top-k, top-p and min-p; a schedule changes the temperature or top-p from token to token.

    On the CPU, returns an empty dict. During sampling, a logits processor adds to it the ids of the tokens
    that pass the filters at each draw. Returns None for a request without filters and schedules. Also returns
    None on accelerators, where vLLM itself reports these ids.
    """
    sampling = request.sampling
    if device.on_host():
        if not has_filters(sampling) and not has_schedule(sampling):
            return None
        # The logits processor applies temperature and filters in vLLM's place.
        support: Support = {}
        parameters.temperature = 1.0
        parameters.extra_args = {_SAMPLING_KEY: (sampling, request.turn_tokens, support)}
        return support

    if has_schedule(sampling):
        parameters.temperature = 1.0
        parameters.top_k = _UNLIMITED_TOP_K
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
        parameters.top_k = sampling.top_k or _UNLIMITED_TOP_K
    return None


def extract_support(
    output: Any,
    support: Support | None,
    request: GenerationRequest,
) -> list[list[int]]:
    """Return, for each sampled token, the ids of the tokens that passed the filters (the sampling support).

    ``support`` is the dict in which the logits processor has stored these ids, see `add_filters`, or None if
    vLLM reports the ids in ``output.sampling_mask``. Returns [] for a request without filters.
    """
    sampling = request.sampling
    if not has_filters(sampling):
        return []
    if support is not None:
        return [support[position] for position in range(len(output.token_ids))]
    if not sampling.changes_over_tokens:
        return output.sampling_mask.token_ids

    # A filter may begin or end within a turn: tokens without a filter have an empty support.
    supports = []
    for position, token_ids in enumerate(output.sampling_mask.token_ids, start=request.turn_tokens):
        is_filtered = has_filters(resolve_schedules(sampling, position))
        supports.append(token_ids if is_filtered else [])
    return supports


@cache
def _make_cpu_processor_class() -> type:
    """Make the class of the logits processor for vLLM's CPU backend. Call it after `prepare_vllm`."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class SamplingProcessor(LogitsProcessor):
        """Logits processor that applies the temperature and the filters of each request.

        It also records the sampling support: for each sampled token, the ids of the tokens that passed the
        filters.
        """

        def __init__(
            self,
            vllm_config: Any,
            device: torch.device,
            is_pin_memory: bool,
        ) -> None:
            # Row of the batch -> its request.
            self._requests: dict[int, _RequestState] = {}

        def is_argmax_invariant(self) -> bool:
            """Return True: filters never remove the most likely token, so greedy requests need no filters."""
            return True

        def update_state(self, batch_update: Any) -> None:
            """Add, remove and move requests as in vLLM's batch."""
            process_dict_updates(self._requests, batch_update, _make_request_state)

        def apply(self, logits: Tensor) -> Tensor:
            """Filter the logits [B, V] of the requests, in place; record which tokens passed the filters."""
            if not self._requests:
                return logits

            requests = self._requests.values()
            rows = torch.tensor(list(self._requests), device=logits.device)
            sampling = [request.next_sampling for request in requests]
            filtered_logits = apply_temperature_and_filters(logits[rows], sampling)
            logits[rows] = filtered_logits

            support_masks = filtered_logits > -torch.inf
            for mask, parameters, request in zip(support_masks, sampling, requests, strict=True):
                # A chunked prefill calls this after each chunk; the last call overwrites the support.
                request.support[len(request.tokens)] = extract_support_ids(mask, parameters)
            return logits

    return SamplingProcessor


class _RequestState(NamedTuple):
    """State of one request in the logits processor for vLLM's CPU backend.

    Example:
        A request that continues a turn of 5 tokens, and for which 1 token has been sampled::

            _RequestState(SamplingParameters(top_k=2), turn_tokens=5, support={0: [7, 9]}, tokens=[9])
    """

    sampling: SamplingParameters
    """Sampling parameters of the request."""
    turn_tokens: int
    """Number of tokens that were sampled in the turn before the request."""
    support: Support
    """Index of a sampled token -> ids of the tokens that passed the filters. The logits processor adds an
    entry for each sampled token."""
    tokens: list[int]
    """Tokens sampled so far for this request, to which vLLM appends."""

    @property
    def next_sampling(self) -> SamplingParameters:
        """Return the sampling parameters of the next token."""
        return resolve_schedules(self.sampling, self.turn_tokens + len(self.tokens))


def _make_request_state(parameters: Any, _: Any, tokens: list[int]) -> _RequestState | None:
    """Make the logits processor's state of a new request.

    Returns None if `add_filters` has added nothing to the request: it has no filters and no schedule.
    ``parameters`` are vLLM's sampling parameters of the request. ``tokens`` is the list of its sampled
    tokens, to which vLLM appends.
    """
    added_values = (parameters.extra_args or {}).get(_SAMPLING_KEY)
    if added_values is None:
        return None
    sampling, turn_tokens, support = added_values
    return _RequestState(sampling, turn_tokens, support, tokens)


@cache
def make_accelerator_processor_class() -> type:
    """Make the class of the logits processor for requests with a schedule, on accelerators.

    A schedule changes the temperature or top-p from token to token. On accelerators, vLLM uses its newer
    model runner, which has its own interface of logits processors.
    """
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    class ScheduleProcessor(LogitsProcessor):
        """Logits processor that applies temperature and filters to requests with a schedule.

        A schedule changes the temperature or top-p from token to token.
        """

        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            # Slot of a request -> its sampling parameters, and the index of its turn's first token.
            self._requests: dict[int, tuple[SamplingParameters, int]] = {}

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            """Store the sampling parameters of a request with a schedule, by the request's slot ``req_idx``.

            Returns whether the request has a schedule.
            """
            # Slots are reused: a request without a schedule must remove the parameters of an earlier request.
            self._requests.pop(req_idx, None)
            record = (sampling_params.extra_args or {}).get(_SAMPLING_KEY)
            if record is None:
                return False
            self._requests[req_idx] = record
            return True

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            """Apply the temperature and the filters of each request's next token to its logits, in place.

            Skips requests whose temperature and top-p do not change from token to token: vLLM itself applies
            them.
            """
            # Without speculative decoding each request has one row, and vLLM's bound of its length is exact.
            lengths = ctx.seq_lens_upper_bound_np.tolist()
            rows: list[int] = []
            sampling: list[SamplingParameters] = []
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                if slot in self._requests:
                    parameters, turn_start = self._requests[slot]
                    rows.append(row)
                    # Within a chunked prefill the position is negative, but no token is sampled.
                    position = max(0, lengths[row] - turn_start)
                    sampling.append(resolve_schedules(parameters, position))
            if rows:
                row_indices = torch.tensor(rows, device=logits.device)
                logits[row_indices] = apply_temperature_and_filters(logits[row_indices], sampling)
            return logits

    return ScheduleProcessor


def make_routing_arguments() -> dict[str, Any]:
    """Make the engine arguments for routing replay, which needs the experts of each token."""
    if device.on_host():
        # A token with a prefix-cache hit is not routed again, so its experts would not be recorded.
        return {"enable_prefix_caching": False}
    return {"enable_return_routed_experts": True}


def install_expert_capture(runner: Any) -> None:
    """Record the experts to which the routers of a model send each token, on vLLM's CPU backend.

    ``runner`` is vLLM's model runner, which has the model and the requests of each step.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    # Each MoE layer has a router, which calls the function with the experts of all tokens of a step.
    for module in runner.get_model().modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(_record_experts, runner, module.layer_id))


def _record_experts(runner: Any, layer: int, experts: Tensor) -> None:
    """Copy a layer's ``experts`` [tokens of the step, k] into the expert records of the step's requests.

    ``runner`` is vLLM's model runner, and ``layer`` the index of the layer.
    """
    batch = runner.input_batch
    step_bounds = runner.query_start_loc.np
    for index, request_id in enumerate(batch.req_ids):
        extra_arguments = runner.requests[request_id].sampling_params.extra_args or {}
        expert_record = extra_arguments.get(_EXPERTS_KEY)
        if expert_record is None:
            continue

        # The request's tokens of this step have the indices `step_start` to `step_end` among the step's
        # tokens, and `start` to `end` in the request.
        step_start = int(step_bounds[index])
        step_end = int(step_bounds[index + 1])
        start = int(batch.num_computed_tokens_cpu[index])
        end = start + step_end - step_start
        expert_record[start:end, layer] = experts[step_start:step_end].to(expert_record.dtype)


def add_expert_record(
    parameters: Any,
    request: GenerationRequest,
    layers: int,
    experts_per_token: int,
) -> None:
    """Attach an empty expert record to a request's vLLM parameters; do nothing on accelerators."""
    if device.on_host():
        # The record has room for all tokens of the request; -1 marks tokens that are never routed.
        max_tokens = len(request.tokens) + request.limit
        expert_record = torch.full((max_tokens, layers, experts_per_token), -1, dtype=torch.int16)
        parameters.extra_args = {**(parameters.extra_args or {}), _EXPERTS_KEY: expert_record}


def extract_experts(output: Any, parameters: Any, request: GenerationRequest) -> Tensor:
    """Return the experts of the request's tokens and the sampled tokens: [tokens, layers, k] int16.

    The last sampled token is omitted: it was never an input of the model, so it has no experts.
    """
    num_routed = len(request.tokens) + len(output.token_ids) - 1
    if device.on_host():
        return parameters.extra_args[_EXPERTS_KEY][:num_routed]
    return torch.from_numpy(output.routed_experts.astype("int16"))[:num_routed]
