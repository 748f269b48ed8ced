"""The command line on a rank; the jobs of `doctor` are forked where it executes them, which is quicker."""

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
    """Run a command for each request and answer its exit code, in a process without threads."""
    die_with_parent()
    while True:
        command, environment, file = requests.recv()
        with open(file, "ab") as output:
            process = Forked(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        requests.send(process.wait())


def start_server() -> Connection:
    """Return the connection to a process that runs commands; it ends with this one."""
    here, there = Pipe()
    if os.fork() == 0:
        here.close()
        serve(there)
    there.close()
    return here


def forked_run(server: Connection) -> Any:
    """Return what stands for `subprocess.run` in a proof."""

    def run(
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: int,
        env: Mapping[str, str],
    ) -> subprocess.CompletedProcess[bytes]:
        assert stderr == subprocess.STDOUT
        server.send(([*command], dict(env), stdout.name))
        return subprocess.CompletedProcess([*command], server.recv())

    return run


if __name__ == "__main__":
    run = forked_run(start_server())  # before this process has threads
    setattr(proof, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    sys.exit(main())
