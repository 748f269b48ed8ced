"""A plain sampler over any model: the reference for vLLM, and a tool for debugging.

A step decodes a whole batch of requests to its end. Nothing is shared between requests, and nothing remains
after a step, so every completion is a function of its request and the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.interop.megatron_lm.checkpoint import POINTER
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.rollout.sampling import (
    apply_logit_rules,
    apply_temperature_and_filters,
    draw_tokens,
    extract_support_ids,
    has_filters,
    is_greedy,
    resolve_schedules,
)
from megatron_rl.rollout.stopping import StopSearch, StopTextFinder
from megatron_rl.rollout.types import Completion, GenerationRequest, make_failed_completion
from megatron_rl.shapes.fused_experts import FusedExperts, expert_tensors
from megatron_rl.shapes.layer_weights import is_buffer
from megatron_rl.shapes.pretrained import index_has_metadata, read_pretrained
from megatron_rl.types import FINISH_LENGTH, FINISH_STOP, SamplingParameters, TensorBox
from megatron_rl.weights.boxes import view_of


class Decoder(Protocol):
    """Incremental decoder of a batch of B sequences; retains model state such as a key-value cache."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Start the batch with these token ids; return the logits [B, V] after their last tokens."""
        ...

    def append_tokens(self, tokens: Tensor) -> Tensor:
        """Append one token to each sequence ([B]); return the next logits [B, V]."""
        ...

    def select_rows(self, rows: list[int]) -> None:
        """Retain only the sequences with the batch indices ``rows``, in this order."""
        ...


