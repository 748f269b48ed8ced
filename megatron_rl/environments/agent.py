"""Episodes that a program of its own leads, through an endpoint that speaks as OpenAI's does.

The endpoint of an episode answers ``POST /v1/chat/completions`` with turns of the policy: the messages of the
first request are the prompt, those behind the last answer are what is observed. Nothing is tokenised again:
the conversation's row has the tokens that were sampled, and their log-probs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO, Any, ClassVar

from megatron_rl.contained.confinement import end_started_with
from megatron_rl.environments.environment import Environment, Episode, Message, Truncated, WrongUse
from megatron_rl.launcher import LOOPBACK, without_proxy

LARGEST_REQUEST = 2**23
"""Bytes of a request; more is a mistake."""
MODEL = "policy"
_TOLD = 2000
"""Bytes of what a program that failed wrote last, which are told."""
_NOT_OFFERED = {"stream": (None, False), "n": (None, 1), "stop": (None, []), "response_format": (None,)}
"""What a request may ask for that the endpoint has not, and the values that mean that it does not ask."""


class Refused(Exception):
    """Say why a request is not answered, with HTTP's status and a code in the error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Conversation:
    """Answer the requests of one agent with the turns of its episode."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._said: list[dict[str, Any]] = []
        self._tools: Any = None
        self._last: dict[str, Any] = {}
        self._answering = False

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the completion that a request asks for; raises Refused."""
        for name, values in _NOT_OFFERED.items():
            if request.get(name) not in values:
                raise Refused(400, "unsupported", f"{name} is not offered: one whole answer a request")
        if request.get("model", MODEL) != MODEL:
            words = f"the only model is {MODEL!r}, got {request['model']!r:.80}"
            raise Refused(404, "model_not_found", words)
        tools = request.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Refused(400, "tools", f"expected a list of tools in OpenAI's form, got {tools!r:.80}")
        messages = _plain(request.get("messages"))
        if self._said and messages == self._said[:-1]:
            return self._last  # asked again, since the answer was lost
        if self._answering:
            raise Refused(409, "busy", "another request of this episode is being answered")
        known = len(self._said)
        if messages[:known] != self._said or len(messages) == known:
            raise Refused(400, "history", "the messages do not begin with those that were said so far")
        if any(message["role"] == "assistant" for message in messages[known:]) and known:
            raise Refused(400, "history", "only the endpoint says what the assistant says")
        if known and (request.get("tools") or None) != self._tools:
            raise Refused(400, "history", "the tools are not those of the first request")
        self._answering = True
        try:
            return await self._turn(request, messages)
        finally:
            self._answering = False

    async def _turn(self, request: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        try:
            if not self._said:
                self._tools = request.get("tools") or None
                self._episode.open(messages, self._tools)
            else:
                self._episode.observe(*messages[len(self._said) :])
            message = await self._episode.generate(limit)
        except Truncated as error:
            # OpenAI's words, by which clients know that a conversation has no room left.
            words = f"This model's maximum context length is reached: {error}"
            raise Refused(400, "context_length_exceeded", words) from None
        except WrongUse as error:
            raise Refused(400, "messages", str(error)) from None
        answer: dict[str, Any] = {"role": "assistant", "content": str(message)}
        if message.tool_calls:
            answer["tool_calls"] = list(message.tool_calls)
        self._said = [*messages, *_plain([answer])]
        self._last = _completion(message, answer, bool(request.get("logprobs")))
        return self._last


def _plain(messages: Any) -> list[dict[str, Any]]:
    """Return messages with what stands for the same in one form; raises Refused."""
    result = []
    try:
        for message in messages:
            content = message.get("content") or ""
            if not isinstance(content, str):  # a list of parts
                content = "".join(piece["text"] for piece in content)
            plain = {"role": message["role"], "content": content}
            plain |= {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}
            if message.get("tool_calls"):
                plain["tool_calls"] = [
                    {"id": call["id"], "type": "function", "function": dict(call["function"])}
                    for call in message["tool_calls"]
                ]
            result.append(plain)
    except (TypeError, KeyError, AttributeError, ValueError):
        result = []
    if not result:
        raise Refused(400, "messages", "expected messages of role and text, one or more")
    return result


def _completion(message: Message, answer: Mapping[str, Any], log_probs: bool) -> dict[str, Any]:
    reason = "tool_calls" if message.tool_calls else "length" if message.cut else "stop"
    choice: dict[str, Any] = {"index": 0, "message": answer, "finish_reason": reason, "logprobs": None}
    if log_probs:
        pairs = zip(message.tokens, message.log_probs, strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in pairs
            ]
        }
    prompt, count = message.context, len(message.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count},
    }


