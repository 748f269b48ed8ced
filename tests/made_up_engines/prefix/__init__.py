"""Complete engine inside the ranks: a transformers model that reads the full prefix for each token.

Every open request gets one token per step, so that an interrupted request has tokens to return.
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
    """Implementation of `rollout.engines.base.make_engine`; see there."""
    if rank not in layout.ranks:
        return None
    return PrefixEngine(model_path, rank, dtype, max_model_len)


class PrefixEngine:
    """Implementation of `rollout.engines.base.Engine`."""

    adapters = None
    kept = ()
    most_rows = 8

    def __init__(self, path: str | Path, rank: int, dtype: str, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.weights_version = -1
        self.needs_weights = True
        self._rank = rank
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        # Request number -> request, sampled tokens and their log-probs.
        self._open: dict[int, tuple[GenerationRequest, list[int], list[float]]] = {}

    @contextmanager
    def sampling(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._open.clear()

    def submit(self, request: GenerationRequest) -> None:
        self._open[request.number] = request, [], []

    @torch.no_grad()
    def step(self) -> list[Completion]:
        completions = []
        for number, (request, tokens, log_probs) in list(self._open.items())[: self.most_rows]:
            # An empty prompt has no logits.
            if not request.tokens:
                completions.append(make_failed_completion(number))
                del self._open[number]
                continue

            token, log_prob = self._draw(request, tokens)
            tokens.append(token)
            log_probs.append(log_prob)

            stopped = token in request.sampling.stop_token_ids
            if stopped or len(tokens) == request.limit:
                reason = FINISH_STOP if stopped else FINISH_LENGTH
                completions.append(Completion(number, tokens, log_probs, reason))
                del self._open[number]
        return completions

    def _draw(self, request: GenerationRequest, tokens: list[int]) -> tuple[int, float]:
        """Sample the next token of a request; return it with its log-prob."""
        logits = self._model(torch.tensor([[*request.tokens, *tokens]])).logits[0, -1].float()
        # Log-probs refer to the temperature of sampling, or to 1 for greedy requests.
        values = (logits / resolve_log_prob_temperature(request.sampling)).log_softmax(0)
        if is_greedy(request.sampling):
            token = int(values.argmax())
        else:
            # The seed depends on the number of tokens, so continued requests sample as uninterrupted ones.
            seed = derive_continuation_seed(request.seed, request.done + len(tokens))
            token = int(values.exp().multinomial(1, generator=torch.Generator().manual_seed(seed)))
        return token, float(values[token])

    def abort(self, number: int) -> None:
        self._open.pop(number, None)

    def interrupt(self) -> list[Completion]:
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

        return [
            TensorBox(
                name,
                (0,) * value.dim(),
                tuple(value.shape),
                self._rank,
                name,
                0,
                tuple(value.stride()),
            )
            for name, value in self.parameters().items()
        ]

    def finish_update(self, version: int) -> None:
        self.weights_version = version
        self.needs_weights = False

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
