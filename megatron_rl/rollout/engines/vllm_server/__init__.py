"""vLLM's own API servers, which may run on any machine."""

from __future__ import annotations

from megatron_rl.rollout.engines.servers import Server


def make_server(url: str) -> Server:
    """Make the `Server` object for ``url``: the client of a running vLLM server."""
    # Import lazily: the server's module imports torch, and reading the table of engines must not.
    from megatron_rl.rollout.engines.vllm_server.server import VllmServer

    return VllmServer(url)
