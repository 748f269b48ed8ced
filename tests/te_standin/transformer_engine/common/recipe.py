"""Recipes of 8-bit training, by name only: the host does not support it."""


class DelayedScaling:
    """Base class of a class of Megatron-Core's."""
