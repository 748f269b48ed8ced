"""Name the recipes of 8-bit training, which the host does not do."""


class DelayedScaling:
    """Be a base class for Megatron-Core's own."""
