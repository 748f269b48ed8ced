"""The process of a program under test, and the values that cross between it and its test.

A test runs in a process of its own (`megatron_rl.rewards.code`) and uses the program from there: it looks
names up, calls what they name and gets values back. Plain values are carried over by their structure, never
by ``repr`` or pickle, so that the program decides what it answers and nothing about how the answer is
compared. Everything else stays in the program's process and is a `Remote` in the test's.

This file is also the main module of a program: ``python program.py SOURCE READS WRITES``. It needs the
standard library alone.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import json
import math
import operator
import os
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PROGRAM = "program"
"""Name of the module that a program is when a test calls it."""
LARGEST_VALUE = 2**20
"""Bytes of a value that crosses; a larger one is an error."""
_HEADER = struct.Struct("<Q")
_EXACT_INTEGER = 2**53
"""Integers beyond it are written in hexadecimal, which has no limit of digits."""
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_BY_TEXT = {
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_LOOKUPS = ("getitem", "setitem", "neg", "pos", "abs")
_COMPARISONS = ("contains", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
"""Operators by which an object of the program could answer to an expected value: ``abs(f(2) - 4) < 1e-6``."""


class CannotCompare(Exception):
    """A value of the program that only the program itself could compare."""


class ProgramEnded(Exception):
    """The other process has ended, or sent what is no message."""


class Remote:
    """An object that stays in the program's process, used from the test's.

    ``mine`` is whether its class is the program's own, ``compares`` whether its class defines equality.
    """

    def __init__(self, peer: Peer, number: int, kind: str, mine: bool, compares: bool) -> None:
        self.__dict__.update(_peer=peer, _number=number, _kind=kind, _mine=mine, _compares=compares)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # NumPy's protocols: asked for by trusted code, not by the test
            raise AttributeError(name)
        return self._peer.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set_attribute", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.call(self, arguments, named)

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if not self._compares or (self._mine and not isinstance(other, Remote)):
            return False
        raise self._peer.cannot_compare(f"a value of type {self._kind} cannot be carried over to its test")

    def __hash__(self) -> int:
        return self._number

    def __instancecheck__(self, value: object) -> bool:
        raise self._peer.cannot_compare("a test asks for an instance of a class of the program")

    def __bool__(self) -> bool:
        return bool(self._peer.ask("truth", self))

    def __len__(self) -> int:
        return int(self._peer.ask("length", self))

    def __str__(self) -> str:
        return str(self._peer.ask("text", self))

    def __repr__(self) -> str:
        return str(self._peer.ask("representation", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._peer.ask("iterator", self)
        return iterator if isinstance(iterator, Remote) else iter(iterator)

    def __next__(self) -> Any:
        return self._peer.ask("next", self)


def _operation(name: str) -> Callable[..., Any]:
    def operate(self: Remote, *others: Any) -> Any:
        if name in _COMPARISONS and not all(isinstance(other, Remote) for other in others):
            raise self._peer.cannot_compare(f"only the program knows `{name}` of its {self._kind}")
        return self._peer.ask("operator", name, self, *others)

    return operate


for _name in (*_LOOKUPS, *_COMPARISONS):
    setattr(Remote, f"__{_name}__", _operation(_name))


class Peer:
    """One end of the conversation between a program and its test.

    ``names`` are those that the other end may look up: the program's, and none of the test's. An end with
    names also lets its objects be looked into; of the other end the objects can be called, and nothing more.
    """

    def __init__(self, reads: int, writes: int, names: Mapping[str, Any] | None = None) -> None:
        self._reads, self._writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self.reason: str | None = None

    def cannot_compare(self, reason: str) -> CannotCompare:
        """Note that the test has no outcome, whatever catches the error, and return the error."""
        self.reason = self.reason or reason
        return CannotCompare(reason)

    def ask(self, operation: str, *operands: Any) -> Any:
        """Have the other end do something and return the result; raises what it raised there."""
        self._send(["ask", operation, [self.encode(operand) for operand in operands]])
        return self._await()[0]

    def call(self, function: Remote, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call an object of the other end; what it changes in lists, sets and mappings is changed here."""
        self._send(
            ["ask", "call", [self.encode(function), self.encode(list(arguments)), self.encode(dict(named))]]
        )
        value, after = self._await()
        for before, now in zip(arguments, after, strict=True):
            _become(before, now)
        return value

    def serve(self) -> None:
        """Answer the other end until it closes."""
        while True:
            try:
                _, operation, operands = self._receive()
            except ProgramEnded:
                return
            self._answer(operation, operands)

    def _await(self) -> tuple[Any, Any]:
        while True:
            kind, *content = self._receive()
            if kind == "ask":
                self._answer(*content)
            elif kind == "value":
                return self.decode(content[0]), self.decode(content[1])
            else:
                raise _error(*content)

    def _answer(self, operation: str, operands: Sequence[Any]) -> None:
        try:
            value, after = self._do(operation, [self.decode(operand) for operand in operands])
            answer = ["value", self.encode(value), self.encode(after)]
            text = json.dumps(answer)
            if len(text) > LARGEST_VALUE:
                raise ValueError(f"a value of more than {LARGEST_VALUE} bytes")
        except ProgramEnded:
            raise
        except BaseException as error:  # a program that calls sys.exit in a test has failed that test
            text = json.dumps(["error", type(error).__name__, str(error)[:1000]])
        self._write(text)

    def _do(self, operation: str, operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        if operation == "call":
            function, arguments, named = operands
            value = function(*arguments, **named)
            kept = [one if isinstance(one, list | dict | set | bytearray) else None for one in arguments]
            return value, kept
        if self._names is None:
            raise PermissionError("what a test hands over can be called, and nothing more")
        if operation == "operator":
            name, *values = operands
            return getattr(operator, name)(*values), []
        return _LOOKS[operation](self._names, *operands), []

    def encode(self, value: Any) -> Any:
        """Return a value as JSON takes it: scalars as they are, all others as a list of a tag and content."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__add__(value, 0)
            return number if abs(number) < _EXACT_INTEGER else ["int", hex(number)]
        if isinstance(value, float):
            return float.__add__(value, 0.0) if value else math.copysign(0.0, value)
        for kind, tag, content in _CONTAINERS:
            if isinstance(value, kind):
                return [tag, self._encode_all(content(value))]
        if type(value) in _VIEWS:
            return [_VIEWS[type(value)], self._encode_all(value)]
        plain = _plain(value)
        if plain is not None:
            return plain
        if type(value).__module__.partition(".")[0] == "numpy":
            if isinstance(value, sys.modules["numpy"].ndarray):
                return ["ndarray", value.dtype.str, self.encode(value.tolist())]
            if hasattr(value, "item"):
                item = value.item()
                return self.encode(float(value) if item is value else item)
        return self._reference(value)

    def _encode_all(self, values: Any) -> list[Any]:
        return [self.encode(value) for value in values]

    def _reference(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["yours", value._number]
        if self._names is None and not callable(value):
            raise self.cannot_compare(f"a test hands over a value of type {type(value).__name__}")
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which keeps its id from being another's
        kind = type(value)
        compares = kind.__eq__ is not object.__eq__
        return [
            "mine",
            number,
            f"{kind.__module__}.{kind.__qualname__}",
            kind.__module__ == PROGRAM,
            compares,
        ]

    def decode(self, value: Any) -> Any:
        """Return what `encode` of the other end was given."""
        if not isinstance(value, list):
            return value
        tag, *content = value
        if tag == "yours":
            return self._objects[content[0]]
        if tag == "mine":
            number = content[0]
            if number not in self._remotes:
                self._remotes[number] = Remote(self, *content)
            return self._remotes[number]
        if tag == "int":
            return int(content[0], 16)
        if tag == "complex":
            return complex(*content)
        if tag == "timedelta":
            return datetime.timedelta(*content)
        if tag in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[tag].fromhex(content[0])
        if tag in _BY_TEXT:
            return _BY_TEXT[tag](content[0])
        if tag == "ndarray":
            import numpy

            return numpy.array(self.decode(content[1]), dtype=content[0])
        return _BUILD[tag]([self.decode(item) for item in content[0]])

    def _send(self, message: Any) -> None:
        self._write(json.dumps(message))

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            self._writes.write(_HEADER.pack(len(data)) + data)
            self._writes.flush()
        except OSError:
            raise ProgramEnded from None

    def _receive(self) -> list[Any]:
        header = self._reads.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ProgramEnded
        (size,) = _HEADER.unpack(header)
        data = self._reads.read(size) if size <= 2 * LARGEST_VALUE else b""
        if len(data) < size:
            raise ProgramEnded
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise ProgramEnded from None
        if not isinstance(message, list) or not message:
            raise ProgramEnded
        return message


def _pairs(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(dict.items(value))  # type: ignore[arg-type]


_CONTAINERS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (list, "list", list.__iter__),
    (tuple, "tuple", tuple.__iter__),
    (set, "set", set.__iter__),
    (frozenset, "frozenset", frozenset.__iter__),
    (collections.Counter, "Counter", _pairs),
    (collections.OrderedDict, "OrderedDict", _pairs),
    (dict, "dict", _pairs),
    (collections.deque, "deque", list),
    (range, "range", lambda value: (value.start, value.stop, value.step)),
)
"""Types that are carried over item by item; a subclass crosses as the first of them that it is of."""
_BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    "OrderedDict": collections.OrderedDict,
    "deque": collections.deque,
    "range": lambda bounds: range(*bounds),
    "keys": lambda keys: dict.fromkeys(keys).keys(),
    "values": lambda values: dict(enumerate(values)).values(),
    "items": lambda pairs: dict(pairs).items(),
}
_LOOKS: dict[str, Callable[..., Any]] = {
    "name": lambda names, name: names[name],
    "defines": lambda names, name: name in names,
    "attribute": lambda _, value, name: getattr(value, name),
    "set_attribute": lambda _, value, name, new: setattr(value, name, new),
    "truth": lambda _, value: bool(value),
    "length": lambda _, value: len(value),
    "text": lambda _, value: str(value),
    "representation": lambda _, value: repr(value),
    "iterator": lambda _, value: iter(value),
    "next": lambda _, value: next(value),
}
"""What a test may do with the program's names and objects, beside calling them."""


def _plain(value: Any) -> list[Any] | None:
    """Return the form of a value of the standard library that has no items; None for any other."""
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return ["Decimal" if isinstance(value, decimal.Decimal) else "Fraction", str(value)]
    for kind in (datetime.datetime, datetime.date, datetime.time):  # a datetime is a date, too
        if isinstance(value, kind):
            return [kind.__name__, value.isoformat()]
    return None


def _become(before: Any, now: Any) -> None:
    """Change a mutable value to what the program made of it."""
    if isinstance(before, list | bytearray) and isinstance(now, list | bytearray):
        before[:] = now
    elif isinstance(before, dict | set) and isinstance(now, dict | set):
        before.clear()
        before.update(now)  # type: ignore[arg-type]


def _error(kind: str, message: str) -> BaseException:
    """Return an error that the other end raised: a test may expect one of Python's own."""
    known = getattr(builtins, str(kind), None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:  # a UnicodeDecodeError, which has other arguments
            pass
    return RuntimeError(f"{kind}: {message}")


def main() -> None:
    """Run the program that the first argument names, then answer its test on the other two."""
    source, reads, writes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.argv = [source]
    module = types.ModuleType(PROGRAM)
    sys.modules[PROGRAM] = module  # dataclasses and enumerations look their module up
    with open(source, encoding="utf-8") as file:
        exec(compile(file.read(), "program.py", "exec"), module.__dict__)
    Peer(reads, writes, module.__dict__).serve()


if __name__ == "__main__":
    main()
