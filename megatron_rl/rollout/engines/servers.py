"""Servers that sample for the run: client protocol, distribution of requests, and reservation of servers.

A `Server` is a client that hides the network protocol. The server receives its weights from
`hybrid_engine.servers`, through a process group of the actor's ranks and the server's workers. Every response
names the weights that its tokens were sampled from, so the first response of a restarted server shows that
the server has other weights.

`ServerGenerator` distributes the job's requests over the servers, and `Lease` reserves the servers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import aiohttp

from megatron_rl.config.engines import ENGINES
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.rollout import ServerConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.stopping import StopTextFinder
from megatron_rl.rollout.types import Completion, GenerationRequest, make_failed_completion


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
    """Client of a server that samples for the run and receives its weights.

    Every call has a time limit and raises ServerError, except where another error is named.

    To add a server engine, add an entry to the table of `config.engines` and a folder to `rollout.engines`,
    with a function ``make_server(url)`` that returns a `Server`.
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
        weights_name: str,
        timeout: float,
    ) -> Completion:
        """Sample the completion of a request with the weights ``weights_name``, see `finish_update`.

        Raises ServerError if the server has other weights. ``timeout`` is in seconds. The method is a
        coroutine, so that one thread can send many requests at a time.
        """
        ...

    # Before a run: whether the server is compatible with the run and is free.

    def require_compatible(self, config: RunConfig) -> int:
        """Check that the server is compatible with the run.

        Returns the server's maximum number of concurrent requests. Raises UserError if ``config``
        requires another model or other settings.
        """
        ...

    def require_token_prompts(self) -> None:
        """Raise UserError unless the server accepts prompts of token ids."""
        ...

    def claim(self, run: str, seconds: float) -> str | None:
        """Reserve the server for ``run`` for ``seconds``, unless another run has reserved it.

        Returns the name of the other run, or None if the server is now reserved for ``run``.
        """
        ...

    # State of the weights.

    def fetch_weights_name(self) -> str:
        """Return the name of the server's weights, which the last `finish_update` has set."""
        ...

    def count_workers(self) -> int:
        """Return the number of the server's worker processes: each is a rank of the process group."""
        ...

    # One update of the weights, in the order of the calls. `reset_updates` and `join_transfer` are only
    # called before a server's first update, and before the first update after a failure. Timeouts are in
    # seconds.

    def reset_updates(self, timeout: float) -> None:
        """Drop an unfinished weight update, which a killed job may have left, and its process group."""
        ...

    def pause(self, timeout: float) -> None:
        """Pause requests in flight until `finish_update`: their weights are about to change."""
        ...

    def join_transfer(self, rendezvous: Mapping[str, Any], timeout: float) -> None:
        """Make the workers join a process group with the actor's ranks, and plan the transfer.

        ``rendezvous`` has the keys ``address``, ``port``, ``trainers`` (number of actor ranks; the workers'
        ranks follow), ``workers``, ``staging_bytes`` and ``verify``. Planning is collective, so the call
        returns only if the actor's ranks plan at the same time.
        """
        ...

    def start_update(self, timeout: float) -> None:
        """Prepare the workers for new weights."""
        ...

    def receive_weights(self, version: int, timeout: float) -> None:
        """Receive the weights of ``version`` in the workers. Collective over the workers and actor ranks."""
        ...

    def finish_update(self, weights_name: str, timeout: float) -> None:
        """Set the name of the received weights, drop the caches of older weights, and resume requests."""
        ...


def make_servers(config: RunConfig) -> list[Server]:
    """Make a `Server`, the client object of a server, for each URL in `rollout.server.urls`."""
    # Import only the configured engine: the libraries of other engines need not be installed.
    engine_module = import_module(ENGINES[config.rollout.engine].module)
    return [engine_module.make_server(url) for url in config.rollout.server.urls]


