"""Train thousands of steps and watch resources: memory, files, threads, processes, shared memory."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import psutil

from tests.campaign import kills, runs
from tests.campaign.campaign import HELD, Case, Result

SAMPLES = 100
"""Number of times that a rank's resources are sampled in a run."""
SETTLED = 0.3
"""Fraction of the samples after which nothing may grow any more."""
WINDOW = 0.2
"""Fraction of the samples at each end of the rest that are compared."""
GROWTH = 16 * 2**20
"""Bytes that a rank's memory may grow by in a thousand steps.

Any run may grow by three times as much, since allocators reach their final size slowly: fifty steps grew by
6 MiB on a quiet host and once by 42 MiB on a busy one. Long runs are what finds a slow leak.
"""
SMALL = {
    "sft": None,
    "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "evaluation": {
        "every": 50,
        "sets": {"held_out": {"data": "eval.jsonl", "max_prompts": 4}},
    },
    "checkpoint": {"every": 50, "keep": 1, "export": False},
}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield a run of ``count`` steps on one rank, and shorter ones of other kinds if ``count`` is large."""
    fractions = {"alone": 1, "vllm": 8, "ahead": 8}
    for name, fraction in fractions.items():
        # Runs with vLLM and runs that sample ahead take longer, so they get an eighth of the steps.
        steps = count // fraction
        if fraction == 1 or steps >= SAMPLES:
            settings = {"run": name, "steps": steps, "seed": seed}
            yield Case(f"{steps} steps {name}", name, settings, weight=steps)


def try_case(case: Case, work: Path) -> Result:
    """Run, sample each rank's resources, and compare late samples with those after the start-up."""
    settings = case.settings
    folder = work / case.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    changes = {"steps": settings["steps"], "seed": settings["seed"], **SMALL}
    config = runs.write(settings["run"], folder, work, **changes)

    samples: dict[int, list[Mapping[str, int]]] = {}
    with socket.socket(type=socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        chain = kills.Chain(config, runs.RUNS[settings["run"]][0], True, listener, {})
        chain.start()
        # Sample each rank as it enters the training phase, SAMPLES times over the run.
        every = max(1, settings["steps"] // SAMPLES)
        while chain.launcher is not None and chain.launcher.poll() is None:
            message = chain.next_message(1.0)
            if message and message["phase"] == "learn" and message["step"] % every == 0:
                samples.setdefault(message["rank"], []).append(resources(message["process"], folder / "tmp"))
        remaining = kills.end_run(chain)

    if chain.launcher is None or chain.launcher.returncode:
        return Result("lost", kills.tail(folder))

    problems = [
        f"rank {rank}: {line}"
        for rank, rank_samples in sorted(samples.items())
        for line in growing_counts(rank_samples)
    ]
    # Counts must not grow at all; memory may grow a little, since allocators settle slowly.
    growth = max(memory_growth(rank_samples) for rank_samples in samples.values())
    if growth > max(GROWTH * settings["steps"] / 1000, 3 * GROWTH):
        problems.append(f"memory grew by {growth / 2**20:.1f} MiB")

    counts = {f"MiB that {case.group} grew by": round(growth / 2**20, 2)}
    if problems or remaining:
        return Result("left over", "\n".join([*problems, *remaining]), counts)

    shutil.rmtree(folder)
    return Result(HELD, str(samples[0][-1]), counts)


def resources(pid: int, temporary: Path) -> Mapping[str, int]:
    """Return a process's resources; ``memory`` is in bytes without shared pages."""
    process = psutil.Process(pid)
    with process.oneshot():
        memory = process.memory_info()
        return {
            "memory": memory.rss - memory.shared,
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "processes": len(process.children(recursive=True)),
            "shared memory": sum("/dev/shm/" in entry.path for entry in process.memory_maps()),
            "temporary files": sum(len(names) for _, _, names in os.walk(temporary)),
        }


def growing_counts(samples: list[Mapping[str, int]]) -> Iterator[str]:
    """Yield a line for each count that is always higher at the end than ever after the start-up."""
    early, late = windows(samples)
    for name in samples[0]:
        early_maximum = max(sample[name] for sample in early)
        late_minimum = min(sample[name] for sample in late)
        if name != "memory" and late_minimum > early_maximum:
            yield f"{name} grew from {early_maximum} to {late_minimum}"


def memory_growth(samples: list[Mapping[str, int]]) -> float:
    """Return how many bytes memory grew in the whole run, extrapolated from its growth after the start-up."""
    early, late = windows(samples)
    # The median ignores single peaks; the two windows are this part of the run apart.
    gain = median(sample["memory"] for sample in late) - median(sample["memory"] for sample in early)
    return gain / (1 - SETTLED - WINDOW)


def windows(
    samples: list[Mapping[str, int]],
) -> tuple[list[Mapping[str, int]], list[Mapping[str, int]]]:
    """Return the samples just after the start-up, and those at the end."""
    start = int(len(samples) * SETTLED)
    width = max(1, int(len(samples) * WINDOW))
    return samples[start : start + width], samples[-width:]
