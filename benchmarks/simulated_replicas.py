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
"""Function from the number of rows in an engine step to the seconds of the step."""


PROMPT = (16, 17, 18, 19)
"""Prompt of every response: token ids of the model that `workload` writes."""


def interpolate_costs(costs: Mapping[int, float]) -> Cost:
    """Return the cost of any number of rows, interpolated linearly between the measured ``costs``."""
    measured_rows = sorted(costs)
    seconds = [costs[number] for number in measured_rows]
    return lambda rows: float(numpy.interp(rows, measured_rows, seconds))


def start_round(lengths: Sequence[Sequence[int]]) -> tuple[GenerationRound, dict[int, int]]:
    """Start a generation round with one group per prompt; return it with each response's length by seed.

    ``lengths`` has the response lengths of each prompt.
    """
    # All prompts are equal: only the lengths of responses matter.
    num_prompts = len(lengths)
    samples = len(lengths[0])
    # No response reaches this limit: the engine ends each response at its length.
    limit = max(map(max, lengths)) + 1
    prompts = PromptBatch(
        tokens=torch.tensor(PROMPT).repeat(num_prompts),
        lengths=torch.full((num_prompts,), len(PROMPT)),
        prompt_ids=torch.arange(num_prompts),
        tasks=("",) * num_prompts,
        prompts=("",) * num_prompts,
        ground_truths=(None,) * num_prompts,
        metadata=({},) * num_prompts,
        sampling=(SamplingParameters(max_response_tokens=limit),) * num_prompts,
    )
    groups = tuple(start_groups(make_waiting_groups(prompts), samples, seed=1, version=0))
    generation_round = GenerationRound(
        groups,
        (True,) * num_prompts,
        num_prompts,
        version=0,
    )

    rows = (length for group in lengths for length in group)
    seeds = (sequence.seed for _, sequence in generation_round.unfinished)
    return generation_round, dict(zip(seeds, rows, strict=True))


class FixedLengthEngine:
    """Wrapper of an engine that ends each response at a given length.

    ``lengths`` maps the seed of a sequence to the length. ``steps`` counts the steps of ``engine``.
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


class SimulatedEngine:
    """Engine without a model, which advances its ``clock`` by the ``cost`` of its steps.

    Each response has as many tokens as its limit. `step` simulates all engine steps until the next response
    is complete. ``completed`` has the completion time and the number of tokens of each response.
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

        completed_numbers = [number for number in running if not self._remaining[number]]
        for number in completed_numbers:
            del self._remaining[number]

        self.completed += [(self.clock, self._limits[number]) for number in completed_numbers]
        return [self._completion(number) for number in completed_numbers]

    def _completion(self, number: int) -> Completion:
        """Return a response with the length of its limit; the tokens are arbitrary."""
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

    ``lengths`` has the response lengths of each prompt. An engine works on up to ``rows`` rows. A replica has
    up to ``max_in_flight`` responses in flight. This is ``rows`` in the continuous order. In lockstep, it is
    the number of all responses, so that each replica takes all its groups at the start.
    """
    generation_round, length_by_seed = start_round(lengths)
    # Replicas take groups by a shared counter, which is in the job's store in a real run.
    queue_indices = count()
    engines = [SimulatedEngine(rows, cost) for _ in range(replicas)]

    schedulers = [
        ReplicaScheduler(
            FixedLengthEngine(engine, length_by_seed),
            ReplicaQueue(
                generation_round, max_in_flight, None, lambda: next(queue_indices), replica, replicas
            ),
        )
        for replica, engine in enumerate(engines)
    ]
    for scheduler in schedulers:
        scheduler.start_token_round(None)

    # Always step the replica whose clock is earliest.
    active_replicas = [replica for replica, scheduler in enumerate(schedulers) if scheduler.step()]
    heap = [(engines[replica].clock, replica) for replica in active_replicas]
    heapq.heapify(heap)

    while heap:
        _, replica = heapq.heappop(heap)
        if schedulers[replica].step():
            heapq.heappush(heap, (engines[replica].clock, replica))
    return sorted(response for engine in engines for response in engine.completed)


def seconds_of_middle_step(completed: Sequence[tuple[float, int]], steps: int) -> float:
    """Return the mean seconds of a step, measured over the middle half of the tokens of ``steps`` steps.

    ``completed`` is the result of `simulate`. The beginning and the end of the steps are not typical.
    """
    quarter = sum(tokens for _, tokens in completed) / 4
    tokens_so_far = 0

    # Find the times at which one quarter and three quarters of the tokens are complete.
    times: list[float] = []
    for second, tokens in completed:
        tokens_so_far += tokens
        if tokens_so_far >= quarter * (2 * len(times) + 1):
            times.append(second)
    return (times[1] - times[0]) * 2 / steps


def full_engine_seconds(
    lengths: Sequence[Sequence[int]],
    replicas: int,
    rows: int,
    cost: Cost,
) -> float:
    """Return the seconds of all responses if the engines always have the most efficient number of rows.

    ``lengths`` has the response lengths of each prompt, and ``rows`` is the maximum number of rows.
    """
    seconds_per_token = min(cost(num_rows) / num_rows for num_rows in range(1, rows + 1))
    return sum(map(sum, lengths)) * seconds_per_token / replicas
