"""Serve a model with the ``serve`` command, send it requests, and load it with ``bench-serve``.

    serve_ranks.py MODEL OUT

The server is forked here, which saves importing vLLM again. Prints the completion of a request as JSON, and
the exit codes of two loads: one that writes its table to OUT, and one whose requests are too long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from typing import NoReturn

os.environ["VLLM_NO_USAGE_STATS"] = "1"

from server_ranks import RANK_VARIABLES, fork_engines, read_url, wait_for

from megatron_rl.cli.main import main
from tests.conftest import free_port
from tests.rank_server import become

VLLM_OPTIONS = "--max-model-len 64 --enforce-eager --gpu-memory-utilization 0.1"


def serve(model: str, port: int) -> NoReturn:
    """Run ``serve`` in this process, which becomes vLLM's server as `os.execv` would make it."""
    os.setsid()
    # A server must not take itself for a rank of a training job.
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    fork_engines()

    def become_module(_: str, command: list[str]) -> NoReturn:
        # The command is: python -m MODULE ARGUMENTS.
        become(command[2:], module=True)

    setattr(os, "execv", become_module)
    main(["serve", model, "--port", str(port), "--name", "tiny", "--vllm", VLLM_OPTIONS])
    os._exit(1)


def complete(url: str) -> dict[str, object]:
    """Return the server's answer to a request for a completion."""
    request = {"model": "tiny", "prompt": "12+34=", "max_tokens": 4}
    headers = {"Content-Type": "application/json"}
    body = json.dumps(request).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60
    ) as response:
        return json.load(response)


def run(model: str, out: str) -> None:
    """Start the server, send it a request and two loads, and end it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = os.fork()
    if not server:
        serve(model, port)

    try:
        wait_for(lambda: read_url(f"{url}/v1/models") is not None, "server")
        print("completion:", json.dumps(complete(url)))
        sizes = ["--users", "1,2", "--requests", "2", "--prompt-tokens", "8", "--response-tokens", "4"]
        print("exit code:", main(["bench-serve", url, *sizes, "--out", out]))
        # Requests of the default lengths are too long for the server.
        print("exit code:", main(["bench-serve", url, "--users", "1", "--requests", "1"]), flush=True)
    finally:
        os.killpg(server, signal.SIGTERM)
        os.waitpid(server, 0)


if __name__ == "__main__":
    run(*sys.argv[1:])
