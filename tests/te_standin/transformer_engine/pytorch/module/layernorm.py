"""LayerNorm as a module."""

from transformer_engine.pytorch.module.base import Norm


class LayerNorm(Norm):
    """LayerNorm over the last dimension."""

    # The real class accepts ``dtype`` and ``device`` as further keyword arguments.
    kind = "LayerNorm"

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-05,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        super().__init__()
        self._add_parameters(
            normalized_shape,
            hidden_size,
            eps,
            sequence_parallel,
            params_dtype,
            zero_centered_gamma,
            kwargs,
        )
