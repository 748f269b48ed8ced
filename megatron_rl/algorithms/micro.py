"""What every objective does to its inputs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.metrics import Metrics
from megatron_rl.types import TrainBatch


def on_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    """Return the batch with every tensor on ``device``."""
    names = (*TrainBatch.TOKEN_FIELDS, *TrainBatch.ROW_FIELDS)
    tensors = {name: getattr(batch, name) for name in names}
    return replace(batch, **{name: t.to(device) for name, t in tensors.items() if t is not None})


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [N] in at least float32, 0 outside the mask, so that nothing there is ever read.

    bfloat16 has three digits, too few for differences of log-probs.
    """
    return torch.where(mask, values.float() if values.itemsize < 4 else values, 0)


def means(sums: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
    """Return scalar (sum, weight) tensors as metrics, fetched from their device in one piece.

    Fetching them one by one would make the host wait for the device as often.
    """
    if not sums:
        return Metrics()
    pairs = torch.stack([torch.stack([part.detach().double() for part in pair]) for pair in sums.values()])
    return Metrics(
        {name: (total, weight) for name, (total, weight) in zip(sums, pairs.tolist(), strict=True)}
    )
