"""Rewards from a real server on this machine: slow, dead, limiting, lying, and one that does its work."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.check.rewards import check_servers, unresponsive_server_warnings
from megatron_rl.config.engines import ENGINES
from megatron_rl.config.load import dump, load_text, without_secrets
from megatron_rl.config.sections.rewards import HttpRewardConfig, JudgeConfig, RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.progress import progress_text
from megatron_rl.rewards import servers
from megatron_rl.rewards.function import RewardResult
from megatron_rl.rewards.servers import HttpReward, JudgeReward

SECRET = "s3cret-of-the-server"


class Scorer(ThreadingHTTPServer):
    """Answer as the response that is to be judged says."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.tries: Counter[str] = Counter()
        self.running = self.most = 0
        self.broken = False
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Scorer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(404, b"")

    def do_POST(self) -> None:
        server = self.server
        with server.lock:
            server.times.append(time.monotonic())
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with server.lock:
                server.running -= 1

    def reply(self, body: dict[str, Any]) -> None:
        server = self.server
        judging = "messages" in body
        word = body["messages"][-1]["content"] if judging else body["samples"][0]["response"]
        with server.lock:
            server.seen.append(body)
            server.headers.append(dict(self.headers))
            server.tries[word] += 1
            tries = server.tries[word]
        if word == "slow":
            time.sleep(1.5)
        if word == "busy":
            time.sleep(0.1)
        if word in ("garbage", "cut"):
            said = b"\x00\x01 is no HTTP" if word == "garbage" else b"HTTP/1.1 200 OK\r\nContent-Length: 9"
            self.wfile.write(said + b"\r\n\r\n")
            self.close_connection = True
            return
        if word == "drip":  # a byte now and then, which no time-out of a single read would notice
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(30):
                self.wfile.write(b" ")
                time.sleep(0.1)
            return
        if server.broken or (word == "sometimes" and tries < 3):
            self.answer(500, b"the disk is full")
        elif word.startswith("limit") and tries < 2:
            self.answer(429, b"", {"Retry-After": "0.4"})
        elif word == "always limited":
            self.answer(429, b"", {"Retry-After": "1e9"})
        elif word == "denied":
            self.answer(401, f"not with {self.headers['Authorization']}".encode())
        elif word == "moved":
            self.answer(307, b"", {"Location": server.url + "/elsewhere"})
        elif word == "page":
            self.answer(200, b"<html>sign in</html>")
        elif word == "deep":
            self.answer(200, b"[" * 100_000)
        elif word == "huge":
            self.answer(200, b'{"rewards": [' + b" " * 5_000_000 + b"1]}")
        elif judging:
            said = f"{word}{' ' if word == 'on one line' else chr(10)}Score: 0.5"
            self.answer(200, json.dumps({"choices": [{"message": {"content": said}}]}).encode())
        else:
            rewards = [self.reward(sample) for sample in body["samples"]]
            text = json.dumps(
                {"rewards": rewards[word == "few" :], "note": "a\u00a0b\u3000"}, ensure_ascii=False
            )
            self.answer(200, f"{text}\r\n".encode())

    def reward(self, sample: dict[str, Any]) -> Any:
        special = {
            "nan": float("nan"),
            "large": 1e300,
            "text": "1.0",
            "nothing": None,
            "error": {"error": "the judge is out\x1b[2J"},
            "parts": {"reward": 0.5, "style": 2},
            "echo": {"score": self.headers["Authorization"]},
        }
        truth = sample.get("ground_truth", "4")
        return special.get(sample["response"], float(sample["response"] == truth))

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server() -> Iterator[Scorer]:
    made = Scorer()
    yield made
    made.stop()


def samples(*responses: str) -> list[dict[str, Any]]:
    rest = {"prompt": "2+2=", "ground_truth": "4", "metadata": {}}
    return [{"response": response, **rest} for response in responses]


def config(server: Scorer, **more: Any) -> HttpRewardConfig:
    settings = {"timeout": 1.0, "retries": 2, "backoff": 0.02, "longest_wait": 0.5, "open_after": 100}
    return HttpRewardConfig(url=server.url, **{**settings, **more})


def reasons(responses: list[str], result: RewardResult) -> dict[str, str]:
    assert result.rewards[~result.valid].isnan().all(), "a failure is never a number"
    return {responses[failure.row]: failure.reason for failure in result.failures}


