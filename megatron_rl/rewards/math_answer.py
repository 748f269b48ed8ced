"""Rewards for word problems whose responses end with a marked answer: ``#### 18`` or ``\\boxed{18}``.

``####`` also starts a Markdown heading of level four. So a line after ``####`` is an answer only if it begins
with a number, after optional words such as "The answer is". Any other line is a heading, which counts as the
answer only in a response without another mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

MAX_SECONDS = 3
"""Time limit in seconds for parsing an answer, and again for comparing two answers."""
_MARK = re.compile(r"#{4,}[ \t]*")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_ONE_TOKEN = re.compile(r"-?\d[\d,]*(?:\.\d+)?|\\?[A-Za-z]+|\S")
"""Content of an unbraced ``\\boxed``: a number, a command, or one character."""
_EMPHASIS = "*_` \t"
"""Markdown characters and spaces around an answer."""
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore|the|final|correct|answer|result|solution|total|is|are|equals?|of)\b"
    r"[ \t,:*_]*)+",
    re.IGNORECASE,
)
_CURRENCY = re.compile(r"(?<![\\\d])\\?\$(?=\s*[-+\u2212]?[\d.])|[€£¥₹]\s*")
_NUMBER = r"[-+\u2212]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?"
_BEGINS_WITH_NUMBER = re.compile(rf"(?:[A-Za-z]\s*=\s*|\\?\(?\s*)?{_NUMBER}(?!\d*[.)]\s+\S)")
"""A number, also after ``x =``, but not the number of a heading such as "2. Add them"."""
_UNIT = (
    r"(?:[kcm]?m|k?g|mg|m?[lL]|ft|in|mi|lbs?|oz|hrs?|[sh]|mph"
    r"|(?!sqrt|sin|cos|tan|log|exp|mod|theta|alpha|beta|gamma|lambda|infinity)[^\W\d_]{3,})"
)
"""Unit after a number; excludes functions, Greek letters and products such as ``xy``."""
_WITH_UNIT = re.compile(rf"({_NUMBER}\s*%?)(?:\s+\(?{_UNIT}(?![^\W_])[.)]?)+\W*")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;! ]|[\u00a0\u2009\u202f]|\{,\})(?=\d{3}(?!\d))")
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.]{1,100}(?:[eE][-+]?\d{1,2}|/\d{1,100})?", re.ASCII)
_SPACED_THOUSANDS = re.compile(r"[-+\u2212]?\d{1,3}(?: \d{3})+(?:\.\d+)?")


def _find_boxed_answers(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position and the content of each complete, non-empty ``\\boxed{…}`` or ``\\fbox{…}``.

    LaTeX also permits ``\\boxed`` without braces. The content is then the next number, command or character.
    """
    for match in _BOX.finditer(text):
        begin = match.end()
        if not text.startswith("{", begin):
            token = _ONE_TOKEN.match(text, begin)
            if token is not None:
                yield match.start(), token[0]
            continue

        # The box ends at the brace that closes its opening brace.
        depth = 0
        position = begin
        while position < len(text):
            if text[position] == "\\":
                position += 2  # skip an escaped brace
                continue
            if text[position] == "{":
                depth += 1
            elif text[position] == "}":
                depth -= 1
            if depth == 0:
                break
            position += 1

        content = text[begin + 1 : position].strip()
        if depth == 0 and position < len(text) and content:
            yield match.start(), content


def find_last_box(text: str) -> str | None:
    """Return the content of the last complete ``\\boxed{…}`` or ``\\fbox{…}``, or None without such a box.

    Example:
        >>> find_last_box("so \\\\boxed{\\\\frac{1}{2}}, or \\\\boxed{")
        '\\\\frac{1}{2}'
    """
    contents = [content for _, content in _find_boxed_answers(text)]
    if not contents:
        return None
    return contents[-1]


