"""The role that judges whole responses with a model: one score per row, at its last token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.parallel.exchange import RowShard
from megatron_rl.roles.model_role import ModelRole


class RewardModel:
    """Score rows with a frozen model, which ``role`` holds.

    A score is the head's value at the row's last token, as transformers' ``*ForSequenceClassification``
    classes take it.
    """

    def __init__(self, name: str, weight: float, role: ModelRole) -> None:
        self.name = name
        self.weight = weight
        self.role = role

    def infer(self, batch: Any) -> RowShard:
        """Return the score of this rank's rows under the model's name, [b] float32, NaN where not finite.

        ``batch`` as for `ModelRole.infer`. Collective over the role's ranks.
        """
        select = torch.zeros(len(batch.tokens), dtype=torch.bool)
        select[last_tokens(batch.lengths)] = True
        scored = self.role.score(batch, select, before=False)
        rows = torch.tensor([row for micro in scored for row in micro.rows], dtype=torch.long)
        scores = torch.zeros(0)
        if scored:
            # Every other token of a row is 0 here.
            values = torch.cat([micro.outputs[0] for micro in scored]).float().cpu()
            scores = values[last_tokens(batch.lengths[rows])]
        scores = torch.where(scores.isfinite(), scores, float("nan"))
        return RowShard(rows, torch.zeros_like(rows), {}, {self.name: scores})


def last_tokens(lengths: Tensor) -> Tensor:
    """Return the position of each row's last token: [B] int64."""
    return lengths.cumsum(0) - 1
