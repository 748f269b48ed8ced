"""The attention module."""

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
