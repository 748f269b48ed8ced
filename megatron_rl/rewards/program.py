"""Run a program under test, and exchange values between the program and its test.

A test runs in a separate process (`megatron_rl.rewards.code`) and uses the program from there: it looks up
names of the program, calls functions and receives values. Plain values are serialized by their structure,
never by ``repr`` or pickle. So the program determines the values, but not how they are compared. An object
that is not a plain value stays in the program's process, and the test gets a proxy for it (`Remote`).

Each process has a `Peer`, connected by two pipes. A message is a length, followed by JSON. A request is
``["request", operation, operands]``. Its reply is ``["value", value, arguments after the call]`` or
``["error", type, message]``. A peer may receive requests while it waits for a reply, for example if the test
passes a function to the program.

This file is also the main module of the program's process: ``python program.py SOURCE READ_END WRITE_END``
with file descriptors of the pipes. It needs only the standard library.
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
"""Module name of the program."""
LARGEST_VALUE = 2**20
"""Largest serialized value in bytes; a larger one is an error."""
_HEADER = struct.Struct("<Q")
"""Format of a message's header: the length of the message in bytes."""
_EXACT_INTEGER = 2**53
"""Integers from this value on are written in hexadecimal, since Python limits the length of decimal texts."""
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
"""Type of a dictionary's view -> tag of its encoded values."""
_TEXT_PARSERS = {
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
"""Tag -> function that parses a value from its text."""
_SAFE_OPERATORS = ("getitem", "setitem", "neg", "pos", "abs")
"""Operators that never have an expected value of the test as operand.

A test may therefore apply them to an object of the program."""
_UNSAFE_OPERATORS = ("contains", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
"""Operators that may have an expected value as operand, such as 4 in ``abs(f(2) - 4) < 1e-6``. The class of
``f(2)`` could define ``-`` so that the comparison is always true."""


class CannotCompare(Exception):
    """Error of a test whose comparison would call a method of the tested program, such as its ``__eq__``.

    The program could then decide the outcome of the test.
    """


class ProgramEnded(Exception):
    """Error of a connection: the other process has ended or sent a malformed message."""


class Remote:
    """Proxy for an object in the other process, usually for an object of the program.

    ``number`` identifies the object in the other process, and ``class_name`` is the name of its class.
    ``is_program_class``: whether the program defines the class. ``defines_equality``: whether the class
    defines ``==``.
    """

    def __init__(
        self,
        peer: Peer,
        number: int,
        class_name: str,
        is_program_class: bool,
        defines_equality: bool,
    ) -> None:
        # Do not assign the attributes: `__setattr__` would set them on the program's object.
        self.__dict__.update(
            _peer=peer,
            _number=number,
            _class_name=class_name,
            _is_program_class=is_program_class,
            _defines_equality=defines_equality,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # requested by NumPy to probe its protocols, not by the test
            raise AttributeError(name)
        return self._peer.request("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("set_attribute", self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._peer.call(self, arguments, keywords)

    def __eq__(self, value: object) -> bool:
        if value is self:
            return True
        # An object whose class does not define `==` equals only itself. An object of a class of the program
        # never equals a plain value, since the program's `==` cannot be trusted.
        if not self._defines_equality or (self._is_program_class and not isinstance(value, Remote)):
            return False
        raise self._peer.make_comparison_error(
            f"a value of type {self._class_name} cannot be sent to the test's process"
        )

    def __hash__(self) -> int:
        return self._number

    def __instancecheck__(self, value: object) -> bool:
        raise self._peer.make_comparison_error("a test checks for an instance of a class of the program")

    def __bool__(self) -> bool:
        return bool(self._peer.request("truth", self))

    def __len__(self) -> int:
        return int(self._peer.request("length", self))

    def __str__(self) -> str:
        return str(self._peer.request("text", self))

    def __repr__(self) -> str:
        return str(self._peer.request("representation", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._peer.request("iterator", self)
        if isinstance(iterator, Remote):
            return iterator
        return iter(iterator)

    def __next__(self) -> Any:
        return self._peer.request("next", self)


def _make_operator(name: str) -> Callable[..., Any]:
    """Return the method of `Remote` that applies an operator, such as ``add``, in the other process.

    The tested program can define operators in its classes. For example, its ``-`` could return 0, so that
    the comparison ``abs(f(2) - 4) < 1e-6`` is always true. Therefore the operators in `_UNSAFE_OPERATORS`,
    which a test may apply to an expected value such as 4, are restricted. Their methods raise
    `CannotCompare` unless every operand is an object of the program (a `Remote`).
    """

    def operate(self: Remote, *operands: Any) -> Any:
        if name in _UNSAFE_OPERATORS and not all(isinstance(operand, Remote) for operand in operands):
            raise self._peer.make_comparison_error(
                f"a test applies `{name}` to an object of the program's class {self._class_name}: "
                "the class could return any result"
            )
        return self._peer.request("operator", name, self, *operands)

    return operate


for _name in (*_SAFE_OPERATORS, *_UNSAFE_OPERATORS):
    setattr(Remote, f"__{_name}__", _make_operator(_name))


class Peer:
    """Endpoint of the connection between a program and its test; each of the two processes has one.

    ``read_end`` and ``write_end`` are file descriptors. ``names`` are the objects that the other process may
    look up, by name: the program's globals, or None in the test's process. The test may examine objects of
    the program; the program can only call objects of the test.
    """

    def __init__(
        self,
        read_end: int,
        write_end: int,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        self._reader = os.fdopen(read_end, "rb")
        self._writer = os.fdopen(write_end, "wb")
        self._names = names
        """Objects that the other process may look up, by name; None in the test's process."""

        self._objects: list[Any] = []
        """Objects of this process that were sent as references, by number."""
        self._numbers: dict[int, int] = {}
        """``id`` of such an object -> its number."""
        self._remotes: dict[int, Remote] = {}
        """Number of an object in the other process -> its proxy."""
        self.reason: str | None = None
        """Reason why the test that uses this connection is invalid, see `make_comparison_error`; None for a
        valid test."""

    def make_comparison_error(self, reason: str) -> CannotCompare:
        """Make the error for a test whose comparison would call a method of the tested program.

        Also stores the first such reason in ``self.reason``, which makes the test invalid: the test itself
        may catch the error.
        """
        if self.reason is None:
            self.reason = reason
        return CannotCompare(reason)

    def request(self, operation: str, *operands: Any) -> Any:
        """Perform an operation in the other process; return its result or raise its error."""
        self._send(["request", operation, [self.encode(operand) for operand in operands]])
        value, _ = self._await_value()
        return value

    def call(
        self,
        function: Remote,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Call an object of the other process and return the result.

        Changes that the call makes to mutable arguments are applied to ``arguments``.
        """
        operands = [self.encode(function), self.encode(list(arguments)), self.encode(dict(keywords))]
        self._send(["request", "call", operands])
        value, changed_arguments = self._await_value()
        for argument, changed_argument in zip(arguments, changed_arguments, strict=True):
            _update_argument(argument, changed_argument)
        return value

    def serve(self) -> None:
        """Handle the requests of the other process until it closes the connection."""
        while True:
            try:
                _, operation, operands = self._receive()
            except ProgramEnded:
                return
            self._handle_request(operation, operands)

    def _await_value(self) -> tuple[Any, Any]:
        """Wait for the reply to a request; return the value, and the arguments after the call.

        Handles requests of the other process in the meantime. Raises the error of an error reply.
        """
        while True:
            kind, *content = self._receive()
            if kind == "request":
                self._handle_request(*content)
            elif kind == "value":
                return self.decode(content[0]), self.decode(content[1])
            else:
                raise _to_exception(*content)

    def _handle_request(self, operation: str, operands: Sequence[Any]) -> None:
        """Perform the operation that the other process requests, and send the value or the error."""
        try:
            value, arguments = self._perform(operation, [self.decode(operand) for operand in operands])
            reply = json.dumps(["value", self.encode(value), self.encode(arguments)])
            if len(reply) > LARGEST_VALUE:
                raise ValueError(f"a value of more than {LARGEST_VALUE} bytes")
        except ProgramEnded:
            raise
        except BaseException as error:  # a program that calls sys.exit in a test has failed that test
            reply = json.dumps(["error", type(error).__name__, str(error)[:1000]])

        self._write(reply)

    def _perform(
        self,
        operation: str,
        operands: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Perform an operation; return its value and, for a call, the arguments.

        The arguments are returned because the call may have changed them. An argument of an immutable type is
        returned as None.
        """
        if operation == "call":
            function, arguments, keywords = operands
            value = function(*arguments, **keywords)
            changed_arguments: list[Any] = []
            for argument in arguments:
                is_mutable = isinstance(argument, list | dict | set | bytearray)
                changed_arguments.append(argument if is_mutable else None)
            return value, changed_arguments

        # The program may only call functions that the test has passed to it. It must not examine the test's
        # objects, which may contain expected values. Only the program's process has names to look up.
        is_test_process = self._names is None
        if is_test_process:
            raise PermissionError("an object that a test passes can only be called")
        if operation == "operator":
            name, *values = operands
            return getattr(operator, name)(*values), []
        return _OPERATIONS[operation](self._names, *operands), []

    # Values. Methods of base types are called on the type, such as `int.__add__`, since a subclass of the
    # program may override them.

    def encode(self, value: Any) -> Any:
        """Encode a value for JSON: a scalar of JSON as itself, any other value as [tag, content, ...]."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__add__(value, 0)
            if abs(number) < _EXACT_INTEGER:
                return number
            return ["int", hex(number)]
        if isinstance(value, float):
            # Adding 0.0 would change -0.0 to 0.0.
            if not value:
                return math.copysign(0.0, value)
            return float.__add__(value, 0.0)

        # Encode containers and views item by item.
        for container_type, tag, get_items in _CONTAINERS:
            if isinstance(value, container_type):
                return [tag, self._encode_all(get_items(value))]
        if type(value) in _VIEWS:
            return [_VIEWS[type(value)], self._encode_all(value)]

        # Encode values of the standard library and of NumPy. Every other object stays in this process.
        encoded_scalar = _encode_scalar(value)
        if encoded_scalar is not None:
            return encoded_scalar
        if type(value).__module__.partition(".")[0] == "numpy":
            if isinstance(value, sys.modules["numpy"].ndarray):
                return ["ndarray", value.dtype.str, self.encode(value.tolist())]
            if hasattr(value, "item"):
                scalar = value.item()
                if scalar is value:  # a longdouble, whose item is itself
                    scalar = float(value)
                return self.encode(scalar)
        return self._encode_reference(value)

    def _encode_all(self, values: Any) -> list[Any]:
        """Encode each item of an iterable for JSON."""
        return [self.encode(value) for value in values]

    def _encode_reference(self, value: Any) -> list[Any]:
        """Encode an object as a reference to it.

        A `Remote` becomes ["yours", number], since its object is in the other process. An object of this
        process becomes ["mine", number, further arguments of `Remote`], and is stored here under this number.
        """
        if isinstance(value, Remote):
            return ["yours", value._number]

        # The program may only call the test's objects, see `_perform`. If a test passes an object that cannot
        # be called, the test is therefore invalid. Only the program's process has names to look up.
        is_test_process = self._names is None
        if is_test_process and not callable(value):
            raise self.make_comparison_error(f"a test passes a value of type {type(value).__name__}")

        number = self._numbers.get(id(value))
        if number is None:
            number = len(self._objects)
            self._numbers[id(value)] = number
            self._objects.append(value)  # keep it alive, so that no other object gets its id

        # Describe the class, for the proxy in the other process.
        value_class = type(value)
        class_name = f"{value_class.__module__}.{value_class.__qualname__}"
        is_program_class = value_class.__module__ == PROGRAM
        defines_equality = value_class.__eq__ is not object.__eq__
        return ["mine", number, class_name, is_program_class, defines_equality]

    def decode(self, value: Any) -> Any:
        """Decode a value that the other process encoded with `encode`."""
        if not isinstance(value, list):
            return value

        # References to objects of this process and of the other process.
        tag, *content = value
        if tag == "yours":
            return self._objects[content[0]]
        if tag == "mine":
            number = content[0]
            if number not in self._remotes:
                self._remotes[number] = Remote(self, *content)
            return self._remotes[number]

        # Scalars that JSON does not have.
        if tag == "int":
            return int(content[0], 16)
        if tag == "complex":
            return complex(*content)
        if tag == "timedelta":
            return datetime.timedelta(*content)
        if tag in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[tag].fromhex(content[0])
        if tag in _TEXT_PARSERS:
            return _TEXT_PARSERS[tag](content[0])

        # Containers, whose items are encoded values.
        if tag == "ndarray":
            import numpy

            return numpy.array(self.decode(content[1]), dtype=content[0])
        return _BUILDERS[tag]([self.decode(item) for item in content[0]])

    # Messages

    def _send(self, message: Any) -> None:
        """Send a message to the other process as JSON."""
        self._write(json.dumps(message))

    def _write(self, message_json: str) -> None:
        """Write the length of a message and the message; raises ProgramEnded for a closed pipe."""
        data = message_json.encode()
        try:
            self._writer.write(_HEADER.pack(len(data)) + data)
            self._writer.flush()
        except OSError:
            raise ProgramEnded from None

    def _receive(self) -> list[Any]:
        """Wait for the next message of the other process and return it.

        Raises ProgramEnded for the end of the pipe and for malformed bytes.
        """
        header = self._reader.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ProgramEnded

        # A program may write any size into the header: do not read more than the largest valid message.
        (size,) = _HEADER.unpack(header)
        if size > 2 * LARGEST_VALUE:
            raise ProgramEnded
        data = self._reader.read(size)
        if len(data) < size:
            raise ProgramEnded

        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise ProgramEnded from None
        if not isinstance(message, list) or not message:
            raise ProgramEnded
        return message


def _dict_items(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a dict, even of a subclass that overrides ``items``."""
    return list(dict.items(value))  # type: ignore[arg-type]


_CONTAINERS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (list, "list", list.__iter__),
    (tuple, "tuple", tuple.__iter__),
    (set, "set", set.__iter__),
    (frozenset, "frozenset", frozenset.__iter__),
    (collections.Counter, "Counter", _dict_items),
    (collections.OrderedDict, "OrderedDict", _dict_items),
    (dict, "dict", _dict_items),
    (collections.deque, "deque", list),
    (range, "range", lambda value: (value.start, value.stop, value.step)),
)
"""Types that are serialized item by item: (type, tag, function that returns the items).

A subclass is serialized as the first of these types from which it derives.
"""
_BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
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
"""Tag -> function that builds a value from its decoded items."""
_OPERATIONS: dict[str, Callable[..., Any]] = {
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
"""Operation in a request -> function of the program's names and the operands. Calls and operators are handled
separately."""


def _encode_scalar(value: Any) -> list[Any] | None:
    """Encode a scalar of the standard library, such as a Decimal, as [tag, content, ...].

    Returns None for other values.
    """
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return ["Decimal" if isinstance(value, decimal.Decimal) else "Fraction", str(value)]

    # Test datetime before date, since datetime is a subclass of date.
    for time_class in (datetime.datetime, datetime.date, datetime.time):
        if isinstance(value, time_class):
            return [time_class.__name__, value.isoformat()]
    return None


def _update_argument(argument: Any, changed_argument: Any) -> None:
    """Update a mutable argument in place to ``changed_argument``, its content after the call.

    Other arguments remain unchanged.
    """
    if isinstance(argument, list | bytearray) and isinstance(changed_argument, list | bytearray):
        argument[:] = changed_argument
    elif isinstance(argument, dict | set) and isinstance(changed_argument, dict | set):
        argument.clear()
        argument.update(changed_argument)  # type: ignore[arg-type]


def _to_exception(class_name: str, message: str) -> BaseException:
    """Convert an error of the other process to an exception of the same built-in class, else RuntimeError.

    The class matters, because a test may expect it.
    """
    error_class = getattr(builtins, str(class_name), None)
    if isinstance(error_class, type) and issubclass(error_class, Exception):
        try:
            return error_class(message)
        except TypeError:  # such as UnicodeDecodeError, whose constructor has other arguments
            pass
    return RuntimeError(f"{class_name}: {message}")


def main() -> None:
    """Run a program, then handle the requests of its test until the test ends.

    The arguments of the command are the path of the program, and the file descriptors of the pipes from and
    to the test.
    """
    path = sys.argv[1]
    read_end = int(sys.argv[2])
    write_end = int(sys.argv[3])
    sys.argv = [path]

    # Register the module, since dataclasses and enums look up their module by name.
    module = types.ModuleType(PROGRAM)
    sys.modules[PROGRAM] = module
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), "program.py", "exec"), module.__dict__)
    Peer(read_end, write_end, module.__dict__).serve()


if __name__ == "__main__":
    main()
