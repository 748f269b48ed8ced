"""Programs in responses, judged by tests: the reward function behind ``reward.code``, run contained.

A program is run anew for each test, in a process below the worker. What is expected never leaves the worker,
which compares: a program that prints a verdict, ends early or changes the interpreter has gained nothing. The
worker keeps its memory and pipes from it, and whatever it leaves running is ended after each test. It sees
the files that contained code sees, which the data are not among unless ``limits.read`` names them.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.contained.confinement import end_descendants

LARGEST_OUTPUT = 2**20
"""Bytes that a program may print in a test, and that any file of it may have."""
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_FENCED = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_CALL = """
import os, sys
source, call, result = sys.argv[1:]
names = {"__name__": "program"}
exec(compile(open(source, encoding="utf-8").read(), "program.py", "exec"), names)
value = repr(eval(call, names))
os.write(int(result), value.encode())
"""


class Test(NamedTuple):
    """Say what a program is given, text on standard input or an expression, and what is expected of it."""

    given: str
    expected: Any
    called: bool


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

    Raises ValueError for a ground truth that is no list of tests.
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
    """Return the last fenced block of a response, or all of it.

    Example:
        >>> program_of("So:\\n```python\\nprint(1)\\n```\\nDone.")
        'print(1)\\n'
    """
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def read_tests(ground_truth: Any) -> list[Test]:
    """Return the tests of a ground truth: a list, or JSON text of one; raises ValueError for anything else.

    Example:
        >>> read_tests(["assert add(1, 2) == 3"])
        [Test(given='add(1, 2)', expected=3, called=True)]
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            ground_truth = [line for line in ground_truth.splitlines() if line.strip()]
    if not isinstance(ground_truth, list) or not ground_truth:
        raise ValueError(f"expected a list of tests as ground truth, got {ground_truth!r:.200}")
    return [_test(entry) for entry in ground_truth]


def _test(entry: Any) -> Test:
    if isinstance(entry, str):
        return _asserted(entry)
    if isinstance(entry, Mapping) and isinstance(entry.get("call"), str) and "returns" in entry:
        return Test(entry["call"], entry["returns"], True)
    if isinstance(entry, Mapping) and isinstance(entry.get("stdout"), str):
        return Test(str(entry.get("stdin") or ""), _lines(entry["stdout"]), False)
    raise ValueError(
        f"a test is {{stdin, stdout}}, {{call, returns}} or 'assert f(x) == y', got {entry!r:.200}"
    )


def _asserted(text: str) -> Test:
    """Return what an assertion calls and expects, so that no program can decide how they compare."""
    try:
        statement, *others = ast.parse(text.strip()).body
        assert not others and isinstance(statement, ast.Assert)
        match statement.test:
            case ast.Compare(left, [ast.Eq()], [right]):
                return Test(ast.unparse(left), ast.literal_eval(right), True)
            case ast.UnaryOp(ast.Not(), ast.Call() as call):
                return Test(ast.unparse(call), False, True)
            case ast.Call() as call:
                return Test(ast.unparse(call), True, True)
    except (SyntaxError, ValueError, AssertionError, RecursionError):
        pass
    raise ValueError(f"an assertion is 'assert f(x) == y' with y a literal, got {text!r:.200}")


def passes(source: str, test: Test, seconds: float) -> bool:
    """Run the program ``source`` once, for at most ``seconds``, and say whether it does what is expected."""
    if seconds <= 0:
        return False
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        program = Path(folder, "program.py")
        program.write_text(source, encoding="utf-8", errors="replace")
        with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as output_file:
            given, said = input_file.fileno(), output_file.fileno()
            command = [sys.executable, "-I", str(program)]
            if test.called:
                command = [sys.executable, "-I", "-c", _CALL, str(program), test.given, str(said)]
            else:
                os.write(given, test.given.encode("utf-8", "replace"))
                os.lseek(given, 0, os.SEEK_SET)
            ended = _run(command, folder, given, subprocess.DEVNULL if test.called else said, said, seconds)
            text = os.pread(said, LARGEST_OUTPUT, 0).decode("utf-8", "replace")
    if not ended:
        return False
    return _equal(text, test.expected) if test.called else _lines(text) == test.expected


def _run(command: list[str], folder: str, given: int, printed: int, said: int, seconds: float) -> bool:
    """Return whether a program ends by itself, and without an error; nothing of it is left running."""
    process = subprocess.Popen(
        command,
        stdin=given,
        stdout=printed,
        stderr=subprocess.DEVNULL,
        pass_fds=(said,),
        cwd=folder,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=_bound_files,
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        end_descendants()


def _bound_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bound = LARGEST_OUTPUT if hard == resource.RLIM_INFINITY else min(LARGEST_OUTPUT, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound))


def _equal(text: str, expected: Any) -> bool:
    """Say whether a value is the expected one, read from what ``repr`` makes of it; tuples may be lists."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return (type(value) is type(expected) and value == expected) or _plain(value) == _plain(expected)


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it, as far as it can."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _lines(text: str) -> list[str]:
    """Return the lines of an output without white space at their ends and empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
