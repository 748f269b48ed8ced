"""Programs judged by tests: right, wrong, and out to deceive."""

from __future__ import annotations

import json
import re
from typing import Any

import psutil
import pytest

from megatron_rl.config.sections.rewards import CodeConfig
from megatron_rl.rewards.code import extract_program, read_tests
from megatron_rl.rewards.function import RewardResult, make_code_reward

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
    reward = make_code_reward(CodeConfig(**{"test_timeout": 60.0, "timeout": 300.0, **settings}))
    try:
        return reward.score(
            [{"prompt": "p", "response": text, "ground_truth": tests, "metadata": {}} for text in programs]
        )
    finally:
        reward.close()


@pytest.mark.slow
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


@pytest.mark.slow
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
        ["def g(x):\n    return x"],
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
    assert [test.source for test in given] == ["assert not f(1)", "assert g((1, 2)) == {3: [4]}"]


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


RESPONSES = {
    "one block": "```python\nprint(7)\n```",
    "its output behind it": "```python\nprint(7)\n```\nOutput:\n```\n7\n```\nDone.",
    "its output as text": "```py\nprint(7)\n```\n\n```text\n7\n```",
    "a terminal behind it": "```python\nprint(7)\n```\n```console\n$ python main.py\n7\n```",
    "a session behind it": "```python\nprint(7)\n```\n```pycon\n>>> 3 + 4\n7\n```",
    "a shell before it": "```sh\npip install numpy\n```\nThen:\n```python\nprint(7)\n```",
    "another language before it": "```rust\nfn main() {}\n```\n```Python3\nprint(7)\n```",
    "a first try before it": "```python\nprint(6)\n```\nNo:\n```python\nprint(7)\n```",
    "a title": '```python title="main.py"\nprint(7)\n```',
    "attributes": "```{.python .numberLines}\nprint(7)\n```",
    "no language, and output": "```\nprint(7)\n```\nOutput:\n```\nseven\n```",
    "tildes": "~~~python\nprint(7)\n~~~",
    "four backticks": "````python\nprint(7)\n````\n",
    "within a list": "1. Print:\n   ```python\n   print(7)\n   ```\n2. Done.",
    "a quotation": "> ```python\n> print(7)\n> ```",
    "carriage returns": "```python\r\nprint(7)\r\n```\r\n",
    "never closed": "So:\n```python\nprint(7)",
    "a block before it never closed": "```python\nprint(6)\nor rather\n```python\nprint(7)\n```",
    "closed on its last line": "```python\nprint(7)```",
    "opened behind words": "The program: ```python\nprint(7)\n```",
    "within Markdown": "```markdown\n```python\nprint(7)\n```\n```",
    "no fence": "print(7)",
}


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES.keys())
def test_the_program_is_found_among_what_models_write_around_it(response: str) -> None:
    assert extract_program(response).strip() == "print(7)"


def test_a_fence_in_a_docstring_stays_in_its_program() -> None:
    program = 'def f():\n    """Use it so:\n\n    ```python\n    f()\n    ```\n    """\n    return 7\n'
    assert extract_program(f"```python\n{program}```\nDone.") == program


