"""The role that judges responses with a Python function."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.parallel.exchange import Members, RowShard
from megatron_rl.rewards.function import FunctionReward, RewardResult
from megatron_rl.types import FINISH_FAILED, PromptBatch, Rollouts, row_counts

COMPONENT = "component/"


class RewardRole:
    """Score each rank's share of the rows outside the training process."""

    def __init__(self, config: RewardConfig, tokenizer: Any) -> None:
        self.weight = config.weight
        self._function = None if config.function is None else FunctionReward(config)
        self._tokenizer = tokenizer

    def infer(
        self, prompts: PromptBatch, rollouts: Rollouts, members: Members
    ) -> tuple[RowShard, RewardResult]:
        """Return ``rewards`` (NaN where failed) and ``valid`` of this rank's share of the rows.

        A named component stands beside them as ``component/NAME``, NaN where a row has none, so that no name
        that a function chooses is taken for another field. ``prompts`` has one entry per row. Rows that the
        engine failed on are invalid without being scored; the result holds what was said of the others.
        Collective over the members.
        """
        rows = range(members.ranks.index(members.rank), len(rollouts), len(members.ranks))
        scored = [row for row in rows if int(rollouts.finish_reason[row]) != FINISH_FAILED]
        result = self._score(prompts, rollouts, scored)
        index = torch.tensor([rows.index(row) for row in scored], dtype=torch.long)
        rewards = torch.full((len(rows),), float("nan"))
        valid = torch.zeros(len(rows), dtype=torch.bool)
        rewards[index], valid[index] = result.rewards, result.valid
        values = {"rewards": rewards, "valid": valid}
        # Every rank must name the same fields, whatever its own samples returned.
        for name in sorted(set().union(*members.gather_objects(list(result.components)))):
            component = torch.full((len(rows),), float("nan"))
            if name in result.components:
                component[index] = result.components[name]
            values[COMPONENT + name] = component
        no_tokens = torch.zeros(len(rows), dtype=torch.long)
        return RowShard(torch.tensor(list(rows), dtype=torch.long), no_tokens, {}, values), result

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

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Return in words what of the reward function's limits this machine does not enforce."""
        return () if self._function is None else self._function.missing

    def close(self) -> None:
        """End the worker processes."""
        if self._function is not None:
            self._function.close()
