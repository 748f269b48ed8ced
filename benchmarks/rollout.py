"""What the continuous order saves of sampling with long-tailed lengths, and what this package adds to a step.

    python benchmarks/rollout.py [--quick] [--repeats N] [--json FILE]

Responses have log-normal lengths, of which half of the variance is the prompt's, and engines work on 16 rows
at once. Each turn draws its own lengths: which order is ahead depends on the draw, since nobody knows
beforehand which response is the longest.

1. One replica: the seconds of vLLM's steps by rows, and sampling by this package against vLLM's own loop over
   the same requests (rollout_worker.py).
2. One to four replicas on this machine: lockstep, where a replica is given its share of the prompts at once
   and all wait for the slowest, against the continuous order, where it draws a group when another ends; in
   turns, in one job. Replicas beyond the cores share them.
3. Four to 128 replicas, simulated: the package's own dealing and turns, with engines that take the seconds of
   part 1 and do nothing else (simulated_replicas.py). Beside lockstep and the continuous order of one step
   stands the open order, in which replicas never wait for a step to end: its seconds are those of a step's
   share in the middle of many steps' work.

Simulated seconds stand beside a bound that no order can beat: the longest response by itself or engines that
are full all the time, and the latter alone where steps do not end. What the continuous order would take if it
knew the lengths and began with the longest stands there too: what is above that is a matter of order.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import HERE, ChildFailed, Report, arguments, paired_ratio, say, torchrun, warn_if_busy
from simulated_replicas import Cost, full, interpolated, simulate, step_in_the_middle
from workload import Workload, make

ROWS, SAMPLES, GROUPS = 16, 4, 8
"""Rows that an engine works on, samples of a prompt, prompts for each replica."""
SPREAD = 0.5**0.5
"""Deviation of a length's logarithm, by prompts and, as much again, by the samples of one."""
STEPS = 8
"""Steps whose work the simulated open order has before it."""
MEASURED, SIMULATED, DRAWS = (1, 2, 4), (1, 2, 4, 8, 32, 128), 40
"""Draws of lengths that are simulated: of one replica's work, and fewer of more."""


def log_normal(prompts: int, median: int, longest: int, seed: int) -> list[list[int]]:
    """Return the lengths of the responses to each prompt, which have a long tail."""
    random_ = random.Random(seed)
    means = [random_.gauss(0.0, SPREAD) for _ in range(prompts)]
    return [
        [min(longest, 1 + round(random_.lognormvariate(mean, SPREAD) * median)) for _ in range(SAMPLES)]
        for mean in means
    ]


def measured(folder: Path, replicas: int, lengths: Sequence[list[list[int]]]) -> dict[str, Any]:
    """Sample with real engines, one on each rank, in turns of these lengths; raises ChildFailed."""
    say("rollout", f"{replicas} replicas, {len(lengths)} turns of {len(lengths[0])} prompts")
    result = folder / f"{replicas}.json"
    command = [str(HERE / "rollout_worker.py"), str(folder / "model"), str(result)]
    command += ["--lengths", json.dumps(lengths), "--rows", str(ROWS)]
    torchrun(command, replicas, 1, folder / f"{replicas}.log", 1800)
    return json.loads(result.read_text())


def record(report: Report, replicas: int, turns: Mapping[str, Sequence[tuple[float, float, int]]]) -> None:
    """Record the orders of one number of replicas; one that waits for others is idle meanwhile."""
    case = f"{replicas} replicas, measured"
    seconds = {name: [whole for whole, *_ in values] for name, values in turns.items()}
    for name, values in seconds.items():
        ratio = None if name == "continuous" else paired_ratio(values, seconds["continuous"])
        report.add(case, name, "seconds", "s", values, ratio)
        steps = [count for *_, count in turns[name]]
        if any(steps):
            report.add(case, name, "engine steps of the slowest", "", steps)
        if replicas > 1:
            report.add(
                case, name, "replicas idle", "share", [1 - own / whole for whole, own, _ in turns[name]]
            )


def simulated(report: Report, replicas: int, cost: Cost, median: int, longest: int) -> None:
    """Record the orders of one number of replicas by simulation, with several draws of lengths."""
    orders: dict[str, list[float]] = {}
    bounds: dict[str, list[float]] = {}
    groups = GROUPS * replicas
    for seed in range(max(3, DRAWS // replicas)):
        lengths = log_normal(groups, median, longest, seed)
        least = max(max(map(max, lengths)) * cost(1), full(lengths, replicas, ROWS, cost))
        known = sorted(lengths, key=max, reverse=True)
        for order, drawn, most in (
            ("lockstep", lengths, groups * SAMPLES * replicas),
            ("continuous", lengths, ROWS),
            ("continuous, lengths known", known, ROWS),
        ):
            orders.setdefault(order, []).append(simulate(drawn, replicas, ROWS, most, cost)[-1][0])
            bounds.setdefault(order, []).append(least)
        many = log_normal(groups * STEPS, median, longest, seed)
        seconds = step_in_the_middle(simulate(many, replicas, ROWS, ROWS, cost), STEPS)
        orders.setdefault("open", []).append(seconds)
        bounds.setdefault("open", []).append(full(many, replicas, ROWS, cost) / STEPS)
    for order, values in orders.items():
        ratio = paired_ratio(values, bounds[order])
        report.add(f"{replicas} replicas, simulated", order, "seconds", "s", values, ratio)
    pairs = zip(orders["continuous"], orders["lockstep"], strict=True)
    over = [ours / lockstep for ours, lockstep in pairs]
    report.add(f"{replicas} replicas, simulated", "continuous", "over lockstep's", "", over)


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
            turns = [log_normal(GROUPS * replicas, median, longest, turn) for turn in range(repeats)]
            try:
                found = measured(Path(name), replicas, turns)
            except ChildFailed as error:
                report.fail(f"{replicas} replicas: {error}")
                continue
            costs = costs or {int(rows): seconds for rows, seconds in found["costs"].items()}
            record(report, replicas, found["turns"])
    for rows, seconds in costs.items():
        report.add("an engine step", "vLLM", f"{rows} rows", "s", [seconds])
    for replicas in SIMULATED if costs else ():
        simulated(report, replicas, interpolated(costs), median, longest)
    report.note("ratio of a measured order: over the continuous one; of a simulated one: over its bound")
    report.note("aim: within 1.05 of the bound")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
