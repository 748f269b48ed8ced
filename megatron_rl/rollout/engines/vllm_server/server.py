"""Client of vLLM's API server: the HTTP requests that a job sends to it.

The URL paths are from vLLM 0.32. Sampling from token ids and weight updates need vLLM's development mode and
the worker extension of this package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.check.engine.servers import TRANSFER_BACKEND, WORKER_EXTENSION, comparable_settings
from megatron_rl.check.model.tokenizer import has_multi_token_stop
from megatron_rl.config.derive import longest_row
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.rollout.engines.servers import ServerError
from megatron_rl.rollout.sampling import (
    derive_continuation_seed,
    make_vllm_filters,
    make_vllm_parameters,
    make_vllm_stop_fields,
    map_vllm_finish_reason,
)
from megatron_rl.rollout.types import Completion, GenerationRequest, make_failed_completion
from megatron_rl.shapes.pretrained import read_pretrained, transformers_config
from megatron_rl.types import FINISH_FAILED

CONTROL_SECONDS = 20.0
"""Time limit of calls that neither sample nor move weights."""

SLOW_CALL_SECONDS = 120.0
"""Time limit of calls that are slow the first time: `server_info` runs programs that inspect the machine, and
the first sampling request warms up the engine."""

POLL_SECONDS = 5.0
"""Time limit of calls that check whether the server is reachable."""

_EXCERPT = 400
"""Maximum number of characters of a response that an error quotes."""

_START_FIX = "start it with the command that `check` shows"

_EXPECTED_BY_STATUS = {
    401: "no --api-key in its command, and no VLLM_API_KEY in its environment",
    403: "--enable-scale-out in its command",
}
"""HTTP status with which a server refuses a prompt of token ids -> the setting that it would need."""


class VllmServer:
    """Client of one API server of vLLM; see `engines.servers.Server`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def send_request(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Any = None,
        timeout: float = CONTROL_SECONDS,
    ) -> Any:
        """Send a GET request, or a POST request with ``body`` as JSON; return the response's JSON.

        ``timeout`` is in seconds. Raises ServerError for network failures, HTTP errors and malformed JSON.
        """
        url = f"{self.url}/{path}"
        method = "GET" if body is None else "POST"
        time_limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.request(method, url, json=body, timeout=time_limit) as response:
                text = await response.text()
        except TimeoutError as error:
            raise ServerError(f"{url}: no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{url}: {type(error).__name__}: {error}") from error

        if response.status != 200:
            message = f"{url}: HTTP status {response.status}: {text[:_EXCERPT]}"
            raise ServerError(message, response.status)
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError(f"{url}: malformed JSON: {text[:_EXCERPT]}") from error

    def send_control_request(
        self,
        path: str,
        body: Any = None,
        timeout: float = CONTROL_SECONDS,
    ) -> Any:
        """Send one request synchronously, in a separate session; see `send_request`."""

        # Use a new event loop and session per call: control calls are rare, and come from several threads.
        async def send_once() -> Any:
            """Send the request in a new session."""
            async with aiohttp.ClientSession() as session:
                return await self.send_request(session, path, body, timeout)

        return asyncio.run(send_once())

    def call_workers(self, method: str, *arguments: Any, timeout: float) -> None:
        """Call a method of the server's workers by name; raise ServerError if it fails in any worker."""
        # `attempt` is a method of the worker extension, which returns a failure as text. After an exception
        # in one worker, vLLM would not read the replies of the other workers, and a later call would receive
        # these replies.
        body = {"method": "attempt", "args": [method, *arguments]}
        reply = self.send_control_request("collective_rpc", body, timeout)
        for failure in reply["results"]:
            if failure is not None:
                raise ServerError(f"{self.url}: {method}: {failure:.{_EXCERPT}}")

    def count_workers(self) -> int:
        """See `Server.count_workers`."""
        return int(self.send_control_request("get_world_size")["world_size"])

    def fetch_weights_name(self) -> str:
        """See `Server.fetch_weights_name`."""
        return str(self.send_control_request("weight_info", timeout=POLL_SECONDS)["weight_version"])

    def claim(self, run: str, seconds: float) -> str | None:
        """See `Server.claim`."""
        body = {"method": "claim", "args": [run, seconds]}
        reply = self.send_control_request("collective_rpc", body, POLL_SECONDS)
        # All workers have the same claim: use the first worker's result.
        first_holder, *_ = reply["results"]
        return first_holder

    async def generate(
        self,
        session: aiohttp.ClientSession,
        request: GenerationRequest,
        weights_name: str,
        timeout: float,
    ) -> Completion:
        """See `Server.generate`."""
        seed = derive_continuation_seed(request.seed, request.done)
        parameters = make_vllm_parameters(request.sampling, request.limit, seed, request.done)
        # Only evaluation sets have filters here. Training needs the ids of the tokens that passed the filters
        # at each draw. A server does not report them, so `check` refuses filters in training.
        parameters |= make_vllm_filters(request.sampling)
        parameters |= make_vllm_stop_fields(request.sampling)

        body = {"token_ids": request.tokens, "sampling_params": parameters}
        reply = await self.send_request(session, "inference/v1/generate", body, timeout)
        return _parse_completion(request.number, reply, weights_name)

    def reset_updates(self, timeout: float) -> None:
        """See `Server.reset_updates`."""
        for method in ("finish_weight_update", "shutdown_weight_transfer_engine"):
            # A server without an unfinished update responds with an error.
            with suppress(ServerError):
                self.call_workers(method, timeout=timeout)

    def pause(self, timeout: float) -> None:
        """See `Server.pause`."""
        # "keep": requests in flight stay queued, and continue after `resume`.
        self.send_control_request("pause?mode=keep", {}, timeout)

    def join_transfer(self, rendezvous: Mapping[str, Any], timeout: float) -> None:
        """See `Server.join_transfer`."""
        self.call_workers("init_weight_transfer_engine", dict(rendezvous), timeout=timeout)

    def start_update(self, timeout: float) -> None:
        """See `Server.start_update`."""
        self.call_workers("start_weight_update", timeout=timeout)

    def receive_weights(self, version: int, timeout: float) -> None:
        """See `Server.receive_weights`."""
        self.call_workers("update_weights", {"version": version}, timeout=timeout)

    def finish_update(self, weights_name: str, timeout: float) -> None:
        """See `Server.finish_update`."""
        self.send_control_request("finish_weight_update", {"weight_version": weights_name}, timeout)
        # Before `resume`: a request in flight must not continue from the cache of older weights.
        reset = self.send_control_request("reset_prefix_cache?reset_running_requests=true", {}, timeout)
        if not reset["success"]:
            raise ServerError(f"{self.url} does not drop the prefix cache of older weights")
        self.send_control_request("resume", {}, timeout)

    def require_compatible(self, config: RunConfig) -> int:
        """Check that the server is compatible with the run; return its maximum of concurrent requests.

        See `Server.require_compatible`.
        """
        config_file = Path(config.model.path) / "config.json"

        requirements = ServerRequirements(
            dtype=config.model.dtype,
            float32_head=config.rollout.float32_head,
            max_model_len=longest_row(config),
            cpu_device=device.host().type,
            # Only a tokenizer can end a response at a stop text of several tokens.
            needs_tokenizer=has_multi_token_stop(Path(config.model.path), config.rollout),
        )

        # The settings that the model would have in an engine of this process: config.json as transformers
        # reads it, and the keys that only vLLM reads.
        hf_config = read_hf_config(config.model.path).to_dict()
        hf_config |= dict(read_pretrained(config_file).engine_keys)
        return self.require_compatible_settings(hf_config, requirements)

    def require_compatible_settings(
        self,
        hf_config: Mapping[str, Any],
        requirements: ServerRequirements,
    ) -> int:
        """Check the server's engine settings and model; return its maximum number of concurrent requests.

        ``hf_config``: config.json of the run's model, as transformers reads it. ``requirements``: engine
        settings that the server must have. Raises UserError if a setting or the model differs.
        """
        error_location = f"{self.url}, of rollout.server.urls"
        try:
            info_path = "server_info?config_format=json"
            server_info = self.send_control_request(info_path, timeout=SLOW_CALL_SECONDS)
            vllm_config = server_info["vllm_config"]
            _require_matching_settings(requirements.compare_settings(vllm_config), error_location)
            reply = self.send_control_request("collective_rpc", {"method": "model_settings"})
            served_hf_config, *_ = reply["results"]
            max_requests = int(vllm_config["scheduler_config"]["max_num_seqs"])
        except (ServerError, KeyError, TypeError, ValueError) as error:
            raise self._unusable_error(error_location, error) from error

        _require_same_model(hf_config, served_hf_config, error_location)
        return max_requests

    def _unusable_error(self, error_location: str, error: Exception) -> UserError:
        """Return the error for a server that is unreachable, or does not report its configuration.

        ``error_location`` is the location that the error names: the server's URL and the configuration key.
        """
        # Likely causes: the server does not respond, or it does not serve this URL path, since vLLM's
        # development mode is off.
        message = "a server does not report its configuration"
        expected = "an API server of the vLLM that is installed here"
        if isinstance(error, ServerError) and error.status == 0:
            message = "a server is unreachable"
        elif isinstance(error, ServerError) and error.status == 404 and self._is_vllm_server():
            expected = "VLLM_SERVER_DEV_MODE=1 in the server's environment"
        return UserError(
            message,
            where=error_location,
            expected=expected,
            got=f"{type(error).__name__}: {error}",
            fix=_START_FIX,
        )

    def _is_vllm_server(self) -> bool:
        """Return whether a vLLM server responds at the URL, with or without the development mode."""
        try:
            return "version" in self.send_control_request("version", timeout=POLL_SECONDS)
        except (ServerError, TypeError, ValueError):
            return False

    def require_token_prompts(self) -> None:
        """Raise UserError unless the server accepts prompts of token ids; see `Server.require_token_prompts`.

        Call it only for a server that this run has reserved: it resumes a paused server.
        """
        try:
            # A job that was killed during an update has left the server paused.
            self.send_control_request("resume", {})

            parameters = {"max_tokens": 1, "detokenize": False}
            body = {"token_ids": [0], "sampling_params": parameters}
            self.send_control_request("inference/v1/generate", body, SLOW_CALL_SECONDS)
        except ServerError as error:
            raise UserError(
                "a server does not accept prompts of token ids",
                where=f"{self.url}, of rollout.server.urls",
                expected=_EXPECTED_BY_STATUS.get(error.status, "a response"),
                got=str(error),
                fix=_START_FIX,
            ) from error


