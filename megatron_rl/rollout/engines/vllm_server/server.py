"""vLLM's API server: the requests that a job sends it over HTTP; see `servers.base.Server`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.check.engine.servers import BACKEND, EXTENSION, plain_settings
from megatron_rl.config.derive import longest_row
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.rollout.engines.servers.base import ServerError
from megatron_rl.rollout.sampling import part_seed, vllm_filters, vllm_finish, vllm_parameters
from megatron_rl.rollout.types import Completion, GenerationRequest, failed_completion
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import FINISH_FAILED

CONTROL_SECONDS = 20.0
"""Time limit of calls that neither sample nor move weights."""
FIRST_SECONDS = 120.0
"""Time limit of calls that a server works on for long the first time: it has programs look at its machine for
`server_info`, and warms up when it samples."""
POLL_SECONDS = 5.0
"""Time limit of asking a server before each step whether it is there."""
_EXCERPT = 400
_START = "start it with the command that `check` shows"


_WITHOUT = {
    401: "no --api-key in its command, and no VLLM_API_KEY in its environment",
    403: "--enable-scale-out in its command",
}


class VllmServer:
    """One API server of vLLM; see `servers.base.Server`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    async def ask(
        self, session: aiohttp.ClientSession, path: str, body: Any = None, seconds: float = CONTROL_SECONDS
    ) -> Any:
        """Get what is at ``path``, or post ``body`` there as JSON, and return the JSON that is answered."""
        method, limit = "GET" if body is None else "POST", aiohttp.ClientTimeout(total=seconds)
        try:
            async with session.request(method, f"{self.url}/{path}", json=body, timeout=limit) as response:
                text = await response.text()
        except TimeoutError as error:
            raise ServerError(f"{self.url}/{path}: no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self.url}/{path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise ServerError(
                f"{self.url}/{path}: HTTP status {response.status}: {text[:_EXCERPT]}", response.status
            )
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise ServerError(f"{self.url}/{path}: no JSON: {text[:_EXCERPT]}") from error

    def call(self, path: str, body: Any = None, seconds: float = CONTROL_SECONDS) -> Any:
        """Do the same as `ask`, without a session that is there already."""

        async def once() -> Any:
            async with aiohttp.ClientSession() as session:
                return await self.ask(session, path, body, seconds)

        return asyncio.run(once())

    def workers(self) -> int:
        """Return how many processes have the server's weights."""
        return int(self.call("get_world_size")["world_size"])

    def weights(self) -> str:
        """Return the name of the weights that the server has; it has little time to say so."""
        return str(self.call("weight_info", seconds=POLL_SECONDS)["weight_version"])

    def claim(self, run: str, seconds: float) -> str | None:
        """Let a run have the server for so long; return the name of the one that has it instead, or None."""
        answer = self.call("collective_rpc", {"method": "claim", "args": [run, seconds]}, POLL_SECONDS)
        (holder, *_) = answer["results"]
        return holder

    def attempt(self, method: str, *arguments: Any, seconds: float) -> None:
        """Have every worker call a method of its own; raise ServerError where one fails."""
        body = {"method": "attempt", "args": [method, *arguments]}
        for failure in self.call("collective_rpc", body, seconds)["results"]:
            if failure is not None:
                raise ServerError(f"{self.url}: {method}: {failure:.{_EXCERPT}}")

    async def generate(
        self, session: aiohttp.ClientSession, request: GenerationRequest, weights: str, seconds: float
    ) -> Completion:
        """See `Server.generate`."""
        seed = part_seed(request.seed, request.done)
        parameters = vllm_parameters(request.sampling, request.limit, seed) | vllm_filters(request.sampling)
        body = {"token_ids": request.tokens, "sampling_params": parameters}
        reply = await self.ask(session, "inference/v1/generate", body, seconds)
        return _completion(request.number, reply, weights)

    def reset_updates(self, seconds: float) -> None:
        """See `Server.reset_updates`."""
        for method in ("finish_weight_update", "shutdown_weight_transfer_engine"):
            with suppress(ServerError):
                self.attempt(method, seconds=seconds)

    def pause(self, seconds: float) -> None:
        """See `Server.pause`."""
        self.call("pause?mode=keep", {}, seconds)

    def join_transfer(self, rendezvous: Mapping[str, Any], seconds: float) -> None:
        """See `Server.join_transfer`."""
        self.attempt("init_weight_transfer_engine", dict(rendezvous), seconds=seconds)

    def start_update(self, seconds: float) -> None:
        """See `Server.start_update`."""
        self.attempt("start_weight_update", seconds=seconds)

    def receive_weights(self, version: int, seconds: float) -> None:
        """See `Server.receive_weights`."""
        self.attempt("update_weights", {"version": version}, seconds=seconds)

    def finish_update(self, name: str, seconds: float) -> None:
        """See `Server.finish_update`."""
        self.call("finish_weight_update", {"weight_version": name}, seconds)
        reset = self.call("reset_prefix_cache?reset_running_requests=true", {}, seconds)
        if not reset["success"]:
            raise ServerError(f"{self.url} does not forget what older weights computed")
        self.call("resume", {}, seconds)

    def require_fit(self, config: RunConfig) -> int:
        """See `Server.require_fit`."""
        path = Path(config.model.path) / "config.json"
        expected = Expected(
            config.model.dtype, config.rollout.float32_head, longest_row(config), device.host().type
        )
        settings = read_hf_config(config.model.path).to_dict()
        return self.refuse_other(settings | dict(read_pretrained(path).family.engine_keys), expected)

    def refuse_other(self, settings: Mapping[str, Any], expected: Expected) -> int:
        """Return how many requests the server works on at once; raise UserError unless it fits the run.

        ``settings`` are those of the model as transformers reads them here.
        """
        where = f"{self.url}, of rollout.server.urls"
        try:
            info = self.call("server_info?config_format=json", seconds=FIRST_SECONDS)["vllm_config"]
            self._refuse_settings(expected.compared(info), where)
            (served, *_) = self.call("collective_rpc", {"method": "model_settings"})["results"]
            most = int(info["scheduler_config"]["max_num_seqs"])
        except (ServerError, KeyError, TypeError, ValueError) as error:
            status = error.status if isinstance(error, ServerError) else 200
            hidden = status == 404 and self._is_vllm()
            mode = "VLLM_SERVER_DEV_MODE=1 in the server's environment"
            raise UserError(
                "a server does not say how it is set up" if status else "a server is not reached",
                where=where,
                expected=mode if hidden else "an API server of the vLLM that is installed here",
                got=f"{type(error).__name__}: {error}",
                fix=_START,
            ) from error
        self._refuse_model(settings, served, where)
        return most

    def _is_vllm(self) -> bool:
        """Say whether the server answers as vLLM's always do."""
        try:
            return "version" in self.call("version", seconds=POLL_SECONDS)
        except (ServerError, TypeError, ValueError):
            return False

    def _refuse_settings(self, compared: Mapping[str, tuple[str, str, bool]], where: str) -> None:
        for name, (wanted, served, fits) in compared.items():
            if not fits:
                raise UserError(
                    f"a server has another `{name}` than the run needs",
                    where=where,
                    expected=wanted,
                    got=served,
                    fix=_START,
                )

    def _refuse_model(self, settings: Mapping[str, Any], served: Mapping[str, Any], where: str) -> None:
        """Raise UserError where both sides have a plain setting, or a number of positions, that differs."""
        wanted, served_settings = plain_settings(settings), plain_settings(served)
        for name, value in wanted.items():
            if name in served_settings and served_settings[name] != value:
                raise UserError(
                    "a server has another model",
                    where=where,
                    expected=f"{name}: {value}",
                    got=f"{name}: {served_settings[name]}, of {served.get('_name_or_path')}",
                    fix="start it with the model of model.path",
                )

    def require_open(self) -> None:
        """Raise UserError unless the server samples from tokens; one that another run has is disturbed."""
        where = f"{self.url}, of rollout.server.urls"
        try:
            self.call("resume", {})  # a job that was killed may have left it paused
            body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
            self.call("inference/v1/generate", body, FIRST_SECONDS)
        except ServerError as error:
            raise UserError(
                "a server does not sample from tokens",
                where=where,
                expected=_WITHOUT.get(error.status, "an answer"),
                got=str(error),
                fix=_START,
            ) from error


