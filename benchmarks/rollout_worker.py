"""Sample with real engines in lockstep and continuously, in turns: a rank of rollout.py."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from simulated_replicas import PROMPT, prompts_of

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import ticket
from megatron_rl.rollout.engine import Request
from megatron_rl.rollout.episodes import Sweep, begin
from megatron_rl.rollout.replica import sample
from megatron_rl.rollout.turns import SingleTurns
from megatron_rl.rollout.vllm.engine import VllmEngine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import SamplingParameters

STEPS = 24


def step_seconds(engine: VllmEngine, rows: int) -> float:
    """Return the median seconds of an engine step with ``rows`` rows, behind the one that reads prompts."""
    sampling, seconds = SamplingParameters(max_response_tokens=STEPS), []
    with engine.sampling():
        for number in range(rows):
            engine.submit(Request(number, PROMPT, sampling, STEPS, seed=number))
        engine.step()
        for _ in range(STEPS - 2):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
        engine.interrupt()
    return statistics.median(seconds)


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds until the slowest rank is done, and the mean over ranks of their own."""
    dist.barrier()
    begun = time.perf_counter()
    run()
    own = time.perf_counter() - begun
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(every), statistics.mean(every)


def own_loop(engine: VllmEngine, lengths: list[int], samples: int) -> Callable[[], Any]:
    """Return vLLM's own loop over the same requests, without this package around it."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0, seed=number)
        for number, length in enumerate(length for length in lengths for _ in range(samples))
    ]
    prompts = [{"prompt_token_ids": list(PROMPT)} for _ in parameters]
    return lambda: engine._llm.generate(prompts, parameters, use_tqdm=False)


def main() -> None:
    """Measure and write a JSON file on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--lengths", type=json.loads, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    device.initialize()
    layout, rank = ParallelLayout(tuple(range(device.world_size()))), device.rank()
    engine = VllmEngine(
        options.model,
        RolloutConfig(vllm={"max_num_seqs": options.rows}),
        layout=layout,
        rank=rank,
        dtype="float32",
        max_model_len=max(options.lengths) + 8,
        load=True,
    )
    lengths, samples = options.lengths, options.samples
    prompts = prompts_of(lengths)

    def order(most: int | None) -> Callable[[], Any]:
        def run() -> None:
            flight = begin(prompts, samples, seed=1, version=0)
            sweep = Sweep(flight, (True,) * len(prompts), len(prompts), 0)
            sample(engine, layout, rank, sweep, lambda: ticket(name), SingleTurns, most=most)

        nonlocal number
        number += 1
        name = f"of turn {number}"
        return run

    number = 0
    everything = len(lengths) * samples * layout.data
    methods: dict[str, Callable[[], Callable[[], Any]]] = {
        "lockstep": lambda: order(everything),
        "continuous": lambda: order(None),
    }
    if layout.data == 1:
        methods["vLLM's own loop"] = lambda: own_loop(engine, lengths, samples)
    sizes = sorted({1, options.rows, *(2**power for power in range(options.rows.bit_length()))})
    costs = {rows: step_seconds(engine, rows) for rows in sizes if rows <= options.rows}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for repeat in range(options.repeats + 1):
        for name, make in methods.items():
            taken = timed(make())
            if repeat:  # the first round warms up
                found[name].append(taken)
    if rank == 0:
        options.result.write_text(json.dumps({"costs": costs, "seconds": found}))
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
