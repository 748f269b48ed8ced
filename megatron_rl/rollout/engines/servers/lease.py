"""Hold API servers for one run: two that bring a server their weights at once stall each other."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from megatron_rl.errors import UserError
from megatron_rl.rollout.engines.servers.base import Server, ServerError

LEASE_SECONDS = 30.0
"""So long a server remembers a run that does not renew, one that was killed for instance."""
RENEW_SECONDS = 5.0


class Lease:
    """Tell servers whose they are, again and again in a thread of its own, until it is closed."""

    def __init__(self, servers: Sequence[Server], run_dir: str) -> None:
        self._servers = servers
        self._run = f"the run in {run_dir} (process {os.getpid()} on {socket.gethostname()})"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def take(self) -> None:
        """Take the servers; wait for those of a run that may have been killed.

        Raises UserError where another run keeps one, or two addresses are of one.
        """
        until = time.monotonic() + LEASE_SECONDS + RENEW_SECONDS
        while holders := {url: holder for url, holder in map(self._claimed, self._servers) if holder}:
            url, holder = next(iter(holders.items()))
            if holder.startswith(self._run):
                raise UserError(
                    "two addresses are of one server",
                    where="rollout.server.urls",
                    expected="the address of each server once",
                    got=f"{url} is the server of {holder.removeprefix(self._run).strip()}",
                    fix=f"remove {url}",
                )
            if time.monotonic() > until:
                raise UserError(
                    "a server works for another run",
                    where=f"{url}, of rollout.server.urls",
                    expected="a server of this run's own: each brings it weights",
                    got=f"{holder} has it",
                    fix="name another server, or start this run when that one has ended",
                )
            time.sleep(RENEW_SECONDS / 5)
        self._thread.start()

    def _claimed(self, server: Server) -> tuple[str, str | None]:
        try:
            return server.url, self._claim(server, LEASE_SECONDS)
        except (ServerError, KeyError, ValueError) as error:
            raise UserError(
                "a server does not say whose it is",
                where=f"{server.url}, of rollout.server.urls",
                expected="a server that was started with this version of megatron_rl",
                got=f"{type(error).__name__}: {error}",
                fix="start it again with the command that `check` shows",
            ) from error

    def _claim(self, server: Server, seconds: float) -> str | None:
        return server.claim(f"{self._run} {server.url}", seconds)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            self._tell(LEASE_SECONDS)

    def _tell(self, seconds: float) -> None:
        for server in self._servers:
            with suppress(ServerError, KeyError, ValueError):  # one that is away is missed elsewhere
                self._claim(server, seconds)

    def close(self) -> None:
        """Give the servers back. May be called twice."""
        if self._ended.is_set() or not self._thread.is_alive():
            return
        self._ended.set()
        self._thread.join()
        self._tell(0.0)
