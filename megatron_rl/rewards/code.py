"""Rewards of programs by their tests: the reward function behind ``reward.code``, run contained.

The one idea: the program decides its values, and nothing about how they are compared. It runs again for each
test, in a process below the worker. The test runs in another process, which has the expected values and makes
every comparison: it calls the program's functions and gets plain values back
(`megatron_rl.rewards.program`). So a program that prints a verdict, ends early, defines its own ``isclose``
or changes the interpreter has gained nothing.

The program cannot read the memory or the pipes of worker and test, and whatever it leaves running is ended
after each test. It sees the files that contained code sees; the data are not among them unless
``limits.read`` names them.
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

from megatron_rl.contained.confinement import end_descendants
from megatron_rl.rewards import program as remote_program
from megatron_rl.rewards.program import Peer

LARGEST_OUTPUT = 2**20
"""Bytes that a program may print in a test, and that any file of it may have."""
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
"""Options of prctl(2), from <linux/prctl.h>."""

_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})[ \t]*(.*?)[ \t]*")
_PYTHON = re.compile(r"\{?\.?(?:python|ipython|py)[\d.]*(?![\w-])", re.IGNORECASE)
_LATE_FENCE = re.compile(rf".*?[^`~](`{{3,}}|~{{3,}})[ \t]*({_PYTHON.pattern}[^`]*)", re.IGNORECASE)
"""An opening fence with other text in front of it on its line, which Markdown would not take for one."""
_INDENT = 3
"""Columns by which a closing fence may be indented further than its opening one, as in CommonMark."""

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
"""Modules that a test may use without importing them, by the name that it uses."""
_NAMES = {
    "Counter": collections.Counter,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "deque": collections.deque,
    "isclose": math.isclose,
}
"""Further names that a test may use without importing them."""
_SOLUTION = "Solution"
"""Class in which programs in the style of LeetCode define the function that is tested."""

_PASSED = "passed"
_FAILED = "failed"
_UNREADABLE = "unreadable"
"""Verdict of a test that only the program could decide."""


class Test(NamedTuple):
    """One test of a program.

    Example:
        >>> Test(source="add(1, 2)", expected=3, returns=True).returns
        True
    """

    stdin: str = ""
    """Text on standard input, of a test that compares the output."""
    expected: Any = None
    """Lines that must be printed, or the value that ``source`` must have."""
    source: str | None = None
    """Python that calls the program: statements with assertions, or an expression."""
    returns: bool = False
    """Whether ``source`` is an expression whose value is compared with ``expected``."""
    function: str | None = None
    """Function that ``source`` begins with, of a test in the form of APPS; it may be a method of Solution."""


class Block(NamedTuple):
    """Fenced block of a response."""

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
    """Return the reward of a program, with the share of its tests that it passed as ``passed``.

    Raises ValueError for a ground truth that is not a list of tests, and for a test that only the program
    could decide.
    """
    tests = read_tests(ground_truth)
    deadline = time.monotonic() + timeout

    # No program may look into this process or write to its pipes, and what it leaves running becomes a child
    # of this process, which ends it.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    source = program_of(response)
    passed = 0
    for test in tests:
        if passes(source, test, min(test_timeout, deadline - time.monotonic())):
            passed += 1
        elif scoring == "all":
            break

    share = passed / len(tests)
    reward = share
    if scoring != "share":
        reward = float(passed == len(tests))
    return {"reward": reward, "passed": share}


# The program in a response


def program_of(response: str) -> str:
    """Return the program of a response: its last block of Python, else its last block, else all of it.

    A block without a language counts as Python if no block is marked as Python, unless it only shows a value.

    Example:
        >>> program_of("So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```\\n")
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
    """Yield the fenced blocks of Markdown text; the end of the text closes the last one."""
    fence = ""
    indent = ""
    info = ""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)

        # Outside a block: an opening fence, or a line of text.
        if not fence:
            late_fence = _LATE_FENCE.fullmatch(line)
            if match is not None and "`" not in match[3]:
                indent, fence, info = match.groups()
                lines = []
            elif late_fence is not None:
                indent = ""
                fence, info = late_fence.groups()
                lines = []
            continue

        # Inside a block. A fence further to the right belongs to the block, such as an example in a
        # docstring.
        is_level = match is not None and len(match[1]) <= len(indent) + _INDENT
        if match is not None and is_level and match[2].startswith(fence) and not match[3]:
            yield Block(info, _block_text(lines, indent))
            fence = ""
        elif match is not None and is_level and _PYTHON.match(match[3]):
            # The block before was never closed.
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
    """Return the lines of a block without the text in front of its opening fence: indentation, quotes."""
    text = ""
    for line in lines:
        # An empty line of a quoted block has the mark without the space.
        prefix = indent if line.startswith(indent) else indent.rstrip()
        text += line.removeprefix(prefix) + "\n"
    return text


