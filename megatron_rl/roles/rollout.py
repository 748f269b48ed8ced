"""The role that samples responses, on as many engine replicas as its ranks make."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.parallel.exchange import RowShard, among, gather_objects
from megatron_rl.rollout.engine import GenerationEngine
from megatron_rl.rollout.partial import InFlight, is_enough
from megatron_rl.rollout.sampling import NOTHING, Response
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import UNFINISHED, PromptBatch, Rollouts

_TOKENS = ("tokens", "response_mask", "rollout_log_probs")
_ROWS = ("finish_reason", "policy_version", "temperature")


class RolloutRole:
    """Deal prompts out to engine replicas; ``engine`` is None on ranks outside the role's ``layout``.

    ``layout.tensor`` is the engine's tensor parallelism and ``layout.data`` the number of replicas.
    """

    def __init__(self, layout: ParallelLayout, engine: GenerationEngine | None, rank: int) -> None:
        self.layout = layout
        self.engine = engine
        self.rank = rank

    def infer(self, prompts: PromptBatch, samples: int = 1, *, seed: int) -> RowShard:
        """Sample ``samples`` responses per prompt; row ``p * samples + s`` is sample s of prompt p.

        A prompt's samples run on one replica, which then reads the prompt once. A row's tokens depend on
        ``seed`` and its number alone. One rank per replica answers. Collective over the role's ranks.
        """
        empty = prompts.rows([])
        if self.engine is None:
            return _shard([], _no_rollouts(empty))
        place = self.layout.coordinates(self.rank)
        mine = range(place.data, len(prompts), self.layout.data)
        rows = [prompt * samples + sample for prompt in mine for sample in range(samples)]
        rollouts = self.engine.generate(prompts.rows(mine).repeat(samples), seed=seed, rows=rows)
        if place.tensor:
            return _shard([], rollouts.rows([]))
        return _shard(rows, rollouts)

    def advance(self, flight: InFlight, must: Sequence[bool], wanted: int, tokens: int) -> RowShard:
        """Continue open rows in rounds of ``tokens`` tokens each until enough groups have ended.

        Enough are ``wanted`` groups, with all that ``must``. Row i of the answer is what was added to
        ``flight.open_rows()[i]``: ``tokens``, ``log_probs``, ``finish_reason`` and ``turn``, the round in
        which the row ended. Which groups end in a round depends on how long their responses are, not on time,
        ranks or replicas. Collective over the role's ranks, whose communicator must exist.
        """
        if self.engine is None:
            return _added([], [], [])
        place, samples = self.layout.coordinates(self.rank), flight.samples
        rows = flight.open_rows()
        groups = sorted({row // samples for row in rows})
        own = set(groups[place.data :: self.layout.data])
        mine = [index for index, row in enumerate(rows) if row // samples in own]
        work = _Work(self.engine, flight, [rows[index] for index in mine])
        turns: dict[int, int] = {}
        count = 0
        with among(self.layout.ranks):
            while not is_enough(_ended(flight, rows, turns), must, wanted):
                count += 1
                ended = [mine[index] for index in work.advance(tokens)]
                for part in gather_objects(ended if place.tensor == 0 else []):
                    turns |= dict.fromkeys(part, count)
        if place.tensor:
            return _added([], [], [])
        return _added(mine, work.added, [turns.get(index, 0) for index in mine])


class _Work:
    """Hold the rows that one replica continues."""

    def __init__(self, engine: GenerationEngine, flight: InFlight, rows: list[int]) -> None:
        self._engine = engine
        self._prompts = flight.prompts.rows([row // flight.samples for row in rows])
        self._seeds = flight.seeds[rows].tolist()
        self._begun = flight.responses(rows)
        self.added = [NOTHING] * len(rows)

    def advance(self, tokens: int) -> list[int]:
        """Add up to ``tokens`` tokens to each row that goes on; return the rows that ended."""
        going = [row for row, part in enumerate(self.added) if part.finish_reason == UNFINISHED]
        begun = [_longer(self._begun[row], self.added[row]) for row in going]
        seeds = [self._seeds[row] for row in going]
        parts = self._engine.advance(self._prompts.rows(going), begun, seeds=seeds, tokens=tokens)
        for row, part in zip(going, parts, strict=True):
            self.added[row] = _longer(self.added[row], part)
        return [row for row in going if self.added[row].finish_reason != UNFINISHED]


def _longer(before: Response, more: Response) -> Response:
    return Response([*before.tokens, *more.tokens], [*before.log_probs, *more.log_probs], more.finish_reason)


def _ended(flight: InFlight, rows: list[int], turns: dict[int, int]) -> list[bool]:
    """Say of each group whether all its rows ended; ``turns`` knows those of ``rows`` that did."""
    ended = [True] * len(flight.prompts)
    for index, row in enumerate(rows):
        if index not in turns:
            ended[row // flight.samples] = False
    return ended


def _added(rows: list[int], parts: Sequence[Response], turns: Sequence[int]) -> RowShard:
    """Return what was added to ``rows`` and in which turn they ended."""
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.log_probs]
    return RowShard(
        torch.tensor(rows, dtype=torch.long),
        torch.tensor([len(part.tokens) for part in parts], dtype=torch.long),
        {"tokens": torch.tensor(tokens, dtype=torch.long), "log_probs": torch.tensor(values)},
        {
            "finish_reason": torch.tensor([part.finish_reason for part in parts], dtype=torch.long),
            "turn": torch.tensor(turns, dtype=torch.long),
        },
    )


def join(shard: RowShard, samples: int) -> Rollouts:
    """Return the gathered rows as `Rollouts`, grouped by prompt."""
    return Rollouts(
        lengths=shard.lengths,
        group=torch.arange(len(shard.rows)) // samples,
        **{name: shard.tokens[name] for name in _TOKENS},
        **{name: shard.values[name] for name in _ROWS},
    )


def _shard(rows: list[int], rollouts: Rollouts) -> RowShard:
    return RowShard(
        torch.tensor(rows, dtype=torch.long),
        rollouts.lengths,
        {name: getattr(rollouts, name) for name in _TOKENS},
        {name: getattr(rollouts, name) for name in _ROWS},
    )


def _no_rollouts(prompts: PromptBatch) -> Rollouts:
    integers = torch.zeros(0, dtype=torch.long)
    return Rollouts(
        tokens=prompts.tokens,
        lengths=prompts.lengths,
        response_mask=torch.zeros(0, dtype=torch.bool),
        rollout_log_probs=torch.zeros(0),
        group=integers,
        finish_reason=integers,
        policy_version=integers,
        temperature=torch.zeros(0),
    )
