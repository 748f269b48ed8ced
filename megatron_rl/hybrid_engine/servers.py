"""Keep the weights of servers equal to a Megatron model's: one meeting per server.

At a meeting all ranks of the actor and all workers of one server form a process group of their own, in which
a `HybridEngine` moves the weights. So a server that dies breaks its own meeting and no other.
"""

from __future__ import annotations

import socket
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from megatron_rl.config.derive import longest_row
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.distributed.groups import join_span, leave_span
from megatron_rl.errors import UserError
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.model import Chunked
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.engines.servers.base import Server, ServerError, alongside, make_servers
from megatron_rl.rollout.engines.servers.client import Lease, ServerGenerator
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.weights.execute import WeightMismatchError

CURRENT, OLD, STRANGE, GONE = "current", "old", "strange", "gone"
_POLL_SECONDS = 2.0


def make_generator(config: RunConfig, layout: ParallelLayout) -> ServerGenerator | None:
    """Return the generator that samples at the run's servers, None on ranks outside ``layout``.

    Raises UserError on all ranks unless every server is there, fits the run and is no other's.
    Collective over the world.
    """
    settings, rank, answer = config.rollout.server, device.rank(), None
    servers = make_servers(config)
    lease = Lease(servers, config.run_dir)
    if rank == 0:
        try:
            answer = sum(server.require_fit(config) for server in servers)
            lease.take()
            for server in servers:
                server.require_open()
        except UserError as error:
            answer = error
    answer = gather_objects(answer)[0]
    if isinstance(answer, UserError):
        raise answer
    if rank not in layout.ranks:
        return None
    place = layout.ranks.index(rank)
    rows = max(1, answer // len(layout.ranks))
    return ServerGenerator(settings, longest_row(config), rows, place, lease.close)


class _Link(NamedTuple):
    """Hold the meeting with one server: what moves the weights, and the process group."""

    transfer: HybridEngine
    group: Any


class ServedWeights:
    """Bring servers the weights of a model, and tell the generators which servers have them.

    It stands where a `HybridEngine` stands for an engine in the ranks. ``model`` is None on ranks without the
    actor, whose ranks are ``actor``; ``generator`` on ranks that do not sample. ``resident`` is as in
    `HybridEngine`. ``say`` prints a line where the user reads it.
    """

    def __init__(
        self,
        model: Chunked | None,
        actor: tuple[int, ...],
        generator: ServerGenerator | None,
        config: RunConfig,
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
        say: Callable[[str], None] = print,
    ) -> None:
        self.version = 0
        self._model, self._actor, self._generator = model, actor, generator
        self._run, self._config, self._resident = config, config.rollout.server, resident
        self._say = say
        self._servers = make_servers(config)
        self._links: dict[Server, _Link] = {}
        self._away: dict[Server, str] = {}
        self._leads = device.rank() == actor[0]
        self._name = self._told(lambda: uuid.uuid4().hex)
        self._started = False

    def _told(self, answer: Callable[[], Any]) -> Any:
        """Return the first actor rank's answer on every rank. Collective over the world."""
        return gather_objects(answer() if self._leads else None)[self._actor[0]]

    def mark_updated(self, *, base: bool = False) -> None:
        """Say that the model's weights have changed; ``base`` makes no difference: all of them move."""
        self.version += 1

    @property
    def _weights(self) -> str:
        """Return the name of the newest weights, which no other job's have."""
        return f"{self._name} {self.version}"

    @contextmanager
    def generation_mode(self) -> Iterator[Metrics]:
        """Bring every server that is there up to ``version``, and have the generators use these alone.

        Waits for the first where none is there. Yields what moving weights measured, and how many servers
        have them. Raises UserError where none comes, and at first where one does not take the weights.
        Collective over the world.
        """
        until, metrics = time.monotonic() + self._config.wait, Metrics()
        while True:
            states, late = self._told(lambda: (self._states(), time.monotonic() > until))
            anew, away = list[Server](), dict[Server, str]()
            for server, (state, why) in zip(self._servers, states, strict=True):
                if state == GONE:
                    away[server] = why
                if state in (STRANGE, GONE):
                    self._leave(server)
                if state in (STRANGE, OLD):
                    moved, failure = self._update(server)
                    metrics += moved
                    away |= {server: failure} if failure else {}
                    anew += [server] if state == STRANGE else []
            self._tell(away, anew)
            if len(away) < len(self._servers) or late or not self._started:
                break
            time.sleep(_POLL_SECONDS)
        self._refuse_lost(away)
        self._started = True
        ready = [server for server in self._servers if server not in away]
        if self._generator is not None:
            self._generator.use(ready, self._weights)
        yield metrics + Metrics.of({"rollout/servers": float(len(ready))})

    def _tell(self, away: dict[Server, str], anew: list[Server]) -> None:
        """Say which servers are away that were not, which are back, and which had strange weights.

        At the start all have them.
        """
        if device.rank() == 0 and self._started:
            for server in self._away.keys() - away.keys():
                self._say(f"server {server.url} is back, with the newest weights")
            for server in anew:
                if server not in away and server not in self._away:
                    self._say(f"warning: server {server.url} had weights of another run, or was started anew")
            for server in away.keys() - self._away.keys():
                self._say(f"warning: server {server.url} is away: {away[server]}")
            if len(away) == len(self._servers) > len(self._away):
                self._say(f"warning: no server is left: waiting for {self._config.wait:g} s for one")
        self._away = away

    def _refuse_lost(self, away: dict[Server, str]) -> None:
        """Raise UserError where no server has the weights, or at the start of a run not all of them."""
        if not away or (len(away) < len(self._servers) and self._started):
            return
        raise UserError(
            "servers do not take the run's weights",
            where="rollout.server.urls",
            expected="every server" if not self._started else "at least one server",
            got="\n".join(f"{server.url}: {why}" for server, why in away.items()),
            fix="start them again; a run that has ended goes on from its last checkpoint",
        )

    def _states(self) -> list[tuple[str, str]]:
        """Return how every server is, asked at the same time, and why one is away."""

        def state(server: Server) -> tuple[str, str]:
            try:
                weights = server.weights()
            except (ServerError, KeyError, TypeError) as error:
                return GONE, f"{type(error).__name__}: {error}"
            if weights == self._weights:
                return CURRENT, ""
            known = weights.startswith(f"{self._name} ") and server in self._links
            return (OLD if known else STRANGE), ""

        with ThreadPoolExecutor(len(self._servers)) as pool:
            return list(pool.map(state, self._servers))

    def _update(self, server: Server) -> tuple[Metrics, str | None]:
        """Bring a server the newest weights; return what that measured, and why it failed.

        Requests of others that are in flight there go on with the new weights. Raises WeightMismatchError.
        Collective over the world.
        """
        begun, moved = time.perf_counter(), None
        place, failure = self._told(lambda: self._prepared(server))
        with self._resident():
            for work in (partial(self._meet, place=place), self._begin, self._move):
                if failure is None:
                    moved, failure = self._tried(server, work)
        if failure is not None:
            self._leave(server)
            return Metrics(), failure
        maxima = moved.maxima if moved is not None else {}
        return Metrics({"time/reshard": (time.perf_counter() - begun, 1.0)}, maxima), None

    def _tried(self, server: Server, work: Callable[[Server], Any]) -> tuple[Any, str | None]:
        """Do some work on the actor's ranks; return its result, and why it failed on any of them.

        A rank that fails leaves the meeting, so that no other waits for it there. Collective over the world.
        """
        result = failure = None
        if self._model is not None:
            try:
                result = work(server)
            except WeightMismatchError:
                raise
            except RuntimeError as error:  # a broken meeting, or what the server said
                failure = f"{type(error).__name__}: {error}"
                self._leave(server)
        failures = [told for told in gather_objects(failure) if told is not None]
        return result, failures[0] if failures else None

    def _prepared(self, server: Server) -> tuple[dict[str, Any], str | None]:
        """Return where a server that is new here meets the actor's ranks, and why it cannot."""
        seconds, place = self._config.update_timeout, {}
        try:
            if server not in self._links:
                server.require_fit(self._run)
                server.require_open()
                # A job that was killed may have left an update, and its meeting.
                server.reset_updates(seconds)
                place = _meeting_place(server) | {"workers": server.workers()}
            server.pause(seconds)
        except (ServerError, UserError, OSError) as error:
            return {}, str(error)
        return place, None

    def _meet(self, server: Server, place: dict[str, Any]) -> None:
        """Form the process group with a server's workers, where there is none, and plan the movement."""
        if server in self._links:
            return
        movement, seconds, waits = self._run.hybrid_engine, self._config.update_timeout, None
        settings = {"staging_bytes": movement.staging_bytes, "verify": movement.verify}
        count = len(self._actor)
        if self._leads:
            info = place | settings | {"trainers": count}
            waits = alongside(server.join_transfer, info, seconds)
        rank = self._actor.index(device.rank())
        with _explained(waits):
            group = join_span(place["address"], place["port"], rank, count + place["workers"], seconds)
            self._links[server] = _Link(HybridEngine(self._model, None, group=group, **settings), group)
            _ = self._links[server].transfer.plan

    def _begin(self, server: Server) -> None:
        if self._leads:
            server.start_update(self._config.update_timeout)

    def _move(self, server: Server) -> Metrics:
        """Move the weights, and let the server go on with them."""
        seconds, waits = self._config.update_timeout, None
        if self._leads:
            waits = alongside(server.receive_weights, self.version, seconds)
        with _explained(waits):
            transfer = self._links[server].transfer
            transfer.version = self.version
            moved = transfer.sync()
        if self._leads:
            server.finish_update(self._weights, seconds)
        return moved

    def _leave(self, server: Server) -> None:
        """End the meeting with a server on this rank, where there is one."""
        link = self._links.pop(server, None)
        if link is not None:
            leave_span(link.group)


@contextmanager
def _explained(waits: Callable[[], Any] | None) -> Iterator[None]:
    """Wait for the server's answer at the end; where both sides failed the server knows better why."""
    try:
        yield
    except WeightMismatchError:
        raise
    except RuntimeError:
        if waits is not None:
            waits()
        raise
    if waits is not None:
        waits()


def _meeting_place(server: Server) -> dict[str, Any]:
    """Return an address of this machine that the server reaches, and a free port there."""
    parts = urllib.parse.urlsplit(server.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((parts.hostname, parts.port))  # of a datagram: nothing is sent
        address = route.getsockname()[0]
    with socket.socket() as probe:
        probe.bind((address, 0))
        return {"address": address, "port": probe.getsockname()[1]}
