"""Programs in responses, judged by tests: the reward function behind ``reward.code``, run contained.

A program is run anew for each test, in a process below the worker. The test itself runs in another one, which
has what is expected and makes every comparison: it calls what the program defines and gets plain values back
(`megatron_rl.rewards.program`). So a program that prints a verdict, ends early, defines its own ``isclose``
or changes the interpreter has gained nothing. Worker and test keep their memory and pipes from it, and
whatever it leaves running is ended after each test. It sees the files that contained code sees; the
data are not among them unless ``limits.read`` names them.
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
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_FENCE = re.compile(r"([ \t>]*)(`{3,}|~{3,})[ \t]*(.*?)[ \t]*")
_PYTHON = re.compile(r"\{?\.?(?:python|ipython|py)[\d.]*(?![\w-])", re.IGNORECASE)
_BEHIND_TEXT = re.compile(rf".*?[^`~](`{{3,}}|~{{3,}})[ \t]*({_PYTHON.pattern}[^`]*)", re.IGNORECASE)
"""An opening fence with words before it on its line, which Markdown would not take for one."""
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
_PASSED, _FAILED, _UNREADABLE = "passed", "failed", "unreadable"


class Test(NamedTuple):
    """One test of a program: text on standard input and the lines it must print, or Python that calls it.

    ``source`` are the statements of a test whose assertions must hold, or with ``returns`` an expression that
    must have the value ``expected``.
    """

    stdin: str = ""
    expected: Any = None
    source: str | None = None
    returns: bool = False


class Block(NamedTuple):
    """A fenced block of a response: the words behind its opening fence, and what it holds."""

    info: str
    text: str


def run_tests(
    *,
    response: str,
    ground_truth: Any,
    scoring: str = "all",
    test_timeout: float = 5.0,
    timeout: float = 60.0,
    **_: Any,
) -> dict[str, float]:
    """Return the reward of a program, with ``passed``, the share of its tests that it passed.

    Raises ValueError for a ground truth that is no list of tests, and for a test that only the program itself
    could decide.
    """
    tests, ends = read_tests(ground_truth), time.monotonic() + timeout
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # no program may look into this process or write to its pipes
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    source, passed = program_of(response), 0

    for test in tests:
        if not passes(source, test, min(test_timeout, ends - time.monotonic())):
            if scoring == "all":
                break
            continue
        passed += 1

    share = passed / len(tests)
    return {"reward": share if scoring == "share" else float(passed == len(tests)), "passed": share}


def program_of(response: str) -> str:
    """Return the program of a response: its last block of Python, else its last block, else all of it.

    A block without a language counts as Python where none is marked so, unless it only shows a value.

    Example:
        >>> program_of("So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```\\n")
        'print(1)\\n'
    """
    blocks = list(fenced_blocks(response))
    marked = [block for block in blocks if _PYTHON.match(block.info)]
    unmarked = [block for block in blocks if not block.info]
    programs = [block for block in unmarked if _does_something(block.text)]

    for candidates in (marked, programs, unmarked, blocks):
        if candidates:
            return candidates[-1].text
    return response


def fenced_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of Markdown text, the last of them also where nothing closes it."""
    fence, indent, info = "", "", ""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)
        if not fence:
            late = _BEHIND_TEXT.fullmatch(line)
            if match is not None and "`" not in match[3]:
                indent, fence, info = match[1], match[2], match[3]
                lines = []
            elif late is not None:
                indent, fence, info = "", late[1], late[2]
                lines = []
            continue

        # A fence further to the right belongs to the block, such as an example in a docstring.
        level = match is not None and len(match[1]) <= len(indent) + _INDENT
        if match is not None and level and match[2].startswith(fence) and not match[3]:
            yield Block(info, _block_text(lines, indent))
            fence = ""
        elif match is not None and level and _PYTHON.match(match[3]):
            yield Block(info, _block_text(lines, indent))  # the block before was never closed
            indent, fence, info = match[1], match[2], match[3]
            lines = []
        elif line.rstrip().endswith(fence) and match is None:
            lines.append(line.rstrip().removesuffix(fence))  # the fence stands behind the last line
            yield Block(info, _block_text(lines, indent))
            fence = ""
        else:
            lines.append(line)
    if fence:
        yield Block(info, _block_text(lines, indent))


def _block_text(lines: list[str], indent: str) -> str:
    """Return the lines of a block without what stands before the fence that opens it: indentation, quotes."""
    bare = (
        line.removeprefix(indent) if line.startswith(indent) else line.removeprefix(indent.rstrip())
        for line in lines
    )
    return "".join(f"{line}\n" for line in bare)