@asynccontextmanager
async def endpoint(episode: Episode) -> AsyncIterator[tuple[str, str]]:
    """Serve an episode on this machine alone; yields the base URL and the key that it asks for."""
    os.environ.update(without_proxy(os.environ))  # clients in this process, and programs that it starts
    conversation, key = Conversation(episode), secrets.token_hex(16)
    connections: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        # A client that leaves, or says what is no HTTP, ends its connection alone.
        with contextlib.suppress(ConnectionError, EOFError, ValueError, asyncio.LimitOverrunError):
            while (request := await _read(reader)) is not None:
                status, body = await _respond(conversation, key, *request)
                payload = json.dumps(body).encode()
                head = f"HTTP/1.1 {status} .\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
                await writer.drain()
        connections.discard(task)
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/v1", key
    finally:
        server.close()
        for task in connections:
            task.cancel()


async def _read(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
    """Return method and path, headers and body of the next request, None where there is none."""
    first = (await reader.readline()).decode("latin-1").split()
    if len(first) != 3:
        return None
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    size = int(headers.get("content-length", "0"))
    if not 0 <= size <= LARGEST_REQUEST:
        return None
    return f"{first[0]} {first[1]}", headers, await reader.readexactly(size)


async def _respond(
    conversation: Conversation, key: str, call: str, headers: Mapping[str, str], body: bytes
) -> tuple[int, dict[str, Any]]:
    try:
        if headers.get("authorization") != f"Bearer {key}":
            raise Refused(401, "key", "the key is not this episode's")
        if call == "GET /v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        if call != "POST /v1/chat/completions":
            raise Refused(404, "path", f"{call} is not served")
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            raise Refused(400, "body", "expected a JSON object")
        return 200, await conversation.answer(request)
    except Refused as error:
        kind = "invalid_request_error"
        return error.status, {"error": {"message": str(error), "type": kind, "code": error.code}}


@dataclass
class AgentEnvironment(Environment):
    """Have a program lead each episode as a client of an OpenAI-compatible endpoint.

    ``command`` is started for every episode, with ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its
    environment, and with the task as JSON on standard input: ``prompt``, ``metadata`` and ``seed``. It ends
    the episode by ending with status 0; with any other the episode has failed. Override `judge` to reward
    what it wrote to standard output, or `lead` to drive an agent in Python.
    """

    command: tuple[str, ...] = ()
    # The endpoint, its connections, what the program reads and writes, and the pipes of its start.
    own_files: ClassVar[int] = 16
    # The program, and those that it runs at a time: a shell around it, tools.
    own_processes: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if type(self).lead is not AgentEnvironment.lead:
            return
        if not self.command:
            raise TypeError("command is missing: the agent's program and its arguments")
        if shutil.which(self.command[0]) is None:
            words = "a program of a home has to be named by limits.read"
            raise TypeError(f"command: there is no program {self.command[0]} ({words})")

    async def lead(self, episode: Episode, base_url: str, api_key: str) -> str:
        """Lead an episode as a client of ``base_url``; return what `judge` is to know of it."""
        names = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        task = {"prompt": episode.prompt, "metadata": dict(episode.metadata), "seed": episode.seed}
        return await _run(self.command, names, json.dumps(task))

    async def judge(self, episode: Episode, written: str) -> float | Mapping[str, float] | None:
        """Return the reward of an episode whose agent wrote ``written``; None leaves it to others."""
        return None

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        """Open the endpoint, have the agent lead, and judge."""
        async with endpoint(episode) as (base_url, api_key):
            try:
                written = await self.lead(episode, base_url, api_key)
            except Exception:
                if episode.truncated:  # what an agent does without a further turn is no failure
                    raise Truncated("no turn is left for the agent") from None
                raise
        if not episode.messages:  # nothing was sampled that a reward could be of
            raise RuntimeError("the agent ended without a turn of the policy: it asked the endpoint for none")
        return await self.judge(episode, written)


async def _run(command: Sequence[str], names: Mapping[str, str], task: str) -> str:
    """Return what a program with ``names`` in its environment writes to standard output.

    It ends with all that it started, which has the same key: nobody else has it.
    """
    # Not pipes: a child that the program leaves behind would hold them open.
    with _temporary_file() as written, _temporary_file() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=written,
            stderr=errors,
            env=os.environ | names,
            start_new_session=True,
        )
        try:
            await process.communicate(task.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_started_with(f"OPENAI_API_KEY={names['OPENAI_API_KEY']}")  # in whatever session
            await process.wait()
        if process.returncode:
            words = _text(errors, max(0, os.fstat(errors.fileno()).st_size - _TOLD))
            raise RuntimeError(f"the agent ended with status {process.returncode}: {words}")
        return _text(written)


def _temporary_file() -> IO[bytes]:
    """Return a file without a name."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    # A program that opens its /dev/stderr anew begins the file again; what it writes to the old one follows.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def _text(file: IO[bytes], start: int = 0) -> str:
    file.seek(start)
    return file.read().decode(errors="replace")
