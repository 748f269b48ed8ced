"""Rewards from HTTP servers: the user's own server, and a language model as a judge.

`Server` sends many requests concurrently, retries, pauses if the server requests it, and stops sending to a
server that fails repeatedly (a circuit breaker). The classes `HttpReward` and `JudgeReward` only construct
requests and parse replies.

This module runs in the trainer, which has network access. User code that constructs requests or parses
replies runs contained, without network and without the secrets in the headers. Servers are not trusted: the
size and the time of a reply are limited, redirections are not followed, and secrets are removed from text
before a message quotes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from megatron_rl.config.sections.rewards import (
    HttpRewardConfig,
    JudgeConfig,
    RewardConfig,
    ServerConfig,
)
from megatron_rl.contained.process import escape_unprintable, replace_surrogates
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.progress import count_progress
from megatron_rl.redaction import HIDDEN
from megatron_rl.rewards.function import FunctionReward, RewardResult, Sample, rows_by_group
from megatron_rl.rewards.judgement import JUDGEMENT, fill_template, is_function_path
from megatron_rl.rewards.worker import (
    GROUP,
    TIMEOUT,
    TOKENS,
    TURNS,
    WRONG_TYPE,
    Answer,
    read_answer,
    reward_frame,
)

UNREACHABLE = "unreachable"
"""Failure reason of a request: the connection could not be made, or was lost."""
HTTP_STATUS = "status"
"""Failure reason of a request: an HTTP status other than success and 429."""
RATE_LIMITED = "rate_limited"
"""Failure reason of a request: the last attempt got HTTP status 429. Also the counter of all responses with
this status."""
MALFORMED = "nonsense"
"""Failure reason of a request: a malformed reply. Users see the value of the constant in metrics."""
CIRCUIT_OPEN = "circuit_open"
"""Failure reason and counter: requests that were not sent because previous requests failed."""
REPORTED = "reported"
"""Failure reason of a sample: the server reported an error for it."""
UNREADABLE = "unreadable"
"""Failure reason of a sample: the parser finds no verdict in the judge's text."""
REQUESTS = "requests"
"""Counter of requests that were sent, including retries."""
RETRIES = "retries"
"""Counter of requests that were sent again."""
CACHE_HITS = "cache_hits"
"""Counter of samples without a request: the judge's text was cached, or requested for an equal sample."""

LARGEST_REPLY = 2**22
"""Largest valid reply in bytes: thousands of rewards, or a long verdict, are far smaller."""
SHORTEST_SECRET = 6
"""Minimum length in characters of a secret that is removed from messages, such as the key after ``Bearer``.

Shorter words also occur in ordinary text.
"""
EXCERPT = 200
"""Maximum number of characters of a reply that a message quotes."""


# Requests


class Reply(NamedTuple):
    """Reply of a server to one request, or the reason of its failure.

    Example:
        >>> Reply(None, value={"rewards": [1.0]}).value["rewards"]
        [1.0]
    """

    reason: str | None
    """One of the failure reasons above, or None for success."""
    message: str = ""
    """Details of a failure, for the sample's log."""
    value: Any = None
    """JSON value of the reply."""


class _Attempt(NamedTuple):
    """Outcome of one attempt to send a request."""

    reply: Reply
    retryable: bool = False
    """Whether another attempt may succeed. If this is true for the last attempt, the server counts as
    unavailable."""
    pause: float = 0.0
    """Seconds to wait before the next request, as the server requested."""