class CachingDecoder:
    """Decoder of a Hugging Face causal language model with a key-value cache; prompts are left-padded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        # [B, padding + tokens so far] int64: 0 for padding.
        self._mask = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Any = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See `Decoder.prefill`."""
        # Padding on the left puts the last tokens of all prompts into one column.
        max_prompt_length = max(len(prompt) for prompt in prompts)
        padded_prompts = []
        mask = []
        for prompt in prompts:
            padding = [0] * (max_prompt_length - len(prompt))
            padded_prompts.append([*padding, *prompt])
            mask.append(padding + [1] * len(prompt))
        tokens = torch.tensor(padded_prompts, device=self._device)
        self._mask = torch.tensor(mask, device=self._device)
        self._cache = None

        # Positions count a sequence's own tokens; padding has position 0 and is masked.
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(tokens, positions)

    def append_tokens(self, tokens: Tensor) -> Tensor:
        """See `Decoder.append_tokens`."""
        positions = self._mask.sum(1, keepdim=True)
        new_column = torch.ones_like(self._mask[:, :1])
        self._mask = torch.cat([self._mask, new_column], dim=1)

        inputs = tokens.to(self._device)[:, None]
        return self._forward(inputs, positions)

    def select_rows(self, rows: list[int]) -> None:
        """See `Decoder.select_rows`."""
        row_indices = torch.tensor(rows, device=self._device)
        self._mask = self._mask[row_indices]
        # Not `batch_select_indices`, which does not select the states of delta nets (in transformers 5.19).
        self._cache.reorder_cache(row_indices)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append ``tokens`` [B, n] to the cache; return the logits [B, V] after each row's last token."""
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
    """Engine that samples with a `Decoder`.

    Log-probs are float32, and computed at the sampling temperature, after the filters.

    ``make_decoder``: function that makes the decoder of one batch.
    ``model``: module with the weights that ``parameters()`` returns, or None for a decoder without weights.
    ``map_tensor_name``: function that maps a parameter's name to its name in checkpoints.
    ``fused_experts``: layout of the parameters that contain all experts of a layer.
    ``max_model_len``: maximum number of tokens of a sequence, prompt included; None for no limit.
    ``batch_rows``: maximum number of sequences that are decoded together as one batch.
    ``stop_finder``: finder of stop texts; required for requests with stop texts.
    """

    def __init__(
        self,
        make_decoder: Callable[[], Decoder],
        *,
        model: torch.nn.Module | None = None,
        map_tensor_name: Callable[[str], str] = str,
        fused_experts: FusedExperts | None = None,
        max_model_len: int | None = None,
        batch_rows: int = 256,
        rank: int = 0,
        stop_finder: StopTextFinder | None = None,
    ) -> None:
        # Attributes of the protocols `Generator` and `WeightStore`, with the names of the protocols. The
        # maximum number of concurrent requests is called `most_rows`. The engine starts with the weights of
        # the decoder's model, so no update is needed before the first request.
        self.weights_version = -1
        self.needs_weights = False
        self.adapters = None
        self.max_model_len = max_model_len
        self.most_rows = batch_rows

        self._make_decoder = make_decoder
        self._model = model
        self._map_tensor_name = map_tensor_name
        self._fused_experts = fused_experts or FusedExperts()
        self._rank = rank
        self._stop_finder = stop_finder
        # `GenerationRequest.number` of an open request -> the request, in the order of submission.
        self._open: dict[int, GenerationRequest] = {}

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> TorchEngine:
        """Load the Hugging Face causal language model at ``path``, with eager attention, in ``dtype``.

        Instead of weights, the folder may contain the path of a Megatron checkpoint. The weights are then
        random until the trainer writes them.
        """
        from transformers import AutoModelForCausalLM

        # Eager attention is the plain implementation, and this engine is the reference for vLLM.
        settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        pretrained = read_pretrained(Path(path) / "config.json")
        # A folder with the path of a Megatron checkpoint has no tensors.
        has_tensors = not (Path(path) / POINTER).is_file()
        # Use `_read_weights` if transformers would not load the stored weights as they are. transformers
        # computes with quantised weights on an accelerator. It also loads all parts of a multimodal model, or
        # an indexer of sparse attention. And it fails on an index without metadata.
        is_loadable = pretrained.loads_as_stored and index_has_metadata(Path(path))
        bypasses_transformers = has_tensors and not is_loadable
        config = read_hf_config(path, for_engine=True)
        if has_tensors and not bypasses_transformers:
            model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, **settings)
        else:
            model = AutoModelForCausalLM.from_config(config, **settings)
        model.eval().to(device)

        # Make a decoder for each step, since its cache belongs to one batch.
        engine = cls(
            lambda: CachingDecoder(model),
            model=model,
            map_tensor_name=pretrained.family.tensor_name,
            fused_experts=pretrained.family.fused_experts,
            stop_finder=StopTextFinder.from_model(path),
            **options,
        )
        if bypasses_transformers:
            engine._read_weights(CheckpointFiles(path))
        return engine

    @torch.no_grad()
    def _read_weights(self, files: CheckpointFiles) -> None:
        """Fill the model with the weights in a checkpoint's files."""
        parameters = self.parameters()
        for box in self.boxes():
            values = files.read(box.name, box.start, box.size)
            view_of(parameters[box.storage], box).copy_(values)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """See `Generator.sampling`. Drops the remaining requests at the end."""
        try:
            yield
        finally:
            self._open.clear()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request for `step`.

        A request may continue the response of an earlier request. If the weights have not changed, the two
        requests sample the same tokens as a single longer request.
        """
        self._open[request.number] = request

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Complete the first ``most_rows`` open requests, in the order of submission, as one batch."""
        valid_requests: list[GenerationRequest] = []
        completions: list[Completion] = []
        next_requests = list(self._open.values())[: self.most_rows]
        for request in next_requests:
            del self._open[request.number]
            if request.tokens and request.limit > 0:
                valid_requests.append(request)
            else:
                completions.append(make_failed_completion(request.number))

        # The batch is empty if all requests are invalid.
        if valid_requests:
            completions += _decode_batch(self._make_decoder(), valid_requests, self._stop_finder)
        return completions

    def abort(self, number: int) -> None:
        """Drop the open request with this number."""
        self._open.pop(number, None)

    def interrupt(self) -> list[Completion]:
        """Drop all queued requests and return no completions: `step` never leaves a request half sampled."""
        self._open.clear()
        return []

    @property
    def kept(self) -> tuple[int, ...]:
        """Return no seeds: no key-value cache remains after a step."""
        return ()

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the model's parameters, and the buffers that are weights, by transformers' name."""
        if self._model is None:
            return {}

        weights: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            weights[name] = parameter.data
        for name, buffer in self._model.named_buffers():
            if is_buffer(name):
                weights[name] = buffer

        return weights

    def boxes(self) -> list[TensorBox]:
        """Return a `TensorBox` for each checkpoint tensor: its location in ``parameters()``.

        A weight update writes each checkpoint tensor to its location. A location is the name of a parameter
        in ``parameters()``, with an offset and strides in this parameter. A checkpoint tensor is usually a
        complete parameter. The checkpoint tensor of one expert is a slice of the parameter that contains all
        experts of its layer.
        """
        boxes = []
        for parameter_name, parameter in self.parameters().items():
            # transformers has all experts of a layer in one parameter.
            locations = expert_tensors(parameter_name, tuple(parameter.shape), self._fused_experts)
            for name, location in locations.items():
                # The view of an expert's slice has the offset and strides of the slice in the parameter.
                view = location.select_part(parameter)
                offset = int(view.storage_offset() - parameter.storage_offset())

                box = TensorBox(
                    self._map_tensor_name(name),
                    (0,) * view.dim(),
                    tuple(view.shape),
                    self._rank,
                    parameter_name,
                    offset,
                    tuple(view.stride()),
                )
                boxes.append(box)
        return boxes

    def finish_update(self, version: int) -> None:
        """Set the version of the weights. No key-value cache remains after a step, so none is dropped."""
        self.weights_version = version

    def sleep(self) -> None:
        """Do nothing: the model's memory stays allocated."""

    def wake(self) -> None:
        """Do nothing; see `sleep`."""

    def close(self) -> None:
        """Release the model."""
        self._model = None


