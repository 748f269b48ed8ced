"""Client of a server with one JSON object as request and one as response, on one path per call."""

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
"""Seconds for a request other than generation."""


def make_server(url: str) -> LetterServer:
    """Return the client of the server at ``url``."""
    return LetterServer(url)


class LetterServer:
    """Implementation of `rollout.engines.servers.Server`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def _write(self, path: str, letter: Mapping[str, Any], seconds: float = SECONDS) -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(letter).encode())
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                return json.load(reply)["answer"]
        except OSError as error:
            raise ServerError(f"{self.url}/{path}: {error}") from error

    async def generate(
        self,
        session: aiohttp.ClientSession,
        request: GenerationRequest,
        weights_name: str,
        timeout: float,
    ) -> Completion:
        # The protocol is this engine's own; only the method names are prescribed.
        letter = {
            "number": request.number,
            "tokens": list(request.tokens),
            "sampling": request.sampling._asdict(),
            "limit": request.limit,
            "seed": request.seed,
            "done": request.done,
        }

        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.post(f"{self.url}/generate", json=letter, timeout=limit) as reply:
                answer = (await reply.json())["answer"]
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self.url}: {error}") from error

        # A server that was restarted may have lost its weights since the last check.
        if answer["weights"] != weights_name:
            raise ServerError(f"{self.url}: weights {answer['weights']} instead of {weights_name}")
        return Completion(
            request.number,
            answer["tokens"],
            answer["log_probs"],
            answer["finish_reason"],
        )

    def require_fit(self, config: RunConfig) -> int:
        return self._write("most_requests", {})

    def require_token_sampling(self) -> None:
        self._write("weights", {})

    def claim(self, run: str, seconds: float) -> str | None:
        return self._write("claim", {"run": run, "seconds": seconds})

    def fetch_weights_name(self) -> str:
        return self._write("weights", {})

    def count_workers(self) -> int:
        return 1

    def reset_updates(self, timeout: float) -> None:
        self._write("reset", {}, timeout)

    def pause(self, timeout: float) -> None: ...

    def join_transfer(self, rendezvous: Mapping[str, Any], timeout: float) -> None:
        self._write("join", rendezvous, timeout)

    def start_update(self, timeout: float) -> None: ...

    def receive_weights(self, version: int, timeout: float) -> None:
        self._write("receive", {"version": version}, timeout)

    def finish_update(self, weights_name: str, timeout: float) -> None:
        self._write("finish", {"name": weights_name}, timeout)
