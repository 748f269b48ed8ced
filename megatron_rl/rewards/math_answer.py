"""Rewards for word problems whose response ends in a marked answer: ``#### 18`` or ``\\boxed{18}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

NUMBER = re.compile(r"[-+]?\$?\s*(?:\d[\d,]*\.?\d*|\.\d+)(?:\s*/\s*\d+)?")


def last_boxed(text: str) -> str | None:
    """Return what the last ``\\boxed{…}`` holds, braces inside it matched; None without a closed one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def marked_answer(text: str) -> str | None:
    """Return the text after the last ``####`` on its line, else the last boxed text, else None."""
    _, marker, after = text.rpartition("####")
    if marker:
        return after.strip().splitlines()[0].strip() if after.strip() else None
    return last_boxed(text)


def as_number(text: str) -> Fraction | None:
    """Return the exact value of a number such as ``1,200``, ``$3.50``, ``-7/2`` or ``12%``, else None."""
    cleaned = text.strip().rstrip(".%").strip()
    if not NUMBER.fullmatch(cleaned):
        return None
    try:
        return Fraction(re.sub(r"[,$\s]", "", cleaned))
    except (ValueError, ZeroDivisionError):
        return None


def marked_number(
    *, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any], format_reward: float = 0.0
) -> dict[str, float]:
    """Return reward 1 for an answer equal to the ground truth, plus the parts it is made of.

    Both sides are compared as exact numbers where both are numbers, else as text. The ground truth may be a
    plain answer or a whole solution with a marked answer (GSM8K). ``format_reward`` is what a marked but
    wrong answer earns.
    """
    truth = str(ground_truth)
    expected = marked_answer(truth) or truth.strip()
    answer = marked_answer(response)
    if answer is None:
        return {"reward": 0.0, "correct": 0.0, "formatted": 0.0}
    left, right = as_number(answer), as_number(expected)
    same = left == right if left is not None and right is not None else answer == expected
    return {"reward": 1.0 if same else format_reward, "correct": float(same), "formatted": 1.0}