def _find_text_after_marks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position of each ``####`` and the text after it.

    ``####`` marks a final answer, as in GSM8K, or a Markdown heading. The text is usually the rest of the
    line. If the rest of the line is empty, the text is the next line. The text is also the next line if the
    rest is only a phrase such as "The answer is:" and the next line begins with a number.
    """
    for match in _MARK.finditer(text):
        line, _, text_below = text[match.end() :].partition("\n")
        answer = _LEAD_IN.sub("", line.strip(_EMPHASIS + ":"), count=1)
        if not answer.strip(_EMPHASIS + ":"):
            next_line = text_below.strip().partition("\n")[0]
            if _BEGINS_WITH_NUMBER.match(strip_markup(next_line)) or not line.strip():
                line = next_line
        yield match.start(), line


def strip_markup(line: str) -> str:
    """Remove Markdown, words such as "The answer is", a currency sign and a final full stop from a line.

    Example:
        >>> strip_markup("**The answer is $1,200.**")
        '1,200'
    """
    text = line.strip(_EMPHASIS)
    if _LEAD_IN.match(text):
        text = _LEAD_IN.sub("", text, count=1)
    text = text.strip(_EMPHASIS + ":=")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(_EMPHASIS)

    # Remove the delimiters of an inline formula in LaTeX.
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2].strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()

    return _CURRENCY.sub("", text, count=1)


def strip_unit(answer: str) -> str:
    """Remove the unit and the thousands separators of a number; return other answers unchanged.

    Example:
        >>> strip_unit("18 dollars"), strip_unit("x + 2"), strip_unit("1 200")
        ('18', 'x + 2', '1200')
    """
    # Remove thousands separators: LaTeX's, Unicode spaces, and plain spaces.
    text = _THOUSANDS.sub("", answer.strip())
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")

    match = _WITH_UNIT.fullmatch(text)
    if match is None:
        return text
    return match[1].strip()


def find_marked_answer(text: str) -> str | None:
    """Return the last answer marked with ``####`` or a box, without its unit, or None without a mark.

    A line after ``####`` that does not begin with a number counts only in a text without another mark.

    Example:
        >>> find_marked_answer("#### Solution\\n2 + 3 = 5, so \\\\boxed{5}")
        '5'
    """
    # Collect the boxes, and the lines after `####`, with their positions: the last answer counts.
    answers = list(_find_boxed_answers(text))
    headings: list[str] = []
    for position, line in _find_text_after_marks(text):
        answer = strip_markup(line)
        if _BEGINS_WITH_NUMBER.match(answer):
            answers.append((position, answer.rpartition("=")[2].strip() or answer))
        elif answer and not _BOX.search(line):
            headings.append(answer)

    if answers:
        return strip_unit(max(answers)[1])
    if headings:
        return headings[-1]
    return None


def _parse_number(text: str) -> Fraction | None:
    """Return the value of a plain number, or None for any other text."""
    number_text = text.replace(",", "").replace(" ", "").replace("\u2212", "-")
    if not _PLAIN_NUMBER.fullmatch(number_text):
        return None
    try:
        return Fraction(number_text)
    except (ValueError, ZeroDivisionError):
        return None


def are_equal(answer: str, expected: str) -> bool:
    """Return whether two mathematical expressions are equal, such as ``0.5`` and ``\\frac{1}{2}``.

    If math-verify needs more than `MAX_SECONDS` for the comparison, the expressions count as unequal. Call
    this function in the main thread, since math-verify limits its time with a signal.
    """
    from math_verify import parse, verify

    if answer == expected:
        return True

    # Plain numbers need no parser, and most answers are plain numbers.
    number = _parse_number(answer)
    if number is not None and number == _parse_number(expected):
        return True

    expected_expressions = parse(f"\\boxed{{{expected}}}", parsing_timeout=MAX_SECONDS)
    expressions = parse(f"\\boxed{{{answer}}}", parsing_timeout=MAX_SECONDS)
    return verify(expected_expressions, expressions, timeout_seconds=MAX_SECONDS)


def marked_number(
    *, prompt: str, response: str, ground_truth: Any, metadata: Mapping[str, Any], format_reward: float = 0.0
) -> dict[str, float]:
    """Return reward 1 for a response whose final answer equals the ground truth, see `are_equal`.

    The response must mark its final answer by ``\\boxed{}`` or ``####``, see `find_marked_answer`. A response
    without a marked answer has reward 0, and ``format_reward`` is the reward of a marked answer that is
    wrong. The component ``correct`` is 1 for an equal answer, and ``formatted`` is 1 for any marked answer.

    The ground truth is a plain answer, or a complete solution with a marked answer as in GSM8K.
    """
    truth = str(ground_truth)
    expected = find_marked_answer(truth) or strip_unit(truth)
    answer = find_marked_answer(response)
    if answer is None:
        return {"reward": 0.0, "correct": 0.0, "formatted": 0.0}

    is_correct = are_equal(answer, expected)
    reward = 1.0 if is_correct else format_reward
    return {"reward": reward, "correct": float(is_correct), "formatted": 1.0}
