"""Engines that end each response at a given length: real engines, and engines that only advance a clock.

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

from megatron_rl.rollout.collate import make_waiting_groups, start_groups
from megatron_rl.rollout.scheduler import GenerationRound, ReplicaQueue, ReplicaScheduler
from megatron_rl.rollout.types import Completion, GenerationRequest
from megatron_rl.types import FINISH_STOP, PromptBatch, SamplingParameters

Cost = Callable[[int], float]
"""Seconds of an engine step by the rows that it works on."""


PROMPT = (16, 17, 18, 19)
"""Prompt of every response: tokens of the model that `workload` makes."""


def interpolated(costs: Mapping[int, float]) -> Cost:
    """Return the cost of any number of rows, interpolated linearly between measured numbers."""
    rows = sorted(costs)
    seconds = [costs[number] for number in rows]
    return lambda busy: float(numpy.interp(busy, rows, seconds))


def start_round(lengths: Sequence[Sequence[int]]) -> tuple[GenerationRound, dict[int, int]]:
    """Return a round with a group for each of ``lengths``, and each response's length by its seed."""
    # All prompts are equal: only the lengths of responses matter.
    count = len(lengths)
    samples = len(lengths[0])
    # No response reaches its limit: the engine ends each at its length.
    limit = max(map(max, lengths)) + 1
    prompts = PromptBatch(
        tokens=torch.tensor(PROMPT).repeat(count),
        lengths=torch.full((count,), len(PROMPT)),
        prompt_ids=torch.arange(count),
        tasks=("",) * count,
        prompts=("",) * count,
        ground_truths=(None,) * count,
        metadata=({},) * count,
        sampling=(SamplingParameters(max_response_tokens=limit),) * count,
    )
    groups = tuple(start_groups(make_waiting_groups(prompts), samples, seed=1, version=0))
    generation_round = GenerationRound(
        groups,
        (True,) * count,
        count,
        version=0,
    )

    rows = (length for group in lengths for length in group)
    seeds = (sequence.seed for _, sequence in generation_round.unfinished)
    return generation_round, dict(zip(seeds, rows, strict=True))


class EndedEngine:
    """Engine that ends each response at a given length, by the seed of its sequence.

    ``steps`` counts the steps of the engine below.
    """

    def __init__(
        self,
        engine: Any,
        lengths: Mapping[int, int],
    ) -> None:
        self._engine = engine
        self._lengths = lengths
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest) -> None:
        """See `Generator.submit`."""
        self._engine.submit(replace(request, limit=self._lengths[request.seed]))

    def step(self) -> list[Completion]:
        """See `Generator.step`."""
        self.steps += 1
        return [replace(completion, finish_reason=FINISH_STOP) for completion in self._engine.step()]


class TimedEngine:
    """Engine without a model: each response has the tokens of its limit, and ``clock`` advances by the cost.

    A step here is all engine steps until the next response is complete, since nothing changes before.
    ``completed`` has the time and the tokens of each response.
    """

    def __init__(self, max_rows: int, cost: Cost) -> None:
        self.max_rows = max_rows
        self._cost = cost
        self.clock = 0.0
        self.max_model_len = None
        self._remaining: dict[int, int] = {}
        self._limits: dict[int, int] = {}
        self.completed: list[tuple[float, int]] = []

    def submit(self, request: GenerationRequest) -> None:
        """See `Generator.submit`."""
        self._remaining[request.number] = request.limit
        self._limits[request.number] = request.limit

    def step(self) -> list[Completion]:
        """See `Generator.step`."""
        # First come, first served, as vLLM schedules.
        running = list(self._remaining)[: self.max_rows]
        steps = min((self._remaining[number] for number in running), default=0)
        self.clock += steps * self._cost(len(running))

        for number in running:
            self._remaining[number] -= steps

        complete = [number for number in running if not self._remaining[number]]
        for number in complete:
            del self._remaining[number]

        self.completed += [(self.clock, self._limits[number]) for number in complete]
        return [self._completion(number) for number in complete]

    def _completion(self, number: int) -> Completion:
        """Return a response of the right length; its tokens do not matter."""
        tokens = self._limits[number]
        return Completion(number, (20,) * tokens, (0.0,) * tokens, FINISH_STOP)


def simulate(
    lengths: Sequence[Sequence[int]],
    replicas: int,
    rows: int,
    max_in_flight: int,
    cost: Cost,
) -> list[tuple[float, int]]:
    """Return the completion time and the tokens of each response, in order of time.

    ``lengths`` has the response lengths of each prompt. Engines have up to ``rows`` rows. A replica has
    up to ``max_in_flight`` responses: ``rows`` in the continuous order, all responses in lockstep, where none
    remains to be drawn. Groups are drawn in order of time.
    """
    generation_round, length_by_seed = start_round(lengths)
    # Replicas draw groups by a shared counter, which the job's store holds in a real run.
    tickets = count()
    engines = [TimedEngine(rows, cost) for _ in range(replicas)]

    schedulers = [
        ReplicaScheduler(
            EndedEngine(engine, length_by_seed),
            ReplicaQueue(generation_round, max_in_flight, None, lambda: next(tickets), replica, replicas),
        )
        for replica, engine in enumerate(engines)
    ]
    for scheduler in schedulers:
        scheduler.start_token_round(None)

    # Always step the replica that is earliest by its own clock.
    busy = [replica for replica, scheduler in enumerate(schedulers) if scheduler.step()]
    heap = [(engines[replica].clock, replica) for replica in busy]
    heapq.heapify(heap)

    while heap:
        _, replica = heapq.heappop(heap)
        if schedulers[replica].step():
            heapq.heappush(heap, (engines[replica].clock, replica))
    return sorted(response for engine in engines for response in engine.completed)


def step_in_the_middle(completed: Sequence[tuple[float, int]], steps: int) -> float:
    """Return the seconds of one of ``steps`` steps, by the middle half of all tokens."""
    quarter = sum(tokens for _, tokens in completed) / 4
    tokens_so_far = 0

    # Times after one and after three quarters of the tokens: begin and end are not typical.
    times: list[float] = []
    for second, tokens in completed:
        tokens_so_far += tokens
        if tokens_so_far >= quarter * (2 * len(times) + 1):
            times.append(second)
    return (times[1] - times[0]) * 2 / steps


def full(
    lengths: Sequence[Sequence[int]],
    replicas: int,
    rows: int,
    cost: Cost,
) -> float:
    """Return the seconds that engines need for the work if they are full all the time."""
    # The number of rows with the least seconds per token.
    fastest = min(cost(busy) / busy for busy in range(1, rows + 1))
    return sum(map(sum, lengths)) * fastest / replicas
