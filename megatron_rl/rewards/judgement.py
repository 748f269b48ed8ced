"""Prompt for a language model as a judge, and the verdict in its text; importable without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

JUDGEMENT = "judgement"
"""Argument of a parser: the judge's text."""
PLACEHOLDERS = ("prompt", "response", "ground_truth")
"""Names in braces that a template may have."""
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_SCORE = re.compile(
    r"^[ \t*#>]*score[ \t*]*[:=][ \t*]*(\d+(?:\.\d+)?|\.\d+)[ \t*.]*\r?$", re.IGNORECASE | re.MULTILINE
)


def fill_template(template: str, sample: Mapping[str, Any]) -> str:
    """Return ``template`` with its placeholders replaced in one pass: a response cannot add placeholders.

    Example:
        >>> values = {"prompt": "{response}", "response": "4", "ground_truth": 4}
        >>> fill_template("{prompt} {response} {n}", values)
        '{response} 4 {n}'
    """
    return _PLACEHOLDER.sub(lambda match: str(sample[match[1]]), template)


def is_function(template: str) -> bool:
    """Return whether a template is the name of a function, and not the text itself."""
    return ":" in template and not any(mark in template for mark in "{ \n")


def score_line(*, judgement: str, **_: Any) -> float | None:
    """Return the number of the last line ``Score: N``; None if there is no such line or the number exceeds 1.

    Example:
        >>> score_line(judgement="Right but for the unit.\\n**Score: 0.5**")
        0.5
    """
    scores = _SCORE.findall(judgement)
    if not scores:
        return None

    score = float(scores[-1])
    if score > 1:
        return None
    return score
