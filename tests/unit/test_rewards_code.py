"""Programs judged by tests: right, wrong, and out to deceive."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest

from megatron_rl.config.sections.rewards import CodeConfig
from megatron_rl.rewards.code import read_tests
from megatron_rl.rewards.function import RewardResult, code_reward

ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
CALLS = [{"call": "add(1, 2)", "returns": 3}, "assert add(2, 2) == 4"]
PROGRAMS = {
    "right": (ADD, 1.0),
    "fenced": (f"First:\n```\nx\n```\nthen\n```python\n{ADD}```\nDone.", 1.0),
    "noisy": (ADD + "print(3)\n", 1.0),
    "wrong": (SUBTRACT, 0.0),
    "nothing": ("", 0.0),
    "no Python": ("I think the answer is 3.", 0.0),
    "ends early": ("import os\nos._exit(0)", 0.0),
    "exits": ("raise SystemExit(0)", 0.0),
    "equal to all": (
        "class A:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return A()",
        0.0,
    ),
    "prints a verdict": (
        "import os\nfor fd in range(1, 30):\n    try:\n        os.write(fd, b'True')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        0.0,
    ),
    "writes to the worker": (
        SUBTRACT + "import os\nfor fd in range(30):\n    try:\n"
        "        open(f'/proc/{os.getppid()}/fd/{fd}', 'wb').write(b'x' * 99)\n"
        "    except OSError:\n        pass",
        0.0,
    ),
    "too much memory": (f"held = bytearray(3 * 2**30)\n{ADD}", 0.0),
    "on the network": (f"import socket\nsocket.create_connection(('127.0.0.1', 1))\n{ADD}", 0.0),
    "leaves a daemon": (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execvp('sleep', ['sleep', '1234.5'])\n    os._exit(0)\n{ADD}",
        1.0,
    ),
}
ENDLESS = {
    "endless": "while True:\n    pass",
    "floods": "import sys\nwhile True:\n    sys.stdout.write('x' * 2**16)",
}


def judged(programs: list[str], tests: Any, **settings: Any) -> RewardResult:
    # Programs that end have time to, also where other work leaves them little of the processor.
    reward = code_reward(CodeConfig(**{"test_timeout": 60.0, "timeout": 300.0, **settings}))
    try:
        return reward.score(
            [{"prompt": "p", "response": text, "ground_truth": tests, "metadata": {}} for text in programs]
        )
    finally:
        reward.close()


def test_programs_get_what_they_earn_and_nothing_stays() -> None:
    result = judged([program for program, _ in PROGRAMS.values()], CALLS, workers=2)
    assert not result.failures
    assert dict(zip(PROGRAMS, result.rewards.tolist(), strict=True)) == {
        name: reward for name, (_, reward) in PROGRAMS.items()
    }
    endless = judged(list(ENDLESS.values()), CALLS, workers=2, test_timeout=2.0)
    assert not endless.failures and endless.rewards.tolist() == [0.0] * len(ENDLESS)
    left = [
        process for process in psutil.process_iter(["cmdline"]) if "1234.5" in (process.info["cmdline"] or [])
    ]
    assert not left


def test_a_program_that_ends_the_worker_is_invalid_and_harms_no_other() -> None:
    kills = "import os\nos.kill(os.getppid(), 9)"
    bomb = "import os\nwhile True:\n    os.fork()"
    result = judged([ADD, kills, ADD, bomb, ADD], CALLS)
    assert result.rewards[result.valid].tolist() == [1.0, 1.0, 1.0]
    assert [(failure.row, failure.reason) for failure in result.failures] == [(1, "crashed"), (3, "limit")]


def test_output_is_compared_and_a_share_is_told() -> None:
    program = "import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')"
    tests = json.dumps([
        {"stdin": "1 2", "stdout": "3\n"},
        {"stdin": "5", "stdout": "5"},
        {"stdin": "", "stdout": "1"},
        {"stdin": "x", "stdout": "0"},
    ])  # fmt: skip
    result = judged([program], tests)
    assert result.rewards.tolist() == [0.0] and result.components["passed"].tolist() == [0.25 * 2]
    assert judged([program], tests, scoring="share").rewards.tolist() == [0.5]
    slow = judged(["import time\ntime.sleep(30)"], tests, scoring="share", timeout=1.0)
    assert slow.rewards.tolist() == [0.0], "the time of all tests is bounded"


def test_tests_that_cannot_be_read_are_a_failure_and_not_a_zero() -> None:
    bad = [
        "nonsense",
        None,
        [],
        [{"stdin": "1"}],
        ["assert f() == g()"],
        ["assert f() > 1"],
        [3],
        {"tests": []},
    ]
    for ground_truth in bad:
        with pytest.raises(ValueError, match=r"test|assertion"):
            read_tests(ground_truth)
    result = judged([ADD], "nonsense")
    assert [failure.reason for failure in result.failures] == ["exception"]
    assert "an assertion is" in result.failures[0].message
    given = read_tests("assert not f(1)\nassert g((1, 2)) == {3: [4]}\n")
    assert [(test.given, test.expected) for test in given] == [("f(1)", False), ("g((1, 2))", {3: [4]})]


def test_values_are_compared_as_json_has_them() -> None:
    program = "def f(x):\n    return {'t': (1, 2), 's': {1: True}, 'f': 0.5, 'n': None}[x]"
    tests = [
        {"call": "f('t')", "returns": [1, 2]},
        {"call": "f('s')", "returns": {"1": True}},
        {"call": "f('f')", "returns": 0.5},
        {"call": "f('n')", "returns": None},
        "assert f('t') == (1, 2)",
    ]
    assert judged([program], tests).rewards.tolist() == [1.0]