def start_in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Start a function in a new thread; return the future of its result.

    Use it for a server call that returns only after this process has taken part in the transfer.
    """
    executor = ThreadPoolExecutor(max_workers=1)
    future = executor.submit(function, *arguments)

    # The thread ends after this call.
    executor.shutdown(wait=False)
    return future


STEP_SECONDS = 0.05
"""Maximum wait of `ServerGenerator.step` for a completion; the scheduler has other work between two steps."""

LEASE_SECONDS = 30.0
"""Time after which a lease expires unless it is renewed, so that a killed run does not block its servers."""

RENEW_SECONDS = 5.0
"""Interval between two renewals of a lease; several renewals may fail before the lease expires."""


class ServerGenerator:
    """Generator that distributes requests over several servers and tolerates the loss of servers.

    All requests of a sequence are sent to the same server, which has cached the sequence's prefix. If a
    request fails because this server is unreachable or has old weights, the request is resubmitted to a
    different server. `pop_resubmitted` returns the number of these requests. If no server remains, the
    request fails.

    ``max_open_requests``: maximum number of open requests, which is `Generator.most_rows`.
    ``client_index``: index of this client among all sampling ranks. Clients start with different servers, to
        share the load.
    ``on_close``: function that `close` calls.
    ``stop_finder``: finder of stop texts. A response that the server has continued after a stop text is cut.
    """

    def __init__(
        self,
        config: ServerConfig,
        max_model_len: int,
        max_open_requests: int,
        client_index: int = 0,
        on_close: Callable[[], None] = lambda: None,
        stop_finder: StopTextFinder | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        # The name of the attribute is that of the protocol `Generator`.
        self.most_rows = max_open_requests
        self._request_timeout = config.request_timeout
        self._client_index = client_index
        self._on_close = on_close
        self._stop_finder = stop_finder

        self._servers: list[Server] = []
        self._weights_name = ""
        self._num_resubmitted = 0

        # `GenerationRequest.number` of an open request -> its task on the event loop.
        self._tasks: dict[int, asyncio.Task[Completion]] = {}
        # Server that has not been lost in this round -> count of its requests in flight.
        self._in_flight: dict[Server, int] = {}
        self._server_by_seed: dict[int, Server] = {}

        # The event loop runs only inside `step` and the methods that end requests, so it needs no thread.
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None

    def use_servers(self, servers: Sequence[Server], weights_name: str) -> None:
        """Set the servers to sample from, and the name of their weights, see `Server.finish_update`."""
        self._servers = list(servers)
        self._weights_name = weights_name

    def pop_resubmitted(self) -> int:
        """Return the number of requests that were resubmitted since the last call; reset the counter."""
        num_resubmitted = self._num_resubmitted
        self._num_resubmitted = 0
        return num_resubmitted

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """See `Generator.sampling`."""
        # Try every server of the run again in each round, even a server that was lost in the last round.
        # A request is sent to the first of equally busy servers, so each client has a different first server.
        first_index = self._client_index % max(1, len(self._servers))
        rotated_servers = self._servers[first_index:] + self._servers[:first_index]
        self._in_flight = dict.fromkeys(rotated_servers, 0)
        self._server_by_seed = {}

        try:
            yield
        finally:
            self._cancel_requests(list(self._tasks))

    def submit(self, request: GenerationRequest) -> None:
        """See `Generator.submit`."""
        request = replace(request, tokens=list(request.tokens))
        self._tasks[request.number] = self._loop.create_task(self._complete_request(request))

    def step(self) -> list[Completion]:
        """Wait up to `STEP_SECONDS` for a completion; return all completions that have arrived."""
        if not self._tasks:
            return []

        tasks = list(self._tasks.values())
        self._run_coroutine(asyncio.wait(tasks, timeout=STEP_SECONDS, return_when="FIRST_COMPLETED"))

        finished_numbers = [number for number, task in self._tasks.items() if task.done()]
        return [self._tasks.pop(number).result() for number in finished_numbers]

    def abort(self, number: int) -> None:
        """Cancel the open request with this number by dropping its connection."""
        if number in self._tasks:
            self._cancel_requests([number])

    def interrupt(self) -> list[Completion]:
        """Cancel every open request; return no tokens, since servers return only complete responses."""
        self._cancel_requests(list(self._tasks))
        return []

    @property
    def kept(self) -> tuple[int, ...]:
        """Return no seeds: servers do not retain cancelled requests."""
        return ()

    def close(self) -> None:
        """Drop the connections. May be called twice."""
        if self._loop.is_closed():
            return

        self._cancel_requests(list(self._tasks))
        if self._session is not None:
            self._run_coroutine(self._session.close())
        self._loop.close()
        self._on_close()

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the event loop to its end, and return its result."""
        return self._loop.run_until_complete(coroutine)

    def _get_session(self) -> aiohttp.ClientSession:
        """Return the HTTP session, which is created at the first request."""
        if self._session is None:
            # Never reuse a connection: the server may have closed it between two steps, and the next request
            # on it would fail.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)

        return self._session

    def _cancel_requests(self, numbers: list[int]) -> None:
        """Cancel the open requests ``numbers``, and wait until their connections are dropped."""
        tasks = [self._tasks.pop(number) for number in numbers]
        for task in tasks:
            task.cancel()

        if tasks:
            self._run_coroutine(asyncio.wait(tasks))

    def _choose_server(self, seed: int) -> Server | None:
        """Choose the server for the sequence with this ``seed``; return None if all servers are lost.

        A continued sequence stays on its server; a new sequence gets the least busy server.
        """
        server = self._server_by_seed.get(seed)
        if server in self._in_flight:
            return server

        # The sequence is new, or its server is lost.
        if not self._in_flight:
            return None
        least_busy = min(self._in_flight, key=lambda candidate: self._in_flight[candidate])
        self._server_by_seed[seed] = least_busy
        return least_busy

    async def _complete_request(self, request: GenerationRequest) -> Completion:
        """Send a request to the server of its sequence; if the server is lost, send it to a different one.

        Returns a failed completion if no server remains, or if the request is invalid.
        """
        while (server := self._choose_server(request.seed)) is not None:
            self._in_flight[server] += 1

            try:
                completion = await server.generate(
                    self._get_session(), request, self._weights_name, self._request_timeout
                )
                if self._stop_finder is not None:
                    completion = self._stop_finder.trim_completion(request, completion)
                return completion
            except ServerError as error:
                if error.refuses_request:
                    break

                # No sequence uses this server again in this round.
                self._in_flight.pop(server, None)
                if self._in_flight:
                    self._num_resubmitted += 1
            finally:
                if server in self._in_flight:
                    self._in_flight[server] -= 1
        return make_failed_completion(request.number)