@pytest.mark.slow
def test_every_failure_has_its_reason_and_its_neighbours_stand(server: Scorer, monkeypatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", f"Bearer {SECRET}")
    expected = {
        "slow": "timeout",
        "drip": "timeout",
        "garbage": "nonsense",
        "cut": "unreachable",
        "always limited": "rate_limited",
        "denied": "status",
        "moved": "status",
        "page": "nonsense",
        "deep": "nonsense",
        "huge": "nonsense",
        "few": "nonsense",
        "nan": "not_finite",
        "large": "not_finite",
        "text": "wrong_type",
        "nothing": "wrong_type",
        "echo": "wrong_type",
        "error": "reported",
    }
    responses = ["4", *expected, "5", "parts"]
    reward = HttpReward(config(server, headers={"Authorization": "SCORER_TOKEN"}, concurrency=32))
    result = reward.score(samples(*responses))
    assert reasons(responses, result) == expected
    assert result.rewards[result.valid].tolist() == [1.0, 0.0, 0.5]
    assert result.components["style"][-1] == 2.0
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {SECRET}"}
    assert all(SECRET not in failure.message and failure.message for failure in result.failures)
    words = {responses[failure.row]: failure.message for failure in result.failures}
    assert "out\\x1b[2J" in words["error"] and "401" in words["denied"] and "sign in" in words["page"]
    assert server.tries["denied"] == server.tries["page"] == 1, (
        "what another try cannot mend is not tried again"
    )
    assert server.tries["slow"] == server.tries["garbage"] == 3
    values = result.metrics().values()
    assert values["reward/invalid_timeout"] == pytest.approx(2 / len(responses))
    # Five responses fail twice more; on a busy machine one of the others may wait too long once.
    assert values["reward/http/retries"] >= 2 * 5 / len(responses) - 1e-6


def test_retries_pauses_and_bounds_of_requests(server: Scorer) -> None:
    reward = HttpReward(config(server, concurrency=3))
    result = reward.score(samples("sometimes", *["busy"] * 9))
    assert result.valid.all() and server.most == 3 and server.tries["sometimes"] == 3
    begun = time.monotonic()
    assert reward.score(samples(*(f"limit {number}" for number in range(3)), "4")).valid.all()
    assert time.monotonic() - begun > 0.35, "the server's pause holds for all"
    server.times.clear()
    assert HttpReward(config(server, rate=20.0)).score(samples(*["4"] * 6)).valid.all()
    gaps = [later - sooner for sooner, later in zip(server.times, server.times[1:], strict=False)]
    assert sum(gaps) > 0.2, "6 requests at 20 a second"


def test_each_request_to_a_server_shows_that_the_job_makes_progress(server: Scorer) -> None:
    before = progress_text()
    assert HttpReward(config(server)).score(samples("4")).valid.all()
    answered = progress_text()
    assert answered != before
    assert not HttpReward(config(server, retries=0)).score(samples("garbage")).valid.any()
    assert progress_text() != answered, (
        "a server that fails is given up by its own limits, not by the hang detector"
    )


def test_each_attempt_of_a_request_counts_once_as_progress(
    server: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    units: list[str] = []
    monkeypatch.setattr(servers, "count_progress", units.append)
    HttpReward(config(server)).score(samples("sometimes"))
    assert len(server.seen) == 3 and units == ["requests to reward servers"] * 3


def test_samples_travel_together_and_by_group(server: Scorer) -> None:
    rows = [{**sample, "turns": [], "group": n // 2} for n, sample in enumerate(samples(*"454444"))]
    assert HttpReward(config(server, samples_per_request=4)).score(rows).rewards.tolist() == [
        1,
        0,
        1,
        1,
        1,
        1,
    ]
    assert [len(body["samples"]) for body in server.seen] in ([4, 2], [2, 4])
    server.seen.clear()
    reward = HttpReward(config(server, sends=("response", "turns", "group")))
    assert reward.optional_fields == {"turns", "group"} and reward.score(rows[:4]).valid.all()
    groups = [[{"response": row["response"], "turns": []} for row in part] for part in (rows[:2], rows[2:4])]
    assert sorted(map(str, groups)) == sorted(str(body["samples"]) for body in server.seen)


def test_the_circuit_opens_and_closes(server: Scorer) -> None:
    reward = HttpReward(config(server, retries=0, open_after=3, open_seconds=0.4, concurrency=1))
    server.broken = True
    result = reward.score(samples(*["4"] * 20))
    assert Counter(failure.reason for failure in result.failures) == {"status": 3, "circuit_open": 17}
    assert len(server.seen) == 3 and reward.server.counts["circuit_open"] == 17
    assert Counter(f.reason for f in reward.score(samples("4", "5")).failures) == {"circuit_open": 2}
    time.sleep(0.45)
    result = reward.score(samples("4", "5"))
    assert [failure.reason for failure in result.failures] == ["status", "circuit_open"], "one request tried"
    server.broken = False
    time.sleep(0.45)
    assert reward.score(samples("4", "5")).valid.all()


def test_a_dead_server_is_left_alone_and_one_that_comes_back_is_used(server: Scorer) -> None:
    reward = HttpReward(config(server, open_after=2, open_seconds=0.1))
    assert reward.score(samples("4")).valid.all()
    server.stop()
    result = reward.score(samples(*["4"] * 200))
    assert not result.valid.any()
    failed = Counter(failure.reason for failure in result.failures)
    assert set(failed) == {"unreachable", "circuit_open"} and failed["circuit_open"] > 150
    time.sleep(0.15)
    again = Scorer(server.server_address[1])
    try:
        assert reward.score(samples("4")).valid.all()
    finally:
        again.stop()


PARTS = """
def ask(*, prompt, response, ground_truth, metadata):
    if response == "raise":
        raise ValueError("no question")
    if response == "number":
        return 3
    return [{"role": "system", "content": "Be just."}, {"role": "user", "content": response}]

def read(*, response, judgement, **rest):
    import os
    if response == "leak":
        return float(any("s3cret" in value for value in os.environ.values()))
    if response == "no verdict":
        return None
    if response == "broken":
        raise KeyError("score")
    return {"reward": float(judgement.splitlines()[-1].split()[-1]), "words": len(judgement.split())}
"""


@pytest.mark.slow
def test_a_judge_is_asked_once_and_read_contained(server: Scorer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    (tmp_path / "parts.py").write_text(PARTS)
    settings: dict[str, Any] = {"timeout": 1.0, "retries": 1, "backoff": 0.02, "key_from": "JUDGE_API_KEY"}
    by_path = {"template": f"{tmp_path}/parts.py:ask", "parser": f"{tmp_path}/parts.py:read"}
    settings |= by_path | {"model": "m", "parameters": {"top_p": 0.9}}
    reward = JudgeReward(JudgeConfig(url=server.url + "/v1/", **settings))
    responses = ["a", "a", "b", "leak", "raise", "number", "no verdict", "broken", "slow", "page", "denied"]
    try:
        result = reward.score(samples(*responses))
        assert server.tries["a"] == 1
        again = reward.score(samples("a", "b", "c"))
        reward.score(samples("no verdict"))
    finally:
        reward.close()
    assert reasons(responses, result) == {
        "raise": "exception",
        "number": "wrong_type",
        "no verdict": "unreadable",
        "broken": "exception",
        "slow": "timeout",
        "page": "nonsense",
        "denied": "status",
    }
    assert result.rewards[result.valid].tolist() == [0.5, 0.5, 0.5, 0.0], "no secret in the parser's process"
    assert result.components["words"][0] == 3.0
    assert all(SECRET not in failure.message for failure in result.failures)
    tries = {response: server.tries[response] for response in ("b", "no verdict")}
    assert again.valid.all() and tries == {"b": 1, "no verdict": 2}, "what has no verdict is not kept"
    values = again.metrics().values()
    assert values["reward/judge/cache_hits"] == pytest.approx(2 / 3)
    assert values["reward/judge/requests"] == pytest.approx(1 / 3)
    first = next(body for body in server.seen if body["messages"][-1]["content"] == "a")
    assert first["model"] == "m" and first["top_p"] == 0.9 and first["messages"][0]["content"] == "Be just."
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


def test_a_judge_without_a_cache_is_asked_every_time_and_of_no_group(server: Scorer, tmp_path: Path) -> None:
    reward = JudgeReward(JudgeConfig(url=server.url, model="m", template="{response}", cache=0))
    try:
        result = reward.score(samples("{prompt}", "{prompt}", "on one line"))
    finally:
        reward.close()
    assert "a line that is `Score: N`, N from 0 to 1" in result.failures[0].message
    assert result.rewards.tolist()[:2] == [0.5, 0.5]
    assert server.tries["{prompt}"] == 2, "what a response says is not filled in"
    (tmp_path / "parts.py").write_text("def read(group, judgement, **rest):\n    return [0.0]\n")
    with pytest.raises(UserError, match="single responses"):
        JudgeReward(JudgeConfig(url=server.url, model="m", parser=f"{tmp_path}/parts.py:read"))


def test_settings_of_servers_are_checked_and_no_secret_is_shown(monkeypatch) -> None:
    monkeypatch.setenv("GOOD_TOKEN", "x")
    monkeypatch.setenv("TWO_LINES_TOKEN", "x\ny")
    good = "http://127.0.0.1:1/x"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"url": "ftp://h/x"}, "invalid server URL"),
        ({"url": "http://"}, "invalid server URL"),
        ({"url": "http://h:99999/"}, "invalid server URL"),
        ({"url": f"http://u:{SECRET}@h/"}, "contains a secret"),
        ({"url": f"http://h/?api_key={SECRET}"}, "contains a secret"),
        (
            {"url": good, "headers": {"Authorization": f"Bearer {SECRET}"}},
            "has to be named by an environment variable",
        ),
        ({"url": good, "headers": {"Authorization": "HOME"}}, "has to be named by an environment variable"),
        ({"url": good, "headers": {"Authorization": "NOT_SET_TOKEN"}}, "has no valid secret"),
        ({"url": good, "headers": {"Authorization": "TWO_LINES_TOKEN"}}, "has no valid secret"),
        ({"url": good, "headers": {"A:B": "GOOD_TOKEN"}}, "invalid name of an HTTP header"),
        ({"url": good, "sends": ("respons",)}, "is 'respons', which is not a choice"),
        ({"url": good, "sends": ()}, "is empty"),
    ]
    for settings, message in bad:
        (error,) = check_servers(RewardConfig(http=HttpRewardConfig(**settings)))
        assert message in error.message and error.fix and error.expected and error.where
        assert SECRET not in str(error)
    judges: list[tuple[dict[str, Any], str]] = [
        ({"template": "judge it"}, "does not contain the response"),
        ({"parameters": {"stream": True}}, "is set by the run itself"),
        ({"key_from": SECRET}, "has to be named by an environment variable"),
    ]
    for settings, message in judges:
        (error,) = check_servers(RewardConfig(judge=JudgeConfig(url=good, model="m", **settings)))
        assert message in error.message and SECRET not in str(error)
    http = HttpRewardConfig(url=good, headers={"Authorization": "GOOD_TOKEN"})
    assert list(check_servers(RewardConfig(http=http))) == []


def test_check_says_whether_a_server_answers(server: Scorer) -> None:
    there = RewardConfig(http=config(server), judge=JudgeConfig(url=server.url + "/v1", model="m"))
    (strange,) = unresponsive_server_warnings(there, [server.url], ENGINES["server"].health_path)
    assert strange.got == f"{server.url}: HTTP status 501 at /weight_info"  # no vLLM server
    server.stop()
    warnings = list(unresponsive_server_warnings(there, [server.url], ENGINES["server"].health_path))
    silent = ["reward.http.url", "reward.judge.url", "rollout.server.urls"]
    assert [warning.where for warning in warnings] == silent
    assert all("refused" in str(warning) for warning in warnings)


def test_the_settings_come_back_from_the_file_of_a_run(server: Scorer) -> None:
    text = f"""{{model: {{path: m}}, data: {{train: d.jsonl}}, run_dir: r, steps: 1, reward: {{
  http: {{url: "{server.url}", headers: {{Authorization: SCORER_TOKEN}}, sends: [response, turns]}},
  judge: {{url: "{server.url}/v1", model: m, key_from: JUDGE_API_KEY}}, code: {{scoring: share}}}}}}"""
    loaded = load_text(text).valid()
    assert load_text(dump(without_secrets(loaded))).valid() == loaded
    assert loaded.reward.code is not None and loaded.reward.code.limits.memory_gib == 1.0
