"""The role that samples responses, on as many engine replicas as its ranks make."""

from __future__ import annotations

from functools import cached_property

import torch

from megatron_rl.parallel.exchange import RowShard
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.partial import Sweep, added_rows, sample_rounds
from megatron_rl.rollout.sampling import to_rollouts
from megatron_rl.shapes.layout import Coordinates, ParallelLayout
from megatron_rl.types import PromptBatch, Rollouts

_TOKENS = ("tokens", "response_mask", "rollout_log_probs", "support_sizes")
_ROWS = ("finish_reason", "policy_version", "temperature")


class RolloutRole:
    """Deal prompts out to engine replicas; ``engine`` is None on ranks outside the role's ``layout``.

    ``layout.tensor`` is the engine's tensor parallelism and ``layout.data`` the number of replicas.
    """

    def __init__(self, layout: ParallelLayout, engine: Engine | None, rank: int) -> None:
        self.layout = layout
        self.engine = engine
        self.rank = rank
        self.replicas = layout.data

    @cached_property
    def place(self) -> Coordinates:
        """Return where this rank stands among the replicas; it must hold an engine."""
        return self.layout.coordinates(self.rank)

    def infer(self, prompts: PromptBatch, samples: int = 1, *, seed: int) -> RowShard:
        """Sample ``samples`` responses per prompt; row ``p * samples + s`` is sample s of prompt p.

        A prompt's samples run on one replica, which then reads the prompt once. A row's tokens depend on
        ``seed`` and its number alone. One rank per replica answers. Collective over the role's ranks.
        """
        empty = prompts.rows([])
        if self.engine is None:
            return _shard([], to_rollouts(empty, [], -1))
        mine = range(self.place.data, len(prompts), self.replicas)
        rows = [prompt * samples + sample for prompt in mine for sample in range(samples)]
        rollouts = self.engine.generate(prompts.rows(mine).repeat(samples), seed=seed, rows=rows)
        if self.place.tensor:
            return _shard([], rollouts.rows([]))
        return _shard(rows, rollouts)

    def advance(self, sweep: Sweep, tokens: int) -> RowShard:
        """Continue what is in flight in rounds of ``tokens`` tokens per response; see `sample_rounds`.

        Collective over the role's ranks.
        """
        if self.engine is None:
            return added_rows([], [], [])
        return sample_rounds(self.engine, self.layout, self.rank, sweep, tokens)


def join(shard: RowShard, samples: int) -> Rollouts:
    """Return the gathered rows as `Rollouts`, grouped by prompt."""
    return Rollouts(
        lengths=shard.lengths,
        group=torch.arange(len(shard.rows)) // samples,
        **{name: shard.tokens[name] for name in _TOKENS},
        **{name: shard.values[name] for name in _ROWS},
        support=shard.items["support_sizes"],
    )


def _shard(rows: list[int], rollouts: Rollouts) -> RowShard:
    assert rollouts.support is not None
    return RowShard(
        torch.tensor(rows, dtype=torch.long),
        rollouts.lengths,
        {name: getattr(rollouts, name) for name in _TOKENS},
        {name: getattr(rollouts, name) for name in _ROWS},
        {"support_sizes": rollouts.support},
    )
