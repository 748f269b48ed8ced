"""The result of a check as a picture: ranks, the roles on them, and the weights that move between roles."""

from __future__ import annotations

from xml.sax.saxutils import escape

from megatron_rl.check.configuration import CheckReport
from megatron_rl.cli.check_text import cell_label, role_words
from megatron_rl.shapes.traffic import byte_words

_MOST_COLUMNS = 16
_CELL, _ROW, _LEFT, _TOP = 112, 40, 290, 64
_COLOURS = ("#2563a8", "#d9722b", "#3a9a5b", "#8a5bb5", "#b5485d", "#5aa7b8")
_ROLLOUT, _INK, _GREY, _EMPTY = "#1f2937", "#1f2937", "#6b7280", "#f3f4f6"


def picture(report: CheckReport, name: str) -> str:
    """Return an SVG of a check: a column per rank, a row per role, and what each rank receives at a sync.

    The check must have got as far as layouts. Of a large job the first ranks stand for all.
    """
    assert report.layouts is not None
    ranks = range(min(report.world_size, _MOST_COLUMNS))
    roles = list(report.layouts)
    below = 2 if report.sync is not None else 0
    width, height = _LEFT + _CELL * len(ranks) + 16, _TOP + _ROW * (len(roles) + below) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(name)}: ranks, roles and weights</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, f"{name} on {report.world_size} ranks", weight="bold"),
        *(_text(_centre(rank), 50, f"rank {rank}", _GREY, middle=True) for rank in ranks),
    ]
    if report.world_size > len(ranks):
        parts.append(_text(width - 16, 26, f"the first {len(ranks)} are shown", _GREY, end=True))
    for place, role in enumerate(roles):
        parts += _role(report, role, _TOP + _ROW * place, ranks, _ROLLOUT if role == "rollout" else None)
    if report.sync is not None:
        parts += _weights(report, _TOP + _ROW * len(roles), ranks)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _role(report: CheckReport, role: str, top: int, ranks: range, colour: str | None) -> list[str]:
    assert report.layouts is not None
    layout = report.layouts[role]
    colour = colour or _COLOURS[list(report.layouts).index(role) % len(_COLOURS)]
    parts = [
        _text(16, top + 17, role, weight="bold"),
        _text(16, top + 32, role_words(role, layout), _GREY, size=11),
    ]
    for rank in ranks:
        holds_role = rank in layout.ranks
        parts.append(
            f'<rect x="{_centre(rank) - _CELL // 2 + 4}" y="{top + 4}" width="{_CELL - 8}" '
            f'height="{_ROW - 8}" rx="5" fill="{colour if holds_role else _EMPTY}"/>'
        )
        if holds_role:
            label = cell_label(role, layout, rank)
            parts.append(_text(_centre(rank), top + 25, label, "#ffffff", middle=True))
    return parts


def _weights(report: CheckReport, top: int, ranks: range) -> list[str]:
    """Return the rows below the rollout: what a rank needs at a weight sync, and what others send."""
    assert report.sync is not None
    parts = [
        _text(16, top + 27, "weights of a sync", weight="bold"),
        _text(16, top + 43, "the rank's share of the engine's model", _GREY, size=11),
        _text(16, top + 60, "received; the rest is on the rank already", _GREY, size=11),
    ]
    for rank in ranks:
        if rank in report.sync.needed:
            needed, received = report.sync.needed[rank], report.sync.received[rank]
            parts += [
                f'<path d="M{_centre(rank)} {top + 26}v-18m-5 7l5 -7l5 7" fill="none" stroke="{_ROLLOUT}"/>',
                _text(_centre(rank), top + 43, byte_words(needed), _INK, middle=True, size=12),
                _text(_centre(rank), top + 60, byte_words(received), _COLOURS[0], middle=True, size=12),
            ]
    return parts


def _centre(rank: int) -> int:
    return _LEFT + _CELL * rank + _CELL // 2


def _text(
    left: int,
    base: int,
    words: str,
    colour: str = _INK,
    *,
    weight: str = "normal",
    size: int = 13,
    middle: bool = False,
    end: bool = False,
) -> str:
    anchor = "middle" if middle else "end" if end else "start"
    return (
        f'<text x="{left}" y="{base}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )
