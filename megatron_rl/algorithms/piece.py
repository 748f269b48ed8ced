"""What every piece of an algorithm is: a frozen value with its settings, their bounds, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

from megatron_rl.config.setting import setting_of
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class Piece:
    """Be one choice that an algorithm makes.

    A piece is a frozen dataclass whose fields are its settings, each written with `setting`: default, meaning
    and bounds. What it needs from a run are class attributes, and its mathematics is one method, which its
    kind (`Advantage`, `PolicyLoss`, ...) names. The docstring says the equation and its source.
    """

    def problems(self, path: str) -> Iterator[UserError]:
        """Yield every mistake in the settings; ``path`` is where the piece stands in the configuration."""
        for item in fields(self):
            error = setting_of(item).error(f"{path}.{item.name}", getattr(self, item.name))
            if error is not None:
                yield error
        yield from self.contradictions(path)

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield mistakes that no single setting shows."""
        yield from ()

    def within(self, max_response_tokens: int) -> Self:
        """Return the piece for responses of at most so many tokens."""
        return self


def wrong_result(piece: Piece, method: str, expected: str, got: Any) -> UserError:
    """Return the error of a piece of the user's own whose method, or function, returned something else."""
    function = getattr(piece, "function", None) or getattr(type(piece), method)
    code = getattr(function, "__code__", None)
    shape = getattr(got, "shape", None)
    return UserError(
        f"{function.__qualname__}, a piece of the algorithm, returned something else than it is to return",
        where=f"{code.co_filename}:{code.co_firstlineno}" if code else type(piece).__module__,
        expected=expected,
        got=f"{type(got).__name__} {got!r}"[:200] if shape is None else f"a tensor {list(shape)}",
        fix=f"correct what {function.__qualname__} returns",
    )
