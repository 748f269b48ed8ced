"""Record the console output and the reward curve of each tutorial.

    python benchmarks/tutorials.py NAME …      pages of docs/tutorials, such as reward; without a name, all

The script runs the commands of `RECORDINGS` in order. It writes docs/recorded/NAME.txt, which the page
includes, and docs/images/NAME_curve.svg for a page with a curve. tests/unit/test_recorded.py compares pages,
commands and recordings, and compares the recorded lines with the current output of the package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megatron_rl.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent

MAX_SIMILAR_LINES = 6
"""Maximum number of consecutive lines of one kind, such as steps, that are recorded completely."""
FIRST_LINES = 3
"""Number of lines that remain at the beginning of a longer sequence."""
LAST_LINES = 2
"""Number of lines that remain at the end of a longer sequence."""
LEFT_OUT = "…"
"""Line in place of the omitted lines."""

ACCURACY = "eval/held_out/accuracy"
REWARD = "reward/mean"


@dataclass(frozen=True)
class Recording:
    """Commands of a tutorial whose output is recorded.

    Example: ``Recording(("launch/examples/own_reward/run.sh",), "runs/examples/own_reward")``.
    """

    commands: tuple[str, ...]
    """Commands as on the page, in the order in which they run."""
    run_dir: str
    """Run folder, which is removed before the first command."""
    curve: bool = False
    """Whether the page shows the run's curve."""


_TRAINED = "model.path=runs/quickstart/hf sft=null"
"""Overrides that use the quickstart's model in place of a warm-up, so that the run takes only seconds."""
_RESUMED = f"NPROC=2 launch/local.sh launch/examples/dataflow/run.yaml {_TRAINED} run_dir=runs/resumed"
RECORDINGS = {
    "first_run": Recording(("launch/examples/first_run/run.sh",), "runs/examples/first_run", curve=True),
    "first_hour": Recording(
        (
            "megatron-rl doctor",
            "megatron-rl check configs/quickstart.yaml",
            f"NPROC=4 launch/local.sh configs/quickstart.yaml {_TRAINED} steps=2 run_dir=runs/two_steps",
        ),
        "runs/two_steps",
    ),
    "reward": Recording(("launch/examples/own_reward/run.sh",), "runs/examples/own_reward"),
    "loss": Recording(("launch/examples/own_loss/run.sh",), "runs/examples/own_loss"),
    "dataflow": Recording(("launch/examples/dataflow/run.sh grpo steps=12",), "runs/examples/dataflow"),
    "distillation": Recording(
        (
            "python -m megatron_rl.data.quickstart runs/small-student --size tiny",
            "NPROC=4 launch/local.sh configs/recipes/distillation.yaml",
        ),
        "runs/recipes/distillation",
    ),
    "data": Recording(("launch/examples/own_data/run.sh",), "runs/examples/own_data"),
    "environment": Recording(("launch/examples/tools/run.sh",), "runs/examples/tools"),
    "ppo": Recording(("launch/examples/ppo_reward_model/run.sh",), "runs/examples/ppo_reward_model"),
    "nodes": Recording(("launch/examples/several_nodes/run.sh",), "runs/examples/several_nodes"),
    "megatron": Recording(("launch/examples/megatron_lm/run.sh",), "runs/examples/megatron_lm"),
    "long_runs": Recording(
        (
            f"{_RESUMED} checkpoint.every=5 steps=10",
            f"{_RESUMED} checkpoint.every=5 steps=20 actor.layout.tensor=1 actor.layout.pipeline=2",
        ),
        "runs/resumed",
    ),
}
"""Name of a page of docs/tutorials -> its recording."""


def record(name: str) -> None:
    """Run the commands of one tutorial, and write their output and the curve."""
    recording = RECORDINGS[name]
    shutil.rmtree(ROOT / recording.run_dir, ignore_errors=True)
    outputs = [record_command(command) for command in recording.commands]

    folder = ROOT / "docs/recorded"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(outputs), encoding="utf-8")

    if recording.curve:
        records = read_metrics(ROOT / recording.run_dir / "metrics.jsonl")
        picture = ROOT / f"docs/images/{name}_curve.svg"
        picture.write_text(draw_curve(name, records), encoding="utf-8")


