"""HTML pages that need no other file: tables, charts, and a browser of samples.

jinja2 renders the templates in `pages/` and escapes every text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


@cache
def _template_environment() -> Environment:
    """Return jinja2's environment, which loads and renders the templates of `pages/`."""
    environment = Environment(
        loader=PackageLoader("megatron_rl.trainer", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    # JSON has no NaN: raise an error here instead of writing a page that browsers cannot load.
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
    }
    return environment


def _render(file_name: str, **variables: Any) -> Markup:
    """Render a template file of `pages/` with the given template variables; return the HTML."""
    return Markup(_template_environment().get_template(file_name).render(**variables))


def write_page(path: Path, title: str, sections: Sequence[Markup]) -> None:
    """Write an HTML page with ``sections`` to ``path``; lone surrogates become question marks."""
    page = _render("page.html", title=title, parts=sections)
    path.write_text(page, encoding="utf-8", errors="replace")


def heading(text: str) -> Markup:
    """Return the heading of a section as HTML."""
    return Markup("<h2>{}</h2>").format(text)


def paragraph(text: str) -> Markup:
    """Return a paragraph of text as HTML."""
    return Markup("<p>{}</p>").format(text)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric_columns: Sequence[int] = (),
) -> Markup:
    """Return a table as HTML; ``numeric_columns`` are the indices of columns to align to the right."""
    return _render("table.html", headings=headings, rows=rows, numeric=numeric_columns)


def name_value_table(rows: Sequence[tuple[str, str]]) -> Markup:
    """Return a table of names and values, without headings, as HTML; ``rows`` are (name, value) pairs."""
    return _render("about.html", rows=rows)


def collapsible_section(title: str, content: Markup) -> Markup:
    """Return HTML that shows ``title``, and ``content`` only after a click on it."""
    return Markup("<details><summary>{}</summary>{}</details>").format(title, content)


def chart_grid(charts: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the HTML of charts, side by side if the page is wide enough; use it at most once on a page.

    ``charts``: data of the charts, as `curves.make_charts` returns it.
    """
    return _render("charts.html", charts=charts)


def preformatted_text(content: str) -> Markup:
    """Return ``content`` as HTML in a fixed-width font, with its line breaks."""
    return Markup("<pre>{}</pre>").format(content)


def sample_browser(rows: Sequence[Mapping[str, Any]], counts: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the HTML of a list of samples that the reader can filter.

    Each sample has set, step, prompt, response, truth, reward, components, advantage, length, finish, turns,
    failure, group, group_size and marks; absent values are None or empty. ``marks`` are labels of the sample,
    such as "best" for the best reward. A turn has role, content, tokens, and calls as texts; a sample with
    turns is shown turn by turn.

    ``counts`` has the numbers of ``stored`` and ``shown`` samples by ``set`` and ``step``. Text of a model or
    a data set is never interpreted as HTML or as a program.
    """
    return _render("samples.html", samples={"rows": rows, "counts": counts})
