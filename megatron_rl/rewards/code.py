"""Run the tests of the program in a response: the reward function behind ``reward.code``.

A program only supplies values and never takes part in their comparison. For each test, a new child process of
the worker runs the program, and a second process runs the test. The test's process has the expected values,
calls the program's functions, receives plain values (`megatron_rl.rewards.program`) and makes every
comparison. So a program gains nothing if it prints a verdict, ends early, defines its own ``isclose`` or
changes the interpreter.

The program cannot read the memory or the pipes of the worker and the test. Processes that it leaves running
are killed after each test. It can read the files that are visible to sandboxed code. The data sets are not
visible unless ``limits.read`` names them.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import ctypes
import decimal
import fractions
import importlib
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.contained.confinement import kill_descendants
from megatron_rl.rewards import program as remote_program
from megatron_rl.rewards.program import Peer

LARGEST_OUTPUT = 2**20
"""Largest output of a program in one test, and largest file that it may write, in bytes."""
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
"""Options of prctl(2), from <linux/prctl.h>."""

_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})[ \t]*(.*?)[ \t]*")
_PYTHON = re.compile(r"\{?\.?(?:python|ipython|py)[\d.]*(?![\w-])", re.IGNORECASE)
_INLINE_FENCE = re.compile(rf".*?[^`~](`{{3,}}|~{{3,}})[ \t]*({_PYTHON.pattern}[^`]*)", re.IGNORECASE)
"""Pattern of an opening fence after other text on its line, which Markdown does not allow."""
_INDENT = 3
"""Maximum number of columns by which a closing fence is indented further than its opening fence, as in
CommonMark."""

_STANDARD_MODULES = (
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "typing",
)
_MODULES = {name: name for name in _STANDARD_MODULES} | {"np": "numpy", "numpy": "numpy"}
"""Name in a test -> module that the test may use under this name without importing it."""
_NAMES = {
    "Counter": collections.Counter,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
    "isclose": math.isclose,
}
"""Name in a test -> object that the test may use under this name without importing it."""
_SOLUTION = "Solution"
"""Class in which LeetCode-style programs define the function under test."""

_PASSED = "passed"
_FAILED = "failed"
_INVALID = "invalid"
"""Verdict on a test in which the program itself would make a comparison, so that it could always pass."""


class Test(NamedTuple):
    """Test of a program: compares its output for ``stdin``, or runs ``source``, which calls the program.

    Example: two tests of a program that defines ``add``. The first compares the value of an expression, the
    second executes an assertion:

        >>> by_value = Test(source="add(1, 2)", expected=3, returns=True)
        >>> by_assertion = Test(source="assert add(1, 2) == 3")
    """

    stdin: str = ""
    """Text on standard input, for a test that compares the output."""
    expected: Any = None
    """Lines that the program must print, or the value that ``source`` must have."""
    source: str | None = None
    """Python code that calls the program: statements with assertions, or an expression."""
    returns: bool = False
    """Whether ``source`` is an expression whose value is compared with ``expected``."""
    function: str | None = None
    """Function that ``source`` calls, in a test of the APPS format; it may be a method of ``Solution``."""


class Block(NamedTuple):
    """Fenced code block in the Markdown of a response."""

    info: str
    """Text after the opening fence: the language, and options."""
    text: str
    """Content of the block."""


def run_tests(
    *,
    response: str,
    ground_truth: Any,
    scoring: str = "all",
    test_timeout: float = 5.0,
    timeout: float = 60.0,
    **_: Any,
) -> dict[str, float]:
    """Run the tests of the ground truth on the program in a response, and return the reward.

    The component ``passed`` is the share of passed tests. If ``scoring`` is ``share``, it is also the reward.
    If ``scoring`` is ``all``, the reward is 1 if all tests pass, else 0. ``test_timeout`` and ``timeout`` are
    the time limits of a test and of all tests in seconds.

    Raises ValueError for a ground truth that is not a list of tests. Also raises ValueError for a test whose
    comparison would call a method of the tested program, such as its ``__eq__``: the program could then
    decide the outcome of the test.
    """
    tests = read_tests(ground_truth)
    deadline = time.monotonic() + timeout

    # Make this process not dumpable, so that programs cannot inspect it or write to its pipes. Make it a
    # subreaper, so that it becomes the parent of processes that a program leaves running, and can kill them.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    # A failed test decides the reward with `all`, so no further test is run. `passed` then counts only the
    # tests before it.
    source = extract_program(response)
    num_passed = 0
    for test in tests:
        if passes_test(source, test, min(test_timeout, deadline - time.monotonic())):
            num_passed += 1
        elif scoring == "all":
            break

    passed_share = num_passed / len(tests)
    reward = passed_share
    if scoring != "share":
        reward = float(num_passed == len(tests))
    return {"reward": reward, "passed": passed_share}


# The program in a response


def extract_program(response: str) -> str:
    """Return the last Python block of a response, else the last block, else the complete response.

    If no block is marked as Python, blocks without a language count as Python. A block that only displays
    a value, such as an example of the output, does not count.

    Example:
        >>> extract_program("So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```\\n")
        'print(1)\\n'
    """
    blocks = list(fenced_blocks(response))
    python_blocks = [block for block in blocks if _PYTHON.match(block.info)]
    plain_blocks = [block for block in blocks if not block.info]
    plain_programs = [block for block in plain_blocks if _is_program(block.text)]

    for candidates in (python_blocks, plain_programs, plain_blocks, blocks):
        if candidates:
            return candidates[-1].text
    return response


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of Markdown text; the end of the text closes an open block."""
    fence = ""
    indent = ""
    info = ""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)

        # Outside a block: an opening fence, a fence after other text on its line, or a line of text.
        if not fence:
            inline_fence = _INLINE_FENCE.fullmatch(line)
            if match is not None and "`" not in match[3]:
                indent, fence, info = match.groups()
                lines = []
            elif inline_fence is not None:
                indent = ""
                fence, info = inline_fence.groups()
                lines = []
            continue

        # Inside a block: a fence that is indented further is part of the block, such as an example in a
        # docstring.
        is_at_level = match is not None and len(match[1]) <= len(indent) + _INDENT
        if match is not None and is_at_level and match[2].startswith(fence) and not match[3]:
            yield Block(info, _block_text(lines, indent))
            fence = ""
        elif match is not None and is_at_level and _PYTHON.match(match[3]):
            # The previous block was never closed.
            yield Block(info, _block_text(lines, indent))
            indent, fence, info = match.groups()
            lines = []
        elif line.rstrip().endswith(fence) and match is None:
            # The closing fence follows the last line of code without a line break.
            lines.append(line.rstrip().removesuffix(fence))
            yield Block(info, _block_text(lines, indent))
            fence = ""
        else:
            lines.append(line)

    if fence:
        yield Block(info, _block_text(lines, indent))


