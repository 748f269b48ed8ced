"""Weight sync from a Megatron model to vLLM's API servers, in one process group per server.

The idea: all ranks of the actor and all workers of one server form a process group, in which a `HybridEngine`
moves the weights by a plan that is built once. A server that dies breaks only its own group.
"""

from __future__ import annotations

import socket
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rl.config.derive import longest_row
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.distributed.groups import join_cross_job_group, leave_cross_job_group
from megatron_rl.errors import UserError
from megatron_rl.hybrid_engine.rollout_policy import RolloutPolicy
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.model import ChunkedModel
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.engines.servers import (
    Lease,
    Server,
    ServerError,
    ServerGenerator,
    make_servers,
    start_in_thread,
)
from megatron_rl.rollout.stopping import StopTextFinder
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.weights.execute import WeightMismatchError

CURRENT = "current"
"""State of a server that already has the version of the weights to sample from."""
OUTDATED = "outdated"
"""State of a server with older weights of this job and an intact process group."""
FOREIGN = "foreign"
"""State of a server with weights of another job, or after a restart."""
UNREACHABLE = "unreachable"
"""State of a server that does not respond."""

_POLL_SECONDS = 2.0
"""Seconds between two attempts to reach a server while no server is available."""


def make_generator(config: RunConfig, layout: ParallelLayout) -> ServerGenerator | None:
    """Return the client that samples responses from the run's servers, or None on ranks outside ``layout``.

    Raises UserError on all ranks unless every server is reachable, is compatible with ``config`` and is not
    reserved by another run. Collective over the world.
    """
    rank = device.rank()
    servers = make_servers(config)
    lease = Lease(servers, config.run_dir)

    # Only rank 0 checks and claims the servers, since a server can be claimed only once. All ranks receive
    # the error or the capacity, which is the number of sequences that all servers together sample at once.
    capacity_or_error: int | UserError = 0
    if rank == 0:
        try:
            capacity_or_error = sum(server.require_compatible(config) for server in servers)
            lease.acquire()
            for server in servers:
                server.require_token_prompts()
        except UserError as error:
            capacity_or_error = error

    capacity_or_error = gather_objects(capacity_or_error)[0]
    if isinstance(capacity_or_error, UserError):
        raise capacity_or_error
    if rank not in layout.ranks:
        return None

    # Divide the servers' capacity among the ranks that send requests.
    rank_in_layout = layout.ranks.index(rank)
    max_sequences = max(1, capacity_or_error // len(layout.ranks))
    return ServerGenerator(
        config.rollout.server,
        longest_row(config),
        max_sequences,
        rank_in_layout,
        lease.close,
        StopTextFinder.from_model(config.model.path),
    )


@dataclass(frozen=True)
class _ServerLink:
    """Weight sync to one server, and the process group of the actor's ranks and the server's workers."""

    transfer: HybridEngine
    """Weight sync over ``group``."""
    group: Any
    """Process group with the workers of the server."""


@dataclass(frozen=True)
class _ServerState:
    """State of one server's weights, and the reason if it is unreachable.

    Example: ``_ServerState("unreachable", "ServerError: http://a:8000/health: connection refused")``.
    """

    name: str
    """`CURRENT`, `OUTDATED`, `FOREIGN` or `UNREACHABLE`."""
    reason: str = ""
    """Error of the request to an unreachable server; empty for other servers."""


class ServedWeights:
    """Weight sync with servers, in place of the `HybridEngine` of a run with engines in its own processes.

    ``model``: the trained model, or None on ranks without the actor.
    ``actor_ranks``: ranks of the actor.
    ``generator``: client of the servers, or None on ranks that do not sample.
    ``resident``: context in which the model's weights are in device memory.
    ``print_line``: function that prints a line on the console.
    ``version``: number of updates of the model's weights.
    """

    def __init__(
        self,
        model: ChunkedModel | None,
        actor_ranks: tuple[int, ...],
        generator: ServerGenerator | None,
        config: RunConfig,
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
        print_line: Callable[[str], None] = print,
    ) -> None:
        self.version = 0
        self.rollout_policy = RolloutPolicy(model, config.hybrid_engine.every)
        # Version of the weights to which servers are synced.
        self._served_version = 0

        # Source of the weights, and the clients of the servers.
        self._model = model
        self._actor_ranks = actor_ranks
        self._generator = generator
        self._run_config = config
        self._config = config.rollout.server
        self._resident = resident
        self._print_line = print_line

        self._servers = make_servers(config)
        self._links: dict[Server, _ServerLink] = {}
        # Server that was unavailable in the last sync -> reason.
        self._unavailable_reasons: dict[Server, str] = {}
        self._is_leader = device.rank() == actor_ranks[0]
        # The name is unique, so that weights of another job are never mistaken for weights of this job.
        self._job_name = self._call_on_leader(lambda: uuid.uuid4().hex)
        self._started = False

    def _call_on_leader(self, function: Callable[[], Any]) -> Any:
        """Call a function on the actor's first rank; return its result on every rank.

        Collective over the world.
        """
        result = None
        if self._is_leader:
            result = function()
        results_by_rank = gather_objects(result)
        return results_by_rank[self._actor_ranks[0]]

    def mark_updated(self, *, base: bool = False) -> None:
        """Increment the version, after the model's weights changed.

        ``base``: whether the base weights of a model with adapters changed, too. It is ignored: adapters are
        merged into the weights for servers, so every sync sends all weights.
        """
        self.version += 1

    @property
    def rollout_version(self) -> int:
        """Return the version of the weights from which `generation_mode` samples."""
        return self.rollout_policy.version_at(self.version)

    @property
    def _weights_name(self) -> str:
        """Return the name of the served weights, which is unique among all jobs."""
        return f"{self._job_name} {self._served_version}"

    @contextmanager
    def generation_mode(self, *, newest: bool = False) -> Iterator[Metrics]:
        """Sync every reachable server to ``rollout_version``, and make the generator use only these servers.

        With ``newest`` the servers are synced to the newest version, for an evaluation. Waits if no server is
        reachable. Yields the metrics of the sync and the number of servers. Raises UserError if no server
        becomes reachable in time, and at the start of a run if the sync of any server fails. Collective over
        the world.
        """
        deadline = time.monotonic() + self._config.wait
        metrics = Metrics()
        self._served_version = self.rollout_version
        if newest:
            self._served_version = self.version

        while True:
            # Only the leader queries the servers and reads the clock, so that all ranks take the same branch.
            server_states, timed_out = self._call_on_leader(
                lambda: (self._query_states(), time.monotonic() > deadline)
            )
            unavailable_reasons: dict[Server, str] = {}
            foreign_servers: list[Server] = []
            for server, state in zip(self._servers, server_states, strict=True):
                if state.name == UNREACHABLE:
                    unavailable_reasons[server] = state.reason
                if state.name in (FOREIGN, UNREACHABLE):
                    self._leave_group(server)
                if state.name == FOREIGN:
                    foreign_servers.append(server)
                if state.name in (FOREIGN, OUTDATED):
                    sync_metrics, failure = self._sync_server(server)
                    metrics += sync_metrics
                    if failure is not None:
                        unavailable_reasons[server] = failure

            self._report_changes(unavailable_reasons, foreign_servers)
            # Wait if no server is available. At the start of a run this is an error, without waiting.
            if len(unavailable_reasons) < len(self._servers) or timed_out or not self._started:
                break
            time.sleep(_POLL_SECONDS)

        self._require_servers(unavailable_reasons)
        self._started = True
        if not newest and self._served_version != self.rollout_policy.version:
            with self._resident():
                self.rollout_policy.capture_weights(self._served_version)
        available_servers = [server for server in self._servers if server not in unavailable_reasons]
        if self._generator is not None:
            self._generator.use_servers(available_servers, self._weights_name)
        yield metrics + Metrics.of({"rollout/servers": float(len(available_servers))})

    def _report_changes(self, unavailable_reasons: dict[Server, str], foreign_servers: list[Server]) -> None:
        """Print which servers became unavailable, which are back, and which had foreign weights.

        Prints nothing at the start of a run, when every server has foreign weights.
        """
        earlier_reasons = self._unavailable_reasons
        self._unavailable_reasons = unavailable_reasons
        if device.rank() != 0 or not self._started:
            return

        for server in earlier_reasons.keys() - unavailable_reasons.keys():
            self._print_line(f"server {server.url} is back, with the newest weights")
        for server in foreign_servers:
            if server not in unavailable_reasons and server not in earlier_reasons:
                self._print_line(f"warning: server {server.url} had weights of another run, or was restarted")
        for server in unavailable_reasons.keys() - earlier_reasons.keys():
            self._print_line(f"warning: server {server.url} is unavailable: {unavailable_reasons[server]}")
        if len(unavailable_reasons) == len(self._servers) > len(earlier_reasons):
            self._print_line(
                f"warning: no server is available: waiting up to {self._config.wait:g} s for one"
            )

    def _require_servers(self, unavailable_reasons: dict[Server, str]) -> None:
        """Raise UserError if no server has the weights, or at the start of a run if any server lacks them."""
        has_available_server = len(unavailable_reasons) < len(self._servers)
        if not unavailable_reasons or (has_available_server and self._started):
            return

        expected = "every server"
        if self._started:
            expected = "at least one server"
        raise UserError(
            "servers have not received the run's weights",
            where="rollout.server.urls",
            expected=expected,
            got="\n".join(f"{server.url}: {reason}" for server, reason in unavailable_reasons.items()),
            fix="restart these servers, then start the run again: it resumes from its last checkpoint",
        )

    def _query_states(self) -> list[_ServerState]:
        """Return the state of every server, queried concurrently."""
        with ThreadPoolExecutor(len(self._servers)) as executor:
            return list(executor.map(self._query_state, self._servers))

    def _query_state(self, server: Server) -> _ServerState:
        """Query the version of one server's weights and return the server's state."""
        try:
            weights_name = server.fetch_weights_name()
        except (ServerError, KeyError, TypeError) as error:
            return _ServerState(UNREACHABLE, f"{type(error).__name__}: {error}")
        if weights_name == self._weights_name:
            return _ServerState(CURRENT)
        # If this job has no process group with the server (`_links`), a group must be created, as for a
        # foreign server.
        if weights_name.startswith(f"{self._job_name} ") and server in self._links:
            return _ServerState(OUTDATED)
        return _ServerState(FOREIGN)

    def _sync_server(self, server: Server) -> tuple[Metrics, str | None]:
        """Sync a server to the served version; return the metrics, and the reason if the sync failed.

        Requests in flight at the server continue with the new weights. Raises WeightMismatchError if a
        checksum differs. Collective over the world.
        """
        start = time.perf_counter()
        metrics = None
        rendezvous, failure = self._call_on_leader(lambda: self._prepare_server(server))
        served_weights = self.rollout_policy.use_version(self._served_version, self.version)
        with self._resident(), served_weights:
            # All ranks of the actor complete each action before any rank starts the next one.
            for action in (
                partial(self._join_rendezvous, rendezvous=rendezvous),
                self._start_update,
                self._transfer_weights,
            ):
                if failure is None:
                    metrics, failure = self._run_on_actor(server, action)

        # A failed action leaves the process group in an unknown state, so the next sync forms a new group.
        if failure is not None:
            self._leave_group(server)
            return Metrics(), failure

        # Ranks without the actor have no metrics of the transfer.
        maxima: Mapping[str, float] = {}
        if metrics is not None:
            maxima = metrics.maxima
        seconds = time.perf_counter() - start
        return Metrics({"time/reshard": (seconds, 1.0)}, maxima), None

    def _run_on_actor(self, server: Server, action: Callable[[Server], Any]) -> tuple[Any, str | None]:
        """Run an action on the actor's ranks; return this rank's result, and the error if any rank failed.

        A failed rank leaves the process group, so that no other rank waits for it in a collective. Collective
        over the world.
        """
        # Every rank must join the gather below, including ranks without the actor.
        result = None
        failure = None
        if self._model is not None:
            try:
                result = action(server)
            except WeightMismatchError:
                raise
            except RuntimeError as error:  # the process group is broken, or the server reported an error
                failure = f"{type(error).__name__}: {error}"
                self._leave_group(server)

        failures = [reason for reason in gather_objects(failure) if reason is not None]
        if failures:
            return result, failures[0]
        return result, None

    def _prepare_server(self, server: Server) -> tuple[dict[str, Any], str | None]:
        """Pause a server; return the rendezvous of a new process group, and the reason if a step failed.

        If the server has a `_ServerLink`, its process group is reused and the rendezvous is empty.
        """
        timeout = self._config.update_timeout
        rendezvous: dict[str, Any] = {}
        try:
            # Without a link the server is new to this job, or was restarted.
            if server not in self._links:
                server.require_compatible(self._run_config)
                server.require_token_prompts()
                # A killed job may have left an unfinished update and its process group.
                server.reset_updates(timeout)
                rendezvous = _find_rendezvous_address(server) | {"workers": server.count_workers()}

            # Requests in flight must not read weights of two versions.
            server.pause(timeout)
        except (ServerError, UserError, OSError) as error:
            return {}, str(error)
        return rendezvous, None

    def _join_rendezvous(self, server: Server, rendezvous: dict[str, Any]) -> None:
        """Form the process group with a server's workers and build the plan, unless this was done before.

        ``rendezvous`` has the address, the port and the number of workers, from `_prepare_server`. Collective
        over the actor's ranks and the server's workers.
        """
        if server in self._links:
            return

        # The leader calls the server in a thread, because the call returns only after the actor's ranks and
        # the server's workers have joined and built the plan.
        hybrid_engine = self._run_config.hybrid_engine
        settings = {
            "staging_bytes": hybrid_engine.staging_bytes,
            "verify": hybrid_engine.verify,
        }
        timeout = self._config.update_timeout
        num_actor_ranks = len(self._actor_ranks)
        server_call = None
        if self._is_leader:
            arguments = rendezvous | settings | {"trainers": num_actor_ranks}
            server_call = start_in_thread(server.join_transfer, arguments, timeout)

        with _wait_for_server_call(server_call):
            group = join_cross_job_group(
                rendezvous["address"],
                rendezvous["port"],
                self._actor_ranks.index(device.rank()),
                num_actor_ranks + rendezvous["workers"],
                timeout,
            )
            self._links[server] = _ServerLink(
                HybridEngine(self._model, None, group=group, **settings),
                group,
            )
            # The first access builds the plan, which is collective with the workers.
            _ = self._links[server].transfer.plan

    def _start_update(self, server: Server) -> None:
        """Start an update of a server's weights, by a request of the leader."""
        if self._is_leader:
            server.start_update(self._config.update_timeout)

    def _transfer_weights(self, server: Server) -> Metrics:
        """Move the weights, and resume the server with them; return the metrics of the sync."""
        # The server's call runs in a thread, since its workers receive while the actor's ranks send.
        timeout = self._config.update_timeout
        server_call = None
        if self._is_leader:
            server_call = start_in_thread(server.receive_weights, self._served_version, timeout)
        with _wait_for_server_call(server_call):
            transfer = self._links[server].transfer
            transfer.version = self._served_version
            metrics = transfer.sync()

        # Set the name of the new weights only after they are verified on both ends.
        if self._is_leader:
            server.finish_update(self._weights_name, timeout)
        return metrics

    def _leave_group(self, server: Server) -> None:
        """Leave this rank's process group with a server, if any."""
        link = self._links.pop(server, None)
        if link is not None:
            leave_cross_job_group(link.group)


@contextmanager
def _wait_for_server_call(server_call: Future[Any] | None) -> Iterator[None]:
    """Wait at the end of the block for a server call that runs in a thread, if any.

    If both the block and the call fail, the call's error is raised, since it explains why the process group
    broke.
    """
    try:
        yield
    except WeightMismatchError:
        raise
    except RuntimeError:
        if server_call is not None:
            server_call.result()
        raise

    if server_call is not None:
        server_call.result()


def _find_rendezvous_address(server: Server) -> dict[str, Any]:
    """Return the ``address`` of this machine from which it reaches the server, and a free ``port``."""
    url = urllib.parse.urlsplit(server.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        # Connecting a datagram socket selects the local address and sends nothing.
        route.connect((url.hostname, url.port))
        address = route.getsockname()[0]

    # Port 0: the operating system chooses a free port. It is free again when the probe is closed.
    with socket.socket() as probe:
        probe.bind((address, 0))
        return {"address": address, "port": probe.getsockname()[1]}
