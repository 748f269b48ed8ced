"""Logits processors that ban repeated n-grams (`no_repeat_ngram_size`), a rule that vLLM lacks.

vLLM has two model runners with different interfaces, so there are two classes of logits processors. A
processor reads the n-gram size of a request from the request's ``extra_args``. The other logit rules (biases,
minimum lengths and penalties) are applied by vLLM itself, see `rollout.sampling`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import device
from megatron_rl.rollout.sampling import ban_repeated_ngrams
from megatron_rl.rollout.types import GenerationRequest

_SIZE_KEY = "megatron_rl_ngram_size"
"""Key of a request's `no_repeat_ngram_size` in its ``extra_args``."""


def list_logits_processors() -> list[type]:
    """Return the logits-processor classes with which an engine bans repeated n-grams."""
    if device.on_host():
        return [make_cpu_processor_class()]
    return [make_accelerator_processor_class()]


def add_ngram_size(parameters: Any, request: GenerationRequest) -> None:
    """Add ``no_repeat_ngram_size`` of a request to vLLM's ``parameters`` of the request.

    The logits processor of this module reads it.
    """
    ngram_size = request.sampling.no_repeat_ngram_size
    if ngram_size:
        parameters.extra_args = {**(parameters.extra_args or {}), _SIZE_KEY: ngram_size}


def _get_ngram_size(parameters: Any) -> int:
    """Return ``no_repeat_ngram_size`` of a request: the size of the n-grams that are banned from repetition.

    The size is 0 for a request without such a ban.

    ``parameters`` are vLLM's sampling parameters of the request.
    """
    return (parameters.extra_args or {}).get(_SIZE_KEY, 0)


@cache
def make_cpu_processor_class() -> type:
    """Make the class of the logits processor that bans repeated n-grams on vLLM's CPU backend.

    Call it after `prepare_vllm`.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class NgramProcessor(LogitsProcessor):
        """Logits processor that bans repeated n-grams, before vLLM's penalties and temperature."""

        def __init__(
            self,
            vllm_config: Any,
            device: torch.device,
            is_pin_memory: bool,
        ) -> None:
            # Row of the batch -> (n-gram size, prompt tokens, sampled tokens) of its request.
            self._requests: dict[int, tuple[int, list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            """Return False: a ban may remove the most likely token, so it also applies to greedy requests."""
            return False

        def update_state(self, batch_update: Any) -> None:
            """Add, remove and move requests as in vLLM's batch."""
            process_dict_updates(self._requests, batch_update, _make_request_state)

        def apply(self, logits: Tensor) -> Tensor:
            """Ban repeated n-grams from the logits [B, V], in place."""
            for row, (ngram_size, prompt, output) in self._requests.items():
                tokens = torch.tensor([*prompt, *output], device=logits.device)
                ban_repeated_ngrams(logits[row], tokens, ngram_size)
            return logits

    return NgramProcessor


def _make_request_state(
    parameters: Any,
    prompt: list[int] | None,
    output: list[int],
) -> tuple[int, list[int], list[int]] | None:
    """Make the logits processor's state of a new request: (n-gram size, prompt, output).

    The n-gram size is ``no_repeat_ngram_size`` of the request. Returns None for a request without it, in
    which n-grams are not banned. ``parameters`` are vLLM's sampling parameters. ``output`` are the sampled
    tokens, to which vLLM appends.
    """
    ngram_size = _get_ngram_size(parameters)
    if not ngram_size:
        return None
    assert prompt is not None, "requests are token ids, not embeddings"
    return ngram_size, prompt, output


@cache
def make_accelerator_processor_class() -> type:
    """Make the class of the logits processor for vLLM's newer model runner, which accelerators use."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    class NgramProcessor(LogitsProcessor):
        """Logits processor that bans repeated n-grams, between vLLM's penalties and its temperature."""

        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            # [slots, longest row] tokens of each request, on the device.
            self._tokens = req_states.all_token_ids.gpu
            # Slot of a request -> size of the n-grams that it must not repeat.
            self._ngram_sizes: dict[int, int] = {}

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            """Store ``no_repeat_ngram_size`` of the request in slot ``req_idx``.

            Returns whether the request has such a size, so that the processor must be applied to it.
            """
            # Slots are reused: a request without a size must overwrite the size of an earlier request by 0.
            self._ngram_sizes[req_idx] = _get_ngram_size(sampling_params)
            return self._ngram_sizes[req_idx] > 0

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            """Ban repeated n-grams from the logits [B, V], in place."""
            # Without speculative decoding each request has one row, and vLLM's bound of its length is exact.
            lengths = ctx.seq_lens_upper_bound_np.tolist()
            for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
                ngram_size = self._ngram_sizes.get(slot, 0)
                if ngram_size:
                    ban_repeated_ngrams(logits[row], self._tokens[slot, : lengths[row]], ngram_size)
            return logits

    return NgramProcessor
