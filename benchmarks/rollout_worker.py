"""Worker of rollout.py: sample with real engines, in lockstep and in the continuous order, in turns."""

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
from simulated_replicas import PROMPT, FixedLengthEngine, start_round

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
    """Return the median seconds of an engine step that decodes ``rows`` rows."""
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
        # Drop the requests before they are complete.
        engine.interrupt()

    return statistics.median(seconds)


def measure(run: Callable[[], int]) -> tuple[float, float, int]:
    """Call ``run``, which returns a number of engine steps, on all ranks at the same time.

    Returns the slowest rank's seconds, the mean seconds of all ranks, and the largest number of steps.
    """
    dist.barrier()
    start = time.perf_counter()
    steps = run()
    rank_seconds = time.perf_counter() - start
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (rank_seconds, steps))
    seconds, counts = zip(*results, strict=True)
    return max(seconds), statistics.mean(seconds), max(counts)


def make_vllm_loop(engine: VllmEngine, lengths: Lengths) -> Callable[[], int]:
    """Return a function that samples with vLLM's own loop, without this package; it returns 0 steps."""
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
    # All requests have the same prompt, as in `start_round`.
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

    def make_round(lengths: Lengths, max_in_flight: int | None) -> Callable[[], int]:
        generation_round, length_by_seed = start_round(lengths)
        # Each round has a separate counter in the job's store.
        counter = f"of turn {next(round_numbers)}"
        fixed_length_engine = FixedLengthEngine(engine, length_by_seed)

        def run() -> int:
            sample_round(
                fixed_length_engine,
                layout,
                rank,
                generation_round,
                next_queue_index=lambda: store_increment(counter),
                max_in_flight=max_in_flight,
            )
            return fixed_length_engine.steps

        return run

    round_numbers = count()
    methods: dict[str, Callable[[Lengths], Callable[[], int]]] = {
        "lockstep": lambda lengths: make_round(lengths, layout.data * len(lengths) * len(lengths[0])),
        "continuous": lambda lengths: make_round(lengths, None),
    }
    if layout.data == 1:
        methods["vLLM's own loop"] = lambda lengths: make_vllm_loop(engine, lengths)

    # Measure the costs for powers of two, and for the maximum number of rows.
    row_counts = sorted({1, options.rows, *(2**power for power in range(options.rows.bit_length()))})
    costs = {rows: step_seconds(engine, rows) for rows in row_counts if rows <= options.rows}

    # Methods take turns; an additional first turn warms up.
    turns: dict[str, list[tuple[float, float, int]]] = {name: [] for name in methods}
    for turn, lengths in enumerate([options.lengths[0], *options.lengths]):
        for name, make_method in methods.items():
            measurement = measure(make_method(lengths))
            if turn:
                turns[name].append(measurement)
    if rank == 0:
        options.result.write_text(json.dumps({"costs": costs, "turns": turns}))
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
