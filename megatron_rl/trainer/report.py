"""The end of a run for people: a table, a picture of the learning curves and a page that holds both."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO

from megatron_rl.config.run_folder import RunFolder
from megatron_rl.errors import UserError
from megatron_rl.metrics import read_metrics
from megatron_rl.trainer.logging import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, GRID = "#2563a8", "#d9722b", "#6b7280", "#e5e7eb"
PHASE_COLOURS = ("#2563a8", "#d9722b", "#3a9a5b", "#8a5bb5", "#c2a22d", "#5aa7b8", "#b5485d", "#6b7280")
WINDOW = 10
"""Steps that a running mean, and the first and last values of the table, are taken over."""


@dataclass(frozen=True)
class Panel:
    """Describe one picture: the metric on its vertical axis and how it is drawn."""

    metric: str
    title: str
    smooth: bool = True
    logarithmic: bool = False
    limits: tuple[float, float] | None = None


PANELS = (
    Panel("eval/accuracy", "held-out accuracy", smooth=False, limits=(0.0, 1.0)),
    Panel("reward/mean", "mean reward of the samples"),
    Panel("response/length", "response length (tokens)"),
    Panel("policy/entropy", "policy entropy (nats per token)"),
    Panel("mismatch/abs_diff", "trainer–rollout difference of log-probs", logarithmic=True),
)
STAGE_METRICS = (("loss", "loss"), ("held_out_loss", "held-out loss"), ("accuracy", "accuracy on pairs"))
"""What is reported of a stage, below the group of its name: metric, words."""


def write(run_dir: str | Path, console: TextIO | None = None) -> Path:
    """Write ``learning_curve.png`` and ``report.html`` of a run, print its final table, return the page.

    It reads metrics.jsonl, the metrics of stages, config.yaml and the samples of the last step, as far as
    they exist. A folder without metrics raises a UserError.
    """
    folder = RunFolder(run_dir)
    lines = read_metrics(folder.metrics)
    stages = {name: read_metrics(folder.stage_metrics(name)) for name in folder.stages_measured()}
    stages = {name: measured for name, measured in stages.items() if measured}
    if not lines and not stages:
        raise UserError(
            f"{folder.path} holds no metrics",
            where=str(folder.metrics),
            expected="the folder of a run that has finished at least one step",
            got="no such file, and none of a stage" if not folder.metrics.exists() else "an empty file",
            fix="name the run folder, such as runs/quickstart",
        )
    rows = summary(lines, stages)
    phases = phase_times(lines or [line for measured in stages.values() for line in measured])
    picture = io.BytesIO()
    draw(lines, stages).savefig(picture, format="png", dpi=130)
    folder.curve.write_bytes(picture.getvalue())
    folder.report.write_text(_page(folder, rows, phases, picture.getvalue()), encoding="utf-8")
    _print(folder, rows, phases, console)
    return folder.report


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric has a value, and the values."""
    pairs = [(int(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return for each value the mean over up to ``window`` values around it, fewer towards the ends."""
    half = window // 2
    return [fmean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def summary(
    lines: Sequence[Mapping[str, Any]], stages: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[tuple[str, str, str]]:
    """Return the rows of the final table: name, value, remark. What was not measured has no row."""
    rows: list[tuple[str, str, str]] = []
    steps, accuracy = series(lines, "eval/accuracy")
    if accuracy:
        best = max(range(len(accuracy)), key=accuracy.__getitem__)
        change = f"{accuracy[-1] - accuracy[0]:+.3f}; best {accuracy[best]:.3f} at step {steps[best]}"
        rows.append(("held-out accuracy", f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}", change))
    for name, label, form in (
        ("reward/mean", "mean reward", ".3f"),
        ("response/length", "response length", ".1f"),
        ("policy/entropy", "policy entropy", ".3f"),
    ):
        _, values = series(lines, name)
        if values:
            first, last = fmean(values[:WINDOW]), fmean(values[-WINDOW:])
            remark = f"means of the first and last {min(WINDOW, len(values))} steps"
            rows.append((label, f"{first:{form}} → {last:{form}}", remark))
    trained, _ = series([line for line in lines if line["step"] > 0], "step")
    if lines:
        rows.append(("steps", str(len(trained)), ""))
    for name, measured in stages.items():
        curves = [(words, series(measured, f"{name}/{metric}")[1]) for metric, words in STAGE_METRICS]
        steps, _ = series(measured, f"{name}/loss")
        changes = [f"{words} {curve[0]:.3f} → {curve[-1]:.3f}" for words, curve in curves if curve]
        rows.append((name, f"{len(steps)} steps", "; ".join(changes)))
    _, speed = series(lines, "throughput/tokens_per_second")
    if speed:
        rows.append(("tokens per second", f"{fmean(speed):,.0f}", f"best step {max(speed):,.0f}"))
    _, mismatch = series(lines, "mismatch/abs_diff")
    if mismatch:
        rows.append(("log-prob mismatch", f"{fmean(mismatch):.1e}", f"largest step mean {max(mismatch):.1e}"))
    _, invalid = series(lines, "reward/invalid")
    if invalid:
        rows.append(("invalid rewards", f"{fmean(invalid):.2%}", f"worst step {max(invalid):.2%}"))
    return rows


def phase_times(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float, float | None]]:
    """Return per phase its name, total seconds, seconds per step and share of ``time/step``; largest first.

    Phases may lie inside one another (a reshard inside generate), so shares need not add up to one.
    """
    names = sorted({name for line in lines for name in line if name.startswith("time/")})
    totals = {name.removeprefix("time/"): series(lines, name)[1] for name in names}
    whole = sum(totals.pop("step", []))
    phases = [
        (name, sum(values), fmean(values), sum(values) / whole if whole else None)
        for name, values in totals.items()
        if values
    ]
    if whole:
        phases.append(("whole steps", whole, fmean(series(lines, "time/step")[1]), 1.0))
    return sorted(phases, key=lambda phase: -phase[1])


def draw(lines: Sequence[Mapping[str, Any]], stages: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Return a matplotlib figure with a panel for each metric that was measured, and the time of the steps.

    Stages have panels of their own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(lines, panel) for panel in PANELS]
    for name, measured in stages.items():
        for metric, words in STAGE_METRICS:
            smooth = not metric.startswith("held_out")
            panels.append((measured, Panel(f"{name}/{metric}", f"{name}: {words}", smooth)))
    panels = [(source, panel) for source, panel in panels if series(source, panel.metric)[1]]
    timed = bool(_stacked(lines)[1])
    count = len(panels) + timed
    columns = min(3, max(1, count))
    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(4.6 * columns, 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    for axis, (source, panel) in zip(axes, panels, strict=False):
        _draw_panel(axis, source, panel)
    if timed:
        _draw_times(axes[-1], lines)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GREY)
        axis.tick_params(colors=GREY, labelsize=8)
        axis.grid(True, color=GRID, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_xlabel("step", fontsize=8, color=GREY)
    return figure


def _draw_panel(axis: Axes, lines: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    steps, values = series(lines, panel.metric)
    axis.set_title(panel.title, fontsize=10, loc="left")
    if panel.smooth:
        axis.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1)
        axis.plot(steps, running_mean(values), color=BLUE, linewidth=1.8)
    else:
        axis.plot(steps, values, color=BLUE, linewidth=1.8, marker="o", markersize=3.5)
        axis.axhline(values[0], color=GREY, linewidth=0.9, linestyle="--")
        for place, offset, align in ((0, (4, -11), "left"), (-1, (0, 7), "right")):
            axis.annotate(
                f"{values[place]:.3f}",
                (steps[place], values[place]),
                xytext=offset,
                textcoords="offset points",
                ha=align,
                fontsize=9,
                color=BLUE if place else GREY,
            )
    if panel.limits is not None:
        axis.set_ylim(panel.limits[0], panel.limits[1] * 1.08)
    if panel.logarithmic:
        if min(values) > 0 and max(values) >= 10 * min(values):
            axis.set_yscale("log")
        else:
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            axis.yaxis.get_offset_text().set(size=8, color=GREY)
            axis.set_ylim(bottom=0)


def _stacked(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, list[float]]]:
    """Return the phases that follow one another in a step, in order, with their seconds per step."""
    order = ("time/generate", "time/score", "time/estimate", "time/learn")
    series = {name: [float(line.get(name) or 0.0) for line in lines if line["step"] > 0] for name in order}
    return [name for name in order if any(series[name])], {n: v for n, v in series.items() if any(v)}


def _draw_times(axis: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    names, seconds = _stacked(lines)
    steps = [int(line["step"]) for line in lines if line["step"] > 0]
    smooth = [running_mean(seconds[name]) for name in names]
    axis.stackplot(
        steps,
        smooth,
        labels=[name.removeprefix("time/") for name in names],
        colors=PHASE_COLOURS[: len(names)],
        alpha=0.85,
    )
    axis.set_title("time of a step (s)", fontsize=10, loc="left")
    axis.set_ylim(0, 1.35 * max(sum(values) for values in zip(*smooth, strict=True)))
    axis.legend(fontsize=7.5, frameon=False, ncols=2, loc="upper right")


def _print(
    folder: RunFolder,
    rows: Sequence[tuple[str, str, str]],
    phases: Sequence[tuple[str, float, float, float | None]],
    out: TextIO | None,
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out, highlight=False, soft_wrap=True)
    table = Table(title=f"{folder.path.name}: result", title_justify="left")
    for heading, justify in (("", "left"), ("value", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if phases:
        times = Table(title="time by phase", title_justify="left")
        times.add_column("phase")
        for heading in ("total", "per step", "share"):
            times.add_column(heading, justify="right")
        for row in _phase_rows(phases):
            times.add_row(*row)
        console.print(times)
    console.print(f"learning curves: {folder.curve}\nreport:          {folder.report}")


def _phase_rows(phases: Sequence[tuple[str, float, float, float | None]]) -> list[tuple[str, str, str, str]]:
    return [
        (name, clock(total), f"{mean:.3f} s", "" if share is None else f"{share:.0%}")
        for name, total, mean, share in phases
    ]


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 1180px;
margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .9rem .25rem 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #e5e7eb }
td.n { text-align: right; font-variant-numeric: tabular-nums }
th.n { text-align: right } .sample { font-family: ui-monospace, monospace; white-space: pre-wrap }
img { max-width: 100% } pre { background: #f6f7f9; padding: 1rem; overflow-x: auto; font-size: 13px }
"""


def _page(
    folder: RunFolder,
    rows: Sequence[tuple[str, str, str]],
    phases: Sequence[tuple[str, float, float, float | None]],
    picture: bytes,
) -> str:
    title = html.escape(folder.path.name)
    data = base64.b64encode(picture).decode()
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        _table(("", "value", ""), rows, numeric=(1,)),
        f"<h2>Learning curves</h2><img alt='learning curves' src='data:image/png;base64,{data}'>",
    ]
    if phases:
        parts += ["<h2>Time by phase</h2>"]
        parts += [_table(("phase", "total", "per step", "share"), _phase_rows(phases), numeric=(1, 2, 3))]
    samples = _samples(folder)
    if samples:
        parts += [f"<h2>Samples of step {samples[0]['step']}</h2>"]
        names = [name for name in ("prompt", "response", "ground_truth", "reward") if name in samples[0]]
        parts += [_table(names, [[str(row[name]) for name in names] for row in samples], monospace=True)]
    if folder.config.exists():
        parts += [f"<h2>Configuration</h2><pre>{html.escape(folder.config.read_text())}</pre>"]
    return "\n".join([*parts, "</body></html>\n"])


def _table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[int] = (),
    monospace: bool = False,
) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ["n" if place in numeric else "sample" if monospace else "" for place in range(len(values))]
        texts = [html.escape(value) for value in values]
        return "".join(f"<{tag} class='{k}'>{text}</{tag}>" for k, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', headings)}</tr>{body}</table>"


def _samples(folder: RunFolder, count: int = 12) -> list[dict[str, Any]]:
    """Return some rows of the newest stored rollouts, spread over the file."""
    files = [path for path in folder.rollouts.glob("step_*.parquet") if path.stem[5:].isdigit()]
    if not files:
        return []
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(max(files, key=lambda path: int(path.stem[5:]))).to_pylist()
    return rows[:: max(1, len(rows) // count)][:count]
