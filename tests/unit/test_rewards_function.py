"""Rewards in worker processes: real functions, real kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from megatron_rl.check.rewards import check_reward
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.data import DataConfig
from megatron_rl.config.sections.models import ModelConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards import worker
from megatron_rl.rewards.function import FunctionReward, RewardResult

FUNCTIONS = """
import os, random, re, subprocess, sys, time

MARK = random.Random().random()

def by_response(*, prompt, response, ground_truth, metadata, scale=1.0):
    if response == "raise":
        raise ValueError("no such answer")
    if response == "exit":
        sys.exit(3)
    if response == "crash":
        os._exit(7)
    if response == "nan":
        return float("nan")
    if response == "infinite":
        return {"reward": 1.0, "part": float("inf")}
    if response == "text":
        return "1.0"
    if response == "nothing":
        return None
    if response == "twice":
        return {"reward": 1.0, 1: 2.0, "1": 3.0}
    if response == "unnamed":
        return {"score": 1.0}
    if response == "hang":
        time.sleep(1000)
    if response == "spin":
        while True:
            pass
    if response == "child":
        subprocess.Popen(["sleep", metadata["seconds"]], start_new_session=True)
        time.sleep(1000)
    if response == "slow":
        time.sleep(0.6)
    if response == "mark":
        return MARK
    if response == "parts":
        return {"reward": 0.5, "format": 1, "length": 2.0}
    return scale * (response == ground_truth)

def numpy_scalar(**sample):
    import numpy
    return numpy.float32(0.25)

def all_it_sees(*, response, turns, tokens, **rest):
    return {"reward": 1.0, "turns": len(turns), "tokens": sum(tokens["mask"]), "others": len(rest)}

def ranked(*, group, turns, prompt, ground_truth, metadata):
    # Each response gets its place by length; the words of some break the answer, or a part of it.
    assert len(turns) == len(group)
    if "short" in group:
        return [1.0]
    if "none" in group:
        return None
    if "hang" in group:
        time.sleep(1000)
    places = [sum(len(other) < len(one) for other in group) for one in group]
    return [ValueError("not this one") if one == "error" else place for one, place in zip(group, places)]

async def waits(*, prompt, response, ground_truth, metadata):
    import asyncio
    global OPEN, MOST
    if response == "most":
        return MOST
    OPEN += 1
    MOST = max(MOST, OPEN)
    try:
        if response == "block":
            time.sleep(1000)
        if response == "quick":
            return 1.0
        if response == "hold":
            await asyncio.sleep(0.02)
            re.match("(a+)+$", "a" * 40 + "b")  # lets no other thread run
        if response == "exit":
            sys.exit(3)
        if response == "crash":
            await asyncio.sleep(0.05)
            os._exit(7)
        if response == "cancel":
            raise asyncio.CancelledError
        if response == "stubborn":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        await asyncio.sleep(1000 if response == "hang" else 0.1)
    finally:
        OPEN -= 1
    return 1.0

OPEN = MOST = 0
not_a_function = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return str(path)


def score(
    reward: FunctionReward, responses: list[str], truth: str = "4", metadata: dict | None = None
) -> RewardResult:
    return reward.score(samples(responses, truth, metadata))


def samples(responses: list[str], truth: str = "4", metadata: dict | None = None) -> list[dict]:
    rest = {"prompt": "2+2=", "ground_truth": truth, "metadata": metadata or {}}
    return [{"response": response, **rest} for response in responses]


def make(file: str, name: str = "by_response", **settings) -> FunctionReward:
    return FunctionReward(RewardConfig(f"{file}:{name}", **{"timeout": 1.5, **settings}))


def test_values_arguments_and_components(file: str) -> None:
    with make(file, arguments={"scale": 2.0}) as reward:
        result = score(reward, ["4", "5", "parts"])
    assert result.rewards.tolist() == [2.0, 0.0, 0.5]
    assert result.valid.all() and not result.failures
    assert result.components["format"].isnan().tolist() == [True, True, False]
    assert result.components["length"][2] == 2.0
    with make(file, "numpy_scalar", timeout=60.0) as reward:  # it imports NumPy in the call
        assert score(reward, ["x"]).rewards.tolist() == [0.25]


