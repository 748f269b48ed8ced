"""Measure the effect of packing, filters, adaptive lengths and sampling profiles, added one after the other.

    python benchmarks/ablation.py [--quick] [--seeds 1-3] [--only NAME,…] [--ranks N] [--folder DIR]
                                  [--record] [KEY=VALUE …]

All runs start from one model after a supervised warm-up, on the task of benchmarks/ablation_task.py, with
the configuration benchmarks/ablation.yaml and the overrides of their variant. KEY=VALUE is an override of all
runs. Each variant and seed is a separate run, which torchrun starts. Finished runs are not repeated, so an
interrupted call resumes. --only and --seeds choose the runs to start. The table contains every finished run
of these seeds.

A variant is the previous variant with one more technique. Below each variant, the table shows its difference
from the previous variant, between runs with the same seed. A difference that has the same sign for every
seed is bold.

The folder gets ablation.md (tables), ablation.svg (picture), ablation.json (every number of every run with
its command and revision) and compare.html (settings and curves, by the command ``compare``). --record copies
the first three to docs/, for the page docs/ablation.md. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import yaml
from common import HERE, ChildFailed, hardware, print_progress, torchrun, versions, warn_if_busy
from seeds import seeds_of

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.durable import write_text
from megatron_rl.trainer import compare
from megatron_rl.trainer.curves import WINDOW, metric_series
from megatron_rl.trainer.report import run_metrics

ROOT = HERE.parent
CONFIG = Path("benchmarks/ablation.yaml")
TASK = Path("benchmarks/ablation_task.py")
RECORDED = {
    "ablation.md": Path("docs/recorded/ablation.txt"),
    "ablation.json": Path("docs/recorded/ablation.json"),
    "ablation.svg": Path("docs/images/ablation.svg"),
}
"""Name of a file in the folder of the runs -> its copy for the page docs/ablation.md."""
TIMEOUT = 3600
"""Maximum seconds of one run."""
QUICK = (
    "steps=3",
    "batch.prompts_per_step=8",
    "actor.optimizer.warmup_steps=1",
    "sft.steps=30",
    "evaluation.sets.held_out.max_prompts=20",
)
"""Overrides of ``--quick``: complete runs, but too short to learn."""
SCORER = "function"
"""Scorer of the configuration. Filters save a fraction of its calls, the metric ``reward/saved/function``."""


@dataclass(frozen=True)
class Variant:
    """Variant of the training run: the previous variant with some settings changed.

    Example: ``Variant("lengths", "+ adaptive lengths", {"rollout.max_response_tokens": "auto"})``.
    """

    name: str
    """Name of its run folders, and on the command line."""
    title: str
    """Title of its row."""
    settings: Mapping[str, str | None]
    """Overrides by key; None removes an override of an earlier variant."""


VARIANTS = (
    # Packing cannot be switched off. The least that the configuration accepts is a micro-batch as large as
    # the longest row: data.max_prompt_tokens + rollout.max_response_tokens.
    Variant("base", "smallest micro-batches", {"batch.tokens_per_microbatch": "68"}),
    # Without the key, the budget is derived: a rank's whole share of a mini-batch in one micro-batch.
    Variant("packing", "+ packing by tokens", {"batch.tokens_per_microbatch": None}),
    # Removed responses have the reward 0 that a wrong answer has, so that rewards of all rows are comparable.
    Variant(
        "filters",
        "+ filters",
        {"rollout.filters": "{empty: true, max_repetition: 0.3, on_filtered: reward, filtered_reward: 0.0}"},
    ),
    Variant(
        "lengths",
        "+ adaptive lengths",
        {
            "rollout.max_response_tokens": "auto",
            "rollout.auto_limit": "{at_least: 4, at_most: 48}",
        },
    ),
    # More exploration for short answers, less for long ones, in which a single wrong token fails all.
    Variant(
        "profiles",
        "+ profiles",
        {"rollout.sampling_profiles": "{addition: {temperature: 1.2}, sorting: {temperature: 0.8}}"},
    ),
)


@dataclass(frozen=True)
class Column:
    """Column of a table: a number of each run.

    Example: ``Column("truncated", "truncated", ".3f")``.
    """

    key: str
    """Key of the number in `measure`."""
    title: str
    """Head of the column."""
    form: str
    """Format of the number."""


TIME = (
    Column("seconds", "seconds", ".2f"),
    Column("generate", "generate", ".2f"),
    Column("score", "score", ".2f"),
    Column("learn", "learn", ".2f"),
)
# Counts, which other work on the machine does not disturb.
WORK = (
    Column("tokens", "sampled tokens", ",.0f"),
    Column("calls", "reward calls", ",.0f"),
    Column("truncated", "truncated", ".4f"),
)
RESULT = (
    Column("kl", "KL", ".4f"),
    Column("reward", "final reward", ".3f"),
    Column("variance", "reward variance", ".3f"),
    Column("accuracy", "held-out accuracy", ".3f"),
)
TABLES = (TIME, WORK, RESULT)
MEANING = (
    "Mean ± standard deviation over seeds. Seconds are those of the median step of a run, and of its phases. "
    "Tokens, reward calls and the truncated share are of the whole run; KL (to the reference), reward and "
    f"its variance are means of the last {WINDOW} steps; the accuracy is that of greedy answers after the "
    "last step.\n\n"
    "A row that begins with … is the difference from the row before it, seed by seed. It is bold if it has "
    "the same sign in every seed."
)

Numbers = Mapping[str, float]
"""Numbers of one run by key, as `measure` returns them."""
Results = Mapping[str, Mapping[int, Numbers]]
"""Numbers of the finished runs: name of the variant -> seed -> numbers."""


def overrides_of(name: str) -> list[str]:
    """Return the overrides of a variant and of all variants before it."""
    # Variants build on each other; a later one may remove an override with None.
    settings: dict[str, str | None] = {}
    for variant in VARIANTS:
        settings |= variant.settings
        if variant.name == name:
            break
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


# Runs


@dataclass(frozen=True)
class Campaign:
    """Folder of all runs, and the settings that they share."""

    folder: Path
    """Folder of runs, records and tables, relative to the repository if it is inside."""
    ranks: int
    """Processes of each run."""
    overrides: tuple[str, ...]
    """Overrides of every run."""

    @property
    def task(self) -> Path:
        """Folder of the model and the problems."""
        return self.folder / "task"

    @property
    def warm_model(self) -> Path:
        """Model after the warm-up, from which every run starts."""
        return self.folder / "warm" / "hf"

    def run_folder(self, name: str, seed: int) -> Path:
        """Return the run folder of a variant and a seed."""
        return self.folder / f"{name}-{seed}"

    def record(self, run: Path) -> Path:
        """Return the file that is written when a run has finished, with its command and revision."""
        return self.folder / f"{run.name}.json"

    def train(self, name: str, seed: int) -> None:
        """Train a variant with one seed, unless that run has finished; raises ChildFailed."""
        run = self.run_folder(name, seed)
        settings = ["sft=null", f"model.path={self.warm_model}", f"seed={seed}", *overrides_of(name)]
        self._run_once(run, "train", settings)

    def warm_up(self) -> None:
        """Write the task, and train the model from which every run starts; raises ChildFailed."""
        if not (self.task / "sft.jsonl").is_file():
            print_progress("ablation", f"model and problems in {self.task}")
            # Imported late: it needs transformers, which takes seconds.
            import ablation_task

            ablation_task.make(self.task)
        self._run_once(self.folder / "warm", "sft", [f"model.path={self.task / 'model'}"])

    def _run_once(self, run: Path, job: str, settings: Sequence[str]) -> None:
        """Run a job on `ranks` processes unless it has finished, and write its record."""
        paths = [
            f"run_dir={run}",
            f"data.train={self.task / 'train.jsonl'}",
            f"evaluation.sets.held_out.data={self.task / 'eval.jsonl'}",
            f"world_size={self.ranks}",
            "prepare={}",
        ]
        # `sft=null` removes the section, and an override below it would bring it back.
        campaign_overrides = list(self.overrides)
        if job == "sft":
            paths.append(f"sft.data={self.task / 'sft.jsonl'}")
        else:
            campaign_overrides = [text for text in campaign_overrides if not text.startswith("sft.")]

        arguments = ["-m", "megatron_rl", job, str(CONFIG), *paths, *settings, *campaign_overrides]
        command = f"torchrun --nproc-per-node {self.ranks} {shlex.join(arguments)}"

        record = self.record(run)
        if record.is_file():
            recorded_command = json.loads(record.read_text(encoding="utf-8"))["command"]
            if recorded_command != command:
                raise ChildFailed(
                    f"{run} has the run of another command; expected: {command}; got: {recorded_command}; "
                    f"fix: remove {record} and {run}, or choose another --folder"
                )
            return

        # An unfinished run resumes, but only with the command that started it.
        command_file = run.with_name(f"{run.name}.command")
        if run.exists() and command_file.is_file() and command_file.read_text(encoding="utf-8") != command:
            raise ChildFailed(
                f"{run} was begun by another command; expected: {command}; got: "
                f"{command_file.read_text(encoding='utf-8')}; fix: remove {run}, or choose another --folder"
            )
        write_text(command_file, command)

        print_progress("ablation", f"{run.name} …")
        seconds = torchrun(arguments, self.ranks, 1, self.folder / f"{run.name}.log", TIMEOUT)
        content = {
            "command": command,
            "seconds": seconds,
            "versions": versions(),
            "hardware": hardware(),
        }
        write_text(record, json.dumps(content, indent=1) + "\n")


def measure(run: Path) -> dict[str, float]:
    """Compute the numbers of a finished run from its metrics."""
    folder = RunFolder(run)
    all_lines = run_metrics(folder).lines
    # Line 0 is the evaluation before the first step.
    lines = [line for line in all_lines if "reward/mean" in line]
    batch = yaml.safe_load(folder.config.read_text(encoding="utf-8"))["batch"]
    rows = batch["prompts_per_step"] * batch["samples_per_prompt"]

    def values(name: str) -> list[float]:
        return metric_series(lines, name)[1]

    def mean_of_last_steps(name: str) -> float:
        return fmean(values(name)[-WINDOW:])

    # Without filters the metric is absent, and no call is saved.
    saved_shares = [line.get(f"reward/saved/{SCORER}", 0.0) for line in lines]
    _, accuracies = metric_series(all_lines, "eval/held_out/accuracy")
    return {
        # Medians: other work on the machine disturbs single steps.
        "seconds": median(values("time/step")),
        "generate": median(values("time/generate")),
        "score": median(values("time/score")),
        "learn": median(values("time/learn")),
        "sync": median(values("time/reshard")),
        "tokens": rows * sum(values("response/length")),
        "calls": rows * sum(1 - share for share in saved_shares),
        "truncated": fmean(values("response/truncated_fraction")),
        "kl": mean_of_last_steps("kl/ref"),
        "reward": mean_of_last_steps("reward/mean"),
        "variance": fmean(deviation**2 for deviation in values("reward/std")[-WINDOW:]),
        "before": accuracies[0],
        "accuracy": accuracies[-1],
    }


def measure_finished_runs(campaign: Campaign, seeds: Sequence[int]) -> dict[str, dict[int, dict[str, float]]]:
    """Return the numbers of all finished runs of the seeds, by variant in the order of `VARIANTS`."""
    results: dict[str, dict[int, dict[str, float]]] = {}
    for variant in VARIANTS:
        runs = {seed: campaign.run_folder(variant.name, seed) for seed in seeds}
        numbers = {seed: measure(run) for seed, run in runs.items() if campaign.record(run).is_file()}
        if numbers:
            results[variant.name] = numbers
    return results


# Tables


def differences(results: Results, name: str, previous: str, key: str) -> list[float]:
    """Return the difference of a number between two variants, for each seed that both have.

    ``key`` is the key of the number in `measure`.
    """
    shared_seeds = [seed for seed in results[name] if seed in results[previous]]
    return [results[name][seed][key] - results[previous][seed][key] for seed in shared_seeds]


def mean_text(values: Sequence[float], form: str) -> str:
    """Format the mean of values and, for several values, their standard deviation."""
    text = format(fmean(values), form)
    if len(values) > 1:
        # A deviation has no sign.
        text += f" ± {stdev(values):{form.removeprefix('+')}}"
    return text


def difference_text(values: Sequence[float], form: str) -> str:
    """Format the mean of differences; it is bold if the differences of several seeds have the same sign."""
    if not values:
        return "-"
    text = mean_text(values, f"+{form}")
    # Compare the values as they are printed: sums in another order differ by rounding.
    printed_values = [float(format(value, form.replace(",", ""))) for value in values]
    is_increase = all(value > 0 for value in printed_values)
    is_decrease = all(value < 0 for value in printed_values)
    if (is_increase or is_decrease) and len(values) > 1:
        return f"**{text}**"
    return text


def table(results: Results, columns: Sequence[Column]) -> str:
    """Return a Markdown table: a row for each variant, and below it the difference from the previous row."""
    lines = [
        f"| | {' | '.join(column.title for column in columns)} |",
        f"|---{'|---:' * len(columns)}|",
    ]
    previous: str | None = None
    for variant in VARIANTS:
        if variant.name not in results:
            continue
        runs = results[variant.name].values()
        cells = [mean_text([run[column.key] for run in runs], column.form) for column in columns]
        lines.append(f"| {variant.title} | {' | '.join(cells)} |")

        if previous is not None:
            cells = [
                difference_text(differences(results, variant.name, previous, column.key), column.form)
                for column in columns
            ]
            lines.append(f"| … against the row before | {' | '.join(cells)} |")
        previous = variant.name
    return "\n".join(lines)


# Picture

INK = "#1f2937"
PALE = "#4b5563"
GRID = "#e5e7eb"
BLUE = "#2563a8"
WIDTH = 720
LABEL_WIDTH = 164
"""Width of the column with the variants' titles."""
ROW_HEIGHT = 24
BAND_HEIGHT = 46 + ROW_HEIGHT * len(VARIANTS)


