"""Environments in their processes: turns, rewards, and every way to fail without harm to others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.data import reasoning_gym
from megatron_rl.data.records import load_records
from megatron_rl.environments.host import EnvironmentPool, EpisodeEnd, EpisodeRestart, TurnRequest
from megatron_rl.errors import UserError
from megatron_rl.rewards import worker

SOURCE = '''
import asyncio, os, re, time
from dataclasses import dataclass
from megatron_rl.environments.environment import Environment, StepEnvironment, Truncated

def files():
    opened = []
    try:
        while True: opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return len(opened)
    finally:
        for one in opened: os.close(one)

@dataclass
class Guess(StepEnvironment):
    low: int = 0
    async def reset(self, episode):
        self.truth, self.tries = episode.ground_truth, 0
    def step(self, response):
        self.tries += 1
        if response == str(self.truth):
            return None, 1.0, True
        return [{"role": "tool", "content": f"no {response}"}, "again"], -0.25, False, False, {}

class Way(Environment):
    """Behave as the prompt says, once the policy has had its first turn."""
    async def run(self, episode):
        said = await episode.generate()
        way = episode.prompt
        if way == "raise": raise ValueError("bad " + said)
        if way == "exit": os._exit(3)
        if way == "hang": time.sleep(1000)
        if way == "wait": await asyncio.sleep(1000)
        if way == "hold": re.match("(a+)+$", "a" * 40 + "b")  # does not let any other thread run
        if way == "slow": await asyncio.sleep(0.3)
        if way == "nan": return float("nan")
        if way == "text": return "good"
        if way == "role": episode.observe({"role": "assistant", "content": "x"})
        if way == "twice": await episode.generate()
        if way == "flood": episode.observe("x" * 10_000_000)
        if way == "none": return None
        if way == "files": return files()
        if way == "parts": return {"reward": 2, "style": len(said.tokens)}
        episode.observe("more")
        try:
            while True:
                said = await episode.generate(limit=5)
                episode.observe("more of " + said)
        except Truncated:
            return 0.5
'''


@pytest.fixture
def hosts(tmp_path: Path):
    (tmp_path / "env.py").write_text(SOURCE)
    made: list[EnvironmentPool] = []

    # The time is for a busy machine; only the test of late environments takes less.
    def make(name: str = "Way", turn_timeout: float = 60.0, **more) -> EnvironmentPool:
        config = EnvironmentConfig(f"{tmp_path / 'env.py'}:{name}", turn_timeout=turn_timeout, **more)
        made.append(EnvironmentPool(config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def values(prompt: str, truth: object = None) -> dict:
    return {"prompt": prompt, "ground_truth": truth, "metadata": {}, "seed": 1}


def play(
    hosts: EnvironmentPool,
    prompts: list[str],
    say: Callable[[int, int], str] = lambda number, turn: f"s{turn}",
) -> tuple[dict[int, EpisodeEnd], dict[int, list[list[dict[str, str]]]]]:
    """Answer every turn at once until all episodes end; return the ends, and what each one observed."""
    ends: dict[int, EpisodeEnd] = {}
    seen: dict[int, list] = {number: [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        hosts.start_episode(number, values(prompt, truth=7))
    began = time.monotonic()
    while len(ends) < len(prompts):
        assert time.monotonic() < began + 60, (ends, seen)
        for event in hosts.poll_events(0.5):
            if isinstance(event, EpisodeEnd):
                ends[event.number] = event
            elif isinstance(event, EpisodeRestart):
                seen[event.number] = []
            elif isinstance(event, TurnRequest):
                seen[event.number].append(event.messages)
                turn = len(seen[event.number])
                hosts.send_turn(event.number, say(event.number, turn), (1, 2, 3)[:turn], False)
    return ends, seen


def test_steps_in_the_form_of_gym(hosts):
    ends, seen = play(hosts("Guess", settings={"low": 3}), ["p"], lambda _, turn: str(4 + turn))
    assert ends[0] == EpisodeEnd(0, reward=0.5)
    again = [{"role": "tool", "content": "no 5"}, {"role": "user", "content": "again"}]
    assert seen[0][:2] == [[], again] and len(seen[0]) == 3


@pytest.mark.slow
def test_a_task_of_reasoning_gym_may_be_tried_again(tmp_path):
    reasoning_gym.write_data_sets(tmp_path, ["countdown"], 1, 0, seed=1)
    task = load_records(tmp_path / "train.jsonl")[0].values
    right, close, wrong = task["ground_truth"], "1 + 1", "<answer>no idea</answer>"
    said = [[right], [close, f"<answer>{right}</answer>"], [wrong, wrong, close], [close, wrong], [right]]
    name = "megatron_rl.environments.reasoning_gym:ReasoningGym"
    settings = {"attempts": 3, "feedback": "{score} of 1"}
    hosts = EnvironmentPool(EnvironmentConfig(name, settings=settings))
    ends: dict[int, EpisodeEnd] = {}
    seen: list[list] = [[] for _ in said]
    try:
        for number in range(len(said)):
            metadata = {"entry": task["entry"]} if number < 4 else {}
            hosts.start_episode(number, values(task["prompt"]) | {"metadata": metadata})
        while len(ends) < len(said):
            for event in hosts.poll_events(60):
                if isinstance(event, EpisodeEnd):
                    ends[event.number] = event
                elif isinstance(event, TurnRequest):
                    answers, turn = said[event.number], len(seen[event.number])
                    seen[event.number].append(event.messages)
                    if turn < len(answers):
                        hosts.send_turn(event.number, answers[turn], (1,), False)
                    else:
                        hosts.reject_turn(event.number)  # the row has no room
    finally:
        hosts.close()
    assert [(ends[number].reward, ends[number].components["first_attempt"]) for number in range(4)] == [
        (1.0, 1.0),
        (1.0, 0.05),
        (0.05, 0.01),
        (0.01, 0.05),
    ]
    assert ends[3].truncated and [len(turns) for turns in seen] == [1, 2, 3, 3, 1]
    assert seen[1] == [[], [{"role": "user", "content": "0.05 of 1"}]]
    assert ends[4].failure == "exception" and ends[4].reward is None
    assert "python -m megatron_rl.data.reasoning_gym" in ends[4].message


def test_rewards_of_a_run_and_the_end_of_its_turns(hosts):
    one = hosts(max_turns=3, workers=2)
    ends, seen = play(one, ["none", "parts", "go", "slow"])
    assert ends[0] == EpisodeEnd(0) and ends[1] == EpisodeEnd(1, 2.0, {"style": 1.0})
    assert ends[2] == EpisodeEnd(2, 0.5, truncated=True) and ends[3].truncated
    assert [len(turns) for turns in seen.values()] == [1, 1, 3, 3]
    one.start_episode(9, values("go"))
    while not (events := one.poll_events(1)):
        pass
    assert events == [TurnRequest(9, [], None)]
    one.reject_turn(9)  # the row has no room
    while not (events := one.poll_events(1)):
        pass
    assert events == [EpisodeEnd(9, truncated=True)]  # nobody caught it, so nothing was judged


FAILURES = {
    "raise": "exception", "nan": "not_finite", "text": "wrong_type", "role": "wrong_type",
    "twice": "wrong_type", "flood": "wrong_type", "wait": "timeout", "hang": "timeout", "hold": "timeout",
    "exit": "crashed",
}  # fmt: skip


@pytest.mark.slow
def test_a_failure_has_a_reason_and_harms_no_other_episode(hosts):
    prompts = [way for failing in FAILURES for way in (failing, "go")]
    ends, seen = play(hosts(max_turns=4, turn_timeout=2.0), prompts)
    for number, way in enumerate(prompts):
        if way == "go":
            assert ends[number] == EpisodeEnd(number, 0.5, truncated=True), ends[number]
            assert seen[number][1:] == [[{"role": "user", "content": text}] for text in
                                        ("more", "more of s2", "more of s3")]  # fmt: skip
        else:
            assert ends[number].failure == FAILURES[way], ends[number]
            assert ends[number].reward is None
    assert "bad s1" in ends[0].message and "status" in ends[prompts.index("exit")].message


@pytest.mark.slow
def test_a_process_runs_more_episodes_at_once_than_it_may_open_files(hosts):
    one, count = hosts(limits=LimitsConfig(files=64)), 200
    for number in range(count):
        one.start_episode(number, values("files"))
    asking: list = []
    until = time.monotonic() + 60
    while len(asking) < count and time.monotonic() < until:
        events = one.poll_events(0.5)
        assert all(isinstance(event, TurnRequest) for event in events), events
        asking += events
    for number in range(3):  # what they open themselves is limited all the same
        one.send_turn(number, "go")
        while not (events := one.poll_events(0.5)):
            assert time.monotonic() < until
        (ended,) = events
        assert isinstance(ended, EpisodeEnd) and ended.reward is not None and 40 < ended.reward <= 64, ended


def test_a_process_that_lies_is_not_believed(hosts, tmp_path):
    source = (
        (tmp_path / "env.py").read_text()
        + """
