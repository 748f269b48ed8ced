"""Client of the made-up server `letters`: each call is a POST of one JSON object to a path of its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import aiohttp

from megatron_rl.config.schema import RunConfig
from megatron_rl.rollout.engines.servers import ServerError
from megatron_rl.rollout.types import Completion, GenerationRequest

SECONDS = 20.0
"""Timeout in seconds of a request other than generation."""


def make_server(url: str) -> LetterServer:
    """Return the client of the server at ``url``."""
    return LetterServer(url)


class LetterServer:
    """Client of one server: an implementation of `rollout.engines.servers.Server`."""

    # The names and arguments of the methods are prescribed by that protocol; paths and JSON are not.

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def _post(self, path: str, arguments: Mapping[str, Any], timeout: float = SECONDS) -> Any:
        """Post the arguments of a call to ``path``; return its result, or raise ServerError."""
        url = f"{self.url}/{path}"
        body = json.dumps(arguments).encode()
        request = urllib.request.Request(url, body)

        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                result = json.load(response)
        except OSError as error:
            raise ServerError(f"{url}: {error}") from error

        return result["answer"]

    async def generate(
        self,
        session: aiohttp.ClientSession,
        request: GenerationRequest,
        weights_name: str,
        timeout: float,
    ) -> Completion:
        # Generation alone is asynchronous: many requests of a step are open at a time.
        arguments = {
            "number": request.number,
            "tokens": list(request.tokens),
            "sampling": request.sampling._asdict(),
            "limit": request.limit,
            "seed": request.seed,
            "done": request.done,
        }

        # Errors of the network become ServerError, after which the request is sampled elsewhere.
        client_timeout = aiohttp.ClientTimeout(total=timeout)
        url = f"{self.url}/generate"
        try:
            async with session.post(url, json=arguments, timeout=client_timeout) as response:
                body = await response.json()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self.url}: {error}") from error

        # A server that was restarted may have lost its weights since the last check.
        result = body["answer"]
        if result["weights"] != weights_name:
            raise ServerError(f"{self.url}: weights {result['weights']} instead of {weights_name}")

        return Completion(
            request.number,
            result["tokens"],
            result["log_probs"],
            result["finish_reason"],
        )

    def require_compatible(self, config: RunConfig) -> int:
        return self._post("most_requests", {})

    def require_token_prompts(self) -> None:
        # Every server of this engine samples tokens, so any response is enough.
        self._post("weights", {})

    def claim(self, run: str, seconds: float) -> str | None:
        arguments = {
            "run": run,
            "seconds": seconds,
        }
        return self._post("claim", arguments)

    def fetch_weights_name(self) -> str:
        return self._post("weights", {})

    def count_workers(self) -> int:
        return 1

    def reset_updates(self, timeout: float) -> None:
        self._post("reset", {}, timeout)

    # The server handles one call at a time, so it need not pause before an update.
    def pause(self, timeout: float) -> None: ...

    def join_transfer(self, rendezvous: Mapping[str, Any], timeout: float) -> None:
        self._post("join", rendezvous, timeout)

    def start_update(self, timeout: float) -> None: ...

    def receive_weights(self, version: int, timeout: float) -> None:
        self._post("receive", {"version": version}, timeout)

    def finish_update(self, weights_name: str, timeout: float) -> None:
        self._post("finish", {"name": weights_name}, timeout)
