"""Tensors of 8-bit formats, by name only."""

import torch


class QuantizedTensor(torch.Tensor):
    """Type of no tensor."""
