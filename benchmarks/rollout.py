"""Compare orders of sampling for responses with long-tailed lengths, and measure the overhead per step.

    python benchmarks/rollout.py [--quick] [--repeats N] [--json FILE]

In *lockstep*, each replica gets its share of the prompts at the start, and all wait for the slowest replica.
In the *continuous* order, a replica takes a new group when a group ends. In the *open* order, replicas also
never wait for the end of a step.

Responses have log-normal lengths, with half of the variance between prompts, and engines work on 16 rows
at a time. Each turn draws new lengths. Which order is faster depends on these lengths, since the longest
response is not known beforehand.

1. One replica: the seconds of vLLM's steps by number of rows, and sampling by this package against vLLM's own
   loop over the same requests (rollout_worker.py).
2. One to four replicas on this machine: lockstep against the continuous order, in turns in one job. If there
   are more replicas than cores, replicas share a core.
3. Up to 128 replicas, simulated: the package's own queue and scheduler, with engines that only advance a
   clock by the seconds of part 1 (simulated_replicas.py). The open order is simulated, too. Its seconds are
   the seconds of one step in the middle of many steps.

The simulated seconds are compared with a lower bound: the longest response alone, or engines that are always
full, whichever takes longer. The bound of the open order is full engines. One more simulation, "continuous,
lengths known", starts with the longest response. Its difference from the continuous order is the cost of not
knowing the lengths.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    HERE,
    ChildFailed,
    Report,
    make_parser,
    paired_ratio,
    print_progress,
    torchrun,
    warn_if_busy,
)
from simulated_replicas import Cost, full_engine_seconds, interpolate_costs, seconds_of_middle_step, simulate
from workload import Workload, write_workload

ROWS = 16
"""Number of rows that an engine works on at once."""
SAMPLES = 4
"""Number of samples per prompt."""
GROUPS = 8
"""Number of prompts per replica."""
SPREAD = 0.5**0.5
"""Standard deviation of a length's logarithm, both between prompts and between the samples of a prompt."""
STEPS = 8
"""Number of steps in a simulation of the open order."""
REAL_REPLICAS = (1, 2, 4)
SIMULATED_REPLICAS = (1, 2, 4, 8, 32, 128)
DRAWS = 40
"""Number of simulations with different lengths for one replica; more replicas have fewer simulations."""


def draw_lengths(
    prompts: int,
    median: int,
    limit: int,
    seed: int,
) -> list[list[int]]:
    """Draw the lengths of the responses to each prompt from a log-normal distribution.

    The median length is ``median``, and no response is longer than ``limit``.
    """
    generator = random.Random(seed)
    # Each prompt has its own mean length, around which its samples vary.
    means = [generator.gauss(0.0, SPREAD) for _ in range(prompts)]
    return [
        [min(limit, 1 + round(generator.lognormvariate(mean, SPREAD) * median)) for _ in range(SAMPLES)]
        for mean in means
    ]


def measure_replicas(
    folder: Path,
    replicas: int,
    lengths: Sequence[list[list[int]]],
) -> dict[str, Any]:
    """Sample with a real engine on each rank, and return the measurements; raises ChildFailed.

    ``lengths`` has the response lengths of each turn.
    """
    print_progress("rollout", f"{replicas} replicas, {len(lengths)} turns of {len(lengths[0])} prompts")
    result = folder / f"{replicas}.json"
    command = [str(HERE / "rollout_worker.py"), str(folder / "model"), str(result)]
    command += ["--lengths", json.dumps(lengths), "--rows", str(ROWS)]
    torchrun(command, replicas, 1, folder / f"{replicas}.log", 1800)
    return json.loads(result.read_text())


def record_measurement(
    report: Report,
    replicas: int,
    turns: Mapping[str, Sequence[tuple[float, float, int]]],
) -> None:
    """Record the measured seconds of each order, and the fraction of time in which replicas wait for others.

    ``turns`` maps an order to the result of `rollout_worker.measure` in each turn.
    """
    case = f"{replicas} replicas, measured"
    seconds = {name: [slowest for slowest, *_ in values] for name, values in turns.items()}
    for name, values in seconds.items():
        ratio = None
        if name != "continuous":
            ratio = paired_ratio(values, seconds["continuous"])
        report.add(case, name, "seconds", "s", values, ratio)

        # The steps of vLLM's own loop are not counted.
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
    """Simulate each order with several draws of lengths, and record its seconds."""
    orders: dict[str, list[float]] = {}
    bounds: dict[str, list[float]] = {}
    groups = GROUPS * replicas
    for seed in range(max(3, DRAWS // replicas)):
        # Simulate one step: no order is faster than the longest response, or than full engines.
        lengths = draw_lengths(groups, median, limit, seed)
        bound = max(max(map(max, lengths)) * cost(1), full_engine_seconds(lengths, replicas, ROWS, cost))
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

        # Simulate many steps without waiting between them: the open order is bounded only by full engines.
        step_lengths = draw_lengths(groups * STEPS, median, limit, seed)
        seconds = seconds_of_middle_step(simulate(step_lengths, replicas, ROWS, ROWS, cost), STEPS)
        orders.setdefault("open", []).append(seconds)
        bounds.setdefault("open", []).append(full_engine_seconds(step_lengths, replicas, ROWS, cost) / STEPS)

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
    options = make_parser(__doc__, repeats=3).parse_args(command_line)
    median, limit = (16, 96) if options.quick else (48, 512)
    default_repeats = 1 if options.quick else 3
    repeats = options.repeats or default_repeats

    warn_if_busy("rollout")
    report = Report("rollout")
    costs: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="rollout.") as name:
        # With so high a limit, the model hardly ever ends a response by itself.
        write_workload(
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
            turns = [draw_lengths(GROUPS * replicas, median, limit, turn) for turn in range(repeats)]
            try:
                measurement = measure_replicas(Path(name), replicas, turns)
            except ChildFailed as error:
                report.fail(f"{replicas} replicas: {error}")
                continue

            # Use the costs of one replica, which does not share its core.
            costs = costs or {int(rows): seconds for rows, seconds in measurement["costs"].items()}
            record_measurement(report, replicas, measurement["turns"])

    for rows, seconds in costs.items():
        report.add("an engine step", "vLLM", f"{rows} rows", "s", [seconds])
    # A simulation needs the costs of a measured engine.
    for replicas in SIMULATED_REPLICAS:
        if not costs:
            break
        record_simulation(report, replicas, interpolate_costs(costs), median, limit)
    report.note("ratio of a measured order: over the continuous one; of a simulated one: over its bound")
    report.note("aim: within 1.05 of the bound")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