def _does_something(source: str) -> bool:
    """Return whether a text is Python that does more than show a value."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(
        not isinstance(statement, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for statement in body
    )


def read_tests(ground_truth: Any) -> list[Test]:
    """Return the tests of a ground truth: a list, JSON text of one, or Python; raises ValueError.

    Example:
        >>> read_tests(["assert add(1, 2) == 3"])
        [Test(stdin='', expected=None, source='assert add(1, 2) == 3', returns=False)]
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            ground_truth = [ground_truth]
    if not isinstance(ground_truth, list) or not ground_truth:
        raise ValueError(f"expected a list of tests as ground truth, got {ground_truth!r:.200}")
    return [test for entry in ground_truth for test in _tests(entry)]


def _tests(entry: Any) -> list[Test]:
    if isinstance(entry, str):
        return _asserted(entry)
    if isinstance(entry, Mapping) and isinstance(entry.get("call"), str) and "returns" in entry:
        return [Test(source=entry["call"], expected=entry["returns"], returns=True)]
    if isinstance(entry, Mapping) and _is_text(entry.get("stdout")):
        stdin = entry.get("stdin")
        given = "" if stdin is None else _joined(stdin) if _is_text(stdin) else str(stdin)
        return [Test(stdin=given, expected=_lines(_joined(entry["stdout"])))]
    raise ValueError(
        f"a test is {{stdin, stdout}}, {{call, returns}} or 'assert f(x) == y', got {entry!r:.200}"
    )


def _is_text(value: Any) -> bool:
    """Return whether a value is text, or a list of its lines."""
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(line, str) for line in value)
    )


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(value)


def _asserted(text: str) -> list[Test]:
    """Return the tests in Python text: one for each assertion, with the statements that stand before it.

    Statements without an assertion at their level are one test together, such as a function that asserts
    and the call of it.
    """
    try:
        tree = ast.parse(textwrap.dedent(text).strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = ast.Module([], [])
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if not asserts:
        raise ValueError(f"an assertion is 'assert f(x) == y', got {text!r:.200}")

    before: list[ast.stmt] = []
    tests: list[Test] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assert):
            _refuse_undecided(statement, before)
            tests.append(Test(source=ast.unparse(ast.Module([*before, statement], []))))
        else:
            before.append(statement)
    return tests or [Test(source=ast.unparse(tree))]


def _refuse_undecided(statement: ast.Assert, before: list[ast.stmt]) -> None:
    """Raise ValueError for an assertion of which the program decides whether it holds."""
    names = _program_names([*before, statement])
    truth = statement.test
    while isinstance(truth, ast.UnaryOp) and isinstance(truth.op, ast.Not):
        truth = truth.operand

    if isinstance(truth, ast.Compare):
        decided = all(_is_of_program(side, names) for side in (truth.left, *truth.comparators))
        reason = "both of its sides are the program's"
    else:
        arguments = (
            [*truth.args, *(one.value for one in truth.keywords)] if isinstance(truth, ast.Call) else []
        )
        asks_program = isinstance(truth, ast.Call) and _is_of_program(truth.func, names)
        decided = asks_program and any(
            _is_of_program(node, names)
            for one in arguments
            for node in ast.walk(one)
            if isinstance(node, ast.Call)
        )
        reason = "the function that compares is the program's: define it before the assertion"
    if decided:
        raise ValueError(f"a test that the program decides, {reason}: {ast.unparse(statement)!r:.200}")


def _is_of_program(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is a call, an attribute or an item of what the program defines."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in names


def _free_names(statements: list[ast.stmt]) -> list[str]:
    """Return the names that statements use and nowhere bind, in their order."""
    used: dict[str, None] = {}
    bound: set[str] = set()
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used[node.id] = None
        elif isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return [name for name in used if name not in bound]


def _is_ours(name: str) -> bool:
    return name in _MODULES or name in _NAMES or hasattr(builtins, name)


def _program_names(statements: list[ast.stmt]) -> set[str]:
    """Return the names that a test expects of the program: of Python's own only where there is no other."""
    free = _free_names(statements)
    return {name for name in free if not _is_ours(name)} or set(free)


def passes(source: str, test: Test, seconds: float) -> bool:
    """Run the program ``source`` once, for at most ``seconds``, and return whether it does what is expected.

    Raises ValueError where only the program could compare a value of its own.
    """
    if seconds <= 0:
        return False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "program.py")
        path.write_text(source, encoding="utf-8", errors="replace")
        if test.source is None:
            return _prints(path, test, seconds)
        verdict, reason = _called(path, test, seconds)
    if verdict == _UNREADABLE:
        raise ValueError(f"a test has no outcome: {reason}: {test.source!r:.200}")
    return verdict == _PASSED


