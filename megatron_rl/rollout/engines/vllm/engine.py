"""vLLM as generation engine inside the training processes, its weights written in place."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.check.engine.arguments import (
    check_engine_arguments,
    host_arguments,
    host_errors,
    sampling_arguments,
)
from megatron_rl.config.sections.rollout import KEEP, RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.rollout.engines.vllm import routing, setup, truncation, weights
from megatron_rl.rollout.engines.vllm.adapters import AdapterSlots, engine_arguments
from megatron_rl.rollout.engines.vllm.live import LiveWeights, live_model, model_runner
from megatron_rl.rollout.sampling import part_seed, vllm_filters, vllm_finish, vllm_parameters
from megatron_rl.rollout.types import Completion, GenerationRequest, failed_completion
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import AdaptedModel
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import FINISH_FAILED, TensorBox


@dataclass
class _Asked:
    """Hold a request, what vLLM was told of it, and where the support of its tokens is noted.

    ``rest`` is what is still asked, after what was answered when the request was interrupted.
    """

    request: GenerationRequest
    parameters: Any
    support: truncation.Support | None
    rest: GenerationRequest


class VllmEngine:
    """One rank of a vLLM replica; ``layout.ranks`` in order form ``layout.data`` replicas.

    ``model_path`` is a Hugging Face directory. Weights start as noise (``needs_weights``) unless
    ``load`` asks vLLM to read the checkpoint itself. ``config.vllm`` passes through to vLLM's engine
    arguments. ``shapes`` of the checkpoint's tensors are read from its headers unless given.
    Asleep, ``sleep_level`` 2 drops the weights, which the next update brings anyway; 1 keeps them in host
    memory. ``records`` are the layers, and experts per token, of a model whose experts `Completion` is to
    name. ``adapters`` describes those that `adapters` has room for and every request is answered with; the
    weights then stay where they are, and level 1 is used.

    Collective over ``layout.ranks``; where these are not the whole world every rank of the world calls
    ``join_groups(layout)`` first. Must be built before anything else imports vllm.
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
        records: tuple[int, int] | None = None,
        adapters: AdaptedModel | None = None,
    ) -> None:
        self.replica = layout.coordinates(rank).data
        self._path = Path(model_path)
        self.max_model_len = max_model_len
        self._sleep_level = sleep_level if adapters is None else 1
        self._truncates = config.truncates
        self._records = records
        self._asleep: set[str] = set()
        self._requests = 0
        self._open: dict[str, _Asked] = {}
        self._keeps = config.on_update == KEEP
        self._kept: dict[int, tuple[str, _Asked]] = {}
        self._failed: list[Completion] = []
        setup.prepare_vllm()
        arguments = self._arguments(config, layout.tensor, dtype, seed)
        if adapters is not None:
            arguments |= engine_arguments(adapters, dtype)
        local_rank = setup.local_rank(device.device().index)
        with setup.unchanged_random_state(), setup.layout_as_world(layout), local_rank:
            from vllm import LLM

            try:
                self._llm: Any = LLM(**arguments, load_format="auto" if load else "dummy")
            except (ValueError, NotImplementedError) as error:
                raise _refusal(self._path, config, error) from error
        setup.count_engine(1)
        self._model: Any = live_model(self._llm)
        self.most_rows: int = self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        if records is not None and device.on_host():
            routing.listen(model_runner(self._llm))
        self._vocabulary: int = self._llm.llm_engine.model_config.get_vocab_size()
        self._live: Any = LiveWeights(
            self._model,
            shapes or self._path,
            rank,
            # Kept requests hold blocks of older weights; the salt of others keeps them from reading these.
            reset_cache=lambda: self._keeps or self._llm.reset_prefix_cache(),
            loaded=load,
        )
        self._slots = None if adapters is None else AdapterSlots(self._llm, adapters, rank)

    def _arguments(self, config: RolloutConfig, tensor: int, dtype: str, seed: int) -> dict[str, Any]:
        model = read_pretrained(self._path / "config.json")
        arguments: dict[str, Any] = {
            "model": str(self._path),
            **sampling_arguments(
                model, float32_head=config.float32_head, dtype=dtype, max_model_len=self.max_model_len
            ),
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": tensor,
            "seed": seed,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **(truncation.engine_arguments() if self._truncates else {}),
            **(routing.engine_arguments() if self._records else {}),
        }
        if device.on_host():
            size = setup.host_cache_bytes(model.shape, tensor, dtype, self.max_model_len)
            arguments |= {"kv_cache_memory_bytes": size, **host_arguments(self.max_model_len, tensor)}
            if model.shape.kv_lora:
                # Processors with AMX get another backend, which computes with packed copies of the weights
                # that no write reaches.
                arguments["attention_backend"] = "CPU_MLA"
        else:
            arguments |= {"gpu_memory_utilization": config.memory_fraction, "enable_sleep_mode": True}
            if config.on_update == KEEP:
                arguments["async_scheduling"] = False  # no step may be under way while weights are written
            arguments["moe_backend"] = "triton"  # the one that reads experts as the checkpoint has them
        errors = check_engine_arguments(config.vllm)
        errors += host_errors(config.vllm) if device.on_host() else []
        if errors:
            raise UserErrors(errors)
        return arguments | config.vllm

    @property
    def weights_version(self) -> int:
        """Return the version of the weights in use, -1 where none were ever there."""
        return self._live.weights_version

    @property
    def needs_weights(self) -> bool:
        """Say whether weights must be written before anything can be sampled."""
        return self._live.needs_weights

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Wake the engine for requests; see `Generator.sampling`."""
        if self.needs_weights:
            raise RuntimeError("the engine has no weights yet: write parameters() and call finish_update")
        self._wake("weights", "kv_cache")
        with setup.unchanged_random_state():
            try:
                yield
            finally:
                for name in list(self._open):
                    self._end(name)

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; one that is empty or has a token outside the vocabulary fails.

        Its log-probs are those of the distribution that is sampled: at the temperature, after the filters.
        The prefix cache holds what earlier requests of a row computed as long as the weights stay.
        A sampled answer depends on where a row was interrupted, since vLLM starts each request's random
        stream anew; a greedy one does not. A request that was `kept` goes on instead.
        """
        if request.seed in self._kept:
            name, asked = self._kept[request.seed]
            if replace(asked.rest, number=request.number) == replace(request, tokens=list(request.tokens)):
                del self._kept[request.seed]
                asked.rest, self._open[name] = request, asked
                return
        if not request.tokens or request.limit < 1 or max(request.tokens) >= self._vocabulary:
            self._failed.append(failed_completion(request.number))
            return
        self._requests += 1
        name = str(self._requests)
        parameters = _sampling_parameters(request)
        support = None
        if self._truncates:
            support = truncation.add_filters(parameters, request.sampling)
        else:  # where one truncates all the same, an evaluation set says so: nobody learns from it
            for field, value in vllm_filters(request.sampling).items():
                setattr(parameters, field, value)
        if self._records:
            routing.ask(parameters, request, *self._records)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.tokens)}
        if self._keeps:
            prompt["cache_salt"] = f"weights {self.weights_version}"
        adapter = None if self._slots is None else self._slots.request
        self._llm.llm_engine.add_request(name, prompt, parameters, lora_request=adapter)
        self._open[name] = _Asked(request, parameters, support, request)

    def step(self) -> list[Completion]:
        """Add a token to every row that vLLM's scheduler runs; return the answers that are complete."""
        answers, self._failed = self._failed, []
        for name, _ in self._kept.values():
            self._end(name)
        self._kept.clear()
        if self._open:
            for output in self._llm.llm_engine.step():
                if output.finished and output.request_id in self._open:
                    answers.append(self._answer(self._open.pop(output.request_id), output.outputs[0]))
        return answers

    def _answer(self, asked: _Asked, output: Any) -> Completion:
        """Return vLLM's ``output`` as the answer to what is asked, without what was answered before."""
        request, answered = asked.request, len(asked.rest.tokens) - len(asked.request.tokens)
        answer = _completion(asked.rest.number, output)
        if not answer.tokens:
            return answer
        answer = replace(answer, tokens=answer.tokens[answered:], log_probs=answer.log_probs[answered:])
        if self._truncates:
            support = truncation.support_of(output, asked.support, request.sampling)
            answer = replace(answer, support=support[answered:])
        if self._records:
            answer = replace(answer, experts=routing.experts_of(output, asked.parameters, request))
        return answer

    def abort(self, number: int) -> None:
        """Forget an open request."""
        self._failed = [answer for answer in self._failed if answer.number != number]
        for name in [name for name, asked in self._open.items() if asked.rest.number == number]:
            self._end(name)

    def _end(self, name: str) -> None:
        self._open.pop(name, None)
        # One name a call: vLLM frees the blocks of several in the order of a set of strings, which is another
        # one on each rank.
        self._llm.llm_engine.abort_request([name])

    def interrupt(self) -> list[Completion]:
        """End every open request where it is, or keep it in the engine; see `Generator.interrupt`."""
        answers, self._failed = self._failed, []
        for name, asked in list(self._open.items()):
            output, tokens = _unfinished(self._llm.llm_engine.output_processor, name), []
            if len(asked.request.tokens) + len(output.token_ids) > len(asked.rest.tokens):
                answers.append(self._answer(asked, output))
                tokens = list(answers[-1].tokens)
            if self._keeps:
                rest = asked.rest
                asked.rest = replace(
                    rest,
                    tokens=[*rest.tokens, *tokens],
                    limit=rest.limit - len(tokens),
                    done=rest.done + len(tokens),
                )
                self._kept[rest.seed] = name, self._open.pop(name)
            else:
                self._end(name)
        return answers

    @property
    def kept(self) -> Collection[int]:
        """Return the seeds of interrupted requests that are still in vLLM; see `Generator.kept`."""
        return self._kept.keys()

    @property
    def adapters(self) -> AdapterSlots | None:
        """Return the storage of the adapters, None in an engine without."""
        return self._slots

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the storage of this rank's weights by vLLM's parameter name; see `LiveWeights`."""
        return self._live.parameters() if self._live is not None else {}

    def boxes(self) -> list[TensorBox]:
        """Return where vLLM's own loader puts every Hugging Face box on this rank; see `LiveWeights`."""
        return self._live.boxes()

    def finish_update(self, version: int) -> None:
        """Take the written weights into use as ``version``; see `LiveWeights`."""
        self._live.finish_update(version)

    def sleep(self) -> None:
        """Give device memory back: the cache, and the weights for good (level 2) or to host memory (1).

        The host has nothing to give back: there it does nothing.
        """
        if device.on_host() or "weights" in self._asleep:
            return
        self._live.map()  # tracing needs the weights' storage, if only to leave it alone
        self._wake("kv_cache")  # vLLM puts only a whole engine to sleep
        self._llm.sleep(self._sleep_level)
        self._asleep = {"weights", "kv_cache"}
        device.set_unbacked(setup.bytes_asleep())
        self._live.needs_weights = self._live.needs_weights or self._sleep_level > 1

    def wake(self) -> None:
        """Bring the weights' storage back; the cache follows with the next `sampling`."""
        self._wake("weights")

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self._asleep:
                self._llm.wake_up([tag])
                self._asleep.discard(tag)
                device.set_unbacked(setup.bytes_asleep())

    def close(self) -> None:
        """Shut this engine down and leave the job's process groups alone. May be called twice."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._model = self._live = self._slots = None
        if setup.count_engine(-1) == 0:
            setup.forget_groups()
        gc.collect()
        device.empty_cache()


def _sampling_parameters(request: GenerationRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **vllm_parameters(request.sampling, request.limit, part_seed(request.seed, request.done)),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _unfinished(processor: Any, name: str) -> Any:
    """Return what vLLM would answer to the request ``name`` if its limit were reached now."""
    from vllm.v1.engine import FinishReason

    (internal,) = processor.external_req_ids[name]
    state = processor.request_states[internal]
    return state.make_request_output([], None, FinishReason.LENGTH, None).outputs[0]


def _completion(number: int, output: Any) -> Completion:
    """Take tokens and their log-probs out of vLLM's answer."""
    values: list[float] = []
    if output.logprobs is not None:
        # A position holds the sampled token first, and after it whatever else vLLM reports there.
        values = [output.logprobs.logprobs[first] for first in output.logprobs.start_indices]
    finish = vllm_finish(output.token_ids, values, output.finish_reason)
    if finish == FINISH_FAILED:
        return failed_completion(number)
    return Completion(number, output.token_ids, values, finish)


def _refusal(path: Path, config: RolloutConfig, error: Exception) -> UserError:
    stated = f", or one of rollout.vllm: {', '.join(config.vllm)}" if config.vllm else ""
    return UserError(
        "vLLM refuses the model or the engine's settings",
        where="rollout",
        expected=f"a model and settings that vLLM takes: {path}",
        got=f"{type(error).__name__}: {error}",
        fix=f"correct what it names in the model's files{stated}, or set rollout.engine=torch",
    )
