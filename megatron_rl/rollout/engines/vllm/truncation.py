"""Truncated sampling in vLLM, with the tokens that its filters left to each draw.

The trainer normalises over these tokens too, so that log-probs of both sides are of one distribution. On
accelerators vLLM's newer model runner reports them; on the host a logits processor of ours filters and notes
them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.rollout.sampling import filtered_logits, filters, is_greedy, truncates
from megatron_rl.types import SamplingParameters

Support = dict[int, list[int]]
"""The token ids left to each position of a response, by the number of tokens before it."""

_KEY = "megatron_rl"
_EVERY_TOKEN = 2**31 - 1


def engine_arguments() -> dict[str, Any]:
    """Return what an engine needs whose requests may truncate."""
    return {"logits_processors": [_processor()]} if device.on_host() else {"return_sampling_mask": True}


def add_filters(parameters: Any, sampling: SamplingParameters) -> Support | None:
    """Have a request of such an engine filtered; return where its support is noted, None if vLLM does."""
    if device.on_host():
        if not truncates(sampling):
            return None
        support: Support = {}
        parameters.extra_args = {_KEY: (sampling, support)}
        return support
    # An engine that reports supports takes no request with temperature 0, and none without top-k.
    if is_greedy(sampling):
        parameters.temperature, parameters.top_k = 1.0, 1
    else:
        parameters.top_p, parameters.min_p = sampling.top_p, sampling.min_p
        parameters.top_k = sampling.top_k or _EVERY_TOKEN
    return None


def support_of(output: Any, noted: Support | None, sampling: SamplingParameters) -> list[list[int]]:
    """Return the support of each token of vLLM's answer, empty for a request that does not truncate."""
    if noted is not None:
        return [noted[position] for position in range(len(output.token_ids))]
    return output.sampling_mask.token_ids if truncates(sampling) else []


@cache
def _processor() -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class TruncatingProcessor(LogitsProcessor):
        """Filter the logits of requests that ask for it, after the temperature, and note what is left."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._requests: dict[int, tuple[SamplingParameters, Support, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self._requests, batch_update, _request)

        def apply(self, logits: Tensor) -> Tensor:
            if not self._requests:
                return logits
            rows = torch.tensor(list(self._requests), device=logits.device)
            sampling = [settings for settings, _, _ in self._requests.values()]
            once = torch.ones(len(rows), device=logits.device)  # the temperature was applied before
            filtered = filtered_logits(logits[rows], once, *filters(sampling, logits.device))
            logits[rows] = filtered
            for left, (_, support, tokens) in zip(
                filtered > -torch.inf, self._requests.values(), strict=True
            ):
                # A prompt that is read in parts comes here after each, before its first token.
                support[len(tokens)] = left.nonzero()[:, 0].tolist()
            return logits

    return TruncatingProcessor


def _request(
    parameters: Any, _: Any, tokens: list[int]
) -> tuple[SamplingParameters, Support, list[int]] | None:
    """Return what the processor keeps of a new request; vLLM appends to ``tokens`` as it samples."""
    noted = (parameters.extra_args or {}).get(_KEY)
    return None if noted is None else (*noted, tokens)
