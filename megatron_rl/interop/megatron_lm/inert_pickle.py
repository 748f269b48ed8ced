"""An unpickler that cannot run code: every class or function that a pickle names becomes an inert value."""

from __future__ import annotations

import io
import pickle
from typing import Any


class State:
    """Attributes that a pickle sets on a value."""


class Inert:
    """Inert value in the place of an object that a pickle constructs.

    It accepts any arguments and state, and returns itself when it is called. A class or function that the
    pickle names without calling it stays a subclass of this one.
    """

    name = ""
    """Module and name of the class or function, as ``torch.FloatStorage``."""
    args: tuple[Any, ...]
    """Positional arguments of its construction."""
    state: State
    """Attributes that the pickle sets."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        value = super().__new__(cls)
        value.args = args
        value.state = State()
        return value

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self.state).update(state)
        else:
            # A state that is not a dictionary replaces the arguments.
            self.args = state if isinstance(state, tuple) else (state,)

    def __call__(self, *_: Any, **__: Any) -> Inert:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Ignore an element of a list."""

    def extend(self, _: Any) -> None:
        """Ignore elements of a list."""


class _Reader(pickle.Unpickler):
    """Unpickler that resolves every name to a subclass of `Inert`, and records the names."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        self.names.add((module_name, global_name))
        if (module_name, global_name) == ("torch", "Size"):
            return tuple  # shapes are compared as plain tuples
        return type(global_name, (Inert,), {"name": f"{module_name}.{global_name}"})

    def persistent_load(self, pid: Any, /) -> Any:
        return Inert(*pid) if isinstance(pid, tuple) else Inert()


def read_pickle(content: bytes) -> Any:
    """Unpickle without running code: plain values as they are, all others as `Inert`.

    Raises exceptions of any type for damaged bytes.
    """
    return _Reader(io.BytesIO(content)).load()


def names_in(content: bytes) -> set[tuple[str, str]]:
    """Return (module, name) of every global that a pickle would import; raises as `read_pickle`."""
    reader = _Reader(io.BytesIO(content))
    reader.load()
    return reader.names
