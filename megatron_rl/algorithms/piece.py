"""Base class of the pieces of an algorithm: frozen values with settings, bounds and one equation.

The command ``check`` constructs and prints pieces, also on machines without torch. The modules that define
pieces therefore import ``torch`` and ``ragged`` from here: both names are proxies, which import the module on
first use.
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

    class _LazyModule:
        """Proxy of a module that is imported at the first access to one of its attributes."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self.name), name)

    torch = _LazyModule("torch")
    ragged = _LazyModule("megatron_rl.algorithms.ragged")


MAX_LOG_RATIO = 20.0
"""Bound of the absolute value of a log ratio: exp(20) = 4.9e8 is finite in float32, and so is its square."""

# Characters of a wrong result that an error quotes: a printed tensor can fill a screen.
_MAX_RESULT_TEXT = 200


@dataclass(frozen=True)
class Piece:
    """One exchangeable part of an algorithm, such as its advantage estimator or its policy loss.

    A piece is a frozen dataclass whose fields are its settings, each written with `setting`: default, meaning
    and bounds. Its requirements (a critic, a reference policy) are class attributes or properties. One method
    implements the equation (`Advantage.estimate`, `PolicyLoss.token_loss`, ...). The docstring gives the
    equation and its source.
    """

    def problems(self, path: str) -> Iterator[UserError]:
        """Validate the settings of this component of the algorithm, and yield every error.

        ``path``: configuration key of the component, such as ``algorithm.policy_loss``.
        """
        # First each setting alone, then combinations of settings.
        for piece_field in fields(self):
            setting_path = f"{path}.{piece_field.name}"
            setting_value = getattr(self, piece_field.name)
            error = setting_of(piece_field).value_error(setting_path, setting_value)
            if error is not None:
                yield error

        yield from self.contradictions(path)

    def contradictions(self, path: str) -> Iterator[UserError]:
        """Yield the errors of settings that contradict each other; subclasses override this method.

        ``path``: configuration key of the component, such as ``algorithm.policy_loss``.
        """
        yield from ()

    @property
    def needs_scoring_pass(self) -> bool:
        """Whether the piece reads the actor's log-probs of the batch before the first loss is computed."""
        return False

    def with_response_limit(self, max_response_tokens: int) -> Self:
        """Return a copy with ``max_response_tokens``, the run's limit, in all settings that default to it.

        Only settings that are None are changed. The base class has no such settings; a subclass that has some
        overrides this method.
        """
        return self


def wrong_result_error(piece: Piece, method: str, expected: str, got: Any) -> UserError:
    """Return the error for a component of the algorithm that returned a wrong type or shape.

    ``piece``: the component, such as a policy loss, implemented by a user's class or function. ``method``:
    name of the method that returned the result, such as ``token_loss``. ``expected``: description of a valid
    result. ``got``: the result.
    """
    function = getattr(piece, "function", None) or getattr(type(piece), method)

    # A callable object or a built-in has no code object: point to the module of the piece instead.
    code = getattr(function, "__code__", None)
    location = type(piece).__module__
    if code is not None:
        location = f"{code.co_filename}:{code.co_firstlineno}"

    # If the result is a tensor, print only its shape. A wrong shape is the usual mistake, and the shape would
    # be hard to find among printed values.
    shape = getattr(got, "shape", None)
    result_text = f"{type(got).__name__} {got!r}"[:_MAX_RESULT_TEXT]
    if shape is not None:
        result_text = f"a tensor {list(shape)}"

    return UserError(
        f"{function.__qualname__}, a piece of the algorithm, returned a wrong type or shape",
        where=location,
        expected=expected,
        got=result_text,
        fix=f"correct the return value of {function.__qualname__}",
    )