class Liar(Environment):
    async def run(self, episode):
        said = await episode.generate()
        if episode.prompt == "lie":
            import gc
            requests = next(o for o in gc.get_objects() if type(o).__name__ == "Requests")
            forged = {"kind": "ended", "episode": 1, "result": "scored", "reward": 1e300, "components": {}}
            requests.reply(forged)
            requests.reply({"kind": "asks", "episode": 77, "messages": [], "limit": None})
            await asyncio.sleep(9)
        return 1.0
"""
    )
    (tmp_path / "env.py").write_text(source)
    ends, _ = play(hosts("Liar"), ["lie", "go"])
    assert ends[0].failure == "crashed" and "malformed message" in ends[0].message
    assert ends[1].reward == 1.0 or ends[1].failure == "not_finite"


FORGER = """
import gc
from megatron_rl import Environment
from megatron_rl.contained.process import HEADER

class Forger(Environment):
    async def run(self, episode):
        await episode.generate()
        requests = next(item for item in gc.get_objects() if type(item).__name__ == "Requests")
        payload = episode.prompt.encode()
        requests._replies.write(HEADER.pack(len(payload)) + payload)
        requests._replies.flush()
        await episode.generate()
"""


@pytest.mark.parametrize(
    "frame",
    [
        '{"episode": [1]}',
        '{"kind": "closed", "episode": {"a": 1}}',
        f'{{"episode": {"[" * 1200}{"]" * 1200}}}',
    ],
    ids=["list", "mapping", "nested"],
)
def test_a_frame_of_any_json_is_a_protocol_error_of_its_process(tmp_path, frame):
    (tmp_path / "forger.py").write_text(FORGER)
    hosts = EnvironmentPool(EnvironmentConfig(f"{tmp_path / 'forger.py'}:Forger", turn_timeout=60.0))
    try:
        ends, _ = play(hosts, [frame])
    finally:
        hosts.close()
    assert ends[0].failure == "crashed" and "malformed message" in ends[0].message


READY_FORGER = """
import gc
from megatron_rl import Environment

