"""Rewards for word problems whose response ends in a marked answer: ``#### 18`` or ``\\boxed{18}``.

``####`` is also Markdown's heading of level four. So a line behind it is an answer where it begins with a
number, but for words such as "The answer is"; any other is a heading, and counts only where a response has no
other mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

SECONDS = 3
"""Time that reading or comparing an answer may take."""
_MARK = re.compile(r"#{4,}[ \t]*")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_ONE_TOKEN = re.compile(r"-?\d[\d,]*(?:\.\d+)?|\\?[A-Za-z]+|\S")
"""What an unbraced ``\\boxed`` holds: a number, a command, or one character."""
_EMPHASIS = "*_` \t"
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore|the|final|correct|answer|result|solution|total|is|are|equals?|of)\b"
    r"[ \t,:*_]*)+",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"(?<![\\\d])\\?\$(?=\s*[-+\u2212]?[\d.])|[€£¥₹]\s*")
_NUMBER = r"[-+\u2212]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?"
_BEGINS_WITH_NUMBER = re.compile(rf"(?:[A-Za-z]\s*=\s*|\\?\(?\s*)?{_NUMBER}(?!\d*[.)]\s+\S)")
"""A number, also of a variable, but not that of a heading such as "2. Add them"."""
_UNIT = (
    r"(?:[kcm]?m|k?g|mg|m?[lL]|ft|in|mi|lbs?|oz|hrs?|[sh]|mph"
    r"|(?!sqrt|sin|cos|tan|log|exp|mod|theta|alpha|beta|gamma|lambda|infinity)[^\W\d_]{3,})"
)
"""A word behind a number that is no part of an expression, as ``pi`` and ``xy`` may be."""
_WITH_UNIT = re.compile(rf"({_NUMBER}\s*%?)(?:\s+\(?{_UNIT}(?![^\W_])[.)]?)+\W*")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;! ]|[\u00a0\u2009\u202f]|\{,\})(?=\d{3}(?!\d))")
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.]{1,100}(?:[eE][-+]?\d{1,2}|/\d{1,100})?", re.ASCII)
_SPACED_THOUSANDS = re.compile(r"[-+\u2212]?\d{1,3}(?: \d{3})+(?:\.\d+)?")


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position and the content of each box that is closed and not empty."""
    for match in _BOX.finditer(text):
        begin = match.end()
        if not text.startswith("{", begin):
            token = _ONE_TOKEN.match(text, begin)
            if token is not None:
                yield match.start(), token[0]
            continue

        depth, position = 0, begin
        while position < len(text):
            if text[position] == "\\":
                position += 2  # an escaped brace encloses nothing
                continue
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                break
            position += 1
        content = text[begin + 1 : position].strip()
        if depth == 0 and position < len(text) and content:
            yield match.start(), content


def last_boxed(text: str) -> str | None:
    """Return what the last closed ``\\boxed{…}`` or ``\\fbox{…}`` holds; None without one.

    Example:
        >>> last_boxed("so \\\\boxed{\\\\frac{1}{2}}, or \\\\boxed{")
        '\\\\frac{1}{2}'
    """
    return max(_boxes(text), default=(0, None))[1]


def _lines_behind_marks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position of each ``####`` and its line; the next one where it only announces an answer."""
    for match in _MARK.finditer(text):
        line, _, rest = text[match.end() :].partition("\n")
        if not _LEAD_IN.sub("", line.strip(_EMPHASIS + ":"), count=1).strip(_EMPHASIS + ":"):
            following = rest.strip().partition("\n")[0]
            line = following if _BEGINS_WITH_NUMBER.match(bare(following)) or not line.strip() else line
        yield match.start(), line


def bare(line: str) -> str:
    """Return a line without Markdown, words that lead to the answer, currency, and a full stop.

    Example:
        >>> bare("**The answer is $1,200.**")
        '1,200'
    """
    text = line.strip(_EMPHASIS)
    text = _LEAD_IN.sub("", text, count=1) if _LEAD_IN.match(text) else text
    text = text.strip(_EMPHASIS + ":=")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(_EMPHASIS)
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2].strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    return _CURRENCY.sub("", text, count=1)


def without_unit(answer: str) -> str:
    """Return a number without the words behind it and without marks of thousands, other answers as they are.

    Example:
        >>> without_unit("18 dollars"), without_unit("x + 2"), without_unit("1 200")
        ('18', 'x + 2', '1200')
    """
    text = _THOUSANDS.sub("", answer.strip())
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    match = _WITH_UNIT.fullmatch(text)
    return match[1].strip() if match is not None else text


def marked_answer(text: str) -> str | None:
    """Return the last answer that a text marks with ``####`` or a box, without its unit; None without one.

    A line behind ``####`` that begins with no number counts where there is no other mark.

    Example:
        >>> marked_answer("#### Solution\\n2 + 3 = 5, so \\\\boxed{5}")
        '5'
    """
    answers = list(_boxes(text))
    headings: list[str] = []
    for position, line in _lines_behind_marks(text):
        answer = bare(line)
        if _BEGINS_WITH_NUMBER.match(answer):
            answers.append((position, answer.rpartition("=")[2].strip() or answer))
        elif answer and not _BOX.search(line):
            headings.append(answer)
    if answers:
        return without_unit(max(answers)[1])
    return headings[-1] if headings else None


def _number(text: str) -> Fraction | None:
    """Return a plain number's value; None for anything else."""
    plain = text.replace(",", "").replace(" ", "").replace("\u2212", "-")
    if not _PLAIN_NUMBER.fullmatch(plain):
        return None
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


def equal(answer: str, expected: str) -> bool:
    """Return whether two mathematical expressions are the same, by math-verify: ``0.5`` and ``\\frac{1}{2}``.

    A comparison that takes longer than `SECONDS` is no. Call it in the main thread.
    """
    from math_verify import parse, verify

    if answer == expected:
        return True
    given_number, expected_number = _number(answer), _number(expected)
    if given_number is not None and given_number == expected_number:
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
    expected = marked_answer(truth) or without_unit(truth)
    answer = marked_answer(response)
    if answer is None:
        return {"reward": 0.0, "correct": 0.0, "formatted": 0.0}
    same = equal(answer, expected)
    return {"reward": 1.0 if same else format_reward, "correct": float(same), "formatted": 1.0}
