"""`serve` and `bench-serve` as a user calls them, with vLLM's own server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests import small_data
from tests.conftest import Launcher, free_port, launch_environment

SECONDS = 200.0
"""Time in which a server must answer."""


def answer(url: str, request: dict[str, object] | None = None) -> dict[str, object] | None:
    """Return the server's answer to a GET, or to a POST of ``request``; None without a server."""
    data = None if request is None else json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
            return json.load(response)
    except OSError:
        return None


def test_a_model_is_served_and_loaded(fork: Launcher, tmp_path: Path) -> None:
    model = small_data.make(tmp_path / "data") / "model"
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "megatron_rl"]
    options = [
        "--port",
        url.rpartition(":")[2],
        "--name",
        "tiny",
        "--vllm",
        "--max-model-len 64 --enforce-eager --gpu-memory-utilization 0.1",
    ]
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "serve", str(model), *options],
            env=launch_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + SECONDS
        while answer(f"{url}/v1/models") is None:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        completion = answer(f"{url}/v1/completions", {"model": "tiny", "prompt": "12+34=", "max_tokens": 4})
        assert completion is not None and completion["choices"]

        sizes = ["--users", "1,2", "--requests", "2", "--prompt-tokens", "8", "--response-tokens", "4"]
        out = tmp_path / "tables.md"
        tested = fork("megatron_rl", 1, "bench-serve", url, *sizes, "--out", out, module=True)
        rows = [line for line in out.read_text().splitlines() if line.startswith("| 2 |")]
        assert len(rows) == 2 and out.read_text() in tested.stdout

        # Rows that are too long for the server are its answer, not a table of zeros.
        one = ("--users", 1, "--requests", 1)
        refused = fork("megatron_rl", 1, "bench-serve", url, *one, module=True, check=False)
        assert refused.returncode == 2 and "1 of 1 requests failed" in refused.stderr
    finally:
        server.terminate()
        server.wait(60)
