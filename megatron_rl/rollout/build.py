"""Choose and build the generation engine that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import GenerationEngine
from megatron_rl.rollout.torch_engine import TorchEngine
from megatron_rl.shapes.layout import ParallelLayout

ENGINES = ("vllm", "torch")


def make_engine(
    model_path: str | Path, config: RolloutConfig, *, layout: ParallelLayout, rank: int, **settings: Any
) -> GenerationEngine | None:
    """Build ``config.engine`` for the rank, without weights; None on ranks outside ``layout``.

    ``settings`` are dtype, seed and max_model_len. Collective over the world.
    """
    if config.engine == "vllm":
        from megatron_rl.rollout.vllm.engine import VllmEngine
        from megatron_rl.rollout.vllm.setup import join_groups, prepare_vllm

        prepare_vllm()
        join_groups(layout)
        if rank not in layout.ranks:
            return None
        return VllmEngine(model_path, config, layout=layout, rank=rank, **settings)
    if config.engine == "torch":
        if rank not in layout.ranks:
            return None
        dtype = getattr(torch, settings["dtype"])
        return TorchEngine.from_hf(
            model_path, rank=rank, dtype=dtype, max_model_len=settings["max_model_len"]
        )
    raise UserError(
        "unknown rollout engine",
        where="rollout.engine",
        expected=" or ".join(ENGINES),
        got=config.engine,
        fix="set rollout.engine to vllm",
    )