def _is_program(source: str) -> bool:
    """Return whether a text is Python that does more than show a value."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(
        not isinstance(statement, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for statement in statements
    )


# Tests


def read_tests(ground_truth: Any) -> list[Test]:
    """Return the tests of a ground truth: a list, tests in the form of APPS, JSON text of these, or Python.

    Raises ValueError for anything else.

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
        return _apps_tests(ground_truth)
    if not isinstance(ground_truth, list) or not ground_truth:
        raise ValueError(f"expected a list of tests as ground truth, got {ground_truth!r:.200}")
    return [test for entry in ground_truth for test in _tests(entry)]


def _tests(entry: Any) -> list[Test]:
    """Parse one entry of a sample's list of tests; raises ValueError."""
    if isinstance(entry, str):
        return _assertion_tests(entry)
    if isinstance(entry, Mapping) and isinstance(entry.get("call"), str) and "returns" in entry:
        return [Test(source=entry["call"], expected=entry["returns"], returns=True)]
    if isinstance(entry, Mapping) and _is_text(entry.get("stdout")):
        return [_output_test(entry.get("stdin"), entry["stdout"])]

    raise ValueError(
        f"a test is {{stdin, stdout}}, {{call, returns}} or 'assert f(x) == y', got {entry!r:.200}"
    )


def _output_test(stdin: Any, stdout: Any) -> Test:
    """Return the test of a program's output; ``stdin`` may be a number or absent."""
    input_text = ""
    if _is_text(stdin):
        input_text = _joined(stdin)
    elif stdin is not None:
        input_text = str(stdin)
    return Test(stdin=input_text, expected=_lines(_joined(stdout)))


def _apps_tests(ground_truth: Mapping[str, Any]) -> list[Test]:
    """Return tests in the form of APPS, TACO and PRIME: ``inputs``, ``outputs`` and optionally ``fn_name``.

    With ``fn_name`` an input is the list of the function's arguments; without, it is the standard input.
    Raises ValueError for lists that do not fit together.

    Example:
        >>> read_tests({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})[0].source
        'add(*[1, 2])'
    """
    # A test per pair of an input and an output.
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
            tests.append(_output_test(test_input, output))
            continue

        # JSON values have a `repr` that is Python, so a call can be written as source.
        if not isinstance(function, str) or not function.isidentifier():
            raise ValueError(f"fn_name is the name of a function, got {function!r:.200}")
        if not isinstance(test_input, list):
            raise ValueError(f"an input of {function} is the list of its arguments, got {test_input!r:.200}")
        source = f"{function}(*{test_input!r})"
        tests.append(Test(source=source, expected=output, returns=True, function=function))
    return tests


def _is_text(value: Any) -> bool:
    """Return whether a value is text, or a list of its lines."""
    if isinstance(value, list):
        return all(isinstance(line, str) for line in value)
    return isinstance(value, str)


def _joined(value: str | list[str]) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(value)