def _decode_batch(
    decoder: Decoder,
    requests: Sequence[GenerationRequest],
    stop_finder: StopTextFinder | None,
) -> list[Completion]:
    """Decode all requests to their end; return the completions in the order of the requests.

    Finished sequences are removed from the batch. ``stop_finder`` may be None if no request has stop texts.
    """
    # Results of each request.
    tokens: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    support: list[list[list[int]]] = [[] for _ in requests]
    finish_reasons = [FINISH_LENGTH for _ in requests]
    generators = [_make_generator(request.seed, request.done) for request in requests]
    searches: list[StopSearch | None] = [None for _ in requests]
    if stop_finder is not None:
        searches = [
            stop_finder.make_search(request.sampling, request.tokens, request.turn_tokens)
            for request in requests
        ]

    # Split each request's tokens into the prompt and the response that earlier requests have sampled.
    prompts: list[Sequence[int]] = []
    partial_responses: list[Sequence[int]] = []
    for request in requests:
        prompt_length = len(request.tokens) - request.done
        prompts.append(request.tokens[:prompt_length])
        partial_responses.append(request.tokens[prompt_length:])

    # Indices of the requests in the batch, in the order of the batch.
    active = list(range(len(requests)))
    logits = decoder.prefill([request.tokens for request in requests])
    while active:
        sampling = [
            resolve_schedules(requests[row].sampling, requests[row].turn_tokens + len(tokens[row]))
            for row in active
        ]
        active_generators = [generators[row] for row in active]
        active_prompts = [prompts[row] for row in active]
        responses = [[*partial_responses[row], *tokens[row]] for row in active]
        logits = apply_logit_rules(logits, sampling, active_prompts, responses)
        sampled, sampled_log_probs, support_masks = _sample_tokens(logits, sampling, active_generators)
        sampled_list = sampled.tolist()
        log_prob_list = sampled_log_probs.tolist()

        # Append each sequence's token; collect the batch indices of unfinished sequences.
        unfinished: list[int] = []
        for index, row in enumerate(active):
            request = requests[row]
            token = sampled_list[index]
            tokens[row].append(token)
            log_probs[row].append(log_prob_list[index])
            if has_filters(request.sampling):
                support[row].append(extract_support_ids(support_masks[index], sampling[index]))

            search = searches[row]
            completes_text = search is not None and search.append_token(token)
            if completes_text or token in request.sampling.stop_token_ids:
                finish_reasons[row] = FINISH_STOP
            elif len(tokens[row]) < request.limit:
                unfinished.append(index)

        # Remove finished sequences from the batch, then decode the next position.
        if len(unfinished) < len(active):
            # `select_rows` expects indices in the current batch.
            active = [active[index] for index in unfinished]
            if active:
                decoder.select_rows(unfinished)
            sampled = sampled[unfinished]
        if active:
            logits = decoder.append_tokens(sampled)

    completions = []
    for row, request in enumerate(requests):
        completion = Completion(
            request.number,
            tokens[row],
            log_probs[row],
            finish_reasons[row],
            support[row],
        )
        completions.append(completion)
    return completions


def _make_generator(seed: int, num_draws: int) -> torch.Generator:
    """Make a sequence's random generator, advanced by ``num_draws`` draws."""
    generator = torch.Generator().manual_seed(seed)
    # One call that draws n numbers advances a CPU generator as much as n calls that draw one number, if the
    # dtype is that of `draw_tokens`.
    torch.rand(num_draws, generator=generator, dtype=torch.float64)
    return generator


def _sample_tokens(
    logits: Tensor,
    sampling: Sequence[SamplingParameters],
    generators: Sequence[torch.Generator],
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row of ``logits`` [B, V].

    ``sampling`` has the temperature and the filters (top-k, top-p and min-p) of each row for this token:
    schedules that change them from token to token must already be resolved, see `resolve_schedules`.

    Returns the tokens [B] int64, their log-probs [B] float32, and the mask [B, V] of the tokens that passed
    the filters.
    """
    greedy_flags = [is_greedy(parameters) for parameters in sampling]
    is_greedy_row = torch.tensor(greedy_flags, device=logits.device)
    filtered_logits = apply_temperature_and_filters(logits, sampling)
    tokens = draw_tokens(filtered_logits, is_greedy_row, generators)

    # Normalise over the tokens that passed the filters: this is the distribution that was sampled from.
    all_log_probs = filtered_logits.log_softmax(dim=1)
    log_probs = all_log_probs.gather(1, tokens[:, None])[:, 0]
    return tokens, log_probs, filtered_logits > -torch.inf
