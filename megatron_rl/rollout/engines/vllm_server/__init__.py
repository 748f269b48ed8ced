"""vLLM's own API servers, which any machine may run."""

from __future__ import annotations

from megatron_rl.rollout.engines.servers.base import Server


def make_server(url: str) -> Server:
    """Return the server at ``url``."""
    from megatron_rl.rollout.engines.vllm_server.server import VllmServer

    return VllmServer(url)
