"""Measure the held-out accuracy of every recipe of configs/recipes before and after a short run.

    python benchmarks/recipes.py [--quick] [--repeats N] [--json FILE] [--only grpo,gspo] [--steps N]
                                 [--folder DIR] [KEY=VALUE …]

All recipes start from one model, the quickstart's after its supervised warm-up. The first call trains this
model, and later calls use it again. Each recipe then trains in one process for --steps, which also shortens
the decay of the learning rate. It has its own batch and settings; only layout, model, engine and the keys of
KEY=VALUE are replaced. Each repeat has a different seed. Mean and standard deviation are printed below the
table.

Metrics: accuracy, the fraction of the quickstart's held-out problems that greedy decoding solves;
sampled_reward, the mean reward of the samples of the first three and of the last three training steps.
Recipes with preference training run only if --only names them; their first accuracy is measured after the
preference training. The exit code is 1 if a recipe's median accuracy did not rise, or if a run failed.
"""

from __future__ import annotations

import statistics
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

from megatron_rl.config.load import load_config
from megatron_rl.metrics import read_metrics

RECIPES = HERE.parent / "configs" / "recipes"
QUICKSTART = HERE.parent / "configs" / "quickstart.yaml"
# With the torch engine, recipes also run on machines without vLLM.
ONE_PROCESS = ("world_size=1", "actor.layout={}", "rollout.tensor=1", "rollout.engine=torch")
ENDS = 3
"""Number of steps at the beginning and at the end of a run over which the sampled reward is averaged."""


def train(
    config: Path,
    run: Path,
    overrides: Sequence[str],
) -> list[dict[str, float]]:
    """Train in one process; return the metrics of evaluation 0 and of every step."""
    run.parent.mkdir(parents=True, exist_ok=True)
    arguments = [str(config), *ONE_PROCESS, f"run_dir={run}", *overrides]
    torchrun(
        ["-m", "megatron_rl", "train", *arguments],
        1,
        1,
        run.with_suffix(".log"),
        3600,
    )
    return read_metrics(run / "metrics.jsonl")


def warm_model(folder: Path) -> Path:
    """Return the quickstart's checkpoint after its supervised warm-up; train it if it does not exist."""
    run = folder / "warm"
    if not (run / "hf" / "config.json").is_file():
        print_progress("recipes", "the supervised warm-up that all recipes start from")
        # Create the data and the model of the quickstart.
        for data, command in load_config(QUICKSTART).prepare.items():
            if not Path(data).exists():
                run_command(command, Path())
        # A run has at least one training step. With this learning rate, the step does not change a weight.
        one_step = ["actor.optimizer={learning_rate: 1e-15}", "steps=1", "batch.prompts_per_step=8"]
        train(QUICKSTART, run, [*one_step, "evaluation.sets={}"])
    return run / "hf"


def measure(
    name: str,
    model: Path,
    folder: Path,
    steps: int,
    seeds: Sequence[int],
    overrides: list[str],
) -> dict:
    """Train one recipe with each seed; return accuracies, sampled rewards and seconds, one value per seed."""
    results: dict[str, list[float]] = {
        "before": [],
        "after": [],
        "first": [],
        "last": [],
        "seconds": [],
    }
    for seed in seeds:
        run = folder / f"{name}-{seed}"
        # Evaluate only before the first step and after the last step. The warm-up has already been done.
        settings = [
            f"model.path={model}", "sft=null", f"steps={steps}", f"seed={seed}", f"evaluation.every={steps}",
            f"checkpoint.every={steps}", "checkpoint.export=false", "checkpoint.keep=1",
        ]  # fmt: skip

        lines = train(RECIPES / f"{name}.yaml", run, [*settings, *overrides])
        # Only the lines of steps with an evaluation have an accuracy.
        accuracy = [line["eval/held_out/accuracy"] for line in lines if "eval/held_out/accuracy" in line]
        rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
        # The first evaluation is before step 1, the last one after all steps.
        results["before"].append(accuracy[0])
        results["after"].append(accuracy[-1])
        results["first"].append(statistics.mean(rewards[:ENDS]))
        results["last"].append(statistics.mean(rewards[-ENDS:]))
        results["seconds"].append(sum(line.get("time/step", 0.0) for line in lines))
        print_progress("recipes", f"{name}, seed {seed}: accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    return results


def main() -> int:
    """Train the recipes one after the other and print the table."""
    parser = make_parser(__doc__, repeats=3)
    files = {path.stem: path.read_text() for path in RECIPES.glob("*.yaml")}
    names = sorted(name for name, text in files.items() if "\npreference:" not in text)
    parser.add_argument("--only", default=",".join(names), help="comma-separated recipes")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help="training steps of each (default 30)",
    )
    parser.add_argument("--folder", type=Path, default=HERE.parent / "runs" / "recipes-benchmark")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="values for every recipe",
    )
    options = parser.parse_args()

    warn_if_busy("recipes")
    report = Report("recipes")
    default_steps = 10 if options.quick else 30
    steps = options.steps or default_steps
    folder = options.folder.resolve()
    report.note(f"{steps} steps each, from one model after the supervised warm-up")

    # All recipes need the model after the warm-up.
    try:
        model = warm_model(folder)
    except ChildFailed as error:
        report.fail(f"warm-up: {error}")
        return report.finish(options.json)

    default_repeats = 1 if options.quick else 3
    seeds = range(1, 1 + (options.repeats or default_repeats))
    for name in options.only.split(","):
        try:
            results = measure(
                name,
                model,
                folder,
                steps,
                seeds,
                options.overrides,
            )
        except ChildFailed as error:
            report.fail(f"{name}: {error}")
            continue

        for method in ("before", "after"):
            report.add(name, method, "accuracy", "share", results[method])
        report.add(name, "first steps", "sampled_reward", "", results["first"])
        report.add(name, "last steps", "sampled_reward", "", results["last"])
        report.add(name, "all steps", "time", "s", results["seconds"])
        report.note(
            f"{name}: accuracy {mean_and_spread(results['before'])} -> {mean_and_spread(results['after'])}"
        )
        if statistics.median(results["after"]) <= statistics.median(results["before"]):
            report.fail(f"{name} did not learn in {steps} steps")
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