RIGHT = {
    "a counter": (
        "from collections import Counter as C\ndef f(s): return C(s)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ),
    "a counter of the test": ("def f(s): return {'a': 2}", "assert f('aa') == Counter('aa')"),
    "an ordered dictionary": (
        "from collections import *\ndef f(): return OrderedDict(a=1)",
        "assert f() == {'a': 1}",
    ),
    "a default dictionary": (
        "from collections import *\ndef f(): return defaultdict(int, a=1)",
        "assert f() == {'a': 1}",
    ),
    "a frozen set": ("def f(): return frozenset('ab')", "assert f() == {'a', 'b'}"),
    "keys": ("def f(): return {'a': 1}.keys()", "assert f() == {'a'}"),
    "a deque": (
        "from collections import deque\ndef f(): return deque([1, 2])",
        "assert f() == deque([1, 2])",
    ),
    "a fraction": ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "assert f() == 0.5"),
    "a date": (
        "import datetime\ndef f(): return datetime.date(2024, 2, 29)",
        "assert f() == datetime.date(2024, 2, 29)",
    ),
    "infinity": ("def f(): return -float('inf')", "assert f() == -math.inf"),
    "a number of NumPy": ("import numpy as np\ndef f(x): return np.sum(x)", "assert f([1, 2]) == 3"),
    "numbers of NumPy": (
        "import numpy as np\ndef f(x): return tuple(np.cumsum(x))",
        "assert f([1, 2]) == (1, 3)",
    ),
    "an array": (
        "import numpy as np\ndef f(x): return np.array(x) * 2",
        "assert (f([1, 2]) == np.array([2, 4])).all()",
    ),
    "a huge integer": ("def f(): return 10**6000", "assert f() == 10**6000"),
    "a named tuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(): return P(1)",
        "assert f() == (1,)",
    ),
    "a generator": (
        "def f():\n    n = 0\n    while True:\n        n += 1\n        yield n",
        "g = f()\nassert [next(g), next(g)] == [1, 2]",
    ),
    "a map": ("def f(x): return map(str, x)", "assert list(f([1])) == ['1']"),
    "a match": ("import re\ndef f(s): return re.match('a', s)", "assert f('ab') and not f('b')"),
    "closeness": ("def f(): return 0.1 + 0.2", "assert math.isclose(f(), 0.3) and abs(f() - 0.3) < 1e-9"),
    "sets of both": (
        "def f(a, b): return tuple(set(a) & set(b))",
        "assert set(f((3, 4), (4, 5))) == set((4,))",
    ),
    "a method": ("class Solution:\n    def f(self, x): return x", "assert Solution().f(2) == 2"),
    "an object with state": (
        "class Jar:\n    def __init__(self): self.n = []\n    def put(self, x): self.n.append(x)",
        "jar = Jar()\njar.put(3)\nassert jar.n == [3]",
    ),
    "an attribute": (
        "from __future__ import annotations\nfrom dataclasses import *\n@dataclass\nclass P:\n    x: int",
        "p = P(1)\np.x += 1\nassert p.x == 2",
    ),
    "a change in place": ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    "a function of the test": (
        "def f(g, x): return [g(y) for y in x]",
        "assert f(lambda y: y + 1, [1]) == [2]",
    ),
    "an exception": (
        "def f(): raise KeyError('x')",
        "try:\n    f()\n    assert False\nexcept KeyError:\n    pass",
    ),
    "a name of Python's": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "a check of candidates": ("def f(x): return x", "def check(g):\n    assert g(1) == 1\ncheck(f)"),
    "a helper of the test": (
        "def f(): return 4",
        "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(), 4.5)",
    ),
}


@pytest.mark.slow
def test_a_program_is_right_where_the_assertion_holds_in_python() -> None:
    with make_code_reward(CodeConfig(test_timeout=60.0, timeout=300.0)) as reward:
        answers = reward.compute_answers([
            {"prompt": "", "response": program, "ground_truth": [test], "metadata": {}}
            for program, test in RIGHT.values()
        ])  # fmt: skip
    assert {name: answer.message or answer.reward for name, answer in zip(RIGHT, answers, strict=True)} == (
        dict.fromkeys(RIGHT, 1.0)
    )


