"""Make backend ``megatron_rl`` known in the workers that a vLLM server starts.

``vllm serve MODEL --worker-extension-cls megatron_rl.hybrid_engine.worker_extension.HybridWorker
--weight-transfer-config '{"backend": "megatron_rl"}'`` imports this module in each worker, before the worker
loads its model.
"""

from megatron_rl.hybrid_engine.weight_transfer import register_in_worker


class HybridWorker:
    """Add nothing to vLLM's worker: importing the module is what counts."""


register_in_worker()