class Lease:
    """Reservation of servers for one run, renewed by a thread until it is closed.

    Without a lease, two runs that update the weights of one server at the same time would block each other.
    """

    def __init__(self, servers: Sequence[Server], run_dir: str) -> None:
        self._servers = servers
        self._run_name = f"the run in {run_dir} (process {os.getpid()} on {socket.gethostname()})"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, daemon=True)

    def acquire(self) -> None:
        """Reserve the servers; wait for leases of killed runs to expire.

        Raises UserError if another run renews its lease of a server, or if two URLs name the same server.
        """
        # A killed run's lease expires within this time.
        deadline = time.monotonic() + LEASE_SECONDS + RENEW_SECONDS
        while True:
            conflict = self._claim_all()
            if conflict is None:
                break

            url, holder = conflict
            if holder.startswith(self._run_name):
                raise UserError(
                    "two URLs name the same server",
                    where="rollout.server.urls",
                    expected="the URL of each server once",
                    got=f"{url} is the server of {holder.removeprefix(self._run_name).strip()}",
                    fix=f"remove {url}",
                )

            if time.monotonic() > deadline:
                raise UserError(
                    "a server is reserved by another run",
                    where=f"{url}, of rollout.server.urls",
                    expected="a server that no other run uses, since each run updates its weights",
                    got=f"reserved by {holder}",
                    fix="name another server, or start this run after the other one has ended",
                )
            time.sleep(RENEW_SECONDS / 5)

        self._thread.start()

    def _claim_all(self) -> tuple[str, str] | None:
        """Reserve every server; return (URL, holder) of the first one with a different holder, or None."""
        holders = [(server.url, self._claim_or_raise(server)) for server in self._servers]
        for url, holder in holders:
            if holder:
                return url, holder
        return None

    def _claim_or_raise(self, server: Server) -> str | None:
        """Reserve a server as `_claim` does; raise UserError if the server's response is unexpected."""
        try:
            return self._claim(server, LEASE_SECONDS)
        except (ServerError, KeyError, ValueError) as error:
            raise UserError(
                "a server does not report its holder",
                where=f"{server.url}, of rollout.server.urls",
                expected="a server that was started with this version of megatron_rl",
                got=f"{type(error).__name__}: {error}",
                fix="start it again with the command that `check` shows",
            ) from error

    def _claim(self, server: Server, seconds: float) -> str | None:
        """Reserve a server for ``seconds``; return None on success, or the name of the current holder.

        The reservation is made under the name of the run and the URL. If `rollout.server.urls` has two URLs
        of the same server, the second reservation fails, and the holder's name has the first URL.
        """
        return server.claim(f"{self._run_name} {server.url}", seconds)

    def _renew_until_closed(self) -> None:
        """Renew the lease until it is closed: the main function of the thread."""
        while not self._closed.wait(RENEW_SECONDS):
            self._set_remaining_time(LEASE_SECONDS)

    def _set_remaining_time(self, seconds: float) -> None:
        """Set the remaining time of this lease to ``seconds`` on every server that can be reached."""
        for server in self._servers:
            # Ignore a lost server: the next sampling request to it fails, and is resubmitted.
            with suppress(ServerError, KeyError, ValueError):
                self._claim(server, seconds)

    def close(self) -> None:
        """Release the servers. May be called twice."""
        if self._closed.is_set() or not self._thread.is_alive():
            return

        self._closed.set()
        self._thread.join()

        # A lease of zero seconds releases the server.
        self._set_remaining_time(0.0)
