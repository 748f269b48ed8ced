"""Limits of responses: a number, a table by prompt length, or `auto`.

Code that reserves memory or positions uses the largest limit. Code that samples uses the limit of the prompt.
Both limits are computed from the same value of `max_response_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.sections.bounds import MAX_TOKENS, TOKENS
from megatron_rl.config.setting import setting
from megatron_rl.errors import UserError, range_error

AUTO = "auto"
MORE = "more"
"""Key of a table's last row, as in ``{512: 256, more: 1024}``: it applies to all longer prompts."""

ResponseLimit = int | str | dict[str, Any]
"""Value of `max_response_tokens`: a number, `AUTO`, or a table from prompt tokens to response tokens."""


@dataclass(frozen=True)
class AutoLimitConfig:
    """Limits with `max_response_tokens: auto`: a quantile of earlier response lengths, times a margin.

    The limit is clamped to `at_least` and `at_most`. Each class of prompts has its own limit: a class is one
    task with prompts of up to 1, 2, 4, 8, ... tokens. A truncated response counts with its truncated length,
    so a limit that truncates many responses increases. The first responses of a class, and all responses of
    evaluations, have the largest limit.
    """

    # Bounds of the computed limit.
    at_most: int = setting(1024, "Largest limit, which memory and positions are reserved for.", **TOKENS)
    at_least: int = setting(16, "Smallest limit.", **TOKENS)

    # The margin leaves room for responses to become longer: a limit at the quantile would hide the growth.
    quantile: float = setting(
        0.95,
        "Quantile of the earlier lengths from which the limit is computed.",
        more_than=0,
        at_most=1,
    )
    margin: float = setting(1.5, "Ratio of the limit to that quantile.", at_least=1, at_most=100)
    window: int = setting(
        512,
        "Number of latest responses of a class whose lengths count.",
        unit="responses",
        at_least=1,
        at_most=MAX_TOKENS,
    )
    responses: int = setting(
        64,
        "Number of responses of a class before its limit is computed from them.",
        unit="responses",
        at_least=1,
        at_most=MAX_TOKENS,
    )


def table_rows(table: Mapping[str, Any]) -> list[tuple[int | None, int]]:
    """Return the valid rows of a table of response limits, sorted by prompt length.

    A row is (largest number of prompt tokens, limit). `MORE` has None in place of the number.

    Example:
        >>> table_rows({"more": 1024, "64": 32, "512": 256})
        [(64, 32), (512, 256), (None, 1024)]
    """
    numbered_rows = [
        (int(key), limit) for key, limit in table.items() if key.isdecimal() and _is_limit(limit)
    ]
    rows: list[tuple[int | None, int]] = [*sorted(numbered_rows)]

    # `MORE` comes last: the first row that covers a prompt applies.
    if _is_limit(table.get(MORE)):
        rows.append((None, table[MORE]))
    return rows


def largest_limit(value: ResponseLimit, auto: AutoLimitConfig) -> int:
    """Return the largest number of tokens of any response under the limit ``value``.

    ``value`` is a number, ``auto``, or a table of limits by prompt length. Returns 1 for a table without a
    valid row, whose error is reported elsewhere.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return auto.at_most
    return max((limit for _, limit in table_rows(value)), default=1)


def smallest_limit(value: ResponseLimit, auto: AutoLimitConfig) -> int:
    """Return the smallest limit in tokens that ``value`` can set for the responses to a prompt.

    Returns 1 for a table without a valid row, whose error is reported elsewhere.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return min(auto.at_least, auto.at_most)
    return min((limit for _, limit in table_rows(value)), default=1)


def prompt_limit(value: ResponseLimit, prompt_tokens: int, auto: AutoLimitConfig) -> int:
    """Return the maximum number of response tokens for a prompt of ``prompt_tokens`` tokens.

    ``value`` is a number, `AUTO`, or a table of limits by prompt length. For `AUTO`, the function returns the
    largest limit.

    Example:
        >>> [prompt_limit({"64": 32, "more": 256}, tokens, AutoLimitConfig()) for tokens in (64, 65)]
        [32, 256]
    """
    if isinstance(value, dict):
        for max_prompt_tokens, limit in table_rows(value):
            if max_prompt_tokens is None or prompt_tokens <= max_prompt_tokens:
                return limit
    return largest_limit(value, auto)


def table_errors(path: str, table: Mapping[str, Any], longest_prompt: int) -> Iterator[UserError]:
    """Yield the errors for a table of limits at ``path``, for prompts of up to ``longest_prompt`` tokens."""
    example = f"write {path.rpartition('.')[2]}: {{64: 64, 512: 256, more: 1024}}"
    for key, limit in table.items():
        if key != MORE and not (key.isdecimal() and int(key) > 0):
            yield UserError(
                f"`{path}` has the key {key!r}, which is not a prompt length",
                where=f"{path}.{key}",
                expected=f"numbers of prompt tokens, and `{MORE}` for longer prompts",
                got=repr(key),
                fix=example,
            )
        elif not _is_limit(limit):
            expected = f"an integer, 1 or more and at most {MAX_TOKENS}"
            yield range_error(f"{path}.{key}", limit, expected, fix=example)

    # Every prompt length needs a row.
    if MORE in table:
        return
    rows = table_rows(table)
    covered_tokens = max((tokens or 0 for tokens, _ in rows), default=0)
    if not rows or covered_tokens < longest_prompt:
        yield UserError(
            f"`{path}` has no limit for the longest prompts",
            where=path,
            expected=f"a row `{MORE}`, or one for data.max_prompt_tokens = {longest_prompt}",
            got=f"rows up to {covered_tokens} tokens",
            fix=f"add {MORE}: 1024 to it",
        )


def _is_limit(value: Any) -> bool:
    """Return whether a value is a valid limit: a number of tokens from 1 to `MAX_TOKENS`."""
    # YAML's true is an int in Python.
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOKENS
