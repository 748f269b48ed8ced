"""Episodes in which an external agent program talks to the policy through an OpenAI-compatible endpoint.

Each episode has a separate endpoint. A chat completion is one turn of the policy: the messages of the first
request are the prompt, and the messages after the last completion are the observation. Sampled text is never
tokenised again: the episode's sequence consists of the sampled tokens, with their log-probs.
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

from aiohttp import web

from megatron_rl.contained.confinement import kill_processes_started_with
from megatron_rl.environments.environment import Environment, Episode, Message, Truncated, WrongUse
from megatron_rl.launcher import LOOPBACK, no_proxy_variables

LARGEST_REQUEST = 2**23
"""Largest body of a request in bytes: 8 MiB, several times the text of the longest context."""

MODEL = "policy"
"""The only model that the endpoint lists."""

_EXCERPT_BYTES = 2000
"""Number of bytes from the end of a failed program's standard error that the failure message quotes."""

_SHUTDOWN_SECONDS = 0.1
"""Seconds in which open requests may finish when the episode ends. The time is short, since the agent that
would read the responses has ended. It is not 0, since 0 means no time limit in aiohttp."""

_BODY_CHECK_SECONDS = 0.2
"""Seconds between two checks for a malformed body while a request's body is incomplete."""

_UNSUPPORTED = {"stream": (None, False), "n": (None, 1), "stop": (None, []), "response_format": (None,)}
"""Unsupported request field -> values that have no effect and are therefore accepted."""


class Refused(Exception):
    """Error of the endpoint that rejects an HTTP request: HTTP status, error code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Conversation:
    """Conversation of one episode, which maps chat requests with a growing history to turns of the policy."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        # Normalized messages up to and including the last completion; empty before the first request.
        self._history: list[dict[str, Any]] = []
        self._tools: Any = None
        self._last_completion: dict[str, Any] = {}
        # Whether a request is in progress: the conversation of an episode has no parallel branches.
        self._is_busy = False

    async def complete_chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sample a turn of the policy for a chat request; return it as a chat completion.

        Raises Refused for an invalid request.
        """
        _require_supported(request)
        messages = _normalize_messages(request.get("messages"))

        # A client that lost the response repeats its last request: return the completion again.
        if self._history and messages == self._history[:-1]:
            return self._last_completion
        if self._is_busy:
            raise Refused(409, "busy", "another request of this episode is in progress")
        self._require_continuation(messages, request.get("tools") or None)

        self._is_busy = True
        try:
            return await self._sample_turn(request, messages)
        finally:
            self._is_busy = False

    def _require_continuation(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Raise Refused unless the messages extend the episode's history and the tools have not changed."""
        history_length = len(self._history)
        if messages[:history_length] != self._history or len(messages) == history_length:
            raise Refused(400, "history", "the messages do not extend the conversation of this episode")
        if history_length == 0:
            return
        if any(message["role"] == "assistant" for message in messages[history_length:]):
            raise Refused(400, "history", "an assistant message was added by the client")
        if tools != self._tools:
            raise Refused(400, "history", "the tools differ from the first request's")

    async def _sample_turn(
        self, request: Mapping[str, Any], messages: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Send the new messages to the policy, sample its next turn and return it as a chat completion."""
        token_limit = request.get("max_completion_tokens") or request.get("max_tokens")
        try:
            if self._history:
                self._episode.observe(*messages[len(self._history) :])
            else:
                self._tools = request.get("tools") or None
                self._episode.open(messages, self._tools)
            message = await self._episode.generate(token_limit)
        except Truncated as error:
            # Use OpenAI's own sentence and code, by which clients recognise a full context.
            reason = f"This model's maximum context length is reached: {error}"
            raise Refused(400, "context_length_exceeded", reason) from None
        except WrongUse as error:
            raise Refused(400, "messages", str(error)) from None

        # Add the turn to the history, and store the completion for a repeated request.
        assistant_message: dict[str, Any] = {"role": "assistant", "content": str(message)}
        if message.tool_calls:
            assistant_message["tool_calls"] = list(message.tool_calls)
        self._history = [*messages, *_normalize_messages([assistant_message])]
        with_log_probs = bool(request.get("logprobs"))
        self._last_completion = _make_completion(message, assistant_message, with_log_probs)
        return self._last_completion


def _require_supported(request: Mapping[str, Any]) -> None:
    """Raise Refused for a chat request with a field, model or tools that the endpoint does not support."""
    # A field is accepted with a value that has no effect, such as `stream: false`.
    for name, neutral_values in _UNSUPPORTED.items():
        if request.get(name) not in neutral_values:
            raise Refused(
                400, "unsupported", f"{name} is not supported: a request gets one complete response"
            )

    # The template arguments of the record apply to all turns: a turn with other arguments would not continue
    # its prompt.
    if request.get("chat_template_kwargs"):
        message = "chat_template_kwargs is not supported: the arguments of the episode's record apply"
        raise Refused(400, "unsupported", message)

    model = request.get("model", MODEL)
    if model != MODEL:
        raise Refused(404, "model_not_found", f"the only model is {MODEL!r}, got {model!r:.80}")

    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(400, "tools", f"expected a list of tools in OpenAI's format, got {tools!r:.80}")


def _normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Convert messages to canonical form, so that equal histories compare equal.

    Clients send the same message in different forms: content as text or as a list of parts, empty fields
    present or absent, tool calls with further keys. Raises Refused for malformed messages.
    """
    normalized_messages = []
    try:
        for message in messages:
            # Join the parts of the content, and omit empty fields and further keys.
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(content_part["text"] for content_part in content)

            normalized_message = {"role": message["role"], "content": content}
            for key in ("tool_call_id", "name"):
                if message.get(key):
                    normalized_message[key] = message[key]
            if message.get("tool_calls"):
                normalized_message["tool_calls"] = [
                    {"id": call["id"], "type": "function", "function": dict(call["function"])}
                    for call in message["tool_calls"]
                ]
            normalized_messages.append(normalized_message)
    except (TypeError, KeyError, AttributeError, ValueError):
        normalized_messages = []

    if not normalized_messages:
        raise Refused(400, "messages", "expected messages of role and text, one or more")
    return normalized_messages


def _make_completion(
    message: Message,
    assistant_message: Mapping[str, Any],
    with_log_probs: bool,
) -> dict[str, Any]:
    """Convert a turn of the policy to the JSON body of a chat completion.

    ``message`` is the turn with its tokens. ``assistant_message`` is this turn in OpenAI's format.
    ``with_log_probs`` adds the log-prob of each token.
    """
    finish_reason = "stop"
    if message.tool_calls:
        finish_reason = "tool_calls"
    elif message.cut:
        finish_reason = "length"

    choice: dict[str, Any] = {
        "index": 0,
        "message": assistant_message,
        "finish_reason": finish_reason,
        "logprobs": None,
    }
    if with_log_probs:
        # Return token ids instead of text, since a token of a byte-level vocabulary may be part of a
        # character.
        token_log_probs = [
            {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
            for token, log_prob in zip(message.tokens, message.log_probs, strict=True)
        ]
        choice["logprobs"] = {"content": token_log_probs}

    prompt_tokens = message.context
    completion_tokens = len(message.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


@asynccontextmanager
async def serve_endpoint(episode: Episode) -> AsyncIterator[tuple[str, str]]:
    """Serve the endpoint of an episode on the loopback interface during the block.

    Yields the base URL and the API key. Each episode has a different key.
    """
    # Bypass proxies for the loopback address, in this process and in programs that inherit its environment.
    os.environ.update(no_proxy_variables(os.environ))
    conversation = Conversation(episode)
    api_key = secrets.token_hex(16)

    async def handle_request(request: web.Request) -> web.Response:
        try:
            return web.json_response(await _respond(conversation, api_key, request))
        except Refused as error:
            details = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            return web.json_response({"error": details}, status=error.status)

    application = web.Application(client_max_size=LARGEST_REQUEST)
    # Use one handler for all paths, so that the error for a wrong path or method has OpenAI's format, too.
    application.router.add_route("*", "/{path:.*}", handle_request)

    # Do not handle signals, which works only in the main thread: an episode runs in another thread.
    runner = web.AppRunner(
        application, handle_signals=False, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        # With port 0 the kernel chooses a free port.
        await web.TCPSite(runner, LOOPBACK, 0).start()
        port = runner.addresses[0][1]
        yield f"http://{LOOPBACK}:{port}/v1", api_key
    finally:
        await runner.cleanup()


async def _respond(
    conversation: Conversation,
    api_key: str,
    request: web.Request,
) -> dict[str, Any]:
    """Return the JSON body of the response to an HTTP request; raises Refused for an invalid request.

    ``api_key`` is the bearer token that the request must have.
    """
    # Another episode's agent must not reach this conversation.
    if request.headers.get("Authorization") != f"Bearer {api_key}":
        raise Refused(401, "key", "the key is not this episode's")

    route = f"{request.method} {request.path_qs}"
    if route == "GET /v1/models":
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
    if route != "POST /v1/chat/completions":
        raise Refused(404, "path", f"{route} is not served")

    # Read the body, and map each error to an HTTP error in OpenAI's format.
    try:
        body = json.loads(await _read_body(request))
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, "body", f"expected at most {LARGEST_REQUEST} bytes") from None
    except (ConnectionError, web.RequestPayloadError):
        raise Refused(400, "body", "the body is incomplete or malformed") from None
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "body", "expected a JSON object")
    return await conversation.complete_chat(body)


async def _read_body(request: web.Request) -> bytes:
    """Read the body of a request; raises RequestPayloadError for a malformed body."""
    # If a malformed chunk arrives after the headers, aiohttp 3.14 does not end the read. It queues the error
    # as if it were the connection's next request. So the body is malformed if a message is queued before the
    # body is complete.
    read_task = asyncio.ensure_future(request.read())
    try:
        while not read_task.done():
            await asyncio.wait([read_task], timeout=_BODY_CHECK_SECONDS)
            is_incomplete = not read_task.done() and not request.content.is_eof()
            if is_incomplete and request.protocol._messages:
                # Close the connection after the response: no further bytes can be parsed.
                request.protocol.close()
                request.content.feed_eof()
                raise web.RequestPayloadError("a chunk of the body is malformed")
        return read_task.result()
    finally:
        read_task.cancel()


@dataclass
class AgentEnvironment(Environment):
    """Environment whose episodes are driven by an agent: a program that calls an OpenAI-compatible endpoint.

    ``command`` is the agent's program and its arguments. It is started for every episode, with
    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment, and with the task as JSON on standard
    input: ``prompt``, ``metadata`` and ``seed``. Exit status 0 ends the episode; any other status fails it.
    Override `judge` to compute a reward from the program's standard output, or `lead` to run an agent in
    Python instead of the program.
    """

    command: tuple[str, ...] = ()

    # Files: the endpoint, its connections, the program's standard streams, and the pipes that start it.
    own_files: ClassVar[int] = 16
    # Processes: the program, a shell around it, and its child processes, such as tools.
    own_processes: ClassVar[int] = 8

    def __post_init__(self) -> None:
        if type(self).lead is not AgentEnvironment.lead:
            return
        if not self.command:
            raise TypeError("command is missing: the agent's program and its arguments")
        if shutil.which(self.command[0]) is None:
            hint = "a program in a home folder must be listed in limits.read"
            raise TypeError(f"command: there is no program {self.command[0]} ({hint})")

    async def lead(self, episode: Episode, base_url: str, api_key: str) -> str:
        """Run the agent's program until it ends; return its standard output, which `judge` evaluates.

        The agent requests the policy's turns from the OpenAI-compatible endpoint at ``base_url``. Its
        requests must contain ``api_key``. A subclass may override the method to run a different agent.
        """
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        task = {"prompt": episode.prompt, "metadata": dict(episode.metadata), "seed": episode.seed}
        return await _run_program(self.command, variables, json.dumps(task))

    async def judge(self, episode: Episode, output: str) -> float | Mapping[str, float] | None:
        """Compute the reward of an episode from the agent's output; None leaves it to `reward.function`."""
        return None

    async def run(self, episode: Episode) -> float | Mapping[str, float] | None:
        """Open the endpoint, run the agent (`lead`) and compute its reward (`judge`)."""
        async with serve_endpoint(episode) as (base_url, api_key):
            try:
                output = await self.lead(episode, base_url, api_key)
            except Exception:
                # The endpoint rejects requests after the context is full or all turns are used. An agent may
                # then crash: the episode is truncated and not failed.
                if episode.truncated:
                    raise Truncated("the agent has no tokens or turns left") from None
                raise

        if not episode.messages:
            raise RuntimeError(
                "the agent ended without a turn of the policy: it sent the endpoint no request"
            )
        return await self.judge(episode, output)


async def _run_program(command: Sequence[str], variables: Mapping[str, str], task: str) -> str:
    """Run a program with ``task`` on standard input; return its standard output.

    ``variables`` are added to its environment, among them the episode's ``OPENAI_API_KEY``. Raises
    RuntimeError for an exit status other than 0.

    Afterwards all processes that the program started are killed. A process in another session is found by the
    episode's API key in its environment.
    """
    # Use files and not pipes: a child that outlives the program would keep a pipe open.
    with _open_temporary_file() as stdout, _open_temporary_file() as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            await process.communicate(task.encode())
        finally:
            # First kill the program's session, then children that have left it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            kill_processes_started_with(f"OPENAI_API_KEY={variables['OPENAI_API_KEY']}")
            await process.wait()

        # Quote the end of standard error, where Python prints an exception.
        if process.returncode:
            size = os.fstat(stderr.fileno()).st_size
            excerpt = _read_text(stderr, max(0, size - _EXCERPT_BYTES))
            raise RuntimeError(f"the agent ended with status {process.returncode}: {excerpt}")
        return _read_text(stdout)


def _open_temporary_file() -> IO[bytes]:
    """Create an unnamed temporary file in append mode."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    # Without append mode, a program that opens /dev/stderr again would start at offset 0 and overwrite
    # earlier lines.
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    return file


def _read_text(file: IO[bytes], start: int = 0) -> str:
    """Return the content of a file from the byte ``start`` on as text."""
    file.seek(start)
    return file.read().decode(errors="replace")
