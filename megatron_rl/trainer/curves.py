"""Curves of a run's metrics: a picture of the main metrics, and the values for the charts of the report page.

The charts are drawn in the browser, which can show their values and zoom in; see `pages/charts.js`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_rl.metrics import number_text
from megatron_rl.trainer.logging import accuracy_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]
"""Lines of a metrics file; each line has a step's metrics by name, and the number of the step."""

BLUE = "#2563a8"
ORANGE = "#d9722b"
GREY = "#6b7280"
GRID = "#e5e7eb"
COLOURS = (
    BLUE,
    ORANGE,
    "#3a9a5b",
    "#8a5bb5",
    "#c2a22d",
    "#5aa7b8",
    "#b5485d",
    GREY,
)

WINDOW = 10
"""Number of steps in a running mean, and in the means of first and last values in tables."""
_MIN_LOGARITHMIC = 1e-100
"""Lower bound of values on a logarithmic axis: matplotlib cannot compute ticks for numbers close to zero."""
_HEADROOM = 1.08
"""Ratio of the top of a panel's axis to its upper limit, so that points at the limit are not cut off."""
_LEGEND_HEADROOM = 1.35
"""The same ratio for the plot of stacked times, so that its legend does not cover the curves."""
_PANEL_INCHES = (4.6, 3.3)
"""Width and height of a panel with its margins."""
_RIGHT_INCHES = 0.15
"""Right margin of a panel, for half of the last step's label."""
_TOP_INCHES = 0.45
"""Top margin of a panel, for its title."""
_BOTTOM_INCHES = 0.5
"""Bottom margin of a panel, for the labels of the horizontal axis."""
_LABEL_GAP_INCHES = 0.1
"""Space to the left of the labels of the vertical axes."""
_COLUMNS = 3
"""Maximum number of panels side by side, which fit on a page."""
_TITLE_CHARACTERS = 45
"""Maximum length of a title that fits above its panel."""

_NAME_END_CHARACTERS = 11
"""Number of characters at the end of a name that `_shorten_name` retains."""

STEP_PHASES = (
    "time/generate",
    "time/reward",
    "time/score",
    "time/estimate",
    "time/learn",
)
"""Phases that follow one another in a step, in order."""


@dataclass(frozen=True)
class RunMetrics:
    """Metrics files of one run: the steps of reinforcement learning, and each stage before them."""

    lines: Lines
    """Lines of the steps, empty for a run that has only stages."""
    stages: Mapping[str, Lines]
    """Name of a stage -> its lines."""


@dataclass(frozen=True)
class Panel:
    """Plot of one metric over the steps: title, axis and drawing style.

    Example: ``Panel("kl/ref", "KL to the reference (nats per token)")``.
    """

    metric: str
    """Metric of the vertical axis."""
    title: str
    """Title of the plot, with the unit."""
    smooth: bool = True
    """Whether a running mean is drawn over the values."""
    logarithmic: bool = False
    """Whether the vertical axis is logarithmic if the values allow it."""
    limits: tuple[float, float] | None = None
    """Range of the vertical axis, or None for the range of the values."""
    main: bool = False
    """Whether the figure of the main metrics has this panel."""


