"""Made-up engine `prefix`: a transformers model on the rank itself, without a key-value cache.

Each step samples one token for every open request, so that an interrupted request has tokens to return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.rollout.sampling import (
    derive_continuation_seed,
    is_greedy,
    resolve_log_prob_temperature,
)
from megatron_rl.rollout.types import (
    Completion,
    GenerationRequest,
    make_failed_completion,
)
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import FINISH_LENGTH, FINISH_STOP, TensorBox


def make_engine(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    layout: ParallelLayout,
    rank: int,
    dtype: str,
    max_model_len: int,
    **_: Any,
) -> PrefixEngine | None:
    """Return the engine of this rank, or None outside the layout; see `rollout.engines.base.make_engine`."""
    if rank not in layout.ranks:
        return None
    return PrefixEngine(model_path, rank, dtype, max_model_len)


class PrefixEngine:
    """Engine of one rank: an implementation of `rollout.engines.base.Engine`."""

    # The methods below have their contracts in that protocol. This engine has no adapters, and no
    # sequence keeps a cache from one round to the next.
    adapters = None
    kept = ()
    most_rows = 8

    def __init__(self, path: str | Path, rank: int, dtype: str, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        # The first sync replaces the loaded weights; the engine must not sample before it.
        self.weights_version = -1
        self.needs_weights = True
        self._rank = rank

        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
        )
        self._model = model.eval()

        # Request number -> request, sampled tokens and their log-probs.
        self._open: dict[int, tuple[GenerationRequest, list[int], list[float]]] = {}

    @contextmanager
    def sampling(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._open.clear()

    def submit(self, request: GenerationRequest) -> None:
        self._open[request.number] = (request, [], [])

    @torch.no_grad()
    def step(self) -> list[Completion]:
        completions = []
        running = list(self._open.items())[: self.most_rows]
        for number, (request, tokens, log_probs) in running:
            # An empty prompt has no logits.
            if not request.tokens:
                completions.append(make_failed_completion(number))
                del self._open[number]
                continue

            token, log_prob = self._sample(request, tokens)
            tokens.append(token)
            log_probs.append(log_prob)

            # A stop token at the length limit counts as a stop.
            if token in request.sampling.stop_token_ids:
                finish_reason = FINISH_STOP
            elif len(tokens) == request.limit:
                finish_reason = FINISH_LENGTH
            else:
                continue

            completions.append(Completion(number, tokens, log_probs, finish_reason))
            del self._open[number]
        return completions

    def _sample(self, request: GenerationRequest, tokens: list[int]) -> tuple[int, float]:
        """Sample the next token of a request; return it with its log-prob."""
        prefix = torch.tensor([[*request.tokens, *tokens]])
        logits = self._model(prefix).logits[0, -1].float()

        # Log-probs refer to the temperature of sampling, or to 1 for greedy requests.
        temperature = resolve_log_prob_temperature(request.sampling)
        log_probs = (logits / temperature).log_softmax(0)
        if is_greedy(request.sampling):
            token = int(log_probs.argmax())
        else:
            # The seed depends on the number of tokens, so continued requests sample as uninterrupted ones.
            num_response_tokens = request.done + len(tokens)
            seed = derive_continuation_seed(request.seed, num_response_tokens)
            generator = torch.Generator().manual_seed(seed)
            token = int(log_probs.exp().multinomial(1, generator=generator))
        return token, float(log_probs[token])

    def abort(self, number: int) -> None:
        self._open.pop(number, None)

    def interrupt(self) -> list[Completion]:
        # Requests without a token are dropped: they are submitted again unchanged.
        completions = [
            Completion(number, tokens, log_probs, FINISH_LENGTH)
            for number, (_, tokens, log_probs) in self._open.items()
            if tokens
        ]
        self._open.clear()
        return completions

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    def boxes(self) -> list[TensorBox]:
        # Each rank has the whole model, so a box is a whole parameter under its Hugging Face name.
        boxes = []
        for name, parameter in self.parameters().items():
            start = (0,) * parameter.dim()
            shape = tuple(parameter.shape)
            strides = tuple(parameter.stride())
            boxes.append(TensorBox(name, start, shape, self._rank, name, 0, strides))
        return boxes

    def finish_update(self, version: int) -> None:
        self.weights_version = version
        self.needs_weights = False

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
