"""A generator that spreads requests over several servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from megatron_rl.config.sections.rollout import ServerConfig
from megatron_rl.rollout.engines.servers.base import Server, ServerError
from megatron_rl.rollout.types import Completion, GenerationRequest, failed_completion

STEP_SECONDS = 0.05
"""Longest wait of a `ServerGenerator.step` without an answer."""


class ServerGenerator:
    """Sample at several servers; a `Generator` whose requests survive the servers that they were sent to.

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
        self._resubmitted = 0
        self._open: dict[int, asyncio.Task[Completion]] = {}
        self._busy: dict[Server, int] = {}
        self._homes: dict[int, Server] = {}
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None

    def use(self, servers: Sequence[Server], weights: str) -> None:
        """Sample at these servers, from weights of this name."""
        self._servers, self._weights = list(servers), weights

    def resubmitted(self) -> int:
        """Return how many requests went to another server since the last call."""
        count, self._resubmitted = self._resubmitted, 0
        return count

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """See `Generator.sampling`."""
        first = self._place % max(1, len(self._servers))
        self._busy = dict.fromkeys(self._servers[first:] + self._servers[:first], 0)
        self._homes = {}
        try:
            yield
        finally:
            self._cancel(list(self._open))

    def submit(self, request: GenerationRequest) -> None:
        """Take a request; see `Generator.submit`."""
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
        """Forget every open request: servers answer whole ones; see `Generator.interrupt`."""
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

    async def _answer(self, request: GenerationRequest) -> Completion:
        """Answer a request by the first server that does."""
        while (server := self._choose(request.seed)) is not None:
            self._busy[server] += 1
            try:
                return await server.generate(self._client(), request, self._weights, self._seconds)
            except ServerError as error:
                if error.refuses_request:
                    break
                self._busy.pop(server, None)
                self._resubmitted += bool(self._busy)
            finally:
                if server in self._busy:
                    self._busy[server] -= 1
        return failed_completion(request.number)
