"""The role that judges responses with a Python function."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import RowShard, gather_objects, members
from megatron_rl.rewards.function import Failure, FunctionReward, RewardResult
from megatron_rl.types import FINISH_FAILED, PromptBatch, Rollouts, row_counts

COMPONENT = "component/"


class RewardRole:
    """Score each rank's share of the rows outside the training process.

    ``failures`` and ``metrics`` hold what the last call says of this rank's share.
    """

    def __init__(self, config: RewardConfig, tokenizer: Any) -> None:
        self.weight = config.weight
        self._function = None if config.function is None else FunctionReward(config)
        self._tokenizer = tokenizer
        self.failures: tuple[Failure, ...] = ()
        self.metrics = Metrics()

    def infer(self, prompts: PromptBatch, rollouts: Rollouts) -> RowShard:
        """Return ``rewards`` (NaN where failed) and ``valid`` of this rank's share of the rows.

        A named component stands beside them as ``component/NAME``, NaN where a row has none, so that no name
        that a function chooses is taken for another field. ``prompts`` has one entry per row.
        Rows that the engine failed on are invalid without being scored. Collective over `members`.
        """
        ranks = members()
        rows = range(ranks.index(device.rank()), len(rollouts), len(ranks))
        alive = [row for row in rows if int(rollouts.finish_reason[row]) != FINISH_FAILED]
        result = self._score(prompts, rollouts, alive)
        self.failures, self.metrics = result.failures, result.metrics()
        rewards = torch.full((len(rows),), float("nan"))
        valid = torch.zeros(len(rows), dtype=torch.bool)
        place = torch.tensor([rows.index(row) for row in alive], dtype=torch.long)
        rewards[place], valid[place] = result.rewards, result.valid
        values = {"rewards": rewards, "valid": valid}
        # Every rank must name the same fields, whatever its own samples returned.
        for name in sorted(set().union(*gather_objects(list(result.components)))):
            component = torch.full((len(rows),), float("nan"))
            if name in result.components:
                component[place] = result.components[name]
            values[COMPONENT + name] = component
        none = torch.zeros(len(rows), dtype=torch.long)
        return RowShard(torch.tensor(list(rows), dtype=torch.long), none, {}, values)

    def _score(self, prompts: PromptBatch, rollouts: Rollouts, rows: list[int]) -> RewardResult:
        if self._function is None:  # reward models alone judge
            return RewardResult(torch.zeros(len(rows)), torch.ones(len(rows), dtype=torch.bool), {}, ())
        return self._function.score(
            [prompts.prompts[row] for row in rows],
            self.responses(rollouts, rows),
            [prompts.ground_truths[row] for row in rows],
            [prompts.metadata[row] for row in rows],
        )

    def responses(self, rollouts: Rollouts, rows: Any = None) -> list[str]:
        """Return the responses of ``rows`` (default all) as text, without special tokens."""
        chosen = rollouts if rows is None else rollouts.rows(rows)
        tokens = chosen.tokens[chosen.response_mask].tolist()
        counts = row_counts(chosen.response_mask, chosen.lengths)
        ends = counts.cumsum(0).tolist()
        ids = [tokens[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
        return self._tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []

    def close(self) -> None:
        """End the worker processes."""
        if self._function is not None:
            self._function.close()
