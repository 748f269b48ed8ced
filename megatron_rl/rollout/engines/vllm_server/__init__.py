"""vLLM's own API servers, which may run on any machine."""

from __future__ import annotations

from megatron_rl.rollout.engines.servers import Server


def make_server(url: str) -> Server:
    """Make a client of the vLLM server that runs at ``url``; the server itself is started by the user."""
    # Import lazily, since the client's module imports torch: listing the engines must not import torch.
    from megatron_rl.rollout.engines.vllm_server.server import VllmServer

    return VllmServer(url)
