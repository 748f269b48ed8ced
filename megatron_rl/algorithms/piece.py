"""What every piece of an algorithm is: a frozen value with its settings, their bounds, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

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
