"""Model families that are recognised and cannot be trained, with the feature that each one lacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RefusedFamily:
    """Model family that cannot be trained."""

    title: str
    """Display name of the family."""
    model_type: str
    """``model_type`` of its config.json."""
    architecture: str
    """The transformers class of the language model."""
    missing: str
    """Feature that Megatron-Core or this project lacks for it."""


REFUSED = (
    RefusedFamily(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        "attention sinks outside Transformer Engine's attention, and an importer of fused experts with "
        "biases",
    ),
)
