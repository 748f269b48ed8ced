"""Protocol of a server that samples for the run, independent of its network protocol.

A server receives its weights from `hybrid_engine.servers`, through a process group of the actor's ranks and
the server's workers. Every response names the weights that its tokens were sampled from, so a server that was
restarted and has other weights is detected by its first response.
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
    """Failure of a server that is unreachable, too slow, or refuses a request.

    ``status`` is the HTTP status, 0 without a response.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refuses_request(self) -> bool:
        """Return whether the request is invalid, so every other server would refuse it, too."""
        # Bad Request and Unprocessable Content.
        return self.status in (400, 422)


class Server(Protocol):
    """One server. Every call has a time limit and raises ServerError, except where another error is named.

    A server engine is a folder of `rollout.engines` whose ``make_server(url)`` returns a `Server`, and a line
    in the table of `config.engines`.
    """

    # Identity and requests.

    @property
    def url(self) -> str:
        """Return the URL in `rollout.server.urls`, without a slash at its end."""
        ...

    async def generate(
        self,
        session: aiohttp.ClientSession,
        request: GenerationRequest,
        weights: str,
        seconds: float,
    ) -> Completion:
        """Sample a request from the weights of this name; raise ServerError if the server has other weights.

        A coroutine, so that one thread can have many requests in flight.
        """
        ...

    # Before a run: whether the server fits the run and is free.

    def require_fit(self, config: RunConfig) -> int:
        """Return the maximum number of requests in flight; raise UserError if the server does not fit."""
        ...

    def require_open(self) -> None:
        """Raise UserError unless the server accepts token ids to sample from."""
        ...

    def claim(self, run: str, seconds: float) -> str | None:
        """Reserve the server for a run for this time; return the holder if it is another run, else None."""
        ...

    # State of the weights.

    def weights(self) -> str:
        """Return the name of the server's weights."""
        ...

    def workers(self) -> int:
        """Return the number of the server's worker processes: each is a rank of the process group."""
        ...

    # One update of the weights, in the order of the calls. `reset_updates` and `join_transfer` belong to the
    # first update of a server, and to the first after a failed one.

    def reset_updates(self, seconds: float) -> None:
        """Drop an unfinished update of a killed job, and its process group. Without one, do nothing."""
        ...

    def pause(self, seconds: float) -> None:
        """Pause requests in flight until `finish_update`: their weights are about to change."""
        ...

    def join_transfer(self, rendezvous: Mapping[str, Any], seconds: float) -> None:
        """Make the workers join a process group with the actor's ranks, and plan the transfer.

        The rendezvous is at ``address`` and ``port``; the workers are the ranks from ``trainers`` on.
        ``workers``, ``staging_bytes`` and ``verify`` are equal on both sides. Planning is collective, so the
        call returns only if the actor's ranks plan at the same time.
        """
        ...

    def start_update(self, seconds: float) -> None:
        """Prepare for new weights."""
        ...

    def receive_weights(self, version: int, seconds: float) -> None:
        """Receive the weights of ``version`` in the workers. Collective over the workers and actor ranks."""
        ...

    def finish_update(self, name: str, seconds: float) -> None:
        """Use the received weights under this name, drop the cache of older ones, and resume requests."""
        ...


def make_servers(config: RunConfig) -> list[Server]:
    """Return the servers of a run, in the order of `rollout.server.urls`; the engine is a server engine."""
    # Imported once it is chosen: the libraries of other engines need not be installed.
    folder = import_module(ENGINES[config.rollout.engine].module)
    return [folder.make_server(url) for url in config.rollout.server.urls]


def start_call(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in a thread, since both sides of a transfer must run at the same time."""
    executor = ThreadPoolExecutor(max_workers=1)
    future = executor.submit(function, *arguments)
    # The thread ends after this call.
    executor.shutdown(wait=False)
    return future