@pytest.mark.slow
def test_every_failure_is_invalid_with_its_reason_and_the_rest_stand(file: str) -> None:
    reasons = {
        "raise": "exception",
        "exit": "exception",
        "crash": "crashed",
        "nan": "not_finite",
        "infinite": "not_finite",
        "text": "wrong_type",
        "nothing": "wrong_type",
        "unnamed": "wrong_type",
        "twice": "wrong_type",
        "hang": "timeout",
        "spin": "timeout",
    }
    responses = [item for name in reasons for item in ("4", name)] + ["4"]
    with make(file, workers=2, timeout=1.0) as reward:
        result = score(reward, responses)
        again = score(reward, ["4"] * 5)
    assert {responses[failure.row]: failure.reason for failure in result.failures} == reasons
    assert result.valid.tolist() == [response == "4" for response in responses]
    assert result.rewards[result.valid].eq(1).all()
    assert result.rewards[~result.valid].isnan().all()
    messages = {responses[failure.row]: failure.message for failure in result.failures}
    assert "no such answer" in messages["raise"]
    assert "status 7" in messages["crash"]
    assert "longer than 1 s" in messages["hang"]
    values = result.metrics().values()
    assert values["reward/invalid_timeout"] == pytest.approx(2 / len(responses))
    assert again.valid.all(), "the replaced workers answer"


@pytest.mark.slow
def test_the_limit_is_per_sample_not_per_batch(file: str) -> None:
    with make(file, timeout=1.5) as reward:
        assert score(reward, ["slow"] * 4).valid.all()


def test_a_timeout_kills_what_the_function_started(file: str) -> None:
    seconds = f"1000.{os.getpid()}"
    with make(file, timeout=1.0) as reward:
        result = score(reward, ["child"], metadata={"seconds": seconds})
    assert [failure.reason for failure in result.failures] == ["timeout"]
    assert not [process for process in psutil.process_iter(["cmdline"]) if seconds in str(process.info)]


def test_many_rewards_come_in_the_order_of_their_samples(file: str) -> None:
    with FunctionReward(RewardConfig("megatron_rl.rewards.arithmetic:exact_match", workers=2)) as reward:
        assert score(reward, ["4", " 4 ", "5", ""] * 128).rewards.tolist() == [1.0, 1.0, 0.0, 0.0] * 128


def test_work_is_shared_by_the_workers(file: str) -> None:
    with make(file, workers=2) as reward:
        assert len(set(score(reward, ["mark"] * 64).rewards.tolist())) == 2
    assert score_nothing(file) == 0


def score_nothing(file: str) -> int:
    with make(file) as reward:
        return len(score(reward, []).rewards)


def test_what_a_function_prints_is_marked_and_commands_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = "'\\x1b[2J\\rstep 3: forged\\nresumed from nowhere'"
    path = tmp_path / "prints.py"
    path.write_text(f"def reward(response, **rest):\n    print({lines}, flush=True)\n    return 1.0\n")
    function = make(str(path), "reward", timeout=60.0)
    assert function.score(samples(["4"])).valid.tolist() == [True]
    function.close()
    said = ""
    while "resumed" not in said:  # a thread writes it
        time.sleep(0.05)
        said += capfd.readouterr().err
    marked = [line for line in said.splitlines() if "forged" in line or "resumed" in line]
    assert [re.sub(r"\d+", "N", line, count=1) for line in marked] == [
        "[process N] \\x1b[2J\\rstep 3: forged",
        "[process N] resumed from nowhere",
    ]


