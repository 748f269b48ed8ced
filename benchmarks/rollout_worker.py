"""Sample with real engines in lockstep and continuously, in turns: a rank of rollout.py."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
from simulated_replicas import PROMPT, EndedEngine, start_round

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import store_increment
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.scheduler import sample_round
from megatron_rl.rollout.types import GenerationRequest
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import SamplingParameters

Lengths = list[list[int]]
STEPS = 24


def step_seconds(engine: VllmEngine, rows: int) -> float:
    """Return the median seconds of an engine step with ``rows`` rows, behind the one that reads prompts."""
    sampling = SamplingParameters(max_response_tokens=STEPS)
    seconds = []
    with engine.sampling():
        for number in range(rows):
            engine.submit(GenerationRequest(number, PROMPT, sampling, STEPS, seed=number))
        # The first step prefills the prompts.
        engine.step()
        for _ in range(STEPS - 2):
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        # The requests are dropped before they are complete.
        engine.interrupt()

    return statistics.median(seconds)


def timed(run: Callable[[], int]) -> tuple[float, float, int]:
    """Return the slowest rank's seconds, the mean seconds of all ranks, and the largest number of steps."""
    dist.barrier()
    start = time.perf_counter()
    steps = run()
    rank_seconds = time.perf_counter() - start
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (rank_seconds, steps))
    seconds, counts = zip(*answers, strict=True)
    return max(seconds), statistics.mean(seconds), max(counts)


def own_loop(engine: VllmEngine, lengths: Lengths) -> Callable[[], int]:
    """Return vLLM's own loop over the same requests, without this package around it; it counts no steps."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            seed=number,
        )
        for number, length in enumerate(length for group in lengths for length in group)
    ]
    # The same tokens for each request, as the package's own requests have.
    prompts = [{"prompt_token_ids": list(PROMPT)} for _ in parameters]

    def run() -> int:
        engine._llm.generate(prompts, parameters, use_tqdm=False)
        return 0

    return run


def main() -> None:
    """Measure and write a JSON file on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument(
        "--lengths",
        type=json.loads,
        required=True,
        help="of each turn, prompt, and sample",
    )
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    device.initialize()
    layout = ParallelLayout(tuple(range(device.world_size())))
    rank = device.rank()
    engine = VllmEngine(
        options.model,
        RolloutConfig(vllm={"max_num_seqs": options.rows}),
        layout=layout,
        rank=rank,
        dtype="float32",
        max_model_len=max(length for turn in options.lengths for group in turn for length in group) + 8,
        load=True,
    )

    def order(lengths: Lengths, max_in_flight: int | None) -> Callable[[], int]:
        generation_round, length_by_seed = start_round(lengths)
        # A counter of its own for each round, on the job's store.
        counter = f"of turn {next(numbers)}"
        timed_engine = EndedEngine(engine, length_by_seed)

        def run() -> int:
            sample_round(
                timed_engine,
                layout,
                rank,
                generation_round,
                next_queue_index=lambda: store_increment(counter),
                max_in_flight=max_in_flight,
            )
            return timed_engine.steps

        return run

    numbers = count()
    methods: dict[str, Callable[[Lengths], Callable[[], int]]] = {
        "lockstep": lambda lengths: order(lengths, layout.data * len(lengths) * len(lengths[0])),
        "continuous": lambda lengths: order(lengths, None),
    }
    if layout.data == 1:
        methods["vLLM's own loop"] = lambda lengths: own_loop(engine, lengths)

    # Costs at powers of two, and at the most rows.
    sizes = sorted({1, options.rows, *(2**power for power in range(options.rows.bit_length()))})
    costs = {rows: step_seconds(engine, rows) for rows in sizes if rows <= options.rows}

    # Methods take turns; an additional first turn warms up.
    turns: dict[str, list[tuple[float, float, int]]] = {name: [] for name in methods}
    for turn, lengths in enumerate([options.lengths[0], *options.lengths]):
        for name, make in methods.items():
            measurement = timed(make(lengths))
            if turn:
                turns[name].append(measurement)
    if rank == 0:
        options.result.write_text(json.dumps({"costs": costs, "turns": turns}))
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
