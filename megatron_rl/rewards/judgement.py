"""Fill in the prompt of an LLM judge, and parse its verdict; importable without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

JUDGEMENT = "judgement"
"""Name of the parser's argument that contains the text of the judge."""
PLACEHOLDERS = ("prompt", "response", "ground_truth")
"""Names that a template may contain in braces."""
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_SCORE = re.compile(
    r"^[ \t*#>]*score[ \t*]*[:=][ \t*]*(\d+(?:\.\d+)?|\.\d+)[ \t*.]*\r?$", re.IGNORECASE | re.MULTILINE
)


def fill_template(template: str, sample: Mapping[str, Any]) -> str:
    """Replace the placeholders of a template by the values of a sample.

    A single pass replaces all placeholders, so that a response cannot add placeholders.

    Example:
        >>> values = {"prompt": "{response}", "response": "4", "ground_truth": 4}
        >>> fill_template("{prompt} {response} {n}", values)
        '{response} 4 {n}'
    """
    return _PLACEHOLDER.sub(lambda match: str(sample[match[1]]), template)


def is_function_path(template: str) -> bool:
    """Return whether a template is the path of a function (``module:name``), and not the text of a prompt."""
    # A path has no brace, space or line break, unlike the text of a prompt.
    return ":" in template and not any(character in template for character in "{ \n")


def score_line(*, judgement: str, **_: Any) -> float | None:
    """Return the number N of the last line ``Score: N``, or None without such a line or for N above 1.

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
