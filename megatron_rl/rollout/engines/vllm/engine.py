"""vLLM as generation engine inside the training processes, its weights written in place.

Each request of the scheduler is one request of vLLM, unless the engine *retains* it: an interrupted request
can stay in vLLM during a weight update (`rollout.on_update: keep`), and the scheduler's next request then
continues it. So an open request in vLLM corresponds to two requests of the scheduler: the original request,
which vLLM received, and the current request, for the tokens that earlier completions have not returned.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.check.engine.arguments import (
    check_engine_arguments,
    chunked_prefill_errors,
    cpu_engine_arguments,
    sampling_arguments,
)
from megatron_rl.config.sections.rollout import KEEP, RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.rollout.engines.vllm import replay, rules, setup, weights
from megatron_rl.rollout.engines.vllm.weights import (
    AdapterSlots,
    LiveWeights,
    get_model_runner,
    get_vllm_model,
)
from megatron_rl.rollout.sampling import (
    derive_continuation_seed,
    has_schedule,
    make_vllm_filters,
    make_vllm_parameters,
    map_vllm_finish_reason,
)
from megatron_rl.rollout.stopping import StopSearch, StopTextFinder, cut_stopped_completion
from megatron_rl.rollout.types import Completion, GenerationRequest, make_failed_completion
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.shapes.pretrained import PretrainedModel, read_pretrained
from megatron_rl.types import FINISH_FAILED, TensorBox


@dataclass
class _OpenRequest:
    """Request in vLLM that is open, or retained while weights are updated.

    Example:
        A request for 16 tokens was interrupted after 4 tokens, which were returned. ``original`` asks for 16
        tokens after the prompt, and ``current`` for 12 tokens after the prompt and these 4 tokens.
    """

    original: GenerationRequest
    """The scheduler's request as vLLM received it."""

    parameters: Any
    """vLLM's sampling parameters of the request, which may contain its expert record."""

    support: replay.Support | None
    """Ids of the tokens that passed the filters (such as top-p) at each draw, recorded by a logits processor.
    None if vLLM itself reports them, or if the request has no filters."""

    current: GenerationRequest
    """The scheduler's last request for the sequence; its tokens include all returned tokens."""

    search: StopSearch | None
    """Search for stop texts in the sampled tokens; None without stop texts, and after finding a stop text."""

    num_searched: int = 0
    """Number of vLLM's sampled tokens that were searched, up to the end of a stop text if one was found."""

    is_stopped: bool = False
    """Whether a stop text is complete."""

    @property
    def num_returned(self) -> int:
        """Return the number of sampled tokens that earlier completions have returned."""
        return len(self.current.tokens) - len(self.original.tokens)

    def completes_stop_text(self, tokens: Sequence[int]) -> bool:
        """Search the new tokens for a stop text; return whether this or an earlier call has found one.

        ``tokens`` are all sampled tokens of the vLLM request. Tokens that an earlier call has searched are
        skipped, and no tokens are searched after a stop text.
        """
        if self.search is None:
            return self.is_stopped

        while self.num_searched < len(tokens):
            token = tokens[self.num_searched]
            self.num_searched += 1
            if self.search.append_token(token):
                self.search = None
                self.is_stopped = True
                break
        return self.is_stopped


