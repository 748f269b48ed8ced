"""Families that cannot be trained, with what is missing for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedFamily:
    """Name a family as `Family` does, and what Megatron-Core or this project lacks for it."""

    title: str
    model_type: str
    architecture: str
    missing: str


REFUSED = (
    RefusedFamily(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        "attention sinks outside Transformer Engine's attention, and an importer of fused experts with "
        "biases",
    ),
    RefusedFamily(
        "Qwen3-Next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "gated delta nets on packed rows (megatron/core/ssm/gated_delta_net.py refuses them and asks for "
        "flash-linear-attention)",
    ),
)
