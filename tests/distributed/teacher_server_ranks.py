"""Train with a teacher behind a vLLM server; then train again after the server was killed.

    teacher_server_ranks.py CONFIG MODEL

The server starts in a process forked here, which saves importing vLLM again.
"""

from __future__ import annotations

import os
import signal
import sys
from urllib.parse import urlsplit

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

from server_ranks import RANK_VARIABLES, read_url, train, wait_for
from vllm.entrypoints.launchers.api_server.entry import main as serve

from megatron_rl.cli.common import load_and_check
from megatron_rl.cli.main import parse_command_line


def start(model: str, port: int) -> int:
    """Start a server of a model in a session of its own; return its process ID."""
    process = os.fork()
    if process:
        return process

    # A session of its own, so that the server can be killed with its workers.
    os.setsid()
    # A server must not take itself for a rank of the training job.
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    sys.argv = [
        "api_server", "--model", model, "--served-model-name", "big", "--dtype", "float32",
        "--max-model-len", "64", "--max-num-batched-tokens", "64", "--no-enable-chunked-prefill",
        "--max-logprobs", "8", "--enforce-eager", "--kv-cache-memory-bytes", str(2**26),
        "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init",
    ]  # fmt: skip
    serve()
    os._exit(0)


def train_apart(*arguments: str) -> int:
    """Train in a process of its own; return its exit code."""
    process = os.fork()
    if not process:
        os._exit(train(*arguments))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(path: str, model: str) -> None:
    """Start the server, train with it, kill it, and train again."""
    config = load_and_check(
        parse_command_line(["train", path]),
        1,
        job="train",
        training=True,
    ).config
    assert config.teacher_server is not None
    address = urlsplit(config.teacher_server.url)
    server = start(model, address.port or 0)
    try:
        wait_for(
            lambda: read_url(f"http://{address.netloc}/health") is not None,
            "server",
        )
        assert train_apart(path) == 0, "the run with a server has failed"
    finally:
        os.killpg(server, signal.SIGKILL)

    # Without the default number of retries, so that the run fails soon.
    settings = ("teacher_server.retries=0", "reward.invalid_steps=2")
    code = train_apart(path, f"run_dir={config.run_dir}_alone", *settings)
    print(f"exit code without a server: {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