class VllmEngine:
    """vLLM engine on one rank of a replica.

    ``model_path``: Hugging Face folder.
    ``config``: its ``vllm`` section is passed to vLLM as engine arguments.
    ``layout``: layout of the replicas. Each replica consists of ``layout.tensor`` successive ranks of
        ``layout.ranks``.
    ``load``: whether vLLM reads the checkpoint. Otherwise the weights are random, and ``needs_weights`` is
        true.
    ``shapes``: shapes of the checkpoint's tensors; None reads them from the headers of its files.
    ``sleep_level``: vLLM's level of sleep. Level 2 drops the weights, which the next update must then write
        completely. Level 1 moves them to host memory.
    ``routing_shape``: (layers, experts per token) of the model, if completions contain the experts of each
        token, else None.
    ``adapters``: adapter with separate storage, which every request uses, or None. With an adapter the base
        weights are never updated again, so the engine always sleeps at level 1.

    The constructor is collective over ``layout.ranks``. If these ranks are not the whole world, every rank of
    the world must call ``create_layout_groups(layout)`` first. Build the engine before anything else imports
    vllm.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: RolloutConfig,
        *,
        layout: ParallelLayout,
        rank: int,
        dtype: str = "bfloat16",
        seed: int = 1,
        max_model_len: int,
        load: bool = False,
        shapes: weights.Shapes | None = None,
        sleep_level: int = 2,
        routing_shape: tuple[int, int] | None = None,
        adapters: AdaptedModel | None = None,
    ) -> None:
        # Index of the replica in the layout.
        self.replica = layout.coordinates(rank).data
        self.max_model_len = max_model_len
        self._path = Path(model_path)
        self._stop_finder = StopTextFinder.from_model(model_path)

        self._sleep_level = sleep_level if adapters is None else 1
        # vLLM's tags of the memory that it has released: "weights" and "kv_cache".
        self._sleeping_tags: set[str] = set()

        # Whether completions contain the ids of the tokens that passed the filters (top-k, top-p, min-p).
        self._records_sampling_mask = config.truncates
        self._routing_shape = routing_shape
        self._retains_requests = config.on_update == KEEP

        # vLLM's id of a request -> the request. The ids are numbers in the order of submission.
        self._open: dict[str, _OpenRequest] = {}
        self._num_submitted = 0
        # Seed of a sequence -> its interrupted request, which vLLM still has.
        self._retained: dict[int, tuple[str, _OpenRequest]] = {}
        # Failed completions of invalid requests, which the next `step` returns.
        self._failed_completions: list[Completion] = []

        self._llm: Any = self._build_llm(config, layout, dtype, seed, load, adapters)
        setup.change_engine_count(1)
        self._model: Any = get_vllm_model(self._llm)
        self._vocabulary_size: int = self._llm.llm_engine.model_config.get_vocab_size()
        # vLLM's limit of concurrent requests; the name is that of the protocol `Generator`.
        self.most_rows: int = self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        if routing_shape is not None and device.on_host():
            replay.install_expert_capture(get_model_runner(self._llm))

        self._weight_store: Any = LiveWeights(
            self._model,
            shapes or self._path,
            rank,
            reset_cache=self._reset_prefix_cache,
            loaded=load,
        )
        self._adapter_slots: AdapterSlots | None = None
        if adapters is not None:
            self._adapter_slots = AdapterSlots(self._llm, adapters, rank)

    def _reset_prefix_cache(self) -> bool:
        """Drop the prefix cache of older weights; return whether the engine can use the new weights."""
        # The cache cannot be dropped while it contains blocks of retained requests. Later requests do not
        # read these blocks of older weights: they have a different cache salt.
        if self._retains_requests:
            return True
        return self._llm.reset_prefix_cache()

    def _build_llm(
        self,
        config: RolloutConfig,
        layout: ParallelLayout,
        dtype: str,
        seed: int,
        load: bool,
        adapters: AdaptedModel | None,
    ) -> Any:
        """Build vLLM's engine on the ranks of a layout; raise UserError if vLLM refuses the settings."""
        setup.prepare_vllm()
        arguments = self._make_engine_arguments(config, layout.tensor, dtype, seed)
        if adapters is not None:
            arguments |= weights.make_adapter_arguments(adapters, dtype)
        pretrained = read_pretrained(self._path / "config.json")
        if load and not pretrained.loads_as_stored:
            raise ValueError(
                f"{self._path}: vLLM cannot load the weights as the checkpoint stores them; "
                "build the engine with load=False, and copy the weights into parameters()"
            )
        arguments["load_format"] = "auto" if load else "dummy"

        # The contexts restore the random generators that vLLM seeds, limit vLLM's groups to the layout's
        # ranks, and make vLLM select the device of this process.
        with (
            setup.preserve_random_state(),
            setup.use_layout_as_world(layout),
            setup.set_local_rank(device.device().index),
            setup.prepare_language_model_arguments(self._path) as model_arguments,
        ):
            from vllm import LLM

            try:
                return LLM(**arguments | model_arguments)
            except (ValueError, NotImplementedError) as error:
                raise _refusal_error(self._path, config, error) from error

    def _make_engine_arguments(
        self,
        config: RolloutConfig,
        tensor_parallel_size: int,
        dtype: str,
        seed: int,
    ) -> dict[str, Any]:
        """Make vLLM's engine arguments; raise UserErrors for invalid arguments in ``config.vllm``."""
        model = read_pretrained(self._path / "config.json")
        arguments: dict[str, Any] = {
            "model": str(self._path),
            **sampling_arguments(
                model, float32_head=config.float32_head, dtype=dtype, max_model_len=self.max_model_len
            ),
            # Ranks of torchrun are the workers: vLLM starts no processes.
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": tensor_parallel_size,
            "seed": seed,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self._records_sampling_mask:
            arguments |= replay.make_sampling_mask_arguments()
        # On accelerators vLLM applies the processors in this order: the bans of repeated n-grams must precede
        # the temperature and the filters (top-k, top-p and min-p).
        processors = replay.list_logits_processors(config)
        if config.bans_ngrams:
            processors = [*rules.list_logits_processors(), *processors]
        if processors:
            arguments["logits_processors"] = processors
        if self._routing_shape:
            arguments |= replay.make_routing_arguments()

        errors = check_engine_arguments(config.vllm)
        if device.on_host():
            errors += chunked_prefill_errors(config.vllm)
            arguments |= self._make_host_arguments(model, tensor_parallel_size, dtype)
        else:
            arguments |= _make_accelerator_arguments(config)
        if errors:
            raise UserErrors(errors)
        # The user's arguments come last, so that they override the arguments above.
        return arguments | config.vllm

    def _make_host_arguments(
        self,
        model: PretrainedModel,
        tensor_parallel_size: int,
        dtype: str,
    ) -> dict[str, Any]:
        """Make the engine arguments of a host without accelerator."""
        cache_bytes = setup.compute_host_cache_bytes(
            model.shape, tensor_parallel_size, dtype, self.max_model_len
        )
        arguments = {
            "kv_cache_memory_bytes": cache_bytes,
            **cpu_engine_arguments(self.max_model_len, tensor_parallel_size),
        }
        if model.shape.kv_lora:
            # On processors with AMX vLLM would choose a backend that computes with packed copies of the
            # weights, which weight updates would not change.
            arguments["attention_backend"] = "CPU_MLA"
        return arguments

    @property
    def weights_version(self) -> int:
        """Return the version of the weights in use, -1 before the first update."""
        return self._weight_store.weights_version

    @property
    def needs_weights(self) -> bool:
        """Return whether the weights must be written before the engine can sample."""
        return self._weight_store.needs_weights

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Wake the engine for requests; see `Generator.sampling`."""
        if self.needs_weights:
            raise RuntimeError("the engine has no weights yet: write parameters() and call finish_update")
        self._wake_memory("weights", "kv_cache")

        with setup.preserve_random_state():
            try:
                yield
            finally:
                for name in list(self._open):
                    self._abort_vllm_request(name)

    def submit(self, request: GenerationRequest) -> None:
        """Submit a request, or resume the retained request that it continues.

        A request without tokens, or with a token outside the vocabulary, gets a failed completion. Log-probs
        are computed at the sampling temperature, after the filters.

        vLLM starts a new random stream for each request. So the tokens of a continued sequence depend on the
        position at which it was interrupted, except in greedy decoding.
        """
        if self._resume_retained(request):
            return
        # vLLM would raise an exception for an invalid request, which would end the run.
        is_empty = not request.tokens or request.limit < 1
        if is_empty or max(request.tokens) >= self._vocabulary_size:
            self._failed_completions.append(make_failed_completion(request.number))
            return

        parameters = _make_sampling_parameters(request)
        support = None
        if self._records_sampling_mask or has_schedule(request.sampling):
            support = replay.add_filters(parameters, request)
        else:
            # Training has no filters in this run, so a request with filters belongs to an evaluation set.
            # vLLM's own filters suffice for it. They do not report which tokens they leave, which only
            # training needs.
            for field, value in make_vllm_filters(request.sampling).items():
                setattr(parameters, field, value)
        rules.add_ngram_size(parameters, request)
        if self._routing_shape:
            replay.add_expert_record(parameters, request, *self._routing_shape)

        vllm_prompt: dict[str, Any] = {"prompt_token_ids": list(request.tokens)}
        if self._retains_requests:
            vllm_prompt["cache_salt"] = f"weights {self.weights_version}"
        adapter = None
        if self._adapter_slots is not None:
            adapter = self._adapter_slots.request

        # Never reuse a name: a retained request keeps its name through weight updates.
        self._num_submitted += 1
        name = str(self._num_submitted)
        self._llm.llm_engine.add_request(name, vllm_prompt, parameters, lora_request=adapter)
        search = self._stop_finder.make_search(request.sampling, request.tokens, request.turn_tokens)
        self._open[name] = _OpenRequest(
            original=request,
            parameters=parameters,
            support=support,
            current=request,
            search=search,
        )

    def _resume_retained(self, request: GenerationRequest) -> bool:
        """Reopen the retained request that ``request`` continues; return false if none matches."""
        if request.seed not in self._retained:
            return False
        name, retained = self._retained[request.seed]

        # If any field differs, such as the limit, vLLM needs a new request.
        expected = replace(retained.current, number=request.number)
        if expected != replace(request, tokens=list(request.tokens)):
            return False

        del self._retained[request.seed]
        retained.current = request
        self._open[name] = retained
        return True

    def step(self) -> list[Completion]:
        """Run one step of vLLM's scheduler; return the completions of requests that finished in this step."""
        completions = self._failed_completions
        self._failed_completions = []

        # Abort the retained requests that were not resumed before this step: no sequence needs them.
        for name, _ in self._retained.values():
            self._abort_vllm_request(name)
        self._retained.clear()

        if self._open:
            for output in self._llm.llm_engine.step():
                if output.finished and output.request_id in self._open:
                    request = self._open.pop(output.request_id)
                    completions.append(self._make_completion(request, output.outputs[0]))
            completions += self._end_stopped_requests()
        return completions

    def _end_stopped_requests(self) -> list[Completion]:
        """End the requests whose last tokens complete a stop text; return their completions.

        vLLM's `stop` parameter is not used, for two reasons. A turn may be sampled by several requests, and
        vLLM searches only the tokens of the last request for a stop text. vLLM may also end several requests
        at once, see `_abort_vllm_request`.
        """
        processor = self._llm.llm_engine.output_processor
        completions = []
        for name, request in list(self._open.items()):
            if request.search is None:
                continue
            tokens = _get_request_state(processor, name).detokenizer.output_token_ids
            if request.completes_stop_text(tokens):
                completions.append(self._make_completion(request, _make_unfinished_output(processor, name)))
                self._abort_vllm_request(name)
        return completions

    def _make_completion(self, request: _OpenRequest, output: Any) -> Completion:
        """Make the completion of a request from vLLM's output, without the tokens of earlier completions.

        ``request.original`` is the request as vLLM received it. If it was interrupted and resumed,
        ``request.current`` is the scheduler's last request, and ``output`` also has the tokens that earlier
        completions returned.
        """
        completion = _convert_output(request.current.number, output)
        if not completion.tokens:
            return completion

        num_returned = request.num_returned
        completion = replace(
            completion,
            tokens=completion.tokens[num_returned:],
            log_probs=completion.log_probs[num_returned:],
        )
        if self._records_sampling_mask:
            support = replay.extract_support(output, request.support, request.original)
            completion = replace(completion, support=support[num_returned:])
        if self._routing_shape:
            experts = replay.extract_experts(output, request.parameters, request.original)
            completion = replace(completion, experts=experts)

        # Cut the completion at the end of its stop text. vLLM may have sampled further tokens in the same
        # step, or may have finished the request at its limit with the last token of a stop text.
        if request.completes_stop_text(output.token_ids):
            num_tokens = request.num_searched - num_returned
            completion = cut_stopped_completion(request.current, completion, num_tokens)
        return completion

    def abort(self, number: int) -> None:
        """Drop the open request with this number; it gets no completion."""
        self._failed_completions = [
            completion for completion in self._failed_completions if completion.number != number
        ]
        for name, request in list(self._open.items()):
            if request.current.number == number:
                self._abort_vllm_request(name)

    def _abort_vllm_request(self, name: str) -> None:
        """Abort the vLLM request ``name``.

        Abort one request per call: vLLM frees the blocks of several requests in the order of a set of
        strings, which differs between ranks.
        """
        self._open.pop(name, None)
        self._llm.llm_engine.abort_request([name])

    def interrupt(self) -> list[Completion]:
        """End or retain every open request; return the tokens sampled so far. See `Generator.interrupt`."""
        completions = self._failed_completions
        self._failed_completions = []

        for name, request in list(self._open.items()):
            output = _make_unfinished_output(self._llm.llm_engine.output_processor, name)
            new_tokens: list[int] = []
            if len(output.token_ids) > request.num_returned:
                completion = self._make_completion(request, output)
                completions.append(completion)
                new_tokens = list(completion.tokens)

            if not self._retains_requests:
                self._abort_vllm_request(name)
                continue

            # Predict the request with which the scheduler will continue the sequence. `_resume_retained`
            # compares the prediction with the actual request.
            current = request.current
            request.current = replace(
                current,
                tokens=[*current.tokens, *new_tokens],
                limit=current.limit - len(new_tokens),
                done=current.done + len(new_tokens),
                turn_tokens=current.turn_tokens + len(new_tokens),
            )
            self._retained[current.seed] = (name, self._open.pop(name))
        return completions

    @property
    def kept(self) -> Collection[int]:
        """Return the sequence seeds of the retained requests; see `Generator.kept`."""
        return self._retained.keys()

    @property
    def adapters(self) -> AdapterSlots | None:
        """Return the storage of the adapter, or None for an engine without adapter."""
        return self._adapter_slots

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of this rank's weights by vLLM's parameter name; see `LiveWeights`."""
        if self._weight_store is None:
            return {}
        return self._weight_store.parameters()

    def boxes(self) -> list[TensorBox]:
        """Return the boxes: regions of Hugging Face tensors, each with its position in ``parameters()``."""
        return self._weight_store.boxes()

    def finish_update(self, version: int) -> None:
        """Set the version of the written weights; see `LiveWeights.finish_update`."""
        self._weight_store.finish_update(version)

    def sleep(self) -> None:
        """Release the device memory of the cache and the weights; see ``sleep_level``.

        Does nothing on the host, which has no device memory to release.
        """
        if device.on_host() or "weights" in self._sleeping_tags:
            return

        # Build the map from checkpoint tensors to parameters, unless it exists. This runs vLLM's weight
        # loader on the parameters, so it must precede the release of their memory.
        self._weight_store.get_map()
        # vLLM can only put a completely awake engine to sleep.
        self._wake_memory("kv_cache")
        self._llm.sleep(self._sleep_level)
        self._sleeping_tags = {"weights", "kv_cache"}
        device.set_unbacked_bytes(setup.count_sleeping_bytes())
        if self._sleep_level > 1:
            self._weight_store.needs_weights = True

    def wake(self) -> None:
        """Restore the storage of the weights. `sampling` restores the key-value cache."""
        self._wake_memory("weights")

    def _wake_memory(self, *tags: str) -> None:
        """Restore the released memory of the given vLLM tags, "weights" or "kv_cache"."""
        for tag in tags:
            if tag in self._sleeping_tags:
                self._llm.wake_up([tag])
                self._sleeping_tags.discard(tag)
                device.set_unbacked_bytes(setup.count_sleeping_bytes())

    def close(self) -> None:
        """Shut this engine down; the job's process groups stay. May be called twice."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        self._model = None
        self._weight_store = None
        self._adapter_slots = None
        if setup.change_engine_count(-1) == 0:
            setup.drop_vllm_groups()

        # vLLM's objects have reference cycles: collect them to free their memory.
        gc.collect()
        device.empty_cache()


def _make_accelerator_arguments(config: RolloutConfig) -> dict[str, Any]:
    """Make the vLLM engine arguments that are set only on accelerators."""
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": config.memory_fraction,
        "enable_sleep_mode": True,
        # Triton's kernels store experts in the checkpoint's layout, so updates can write them in place.
        "moe_backend": "triton",
    }
    if config.on_update == KEEP:
        # With asynchronous scheduling, a step could still run while weights are written.
        arguments["async_scheduling"] = False
    return arguments