def _assertion_tests(text: str) -> list[Test]:
    """Return the tests in Python text: one per assertion, with the statements in front of it.

    Statements without an assertion at their level are one test together, such as a function that asserts
    and the call of it. Raises ValueError for text without an assertion.
    """
    try:
        tree = ast.parse(textwrap.dedent(text).strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = ast.Module([], [])

    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError(f"an assertion is 'assert f(x) == y', got {text!r:.200}")

    # Imports and helper functions belong to each assertion that follows them.
    preceding: list[ast.stmt] = []
    tests: list[Test] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            _require_decidable(statement, preceding)
            tests.append(Test(source=ast.unparse(ast.Module([*preceding, statement], []))))
        else:
            preceding.append(statement)

    return tests or [Test(source=ast.unparse(tree))]


def _require_decidable(statement: ast.Assert, preceding: list[ast.stmt]) -> None:
    """Raise ValueError for an assertion whose outcome the program could decide by itself."""
    names = _program_names([*preceding, statement])
    condition = statement.test
    while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        condition = condition.operand

    # `assert f(2) == g(2)`: equality of two of the program's objects is the program's.
    if isinstance(condition, ast.Compare):
        sides = (condition.left, *condition.comparators)
        if all(_is_of_program(side, names) for side in sides):
            raise _undecidable(statement, "both of its sides are the program's")
        return

    # `assert same(f(2), 4)`: the program's own `same` could always return True.
    if isinstance(condition, ast.Call) and _is_of_program(condition.func, names):
        arguments = [*condition.args, *(keyword.value for keyword in condition.keywords)]
        calls = [node for argument in arguments for node in ast.walk(argument) if isinstance(node, ast.Call)]
        if any(_is_of_program(call, names) for call in calls):
            reason = "the function that compares is the program's: define it before the assertion"
            raise _undecidable(statement, reason)


def _undecidable(statement: ast.Assert, reason: str) -> ValueError:
    return ValueError(f"a test that the program decides, {reason}: {ast.unparse(statement)!r:.200}")


def _is_of_program(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is a call, attribute or item of one of the program's names."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in names


def _free_names(statements: list[ast.stmt]) -> list[str]:
    """Return the names that statements use and do not bind anywhere, in order of their use."""
    # Scopes are not distinguished: a name that is bound anywhere in a test is the test's own.
    loaded_names: dict[str, None] = {}
    bound_names: set[str] = set()

    for node in (node for statement in statements for node in ast.walk(statement)):
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


def _is_ours(name: str) -> bool:
    return name in _MODULES or name in _NAMES or hasattr(builtins, name)


def _program_names(statements: list[ast.stmt]) -> set[str]:
    """Return the names that a test expects of the program.

    Python's built-in names count only in a test without other names: the program may define ``sorted``.
    """
    free_names = _free_names(statements)
    return {name for name in free_names if not _is_ours(name)} or set(free_names)


# Running a test


def passes(source: str, test: Test, seconds: float) -> bool:
    """Run the program ``source`` once, for at most ``seconds``, and return whether it passes the test.

    Raises ValueError if only the program could compare a value of its own.
    """
    if seconds <= 0:
        return False

    # A folder per test, so that a program finds no files of an earlier test.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "program.py")
        path.write_text(source, encoding="utf-8", errors="replace")
        if test.source is None:
            return _prints(path, test, seconds)
        verdict, reason = _verdict_of_call(path, test, seconds)
    if verdict == _UNREADABLE:
        raise ValueError(f"a test has no outcome: {reason}: {test.source!r:.200}")
    return verdict == _PASSED


def _prints(program: Path, test: Test, seconds: float) -> bool:
    """Return whether a program prints the expected lines and ends without an error."""
    # Files of a temporary folder, and no pipes: contained code makes no files in memory, which no limit
    # counts.
    with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as output_file:
        stdin = input_file.fileno()
        stdout = output_file.fileno()
        os.write(stdin, test.stdin.encode("utf-8", "replace"))
        os.lseek(stdin, 0, os.SEEK_SET)

        process = _start([str(program)], program.parent, stdin, stdout)
        try:
            succeeded = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            succeeded = False
        finally:
            _end(process)

        text = os.pread(stdout, LARGEST_OUTPUT, 0).decode("utf-8", "replace")
    return succeeded and _lines(text) == test.expected


def _verdict_of_call(
    program: Path,
    test: Test,
    seconds: float,
) -> tuple[str, str]:
    """Run program and test, each in a process of its own; return the verdict and its reason."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as running:
        # This process closes its ends of the pipes, so that each process sees the end of the other.
        with contextlib.ExitStack() as handed_over:
            requests_read, requests_write = _pipe(handed_over)
            answers_read, answers_write = _pipe(handed_over)
            verdict_read, verdict_write = os.pipe()
            running.callback(os.close, verdict_read)
            handed_over.callback(os.close, verdict_write)
            process = _start(
                [remote_program.__file__, str(program), str(requests_read), str(answers_write)],
                program.parent,
                subprocess.DEVNULL,
                subprocess.DEVNULL,
                (requests_read, answers_write),
            )
            running.callback(_end, process)

            # The test is a fork of this process: it starts at once, and programs cannot inspect it either.
            if os.fork() == 0:
                os.close(requests_read)
                os.close(answers_write)
                _run_test(test, answers_read, requests_write, verdict_write)
        text = _read_until(verdict_read, deadline)

    try:
        verdict, reason = json.loads(text)
    except ValueError:  # the time is over, or the test used up its memory
        return _FAILED, ""
    return verdict, reason


def _pipe(descriptors: contextlib.ExitStack) -> tuple[int, int]:
    """Return the read and write ends of a pipe, which are closed with ``descriptors``."""
    ends = os.pipe()
    for end in ends:
        descriptors.callback(os.close, end)
    return ends


def _read_until(descriptor: int, deadline: float) -> bytes:
    """Return the bytes written until the other end is closed; none if that takes too long."""
    text = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            return text
        text += data
    return b""


def _run_test(
    test: Test,
    reads: int,
    writes: int,
    verdict_write: int,
) -> None:
    """Run a test in this process, write the verdict and exit."""
    outcome = _FAILED
    reason = ""
    try:
        # Code of the test prints nothing into the worker's streams.
        null_device = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null_device, descriptor)

        peer = Peer(reads, writes)
        try:
            if _holds(test, peer):
                outcome = _PASSED
        finally:
            if peer.reason is not None:
                outcome = _UNREADABLE
                reason = peer.reason
    except BaseException:  # an assertion fails, or the program raised, ended or answered nonsense
        pass
    finally:
        os.write(verdict_write, json.dumps([outcome, reason]).encode())
        os._exit(0)


def _holds(test: Test, peer: Peer) -> bool:
    """Return whether a test's expression has the expected value; raises what its statements raise."""
    source = test.source
    assert source is not None
    if test.function is not None and not peer.ask("defines", test.function):
        source = f"{_SOLUTION}().{source}"

    tree = ast.parse(source)
    names = {"__name__": "test"} | _names_of(tree, peer)
    if not test.returns:
        exec(compile(tree, "test", "exec"), names)
        return True

    value = eval(compile(source.strip(), "test", "eval"), names)
    if _is_same(value, test.expected):
        return True
    # APPS puts the output of a function into a list of its own, in most records.
    is_wrapped = test.function is not None and isinstance(test.expected, list) and len(test.expected) == 1
    return is_wrapped and _is_same(value, test.expected[0])


def _names_of(tree: ast.Module, peer: Peer) -> dict[str, Any]:
    """Return the values of a test's free names: the program's objects, and Python's own."""
    # The program's own names come first; its other names cannot shadow Python's.
    program_names = _program_names(tree.body)
    values: dict[str, Any] = {}

    for name in _free_names(tree.body):
        if name in program_names and peer.ask("defines", name):
            values[name] = peer.ask("name", name)
        elif name in _MODULES:
            values[name] = importlib.import_module(_MODULES[name])
        elif name in _NAMES:
            values[name] = _NAMES[name]

    return values


def _start(
    arguments: list[str],
    folder: Path,
    stdin: int,
    stdout: int,
    descriptors: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start Python on a program, isolated from the environment and in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-I", *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=_limit_files,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all processes that it started."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    end_descendants()


def _limit_files() -> None:
    """Limit the size of every file that this process writes, its output included."""
    limit = LARGEST_OUTPUT
    hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


# Comparing


def _is_same(value: Any, expected: Any) -> bool:
    """Return whether a value is the expected one; tuples and arrays may be lists, keys of JSON are text."""
    if type(value) is type(expected) and value == expected:
        return True
    return bool(_plain(value) == _plain(expected))


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it, as far as it can."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | collections.deque | range):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _lines(text: str) -> list[str]:
    """Return the lines of an output without trailing whitespace and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
