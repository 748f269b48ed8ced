"""Hold what frameworks share."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
