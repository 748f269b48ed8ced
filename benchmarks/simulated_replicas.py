"""Engines that end each response at a given length: real ones, and ones that only take the time of steps.

Both are driven by the package's own scheduler.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy
import torch

from megatron_rl.rollout.collate import start_groups, waiting_groups
from megatron_rl.rollout.scheduler import GenerationRound, ReplicaQueue, ReplicaScheduler
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.types import FINISH_STOP, PromptBatch, SamplingParameters

Cost = Callable[[int], float]
"""Seconds of an engine step by the rows that it works on."""


PROMPT = (16, 17, 18, 19)
"""What every response follows: tokens of the model that `workload` makes."""


def interpolated(costs: Mapping[int, float]) -> Cost:
    """Return the cost of any number of rows from measured ones, on lines between neighbours."""
    rows = sorted(costs)
    seconds = [costs[number] for number in rows]
    return lambda busy: float(numpy.interp(busy, rows, seconds))


def begun(lengths: Sequence[Sequence[int]]) -> tuple[GenerationRound, dict[int, int]]:
    """Return a round with a group for each of ``lengths``, and by a sequence's seed its response's length."""
    many, samples = len(lengths), len(lengths[0])
    longest = max(map(max, lengths))
    prompts = PromptBatch(
        tokens=torch.tensor(PROMPT).repeat(many),
        lengths=torch.full((many,), len(PROMPT)),
        prompt_ids=torch.arange(many),
        tasks=("",) * many,
        prompts=("",) * many,
        ground_truths=(None,) * many,
        metadata=({},) * many,
        sampling=(SamplingParameters(max_response_tokens=longest + 1),) * many,
    )
    groups = tuple(start_groups(waiting_groups(prompts), samples, seed=1, version=0))
    generation_round = GenerationRound(groups, (True,) * many, many, version=0)
    rows = (length for group in lengths for length in group)
    seeds = (sequence.seed for _, sequence in generation_round.unfinished)
    return generation_round, dict(zip(seeds, rows, strict=True))


class EndedEngine:
    """Have ``engine`` end each response at its length, which ``lengths`` says by the row's seed.

    ``steps`` counts the engine's.
    """

    def __init__(self, engine: Any, lengths: Mapping[int, int]) -> None:
        self._engine, self._lengths, self.steps = engine, lengths, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest) -> None:
        """See `Generator.submit`."""
        self._engine.submit(replace(request, limit=self._lengths[request.seed]))

    def step(self) -> list[Completion]:
        """See `Generator.step`."""
        self.steps += 1
        return [replace(answer, finish_reason=FINISH_STOP) for answer in self._engine.step()]


class TimedEngine:
    """Answer each request with as many tokens as it may have; ``clock`` runs as the steps would take.

    A step goes on until an answer is complete, since nothing changes before. ``ended`` holds the time and the
    tokens of each answer.
    """

    def __init__(self, most_rows: int, cost: Cost) -> None:
        self.most_rows, self._cost, self.clock = most_rows, cost, 0.0
        self.max_model_len = None
        self._left: dict[int, int] = {}
        self._limits: dict[int, int] = {}
        self.ended: list[tuple[float, int]] = []

    def submit(self, request: GenerationRequest) -> None:
        """See `Generator.submit`."""
        self._left[request.number] = self._limits[request.number] = request.limit

    def step(self) -> list[Completion]:
        """See `Generator.step`."""
        running = list(self._left)[: self.most_rows]
        steps = min((self._left[number] for number in running), default=0)
        self.clock += steps * self._cost(len(running))
        for number in running:
            self._left[number] -= steps
        ended = [number for number in running if not self._left[number]]
        for number in ended:
            del self._left[number]
        self.ended += [(self.clock, self._limits[number]) for number in ended]
        return [self._answer(number) for number in ended]

    def _answer(self, number: int) -> Completion:
        tokens = self._limits[number]
        return Completion(number, (20,) * tokens, (0.0,) * tokens, FINISH_STOP)


def simulate(
    lengths: Sequence[Sequence[int]], replicas: int, rows: int, most: int, cost: Cost
) -> list[tuple[float, int]]:
    """Return the seconds at which each response ended, and its tokens, in order.

    ``lengths`` are those of the responses to each prompt. Engines work on ``rows`` at once. A replica has up
    to ``most`` in flight: ``rows`` in the continuous order, all that there are in lockstep, where nothing is
    left to draw. Groups are drawn in order of time.
    """
    generation_round, ends = begun(lengths)
    tickets = count()
    engines = [TimedEngine(rows, cost) for _ in range(replicas)]
    schedulers = [
        ReplicaScheduler(
            EndedEngine(engine, ends),
            ReplicaQueue(generation_round, most, None, lambda: next(tickets), replica, replicas),
        )
        for replica, engine in enumerate(engines)
    ]
    for scheduler in schedulers:
        scheduler.start_token_round(None)
    first = [replica for replica, scheduler in enumerate(schedulers) if scheduler.step()]
    waiting = [(engines[replica].clock, replica) for replica in first]
    heapq.heapify(waiting)
    while waiting:
        _, replica = heapq.heappop(waiting)
        if schedulers[replica].step():
            heapq.heappush(waiting, (engines[replica].clock, replica))
    return sorted(answer for engine in engines for answer in engine.ended)


def step_in_the_middle(ended: Sequence[tuple[float, int]], steps: int) -> float:
    """Return the seconds of one of ``steps`` steps, by the middle half of all tokens."""
    done, quarter, times = 0, sum(tokens for _, tokens in ended) / 4, list[float]()
    for second, tokens in ended:
        done += tokens
        if done >= quarter * (2 * len(times) + 1):
            times.append(second)
    return (times[1] - times[0]) * 2 / steps


def full(lengths: Sequence[Sequence[int]], replicas: int, rows: int, cost: Cost) -> float:
    """Return the seconds of the work by engines that are full all the time."""
    fastest = min(cost(busy) / busy for busy in range(1, rows + 1))
    return sum(map(sum, lengths)) * fastest / replicas