@dataclass(frozen=True)
class ServerRequirements:
    """Engine settings that a server must have, so that its log-probs match the trainer's.

    Example:
        >>> requirements = ServerRequirements("bfloat16", True, max_model_len=4096, cpu_device="cpu")
        >>> requirements.max_model_len
        4096
    """

    dtype: str
    """dtype of weights and computation."""

    float32_head: bool
    """Whether the logits are computed in float32."""

    max_model_len: int
    """Number of tokens of the longest sequence of the run, prompt included."""

    cpu_device: str
    """vLLM's name of the device on machines without accelerator."""

    needs_tokenizer: bool = False
    """Whether the server must have the model's tokenizer, to end responses at stop texts."""

    def compare_settings(self, vllm_config: Mapping[str, Any]) -> dict[str, tuple[str, str, bool]]:
        """Compare a server's configuration with the required settings.

        Returns a dict: name of the setting -> (expected value, actual value, whether the actual value is
        valid).
        """
        # Settings of the model and of its log-probs.
        model = vllm_config["model_config"]
        dtype = str(model["dtype"]).removeprefix("torch.")
        head_dtype = (model.get("hf_overrides") or {}).get("head_dtype", dtype)
        expected_head = "float32" if self.float32_head else head_dtype
        max_model_len = int(model["max_model_len"])
        quantization = model.get("quantization")
        log_probs_mode = model["logprobs_mode"]

        # Settings that load the plug-ins of this package.
        transfer_backend = (vllm_config.get("weight_transfer_config") or {}).get("backend")
        extension = vllm_config["parallel_config"]["worker_extension_cls"]

        has_tokenizer = not model["skip_tokenizer_init"]

        # With chunked prefill, vLLM must reset a request's random generator after each chunk. vLLM's CPU
        # backend does not support the reset.
        has_chunked_prefill = vllm_config["scheduler_config"]["enable_chunked_prefill"]
        is_on_cpu = vllm_config["device_config"]["device"] == self.cpu_device
        chunks_prefill_on_cpu = bool(has_chunked_prefill) and is_on_cpu

        # The names are those in the server command that `check` shows. The order matters: an error names the
        # first invalid setting.
        return {
            "worker-extension-cls": (WORKER_EXTENSION, str(extension), extension == WORKER_EXTENSION),
            "weight-transfer-config": (
                f'{{"backend": "{TRANSFER_BACKEND}"}}',
                str(transfer_backend),
                transfer_backend == TRANSFER_BACKEND,
            ),
            "dtype": (self.dtype, dtype, dtype == self.dtype),
            "head_dtype": (expected_head, head_dtype, head_dtype == expected_head),
            "quantization": ("none", str(quantization), not quantization),
            "max-model-len": (
                f"{self.max_model_len} or more",
                str(max_model_len),
                max_model_len >= self.max_model_len,
            ),
            "skip-tokenizer-init": (
                "false: the run ends responses at stop texts",
                str(not has_tokenizer),
                has_tokenizer or not self.needs_tokenizer,
            ),
            "logprobs-mode": ("processed_logprobs", log_probs_mode, log_probs_mode == "processed_logprobs"),
            "enable-chunked-prefill": (
                "false on a host without accelerator",
                str(has_chunked_prefill),
                not chunks_prefill_on_cpu,
            ),
        }