DECEIVERS = {
    "its own isclose": (
        "class math:\n    isclose = lambda *_, **__: True\ndef f(): return 0",
        "assert math.isclose(f(), 4)",
    ),
    "its own abs": ("abs = lambda _: 0\ndef f(): return 0", "assert abs(f() - 4) < 1e-6"),
    "its own all": ("all = lambda _: True\ndef f(): return [-1]", "assert all(x > 0 for x in f())"),
    "its own isinstance": (
        "isinstance = lambda *_: True\ndef f(): return 'a'",
        "assert isinstance(f(), int)",
    ),
    "its own near": (
        "near = lambda *_: True\ndef f(): return 0",
        "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(), 4)",
    ),
    "a look at the test": ("def f(g): return g.__globals__", "assert f(lambda: 0) == 4"),
    "equality": ("class A:\n    __eq__ = lambda *_: True\ndef f(): return A()", "assert f() == 4"),
    "order": ("class A:\n    __lt__ = lambda *_: True\ndef f(): return A()", "assert f() < 4"),
    "a stopped builtin": (
        "import builtins\nbuiltins.abs = lambda _: 0\ndef f(): return 0",
        "assert abs(f() - 4) < 1",
    ),
}
UNDECIDED = {
    "a difference": ("class A:\n    __sub__ = lambda *_: 0\ndef f(): return A()", "assert abs(f() - 4) < 1"),
    "containment": ("class A:\n    __contains__ = lambda *_: True\ndef f(): return A()", "assert 4 in f()"),
    "two of its objects": (
        "from dataclasses import *\n@dataclass\nclass P:\n    x: int",
        "a, b = P(1), P(1)\nassert a == b",
    ),
    "a helper that nobody defines": ("near = lambda *_: True\ndef f(): return 0", "assert near(f(), 4)"),
}


def test_no_program_decides_its_test() -> None:
    cases = {**DECEIVERS, **UNDECIDED}
    with make_code_reward(CodeConfig(test_timeout=60.0, timeout=300.0)) as reward:
        answers = reward.compute_answers([
            {"prompt": "", "response": program, "ground_truth": [test], "metadata": {}}
            for program, test in cases.values()
        ])  # fmt: skip
    outcomes = dict(zip(cases, answers, strict=True))
    assert {name: outcomes[name].reward for name in DECEIVERS} == dict.fromkeys(DECEIVERS, 0.0)
    assert {name: outcomes[name].reason for name in UNDECIDED} == dict.fromkeys(UNDECIDED, "exception")
    assert all("test" in outcomes[name].message for name in UNDECIDED)


def test_lines_of_input_and_output_may_be_lists() -> None:
    program = "print(int(input()) + int(input()))\nprint('end')"
    tests = [{"stdin": ["1", "2"], "stdout": ["3", "end"]}]
    assert judged([program], tests).rewards.tolist() == [1.0]


@pytest.mark.slow
def test_tests_in_the_form_of_apps_call_a_function_or_a_method_of_solution() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]]}
    solution = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    programs = [ADD, solution, SUBTRACT, solution.replace("+", "-"), "def plus(a, b):\n    return a + b\n"]
    for ground_truth in (tests, json.dumps(tests)):
        assert judged(programs, ground_truth).rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]

    # An output may stand in a list of its own, and may be a list.
    lists = {"fn_name": "add", "inputs": [[[1], [2]], [[1], [2]]], "outputs": [[1, 2], [[1, 2]]]}
    assert judged([ADD], lists).rewards.tolist() == [1.0]
    assert judged([ADD], {**lists, "outputs": [[1, 2], [1]]}, scoring="share").rewards.tolist() == [0.5]


def test_tests_in_the_form_of_apps_without_a_function_compare_the_output() -> None:
    tests = {"inputs": ["1\n2\n", "5\n6\n"], "outputs": ["3\n", "11"]}
    program = "print(int(input()) + int(input()))"
    assert judged([program, "print(3)"], tests).rewards.tolist() == [1.0, 0.0]


def test_lists_of_apps_that_do_not_fit_together_are_refused() -> None:
    for wrong, message in (
        ({"inputs": [[1]], "outputs": []}, "an output for each input, got 1 and 0"),
        ({"inputs": [], "outputs": []}, "lists of inputs and outputs"),
        ({"inputs": ["1"], "outputs": [1]}, "an output without fn_name is text"),
        ({"inputs": ["1"], "outputs": [1], "fn_name": "f"}, "is the list of its arguments"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f()"}, "the name of a function"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_tests(wrong)