def picture(results: Results) -> str:
    """Return an SVG picture: a panel for each column, with each variant's mean and a dot for each seed."""
    height = len(TABLES) * BAND_HEIGHT + 20
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<title>What packing, filters, adaptive lengths and profiles change</title>",
        f"<desc>{escape(MEANING)}</desc>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
    ]
    for band, columns in enumerate(TABLES):
        top = 10 + band * BAND_HEIGHT
        elements += [
            _text(12, _row_y(top, index) + 4, variant.title, INK)
            for index, variant in enumerate(VARIANTS)
            if variant.name in results
        ]
        width = (WIDTH - LABEL_WIDTH - 12) / len(columns)
        for index, column in enumerate(columns):
            elements += _panel(results, column, LABEL_WIDTH + index * width, width - 18, top)
    return "\n".join([*elements, "</svg>\n"])


def _panel(results: Results, column: Column, x_min: float, width: float, top: float) -> list[str]:
    """Return the SVG elements of one panel; its axis runs from the smallest to the largest number."""
    numbers: list[float] = []
    for runs in results.values():
        numbers += [run[column.key] for run in runs.values()]
    lowest = min(numbers)
    span = max(numbers) - lowest

    def x(value: float) -> float:
        # If all runs have the same number, it is in the middle.
        share = 0.5
        if span:
            share = (value - lowest) / span
        return x_min + 6 + (width - 12) * share

    # The axis, with the smallest and the largest number below it.
    bottom = _row_y(top, len(VARIANTS)) - 10
    elements = [
        _text(x_min, top + 12, column.title, INK),
        f'<line x1="{x_min:g}" y1="{bottom:g}" x2="{x_min + width:g}" y2="{bottom:g}" stroke="{GRID}"/>',
        _text(x_min, bottom + 14, format(lowest, column.form), PALE, size=10),
        _text(x_min + width, bottom + 14, format(max(numbers), column.form), PALE, "end", size=10),
    ]
    for index, variant in enumerate(VARIANTS):
        if variant.name not in results:
            continue

        # A row has a line, a dot for each seed and a stroke for their mean.
        y = _row_y(top, index)
        values = [run[column.key] for run in results[variant.name].values()]
        mean = x(fmean(values))
        elements.append(
            f'<line x1="{x_min:g}" y1="{y:g}" x2="{x_min + width:g}" y2="{y:g}" stroke="{GRID}"/>'
        )
        elements += [
            f'<circle cx="{x(value):.1f}" cy="{y:g}" r="4" fill="{BLUE}" fill-opacity="0.4"/>'
            for value in values
        ]
        elements.append(
            f'<line x1="{mean:.1f}" y1="{y - 8:g}" x2="{mean:.1f}" y2="{y + 8:g}" stroke="{INK}" '
            'stroke-width="2"/>'
        )
    return elements


