"""Run examples and record what a reader of their tutorials sees: the console, and the held-out curve.

    python benchmarks/tutorials.py NAME …                  examples of launch/examples, such as first_run
    python benchmarks/tutorials.py NAME --console FILE     one that has run, from the console that was stored

Writes the console to docs/recorded/NAME.txt and the curve to docs/images/NAME_curve.svg. Tests compare the
tutorials with both.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
KEPT = re.compile(
    r"^(?:READY|run  |memory  |weight sync  |data\.|evaluation\.|supervised warm-up |train |    eval/|[│┃┏┡└]"
    r"|learning curves|report:)"
)
"""Lines of the console that belong to the run: check, data, stages, steps, evaluations, tables, files."""
ACCURACY = "eval/held_out/accuracy"
REWARD = "reward/mean"


def run(name: str) -> str:
    """Run one example to its end and return its console."""
    command = [str(ROOT / "launch/examples" / name / "run.sh")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def record(name: str, console: str) -> None:
    """Write the console of a finished run of one example, and its curve."""
    text = console.replace(f"{ROOT}/", "")
    lines = [line.rstrip() for line in text.splitlines() if KEPT.match(line)]

    folder = ROOT / "docs/recorded"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    records = read_metrics(ROOT / "runs/examples" / name / "metrics.jsonl")
    picture = ROOT / f"docs/images/{name}_curve.svg"
    picture.write_text(curve(name, records), encoding="utf-8")


def curve(name: str, records: Sequence[dict[str, float]]) -> str:
    """Return an SVG of the mean reward of each step, and of the held-out accuracy where it was measured."""
    last = max(record["step"] for record in records)

    def points(metric: str) -> list[tuple[float, float]]:
        """Return a metric's points in the picture's units."""
        return [
            (60 + 630 * record["step"] / last, 220 - 190 * record[metric])
            for record in records
            if metric in record
        ]

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 270" width="720" height="270" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>Reward and held-out accuracy of {name}</title>",
        '<rect width="720" height="270" rx="6" fill="#ffffff"/>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = 220 - 190 * tick
        parts.append(f'<line x1="60" y1="{y:g}" x2="690" y2="{y:g}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="52" y="{y + 4:g}" fill="#4b5563" text-anchor="end">{tick:g}</text>')
    for step in sorted({0, last // 2, last}):
        x = 60 + 630 * step / last
        parts.append(f'<text x="{x:g}" y="238" fill="#4b5563" text-anchor="middle">{step:g}</text>')

    for metric, color, x in ((REWARD, "#64748b", 60), (ACCURACY, "#2563a8", 330)):
        drawn = points(metric)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        if metric == ACCURACY:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in drawn]
        parts.append(f'<rect x="{x}" y="250" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="260" fill="#1f2937">{metric}</text>')
    parts.append('<text x="690" y="260" fill="#4b5563" text-anchor="end">step</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record the consoles and curves of examples.")
    parser.add_argument("names", nargs="+", help="folders of launch/examples")
    parser.add_argument("--console", type=Path, help="stored console of the one example that has run")
    options = parser.parse_args()
    for example in options.names:
        if options.console:
            console = options.console.read_text(encoding="utf-8")
        else:
            console = run(example)
        record(example, console)
