"""Recipes of 8-bit training. They exist for imports only, since the host has no 8-bit formats."""


class DelayedScaling:
    """Base class of Megatron-Core's recipe."""  # Megatron-Core derives from it while it is imported.