class Server:
    """HTTP client that sends rounds of concurrent requests to one server.

    A round is one call of `post`. A pause that the server requests, and the state of the circuit breaker,
    persist from round to round.

    ``secrets`` maps the names of secret headers to their values. A reply of more than ``largest_reply`` bytes
    is malformed. ``counts`` are the counters of the last round: requests, retries, responses with status 429,
    and requests that were not sent.
    """

    def __init__(
        self,
        config: ServerConfig,
        url: str,
        secrets: dict[str, str],
        largest_reply: int = LARGEST_REPLY,
    ) -> None:
        self.config = config
        self._largest_reply = largest_reply
        self.counts: Counter[str] = Counter()
        self._url = url
        self._secrets = secrets
        self._jitter = random.Random()

        # State of the rate limit and of the circuit breaker, which persists from round to round.
        self._next_request_time = 0.0
        """Time (monotonic) before which no request is sent."""
        self._failures = 0
        """Number of failed requests since the last success."""
        self._opened_time: float | None = None
        """Time (monotonic) at which the circuit opened, or None for a closed circuit."""
        self._is_probing = False
        """Whether a request that probes an unavailable server is in flight."""

    def post(
        self,
        bodies: Sequence[Any],
        convert: Callable[[int, Reply], Any] = lambda _, reply: reply,
    ) -> list[Any]:
        """Post each of the ``bodies`` as JSON; return the converted replies in the same order.

        ``convert`` is called with the index and the reply of each request as soon as the reply arrives. It
        may return a smaller value: all replies of a step may be too large for the host's memory.
        """
        self.counts = Counter()
        if not bodies:
            return []
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(self._post_all(bodies, convert))

    async def _post_all(self, bodies: Sequence[Any], convert: Callable[[int, Reply], Any]) -> list[Any]:
        """Post all bodies, at most ``concurrency`` at a time; return their converted replies."""
        slots = asyncio.Semaphore(self.config.concurrency)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.config.concurrency),
            timeout=aiohttp.ClientTimeout(total=self.config.timeout),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **self._secrets},
            cookie_jar=aiohttp.DummyCookieJar(),
            # Do not decompress: a small compressed reply could expand to any size.
            auto_decompress=False,
        ) as session:

            async def post(index: int, body: Any) -> Any:
                async with slots:
                    reply = await self._send_with_retries(session, json.dumps(body, default=str).encode())
                    return convert(index, reply)

            return list(await asyncio.gather(*(post(index, body) for index, body in enumerate(bodies))))

    async def _send_with_retries(
        self,
        session: aiohttp.ClientSession,
        body: bytes,
    ) -> Reply:
        """Send a request, with retries after temporary failures; return the reply or the last failure.

        Nothing is sent while the circuit is open.
        """
        config = self.config

        # After `open_seconds`, an open circuit lets one request through to probe the server.
        is_probe = False
        if self._opened_time is not None:
            if self._is_probing or time.monotonic() < self._opened_time + config.open_seconds:
                return self._refuse_request()
            self._is_probing = True
            is_probe = True

        attempt = _Attempt(Reply(None))
        for retry in range(1 + config.retries):
            if retry:
                self.counts[RETRIES] += 1
                # Bound the exponent, so that the power fits into a float; 2**60 s exceeds every limit.
                exponent = min(retry - 1, 60)
                backoff = min(config.backoff * 2**exponent, config.longest_wait)
                await asyncio.sleep(max(attempt.pause, backoff * self._jitter.uniform(0.5, 1.0)))

                # Other requests may have opened the circuit during the wait.
                if self._opened_time is not None and not is_probe:
                    return self._refuse_request()

            await self._wait_for_turn()
            self.counts[REQUESTS] += 1
            attempt = await self._send(session, body)
            # A failed attempt also counts as progress for the hang detector. If a server does not respond,
            # the limits of this client end the attempts.
            count_progress("requests to reward servers")
            if attempt.pause:
                self._next_request_time = max(self._next_request_time, time.monotonic() + attempt.pause)
            if not attempt.retryable:
                break

        self._update_circuit(attempt)
        return attempt.reply

    def _update_circuit(self, attempt: _Attempt) -> None:
        """Update the circuit breaker with the last attempt of a request.

        The circuit opens after ``open_after`` consecutive failures, and closes when the server responds.
        """
        self._is_probing = False

        # A server that limits the rate or rejects a request is available.
        if not attempt.retryable or attempt.reply.reason == RATE_LIMITED:
            self._failures = 0
            self._opened_time = None
            return
        self._failures += 1
        if self._failures >= self.config.open_after:
            self._opened_time = time.monotonic()

    def _refuse_request(self) -> Reply:
        """Count a request that is not sent because the circuit is open, and return its failure."""
        self.counts[CIRCUIT_OPEN] += 1
        message = (
            f"the last {self._failures} requests to the server failed; nothing is sent to it for a while"
        )
        return Reply(CIRCUIT_OPEN, message)

    async def _wait_for_turn(self) -> None:
        """Wait until the server's requested pause has ended and the configured rate allows a request."""
        # Check the time again after the wait: another request may have extended the pause.
        wait_seconds = self._next_request_time - time.monotonic()
        while wait_seconds > 0:
            await asyncio.sleep(wait_seconds)
            wait_seconds = self._next_request_time - time.monotonic()
        if self.config.rate is not None:
            self._next_request_time = time.monotonic() + 1 / self.config.rate

    async def _send(
        self,
        session: aiohttp.ClientSession,
        body: bytes,
    ) -> _Attempt:
        """Send a request once; return the reply, or the failure and whether another attempt may succeed."""
        try:
            async with session.post(self._url, data=body, allow_redirects=False) as response:
                return self._parse_response(response, await _read_content(response, self._largest_reply))
        except TimeoutError:
            message = f"no answer within {self.config.timeout:g} s"
            return _Attempt(Reply(TIMEOUT, message), retryable=True)
        except aiohttp.ClientResponseError as error:
            message = self._remove_secrets(f"the response is not HTTP: {error.message}")
            return _Attempt(Reply(MALFORMED, message), retryable=True)
        except (aiohttp.ClientError, OSError) as error:
            message = self._remove_secrets(f"{type(error).__name__}: {error}")
            return _Attempt(Reply(UNREACHABLE, message), retryable=True)

    def _parse_response(
        self,
        response: aiohttp.ClientResponse,
        content: bytes,
    ) -> _Attempt:
        """Convert an HTTP response with the body ``content`` to a reply or a failure.

        A success status with a body that is not JSON is the failure `MALFORMED`. An error status is the
        failure `RATE_LIMITED` or `HTTP_STATUS`.
        """
        text = self._remove_secrets(content.decode("utf-8", "replace"))
        status = response.status

        # Success. A malformed reply is not retried: the same request would get the same reply.
        if 200 <= status < 300:
            try:
                if len(content) > self._largest_reply:
                    raise ValueError(f"more than {self._largest_reply} bytes")
                return _Attempt(Reply(None, value=json.loads(text)))
            except (ValueError, RecursionError) as error:
                message = f"the response is not JSON ({error!s:.80}): {text[:EXCERPT]!r}"
                return _Attempt(Reply(MALFORMED, message))

        # Failure. Timeouts, rate limits and server errors may be temporary; other 4xx errors are not.
        reason = HTTP_STATUS
        if status == 429:
            reason = RATE_LIMITED
            self.counts[RATE_LIMITED] += 1
        pause = self._requested_pause(response) if status in (429, 503) else 0.0
        retryable = status in (408, 429) or status >= 500
        return _Attempt(
            Reply(reason, f"HTTP status {status}: {text[:EXCERPT]!r}"),
            retryable,
            pause,
        )

    def _requested_pause(self, response: aiohttp.ClientResponse) -> float:
        """Return the pause in seconds that the header ``Retry-After`` requests; 0 without a valid header."""
        # The header contains a number of seconds or a date.
        text = response.headers.get("Retry-After", "").strip()
        try:
            if text[:1].isdigit():
                seconds = float(text)
            else:
                seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0

        return min(max(seconds, 0.0), self.config.longest_wait)

    def _remove_secrets(self, text: str) -> str:
        """Remove the values of secret headers and invalid characters from text, so that it can be logged."""
        for secret in self._secrets.values():
            # The key after `Bearer` may appear without the word `Bearer`.
            for fragment in (secret, *secret.split()):
                if len(fragment) >= SHORTEST_SECRET:
                    text = text.replace(fragment, HIDDEN)
        return replace_surrogates(text)


