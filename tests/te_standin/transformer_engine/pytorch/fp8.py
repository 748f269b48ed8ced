"""State of 8-bit computation, which is always disabled."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    """State of 8-bit computation in this process: disabled."""

    @staticmethod
    def is_fp8_enabled():
        """Return False."""
        return False


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """Return a context without 8-bit formats; raise NotImplementedError if one is requested."""
    # Megatron-Core enters this context with enabled=False as well.
    if enabled or calibrating:
        raise NotImplementedError("the stand-in of Transformer Engine computes in no 8-bit format")

    return nullcontext()


def fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Return a context that creates full-precision weights; raise NotImplementedError for 8-bit ones."""
    if enabled:
        raise NotImplementedError("the stand-in of Transformer Engine computes in no 8-bit format")

    return nullcontext()
