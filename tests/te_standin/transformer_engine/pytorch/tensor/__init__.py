"""Tensors of 8-bit formats. They exist for imports only."""

import torch


# Megatron-Core checks with isinstance whether a parameter has an 8-bit format.
class QuantizedTensor(torch.Tensor):
    """Base class of 8-bit tensors, without any instance on the host."""
