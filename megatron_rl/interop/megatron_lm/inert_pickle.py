"""Pickles read without running them: whatever they name stands for a value that does nothing."""

from __future__ import annotations

import io
import pickle
from typing import Any


class State:
    """Hold the attributes that a pickle gives a value."""


class Inert:
    """Stand for anything that a pickle names: ``given`` and ``state`` hold what it is made of.

    It takes every argument and state, and is its own result where it is called. ``name`` says what it stands
    for; a name that is never called is left as a subclass.
    """

    name = ""
    given: tuple[Any, ...]
    state: State

    def __new__(cls, *given: Any, **_: Any) -> Inert:
        value = super().__new__(cls)
        value.given, value.state = given, State()
        return value

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self.state).update(state)
        else:
            self.given = state if isinstance(state, tuple) else (state,)

    def __call__(self, *_: Any, **__: Any) -> Inert:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Take an element of what would be a list."""

    def extend(self, _: Any) -> None:
        """Take elements of what would be a list."""


class _Reader(pickle.Unpickler):
    """Collect the names that a pickle asks for, and give it `Inert` for each."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        self.names.add((module_name, global_name))
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        return type(global_name, (Inert,), {"name": f"{module_name}.{global_name}"})

    def persistent_load(self, pid: Any, /) -> Any:
        return Inert(*pid) if isinstance(pid, tuple) else Inert()


def read_pickle(content: bytes) -> Any:
    """Return what a pickle holds, plain values as they are and others as `Inert`.

    Raises whatever damaged bytes lead to.
    """
    return _Reader(io.BytesIO(content)).load()


def names_in(content: bytes) -> set[tuple[str, str]]:
    """Return module and name of all that a pickle would import; raises as `read_pickle`."""
    reader = _Reader(io.BytesIO(content))
    reader.load()
    return reader.names
