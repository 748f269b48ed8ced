"""The fused optimizers and the functions on lists of tensors."""

import torch

from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from transformer_engine.pytorch.optimizers.fused_sgd import FusedSGD
from transformer_engine.pytorch.optimizers.multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_applier,
)

__all__ = [
    "FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_applier", "multi_tensor_l2norm",
    "multi_tensor_scale",
]  # fmt: skip


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """Return the norm [1] over all tensors, and each tensor's norm if requested, in float32."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    total_norm = norms.norm().view(1)
    # The real kernel returns an empty tensor in place of norms that were not requested.
    if not per_tensor:
        norms = norms.new_empty(0)

    return total_norm, norms


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    """Write ``scale`` times the first list into the second; the flag is set if a number is not finite."""
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        # The flag reports an overflow; the remaining tensors are scaled all the same.
        if not torch.isfinite(source).all():
            noop_flag.fill_(1)
        target.copy_(source * scale)
