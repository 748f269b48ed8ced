"""The result of a check as a picture: ranks, the roles on them, and the weights that move between roles."""

from __future__ import annotations

from xml.sax.saxutils import escape

from megatron_rl.check.configuration import CheckReport
from megatron_rl.cli.check_text import cell_label, layout_text
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.shapes.traffic import byte_text

_MAX_COLUMNS = 16
"""Largest number of ranks that are drawn: more columns are too narrow to read on a screen."""

# Sizes in pixels: width of a column, height of a row, width of the names at the left, height of the title.
_COLUMN = 112
_ROW = 40
_LEFT = 290
_TOP = 64

_ROLE_COLOURS = ("#2563a8", "#d9722b", "#3a9a5b", "#8a5bb5", "#b5485d", "#5aa7b8")
_ROLLOUT_COLOUR = "#1f2937"
_TEXT_COLOUR = "#1f2937"
_NOTE_COLOUR = "#6b7280"
_EMPTY_COLOUR = "#f3f4f6"


def draw_svg(report: CheckReport, name: str) -> str:
    """Return the SVG of a check: a column per rank, a row per role, and each rank's bytes of a weight sync.

    The report must have layouts; ``name`` is its configuration, for the title. Only the first `_MAX_COLUMNS`
    ranks are drawn.
    """
    assert report.layouts is not None
    ranks = range(min(report.world_size, _MAX_COLUMNS))
    roles = list(report.layouts)

    # One row for the bytes that a rank needs, and one for those that it receives.
    sync_rows = 2 if report.sync is not None else 0
    width = _LEFT + _COLUMN * len(ranks) + 16
    height = _TOP + _ROW * (len(roles) + sync_rows) + 20

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(name)}: ranks, roles and weights</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, f"{name} on {report.world_size} ranks", weight="bold"),
        *(_text(_centre(rank), 50, f"rank {rank}", _NOTE_COLOUR, anchor="middle") for rank in ranks),
    ]
    if report.world_size > len(ranks):
        note = f"the first {len(ranks)} are shown"
        elements.append(_text(width - 16, 26, note, _NOTE_COLOUR, anchor="end"))

    for index, role in enumerate(roles):
        elements += _role_row(report, role, _TOP + _ROW * index, ranks)
    if report.sync is not None:
        elements += _sync_rows(report, _TOP + _ROW * len(roles), ranks)
    return "\n".join([*elements, "</svg>"]) + "\n"


def _role_row(report: CheckReport, role: str, top: int, ranks: range) -> list[str]:
    """Return the row of one role: its name, its sizes, and a box per rank with its coordinates."""
    assert report.layouts is not None
    layout = report.layouts[role]
    # Draw the rollout in the dark colour of the arrows that lead to it.
    if role == ROLLOUT.name:
        colour = _ROLLOUT_COLOUR
    else:
        colour = _ROLE_COLOURS[list(report.layouts).index(role) % len(_ROLE_COLOURS)]

    elements = [
        _text(16, top + 17, role, weight="bold"),
        _text(16, top + 32, layout_text(role, layout), _NOTE_COLOUR, size=11),
    ]
    for rank in ranks:
        has_role = rank in layout.ranks
        fill = colour if has_role else _EMPTY_COLOUR
        elements.append(
            f'<rect x="{_centre(rank) - _COLUMN // 2 + 4}" y="{top + 4}" width="{_COLUMN - 8}" '
            f'height="{_ROW - 8}" rx="5" fill="{fill}"/>'
        )
        if has_role:
            label = cell_label(role, layout, rank)
            elements.append(_text(_centre(rank), top + 25, label, "#ffffff", anchor="middle"))
    return elements


def _sync_rows(report: CheckReport, top: int, ranks: range) -> list[str]:
    """Return the two rows below the roles: the bytes that each rank needs in a weight sync, and receives."""
    assert report.sync is not None
    elements = [
        _text(16, top + 27, "weights of a sync", weight="bold"),
        _text(16, top + 43, "the rank's share of the engine's model", _NOTE_COLOUR, size=11),
        _text(16, top + 60, "received; the rest is on the rank already", _NOTE_COLOUR, size=11),
    ]
    for rank in ranks:
        if rank not in report.sync.needed:
            continue

        # An arrow from the rollout's row above, then the two numbers.
        centre = _centre(rank)
        needed_size = byte_text(report.sync.needed[rank])
        received_size = byte_text(report.sync.received[rank])
        arrow = f"M{centre} {top + 26}v-18m-5 7l5 -7l5 7"
        elements += [
            f'<path d="{arrow}" fill="none" stroke="{_ROLLOUT_COLOUR}"/>',
            _text(centre, top + 43, needed_size, _TEXT_COLOUR, anchor="middle", size=12),
            _text(centre, top + 60, received_size, _ROLE_COLOURS[0], anchor="middle", size=12),
        ]
    return elements


def _centre(rank: int) -> int:
    """Return the horizontal centre of a rank's column."""
    return _LEFT + _COLUMN * rank + _COLUMN // 2


def _text(
    x: int,
    baseline: int,
    text: str,
    colour: str = _TEXT_COLOUR,
    *,
    weight: str = "normal",
    size: int = 13,
    anchor: str = "start",
) -> str:
    """Return an SVG text element; ``x`` and ``baseline`` are in pixels, ``anchor`` is SVG's text-anchor."""
    return (
        f'<text x="{x}" y="{baseline}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
