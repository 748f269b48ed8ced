"""Take thousands of steps and watch what the ranks hold: memory, files, threads, processes, shared memory."""

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

LOOKS = 100
"""So often what a rank holds is looked at."""
SETTLED = 0.3
WINDOW = 0.2
"""Share of the looks after which nothing may grow any more, and share at each end that is compared."""
GROWTH = 16 * 2**20
"""Bytes of memory that a rank may grow by in a thousand steps, and twice that in any run: allocators settle
slowly."""
SMALL = {
    "sft": None,
    "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "evaluation": {"every": 50, "sets": {"held_out": {"data": "eval.jsonl", "max_prompts": 4}}},
    "checkpoint": {"every": 50, "keep": 1, "export": False},
}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield a run of ``count`` steps on one rank, and where these are many, shorter ones of other kinds."""
    shares = {"alone": 1, "vllm": 8, "ahead": 8}
    for name, share in shares.items():
        steps = count // share
        if share == 1 or steps >= LOOKS:
            settings = {"run": name, "steps": steps, "seed": seed}
            yield Case(f"{steps} steps {name}", name, settings, weight=steps)


def try_case(case: Case, work: Path) -> Result:
    """Run, look at each rank now and then, and compare what it holds late with what it held when settled."""
    settings = case.settings
    folder = work / case.name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    changes = {"steps": settings["steps"], "seed": settings["seed"], **SMALL}
    config = runs.write(settings["run"], folder, work, **changes)

    looks: dict[int, list[Mapping[str, int]]] = {}
    with socket.socket(type=socket.SOCK_DGRAM) as ears:
        ears.bind(("127.0.0.1", 0))
        chain = kills.Chain(config, runs.RUNS[settings["run"]][0], True, ears, {})
        chain.start()
        every = max(1, settings["steps"] // LOOKS)
        while chain.launcher is not None and chain.launcher.poll() is None:
            message = chain.heard(1.0)
            if message and message["phase"] == "learn" and message["step"] % every == 0:
                looks.setdefault(message["rank"], []).append(held(message["process"], folder / "tmp"))
        left = kills.leave(chain)

    if chain.launcher is None or chain.launcher.returncode:
        return Result("lost", kills.tail(folder))

    grown = [f"rank {rank}: {line}" for rank, values in sorted(looks.items()) for line in growing(values)]
    growth = max(memory_growth(values) for values in looks.values())
    if growth > max(GROWTH * settings["steps"] / 1000, 2 * GROWTH):
        grown.append(f"memory grew by {growth / 2**20:.1f} MiB")

    counts = {f"MiB that {case.group} grew by": round(growth / 2**20, 2)}
    if grown or left:
        return Result("left over", "\n".join([*grown, *left]), counts)

    shutil.rmtree(folder)
    return Result(HELD, str(looks[0][-1]), counts)


def held(pid: int, temporary: Path) -> Mapping[str, int]:
    """Return what a process holds; ``memory`` in bytes, shared pages not counted."""
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


def growing(looks: list[Mapping[str, int]]) -> Iterator[str]:
    """Yield a line for what is more at the end than it ever was when the run had settled."""
    first, last = windows(looks)
    for name in looks[0]:
        before = max(look[name] for look in first)
        after = min(look[name] for look in last)
        if name != "memory" and after > before:
            yield f"{name} grew from {before} to {after}"


def memory_growth(looks: list[Mapping[str, int]]) -> float:
    """Return by how many bytes the memory grew over the whole run, from its growth once settled."""
    first, last = windows(looks)
    gain = median(look["memory"] for look in last) - median(look["memory"] for look in first)
    return gain / (1 - SETTLED - WINDOW)


def windows(looks: list[Mapping[str, int]]) -> tuple[list[Mapping[str, int]], list[Mapping[str, int]]]:
    """Return the looks from when the run had settled, and those at its end."""
    start = int(len(looks) * SETTLED)
    width = max(1, int(len(looks) * WINDOW))
    return looks[start : start + width], looks[-width:]
