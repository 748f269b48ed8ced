"""A teacher behind a server: the columns of a valid response, and rows whose requests fail."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from config_workspace import write_workspace

from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.sections.teacher_server import TeacherServerConfig
from megatron_rl.megatron.log_probs import TopTokens
from megatron_rl.roles.served_teacher import MIN_OTHER_PROBABILITY, VALID, ServedTeacher, TeacherResults
from megatron_rl.types import BANNED, Rollouts

pytestmark = pytest.mark.usefixtures("functions_load_once")

VOCABULARY = 10
"""Tokens of the teacher; the actor has two fewer."""


def distribution(prefix: list[int]) -> list[float]:
    """Return the log-probs of the token after ``prefix``, of any token there is."""
    generator = torch.Generator().manual_seed(sum(prefix) + 31 * len(prefix))
    return (2 * torch.randn(VOCABULARY, generator=generator)).double().log_softmax(0).tolist()


class Teacher(ThreadingHTTPServer):
    """Server that responds as vLLM does, or wrongly if a row begins with a certain token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Teacher

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        prompt = body["prompt"]
        entries = [None, *(self.entry(prompt, position, body) for position in range(1, len(prompt)))]
        wrong: dict[int, tuple[int, Any]] = {
            2: (500, {"error": "out of memory"}),
            3: (400, {"error": "prompt_logprobs of 20, greater than max allowed"}),
            4: (200, {"choices": [{"text": "a"}]}),
            5: (200, {"choices": [{"prompt_logprobs": entries[:-1]}]}),
            6: (200, {"choices": [{"prompt_logprobs": [{"1": {"logprob": math.nan}} for _ in entries]}]}),
            7: (200, {"choices": [{"prompt_logprobs": [{"1": {"logprob": -1.0}} for _ in entries]}]}),
        }
        status, value = wrong.get(prompt[0], (200, {"choices": [{"prompt_logprobs": entries}]}))
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def entry(self, prompt: list[int], position: int, body: dict[str, Any]) -> dict[str, dict[str, Any]]:
        log_probs = distribution(prompt[:position])
        ids = sorted(range(VOCABULARY), key=lambda token: -log_probs[token])[: body["prompt_logprobs"]]
        return {str(token): {"logprob": log_probs[token]} for token in {*ids, prompt[position]}}


@pytest.fixture
def server() -> Iterator[Teacher]:
    teacher = Teacher()
    yield teacher
    teacher.shutdown()
    teacher.server_close()


def request(server: Teacher, rows: list[list[int]], k: int = 0, *, sends: bool = True) -> TeacherResults:
    """Return the results of rows whose first two tokens are their prompts."""
    config = TeacherServerConfig(
        url=f"http://127.0.0.1:{server.server_address[1]}/v1/",
        model="big",
        key_from="TEACHER_KEY",
        retries=1,
        backoff=0.01,
        open_after=100,
    )
    lengths = torch.tensor([len(row) for row in rows])
    rollouts = Rollouts(
        tokens=torch.tensor([token for row in rows for token in row]),
        lengths=lengths,
        response_mask=torch.tensor([index > 1 for row in rows for index in range(len(row))]),
        rollout_log_probs=torch.zeros(int(lengths.sum())),
        group=torch.zeros(len(rows), dtype=torch.long),
        finish_reason=torch.zeros(len(rows), dtype=torch.long),
        policy_version=torch.zeros(len(rows), dtype=torch.long),
        temperature=torch.ones(len(rows)),
    )
    top = TopTokens(k, VOCABULARY - 2) if k else None
    teacher = ServedTeacher(config, top, longest_row=8)
    try:
        return teacher.start_requests(rollouts, sends).result(timeout=30)
    finally:
        teacher.close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret-of-the-teacher")


def test_log_probs_are_those_of_the_sampled_tokens(server: Teacher) -> None:
    rows = [[1, 3, 5, 0], [0, 2, 7]]
    results = request(server, rows)
    assert not results.failures and results.shard.values[VALID].tolist() == [True, True]
    expected = [
        distribution(row[:index])[token] if index > 1 else 0.0
        for row in rows
        for index, token in enumerate(row)
    ]
    torch.testing.assert_close(results.shard.tokens["teacher_log_probs"], torch.tensor(expected))
    assert list(results.shard.tokens) == ["teacher_log_probs"]
    (first, _) = sorted(server.bodies, key=lambda body: -len(body["prompt"]))
    assert first == {
        "path": "/v1/completions", "key": "Bearer secret-of-the-teacher", "model": "big", "prompt": rows[0],
        "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
    }  # fmt: skip


