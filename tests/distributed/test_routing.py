"""Experts that the rollout engine chose are the trainer's, in every layout, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_rollout import SHAPE
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

RANKS = Path(__file__).parent / "routing_ranks.py"


def test_the_engines_experts_are_repeated(fork: Any, tmp_path: Path) -> None:
    """Of experts that a router scores alike, changes of a millionth choose; their outputs differ."""
    config = Qwen3MoeConfig(
        **SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data[:2].repeat_interleave(3, dim=0)
    model.save_pretrained(tmp_path)
    assert "all checks passed" in fork(RANKS, 2, tmp_path, timeout=550).stdout
