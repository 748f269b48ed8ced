"""A plain sampler over any model: the reference for the fast engine, and a tool for debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.rollout.sampling import (
    draw,
    filtered_logits,
    filters,
    is_greedy,
    log_prob_temperature,
    truncates,
)
from megatron_rl.rollout.types import Completion, GenerationRequest, failed_completion
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import FINISH_LENGTH, FINISH_STOP, SamplingParameters, TensorBox


class Decoder(Protocol):
    """Feed tokens row by row and keep what the model remembers of them."""

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Read the prompts and return the logits [B, V] after their last tokens."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token per row ([B]) and return the next logits [B, V]."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        ...


class CachingDecoder:
    """Decode with a Hugging Face causal language model and its key-value cache; prompts are left-padded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._mask = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Any = None

    def start(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(len(row) for row in rows)
        tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=self._device)
        self._mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self._device
        )
        self._cache = None
        return self._forward(tokens, (self._mask.cumsum(1) - 1).clamp(min=0))

    def step(self, tokens: Tensor) -> Tensor:
        positions = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        return self._forward(tokens.to(self._device)[:, None], positions)

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._device)
        self._mask = self._mask[index]
        self._cache.batch_select_indices(index)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]


class TorchEngine:
    """Sample with any decoder; log-probs are float32 at the sampling temperature, filters included.

    ``model`` holds the parameters that ``parameters()`` and ``boxes()`` show; without it there is nothing to
    write into. ``tensor_name`` turns their names into those of checkpoints. ``max_model_len`` bounds a row,
    prompt included. ``batch_rows`` rows are decoded together.
    """

    def __init__(
        self,
        decoder: Callable[[], Decoder],
        *,
        model: torch.nn.Module | None = None,
        tensor_name: Callable[[str], str] = str,
        max_model_len: int | None = None,
        batch_rows: int = 256,
        rank: int = 0,
    ) -> None:
        self.weights_version = -1
        self.needs_weights = False
        self.adapters = None
        self._decoder = decoder
        self._model = model
        self._tensor_name = tensor_name
        self.max_model_len = max_model_len
        self._open: dict[int, GenerationRequest] = {}
        self.most_rows = batch_rows
        self._rank = rank

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        **more: Any,
    ) -> TorchEngine:
        """Load the Hugging Face causal language model at ``path``, eager attention, in ``dtype``.

        Where the folder points to a Megatron checkpoint, weights are noise until the trainer's come.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        if (Path(path) / POINTER).is_file():
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **settings)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **settings)
        model.eval().to(device)
        names = read_pretrained(Path(path) / "config.json").family.tensor_name
        return cls(lambda: CachingDecoder(model), model=model, tensor_name=names, **more)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """See `Generator.sampling`."""
        try:
            yield
        finally:
            self._open.clear()

    def submit(self, request: GenerationRequest) -> None:
        """Take a request. With unchanged weights an interrupted row goes on as if it had not been."""
        self._open[request.number] = request

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Answer up to ``batch_rows`` requests, in the order they came."""
        possible: list[GenerationRequest] = []
        answers: list[Completion] = []
        for request in list(self._open.values())[: self.most_rows]:
            del self._open[request.number]
            if request.tokens and request.limit > 0:
                possible.append(request)
            else:
                answers.append(failed_completion(request.number))
        return answers + (_decode(self._decoder(), possible) if possible else [])

    def abort(self, number: int) -> None:
        """Forget an open request."""
        self._open.pop(number, None)

    def interrupt(self) -> list[Completion]:
        """Forget every open request: none has a token before `step` answers it whole."""
        self._open.clear()
        return []

    @property
    def kept(self) -> tuple[int, ...]:
        """Return nothing: there is no cache to go on from."""
        return ()

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the model's weights by transformers' name; biases that balance experts are buffers there."""
        if self._model is None:
            return {}
        buffers = self._model.named_buffers()
        biases = {name: value for name, value in buffers if name.endswith(".e_score_correction_bias")}
        return {name: parameter.data for name, parameter in self._model.named_parameters()} | biases

    def boxes(self) -> list[TensorBox]:
        """Return where each tensor of the checkpoint lies: a parameter, or an expert's part of one."""
        return [
            TensorBox(
                self._tensor_name(name), (0,) * part.dim(), tuple(part.shape), self._rank, storage,
                int(part.storage_offset() - whole.storage_offset()), tuple(part.stride()),
            )
            for storage, whole in self.parameters().items()
            for name, part in _checkpoint_tensors(storage, whole)
        ]  # fmt: skip

    def finish_update(self, version: int) -> None:
        """Set the weights' version; nothing is cached between calls."""
        self.weights_version = version

    def sleep(self) -> None:
        """Do nothing: the model stays where it is."""

    def wake(self) -> None:
        """Do nothing: the model stayed where it was."""

    def close(self) -> None:
        """Forget the model."""
        self._model = None


def _checkpoint_tensors(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what checkpoints hold of a parameter: transformers has all experts of a layer in one."""
    layer, mixture, fused = name.partition("mlp.experts.")
    if not mixture:
        yield name, parameter
        return
    halves = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
    for expert, matrix in enumerate(parameter):
        for half, part in zip(halves, matrix.chunk(len(halves)), strict=True):
            yield f"{layer}mlp.experts.{expert}.{half}.weight", part


def _decode(decoder: Decoder, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Answer all requests; rows that are done leave the batch."""
    tokens: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    support: list[list[list[int]]] = [[] for _ in requests]
    reasons = [FINISH_LENGTH for _ in requests]
    generators = [_stream(request.seed, request.done) for request in requests]
    active = list(range(len(requests)))
    logits = decoder.start([request.tokens for request in requests])
    while active:
        settings, streams = [requests[row].sampling for row in active], [generators[row] for row in active]
        chosen, values, kept = _sample(logits, settings, streams)
        going: list[int] = []
        for index, (token, value) in enumerate(zip(chosen.tolist(), values.tolist(), strict=True)):
            row = active[index]
            tokens[row].append(token)
            log_probs[row].append(value)
            if truncates(requests[row].sampling):
                support[row].append(kept[index].nonzero()[:, 0].tolist())
            if token in requests[row].sampling.stop_token_ids:
                reasons[row] = FINISH_STOP
            elif len(tokens[row]) < requests[row].limit:
                going.append(index)
        if len(going) < len(active):
            active = [active[index] for index in going]
            if active:
                decoder.keep(going)
            chosen = chosen[going]
        if active:
            logits = decoder.step(chosen)
    return [
        Completion(request.number, tokens[row], log_probs[row], reasons[row], support[row])
        for row, request in enumerate(requests)
    ]


def _stream(seed: int, done: int) -> torch.Generator:
    """Return a row's random stream after ``done`` draws."""
    generator = torch.Generator().manual_seed(seed)
    torch.rand(done, generator=generator, dtype=torch.float64)
    return generator


def _sample(
    logits: Tensor, sampling: Sequence[SamplingParameters], generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row of ``logits`` [B, V]: tokens [B], log-probs [B], and what was left [B, V]."""
    target = logits.device
    greedy = torch.tensor([is_greedy(s) for s in sampling], device=target)
    temperature = torch.tensor([log_prob_temperature(s) for s in sampling], device=target)
    filtered = filtered_logits(logits, temperature, *filters(sampling, target))
    chosen = draw(filtered, greedy, generators)
    log_probs = filtered.log_softmax(dim=1).gather(1, chosen[:, None])[:, 0]
    return chosen, log_probs, filtered > -torch.inf
