"""Modules that Transformer Engine shares between frameworks."""

# Megatron-Core reads ``transformer_engine.common.recipe`` after ``import transformer_engine``.
from transformer_engine.common import recipe

__all__ = ["recipe"]
