"""Formulas of the documentation as MathML, which browsers render without scripts or fonts of other hosts.

mkdocs calls `on_page_markdown` for each page. Pages have TeX as GitHub reads it: $`…`$.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r"\$`([^`]+)`\$")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its formulas as MathML."""
    # In a span, since Markdown takes a line that begins with <math> for a block of its own.
    return FORMULA.sub(lambda match: f"<span>{convert(match[1])}</span>", markdown)
