"""Operations that Megatron-Core's type annotations name."""


class FusibleOperation:
    """Operation without an implementation on the host."""

    def __init__(self):
        raise NotImplementedError("the stand-in of Transformer Engine has no operation fuser")


class Sequential(FusibleOperation):
    """Sequence of operations without an implementation on the host."""
