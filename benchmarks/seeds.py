"""Measure the held-out accuracy of configurations for several seeds, with mean and standard deviation.

    python benchmarks/seeds.py CONFIG … [--seeds 1-10] [--ranks N] [--folder DIR] [--prepare COMMAND]
                               [--quick] [--at-least X] [--gain X] [--json FILE] [KEY=VALUE …]

Each seed is a separate run with ``seed=N``. ``{seed}`` and ``{folder}`` in KEY=VALUE and in COMMAND are
replaced by the seed and its folder. COMMAND runs before each run. Finished runs are not repeated, so an
interrupted call resumes. For example, the quickstart with a different model, different problems and a
different order for each seed::

    python benchmarks/seeds.py configs/quickstart.yaml --at-least 0.9 --gain 0.3 \\
        --prepare "python -m megatron_rl.data.quickstart {folder} --seed {seed}" model.path={folder}/model \\
        data.train={folder}/train.jsonl evaluation.sets.held_out={folder}/eval.jsonl \\
        sft.data={folder}/sft.jsonl sft.held_out={folder}/sft_eval.jsonl

Metrics: accuracy before the first training step (after the supervised stages) and at the end; gain, their
difference; warm-up, its number of steps; time, the seconds of all steps. The exit code is 1 if a run failed,
or if a seed is below --at-least or --gain.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common import (
    HERE,
    ChildFailed,
    Report,
    make_parser,
    mean_and_spread,
    print_progress,
    run_command,
    torchrun,
    warn_if_busy,
)

from megatron_rl.config.load import load
from megatron_rl.metrics import read_metrics

TIMEOUT = 7200
"""Maximum seconds of one run."""


def train(
    config: Path,
    seed: int,
    folder: Path,
    command: str,
    ranks: int,
    overrides: Sequence[str],
) -> Path:
    """Train with one seed, unless this run has finished before; return the run folder.

    ``command`` runs first; "" means no command.
    """
    variables = {"seed": seed, "folder": folder}
    run = folder / "run"
    # The report is the last file that a run writes.
    if (run / "report.html").is_file():
        return run

    folder.mkdir(parents=True, exist_ok=True)
    if command:
        run_command(command, HERE.parent, **variables)

    all_overrides = [f"seed={seed}", f"run_dir={run}", "prepare={}"]
    all_overrides += [text.format(**variables) for text in overrides]
    torchrun(
        ["-m", "megatron_rl", "train", str(config), *all_overrides],
        ranks,
        1,
        folder / "output.log",
        TIMEOUT,
    )

    return run


def measure(run: Path) -> dict[str, float]:
    """Return the accuracies, the warm-up steps and the seconds of a finished run."""
    lines = read_metrics(run / "metrics.jsonl")
    accuracy = [line["eval/held_out/accuracy"] for line in lines if "eval/held_out/accuracy" in line]
    # A run without a supervised warm-up has no sft.jsonl, and no lines.
    warm_up = read_metrics(run / "sft.jsonl")

    warm_up_steps = 0.0
    if warm_up:
        warm_up_steps = float(warm_up[-1]["step"])

    # The first evaluation is before the first training step.
    return {
        "before": accuracy[0],
        "after": accuracy[-1],
        "gain": accuracy[-1] - accuracy[0],
        "warm-up": warm_up_steps,
        "time": sum(line.get("time/step", 0.0) for line in lines),
    }


def seeds_of(text: str) -> list[int]:
    """Parse a list of seeds, such as ``1-3,7`` -> [1, 2, 3, 7]."""
    ranges = [item.split("-") for item in text.split(",")]
    return [seed for ends in ranges for seed in range(int(ends[0]), int(ends[-1]) + 1)]


def main() -> int:
    """Run every configuration with every seed and print the table."""
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("arguments", nargs="+", metavar="CONFIG … KEY=VALUE …")
    parser.add_argument(
        "--seeds", default=None, help="such as 1-10 or 1,5,7 (default 1-10; 1-3 with --quick)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=None,
        help="processes (default: the configuration's)",
    )
    parser.add_argument("--folder", type=Path, default=HERE.parent / "runs" / "seeds")
    parser.add_argument(
        "--prepare",
        default="",
        metavar="COMMAND",
        help="command that creates a seed's data and model",
    )
    parser.add_argument(
        "--at-least",
        type=float,
        default=None,
        help="accuracy that every seed must reach",
    )
    parser.add_argument(
        "--gain",
        type=float,
        default=None,
        help="rise that every seed must reach",
    )
    options = parser.parse_intermixed_args()

    warn_if_busy("seeds")
    report = Report("seeds")
    # Configurations and overrides may come in any order.
    overrides = [text for text in options.arguments if "=" in text]
    # Make paths absolute, since a run may start in another folder.
    configs = [Path(text).resolve() for text in options.arguments if "=" not in text]
    default_seeds = "1-3" if options.quick else "1-10"
    seeds = seeds_of(options.seeds or default_seeds)
    minimums = {"after": options.at_least, "gain": options.gain}

    for config in configs:
        ranks = options.ranks or load(config).valid().world_size or 1
        results = []
        for seed in seeds:
            folder = options.folder.resolve() / f"{config.stem}-{seed}"
            try:
                run = train(
                    config,
                    seed,
                    folder,
                    options.prepare,
                    ranks,
                    overrides,
                )
            except ChildFailed as error:
                report.fail(f"{config.stem}, seed {seed}: {error}")
                continue

            result = measure(run)
            results.append(result)
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
            print_progress("seeds", f"{config.stem}, seed {seed}: {numbers}")
            for name, minimum in minimums.items():
                if minimum is not None and result[name] < minimum:
                    report.fail(f"{config.stem}, seed {seed}: {name} {result[name]:.3f} is under {minimum:g}")

        # The table contains the seeds that were measured.
        names = list(results[0]) if results else []
        for name in names:
            values = [result[name] for result in results]
            unit = {"warm-up": "steps", "time": "s"}.get(name, "share")
            report.add(
                config.stem,
                name,
                "accuracy" if unit == "share" else name,
                unit,
                values,
            )
            report.note(f"{config.stem}: {name} {mean_and_spread(values)}")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