def _require_matching_settings(comparisons: Mapping[str, tuple[str, str, bool]], error_location: str) -> None:
    """Raise UserError for the first setting of a server with another value than the run requires.

    ``comparisons`` is the result of `ServerRequirements.compare_settings`. ``error_location`` is the location
    that the error names: the server's URL and the configuration key.
    """
    for name, (expected, actual, is_valid) in comparisons.items():
        if not is_valid:
            raise UserError(
                f"the `{name}` of a server does not match the run",
                where=error_location,
                expected=expected,
                got=actual,
                fix=_START_FIX,
            )


def _require_same_model(
    hf_config: Mapping[str, Any],
    served_hf_config: Mapping[str, Any],
    error_location: str,
) -> None:
    """Raise UserError if the models of the server and the run differ in any of `comparable_settings`.

    ``hf_config`` is config.json of the run's model, and ``served_hf_config`` that of the server's model. A
    key that only one of the two files has is ignored, since transformers and vLLM add different defaults.
    ``error_location`` is the location that the error names: the server's URL and the configuration key.
    """
    # Compare numbers, texts and flags that affect the outputs, but no names, paths and dtypes.
    expected_values = comparable_settings(hf_config)
    served_values = comparable_settings(transformers_config(served_hf_config))

    for name, value in expected_values.items():
        if name in served_values and served_values[name] != value:
            raise UserError(
                "the server has a different model",
                where=error_location,
                expected=f"{name}: {value}",
                got=f"{name}: {served_values[name]}, of {served_hf_config.get('_name_or_path')}",
                fix="start it with the model of model.path",
            )


def _parse_completion(number: int, reply: Any, weights_name: str) -> Completion:
    """Return the completion of request ``number`` from a server's reply.

    Raises ServerError if the reply is malformed, or was sampled from weights with a different name.
    """
    # Validate the reply by reading it: any program may respond at a URL.
    try:
        (choice,) = reply["choices"]
        tokens = choice["token_ids"]
        log_probs: list[float] = []
        if tokens:
            log_probs = [float(position["logprob"]) for position in choice["logprobs"]["content"]]
        sampled_weights = {span["version"] for span in choice["weight_versions"]}
        stale_weights = sampled_weights - {weights_name}
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"malformed response: {reply!r:.400}") from error

    if stale_weights:
        raise ServerError(f"a response from weights {sorted(stale_weights)} instead of {weights_name}")

    if reason not in ("stop", "length"):
        # A server that shuts down ends its requests with other reasons.
        raise ServerError(f"a response that ends with {reason!r}")

    finish_reason = map_vllm_finish_reason(tokens, log_probs, reason)
    if finish_reason == FINISH_FAILED:
        return make_failed_completion(number)
    return Completion(number, tokens, log_probs, finish_reason)