def record_command(command: str) -> str:
    """Run a command; return the command and its output, shortened and without paths of this machine."""
    # Set PATH as `source .venv/bin/activate` does, which the pages require.
    environment = {**os.environ, "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{command} exits with {result.returncode}:\n{result.stdout}")

    text = result.stdout.replace(f"{ROOT}/", "").replace(str(ROOT), "~/megatron_rl")
    # Remove the lines of the installation in a first run, which another page describes.
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("setup:")]
    return "\n".join([f"$ {command}", *shorten(lines)]) + "\n"


def shorten(lines: Sequence[str]) -> list[str]:
    """Omit the middle of long sequences of lines that begin with the same word, such as a run's steps."""
    labels: list[str] = []
    for line in lines:
        label = line.partition(" ")[0]
        # An indented line continues the line above.
        if line.startswith("    ") and labels:
            label = labels[-1]
        labels.append(label)

    shortened: list[str] = []
    labelled_lines = list(zip(labels, lines, strict=True))
    for label, group in groupby(labelled_lines, key=lambda pair: pair[0]):
        similar_lines = [line for _, line in group]
        # Do not shorten tables, whose rows begin with │.
        if len(similar_lines) > MAX_SIMILAR_LINES and label not in ("│", ""):
            similar_lines = [*similar_lines[:FIRST_LINES], LEFT_OUT, *similar_lines[-LAST_LINES:]]
        shortened += similar_lines
    return shortened


def draw_curve(name: str, records: Sequence[dict[str, float]]) -> str:
    """Return an SVG of the mean reward of each step, and of the held-out accuracy of each evaluation."""
    last_step = max(record["step"] for record in records)

    def points(metric: str) -> list[tuple[float, float]]:
        """Return the points of a metric in the coordinates of the picture."""
        return [
            (60 + 630 * record["step"] / last_step, 220 - 190 * record[metric])
            for record in records
            if metric in record
        ]

    # The plot is 630 x 190 units at (60, 30); rewards and accuracies are between 0 and 1.
    elements = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 270" width="720" height="270" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>Reward and held-out accuracy of {name}</title>",
        '<rect width="720" height="270" rx="6" fill="#ffffff"/>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = 220 - 190 * tick
        elements.append(f'<line x1="60" y1="{y:g}" x2="690" y2="{y:g}" stroke="#e5e7eb"/>')
        elements.append(f'<text x="52" y="{y + 4:g}" fill="#4b5563" text-anchor="end">{tick:g}</text>')
    for step in sorted({0, last_step // 2, last_step}):
        x = 60 + 630 * step / last_step
        elements.append(f'<text x="{x:g}" y="238" fill="#4b5563" text-anchor="middle">{step:g}</text>')

    for metric, color, x in ((REWARD, "#64748b", 60), (ACCURACY, "#2563a8", 330)):
        curve_points = points(metric)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve_points)
        elements.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        # Evaluations are rare, so each accuracy gets a dot.
        if metric == ACCURACY:
            elements += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in curve_points]
        elements.append(f'<rect x="{x}" y="250" width="12" height="12" fill="{color}"/>')
        elements.append(f'<text x="{x + 18}" y="260" fill="#1f2937">{metric}</text>')
    elements.append('<text x="690" y="260" fill="#4b5563" text-anchor="end">step</text>')
    return "\n".join([*elements, "</svg>\n"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record the consoles and curves of tutorials.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"pages of docs/tutorials: {', '.join(RECORDINGS)}"
    )
    names = parser.parse_args().names
    unknown = sorted({*names} - {*RECORDINGS})
    if unknown:
        parser.error(f"no recording of {', '.join(unknown)}")
    for tutorial in names or RECORDINGS:
        record(tutorial)
