"""A plain sampler over a Hugging Face model: the reference for vLLM, and an engine for small tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.rollout.engines.base import Engine
from megatron_rl.shapes.layout import ParallelLayout


def make_engine(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    layout: ParallelLayout,
    rank: int,
    dtype: str,
    max_model_len: int,
    **_: Any,
) -> Engine | None:
    """See `rollout.engines.base.make_engine`. Not collective: a replica is one rank."""
    import torch

    from megatron_rl.distributed import device
    from megatron_rl.rollout.engines.torch.engine import TorchEngine

    if rank not in layout.ranks:
        return None
    # Use the device of the trainer's weights, from which weight syncs copy.
    return TorchEngine.from_hf(
        model_path,
        rank=rank,
        dtype=getattr(torch, dtype),
        device=device.device(),
        max_model_len=max_model_len,
    )
