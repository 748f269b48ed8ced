"""What every piece of an algorithm is: a frozen value with its settings, their bounds, and what it needs.

`check` names, constructs and shows pieces without torch. So the modules that define pieces take torch, and
`ragged`, from here: they are imported at their first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from megatron_rl.config.setting import setting_of
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch as torch

    from megatron_rl.algorithms import ragged as ragged
else:

    class _Module:
        """Stand for a module that is imported when one of its names is asked for."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self.name), name)

    torch = _Module("torch")
    ragged = _Module("megatron_rl.algorithms.ragged")


MAX_LOG_RATIO = 20.0
"""Logarithms of ratios are kept within it, so that their exponentials stay finite."""


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

    @property
    def needs_scoring_pass(self) -> bool:
        """Say whether the actor's log-probs must be known before the loss, where one update takes a batch."""
        return False

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
