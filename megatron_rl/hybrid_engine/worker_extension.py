"""Extension of vLLM's workers that registers the backend ``megatron_rl`` in a vLLM server.

``python -m vllm.entrypoints.openai.api_server --model MODEL --weight-transfer-config '{"backend":
"megatron_rl"}' --worker-extension-cls megatron_rl.hybrid_engine.worker_extension.HybridWorker``
imports this module in each worker, before the worker loads its model. The command ``check`` prints the
complete command line.
"""

from __future__ import annotations

import json
import time
from typing import Any

from megatron_rl.hybrid_engine.weight_transfer import register_in_worker


class HybridWorker:
    """Methods that a training job calls on each worker of a vLLM server."""

    _claim = ("", 0.0)
    """Run that has reserved the server, and the time at which the reservation ends (monotonic, seconds)."""

    def claim(self, run: str, seconds: float) -> str | None:
        """Reserve this server for ``run`` for ``seconds``, and return None on success.

        If another run has reserved the server, return the name of that run and change nothing.
        """
        # A claim expires, so that a killed job does not block the server.
        holder, expiry = self._claim
        now = time.monotonic()
        if holder != run and now < expiry:
            return holder

        self._claim = (run, now + seconds)
        return None

    def attempt(self, method: str, *arguments: Any) -> str | None:
        """Call a method of this worker by name; return its error as text, or None on success.

        The error is not raised: if a worker raises, vLLM does not read the replies of the other workers, and
        returns these replies for later calls.
        """
        try:
            getattr(self, method)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def model_settings(self) -> dict[str, Any]:
        """Return the transformers config of the worker's model as JSON values."""
        worker: Any = self
        return json.loads(json.dumps(worker.model_config.hf_config.to_dict(), default=str))


register_in_worker()
