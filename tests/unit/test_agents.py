"""Programs that lead episodes through the endpoint: tokens are the engine's own, and failures are typed."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from test_multi_turn import STOP, TOKENIZER, logits, prompts, turns_of

from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.config.sections.rollout import EnvironmentConfig
from megatron_rl.contained.process import ContainedProcess
from megatron_rl.data.chat_format import ChatFormats, ChatTemplate
from megatron_rl.data.quickstart import build_tokenizer
from megatron_rl.environments.agent import LARGEST_REQUEST, _run_program, serve_endpoint
from megatron_rl.environments.environment import Episode, Message
from megatron_rl.environments.host import EnvironmentPool, environment_errors
from megatron_rl.launcher import no_proxy_variables
from megatron_rl.roles.reward import RewardRole
from megatron_rl.rollout.collate import to_rollouts
from megatron_rl.rollout.engines.vllm import make_tool_parser
from megatron_rl.rollout.multi_turn import MultiTurnScheduler
from megatron_rl.rollout.scheduler import ReplicaQueue
from megatron_rl.types import FINISH_FAILED, FINISH_LENGTH, FINISH_STOP, Rollouts, split_rows
from tests.sampling import engine_of, round_of, started, take_in

OPENAI = """
import json, sys
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()
messages = [{"role": "system", "content": "3*"}, {"role": "user", "content": task["prompt"]}]
for turn in range(3):
    answer = client.chat.completions.create(
        model="policy", messages=messages, max_tokens=4, logprobs=True
    )
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens <= 4
    assert client.models.list().data[0].id == "policy"
    messages += [choice.message, {"role": "user", "content": f"{turn}="}]
print(json.dumps({"turns": 3}))
"""
PLAIN = """
import json, os, subprocess, sys, time, urllib.request, urllib.error

way = json.load(sys.stdin)["prompt"]

if way == "silent":
    sys.exit(0)

