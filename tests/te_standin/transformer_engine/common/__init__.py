"""Parts shared between frameworks."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