PANELS = (
    Panel("reward/mean", "mean reward of the samples", main=True),
    Panel("response/length", "response length (tokens)", main=True),
    Panel("policy/entropy", "policy entropy (nats per token)", main=True),
    Panel(
        "mismatch/abs_diff",
        "trainer–rollout difference of log-probs",
        logarithmic=True,
        main=True,
    ),
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
STAGE_METRICS = (
    ("loss", "loss"),
    ("held_out_loss", "held-out loss"),
    ("accuracy", "accuracy on pairs"),
)
"""Metrics of a stage, named ``STAGE/METRIC``, and their labels."""


def metric_series(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which the metric ``name`` has a value, and its values at these steps."""
    pairs = [(int(line["step"]), float(line[name])) for line in lines if line.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def measured_accuracy_names(lines: Lines) -> list[str]:
    """Return the names of the evaluation sets' accuracy metrics that occur in any line, each once."""
    # A dict drops repeated names and keeps the order.
    metric_names: dict[str, None] = {}
    for line in lines:
        metric_names |= dict.fromkeys(line)
    return accuracy_names(metric_names)


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return a running mean: for each value, the mean over it and ``window // 2`` values on each side."""
    half_window = window // 2
    return [
        fmean(values[max(0, index - half_window) : index + half_window + 1]) for index in range(len(values))
    ]


def smooth_curve(values: Sequence[float]) -> list[float]:
    """Return a running mean over `WINDOW` values, or over a quarter of the values if that is fewer."""
    return running_mean(values, min(WINDOW, len(values) // 4))


def select_panels(lines: Lines) -> list[Panel]:
    """Return a panel for each metric that occurs in the lines, the metrics of evaluation sets first."""
    accuracy_panels = [
        Panel(name, name, smooth=False, limits=(0.0, 1.0), main=True)
        for name in measured_accuracy_names(lines)
    ]
    return [panel for panel in (*accuracy_panels, *PANELS) if metric_series(lines, panel.metric)[1]]


def select_stage_panels(stages: Mapping[str, Lines]) -> list[tuple[Lines, Panel]]:
    """Return a panel for each metric that a stage of training before RL has logged, with the stage's lines.

    ``stages``: name of a stage, such as ``sft`` -> lines of its metrics file.
    """
    panels: list[tuple[Lines, Panel]] = []
    for name, lines in stages.items():
        for metric, label in STAGE_METRICS:
            # A held-out loss is evaluated only every few steps.
            smooth = not metric.startswith("held_out")
            panel = Panel(f"{name}/{metric}", f"{name}: {label}", smooth)
            if metric_series(lines, panel.metric)[1]:
                panels.append((lines, panel))
    return panels


def draw_figure(lines: Lines, stages: Mapping[str, Lines]) -> Figure:
    """Return a figure with panels of a run's main metrics, its stages, and the duration of its steps."""
    # A panel per main metric and stage metric; the last panel has the stacked times.
    panels = [(lines, panel) for panel in select_panels(lines) if panel.main]
    panels += select_stage_panels(stages)
    has_times = bool(_phase_seconds(lines))
    axes = _make_axes(len(panels) + has_times)
    for ax, (panel_lines, panel) in zip(axes, panels, strict=False):
        _draw_panel(ax, panel_lines, panel)
    if has_times:
        _draw_phase_times(axes[-1], lines)
    return _style_figure(axes)


Chart = dict[str, Any]
"""Values of one chart: ``title``, ``axis``, ``limits``, ``logarithmic``, ``stacked``, ``flat``, ``curves``.

A curve has ``label``, ``colour``, ``thin``, ``steps``, ``values`` and, if the chart is smooth, ``means``.
Charts of one ``axis`` have the same range of steps: those of the run, or of one stage.
"""

_FLAT_TOLERANCE = 1e-3
"""A curve is flat if its values differ by at most this fraction of the largest one."""
_SIGNIFICANT_DIGITS = 6
"""Number of significant digits in a chart's data: more than a picture can show."""


def make_charts(lines: Lines, stages: Mapping[str, Lines]) -> list[Chart]:
    """Return the data of a chart per metric of a run, and of a chart with the time of each phase."""
    panels = [(lines, panel) for panel in select_panels(lines)]
    panels += select_stage_panels(stages)
    charts: list[Chart] = []
    for panel_lines, panel in panels:
        steps, values = metric_series(panel_lines, panel.metric)
        curve = _make_curve(panel.metric, BLUE, steps, values, smooth=panel.smooth)
        charts.append(_make_chart(panel, [curve], _axis_name(panel, stages)))

    seconds_by_phase = _phase_seconds(lines)
    if seconds_by_phase:
        steps = [int(line["step"]) for line in lines if line["step"] > 0]
        # Smooth the curves, since a single slow step would hide the shares of the phases.
        curves = [
            _make_curve(name.removeprefix("time/"), COLOURS[index], steps, smooth_curve(seconds))
            for index, (name, seconds) in enumerate(seconds_by_phase.items())
        ]
        panel = Panel("time/step", "time of a step by phase (s)", smooth=False)
        charts.append(_make_chart(panel, curves, _axis_name(panel, stages), stacked=True))
    return charts


def make_overlay_charts(groups: Mapping[str, Sequence[RunMetrics]]) -> list[Chart]:
    """Return the data of a chart for each metric of several runs, with the curves of all runs.

    Runs of a group differ only in their seeds. Each run is drawn as a thin line, and the mean of each group
    as a thick line.
    """
    # A panel for each metric that any of the runs has.
    panels: dict[str, Panel] = {}
    for runs in groups.values():
        for run in runs:
            panels |= {panel.metric: panel for panel in select_panels(run.lines)}
            panels |= {panel.metric: panel for _, panel in select_stage_panels(run.stages)}
    return [_make_overlay_chart(panel, groups) for panel in panels.values()]


def _make_overlay_chart(panel: Panel, groups: Mapping[str, Sequence[RunMetrics]]) -> Chart:
    """Return the data of one metric's chart, with a curve for each run and for each group's mean.

    ``groups``: name of a group -> its runs.
    """
    stage_name = panel.metric.partition("/")[0]
    curves: list[dict[str, Any]] = []
    for index, (name, runs) in enumerate(groups.items()):
        colour = COLOURS[index % len(COLOURS)]
        # Runs can have different steps: average over the runs that have a value at the step.
        values_by_step: dict[int, list[float]] = {}
        for run in runs:
            steps, values = metric_series([*run.lines, *run.stages.get(stage_name, ())], panel.metric)
            if panel.smooth:
                values = smooth_curve(values)
            for step, value in zip(steps, values, strict=True):
                values_by_step.setdefault(step, []).append(value)
            if steps and len(runs) > 1:
                curves.append(_make_curve("", colour, steps, values, thin=True))

        steps = sorted(values_by_step)
        means = [fmean(values_by_step[step]) for step in steps]
        if steps:
            curves.append(_make_curve(name, colour, steps, means))

    stage_names: set[str] = set()
    for runs in groups.values():
        for run in runs:
            stage_names.update(run.stages)
    return _make_chart(panel, curves, _axis_name(panel, stage_names))


def _axis_name(panel: Panel, stages: Collection[str]) -> str:
    """Return the name of a chart's step axis: the name of a stage, or empty for the run's steps."""
    stage = panel.metric.partition("/")[0]
    if stage in stages:
        return stage
    return ""


def _make_chart(
    panel: Panel, curves: Sequence[dict[str, Any]], axis_name: str, *, stacked: bool = False
) -> Chart:
    """Return the data of one metric's chart: title, axis, limits and the given curves.

    ``axis_name``: name of the step axis, see `_axis_name`. ``stacked``: whether the curves are drawn on top
    of one another.
    """
    values: list[float] = []
    for curve in curves:
        values += curve["values"]
    max_magnitude = max(abs(value) for value in values)
    return {
        "title": panel.title,
        "axis": axis_name,
        "limits": panel.limits,
        "logarithmic": panel.logarithmic,
        "stacked": stacked,
        # A curve with a single value cannot rise or fall, so it does not count as flat.
        "flat": len(values) > len(curves) and max(values) - min(values) <= _FLAT_TOLERANCE * max_magnitude,
        "curves": curves,
    }


def _make_curve(
    label: str,
    colour: str,
    steps: Sequence[int],
    values: Sequence[float],
    *,
    thin: bool = False,
    smooth: bool = False,
) -> dict[str, Any]:
    """Return one curve of a chart; with ``smooth`` it also has a running mean of its values."""
    means = None
    if smooth:
        means = _round_values(smooth_curve(values))
    return {
        "label": label,
        "colour": colour,
        "thin": thin,
        "steps": steps,
        "values": _round_values(values),
        "means": means,
    }


def _round_values(values: Sequence[float]) -> list[float]:
    """Round numbers to `_SIGNIFICANT_DIGITS` significant digits, which keeps pages small."""
    return [float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in values]


def _set_title(ax: Axes, title: str) -> None:
    """Set the title of a panel without parsing formulas: the name of a user's data set may contain ``$``."""
    ax.set_title(_shorten_name(title, 60), fontsize=10, loc="left").set_parse_math(False)


def _shorten_name(name: str, max_characters: int = 32) -> str:
    """Shorten a name for a plot by replacing its middle with …; also replace lone surrogates."""
    name = name.encode("utf-8", "replace").decode("utf-8")
    if len(name) <= max_characters:
        return name

    # The ends of two names often differ where their beginnings do not.
    end = name[-_NAME_END_CHARACTERS:]
    beginning = name[: max_characters - len(end) - 1]
    return f"{beginning}…{end}"


def _make_axes(panel_count: int) -> list[Axes]:
    """Return the axes of a new figure with ``panel_count`` panels, at most `_COLUMNS` in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure needs at least one panel.
    panel_count = max(1, panel_count)
    columns = min(_COLUMNS, panel_count)
    rows = math.ceil(panel_count / columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows))
    FigureCanvasAgg(figure)
    return [figure.add_subplot(rows, columns, index + 1) for index in range(panel_count)]


def _style_figure(axes: Sequence[Axes]) -> Figure:
    """Set grid, labels and frame of the axes, and arrange them; return their figure."""
    from matplotlib.ticker import MaxNLocator

    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
        ax.tick_params(colors=GREY, labelsize=8)
        ax.grid(True, color=GRID, linewidth=0.7)
        ax.set_axisbelow(True)
        ax.set_xlabel("step", fontsize=8, color=GREY)

    figure = axes[0].get_figure()
    assert figure is not None
    _arrange_panels(figure, axes)  # pyright: ignore[reportArgumentType]
    return figure  # pyright: ignore[reportReturnType]


def _arrange_panels(figure: Figure, axes: Sequence[Axes]) -> None:
    """Position every panel in the figure, with margins for its texts.

    A figure with a long title is arranged by matplotlib's layout engine, which measures every text. All other
    figures are arranged here: without the layout engine, a figure is drawn once instead of twice, in a third
    of the time.
    """
    if any(len(ax.get_title(loc="left")) > _TITLE_CHARACTERS for ax in axes):
        figure.set_layout_engine("constrained")
        return

    width, height = _PANEL_INCHES
    columns = min(_COLUMNS, len(axes))
    rows = math.ceil(len(axes) / columns)
    figure_width = columns * width
    figure_height = rows * height

    def place_panel(index: int, left_margin: float) -> None:
        """Position the panel with this index in the figure; ``left_margin`` is in inches."""
        row, column = divmod(index, columns)
        # Rows are counted from the top, but matplotlib measures from the bottom, in fractions of the figure.
        axes_x = column * width + left_margin
        axes_y = (rows - 1 - row) * height + _BOTTOM_INCHES
        axes_width = width - left_margin - _RIGHT_INCHES
        axes_height = height - _TOP_INCHES - _BOTTOM_INCHES
        axes[index].set_position(
            (
                axes_x / figure_width,
                axes_y / figure_height,
                axes_width / figure_width,
                axes_height / figure_height,
            )
        )

    # The height of a panel determines the labels of its vertical axis, and the widest label determines the
    # left margin. So position the panels without a margin, measure the labels, and position the panels again.
    label_pixels = [0.0]
    for index, ax in enumerate(axes):
        place_panel(index, left_margin=0.0)
        label_box = ax.yaxis.get_tightbbox()
        if label_box is not None:
            label_pixels.append(ax.bbox.x0 - label_box.x0)
    left_margin = max(label_pixels) / figure.dpi + _LABEL_GAP_INCHES
    for index in range(len(axes)):
        place_panel(index, left_margin)


def _draw_panel(ax: Axes, lines: Lines, panel: Panel) -> None:
    """Draw one metric over the steps into the axes of its panel.

    A smooth panel shows the values and their running mean. Other panels show points, with labels at the first
    and the last point.
    """
    steps, values = metric_series(lines, panel.metric)
    _set_title(ax, panel.title)
    if panel.smooth:
        ax.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1)
        ax.plot(steps, smooth_curve(values), color=BLUE, linewidth=1.8)
    else:
        ax.plot(
            steps,
            values,
            color=BLUE,
            linewidth=1.8,
            marker="o",
            markersize=3.5,
        )
        ax.axhline(values[0], color=GREY, linewidth=0.9, linestyle="--")
        _annotate_point(
            ax,
            steps[0],
            values[0],
            offset=(4, -11),
            alignment="left",
            colour=GREY,
        )
        _annotate_point(
            ax,
            steps[-1],
            values[-1],
            offset=(0, 7),
            alignment="right",
            colour=BLUE,
        )

    if panel.limits is not None:
        ax.set_ylim(panel.limits[0], panel.limits[1] * _HEADROOM)
    # Use a linear axis if the values are not positive, or too close together for logarithmic ticks.
    if panel.logarithmic:
        spans_a_decade = max(values) >= 10 * min(values)
        if min(values) > _MIN_LOGARITHMIC and spans_a_decade:
            ax.set_yscale("log")
        else:
            ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            ax.yaxis.get_offset_text().set(size=8, color=GREY)
            ax.set_ylim(bottom=0)


def _annotate_point(
    ax: Axes,
    step: int,
    value: float,
    *,
    offset: tuple[int, int],
    alignment: str,
    colour: str,
) -> None:
    """Label a point of a curve with its value.

    ``offset``: horizontal and vertical distance of the label from the point, in 1/72 inch.
    """
    ax.annotate(
        number_text(value, ".3f"),
        (step, value),
        xytext=offset,
        textcoords="offset points",
        ha=alignment,
        fontsize=9,
        color=colour,
    )


def _phase_seconds(lines: Lines) -> dict[str, list[float]]:
    """Return the seconds of every step in each phase of `STEP_PHASES`: metric name -> seconds per step.

    Phases that never ran are omitted.
    """
    seconds: dict[str, list[float]] = {}
    for name in STEP_PHASES:
        # Skip step 0, which is the evaluation before the first step. If a phase did not run in a step, the
        # step's line has no value for the phase: count 0 seconds.
        values = [float(line.get(name) or 0.0) for line in lines if line["step"] > 0]
        if any(values):
            seconds[name] = values
    return seconds


def _draw_phase_times(ax: Axes, lines: Lines) -> None:
    """Draw the seconds of each phase over the steps, smoothed and stacked on one another."""
    # Smooth the curves, since a single slow step would make the phases of other steps too small to see.
    seconds_by_phase = _phase_seconds(lines)
    steps = [int(line["step"]) for line in lines if line["step"] > 0]
    curves = [smooth_curve(seconds) for seconds in seconds_by_phase.values()]
    ax.stackplot(
        steps,
        curves,
        labels=[name.removeprefix("time/") for name in seconds_by_phase],
        colors=COLOURS[: len(seconds_by_phase)],
        alpha=0.85,
    )

    _set_title(ax, "time of a step (s)")
    step_totals = [sum(step_seconds) for step_seconds in zip(*curves, strict=True)]
    ax.set_ylim(0, _LEGEND_HEADROOM * max(step_totals))
    ax.legend(fontsize=7.5, frameon=False, ncols=2, loc="upper right")
