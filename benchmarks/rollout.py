"""Measure the continuous order against lockstep with long-tailed lengths, and the overhead per step.

    python benchmarks/rollout.py [--quick] [--repeats N] [--json FILE]

Responses have log-normal lengths, with half of the variance between prompts, and engines work on 16 rows
at a time. Each turn draws its own lengths. Which order is faster depends on the draw, since the longest
response is not known beforehand.

1. One replica: the seconds of vLLM's steps by rows, and sampling by this package against vLLM's own loop over
   the same requests (rollout_worker.py).
2. One to four replicas on this machine: lockstep, where each replica gets its share of the prompts at the
   start and all wait for the slowest, against the continuous order, where a replica takes a group when
   another ends. Both run in turns in one job. Replicas in excess of the cores share them.
3. Four to 128 replicas, simulated: the package's own queue and scheduler, with engines that only take the
   seconds of part 1 (simulated_replicas.py). The open order is simulated too, in which replicas never wait
   for the end of a step; its seconds are those of one step in the middle of many.

Simulated seconds are compared with a lower bound of every order: the longest response alone, or engines that
are always full; for the open order only the latter. They are also compared with the continuous order if it
knew the lengths and started with the longest response: the rest is the cost of not knowing them.
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

ROWS = 16
"""Rows that an engine works on at once."""
SAMPLES = 4
"""Samples of a prompt."""
GROUPS = 8
"""Prompts for each replica."""
SPREAD = 0.5**0.5
"""Deviation of a length's logarithm, by prompts and, as much again, by the samples of one."""
STEPS = 8
"""Steps of work in a simulation of the open order."""
REAL_REPLICAS = (1, 2, 4)
SIMULATED_REPLICAS = (1, 2, 4, 8, 32, 128)
DRAWS = 40
"""Simulated draws of the lengths of one replica's work; of more replicas fewer."""


def log_normal(
    prompts: int,
    median: int,
    limit: int,
    seed: int,
) -> list[list[int]]:
    """Return the lengths of the responses to each prompt, which have a long tail."""
    generator = random.Random(seed)
    # A prompt has a mean length of its own, around which its samples vary.
    means = [generator.gauss(0.0, SPREAD) for _ in range(prompts)]
    return [
        [min(limit, 1 + round(generator.lognormvariate(mean, SPREAD) * median)) for _ in range(SAMPLES)]
        for mean in means
    ]


def measured(
    folder: Path,
    replicas: int,
    lengths: Sequence[list[list[int]]],
) -> dict[str, Any]:
    """Sample with real engines, one on each rank, in turns of these lengths; raises ChildFailed."""
    say("rollout", f"{replicas} replicas, {len(lengths)} turns of {len(lengths[0])} prompts")
    result = folder / f"{replicas}.json"
    command = [str(HERE / "rollout_worker.py"), str(folder / "model"), str(result)]
    command += ["--lengths", json.dumps(lengths), "--rows", str(ROWS)]
    torchrun(command, replicas, 1, folder / f"{replicas}.log", 1800)
    return json.loads(result.read_text())


def record(
    report: Report,
    replicas: int,
    turns: Mapping[str, Sequence[tuple[float, float, int]]],
) -> None:
    """Record the orders of one number of replicas; one that waits for others is idle meanwhile."""
    case = f"{replicas} replicas, measured"
    seconds = {name: [slowest for slowest, *_ in values] for name, values in turns.items()}
    for name, values in seconds.items():
        ratio = None
        if name != "continuous":
            ratio = paired_ratio(values, seconds["continuous"])
        report.add(case, name, "seconds", "s", values, ratio)

        # vLLM's own loop counts no steps.
        steps = [count for *_, count in turns[name]]
        if any(steps):
            report.add(case, name, "engine steps of the slowest", "", steps)
        if replicas > 1:
            idle = [1 - mean / slowest for slowest, mean, _ in turns[name]]
            report.add(case, name, "replicas idle", "share", idle)


def record_simulation(
    report: Report,
    replicas: int,
    cost: Cost,
    median: int,
    limit: int,
) -> None:
    """Record the orders of one number of replicas by simulation, with several draws of lengths."""
    orders: dict[str, list[float]] = {}
    bounds: dict[str, list[float]] = {}
    groups = GROUPS * replicas
    for seed in range(max(3, DRAWS // replicas)):
        # One step: no order is faster than its longest response, or than full engines.
        lengths = log_normal(groups, median, limit, seed)
        bound = max(max(map(max, lengths)) * cost(1), full(lengths, replicas, ROWS, cost))
        longest_first = sorted(lengths, key=max, reverse=True)
        for order, order_lengths, max_in_flight in (
            ("lockstep", lengths, groups * SAMPLES * replicas),
            ("continuous", lengths, ROWS),
            ("continuous, lengths known", longest_first, ROWS),
        ):
            completed = simulate(
                order_lengths,
                replicas,
                ROWS,
                max_in_flight,
                cost,
            )
            orders.setdefault(order, []).append(completed[-1][0])
            bounds.setdefault(order, []).append(bound)

        # Many steps without an end: only full engines bound the open order.
        step_lengths = log_normal(groups * STEPS, median, limit, seed)
        seconds = step_in_the_middle(simulate(step_lengths, replicas, ROWS, ROWS, cost), STEPS)
        orders.setdefault("open", []).append(seconds)
        bounds.setdefault("open", []).append(full(step_lengths, replicas, ROWS, cost) / STEPS)

    for order, values in orders.items():
        ratio = paired_ratio(values, bounds[order])
        report.add(
            f"{replicas} replicas, simulated",
            order,
            "seconds",
            "s",
            values,
            ratio,
        )
    pairs = zip(orders["continuous"], orders["lockstep"], strict=True)
    ratios = [continuous / lockstep for continuous, lockstep in pairs]
    report.add(
        f"{replicas} replicas, simulated",
        "continuous",
        "over lockstep's",
        "",
        ratios,
    )


def main(command_line: Sequence[str] | None = None) -> int:
    """Measure, simulate and print; return the exit code."""
    options = arguments(__doc__, repeats=3).parse_args(command_line)
    median, limit = (16, 96) if options.quick else (48, 512)
    default_repeats = 1 if options.quick else 3
    repeats = options.repeats or default_repeats

    warn_if_busy("rollout")
    report = Report("rollout")
    costs: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="rollout.") as name:
        # So long a limit that the model hardly ever ends a response by itself.
        make(
            Path(name),
            Workload(
                prompts=8,
                samples=SAMPLES,
                max_response_tokens=10**7,
            ),
        )
        replica_counts = REAL_REPLICAS[:2] if options.quick else REAL_REPLICAS
        for replicas in replica_counts:
            # Both orders get the same lengths in a turn, so that only the order differs.
            turns = [log_normal(GROUPS * replicas, median, limit, turn) for turn in range(repeats)]
            try:
                measurement = measured(Path(name), replicas, turns)
            except ChildFailed as error:
                report.fail(f"{replicas} replicas: {error}")
                continue

            # The costs of one replica, which has a core for itself.
            costs = costs or {int(rows): seconds for rows, seconds in measurement["costs"].items()}
            record(report, replicas, measurement["turns"])

    for rows, seconds in costs.items():
        report.add("an engine step", "vLLM", f"{rows} rows", "s", [seconds])
    # Without a measured engine there are no costs to simulate with.
    for replicas in SIMULATED_REPLICAS:
        if not costs:
            break
        record_simulation(report, replicas, interpolated(costs), median, limit)
    report.note("ratio of a measured order: over the continuous one; of a simulated one: over its bound")
    report.note("aim: within 1.05 of the bound")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