def ask(messages, key=os.environ["OPENAI_API_KEY"], **more):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 3, **more}).encode()
    headers = {"Authorization": f"Bearer {key}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
            return json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"]

first = [{"role": "user", "content": "1+2="}]
said = ask(first)
if way == "crash":
    sys.exit("no more")
if way == "child":
    subprocess.Popen(["sleep", "1000"])
if way == "hang":
    time.sleep(1000)
if way == "odd":
    assert ask(first) == said, "asked again, it said something else"
    assert ask(first, key="other") == "key"
    assert ask(first, stream=True) == ask(first, n=2) == "unsupported"
    assert ask(first, chat_template_kwargs={"thinks": False}) == "unsupported"
    assert ask([{"role": "user", "content": "another"}]) == ask([*first, said]) == "history"
    assert ask(7) == "messages"
    assert ask([*first, said], tools=7) == ask([*first, said], tools=[7]) == "tools"
    assert ask([*first, said], model="gpt-4") == "model_not_found"
history = [*first, said]
while way == "long":
    history += [{"role": "user", "content": "+"}]
    answer = ask(history)
    assert isinstance(answer, dict), answer
    history.append(answer)
print(json.dumps({"turns": 1}))
"""
JUDGED = """
import json
from megatron_rl import AgentEnvironment

class Judged(AgentEnvironment):
    async def judge(self, episode, written):
        return json.loads(written)["turns"]
"""


@pytest.fixture
def play(tmp_path: Path):
    (tmp_path / "judged.py").write_text(JUDGED)
    made: list[EnvironmentPool] = []

    def run(
        source: str, texts: list[str], samples: int = 1, seconds: float = 100.0, **limits: Any
    ) -> Rollouts:
        (tmp_path / "agent.py").write_text(source)
        settings = {"command": [sys.executable, str(tmp_path / "agent.py")]}
        config = EnvironmentConfig(
            f"{tmp_path / 'judged.py'}:Judged",
            max_turns=5,
            turn_timeout=seconds,
            limits=LimitsConfig(**limits),
            settings=settings,
        )
        made.append(EnvironmentPool(config))
        groups = started(prompts(texts, [0] * len(texts)), samples, seed=4, version=3)
        queue = ReplicaQueue(round_of(groups, 3), 99, 200)
        engine = engine_of(logits, max_model_len=200)
        scheduler = MultiTurnScheduler(engine, queue, made[-1], ChatFormats(TOKENIZER))
        scheduler.run_token_round(None)
        take_in(scheduler)
        return to_rollouts(groups)

    yield run
    for hosts in made:
        hosts.close()


@pytest.mark.slow
def test_two_agents_at_once_with_the_plain_client_of_openai(play):
    rollouts = play(OPENAI, ["1+2="], samples=2)
    assert rollouts.finish_reason.tolist() == [FINISH_STOP] * 2
    assert [outcome.reward for outcome in rollouts.outcomes] == [3, 3]
    columns = (rollouts.tokens, rollouts.response_mask, rollouts.rollout_log_probs)
    for tokens, mask, values in zip(*(split_rows(c, rollouts.lengths) for c in columns), strict=True):
        start = int(mask.int().argmax())
        assert tokens[:start].tolist() == TOKENIZER.encode("3*1+2="), "not the agent's own prompt"
        assert len(turns_of(tokens, mask)) == 3
        assert [TOKENIZER.decode(turn) for turn in turns_of(tokens[start:], ~mask[start:])] == ["0=", "1="]
        for place in mask.nonzero()[:, 0].tolist():
            before = logits(tokens[:place], torch.tensor([place]))[0] / 0.8
            assert values[place] == pytest.approx(float(before.log_softmax(0)[tokens[place]]), abs=1e-5)
    first, second = split_rows(rollouts.tokens, rollouts.lengths)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_what_agents_do_wrong_is_their_own_failure_and_never_a_reward(play):
    rollouts = play(PLAIN, ["crash", "hang", "odd", "long", "silent", "child"], seconds=20.0)
    crash, hang, odd, long, silent, child = rollouts.outcomes
    assert (crash.failure, hang.failure) == ("exception", "timeout")
    assert "status 1" in crash.message and "no more" in crash.message
    assert (odd.failure, odd.reward) == (None, 1), odd.message
    assert (long.failure, long.reward) == (None, None), "an episode without a turn left has not failed"
    assert (silent.failure, silent.reward) == ("exception", None), "nothing was sampled that could be judged"
    assert "without a turn" in silent.message
    assert (child.failure, child.reward) == (None, 1), "its end was not seen while a child of it lived"
    ends = [FINISH_FAILED, FINISH_FAILED, FINISH_STOP, FINISH_LENGTH, FINISH_FAILED, FINISH_STOP]
    assert rollouts.finish_reason.tolist() == ends


@pytest.mark.slow
def test_more_agents_work_at_once_than_a_process_may_open_files_and_start_processes(play, monkeypatch):
    lost: list[ContainedProcess] = []
    kill = ContainedProcess.kill
    monkeypatch.setattr(ContainedProcess, "kill", lambda process: lost.append(process) or kill(process))
    source = PLAIN.replace("said =", "time.sleep(0.5)\nsaid =")
    rollouts = play(source, ["good"], samples=12, files=16, processes=1)
    assert [outcome.failure for outcome in rollouts.outcomes] == [None] * 12, rollouts.outcomes
    assert not lost, "the process of all agents ended, and each was tried alone"


@pytest.mark.parametrize("names", [("http_proxy", "no_proxy"), ("HTTP_PROXY", "NO_PROXY")])
def test_an_endpoint_is_not_asked_for_through_a_proxy(play, monkeypatch, names):
    proxy, exception = names
    monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    monkeypatch.setenv(exception, ".corp.example, 10.0.0.0/8")
    for name, value in no_proxy_variables(os.environ).items():  # as every command does before it starts
        monkeypatch.setenv(name, value)
    shown = PLAIN.replace(
        "first = [", "assert '.corp.example,10.0.0.0/8' in os.environ[\"no_proxy\"]\nfirst = ["
    )
    # Without a network an agent has no word of a proxy.
    rollouts = play(shown, ["good"], network=True)
    assert [(outcome.failure, outcome.reward) for outcome in rollouts.outcomes] == [(None, 1)], (
        rollouts.outcomes
    )


def test_entries_against_a_proxy_are_kept_in_both_cases():
    assert no_proxy_variables({"NO_PROXY": "a,b", "no_proxy": "b, c"}) == dict.fromkeys(
        ("NO_PROXY", "no_proxy"), "a,b,c,127.0.0.1,localhost"
    )


def run(script: str) -> str:
    return asyncio.run(_run_program(("sh", "-c", script), {"OPENAI_API_KEY": "of this test"}, "{}"))


def test_a_program_ends_with_what_it_started_in_another_session():
    left = Path("/proc") / run("setsid sleep 1000 & echo $!; sleep 0.1").strip() / "cmdline"
    until = time.monotonic() + 5
    while left.exists() and left.read_bytes():  # one that has ended, and nobody asked for, has no command
        assert time.monotonic() < until, "it lives, and counts among the processes of other episodes"
        time.sleep(0.01)


def test_the_last_words_of_a_program_are_told_whole():
    with pytest.raises(RuntimeError, match=r"status 1: two\nthree\n$"):
        run("echo something long >&2; echo two > /dev/stderr; echo three >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"status 1: x{1999}\n$"):
        run("printf '%09000d\n' 0 | tr 0 x >&2; exit 1")


def converse(client: Callable[[http.client.HTTPConnection, str], Any]) -> Any:
    """Run a client of an endpoint whose policy writes "turn 1", "turn 2" and so on; return its result."""
    count = 0

    async def next_turn(observed: object, limit: object, opening: object) -> Message:
        nonlocal count
        count += 1
        return Message(f"turn {count}", (7,), log_probs=(-0.5,), context=3)

    async def serve() -> Any:
        async with serve_endpoint(Episode("1+2=", None, {}, 0, next_turn)) as (base_url, key):
            connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=20)
            try:
                return await asyncio.to_thread(client, connection, key)
            finally:
                connection.close()

    return asyncio.run(serve())


def post(connection: http.client.HTTPConnection, key: str, body: Any, **options: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", body, headers, **options)
    response = connection.getresponse()
    return response.status, json.load(response)


def request_body(*texts: str) -> bytes:
    roles = ["assistant" if index % 2 else "user" for index in range(len(texts))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return json.dumps({"messages": messages}).encode()


def test_a_chunked_request_is_answered_like_a_request_of_stated_length():
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        body = request_body("one", "turn 1", "two")
        pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
        assert post(connection, key, request_body("one"))[0] == 200
        status, completion = post(connection, key, iter(pieces), encode_chunked=True)
        assert (status, completion["choices"][0]["message"]["content"]) == (200, "turn 2")

    converse(client)


def test_one_connection_carries_several_requests_also_after_a_refused_one():
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        connection.connect()
        socket = connection.sock
        replies = [
            post(connection, key, request_body("one")),
            post(connection, "another key", request_body("one", "turn 1", "two")),
            post(connection, key, b"no JSON"),
            post(connection, key, request_body("one", "turn 1", "two")),
        ]
        assert connection.sock is socket, "the endpoint closed the connection"
        assert [status for status, _ in replies] == [200, 401, 400, 200]
        assert [reply["error"]["code"] for _, reply in replies[1:3]] == ["key", "body"]
        assert replies[3][1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}

    converse(client)


def test_a_request_that_is_too_large_is_refused_in_the_form_of_every_error():
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        status, reply = post(connection, key, b" " * (LARGEST_REQUEST + 1))
        assert (status, reply["error"]["code"]) == (413, "body")
        assert reply["error"]["type"] == "invalid_request_error"

    converse(client)


def start_request(connection: http.client.HTTPConnection, key: str, header: str, value: str, body: bytes):
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Authorization", f"Bearer {key}")
    connection.putheader(header, value)
    connection.endheaders(body)


def test_a_client_that_leaves_within_a_request_ends_neither_the_endpoint_nor_the_episode(caplog):
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        start_request(connection, key, "Content-Length", "100", b"{")
        connection.close()
        assert post(connection, key, request_body("one"))[0] == 200

    converse(client)
    assert not caplog.records, caplog.text


def test_malformed_requests_are_refused_and_the_next_connection_is_served():
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
        head += f"Authorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.connect()
        connection.sock.sendall(head.encode() + b"no size\r\n")
        assert b" 400 " in connection.sock.recv(1000).partition(b"\r\n")[0]
        connection.close()
        connection.connect()
        connection.sock.sendall(b"no HTTP\r\n\r\n")
        assert connection.sock.recv(1000).startswith(b"HTTP/1.0 400")
        connection.close()
        assert post(connection, key, request_body("one"))[0] == 200

    converse(client)


@pytest.mark.parametrize(
    "body",
    [b"no size\r\n", b"5\r\n{}\r\n0\r\n\r\n", b"2\r\n{}more\r\n", b"2\r\n{}\r\n0\r\nno trailer\r\n\r\n"],
)
def test_a_bad_chunk_behind_its_headers_is_refused_at_once_and_the_connection_closed(body: bytes, caplog):
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        start_request(connection, key, "Transfer-Encoding", "chunked", b"")
        # The endpoint waits for the body before its first piece arrives.
        time.sleep(0.1)
        connection.sock.sendall(body)
        started = time.monotonic()
        reply = b"".join(iter(lambda: connection.sock.recv(1000), b""))
        assert time.monotonic() - started < 5
        assert reply.startswith(b"HTTP/1.1 400 ") and reply.count(b"HTTP/1.1") == 1
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"] == {
            "message": "the body is incomplete or malformed",
            "type": "invalid_request_error",
            "code": "body",
        }
        connection.close()
        assert post(connection, key, request_body("one"))[0] == 200

    converse(client)
    assert not caplog.records, caplog.text


@pytest.mark.slow
def test_a_body_that_arrives_slowly_is_read_to_its_end():
    def client(connection: http.client.HTTPConnection, key: str) -> None:
        def pieces() -> Iterator[bytes]:
            for piece in (b'{"messages": [{"role": "user", ', b'"content": "one"}', b"]}"):
                time.sleep(0.5)
                yield piece

        assert post(connection, key, pieces(), encode_chunked=True)[0] == 200

    converse(client)


TOOLS = (
    "{% if tools %}{% for t in tools %}<bos>{{ t['function']['name'] }}<eos>{% endfor %}{% endif %}"
    "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "7", "parameters": {}}}


@pytest.mark.slow
def test_calls_of_tools_are_parsed_by_vllm_and_templates_render_tools():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TOOLS
    started = ChatTemplate(tokenizer).encode_prompt([{"role": "user", "content": "1+2="}], [TOOL])
    assert tokenizer.decode(started) == "<bos>7<eos><bos>1+2=<eos><bos>"
    parse = make_tool_parser("hermes", tokenizer)
    assert parse is not None
    call = {"name": "add", "arguments": {"a": 1}}
    text, calls = parse(f"so <tool_call>{json.dumps(call)}</tool_call>", [TOOL])
    assert text.strip() == "so"
    assert calls[0]["name"] == "add" and json.loads(calls[0]["arguments"]) == {"a": 1}
    assert parse("7", [TOOL]) == ("7", [])


CALLING = """
from megatron_rl import Environment
from tests.sampling import engine_of

class Calling(Environment):
    async def run(self, episode):
        tool = {"type": "function", "function": {"name": "7", "parameters": {}}}
        episode.open([{"role": "user", "content": episode.prompt}], [tool])
        message = await episode.generate(limit=3)
        episode.observe({"role": "tool", "content": "3", "tool_call_id": message.tool_calls[0]["id"]})
        await episode.generate(limit=2)
        return 1.0
"""


@pytest.mark.slow
def test_conversations_tell_their_turns_and_the_calls_in_them(tmp_path: Path):
    (tmp_path / "calling.py").write_text(CALLING)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TOOLS
    groups = started(prompts(["1+2="], [0]), 1, seed=4, version=3)
    queue = ReplicaQueue(round_of(groups, 3), 99, 200)
    said = iter(["first", ""])

    def parse(text: str, tools: object) -> tuple[str, list]:
        name = next(said)
        return text, [{"name": name, "arguments": "{}"}] if name else []

    hosts = EnvironmentPool(
        EnvironmentConfig(f"{tmp_path / 'calling.py'}:Calling", max_turns=5, turn_timeout=100.0)
    )
    engine = engine_of(logits, max_model_len=200)
    scheduler = MultiTurnScheduler(engine, queue, hosts, ChatFormats(tokenizer), parse)
    scheduler.run_token_round(None)
    hosts.close()
    take_in(scheduler)
    rollouts = to_rollouts(groups)
    reward = RewardRole(RewardConfig(), tokenizer)
    [[prompt, first, heard, last]] = reward.conversations(rollouts)
    reward.close()
    assert prompt == {"role": "prompt", "content": "<bos>7<eos><bos>1+2=<eos><bos>", "tokens": 10}
    assert heard["role"] == "environment" and "<bos>3<eos><bos>" in heard["content"]
    assert [(turn["role"], turn["tokens"]) for turn in (first, last)] == [("policy", 3), ("policy", 2)]
    [call] = first["tool_calls"]
    assert call["function"] == {"name": "first", "arguments": "{}"} and "tool_calls" not in last


@pytest.mark.parametrize(
    ("settings", "words"), [({}, "command is missing"), ({"command": ["no-such-agent"]}, "no program")]
)
def test_an_agent_that_cannot_be_started_is_found_by_check(settings, words):
    [error] = environment_errors(EnvironmentConfig("megatron_rl:AgentEnvironment", settings=settings))
    assert words in str(error)
    assert STOP


@pytest.mark.parametrize("value", ["-1", "'3'", "10**30"])
@pytest.mark.parametrize("name", ["own_files", "own_processes"])
def test_a_class_that_counts_what_is_its_own_wrong_is_found_by_check(tmp_path: Path, name, value):
    (tmp_path / "judged.py").write_text(f"{JUDGED}    {name} = {value}\n")
    settings = {"command": [sys.executable]}
    [error] = environment_errors(EnvironmentConfig(f"{tmp_path / 'judged.py'}:Judged", settings=settings))
    assert f"Judged.{name}" in str(error)