def _prints(program: Path, test: Test, seconds: float) -> bool:
    """Return whether a program prints what is expected, and ends without an error."""
    # Files of a temporary folder: contained code makes none in memory that no limit counts.
    with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as output_file:
        given = input_file.fileno()
        said = output_file.fileno()
        os.write(given, test.stdin.encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        process = _start([str(program)], program.parent, given, said)
        try:
            ended = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            _end(process)
        text = os.pread(said, LARGEST_OUTPUT, 0).decode("utf-8", "replace")
    return ended and _lines(text) == test.expected


def _called(program: Path, test: Test, seconds: float) -> tuple[str, str]:
    """Run a test that calls a program, each in a process of its own; return the verdict and its reason."""
    ends = time.monotonic() + seconds
    with contextlib.ExitStack() as running:
        # This process keeps none of these ends, so that each of the two sees when the other has ended.
        with contextlib.ExitStack() as handed_over:
            asks_read, asks_write = _pipe(handed_over)
            answers_read, answers_write = _pipe(handed_over)
            verdict_read, verdict_write = os.pipe()
            running.callback(os.close, verdict_read)
            handed_over.callback(os.close, verdict_write)
            process = _start(
                [remote_program.__file__, str(program), str(asks_read), str(answers_write)],
                program.parent,
                subprocess.DEVNULL,
                subprocess.DEVNULL,
                (asks_read, answers_write),
            )
            running.callback(_end, process)

            # A fork of this process: it starts at once, and no program may look into it either.
            if os.fork() == 0:
                os.close(asks_read)
                os.close(answers_write)
                _run_test(test, answers_read, asks_write, verdict_write)
        text = _read_until(verdict_read, ends)
    try:
        verdict, reason = json.loads(text)
    except ValueError:  # the time is over, or the test used up its memory
        return _FAILED, ""
    return verdict, reason


def _pipe(descriptors: contextlib.ExitStack) -> tuple[int, int]:
    """Return the ends of a pipe, which are closed with ``descriptors``."""
    ends = os.pipe()
    for end in ends:
        descriptors.callback(os.close, end)
    return ends


def _read_until(descriptor: int, ends: float) -> bytes:
    """Return what is written until the other end is closed; nothing where that takes too long."""
    text = b""
    while select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))[0]:
        data = os.read(descriptor, 1 << 16)
        if not data:
            return text
        text += data
    return b""


def _run_test(test: Test, reads: int, writes: int, verdict: int) -> None:
    """Run a test in this process, write the verdict and end."""
    outcome, reason = _FAILED, ""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        peer = Peer(reads, writes)
        try:
            assert test.source is not None
            tree = ast.parse(test.source)
            names = {"__name__": "test"} | _names_of(tree, peer)
            if test.returns:
                holds = _same(eval(compile(test.source.strip(), "test", "eval"), names), test.expected)
            else:
                exec(compile(tree, "test", "exec"), names)
                holds = True
            outcome = _PASSED if holds else _FAILED
        finally:
            if peer.reason is not None:
                outcome, reason = _UNREADABLE, peer.reason
    except BaseException:  # an assertion does not hold, or the program raised, ended or answered nonsense
        pass
    finally:
        os.write(verdict, json.dumps([outcome, reason]).encode())
        os._exit(0)


def _names_of(tree: ast.Module, peer: Peer) -> dict[str, Any]:
    """Return what a test's free names mean: the program's own, and Python's whatever the program calls so."""
    free = _free_names(tree.body)
    asked = _program_names(tree.body)
    found: dict[str, Any] = {}
    for name in free:
        if name in asked and peer.ask("defines", name):
            found[name] = peer.ask("name", name)
        elif name in _MODULES:
            found[name] = importlib.import_module(_MODULES[name])
        elif name in _NAMES:
            found[name] = _NAMES[name]
    return found


def _start(
    arguments: list[str], folder: Path, stdin: int, stdout: int, descriptors: tuple[int, ...] = ()
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
        preexec_fn=_bound_files,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started."""
    process.send_signal(signal.SIGKILL)
    process.wait()
    end_descendants()


def _bound_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bound = LARGEST_OUTPUT if hard == resource.RLIM_INFINITY else min(LARGEST_OUTPUT, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound))


def _same(value: Any, expected: Any) -> bool:
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
    """Return the lines of an output without white space at their ends and empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
