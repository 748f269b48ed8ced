"""Operations that Megatron-Core's type annotations name."""


class FusibleOperation:
    """Operation that the stand-in does not have."""

    def __init__(self):
        raise NotImplementedError("the stand-in of Transformer Engine has no operation fuser")


class Sequential(FusibleOperation):
    """Operation that the stand-in does not have."""