requests = next(item for item in gc.get_objects() if type(item).__name__ == "Requests")
requests.reply({"kind": "ready", **FIELDS})

class Forger(Environment):
    async def run(self, episode):
        return 1.0
"""


@pytest.mark.parametrize("fields", [{"missing": 3}, {"errors": 3}, {"errors": [{"reason": "x"}]}])
def test_a_malformed_first_reply_is_an_error_of_the_environment(tmp_path, fields):
    (tmp_path / "forger.py").write_text(READY_FORGER.replace("FIELDS", repr(fields)))
    with pytest.raises(UserError, match="cannot be loaded") as raised:
        EnvironmentPool(EnvironmentConfig(f"{tmp_path / 'forger.py'}:Forger"))
    assert "malformed message" in (raised.value.got or "")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Guess", {"lo": 1}, "did you mean"),
        ("Guess", {"low": "x"}, "wrong type"),
        ("Way", {"low": 1}, "cannot be constructed from its settings"),
        ("Truncated", {}, "is not an environment"),
        ("Nothing", {}, "Nothing"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(hosts, name, settings, words):
    with pytest.raises(UserError) as raised:
        hosts(name, settings=settings)
    assert words in str(raised.value) and "rollout.environment" in str(raised.value)


def test_a_setting_that_an_environment_lacks_is_none_of_the_configuration(hosts):
    with pytest.raises(UserError, match="low") as raised:
        hosts("Guess", settings={"temperature": 1})
    assert "rollout.temperature" not in str(raised.value)


@pytest.mark.slow
def test_episodes_fail_while_no_process_can_be_started_and_later_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "RESTART_DELAYS", (0.1,))
    mark, path = tmp_path / "killed", tmp_path / "dying.py"
    path.write_text(
        "import os\nfrom megatron_rl import Environment\n"
        f"if os.path.exists({str(mark)!r}):\n    os.kill(os.getpid(), 9)\n"
        "class Dying(Environment):\n    async def run(self, episode):\n"
        "        await episode.generate()\n"
        "        return os._exit(1) if episode.prompt == 'end' else 1.0\n"
    )
    hosts = EnvironmentPool(EnvironmentConfig(f"{path}:Dying", turn_timeout=60.0))
    try:
        mark.touch()
        ends, _ = play(hosts, ["end"])
        assert ends[0].failure == "crashed"
        hosts.start_episode(5, values("a"))
        [lost] = hosts.poll_events(5.0)
        assert lost.failure == "crashed" and "could be started again" in lost.message
        mark.unlink()
        ends, _ = play(hosts, ["a", "b"])
        assert [end.reward for end in ends.values()] == [1.0, 1.0]
    finally:
        hosts.close()


HALVES = """
from megatron_rl import Environment

