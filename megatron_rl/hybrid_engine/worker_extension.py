"""Make backend ``megatron_rl`` known in the workers that a vLLM server starts.

``python -m vllm.entrypoints.openai.api_server --model MODEL --weight-transfer-config '{"backend":
"megatron_rl"}' --worker-extension-cls megatron_rl.hybrid_engine.worker_extension.HybridWorker``
imports this module in each worker, before the worker loads its model. `check` shows the whole command.
"""

from __future__ import annotations

import json
import time
from typing import Any

from megatron_rl.hybrid_engine.weight_transfer import register_in_worker


class HybridWorker:
    """Add to vLLM's worker what a training job asks it."""

    _claim = ("", 0.0)

    def claim(self, run: str, seconds: float) -> str | None:
        """Let a run have this server for so long; return the name of the one that has it instead, or None."""
        (holder, until), now = self._claim, time.monotonic()
        if holder != run and now < until:
            return holder
        self._claim = (run, now + seconds)
        return None

    def attempt(self, method: str, *arguments: Any) -> str | None:
        """Call a method of this worker, and return why it failed, None where it did not.

        vLLM leaves the answers of further workers unread where one raises, and takes them for those of
        later calls.
        """
        try:
            getattr(self, method)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def model_settings(self) -> dict[str, Any]:
        """Return the settings of the worker's model, as transformers reads them."""
        worker: Any = self
        return json.loads(json.dumps(worker.model_config.hf_config.to_dict(), default=str))


register_in_worker()
