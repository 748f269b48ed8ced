"""Run the command line, and fork the jobs that `doctor` starts.

A forked job need not import torch again, which takes most of its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from megatron_rl.cli.main import main
from megatron_rl.planning import proof
from tests.campaign.forked import Forked
from tests.campaign.runs import die_with_parent


def serve(requests: Connection) -> NoReturn:
    """Run a command for each request and send its exit code; the process has no threads, so it may fork."""
    die_with_parent()
    while True:
        command, environment, log_path = requests.recv()
        with open(log_path, "ab") as log:
            process = Forked(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        requests.send(process.wait())


def start_server() -> Connection:
    """Fork a process that runs commands; return the connection to it. It ends with this process."""
    parent_end, child_end = Pipe()
    if os.fork() == 0:
        parent_end.close()
        serve(child_end)

    child_end.close()
    return parent_end


def forked_run(server: Connection) -> Any:
    """Return a replacement of `subprocess.run` that runs commands in the server."""

    def run(
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: int,
        env: Mapping[str, str],
    ) -> subprocess.CompletedProcess[bytes]:
        assert stderr == subprocess.STDOUT
        # A file object cannot be sent, so the server opens the same path.
        server.send(([*command], dict(env), stdout.name))
        return subprocess.CompletedProcess([*command], server.recv())

    return run


if __name__ == "__main__":
    # The server is forked before this process has threads.
    server = start_server()
    run = forked_run(server)
    setattr(proof, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    sys.exit(main())
