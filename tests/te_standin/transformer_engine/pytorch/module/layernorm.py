"""LayerNorm as a module."""

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, constant, normalise


class LayerNorm(TransformerEngineBaseModule):
    """Normalise the last dimension."""

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
        assert (normalized_shape is None) != (hidden_size is None)
        size = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        dtype, device = kwargs.pop("dtype", params_dtype), kwargs.pop("device", "cuda")
        if kwargs:
            raise TypeError(f"unexpected arguments {sorted(kwargs)}")
        self.add("weight", (size,), constant(float(not zero_centered_gamma)), dtype, device)
        self.add("bias", (size,), constant(0.0), dtype, device)
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel

    def forward(self, hidden):
        """Return the normalised ``hidden``, in its dtype."""
        return normalise(hidden, self.weight, self.bias, self.eps, "LayerNorm", self.zero_centered_gamma)