def _row_y(top: float, index: int) -> float:
    """Return the vertical position of a variant's row."""
    return top + 32 + index * ROW_HEIGHT


def _text(x: float, y: float, text: str, color: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


# Files


def report(campaign: Campaign, results: Results) -> dict[str, Any]:
    """Return every number of the finished runs, with their settings, commands and revisions."""
    columns = [asdict(column) for column in itertools.chain(*TABLES)]
    content: dict[str, Any] = {"columns": columns, "variants": []}
    previous: str | None = None
    for variant in VARIANTS:
        if variant.name not in results:
            continue
        runs = []
        for seed, numbers in results[variant.name].items():
            record = campaign.record(campaign.run_folder(variant.name, seed))
            runs.append({"seed": seed, "numbers": numbers, **json.loads(record.read_text(encoding="utf-8"))})

        entry = {"name": variant.name, "title": variant.title, "overrides": overrides_of(variant.name)}
        entry["runs"] = runs
        if previous is not None:
            keys = runs[0]["numbers"]
            entry["difference_from"] = previous
            entry["differences"] = {key: differences(results, variant.name, previous, key) for key in keys}
        content["variants"].append(entry)
        previous = variant.name
    return content


def results_of(content: Mapping[str, Any]) -> dict[str, dict[int, dict[str, float]]]:
    """Return the numbers of the runs in a `report`."""
    results: dict[str, dict[int, dict[str, float]]] = {}
    for variant in content["variants"]:
        results[variant["name"]] = {run["seed"]: run["numbers"] for run in variant["runs"]}
    return results


def markdown(results: Results) -> str:
    """Return all tables and their meaning."""
    tables = [table(results, columns) for columns in TABLES]
    return "\n\n".join([*tables, MEANING]) + "\n"


def write(campaign: Campaign, results: Results) -> None:
    """Write tables, picture, numbers and comparison into the folder."""
    texts = {
        "ablation.md": markdown(results),
        "ablation.svg": picture(results),
        "ablation.json": json.dumps(report(campaign, results), indent=1) + "\n",
    }
    for name, text in texts.items():
        (campaign.folder / name).write_text(text, encoding="utf-8")

    folders: list[Path] = []
    for name, runs in results.items():
        folders += [campaign.run_folder(name, seed) for seed in runs]
    compare.write_comparison(folders, campaign.folder)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--quick", action="store_true", help="one seed and three steps: a first impression")
    parser.add_argument("--seeds", help="such as 1-3 or 1,5 (default 1-3; 1 with --quick)")
    parser.add_argument("--only", default=",".join(names), help="comma-separated variants to run")
    parser.add_argument("--ranks", type=int, help="processes of a run (default: the configuration's)")
    parser.add_argument("--folder", type=Path, help="default runs/ablation, or runs/ablation-quick")
    parser.add_argument("--record", action="store_true", help="copy tables, numbers and picture to docs/")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides of every run")
    options = parser.parse_intermixed_args(arguments)

    options.only = options.only.split(",")
    unknown_names = [name for name in options.only if name not in names]
    if unknown_names:
        parser.error(f"--only: expected some of {', '.join(names)}; got {', '.join(unknown_names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the variants without a finished run, and write the tables of all finished runs."""
    options = parse(arguments)
    default_folder = "runs/ablation"
    default_seeds = "1-3"
    overrides = list(options.overrides)
    if options.quick:
        default_folder = "runs/ablation-quick"
        default_seeds = "1"
        overrides = [*QUICK, *overrides]

    # Make paths relative to the repository, so that the recorded commands are valid in any checkout.
    folder = (options.folder or ROOT / default_folder).resolve()
    if folder.is_relative_to(ROOT):
        folder = folder.relative_to(ROOT)
    os.chdir(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = options.ranks or yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["world_size"]
    campaign = Campaign(folder, ranks, tuple(overrides))
    seeds = seeds_of(options.seeds or default_seeds)

    # Handle SIGTERM like Ctrl-C: the current run ends with a checkpoint, from which the next call resumes it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warn_if_busy("ablation")
    failures = []
    try:
        campaign.warm_up()
        # The seed is the outer loop: a load that drifts then disturbs all variants equally.
        for seed in seeds:
            for name in options.only:
                try:
                    campaign.train(name, seed)
                except ChildFailed as error:
                    failures.append(f"{name}, seed {seed}: {error}")
    except ChildFailed as error:
        failures.append(f"warm-up: {error}")

    # Write the tables even if runs are missing: they help to decide whether to continue.
    results = measure_finished_runs(campaign, seeds)
    if results:
        write(campaign, results)
        print(markdown(results))
        print_progress("ablation", f"wrote {', '.join(RECORDED)} and compare.html to {folder}")
        if options.record:
            for name, recorded in RECORDED.items():
                shutil.copyfile(folder / name, recorded)
    # Print failures last, where a reader of the console sees them.
    for failure in failures:
        print_progress("ablation", f"NOT MEASURED: {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
