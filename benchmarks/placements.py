"""What placement and order do to a step: every role everywhere, rollout apart, and sampling ahead.

    python benchmarks/placements.py [--quick] [--repeats N] [--json FILE]

The work of step_time.py (a model of 25.7M parameters, responses of 1 to 256 tokens) on as many ranks as there
are cores, at least two: ``colocate``; ``standalone``, where the second half of the ranks only samples and the
first half only learns, one after the other; and ``one_step_ahead``, the same ranks with
``asynchrony.steps_ahead`` 1, at the same time. Runs take turns; the first two steps of each warm up and are
not counted. Metrics: seconds per step with its ratio to colocate, and the share of a step in which each kind
of rank has nothing to do.
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

FULL = Workload(prompts=12, samples=8, max_response_tokens=256)
QUICK = Workload(prompts=8, samples=4, max_response_tokens=64)
WARMING = 2
METHODS: Mapping[str, tuple[str, ...]] = {
    "colocate": (),
    "standalone": ("placement=standalone",),
    "one_step_ahead": ("placement=standalone", "asynchrony.steps_ahead=1"),
    "open_order": (
        "placement=standalone",
        "asynchrony.steps_ahead=1",
        "rollout.order=open",
        "rollout.partial=true",
        "rollout.oversample=0.5",
    ),
}


def run(
    method: str, work: Workload, folder: Path, ranks: int, steps: int, turn: int
) -> list[dict[str, float]]:
    """Train with the command that users call; return the metrics of the steps that count."""
    say("placements", f"{method}, turn {turn}, {steps} steps of {work.rows} samples on {ranks} ranks")
    name = f"{method}-{turn}"
    config, out = folder / f"{name}.yaml", folder / name
    config.write_text(configuration(work, folder, out, steps + WARMING, {}))
    command = ["-m", "megatron_rl", "train", str(config), *METHODS[method]]
    torchrun(command, ranks, 1, folder / f"{name}.log", 1800)
    lines = read_metrics(out / "metrics.jsonl")
    # The last step of a run has nothing left to sample ahead.
    return lines[WARMING : len(lines) - (1 if "asynchrony.steps_ahead=1" in METHODS[method] else 0)]


def idle(method: str, steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return by kind of rank the share of each step in which it waits for the other kind."""
    if method == "colocate":
        return {}
    if method == "standalone":
        busy = [step["time/generate"] / step["time/step"] for step in steps]
        return {"idle share, learner": busy, "idle share, rollout": [1 - share for share in busy]}
    return {
        f"idle share, {kind}": [step[f"time/idle_{name}"] / step["time/step"] for step in steps]
        for kind, name in (("learner", "learn"), ("rollout", "rollout"))
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = arguments(__doc__, repeats=2).parse_args(words)
    work, repeats = (QUICK, 1) if options.quick else (FULL, 2)
    repeats = options.repeats or repeats
    ranks, steps = max(2, cores() // 2 * 2), 3 if options.quick else 4
    warn_if_busy("placements")
    report = Report("placements")
    case = f"{ranks} ranks, {work.rows} samples, up to {work.max_response_tokens} tokens"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, work)
        found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
        for turn in range(repeats):
            for method in METHODS:
                found[method] += run(method, work, folder, ranks, steps, turn)
    base = statistics.median(step["time/step"] for step in found["colocate"])
    for method, lines in found.items():
        seconds = [step["time/step"] for step in lines]
        ratio = statistics.median(seconds) / base if method != "colocate" else None
        report.add(case, method, "step", "s", seconds, ratio)
        for metric, shares in idle(method, lines).items():
            report.add(case, method, metric, "", shares)
    report.note("ratio to peer: seconds per step over colocate's")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
