"""The protocol of a server that samples for the run: what a job asks of it, over whatever wire it speaks.

A server samples from weights that `hybrid_engine.servers` brings it through a process group of the actor's
ranks and the server's workers. Each answer names the weights that its tokens were sampled from, so that a
server that was started anew in the meantime cannot answer with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any, Protocol

import aiohttp

from megatron_rl.config.engines import ENGINES
from megatron_rl.config.schema import RunConfig
from megatron_rl.rollout.types import Completion, GenerationRequest


class ServerError(RuntimeError):
    """Failure of a server that cannot be reached, takes too long or refuses; ``status`` is HTTP's, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refuses_request(self) -> bool:
        """Return whether the request is at fault, so that no other server would answer it either."""
        return self.status in (400, 422)


class Server(Protocol):
    """One server. Every call has a time limit and raises ServerError, unless it states another error.

    A server engine is a folder of `rollout.engines` whose ``make_server(url)`` returns one of these, and a
    line in the table of `config.engines`.
    """

    @property
    def url(self) -> str:
        """Return the address in `rollout.server.urls`, without a slash at its end."""
        ...

    async def generate(
        self, session: aiohttp.ClientSession, request: GenerationRequest, weights: str, seconds: float
    ) -> Completion:
        """Answer a request from the weights of this name; raise ServerError where they are others."""
        ...

    def require_fit(self, config: RunConfig) -> int:
        """Return how many requests the server works on at once; raise UserError unless it fits the run."""
        ...

    def require_open(self) -> None:
        """Raise UserError unless the server samples from tokens."""
        ...

    def claim(self, run: str, seconds: float) -> str | None:
        """Reserve the server for a run for so long; return the name of another run that has it, or None."""
        ...

    def weights(self) -> str:
        """Return the name of the server's weights."""
        ...

    def workers(self) -> int:
        """Return how many processes hold the server's weights: each is a rank of the process group."""
        ...

    def reset_updates(self, seconds: float) -> None:
        """Drop an update, and its process group, that a killed job has left. No error where there is none."""
        ...

    def pause(self, seconds: float) -> None:
        """Hold requests in flight back until `finish_update`."""
        ...

    def join_transfer(self, rendezvous: Mapping[str, Any], seconds: float) -> None:
        """Have the workers join the process group at ``address`` and ``port``, as ranks from ``trainers`` on.

        ``workers``, ``staging_bytes`` and ``verify`` are the `HybridEngine`'s on both sides. Returns once the
        workers' transfer is planned, which needs the actor's ranks at the same time.
        """
        ...

    def start_update(self, seconds: float) -> None:
        """Prepare for new weights."""
        ...

    def receive_weights(self, version: int, seconds: float) -> None:
        """Have the workers sync the weights of ``version``, while the actor's ranks sync them too."""
        ...

    def finish_update(self, name: str, seconds: float) -> None:
        """Use the received weights under this name, drop what was cached from older ones, and resume."""
        ...


def make_servers(config: RunConfig) -> list[Server]:
    """Return the servers of a run whose engine is not in process, in the order of `rollout.server.urls`."""
    folder = import_module(ENGINES[config.rollout.engine].module)
    return [folder.make_server(url) for url in config.rollout.server.urls]


def start_call(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a thread, since both sides of a transfer must run at the same time."""
    executor = ThreadPoolExecutor(max_workers=1)
    future = executor.submit(function, *arguments)
    # The thread ends after this call.
    executor.shutdown(wait=False)
    return future
