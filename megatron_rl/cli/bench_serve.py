"""The ``bench-serve`` command: vLLM's own load test of a server, with increasing numbers of users."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.cli.common import require_counts
from megatron_rl.errors import UserError

HEADROOM = 0.2
"""Fraction of the measured request rate that capacity planning leaves unused, for bursts of requests."""
PERCENTILES = (50, 95, 99)
"""Percentiles of times that the tables show, in percent."""
# Program that runs vLLM's load test. It calls the module, since the script `vllm bench serve` of vLLM's CPU
# package (0.32, 0.33) does not start.
_LOAD_TEST = """
import argparse, sys
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[1:]))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of ``bench-serve`` to its parser."""
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--users", default="1,5,20,50", help="numbers of concurrent requests, a test for each (%(default)s)"
    )

    # Sizes of a test.
    parser.add_argument("--requests", type=int, default=10, help="requests of each user (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--response-tokens", type=int, default=128, help="tokens of a response (%(default)s)")

    parser.add_argument("--out", metavar="FILE", help="also write the tables to this Markdown file")


def run(arguments: argparse.Namespace) -> int:
    """Run a load test for each number of users, and print the tables of `result_tables`."""
    require_counts(arguments, "requests", "prompt_tokens", "response_tokens")
    user_counts = _parse_user_counts(arguments.users)
    url = arguments.url.rstrip("/")
    model = _fetch_served_model(url)

    # Run the tests one after another: concurrent tests would share the server's capacity.
    results: dict[int, Mapping[str, Any]] = {}
    for users in user_counts:
        requests = users * arguments.requests
        print(f"{users} users, {requests} requests …", file=sys.stderr, flush=True)
        results[users] = run_load_test(
            url,
            model,
            users=users,
            requests=requests,
            prompt_tokens=arguments.prompt_tokens,
            response_tokens=arguments.response_tokens,
        )

    tables = result_tables(results)
    print(tables)
    if arguments.out:
        Path(arguments.out).write_text(tables)
    return 0


def run_load_test(
    url: str,
    model: Mapping[str, Any],
    *,
    users: int,
    requests: int,
    prompt_tokens: int,
    response_tokens: int,
) -> dict[str, Any]:
    """Run vLLM's load test with ``users`` concurrent requests, and return its result.

    ``requests`` is the number of requests of all users together, ``model`` the result of
    `_fetch_served_model`. Raises UserError if the test or one of its requests fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
            "--model", model["root"], "--served-model-name", model["id"], "--tokenizer", model["root"],
            "--dataset-name", "random", "--random-input-len", prompt_tokens,
            "--random-output-len", response_tokens, "--num-prompts", requests, "--max-concurrency", users,
            "--ignore-eos", "--disable-tqdm", "--ready-check-timeout-sec", 0,
            "--percentile-metrics", "ttft,tpot,e2el",
            "--metric-percentiles", ",".join(map(str, PERCENTILES)),
            "--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        command = [sys.executable, "-c", _LOAD_TEST, *map(str, options)]
        process = subprocess.run(command, capture_output=True, text=True)

        # vLLM may exit with status 0 although it has written no result.
        file = Path(folder) / "result.json"
        if process.returncode or not file.is_file():
            got = process.stderr.strip()[-600:] or f"exit code {process.returncode}"
            raise _failed_test_error(url, f"vLLM's load test with {users} users failed", got)
        result = json.loads(file.read_text())

    # vLLM excludes failed requests from its times, so the server would appear faster than it is.
    num_failed = requests - result["completed"]
    if num_failed:
        # The last line of a traceback is its message.
        messages = {error.strip().rpartition("\n")[2] for error in result["errors"] if error}
        got = "; ".join(sorted(messages))[:600]
        raise _failed_test_error(url, f"{num_failed} of {requests} requests failed", got)
    return result


def _failed_test_error(url: str, message: str, got: str) -> UserError:
    """Return the error for a load test without a result, or with requests that failed."""
    return UserError(
        message,
        where=url,
        expected="a response to each request",
        got=got,
        fix="read the server's output; --prompt-tokens plus --response-tokens must fit its max_model_len",
    )


def result_tables(results: Mapping[int, Mapping[str, Any]]) -> str:
    """Return two Markdown tables: measurements by number of users, and capacities with headroom.

    ``results`` maps each number of users to vLLM's result. Times are the `PERCENTILES`, separated by slashes.
    """
    measurements = [
        "| users | requests/s | tokens/s | first token, ms | per token, ms | complete response, s |",
        "|---|---|---|---|---|---|",
    ]
    capacities = [
        f"| users | requests/s to plan with, {HEADROOM:.0%} free | responses a day |",
        "|---|---|---|",
    ]

    for users, result in results.items():
        rate = result["request_throughput"]
        cells = (
            users,
            f"{rate:.2f}",
            f"{result['output_throughput']:.0f}",
            _percentile_text(result, "ttft", 1.0, ".0f"),
            _percentile_text(result, "tpot", 1.0, ".1f"),
            _percentile_text(result, "e2el", 1e-3, ".2f"),
        )
        measurements.append("| " + " | ".join(map(str, cells)) + " |")

        # A server at its measured limit has no room for a burst of requests.
        planned_rate = rate * (1 - HEADROOM)
        capacities.append(f"| {users} | {planned_rate:.2f} | {planned_rate * 86_400:,.0f} |")

    note = f"Times at the percentiles {', '.join(map(str, PERCENTILES))}."
    return "\n".join([*measurements, "", note, "", *capacities, ""])


def _percentile_text(
    result: Mapping[str, Any],
    metric: str,
    scale: float,
    number_format: str,
) -> str:
    """Format the `PERCENTILES` of the time ``metric`` in vLLM's result, separated by slashes.

    ``metric`` is vLLM's name of the time: ttft, tpot or e2el. Times in the result are in milliseconds and are
    multiplied by ``scale``.
    """
    times = [result[f"p{percentile}_{metric}_ms"] * scale for percentile in PERCENTILES]
    return " / ".join(format(time, number_format) for time in times)


def _parse_user_counts(text: str) -> Sequence[int]:
    """Parse numbers of users such as ``1,5,20``; raise UserError unless each is at least 1."""
    try:
        user_counts = [int(number) for number in text.split(",")]
    except ValueError:
        user_counts = []

    if not user_counts or min(user_counts) < 1:
        raise UserError(
            "the numbers of users cannot be read",
            where="--users",
            expected="numbers from 1 on, separated by commas",
            got=text,
            fix="give them as in --users 1,5,20",
        )
    return user_counts


def _fetch_served_model(url: str) -> Mapping[str, Any]:
    """Request the server's list of models, and return the first: ``id`` is its name, ``root`` its folder."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            return json.load(response)["data"][0]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            "no OpenAI-compatible server responds",
            where=url,
            expected="a server with /v1/models, such as megatron-rl serve starts",
            got=str(error),
            fix="start it, wait until its log has `Application startup complete`, or correct the URL",
        ) from None
