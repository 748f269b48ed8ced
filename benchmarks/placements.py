"""Compare placements of the roles: all roles on all ranks, separate rollout ranks, and sampling ahead.

    python benchmarks/placements.py [--quick] [--repeats N] [--json FILE]

The model has 25.7M parameters. The mean response length is 0.15 of the limit, which few responses reach.
There is one rank per core, and at least two ranks. With ``colocate``, all roles are on all ranks. With the
other methods, the first half of the ranks only trains and the second half only samples:

- ``lockstep``: training and sampling alternate.
- ``closed``: both run at the same time with ``asynchrony.steps_ahead`` 1, and a step trains on exactly its
  own prompts.
- ``open``: both run at the same time, and a step trains on the groups that are complete.

Ranks with less work would always wait, so the work is balanced first. Two short runs with ``open`` determine
the number of rows in the engine (``rollout.vllm.max_num_seqs``) with which sampling takes as long as
training. The remaining idle time is the cost of the method. All methods do the same work.

Runs take turns. The first two steps of each run are a warm-up and are not counted. Metrics: seconds per step
with the ratio to colocate, and the fraction of a step in which training and rollout ranks wait for each
other.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Report, cores, make_parser, print_progress, torchrun, warn_if_busy
from workload import Workload, configuration, write_workload

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
"""Number of rows with which sampling certainly takes longer than learning."""
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
    """Train with the command that users call; return the metrics of the steps after the warm-up."""
    print_progress(
        "placements", f"{name}: {steps} steps of {work.rows} samples on {ranks} ranks, {rows} rows at once"
    )

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
    # Drop the last step of a run with sampling ahead: nothing is sampled during it.
    if "asynchrony.steps_ahead=1" in METHODS[method]:
        lines.pop()
    return lines


def idle_shares(method: str, steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the fraction of each step in which training ranks and rollout ranks wait for each other."""
    if method == "colocate":
        return {}
    # In lockstep, the learners wait exactly while the rollout ranks sample.
    if method == "lockstep":
        sampling_shares = [step["time/generate"] / step["time/step"] for step in steps]
        return {"learner": sampling_shares, "rollout": [1 - share for share in sampling_shares]}
    return {kind: [step[name] / step["time/step"] for step in steps] for kind, name in IDLE_METRICS.items()}


def busy_seconds(steps: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the mean seconds per step in which learner and rollout ranks are busy, with ``open``."""
    # Ranks are busy while they do not wait for the other ranks.
    learner, rollout = (
        statistics.mean(step["time/step"] - step[name] for step in steps) for name in IDLE_METRICS.values()
    )
    return learner, rollout


def balanced_rows(probes: Mapping[int, tuple[float, float]]) -> int:
    """Return the number of rows in the engine with which sampling takes as long as learning.

    ``probes`` maps two measured numbers of rows to the seconds of learning and of sampling. An engine's step
    takes a fixed time plus a time per row, so the seconds of sampling are linear in 1 / rows.
    """
    low_rows, high_rows = sorted(probes)
    low_learning, slow_sampling = probes[low_rows]
    high_learning, fast_sampling = probes[high_rows]
    learning = (low_learning + high_learning) / 2

    # Intersect the line through both probes with the seconds of learning. Without a slope, more rows are not
    # faster, and the result is the larger number.
    slope = (slow_sampling - fast_sampling) / (1 / low_rows - 1 / high_rows)
    inverse_rows = 1 / high_rows
    if slope > 0:
        inverse_rows += (learning - fast_sampling) / slope
    if inverse_rows <= 0:
        return high_rows
    return min(high_rows, max(1, round(1 / inverse_rows)))


def find_balanced_rows(
    work: Workload,
    folder: Path,
    ranks: int,
    steps: int,
) -> int:
    """Measure two numbers of rows, and return the number with which sampling takes as long as learning."""
    # The two numbers are far apart, since the seconds are interpolated between them.
    replicas = ranks // 2
    probes = {}
    for rows in (FEW_ROWS, max(2 * FEW_ROWS, work.rows // replicas)):
        probes[rows] = busy_seconds(run(f"probe-{rows}", "open", work, folder, ranks, steps, rows))
        learner, rollout = probes[rows]
        print_progress(
            "placements", f"{rows} rows at once: {learner:.2f} s of learning, {rollout:.2f} s of sampling"
        )
    return balanced_rows(probes)


def main(command_line: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = make_parser(__doc__, repeats=2).parse_args(command_line)
    work = QUICK if options.quick else FULL
    default_repeats = 1 if options.quick else 2
    repeats = options.repeats or default_repeats
    ranks = max(2, cores() // 2 * 2)
    steps = 6

    warn_if_busy("placements")
    report = Report("placements")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_workload(folder, work)
        rows = find_balanced_rows(work, folder, ranks, steps)
        # Methods run in turns, so that a changing load of the machine affects all methods.
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
    # Use the ratio of medians, since steps of two methods are not adjacent in time.
    colocate_seconds = statistics.median(step["time/step"] for step in steps_by_method["colocate"])
    for method, lines in steps_by_method.items():
        seconds = [step["time/step"] for step in lines]
        ratio = None
        if method != "colocate":
            ratio = statistics.median(seconds) / colocate_seconds
        report.add(case, method, "step", "s", seconds, ratio)
        report.add(
            case,
            method,
            "response length",
            "tokens",
            [line["response/length"] for line in lines],
        )
        for kind, shares in idle_shares(method, lines).items():
            report.add(case, method, f"idle share, {kind}", "", shares)
    report.note("ratio to peer: seconds per step over colocate's")
    report.note("aim: below 0.05 idle of both kinds in one of the orders")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
