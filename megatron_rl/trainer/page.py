"""Self-contained HTML pages: tables, pictures, and a browser of samples.

jinja2 renders the templates in `pages/` and escapes every text.
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
    """Return jinja2's environment, which loads and renders the templates."""
    templates = Environment(
        loader=PackageLoader("megatron_rl.trainer", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    # JSON has no NaN: raise an error here instead of writing a page that browsers cannot load.
    templates.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
    }
    return templates


def _render(template: str, **values: Any) -> Markup:
    """Render a template with values."""
    return Markup(_templates().get_template(template).render(**values))


def write(path: Path, title: str, sections: Sequence[Markup]) -> None:
    """Write a page that consists of ``sections``; lone surrogates are replaced by question marks."""
    page = _render("page.html", title=title, parts=sections)
    path.write_text(page, encoding="utf-8", errors="replace")


def heading(text: str) -> Markup:
    """Return a heading of a section."""
    return Markup("<h2>{}</h2>").format(text)


def paragraph(text: str) -> Markup:
    """Return a paragraph."""
    return Markup("<p>{}</p>").format(text)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[int] = (),
) -> Markup:
    """Return a table; ``numeric`` are the indices of the columns that are aligned to the right."""
    return _render("table.html", headings=headings, rows=rows, numeric=numeric)


def pictures(titled: Sequence[tuple[str, bytes]]) -> Markup:
    """Return a section of SVG pictures with their titles, side by side as far as the page is wide enough.

    ``titled``: (title, content of the SVG file) of each picture.
    """
    encoded = [(title, base64.b64encode(picture).decode()) for title, picture in titled]
    return _render("pictures.html", pictures=encoded)


def text(content: str) -> Markup:
    """Return a section of preformatted text."""
    return Markup("<pre>{}</pre>").format(content)


def sample_browser(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a list of samples that a reader of the page can filter.

    Each sample has the keys set, step, prompt, response, truth, reward, length, finish, turns and failure;
    the values from truth on may be None. A turn has role, content, tokens, and calls as texts; a sample with
    turns is shown turn by turn. Text of a model or a data set is never interpreted as HTML or as a program.
    """
    return _render("samples.html", rows=rows)