class Expected:
    """What a server must be, to sample as the trainer computes."""

    def __init__(self, dtype: str, float32_head: bool, max_model_len: int, host: str) -> None:
        self._dtype, self._float32_head = dtype, float32_head
        self._max_model_len, self._host = max_model_len, host

    def compared(self, info: Mapping[str, Any]) -> dict[str, tuple[str, str, bool]]:
        """Return by setting what is expected, what a server says, and whether that fits."""
        model, parallel = info["model_config"], info["parallel_config"]
        transfer = (info.get("weight_transfer_config") or {}).get("backend")
        dtype, longest = str(model["dtype"]).removeprefix("torch."), int(model["max_model_len"])
        head = (model.get("hf_overrides") or {}).get("head_dtype", dtype)
        wanted = "float32" if self._float32_head else head
        chunked = info["scheduler_config"]["enable_chunked_prefill"]
        unseeded = bool(chunked) and info["device_config"]["device"] == self._host
        extension, quantized = parallel["worker_extension_cls"], model.get("quantization")
        mode = model["logprobs_mode"]
        return {
            "worker-extension-cls": (EXTENSION, str(extension), extension == EXTENSION),
            "weight-transfer-config": (f'{{"backend": "{BACKEND}"}}', str(transfer), transfer == BACKEND),
            "dtype": (self._dtype, dtype, dtype == self._dtype),
            "head_dtype": (wanted, head, head == wanted),
            "quantization": ("none", str(quantized), not quantized),
            "max-model-len": (
                f"{self._max_model_len} or more", str(longest), longest >= self._max_model_len
            ),
            "logprobs-mode": ("processed_logprobs", mode, mode == "processed_logprobs"),
            "enable-chunked-prefill": ("false on a host without accelerator", str(chunked), not unseeded),
        }  # fmt: skip


def _completion(number: int, reply: Any, weights: str) -> Completion:
    """Take tokens and log-probs out of an answer; raise ServerError where they are of other weights."""
    try:
        (choice,) = reply["choices"]
        tokens, versions = choice["token_ids"], choice["weight_versions"]
        values = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]] if tokens else []
        other = {span["version"] for span in versions} - {weights}
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(f"malformed response: {reply!r:.400}") from error

    if other:
        raise ServerError(f"a response from weights {sorted(other)} instead of {weights}")
    if reason not in ("stop", "length"):
        raise ServerError(f"a response that ends with {reason!r}")  # of a server that is being stopped
    finish = vllm_finish(tokens, values, reason)
    if finish == FINISH_FAILED:
        return failed_completion(number)
    return Completion(number, tokens, values, finish)
