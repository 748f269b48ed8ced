"""What a judge is asked, and what its answer means; importable without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

JUDGEMENT = "judgement"
PLACEHOLDERS = ("prompt", "response", "ground_truth")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_SCORE = re.compile(
    r"^[ \t*#>]*score[ \t*]*[:=][ \t*]*(\d+(?:\.\d+)?|\.\d+)[ \t*.]*\r?$", re.IGNORECASE | re.MULTILINE
)


def filled(template: str, sample: Mapping[str, Any]) -> str:
    """Return ``template`` with its placeholders replaced, once: what a response says is not looked at.

    Example:
        >>> filled("{prompt} {response} {n}", {"prompt": "{response}", "response": "4", "ground_truth": 4})
        '{response} 4 {n}'
    """
    return _PLACEHOLDER.sub(lambda match: str(sample[match[1]]), template)


def is_function(template: str) -> bool:
    """Say whether a template is the name of a function, and not the text itself."""
    return ":" in template and not any(mark in template for mark in "{ \n")


def score_line(*, judgement: str, **_: Any) -> float | None:
    """Return the number of the last line ``Score: N``, None where there is none from 0 to 1.

    Example:
        >>> score_line(judgement="Right but for the unit.\\n**Score: 0.5**")
        0.5
    """
    scores = _SCORE.findall(judgement)
    score = float(scores[-1]) if scores else None
    return score if score is not None and score <= 1 else None