def _make_sampling_parameters(request: GenerationRequest) -> Any:
    """Make vLLM's sampling parameters for a request.

    They have no filters (top-k, top-p and min-p): `submit` adds these.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # `request.done` is the number of response tokens that earlier requests have sampled.
    seed = derive_continuation_seed(request.seed, request.done)
    return SamplingParams(
        **make_vllm_parameters(request.sampling, request.limit, seed, request.done),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _make_unfinished_output(processor: Any, name: str) -> Any:
    """Make the output that vLLM would return for the request ``name`` if its limit were reached now.

    ``processor`` is vLLM's output processor.
    """
    from vllm.v1.engine import FinishReason

    state = _get_request_state(processor, name)
    output = state.make_request_output([], None, FinishReason.LENGTH, None)
    return output.outputs[0]


def _get_request_state(processor: Any, name: str) -> Any:
    """Return the state of request ``name`` in vLLM's output processor, which contains its output so far."""
    # vLLM's internal name of a request has a random suffix.
    (internal_name,) = processor.external_req_ids[name]
    return processor.request_states[internal_name]


def _convert_output(number: int, output: Any) -> Completion:
    """Convert a vLLM output to the completion of request ``number``.

    The completion has tokens, log-probs and the finish reason. `_make_completion` adds the token ids that
    passed the filters, and the routed experts.
    """
    log_probs: list[float] = []
    if output.logprobs is not None:
        # At each position, the first log-prob belongs to the sampled token; vLLM's top tokens follow.
        log_probs = [output.logprobs.logprobs[index] for index in output.logprobs.start_indices]

    finish_reason = map_vllm_finish_reason(output.token_ids, log_probs, output.finish_reason)
    if finish_reason == FINISH_FAILED:
        return make_failed_completion(number)
    return Completion(number, output.token_ids, log_probs, finish_reason)


def _refusal_error(path: Path, config: RolloutConfig, error: Exception) -> UserError:
    """Return the error for a model or settings that vLLM refuses with ``error``."""
    settings = ""
    if config.vllm:
        settings = f", or one of rollout.vllm: {', '.join(config.vllm)}"
    return UserError(
        "vLLM refuses the model or the engine's settings",
        where="rollout",
        expected=f"a model and settings that vLLM accepts: {path}",
        got=f"{type(error).__name__}: {error}",
        fix=f"correct the model's files{settings}, or set rollout.engine=torch",
    )