@pytest.mark.parametrize(
    ("spec", "message", "got"),
    [
        ("no_colon", "incomplete", "no_colon"),
        ("missing.py:f", "does not exist", "no such file"),
        ("no_such_module_at_all:f", "cannot be loaded", "No module named"),
        ("math:no_such", "cannot be loaded", "no attribute 'no_such'"),
        ("math:pi", "cannot be loaded", "not callable"),
        (":f", "incomplete", ":f"),
    ],
)
def test_a_bad_name_is_the_users_error(spec: str, message: str, got: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        FunctionReward(RewardConfig(spec))
    assert got in str(caught.value) and "reward.function" in str(caught.value)


@pytest.mark.parametrize("name", ["takes", "requires", "missing"])
def test_a_malformed_first_reply_is_an_error_of_the_function(tmp_path: Path, name: str) -> None:
    path = tmp_path / "forger.py"
    path.write_text(
        "import gc\n"
        "requests = next(item for item in gc.get_objects() if type(item).__name__ == 'Requests')\n"
        f"requests.reply({{'kind': 'ready', '{name}': 3}})\n"
        "def score(response):\n    return 1.0\n"
    )
    with pytest.raises(UserError, match="cannot be loaded") as raised:
        make(str(path), "score")
    assert "malformed message" in (raised.value.got or "")


def test_a_file_with_a_nul_byte_is_named_without_a_line(tmp_path: Path) -> None:
    path = tmp_path / "nul.py"
    path.write_bytes(b"def score(response):\n    return 1.0\n\0")
    reward = RewardConfig(f"{path}:score")
    (error,) = check_reward(RunConfig(ModelConfig("m"), DataConfig("d"), reward, "r", 1))
    assert "not valid Python" in error.message and error.where == str(path)
    assert "null bytes" in (error.got or "")


def test_an_error_in_the_users_file_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def reward(**_):\n    return (\n")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        FunctionReward(RewardConfig(f"{path}:reward"))
    assert "SyntaxError" in str(caught.value) and "broken.py" in str(caught.value)


def test_settings_out_of_range(file: str) -> None:
    for settings in ({"timeout": 0.0}, {"workers": 0}):
        with pytest.raises(UserError, match="out of range"):
            make(file, **settings)


def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 3.0\n")
    path = tmp_path / "uses.py"
    path.write_text("from neighbour import VALUE\ndef reward(**_):\n    return VALUE\n")
    with FunctionReward(RewardConfig(f"{path}:reward")) as reward:
        assert score(reward, ["x"]).rewards.tolist() == [3.0]


@pytest.mark.slow
def test_workers_end_with_a_trainer_that_was_killed(file: str, tmp_path: Path) -> None:
    program = tmp_path / "trainer.py"
    program.write_text(
        textwrap.dedent(f"""
        import time
        from megatron_rl.config.sections.rewards import RewardConfig
        from megatron_rl.rewards.function import FunctionReward
        reward = FunctionReward(RewardConfig({file + ":by_response"!r}, timeout=500.0))
        print("ready", flush=True)
        reward.score([{{"prompt": "p", "response": "spin", "ground_truth": "t", "metadata": {{}}}}])
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    trainer = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"
    time.sleep(0.3)
    workers = psutil.Process(trainer.pid).children(recursive=True)
    assert workers
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive


def test_close_is_final(file: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    reward = make(file)
    workers = set(psutil.Process().children(recursive=True)) - before
    assert workers and score(reward, ["4"]).valid.all()
    reward.close()
    reward.close()
    assert not [worker for worker in workers if worker.is_running()]
    with pytest.raises(RuntimeError, match="closed"):
        score(reward, ["4"])


def test_a_function_sees_what_it_names(file: str) -> None:
    turns = [{"role": "policy", "content": "4"}, {"role": "environment", "content": "no"}]
    tokens = {"prompt": [1], "response": [2, 3], "mask": [True, False], "log_probs": [-0.5, 0.0]}
    with make(file, "all_it_sees") as reward:
        assert reward.optional_fields == {"turns", "tokens"}
        result = reward.score([{**sample, "turns": turns, "tokens": tokens} for sample in samples(["4"])])
    assert {name: values.tolist() for name, values in result.components.items()} == {
        "turns": [2.0],
        "tokens": [1.0],
        "others": [3.0],
    }
    with make(file) as reward:
        assert not reward.optional_fields


def test_a_group_is_judged_in_one_call_and_each_response_gets_its_reward_or_reason(file: str) -> None:
    responses = ["333", "1", "error", "22", "short", "x", "none", "55555", "hang", "y"]
    groups = [0, 1, 0, 0, 2, 2, 3, 1, 4, 4]
    with make(file, "ranked", timeout=1.0, workers=2) as reward:
        rows = [
            {**sample, "turns": [], "group": group}
            for sample, group in zip(samples(responses), groups, strict=True)
        ]
        result = reward.score(rows)
    reasons = {responses[failure.row]: failure.reason for failure in result.failures}
    assert reasons == {
        "error": "exception",
        "short": "wrong_type",
        "x": "wrong_type",
        "none": "wrong_type",
        "hang": "timeout",
        "y": "timeout",
    }
    assert result.rewards[result.valid].tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_coroutines_run_together_and_fail_alone(file: str) -> None:
    with make(file, "waits", timeout=1.0, concurrency=8) as reward:
        assert score(reward, ["4"] * 32).valid.all()
        assert score(reward, ["most"]).rewards.tolist() == [8.0]
    ways = {
        "hang": "timeout",
        "stubborn": "timeout",
        "block": "timeout",
        "exit": "exception",
        "cancel": "exception",
        "crash": "crashed",
    }
    responses = [response for way in ways for response in ("4", way)]
    with make(file, "waits", timeout=1.0, concurrency=4) as reward:
        result = score(reward, responses)
    assert {responses[failure.row]: failure.reason for failure in result.failures} == ways
    assert result.rewards[result.valid].tolist() == [1.0] * len(ways)


@pytest.mark.slow
def test_a_process_that_does_not_read_does_not_hold_up_the_trainer(file: str) -> None:
    large = {"metadata": {"text": "x" * 2**20}}
    with make(file, "waits", timeout=1.0, concurrency=2) as reward:
        result = reward.score([{**sample, **large} for sample in samples(["hold"] + ["quick"] * 60)])
    assert result.valid.tolist() == [False] + [True] * 60


def test_rewards_are_float32_tensors(file: str) -> None:
    with make(file) as reward:
        result = score(reward, ["4", "raise"])
    assert result.rewards.dtype == torch.float32 and result.valid.dtype == torch.bool


def test_a_function_is_given_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text(
        "def score(response, ground_truth):\n    return float(response == ground_truth)\n"
        "async def later(*, metadata, bonus=1):\n    return bonus + len(metadata)\n"
        "class Scorer:\n    def __call__(self, response):\n        return 2.0\n"
        "scorer = Scorer()\n"
        "def odd(response, completion, answer=3):\n    return 0.0\n"
        "def fixed(response, bonus=0, /, *, ground_truth):\n"
        "    return bonus + float(response == ground_truth)\n"
        "async def fixed_later(response, ground_truth, /):\n    return float(response == ground_truth)\n"
    )
    for name, arguments, rewards in (
        ("score", {}, [1.0, 0.0]),
        ("later", {"bonus": 3}, [3.0, 3.0]),
        ("scorer", {}, [2.0] * 2),
        ("fixed", {}, [1.0, 0.0]),
        ("fixed", {"bonus": 3}, [4.0, 3.0]),
        ("fixed_later", {}, [1.0, 0.0]),
    ):
        with make(str(path), name, arguments=arguments) as reward:
            assert score(reward, ["4", "5"]).rewards.tolist() == rewards
    for name, arguments, words in (
        ("odd", {}, "requires completion"),
        ("score", {"bonus": 3}, "does not take bonus"),
    ):
        with pytest.raises(UserError, match="does not fit the arguments") as caught:
            make(str(path), name, arguments=arguments)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "hints"),
    [
        (
            "data_source, solution_str, ground_truth, extra_info=None",
            ['`data_source` is `metadata["data_source"]` here', "`solution_str` is `response` here"],
        ),
        (
            "prompts, completions, **kwargs",
            ["`prompts` is `prompt` here", "`completions` is `response`, one text, or `group`, "],
        ),
    ],
)
def test_parameters_of_other_projects_are_answered_with_ours(
    tmp_path: Path, parameters: str, hints: list[str]
) -> None:
    path = tmp_path / "ported.py"
    path.write_text(f"def score({parameters}):\n    return 1.0\n")
    with pytest.raises(UserError, match="does not fit the arguments") as caught:
        make(str(path), "score")
    reward = RewardConfig(f"{path}:score")
    (checked,) = check_reward(RunConfig(ModelConfig("m"), DataConfig("d"), reward, "r", 1))
    for fix in (caught.value.fix, checked.fix):
        assert all(hint in (fix or "") for hint in hints), fix


def test_a_function_that_yields_is_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "yielding.py"
    path.write_text(
        "def score(response):\n    yield 1.0\n"
        "async def later(response):\n    yield 1.0\n"
        "class Scorer:\n    def __call__(self, response):\n        yield 1.0\n"
        "scorer = Scorer()\n"
    )
    for name in ("score", "later", "scorer"):
        with pytest.raises(UserError, match="yields its values"):
            make(str(path), name)


@pytest.fixture
def dying(tmp_path: Path) -> tuple[str, Path]:
    """Return a file whose processes are killed while they load as long as another file is there."""
    mark, path = tmp_path / "killed", tmp_path / "dying.py"
    path.write_text(
        f"import os\nif os.path.exists({str(mark)!r}):\n    os.kill(os.getpid(), 9)\n"
        "def reward(response):\n    return os._exit(1) if response == 'end' else 1.0\n"
    )
    return str(path), mark


@pytest.mark.slow
def test_a_process_killed_while_it_loads_is_started_again(dying: tuple[str, Path]) -> None:
    file, mark = dying
    with make(file, "reward", timeout=60.0) as reward:
        mark.touch()
        healed = threading.Timer(0.8, mark.unlink)
        healed.start()
        result = score(reward, ["a", "end", "b", "c"])
        healed.join()
    assert [failure.row for failure in result.failures] == [1]
    assert result.rewards[result.valid].tolist() == [1.0] * 3


def test_samples_are_invalid_while_no_process_can_be_started(
    dying: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RESTART_DELAYS", (0.1,))
    file, mark = dying
    with make(file, "reward", timeout=60.0) as reward:
        mark.touch()
        result = score(reward, ["a", "end", "b", "c"])
        assert [failure.row for failure in result.failures] == [1, 2, 3]
        assert {failure.reason for failure in result.failures} == {"crashed"}
        assert "could be started again" in result.failures[-1].message
        mark.unlink()
        assert score(reward, ["a", "b"]).rewards.tolist() == [1.0, 1.0]


def test_samples_of_a_round_that_begins_without_workers_are_invalid(
    dying: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RESTART_DELAYS", ())
    file, mark = dying
    with make(file, "reward", timeout=60.0) as reward:
        mark.touch()
        assert not score(reward, ["end"]).valid.any()

        # No worker is left after the first round, and none can be started at the beginning of the second.
        result = score(reward, ["a", "b", "c"])
        assert [failure.row for failure in result.failures] == [0, 1, 2]
        assert {failure.reason for failure in result.failures} == {"crashed"}
        assert "could be started again" in result.failures[0].message
        assert len(score(reward, []).rewards) == 0


def test_text_that_is_none_makes_its_sample_invalid(tmp_path: Path) -> None:
    path = tmp_path / "halves.py"
    path.write_text(
        "def score(group):\n"
        "    return [{'reward': 1.0, one: 2.0} for one in ('a', 'b\\ud800', '\\U0001f600')]\n"
        "def write(response):\n"
        "    return [{'role': 'user', 'content': chr(0xDFFF) if response == '5' else 'x'}]\n"
    )
    with make(str(path), "score") as reward:
        result = reward.score([{**sample, "group": 0} for sample in samples(["4", "5", "6"])])
    assert [failure.row for failure in result.failures] == [1]
    assert "surrogate" in result.failures[0].message
    assert {"a", "\U0001f600"} == set(result.components)
    with FunctionReward(RewardConfig(f"{path}:write"), returns_text=True) as writer:
        assert [answer.reason for answer in writer.compute_answers(samples(["4", "5"]))] == [
            None,
            "wrong_type",
        ]
