"""Curves of a run's metrics: a picture of the main ones, and one for each metric on a page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_rl.metrics import number_text
from megatron_rl.trainer.logging import accuracies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]
"""What a metrics file holds, a mapping of names to numbers per step."""
BLUE, ORANGE, GREY, GRID = "#2563a8", "#d9722b", "#6b7280", "#e5e7eb"
COLOURS = (BLUE, ORANGE, "#3a9a5b", "#8a5bb5", "#c2a22d", "#5aa7b8", "#b5485d", GREY)
WINDOW = 10
"""Steps that a running mean, and the first and last values of tables, are taken over."""


@dataclass(frozen=True)
class Measured:
    """Hold the metrics of a run, and of its stages by name."""

    lines: Lines
    stages: Mapping[str, Lines]


@dataclass(frozen=True)
class Panel:
    """Describe one picture: the metric on its vertical axis and how it is drawn; ``main`` ones come first."""

    metric: str
    title: str
    smooth: bool = True
    logarithmic: bool = False
    limits: tuple[float, float] | None = None
    main: bool = False


PANELS = (
    Panel("reward/mean", "mean reward of the samples", main=True),
    Panel("response/length", "response length (tokens)", main=True),
    Panel("policy/entropy", "policy entropy (nats per token)", main=True),
    Panel("mismatch/abs_diff", "trainer–rollout difference of log-probs", logarithmic=True, main=True),
    Panel("kl/ref", "KL to the reference (nats per token)"),
    Panel("policy/kl", "KL to the policy that sampled"),
    Panel("policy/loss", "policy loss"),
    Panel("critic/loss", "critic loss"),
    Panel("policy/grad_norm", "gradient norm"),
    Panel("policy/clip_fraction", "clipped tokens (share)"),
    Panel("response/truncated_fraction", "truncated responses (share)"),
    Panel("staleness/mean", "staleness (updates)"),
    Panel("reward/invalid", "invalid rewards (share)"),
    Panel("throughput/tokens_per_second", "tokens per second"),
    Panel("time/step", "seconds of a step"),
)
STAGE_METRICS = (("loss", "loss"), ("held_out_loss", "held-out loss"), ("accuracy", "accuracy on pairs"))
"""What is reported of a stage, below the group of its name: metric, words."""


def series(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric has a value, and the values."""
    pairs = [(int(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def measured_accuracies(lines: Lines) -> list[str]:
    """Return the accuracies of evaluation sets that any line has."""
    return accuracies(dict.fromkeys(name for line in lines for name in line))


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return for each value the mean over up to ``window`` values around it, fewer towards the ends."""
    half = window // 2
    return [fmean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the line that is drawn through values: a running mean that leaves a short run its shape."""
    return running_mean(values, min(WINDOW, len(values) // 4))


def panels_of(lines: Lines) -> list[Panel]:
    """Return the panels of what was measured, those of evaluation sets first."""
    names = measured_accuracies(lines)
    evaluated = [Panel(name, name, smooth=False, limits=(0.0, 1.0), main=True) for name in names]
    return [panel for panel in (*evaluated, *PANELS) if series(lines, panel.metric)[1]]


def stage_panels(stages: Mapping[str, Lines]) -> list[tuple[Lines, Panel]]:
    """Return the panels of stages, each with the lines that it draws."""
    panels = [
        (measured, Panel(f"{name}/{metric}", f"{name}: {words}", not metric.startswith("held_out")))
        for name, measured in stages.items()
        for metric, words in STAGE_METRICS
    ]
    return [(measured, panel) for measured, panel in panels if series(measured, panel.metric)[1]]


def draw(lines: Lines, stages: Mapping[str, Lines]) -> Figure:
    """Return a figure with the main panels of what was measured, those of stages, and the steps' time."""
    panels = [(lines, panel) for panel in panels_of(lines) if panel.main] + stage_panels(stages)
    timed = bool(_stacked(lines)[1])
    axes = _axes(len(panels) + timed)
    for axis, (source, panel) in zip(axes, panels, strict=False):
        _draw_panel(axis, source, panel)
    if timed:
        _draw_times(axes[-1], lines)
    return _finished(axes)


def pictures(lines: Lines, stages: Mapping[str, Lines]) -> list[tuple[str, bytes]]:
    """Return a title and an SVG for each metric that was measured, and for the time of the steps."""
    shown = []
    for source, panel in [(lines, panel) for panel in panels_of(lines)] + stage_panels(stages):
        axes = _axes(1)
        _draw_panel(axes[0], source, panel)
        shown.append((panel.title, _svg(_finished(axes))))
    if _stacked(lines)[1]:
        axes = _axes(1)
        _draw_times(axes[0], lines)
        shown.append(("time of a step (s)", _svg(_finished(axes))))
    return shown


def overlaid(groups: Mapping[str, Sequence[Measured]]) -> list[tuple[str, bytes]]:
    """Return a title and an SVG for each metric that runs have, their curves laid over each other.

    Runs of one group differ in their seeds: each has a thin line, and where there are several their mean a
    thick one.
    """
    panels: dict[str, Panel] = {}
    for run in (run for runs in groups.values() for run in runs):
        panels |= {panel.metric: panel for panel in panels_of(run.lines)}
        panels |= {panel.metric: panel for _, panel in stage_panels(run.stages)}
    return [(panel.title, _svg(_overlay(panel, groups))) for panel in panels.values()]


def _overlay(panel: Panel, groups: Mapping[str, Sequence[Measured]]) -> Figure:
    axes = _axes(1)
    axis = axes[0]
    for place, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[place % len(COLOURS)]
        values: dict[int, list[float]] = {}
        for run in runs:
            stage = run.stages.get(panel.metric.partition("/")[0], ())
            steps, numbers = series([*run.lines, *stage], panel.metric)
            smooth = smoothed(numbers) if panel.smooth else numbers
            for step, value in zip(steps, smooth, strict=True):
                values.setdefault(step, []).append(value)
            if len(runs) > 1:
                axis.plot(steps, smooth, color=colour, alpha=0.3, linewidth=0.9)
        steps = sorted(values)
        if steps:
            means = [fmean(values[step]) for step in steps]
            # The space: a label that begins with an underscore would not be shown.
            axis.plot(steps, means, color=colour, linewidth=1.8, label=f" {_shortened(name)}")
    if panel.limits is not None:
        axis.set_ylim(panel.limits[0], panel.limits[1] * 1.08)
    _set_title(axis, panel.title)
    for text in axis.legend(fontsize=7.5, frameon=False, loc="best").get_texts():
        text.set_parse_math(False)
    return _finished(axes)


def _set_title(axis: Axes, title: str) -> None:
    """Set the title of a picture; a ``$`` in the name of a user's set begins no formula."""
    axis.set_title(_shortened(title, 60), fontsize=10, loc="left").set_parse_math(False)


def _shortened(name: str, longest: int = 32) -> str:
    """Return a name as it can be drawn: of so many characters at most, without halves of surrogate pairs."""
    name = name.encode("utf-8", "replace").decode("utf-8")
    return name if len(name) <= longest else f"{name[: longest - 12]}…{name[-11:]}"


def _axes(count: int) -> list[Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, max(1, count))
    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(4.6 * columns, 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return [figure.add_subplot(rows, columns, place + 1) for place in range(count)] or [figure.add_subplot()]


def _finished(axes: Sequence[Axes]) -> Figure:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GREY)
        axis.tick_params(colors=GREY, labelsize=8)
        axis.grid(True, color=GRID, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_xlabel("step", fontsize=8, color=GREY)
    figure = axes[0].get_figure()
    assert figure is not None
    return figure  # pyright: ignore[reportReturnType]


def _svg(figure: Figure) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()


def _draw_panel(axis: Axes, lines: Lines, panel: Panel) -> None:
    steps, values = series(lines, panel.metric)
    _set_title(axis, panel.title)
    if panel.smooth:
        axis.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1)
        axis.plot(steps, smoothed(values), color=BLUE, linewidth=1.8)
    else:
        axis.plot(steps, values, color=BLUE, linewidth=1.8, marker="o", markersize=3.5)
        axis.axhline(values[0], color=GREY, linewidth=0.9, linestyle="--")
        for place, offset, align in ((0, (4, -11), "left"), (-1, (0, 7), "right")):
            axis.annotate(
                number_text(values[place], ".3f"),
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
        # matplotlib cannot place the ticks of numbers that are nearly zero.
        if min(values) > 1e-100 and max(values) >= 10 * min(values):
            axis.set_yscale("log")
        else:
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            axis.yaxis.get_offset_text().set(size=8, color=GREY)
            axis.set_ylim(bottom=0)


def _stacked(lines: Lines) -> tuple[list[str], dict[str, list[float]]]:
    """Return the phases that follow one another in a step, in order, with their seconds per step."""
    order = ("time/generate", "time/reward", "time/score", "time/estimate", "time/learn")
    series = {name: [float(line.get(name) or 0.0) for line in lines if line["step"] > 0] for name in order}
    return [name for name in order if any(series[name])], {n: v for n, v in series.items() if any(v)}


def _draw_times(axis: Axes, lines: Lines) -> None:
    names, seconds = _stacked(lines)
    steps = [int(line["step"]) for line in lines if line["step"] > 0]
    smooth = [smoothed(seconds[name]) for name in names]
    axis.stackplot(
        steps,
        smooth,
        labels=[name.removeprefix("time/") for name in names],
        colors=COLOURS[: len(names)],
        alpha=0.85,
    )
    _set_title(axis, "time of a step (s)")
    axis.set_ylim(0, 1.35 * max(sum(values) for values in zip(*smooth, strict=True)))
    axis.legend(fontsize=7.5, frameon=False, ncols=2, loc="upper right")