HALF = chr(0xD800)

class Halves(Environment):
    async def run(self, episode):
        if episode.prompt == "opens":
            episode.open([{"role": "user", "content": HALF}])
        if episode.prompt == "tools":
            tool = {"type": "function", "function": {"name": "f", "description": HALF}}
            episode.open([{"role": "user", "content": "x"}], [tool])
        await episode.generate()
        if episode.prompt == "observes":
            episode.observe("before " + HALF)
            await episode.generate()
        if episode.prompt == "names":
            return {"reward": 1.0, HALF: 1.0}
        if episode.prompt == "raises":
            raise ValueError(HALF)
        episode.observe("\U0001f600")
        await episode.generate()
        return 1.0
"""


def test_text_that_is_none_ends_its_episode_alone(tmp_path):
    (tmp_path / "halves.py").write_text(HALVES)
    hosts = EnvironmentPool(EnvironmentConfig(f"{tmp_path / 'halves.py'}:Halves", turn_timeout=60.0))
    prompts = ["opens", "tools", "observes", "names", "raises", "good"]
    try:
        ends, seen = play(hosts, prompts)
    finally:
        hosts.close()
    reasons = {prompts[number]: end.failure for number, end in ends.items()}
    assert reasons == {**dict.fromkeys(prompts[:4], "wrong_type"), "raises": "exception", "good": None}
    assert seen[5][-1] == [{"role": "user", "content": "\U0001f600"}]


def test_the_calculator_for_word_problems_computes_arithmetic_and_nothing_else():
    file = Path(__file__).parents[2] / "launch/examples/tools/word_problem.py"
    hosts = EnvironmentPool(EnvironmentConfig(f"{file}:WordProblem", turn_timeout=60.0))
    calls = ["(12 + 3) * 7", "9 / 0", "7**9**9", "1,200 - 1", "2 +"]
    prompts = ["so #### 7", *(f"First <calc>{call}</calc>" for call in calls)]
    try:
        ends, seen = play(hosts, prompts, lambda number, turn: prompts[number] if turn == 1 else "#### 7")
    finally:
        hosts.close()
    assert {end.failure for end in ends.values()} == {None}
    results = [seen[number][1][0]["content"] for number in range(1, 6)]
    refused = "not an expression that I can compute"
    assert results == ["105", refused, refused, "1199", refused]


def test_the_calculator_of_the_example_takes_a_malformed_call_for_a_wrong_answer():
    file = Path(__file__).parents[2] / "launch/examples/tools/env.py"
    hosts = EnvironmentPool(EnvironmentConfig(f"{file}:Calculator", turn_timeout=60.0))
    prompts = ["7", "12*7=", "x*7=", "=", "9" * 5000 + "*1=", "1*2*3="]
    try:
        ends, seen = play(hosts, prompts, lambda number, turn: prompts[number] if turn == 1 else "7")
    finally:
        hosts.close()
    assert {end.failure for end in ends.values()} == {None}
    assert [ends[number].reward for number in range(6)] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert seen[1][1] == [{"role": "user", "content": "84,"}]
