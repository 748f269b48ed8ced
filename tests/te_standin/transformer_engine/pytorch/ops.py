"""Name the operations of the fuser that Megatron-Core's annotations name."""


class FusibleOperation:
    """Cannot be built here."""

    def __init__(self):
        raise NotImplementedError("the stand-in of Transformer Engine has no operation fuser")


class Sequential(FusibleOperation):
    """Cannot be built here."""
