"""HTML pages that need no other file: tables, pictures, and a browser of samples.

The templates in `pages/` are rendered by jinja2, which escapes every text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _templates() -> Environment:
    """Return the environment that loads and renders the templates."""
    templates = Environment(
        loader=PackageLoader("megatron_rl.trainer", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    # JSON has no NaN: better an error here than in the reader's browser.
    templates.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
    }
    return templates


def _render(template: str, **values: Any) -> Markup:
    return Markup(_templates().get_template(template).render(**values))


def write(path: Path, title: str, sections: Sequence[Markup]) -> None:
    """Write a page of ``sections``; lone surrogates become question marks."""
    page = _render("page.html", title=title, parts=sections)
    path.write_text(page, encoding="utf-8", errors="replace")


def heading(text: str) -> Markup:
    """Return a heading within a page."""
    return Markup("<h2>{}</h2>").format(text)


def paragraph(text: str) -> Markup:
    """Return a paragraph."""
    return Markup("<p>{}</p>").format(text)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[int] = (),
) -> Markup:
    """Return a table; the columns with the indices ``numeric`` are aligned to the right."""
    return _render("table.html", headings=headings, rows=rows, numeric=numeric)


def pictures(titled: Sequence[tuple[str, bytes]]) -> Markup:
    """Return SVG pictures with their titles, side by side if there is room."""
    encoded = [(title, base64.b64encode(picture).decode()) for title, picture in titled]
    return _render("pictures.html", pictures=encoded)


def text(content: str) -> Markup:
    """Return preformatted text."""
    return Markup("<pre>{}</pre>").format(content)


def sample_browser(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a list of samples with filters.

    Each sample has set, step, prompt, response, truth, reward, length, finish, turns and failure; from truth
    on they may be None. A turn has role, content, tokens, and calls as texts; a sample with turns is shown
    turn by turn. Text of a model or a data set is never interpreted as HTML or as a program.
    """
    return _render("samples.html", rows=rows)