async def _read_content(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response; stop reading as soon as it exceeds ``max_bytes``."""
    content = bytearray()
    async for data in response.content.iter_any():
        content.extend(data)
        if len(content) > max_bytes:
            response.close()
            break
    return bytes(content)


def secret_headers(config: ServerConfig, key_variable: str | None = None) -> dict[str, str]:
    """Return the names and values of the HTTP headers whose values are in environment variables.

    ``key_variable`` is the environment variable with the API key, which is sent as a bearer token, or None to
    send no key.
    """
    headers = {header: os.environ[variable] for header, variable in config.headers.items()}
    if key_variable is not None:
        headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
    return headers


def _request_metrics(section: str, counts: Counter[str], num_samples: int) -> Metrics:
    """Return the counters of a round of requests, divided by the number of samples, as metrics.

    ``section`` is ``http`` or ``judge``, the section of the reward in the configuration.
    """
    counters = [REQUESTS, RETRIES, RATE_LIMITED, CIRCUIT_OPEN]
    if section == "judge":
        counters.append(CACHE_HITS)

    metrics = Metrics()
    for counter in counters:
        metrics += Metrics.mean(
            f"reward/{section}/{counter}",
            float(counts[counter]),
            float(num_samples),
        )
    return metrics


# The user's own server


class HttpReward:
    """Reward from the user's own server; `HttpRewardConfig` describes requests and replies."""

    unenforced_limits: tuple[str, ...] = ()

    def __init__(self, config: HttpRewardConfig) -> None:
        self.config = config
        self.optional_fields = frozenset({TURNS, TOKENS, GROUP}.intersection(config.sends))
        self.server = Server(config, config.url, secret_headers(config))

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Compute the rewards of B samples, in the order of ``samples``."""
        # A request contains the configured fields of several samples, or of one group.
        rows_of_requests = self._split_into_requests(samples)
        fields = [name for name in self.config.sends if name != GROUP]
        bodies = []
        for rows in rows_of_requests:
            request_samples = [{name: samples[row][name] for name in fields} for row in rows]
            bodies.append({"samples": request_samples})

        answers: dict[int, Answer] = {}
        for rows, reply in zip(rows_of_requests, self.server.post(bodies), strict=True):
            answers.update(zip(rows, _parse_rewards_reply(reply, len(rows)), strict=True))
        metrics = _request_metrics("http", self.server.counts, len(samples))
        return RewardResult([answers[row] for row in range(len(samples))], metrics)

    def _split_into_requests(self, samples: Sequence[Sample]) -> list[Sequence[int]]:
        """Return the rows of each request: the rows of one group, or ``samples_per_request`` rows."""
        if GROUP in self.optional_fields:
            return [*rows_by_group(samples)]
        rows = range(len(samples))
        size = self.config.samples_per_request
        return [rows[start : start + size] for start in rows[::size]]

    def close(self) -> None:
        """Do nothing: connections are closed after each call of `score`."""


def _parse_rewards_reply(reply: Reply, count: int) -> list[Answer]:
    """Split the reply of a reward server into one `Answer` (reward or failure) per sample.

    ``count`` is the number of samples in the request.
    """
    if reply.reason is not None:
        return [Answer(reply.reason, reply.message)] * count

    rewards = None
    if isinstance(reply.value, dict):
        rewards = reply.value.get("rewards")
    if isinstance(rewards, list) and len(rewards) == count:
        return [_parse_sample_reward(value) for value in rewards]

    got = f"{reply.value!r:.200}"
    if isinstance(rewards, list):
        got = f"{len(rewards)} rewards"
    message = f'expected {{"rewards": [...]}} with {count} entries, got {got}'
    return [Answer(MALFORMED, message)] * count


def _parse_sample_reward(value: Any) -> Answer:
    """Parse the value that a reply has for one sample; return the sample's reward or failure.

    The value is a number, or a mapping with a reward or an error.
    """
    if isinstance(value, dict) and "reward" not in value and "error" in value:
        return Answer(REPORTED, escape_unprintable(f"{value['error']!s:.500}"))
    answer = read_answer(reward_frame(value))
    assert answer is not None, "`reward_frame` returns only valid frames"
    return answer


# A language model as a judge

_Request = tuple[str, int]
"""Request to the judge: JSON text, and a number. The number is 0 if replies are cached. Without a cache it is
the sample's row, so that all requests differ."""


class JudgeReward:
    """Reward from the verdicts of a language model (the judge); see `JudgeConfig`.

    The parser and a template function run in confined worker processes. A reply that contains a verdict is
    cached, with its request as key, so that equal samples are sent to the judge once. The cache evicts the
    least recently used replies.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        url = config.url.rstrip("/") + "/chat/completions"
        self.server = Server(config, url, secret_headers(config, config.key_from))
        self._cache: OrderedDict[_Request, str] = OrderedDict()
        self._functions: list[FunctionReward] = []

        try:
            self._parser = self._start_function(
                config.parser,
                "parser",
                extra_arguments=(JUDGEMENT,),
            )
            self._template = None
            if is_function_path(config.template):
                self._template = self._start_function(
                    config.template,
                    "template",
                    returns_text=True,
                )
        except BaseException:
            self.close()
            raise

        # Names of the optional sample fields, such as the turns, that the template or the parser reads.
        self.optional_fields: frozenset[str] = frozenset()
        for function in self._functions:
            self.optional_fields |= function.optional_fields
        self.unenforced_limits = self._parser.unenforced_limits

        self._verdict_hint = ""
        if config.parser == JudgeConfig.parser:
            self._verdict_hint = " (a line that is `Score: N`, N from 0 to 1)"

    def _start_function(
        self,
        spec: str,
        name: str,
        *,
        returns_text: bool = False,
        extra_arguments: Sequence[str] = (),
    ) -> FunctionReward:
        """Start the worker processes of the template function or the parser at the path ``spec``.

        ``name`` is its key in the section `reward.judge`. Raises UserError for a function with a parameter
        ``group``.
        """
        settings = RewardConfig(spec, limits=self.config.limits)
        function = FunctionReward(
            settings,
            "reward.judge",
            name,
            returns_text=returns_text,
            extra_arguments=extra_arguments,
        )
        self._functions.append(function)

        if GROUP in function.optional_fields:
            raise UserError(
                f"the {name} of the judge has a parameter `{GROUP}`: a judge gets single responses",
                where=f"reward.judge.{name}",
                expected="a function of one response",
                got=spec,
                fix="compare the responses of a group in reward.function",
            )
        return function

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Compute the rewards of B samples, in the order of ``samples``."""
        answers: dict[int, Answer] = {}

        # Make the prompts for the judge. The user's template may fail for some samples.
        requests: dict[int, _Request] = {}
        for row, judge_prompt in enumerate(self._make_judge_prompts(samples)):
            if judge_prompt.reason is None:
                requests[row] = self._make_request(judge_prompt.text, row)
            else:
                answers[row] = judge_prompt

        # Get the texts of the judge, from the cache or the server.
        replies, counts = self._fetch_replies(list(requests.values()))
        texts: dict[int, str] = {}
        for row, request in requests.items():
            reply = replies[request]
            if reply.reason is None:
                texts[row] = reply.value
            else:
                answers[row] = Answer(reply.reason, reply.message)

        # Parse the verdicts. Remove a text without a verdict from the cache, so that the next request gets a
        # new text.
        parser_samples = [{**samples[row], JUDGEMENT: text} for row, text in texts.items()]
        verdicts = self._parser.compute_answers(parser_samples)
        for (row, text), verdict in zip(texts.items(), verdicts, strict=True):
            if verdict.reason == WRONG_TYPE:
                message = f"no verdict{self._verdict_hint} in the judge's text: {text!r:.500}"
                verdict = Answer(UNREADABLE, message)
            if verdict.reason is not None:
                self._cache.pop(requests[row], None)
            answers[row] = verdict

        metrics = _request_metrics("judge", counts, len(samples))
        return RewardResult([answers[row] for row in range(len(samples))], metrics)

    def _make_judge_prompts(self, samples: Sequence[Sample]) -> list[Answer]:
        """Make the prompt for the judge model for each sample.

        Returns an `Answer` per sample, the type that the result of every user function has. The ``text`` of
        the `Answer` is the prompt for the judge. If the template is a function and the function fails for a
        sample, the `Answer` has the reason of the failure and no prompt.
        """
        if self._template is not None:
            return self._template.compute_answers(samples)
        return [Answer(None, text=fill_template(self.config.template, sample)) for sample in samples]

    def _make_request(self, prompt: Any, row: int) -> _Request:
        """Make the chat-completion request for a prompt, which is text or a list of messages.

        A request consists of its JSON body and a number. Samples with equal requests get the same reply. If
        replies are cached, the number is 0, so that samples with equal prompts share one reply. If replies
        are not cached (`config.cache` is 0), the number is the ``row`` of the sample, so that each sample
        gets a separate reply.
        """
        messages = prompt
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]

        # `parameters` may override the sampling settings, but neither the model nor the messages. With sorted
        # keys, equal requests have equal texts.
        config = self.config
        body = {
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.parameters,
            "model": config.model,
            "messages": messages,
        }
        body_text = json.dumps(body, sort_keys=True)
        if config.cache:
            return body_text, 0
        return body_text, row

    def _fetch_replies(self, requests: Sequence[_Request]) -> tuple[dict[_Request, Reply], Counter[str]]:
        """Return the reply with the judge's text for each request, and the counters of the round.

        A request with a cached reply is not sent.
        """
        cached_replies: dict[_Request, Reply] = {}
        for request in requests:
            if request in self._cache:
                cached_replies[request] = Reply(None, value=self._cache[request])

        # Send each distinct request once: samples of a group often have equal responses.
        new_requests = [request for request in dict.fromkeys(requests) if request not in cached_replies]
        bodies = [json.loads(body_text) for body_text, _ in new_requests]
        new_replies = [_extract_completion(reply) for reply in self.server.post(bodies)]

        # Move used texts to the end of the cache, and evict texts from its front.
        for request in cached_replies:
            self._cache.move_to_end(request)
        for request, reply in zip(new_requests, new_replies, strict=True):
            if reply.reason is None:
                self._cache[request] = reply.value
        while len(self._cache) > self.config.cache:
            self._cache.popitem(last=False)

        counts = self.server.counts + Counter({CACHE_HITS: len(requests) - len(new_requests)})
        return cached_replies | dict(zip(new_requests, new_replies, strict=True)), counts

    def close(self) -> None:
        """End the worker processes of the template and the parser, if they are functions."""
        for function in self._functions:
            function.close()


def _extract_completion(reply: Reply) -> Reply:
    """Replace the value of a reply by the text of its chat completion.

    A failed reply is returned unchanged, and a reply without a text becomes the failure `MALFORMED`.
    """
    if reply.reason is not None:
        return reply

    try:
        text = reply.value["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        return Reply(MALFORMED, f"no text at choices[0].message.content of {reply.value!r:.200}")
    return Reply(None, value=text)
