"""Rewards for word problems whose response ends in a marked answer: ``#### 18`` or ``\\boxed{18}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECONDS = 3
"""Time that reading or comparing an answer may take."""


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


def equal(answer: str, expected: str) -> bool:
    """Say whether two mathematical expressions are the same, by math-verify: ``0.5`` and ``\\frac{1}{2}``.

    A comparison that takes longer than `SECONDS` says no. Call it in the main thread.
    """
    from math_verify import parse, verify

    if answer == expected:
        return True
    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS) for text in (expected, answer))
    return verify(gold, given, timeout_seconds=SECONDS)


def marked_number(
    *, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any], format_reward: float = 0.0
) -> dict[str, float]:
    """Return reward 1 for an answer equal to the ground truth, plus the parts it is made of.

    The ground truth may be a plain answer or a whole solution with a marked answer (GSM8K); see `equal`.
    ``format_reward`` is what a marked but wrong answer earns.
    """
    truth = str(ground_truth)
    expected = marked_answer(truth) or truth.strip()
    answer = marked_answer(response)
    if answer is None:
        return {"reward": 0.0, "correct": 0.0, "formatted": 0.0}
    same = equal(answer, expected)
    return {"reward": 1.0 if same else format_reward, "correct": float(same), "formatted": 1.0}