def _block_text(lines: list[str], indent: str) -> str:
    """Join the lines of a block, and remove the indentation of the block from each line.

    ``indent`` is the text before the opening fence: spaces and quote marks.
    """
    text = ""
    for line in lines:
        # An empty line of a quoted block has the quote mark without the space after it.
        prefix = indent if line.startswith(indent) else indent.rstrip()
        text += line.removeprefix(prefix) + "\n"
    return text


def _is_program(source: str) -> bool:
    """Return whether a text is Python code with a call, or with a statement that is not an expression.

    Other Python code only displays values, such as ``[1, 2]`` in an example of an output.
    """
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False

    # A statement that is an expression only shows a value, unless it contains a call.
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            return True
        if any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            return True
    return False


# Tests


def read_tests(ground_truth: Any) -> list[Test]:
    """Parse the tests in a ground truth.

    The ground truth is a list of tests, a mapping in the APPS format, JSON text of either, or Python code
    with assertions. Raises ValueError for any other value.

    Example:
        >>> read_tests(["assert add(1, 2) == 3"])[0].source
        'assert add(1, 2) == 3'
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            ground_truth = [ground_truth]

    if isinstance(ground_truth, Mapping) and {"inputs", "outputs"} <= ground_truth.keys():
        return _parse_apps_tests(ground_truth)
    if not isinstance(ground_truth, list) or not ground_truth:
        raise ValueError(f"expected a list of tests as ground truth, got {ground_truth!r:.200}")

    tests: list[Test] = []
    for test_value in ground_truth:
        tests.extend(_parse_tests(test_value))
    return tests


def _parse_tests(test_value: Any) -> list[Test]:
    """Parse one item of the ground truth's list: a mapping, or code with one or more assertions.

    Raises ValueError for any other value.
    """
    if isinstance(test_value, str):
        return _parse_assertions(test_value)
    if isinstance(test_value, Mapping):
        if isinstance(test_value.get("call"), str) and "returns" in test_value:
            return [Test(source=test_value["call"], expected=test_value["returns"], returns=True)]
        if _is_text(test_value.get("stdout")):
            return [_make_output_test(test_value.get("stdin"), test_value["stdout"])]

    raise ValueError(
        f"a test is {{stdin, stdout}}, {{call, returns}} or 'assert f(x) == y', got {test_value!r:.200}"
    )


def _make_output_test(stdin: Any, stdout: Any) -> Test:
    """Return a test that runs the program with ``stdin`` and expects the output ``stdout``.

    Both are text or lists of lines. ``stdin`` may also be a number, or None for an empty input.
    """
    input_text = ""
    if _is_text(stdin):
        input_text = _join_lines(stdin)
    elif stdin is not None:
        input_text = str(stdin)
    return Test(stdin=input_text, expected=_split_lines(_join_lines(stdout)))


def _parse_apps_tests(ground_truth: Mapping[str, Any]) -> list[Test]:
    """Parse tests in the format of APPS, TACO and PRIME: ``inputs``, ``outputs`` and optionally ``fn_name``.

    With ``fn_name`` an input is the list of the function's arguments; without it, an input is the text on
    standard input. Raises ValueError for lists of different lengths and for values of the wrong type.

    Example:
        >>> read_tests({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})[0].source
        'add(*[1, 2])'
    """
    # There is one test per pair of an input and an output.
    inputs = ground_truth["inputs"]
    outputs = ground_truth["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError(f"expected lists of inputs and outputs, got {dict(ground_truth)!r:.200}")
    if len(inputs) != len(outputs):
        raise ValueError(f"expected an output for each input, got {len(inputs)} and {len(outputs)}")

    function = ground_truth.get("fn_name")
    tests = []
    for test_input, output in zip(inputs, outputs, strict=True):
        if function is None:
            if not _is_text(output):
                raise ValueError(f"an output without fn_name is text or a list of lines, got {output!r:.200}")
            tests.append(_make_output_test(test_input, output))
            continue

        # The `repr` of a JSON value is Python, so the call can be written as source code.
        if not isinstance(function, str) or not function.isidentifier():
            raise ValueError(f"fn_name is the name of a function, got {function!r:.200}")
        if not isinstance(test_input, list):
            raise ValueError(f"an input of {function} is the list of its arguments, got {test_input!r:.200}")
        source = f"{function}(*{test_input!r})"
        tests.append(Test(source=source, expected=output, returns=True, function=function))
    return tests


def _is_text(value: Any) -> bool:
    """Return whether a value is text, or text as a list of lines."""
    if isinstance(value, list):
        return all(isinstance(line, str) for line in value)
    return isinstance(value, str)


def _join_lines(value: str | list[str]) -> str:
    """Join a list of lines to one text; return text unchanged."""
    if isinstance(value, str):
        return value
    return "\n".join(value)


def _parse_assertions(text: str) -> list[Test]:
    """Parse Python code into tests, one per assertion at the top level.

    The test of an assertion contains all other statements before the assertion. Code without an assertion at
    the top level is a single test, for example a function with assertions and the call of this function.
    Raises ValueError for text without an assertion.
    """
    try:
        tree = ast.parse(textwrap.dedent(text).strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = ast.Module([], [])

    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError(f"an assertion is 'assert f(x) == y', got {text!r:.200}")

    # Imports and helper functions are part of the test of each assertion that follows them.
    preceding_statements: list[ast.stmt] = []
    tests: list[Test] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            _require_independent_comparison(statement, preceding_statements)
            test_module = ast.Module([*preceding_statements, statement], [])
            tests.append(Test(source=ast.unparse(test_module)))
        else:
            preceding_statements.append(statement)

    if not tests:
        return [Test(source=ast.unparse(tree))]
    return tests


def _require_independent_comparison(statement: ast.Assert, preceding_statements: list[ast.stmt]) -> None:
    """Raise ValueError for an assertion whose comparison calls a function or method of the tested program.

    The program could define the function or method so that the assertion always passes.

    ``preceding_statements`` are the other statements of the same test.
    """
    names = _program_names([*preceding_statements, statement])
    condition = statement.test
    while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        condition = condition.operand

    # `assert f(2) == g(2)`: the program may define how two of its objects compare.
    if isinstance(condition, ast.Compare):
        sides = (condition.left, *condition.comparators)
        if all(_belongs_to_program(side, names) for side in sides):
            raise _program_comparison_error(statement, "both of its sides are the program's")
        return

    # `assert same(f(2), 4)`: the program's own `same` could always return True.
    if isinstance(condition, ast.Call) and _belongs_to_program(condition.func, names):
        arguments = [*condition.args, *(keyword.value for keyword in condition.keywords)]
        for argument in arguments:
            calls = [node for node in ast.walk(argument) if isinstance(node, ast.Call)]
            if any(_belongs_to_program(call, names) for call in calls):
                reason = "the function that compares is the program's: define it before the assertion"
                raise _program_comparison_error(statement, reason)


def _program_comparison_error(statement: ast.Assert, reason: str) -> ValueError:
    """Return the error for an assertion whose outcome the tested program could decide.

    An example is ``assert f(2) == g(2)``: the program could define ``__eq__`` of both objects. ``reason`` is
    part of the message.
    """
    return ValueError(
        f"the program decides the outcome of a test, since {reason}: {ast.unparse(statement)!r:.200}"
    )


def _belongs_to_program(node: ast.AST, names: set[str]) -> bool:
    """Return whether the value of an expression comes from the program, which defines ``names``.

    The value comes from the program if the expression is one of these names, such as ``f``, or is built from
    one by calls, attributes and items, such as ``f(2).x[0]``.
    """
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in names


def _free_names(statements: list[ast.stmt]) -> list[str]:
    """Return the names that statements read but never bind, in order of first use."""
    # `statements` are the code of one test. A name that any of them binds is the test's own and not the
    # program's, so scopes need not be considered.
    loaded_names: dict[str, None] = {}
    bound_names: set[str] = set()

    nodes: list[ast.AST] = []
    for statement in statements:
        nodes.extend(ast.walk(statement))
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loaded_names[node.id] = None
        elif isinstance(node, ast.Name):
            bound_names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound_names.add(node.name)
        elif isinstance(node, ast.arg):
            bound_names.add(node.arg)
        elif isinstance(node, ast.alias):
            bound_names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound_names.add(node.name)

    return [name for name in loaded_names if name not in bound_names]


def _is_predefined(name: str) -> bool:
    """Return whether a name is a Python built-in or a name that this module provides to every test."""
    return name in _MODULES or name in _NAMES or hasattr(builtins, name)


def _program_names(statements: list[ast.stmt]) -> set[str]:
    """Return the names that a test expects the program to define.

    A test reads names of the program, and predefined names such as ``sorted``. Predefined names are excluded
    if the test reads any other name. If the test reads only predefined names, the program is expected to
    define them itself, such as its own ``sorted``. All names are then returned.
    """
    free_names = _free_names(statements)
    program_names = {name for name in free_names if not _is_predefined(name)}
    if not program_names:
        return set(free_names)
    return program_names


# Running a test


def passes_test(source: str, test: Test, time_limit: float) -> bool:
    """Return whether the program ``source`` passes a test within ``time_limit`` seconds.

    Raises ValueError for a test whose comparison would call a method of the program, see `run_tests`.
    """
    if time_limit <= 0:
        return False

    # Use a new folder for each test, so that a program finds no files of an earlier test.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "program.py")
        path.write_text(source, encoding="utf-8", errors="replace")
        if test.source is None:
            return _prints_expected(path, test, time_limit)
        verdict, reason = _run_call_test(path, test, time_limit)

    if verdict == _INVALID:
        raise ValueError(f"a test has no outcome: {reason}: {test.source!r:.200}")
    return verdict == _PASSED


def _prints_expected(program: Path, test: Test, time_limit: float) -> bool:
    """Return whether a program prints the expected lines and exits with status 0.

    ``program`` is the path of the source. The program is killed after ``time_limit`` seconds.
    """
    # Use temporary files for the program's input and output. A pipe would block the program when it is full,
    # unless another thread reads it. `memfd_create` is blocked in this sandboxed process, since no
    # limit of the sandbox would count the memory of its files.
    with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as output_file:
        stdin = input_file.fileno()
        stdout = output_file.fileno()
        os.write(stdin, test.stdin.encode("utf-8", "replace"))
        os.lseek(stdin, 0, os.SEEK_SET)

        process = _start_process([str(program)], program.parent, stdin, stdout)
        try:
            succeeded = process.wait(time_limit) == 0
        except subprocess.TimeoutExpired:
            succeeded = False
        finally:
            _end_process(process)

        text = os.pread(stdout, LARGEST_OUTPUT, 0).decode("utf-8", "replace")
    return succeeded and _split_lines(text) == test.expected


def _run_call_test(
    program: Path,
    test: Test,
    time_limit: float,
) -> tuple[str, str]:
    """Run the program and its test in two separate processes; return the verdict and its reason.

    The test calls the program's functions over pipes. The reason is empty unless the verdict is `_INVALID`.
    ``program`` is the path of the program's source. Both processes are killed after ``time_limit`` seconds.
    """
    deadline = time.monotonic() + time_limit
    with contextlib.ExitStack() as cleanup:
        # After the start, close this process's copies of the pipe ends. Otherwise neither the program nor the
        # test would get an end of file when the other process exits.
        with contextlib.ExitStack() as inherited_ends:
            requests_read, requests_write = _open_pipe(inherited_ends)
            replies_read, replies_write = _open_pipe(inherited_ends)
            verdict_read, verdict_write = os.pipe()
            cleanup.callback(os.close, verdict_read)
            inherited_ends.callback(os.close, verdict_write)
            process = _start_process(
                [remote_program.__file__, str(program), str(requests_read), str(replies_write)],
                program.parent,
                subprocess.DEVNULL,
                subprocess.DEVNULL,
                (requests_read, replies_write),
            )
            cleanup.callback(_end_process, process)

            # The test runs in a fork of this process. A fork starts fast, and programs cannot inspect it.
            if os.fork() == 0:
                os.close(requests_read)
                os.close(replies_write)
                _run_test(test, replies_read, requests_write, verdict_write)
        verdict_json = _read_until(verdict_read, deadline)

    try:
        verdict, reason = json.loads(verdict_json)
    except ValueError:  # the deadline passed, or the test ran out of memory
        return _FAILED, ""
    return verdict, reason


def _open_pipe(cleanup: contextlib.ExitStack) -> tuple[int, int]:
    """Create a pipe and return its read end and its write end; ``cleanup`` closes both."""
    ends = os.pipe()
    for end in ends:
        cleanup.callback(os.close, end)
    return ends


def _read_until(descriptor: int, deadline: float) -> bytes:
    """Read a pipe until its write end is closed; return b"" if the deadline passes first.

    ``descriptor`` is the read end, and ``deadline`` a time of the monotonic clock.
    """
    content = b""
    while True:
        remaining_seconds = max(0.0, deadline - time.monotonic())
        ready_descriptors, _, _ = select.select([descriptor], [], [], remaining_seconds)
        if not ready_descriptors:
            return b""

        # An empty read means that the write end was closed.
        data = os.read(descriptor, 1 << 16)
        if not data:
            return content
        content += data


def _run_test(
    test: Test,
    read_end: int,
    write_end: int,
    verdict_write: int,
) -> None:
    """Run a test in this process, write the verdict to a pipe and exit.

    ``read_end`` and ``write_end`` are the file descriptors of the pipes from and to the program, and
    ``verdict_write`` is the descriptor of the pipe for the verdict.
    """
    verdict = _FAILED
    reason = ""
    try:
        # The test must not print into the worker's streams, through which the worker sends its replies.
        null_device = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null_device, descriptor)

        peer = Peer(read_end, write_end)
        try:
            if _run_assertions(test, peer):
                verdict = _PASSED
        finally:
            if peer.reason is not None:
                verdict = _INVALID
                reason = peer.reason
    except BaseException:  # an assertion failed, or the program raised, exited or sent a malformed reply
        pass
    finally:
        os.write(verdict_write, json.dumps([verdict, reason]).encode())
        os._exit(0)


def _run_assertions(test: Test, peer: Peer) -> bool:
    """Run a test; return whether its expression has the expected value, or True for statements.

    Raises the exceptions of the statements, such as AssertionError.
    """
    # A function that the program does not define globally may be a method of the class `Solution`.
    source = test.source
    assert source is not None
    if test.function is not None and not peer.request("defines", test.function):
        source = f"{_SOLUTION}().{source}"

    tree = ast.parse(source)
    namespace = {"__name__": "test"} | _resolve_names(tree, peer)
    if not test.returns:
        exec(compile(tree, "test", "exec"), namespace)
        return True

    value = eval(compile(source.strip(), "test", "eval"), namespace)
    if _equals_expected(value, test.expected):
        return True
    # Most records of APPS wrap the expected output of a function in a list.
    is_wrapped = test.function is not None and isinstance(test.expected, list) and len(test.expected) == 1
    return is_wrapped and _equals_expected(value, test.expected[0])


def _resolve_names(tree: ast.Module, peer: Peer) -> dict[str, Any]:
    """Return the values of a test's free names: objects of the program, and predefined objects.

    ``tree`` is the parsed code of the test, and ``peer`` the connection to the program.
    """
    # Look up only the names that the program is expected to define: its other names must not shadow
    # predefined names.
    program_names = _program_names(tree.body)
    values: dict[str, Any] = {}

    for name in _free_names(tree.body):
        if name in program_names and peer.request("defines", name):
            values[name] = peer.request("name", name)
        elif name in _MODULES:
            values[name] = importlib.import_module(_MODULES[name])
        elif name in _NAMES:
            values[name] = _NAMES[name]

    return values


def _start_process(
    arguments: list[str],
    folder: Path,
    stdin: int,
    stdout: int,
    inherited_descriptors: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a Python process with ``arguments``, isolated from the environment, in a new session.

    ``folder`` is the working directory of the process. ``stdin``, ``stdout`` and ``inherited_descriptors``
    are the file descriptors that it inherits.
    """
    return subprocess.Popen(
        [sys.executable, "-I", *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        pass_fds=inherited_descriptors,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=_limit_files,
    )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of a program, and all processes that it started."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    kill_descendants()


def _limit_files() -> None:
    """Limit the size of every file that this process writes, including its output."""
    limit = LARGEST_OUTPUT
    hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


# Comparison


def _equals_expected(value: Any, expected: Any) -> bool:
    """Return whether a value equals the expected value, directly or after conversion to JSON types."""
    if type(value) is type(expected) and value == expected:
        return True
    return bool(_to_json_types(value) == _to_json_types(expected))


def _to_json_types(value: Any) -> Any:
    """Convert a value to the types of JSON, at any depth.

    Arrays and sequences become lists. Mappings become dictionaries whose keys are strings. Other values stay
    unchanged.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | collections.deque | range):
        return [_to_json_types(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item) for key, item in value.items()}
    return value


def _split_lines(text: str) -> list[str]:
    """Split an output into lines; remove trailing whitespace and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
