"""Held-out accuracy of every recipe of configs/recipes before and after a short run.

    python benchmarks/recipes.py [--quick] [--repeats N] [--json FILE] [--only grpo,gspo] [--steps N]
                                 [--folder DIR] [KEY=VALUE …]

All recipes start from one model: the quickstart's after its supervised warm-up, which is trained first and
remains in the folder for later calls. Each recipe then trains in one process for --steps (which also shortens
the decay of the learning rate), with its own batch and settings; layout, model, engine and the keys of
KEY=VALUE are replaced. Each repeat has another seed; mean and standard deviation are printed below the table.

Metrics: accuracy, the fraction of the quickstart's held-out problems that greedy decoding solves;
sampled_reward, the mean reward of the samples of the first three and last three training steps. Recipes with
preference training only run if --only names them; their first accuracy is the one after that training. The
exit code is 1 if a recipe's median accuracy did not rise, or a run failed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from common import HERE, ChildFailed, Report, arguments, mean_and_spread, prepare, say, torchrun, warn_if_busy

from megatron_rl.config.load import load_config
from megatron_rl.metrics import read_metrics

RECIPES = HERE.parent / "configs" / "recipes"
QUICKSTART = HERE.parent / "configs" / "quickstart.yaml"
# With the torch engine recipes run on any machine, also without vLLM.
ONE_PROCESS = ("world_size=1", "actor.layout={}", "rollout.tensor=1", "rollout.engine=torch")
ENDS = 3
"""Steps at either end of a run whose mean is its first and its last sampled reward."""


def train(
    config: Path,
    run: Path,
    overrides: Sequence[str],
) -> list[dict[str, float]]:
    """Train in one process; return the metrics of evaluation 0 and of every step."""
    run.parent.mkdir(parents=True, exist_ok=True)
    values = [str(config), *ONE_PROCESS, f"run_dir={run}", *overrides]
    torchrun(
        ["-m", "megatron_rl", "train", *values],
        1,
        1,
        run.with_suffix(".log"),
        3600,
    )
    return read_metrics(run / "metrics.jsonl")


def warm_model(folder: Path) -> Path:
    """Return the checkpoint after the quickstart's supervised warm-up, which the first call makes."""
    run = folder / "warm"
    if not (run / "hf" / "config.json").is_file():
        say("recipes", "the supervised warm-up that all recipes start from")
        # Data and model of the quickstart.
        for data, command in load_config(QUICKSTART).prepare.items():
            if not Path(data).exists():
                prepare(command, Path())
        # A run has at least one step; this one's is too small to change a weight.
        tiny = ["actor.optimizer={learning_rate: 1e-15}", "steps=1", "batch.prompts_per_step=8"]
        train(QUICKSTART, run, [*tiny, "evaluation.sets={}"])
    return run / "hf"


def measure(
    name: str,
    model: Path,
    folder: Path,
    steps: int,
    seeds: Sequence[int],
    overrides: list[str],
) -> dict:
    """Train one recipe with each seed; return its accuracies and sampled rewards, before and after."""
    results: dict[str, list[float]] = {
        "before": [],
        "after": [],
        "first": [],
        "last": [],
        "seconds": [],
    }
    for seed in seeds:
        run = folder / f"{name}-{seed}"
        # Evaluate before the first and after the last step only; the model is warmed up, so `sft` is off.
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
        say("recipes", f"{name}, seed {seed}: accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    return results


def main() -> int:
    """Train the recipes one after the other and print the table."""
    parser = arguments(__doc__, repeats=3)
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

    # Without the common model there is nothing to measure.
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
