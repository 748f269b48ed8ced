"""What the continuous order saves of sampling with long-tailed lengths, and what this package adds to a step.

    python benchmarks/rollout.py [--quick] [--repeats N] [--json FILE]

Responses have log-normal lengths, equal for the samples of a prompt, and engines work on 16 rows at once.

1. One replica: the seconds of vLLM's steps by rows, and sampling by this package against vLLM's own loop over
   the same requests (rollout_worker.py).
2. One to four replicas on this machine: lockstep, where a replica is given its share of the prompts at once
   and all wait for the slowest, against the continuous order, where it draws a group when another ends; in
   turns, in one job. Replicas beyond the cores share them.
3. Four to 128 replicas, simulated: the package's own dealing and turns, with engines that take the seconds of
   part 1 and do nothing else (simulated_replicas.py). Beside lockstep and the continuous order of one step
   stands the open order, in which replicas never wait for a step to end: its seconds are those of a step's
   share in the middle of many steps' work.

Simulated seconds stand beside a bound that no order can beat: the longest response by itself, or, where steps
do not end, engines that are full all the time.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import HERE, ChildFailed, Report, arguments, paired_ratio, say, torchrun, warn_if_busy
from simulated_replicas import Cost, full, interpolated, simulate, step_in_the_middle
from workload import Workload, make

ROWS, SAMPLES, GROUPS = 16, 4, 8
"""Rows that an engine works on, samples of a prompt, prompts for each replica."""
SPREAD = 1.0
STEPS = 8
"""Steps whose work the simulated open order has before it."""
MEASURED, SIMULATED = (1, 2, 4), (4, 8, 16, 32, 64, 128)


def log_normal(many: int, median: int, longest: int, seed: int) -> list[int]:
    """Return response lengths with a long tail."""
    random_ = random.Random(seed)
    return [min(longest, 1 + round(random_.lognormvariate(0.0, SPREAD) * median)) for _ in range(many)]


def measured(folder: Path, replicas: int, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Sample with real engines, one on each rank; raises ChildFailed."""
    say("rollout", f"{replicas} replicas, {len(lengths)} prompts")
    result = folder / f"{replicas}.json"
    command = [str(HERE / "rollout_worker.py"), str(folder / "model"), str(result)]
    command += ["--lengths", json.dumps(list(lengths)), "--samples", str(SAMPLES)]
    command += ["--rows", str(ROWS), "--repeats", str(repeats)]
    torchrun(command, replicas, 1, folder / f"{replicas}.log", 1800)
    return json.loads(result.read_text())


def record(report: Report, replicas: int, found: dict[str, Any]) -> None:
    """Record the orders of one number of replicas; one that waits for others is idle meanwhile."""
    case = f"{replicas} replicas, measured"
    seconds = {name: [whole for whole, _ in values] for name, values in found["seconds"].items()}
    for name, values in seconds.items():
        ratio = None if name == "continuous" else paired_ratio(values, seconds["continuous"])
        report.add(case, name, "seconds", "s", values, ratio)
        if replicas > 1:
            idle = [1 - own / whole for whole, own in found["seconds"][name]]
            report.add(case, name, "replicas idle", "share", idle)


def simulated(report: Report, replicas: int, cost: Cost, median: int, longest: int) -> None:
    """Record the orders of one number of replicas by simulation, with three draws of lengths."""
    orders: dict[str, list[float]] = {"lockstep": [], "continuous": [], "open": []}
    bounds: dict[str, list[float]] = {name: [] for name in orders}
    groups, share = GROUPS * replicas, (SAMPLES, replicas, ROWS)
    for seed in range(1, 4):
        lengths = log_normal(groups, median, longest, seed)
        least = max(max(lengths) * cost(1), full(lengths, *share, cost))
        for order, most in (("lockstep", groups * SAMPLES), ("continuous", ROWS)):
            orders[order].append(simulate(lengths, *share, most, cost)[-1][0])
            bounds[order].append(least)
        many = log_normal(groups * STEPS, median, longest, seed)
        orders["open"].append(step_in_the_middle(simulate(many, *share, ROWS, cost), STEPS))
        bounds["open"].append(full(many, *share, cost) / STEPS)
    for order, values in orders.items():
        ratio = paired_ratio(values, bounds[order])
        report.add(f"{replicas} replicas, simulated", order, "seconds", "s", values, ratio)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, simulate and print; return the exit code."""
    options = arguments(__doc__, repeats=3).parse_args(words)
    median, longest = (16, 96) if options.quick else (48, 512)
    repeats = options.repeats or (1 if options.quick else 3)
    warn_if_busy("rollout")
    report = Report("rollout")
    costs: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="rollout.") as name:
        # So long a limit that the model hardly ever ends a response by itself.
        make(Path(name), Workload(prompts=8, samples=SAMPLES, max_response_tokens=10**7))
        for replicas in MEASURED[: 2 if options.quick else None]:
            lengths = log_normal(GROUPS * replicas, median, longest, seed=replicas)
            try:
                found = measured(Path(name), replicas, lengths, repeats)
            except ChildFailed as error:
                report.fail(f"{replicas} replicas: {error}")
                continue
            costs = costs or {int(rows): seconds for rows, seconds in found["costs"].items()}
            record(report, replicas, found)
    for rows, seconds in costs.items():
        report.add("an engine step", "vLLM", f"{rows} rows", "s", [seconds])
    for replicas in SIMULATED if costs else ():
        simulated(report, replicas, interpolated(costs), median, longest)
    report.note("ratio of a measured order: over the continuous one; of a simulated one: over its bound")
    report.note("aim: within 1.05 of the bound")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
