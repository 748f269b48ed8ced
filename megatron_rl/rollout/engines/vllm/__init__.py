"""vLLM in the ranks of the job: the only import of vllm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.rollout.engines.base import Engine
from megatron_rl.shapes.layout import ParallelLayout


def make_engine(
    model_path: str | Path, config: RolloutConfig, *, layout: ParallelLayout, rank: int, **arguments: Any
) -> Engine | None:
    """See `rollout.engines.base.make_engine`. Collective over the world, which makes the process groups."""
    from megatron_rl.rollout.engines.vllm.engine import VllmEngine
    from megatron_rl.rollout.engines.vllm.setup import join_groups, prepare_vllm

    prepare_vllm()
    join_groups(layout)
    if rank not in layout.ranks:
        return None
    return VllmEngine(model_path, config, layout=layout, rank=rank, **arguments)
