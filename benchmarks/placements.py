"""Cost of placement and order: all roles on all ranks, separate rollout ranks, and sampling ahead.

    python benchmarks/placements.py [--quick] [--repeats N] [--json FILE]

A model of 25.7M parameters, responses with a long tail (a mean of 0.15 of the limit, which few reach) and one
rank per core, at least two. ``colocate`` has all roles on all ranks. In the other cases the first half of the
ranks only trains and the second half only samples: ``lockstep``, one after the other; ``closed``, at the same
time with ``asynchrony.steps_ahead`` 1, where a step trains on exactly its own prompts; and ``open``, where it
trains on the groups that are complete.

The side with less work would always wait, so the work is balanced first: two probes in the open order choose
``rollout.vllm.max_num_seqs``, the number of rows in the engine, so that sampling takes as long as training.
The remaining idle time is the cost of the order. All orders do the same work.

Runs take turns; the first two steps of each warm up and are not counted. Metrics: seconds per step with its
ratio to colocate, and the share of a step in which each kind of rank waits for the other.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Report, arguments, cores, say, torchrun, warn_if_busy
from workload import Workload, configuration, make

from megatron_rl.metrics import read_metrics

Steps = list[dict[str, float]]

FULL = Workload(
    prompts=12,
    samples=8,
    max_response_tokens=512,
    mean_share=0.15,
)
QUICK = Workload(
    prompts=8,
    samples=4,
    max_response_tokens=256,
    mean_share=0.15,
)
WARM_UP_STEPS = 2
FEW_ROWS = 4
"""Rows of the probe in which sampling surely takes longer than learning."""
STANDALONE = ("placement=standalone",)
AHEAD = (*STANDALONE, "asynchrony.steps_ahead=1")
METHODS: Mapping[str, tuple[str, ...]] = {
    "colocate": (),
    "lockstep": STANDALONE,
    "closed": AHEAD,
    "open": (*AHEAD, "rollout.order=open", "rollout.partial=true", "rollout.oversample=0.5"),
}
IDLE_METRICS = {"learner": "time/idle_learn", "rollout": "time/idle_rollout"}
"""Kind of rank -> metric of the seconds in which it waits for the other kind."""


def run(
    name: str,
    method: str,
    work: Workload,
    folder: Path,
    ranks: int,
    steps: int,
    rows: int,
) -> Steps:
    """Train with the command that users call; return the metrics of the steps that count."""
    say("placements", f"{name}: {steps} steps of {work.rows} samples on {ranks} ranks, {rows} rows at once")

    config = folder / f"{name}.yaml"
    run_dir = folder / name
    config.write_text(configuration(work, folder, run_dir, steps + WARM_UP_STEPS, {}))
    command = ["-m", "megatron_rl", "train", str(config), f"rollout.vllm.max_num_seqs={rows}"]
    torchrun(
        [*command, *METHODS[method]],
        ranks,
        1,
        folder / f"{name}.log",
        1800,
    )

    lines = read_metrics(run_dir / "metrics.jsonl")[WARM_UP_STEPS:]
    # During the last step of a run nothing is sampled ahead.
    if "asynchrony.steps_ahead=1" in METHODS[method]:
        lines.pop()
    return lines


def idle(method: str, steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the fraction of each step in which training ranks and rollout ranks wait for each other."""
    if method == "colocate":
        return {}
    # In lockstep the learners wait exactly while the rollout works.
    if method == "lockstep":
        busy = [step["time/generate"] / step["time/step"] for step in steps]
        return {"learner": busy, "rollout": [1 - share for share in busy]}
    return {kind: [step[name] / step["time/step"] for step in steps] for kind, name in IDLE_METRICS.items()}


def busy_seconds(steps: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the mean seconds in which learner and rollout are busy in a step of the open order."""
    # A side is busy while it does not wait for the other.
    learner, rollout = (
        statistics.mean(step["time/step"] - step[name] for step in steps) for name in IDLE_METRICS.values()
    )
    return learner, rollout


def balanced_rows(probes: Mapping[int, tuple[float, float]]) -> int:
    """Return the number of rows at once with which sampling takes as long as learning, from two probes.

    ``probes`` has the seconds of learning and of sampling by rows. An engine's step takes a fixed time
    and more for each row, so the seconds of sampling are linear in 1 / rows.
    """
    low_rows, high_rows = sorted(probes)
    low_learning, slow_sampling = probes[low_rows]
    high_learning, fast_sampling = probes[high_rows]
    learning = (low_learning + high_learning) / 2

    # The line through both probes; without a slope more rows do not help, and the most are taken.
    slope = (slow_sampling - fast_sampling) / (1 / low_rows - 1 / high_rows)
    inverse_rows = 1 / high_rows
    if slope > 0:
        inverse_rows += (learning - fast_sampling) / slope
    if inverse_rows <= 0:
        return high_rows
    return min(high_rows, max(1, round(1 / inverse_rows)))


def balance(
    work: Workload,
    folder: Path,
    ranks: int,
    steps: int,
) -> int:
    """Return the number of rows at once for each engine, and print the probes."""
    # Two numbers of rows far apart: between them the seconds are interpolated.
    replicas = ranks // 2
    probes = {}
    for rows in (FEW_ROWS, max(2 * FEW_ROWS, work.rows // replicas)):
        probes[rows] = busy_seconds(run(f"probe-{rows}", "open", work, folder, ranks, steps, rows))
        learner, rollout = probes[rows]
        say("placements", f"{rows} rows at once: {learner:.2f} s of learning, {rollout:.2f} s of sampling")
    return balanced_rows(probes)


def main(command_line: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = arguments(__doc__, repeats=2).parse_args(command_line)
    work = QUICK if options.quick else FULL
    default_repeats = 1 if options.quick else 2
    repeats = options.repeats or default_repeats
    ranks = max(2, cores() // 2 * 2)
    steps = 6

    warn_if_busy("placements")
    report = Report("placements")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, work)
        rows = balance(work, folder, ranks, steps)
        # Methods run in turns, so that a changing load of the machine affects all of them.
        steps_by_method: dict[str, Steps] = {method: [] for method in METHODS}
        for turn in range(repeats):
            for method in METHODS:
                steps_by_method[method] += run(
                    f"{method}-{turn}",
                    method,
                    work,
                    folder,
                    ranks,
                    steps,
                    rows,
                )

    case = f"{ranks} ranks, {work.rows} samples, up to {work.max_response_tokens} tokens, {rows} rows at once"
    # Ratios are of medians, since runs of one method are not adjacent in time.
    base = statistics.median(step["time/step"] for step in steps_by_method["colocate"])
    for method, lines in steps_by_method.items():
        seconds = [step["time/step"] for step in lines]
        ratio = None
        if method != "colocate":
            ratio = statistics.median(seconds) / base
        report.add(case, method, "step", "s", seconds, ratio)
        report.add(
            case,
            method,
            "response length",
            "tokens",
            [line["response/length"] for line in lines],
        )
        for kind, shares in idle(method, lines).items():
            report.add(case, method, f"idle share, {kind}", "", shares)
    report.note("ratio to peer: seconds per step over colocate's")
    report.note("aim: below 0.05 idle of both kinds in one of the orders")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
