"""The role that judges whole responses with a model: one score per row, at its last token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.parallel.exchange import RowShard
from megatron_rl.parallel.schedule import score
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
        role, rows, found = self.role, [], torch.zeros(0)
        if role.model is not None:
            last = last_tokens(batch.lengths)
            select = torch.zeros(len(batch.tokens), dtype=torch.bool)
            select[last] = True
            with role.resident():
                scores = score(role.model, batch, role.tokens_per_microbatch, select, before=False)
            if scores and role.model.groups.rank in role.layout.outputs():
                rows = [row for part in scores for row in part.rows]
                # Every other token of a row is 0 here.
                values = torch.cat([part.outputs[0] for part in scores]).float().cpu()
                lengths = batch.lengths[torch.tensor(rows, dtype=torch.long)]
                found = values[last_tokens(lengths)]
        index = torch.tensor(rows, dtype=torch.long)
        found = torch.where(found.isfinite(), found, float("nan"))
        return RowShard(index, torch.zeros_like(index), {}, {self.name: found})


def last_tokens(lengths: Tensor) -> Tensor:
    """Return the position of each row's last token: [B] int64."""
    return lengths.cumsum(0) - 1
