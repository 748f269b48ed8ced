"""vLLM's API servers: what is asked of them over HTTP, and a sampler that spreads requests over several.

A server samples from weights that `hybrid_engine.servers` brings it. It says with every answer which weights
the tokens are of, so that one that was started anew in the meantime cannot answer with others.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from megatron_rl.check.engine.servers import BACKEND, EXTENSION, plain_settings
from megatron_rl.config.sections.rollout import ServerConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import Completion, Request, failed
from megatron_rl.rollout.sampling import part_seed, vllm_filters, vllm_finish, vllm_parameters
from megatron_rl.types import FINISH_FAILED

CONTROL_SECONDS = 20.0
"""Time limit of calls that neither sample nor move weights."""
FIRST_SECONDS = 120.0
"""Time limit of calls that a server works on for long the first time: it has programs look at its machine for
`server_info`, and warms up when it samples."""
POLL_SECONDS = 5.0
"""Time limit of asking a server before each step whether it is there."""
STEP_SECONDS = 0.05
"""Longest wait of a `ServerSampler.step` without an answer."""
_EXCERPT = 400
_START = "start it with the command that `check` shows"


_WITHOUT = {
    401: "no --api-key in its command, and no VLLM_API_KEY in its environment",
    403: "--enable-scale-out in its command",
}


class ServerError(RuntimeError):
    """Report a server that cannot be reached, takes too long or refuses; ``status`` is that of HTTP, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """Ask one API server; every call has a time limit and raises ServerError."""

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

    def refuse_closed(self) -> None:
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


class ServerSampler:
    """Sample at several servers; a `Sampler` whose requests survive the servers that they were sent to.

    A row stays with its server, for the prefixes that are cached there. A request whose server is lost, or
    answers from other weights, goes to another one, and is counted; with none left it fails. ``most_rows``
    requests are open at once. ``place`` is this client's among all: each begins with another server.
    ``closing`` is called at the end.
    """

    def __init__(
        self,
        config: ServerConfig,
        max_model_len: int,
        most_rows: int,
        place: int = 0,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_model_len, self.most_rows = max_model_len, most_rows
        self._seconds, self._place, self._closing = config.request_timeout, place, closing
        self._servers: list[Server] = []
        self._weights = ""
        self._again = 0
        self._open: dict[int, asyncio.Task[Completion]] = {}
        self._busy: dict[Server, int] = {}
        self._homes: dict[int, Server] = {}
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None

    def use(self, servers: Sequence[Server], weights: str) -> None:
        """Sample at these servers, from weights of this name."""
        self._servers, self._weights = list(servers), weights

    def sampled_again(self) -> int:
        """Return how many requests went to another server since the last call."""
        count, self._again = self._again, 0
        return count

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """See `Sampler.sampling`."""
        first = self._place % max(1, len(self._servers))
        self._busy = dict.fromkeys(self._servers[first:] + self._servers[:first], 0)
        self._homes = {}
        try:
            yield
        finally:
            self._cancel(list(self._open))

    def submit(self, request: Request) -> None:
        """Take a request; see `Sampler.submit`."""
        request = replace(request, tokens=list(request.tokens))
        self._open[request.number] = self._loop.create_task(self._answer(request))

    def step(self) -> list[Completion]:
        """Wait for an answer, but not for long; return those that are there."""
        if not self._open:
            return []
        self._run(
            asyncio.wait(list(self._open.values()), timeout=STEP_SECONDS, return_when="FIRST_COMPLETED")
        )
        return self._done()

    def _done(self) -> list[Completion]:
        done = [number for number, task in self._open.items() if task.done()]
        return [self._open.pop(number).result() for number in done]

    def abort(self, number: int) -> None:
        """Forget an open request; its server notices that nobody waits."""
        self._cancel([number] if number in self._open else [])

    def interrupt(self) -> list[Completion]:
        """Forget every open request: servers answer whole ones; see `Sampler.interrupt`."""
        self._cancel(list(self._open))
        return []

    @property
    def kept(self) -> tuple[int, ...]:
        """Return nothing: a server keeps no request."""
        return ()

    def close(self) -> None:
        """Drop the connections. May be called twice."""
        if self._loop.is_closed():
            return
        self._cancel(list(self._open))
        if self._session is not None:
            self._run(self._session.close())
        self._loop.close()
        self._closing()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A connection that a server closed between two steps would fail the next request.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def _cancel(self, numbers: list[int]) -> None:
        tasks = [self._open.pop(number) for number in numbers]
        for task in tasks:
            task.cancel()
        if tasks:
            self._run(asyncio.wait(tasks))

    def _choose(self, seed: int) -> Server | None:
        """Return the row's server, else the one with the fewest open requests, None where none is left."""
        if self._homes.get(seed) not in self._busy:
            if not self._busy:
                return None
            self._homes[seed] = min(self._busy, key=lambda server: self._busy[server])
        return self._homes[seed]

    async def _answer(self, request: Request) -> Completion:
        """Answer a request by the first server that does."""
        seed = part_seed(request.seed, request.done)
        parameters = vllm_parameters(request.sampling, request.limit, seed) | vllm_filters(request.sampling)
        body = {"token_ids": request.tokens, "sampling_params": parameters}
        while (server := self._choose(request.seed)) is not None:
            self._busy[server] += 1
            try:
                reply = await server.ask(self._client(), "inference/v1/generate", body, self._seconds)
                return self._completion(request.number, reply)
            except ServerError as error:
                if error.status in (400, 422):
                    break  # the request is what is wrong
                self._busy.pop(server, None)
                self._again += bool(self._busy)
            finally:
                if server in self._busy:
                    self._busy[server] -= 1
        return failed(request.number)

    def _completion(self, number: int, reply: Any) -> Completion:
        """Take tokens and log-probs out of an answer; raise ServerError where they are of other weights."""
        try:
            (choice,) = reply["choices"]
            tokens, versions = choice["token_ids"], choice["weight_versions"]
            values = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]] if tokens else []
            other = {span["version"] for span in versions} - {self._weights}
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"an answer that is none: {reply!r:.400}") from error
        if other:
            raise ServerError(f"an answer from weights {sorted(other)} instead of {self._weights}")
        if reason not in ("stop", "length"):
            raise ServerError(f"an answer that ends with {reason!r}")  # a server that is being stopped
        finish = vllm_finish(tokens, values, reason)
        return failed(number) if finish == FINISH_FAILED else Completion(number, tokens, values, finish)


def alongside(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], Any]:
    """Call a function in a thread, since both sides must be in a transfer at once; return what waits for it.

    What waits returns the answer, or raises what the function raised.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(function(*arguments, **named))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> Any:
        thread.join()
        if failures:
            raise failures[0]
        return answers[0]

    return end