def test_the_most_likely_tokens_are_those_that_the_actor_has(server: Teacher) -> None:
    rows = [[1, 3, 5, 0, 6, 2], [0, 2, 7, 9]]
    tokens = request(server, rows, k=4).shard.tokens
    ids, log_probs = tokens["teacher_top_ids"], tokens["teacher_top_log_probs"]
    assert ids.dtype == torch.int32 and ids.shape == (10, 4) and log_probs.shape == (10, 5)
    position = 0
    absent = 0
    for row in rows:
        for index in range(len(row)):
            if index > 1:
                dense = distribution(row[:index])
                likely = sorted(range(VOCABULARY), key=lambda token: -dense[token])[:4]
                likely = [token for token in likely if token < VOCABULARY - 2]
                absent += 4 - len(likely)
                assert ids[position].tolist() == likely + [-1] * (4 - len(likely))
                rest = math.log(1 - sum(math.exp(dense[token]) for token in likely))
                values = [*(dense[token] for token in likely), *[BANNED] * (4 - len(likely)), rest]
                torch.testing.assert_close(log_probs[position], torch.tensor(values), rtol=1e-5, atol=1e-6)
            position += 1
    assert absent > 0, "the teacher has likely tokens that the actor has not"
    assert float(log_probs[:, -1].exp().min()) >= MIN_OTHER_PROBABILITY * 0.99


def test_a_row_whose_request_fails_is_invalid_and_the_others_are_not(server: Teacher) -> None:
    rows = [[1, 3, 5], *([first, 1, 1] for first in range(2, 8)), [0, 2, 7]]
    results = request(server, rows, k=3)
    assert results.shard.values[VALID].tolist() == [True, *[False] * 6, True]
    assert [failure.row for failure in results.failures] == [1, 2, 3, 4, 5, 6]
    assert [failure.reason for failure in results.failures] == ["status", "status", *["nonsense"] * 4]
    messages = [failure.message for failure in results.failures]
    assert "out of memory" in messages[0] and "greater than max allowed" in messages[1]
    assert "log-probs of 2 tokens, expected 3" in messages[3] and "1 tokens, expected 3" in messages[5]
    values = results.metrics.values()
    assert values["teacher/failed_fraction"] == 6 / 8
    # The error of the server is retried, the refusal is not.
    assert (values["teacher/requests"], values["teacher/retries"]) == (9 / 8, 1 / 8)
    invalid = torch.repeat_interleave(~results.shard.values[VALID], 3)
    assert not results.shard.tokens["teacher_log_probs"][invalid].any()


def test_a_rank_that_sends_nothing_has_the_same_columns(server: Teacher) -> None:
    sent, silent = (request(server, [[1, 3, 5]], k=3, sends=sends).shard for sends in (True, False))
    assert len(server.bodies) == 1 and len(silent.rows) == 0
    for fields in ("tokens", "values"):
        mine, theirs = getattr(silent, fields), getattr(sent, fields)
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            assert (len(tensor), tensor.dtype, tensor.shape[1:]) == (
                0,
                theirs[name].dtype,
                theirs[name].shape[1:],
            )


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_refuses_what_a_server_cannot_compute(workspace: Path) -> None:
    def found(*overrides: str) -> list[str]:
        section = "teacher_server={url: 'http://127.0.0.1:9/v1', model: big}"
        arguments = ("algorithm.name=distillation", section, *overrides)
        report = check_config(load("config.yaml", arguments), 4, patience=0)
        return [str(error) for error in report.errors]

    assert found() == []
    for override, path in (
        ("rollout.temperature=0.7", "rollout.temperature"),
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("rollout.sampling_profiles={math: {top_k: 5}}", "rollout.sampling_profiles.math.top_k"),
        ("teacher_server.url=host", "teacher_server.url"),
        ("teacher_server.key_from=NOT_THERE", "teacher_server.key_from"),
        ("teacher.path=model", "teacher"),
    ):
        errors = found(override)
        assert len(errors) == 1 and f"where:    {path}" in errors[0], (override, errors)
    loaded = load("config.yaml", ("algorithm.name=distillation", "teacher_server={url: 'http://a/v1'}"))
    (error,) = check_config(loaded, 4, patience=0).errors
    assert "teacher_server.model" in str(error)
