"""Ask a server over HTTP: many requests at once, tries, pauses, and an end to asking one that is gone.

This is the project's own code, so it runs in the trainer, where the network is; code of a user that reads
answers or writes requests runs contained, without network and without the secrets that headers hold. A server
is not believed: its answers are bounded in size and time, redirections are not followed, and no text of it
that reaches a message holds a secret.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from megatron_rl.config.sections.rewards import RewardServerConfig
from megatron_rl.contained.process import encodable
from megatron_rl.progress import advance
from megatron_rl.redaction import HIDDEN
from megatron_rl.rewards.worker import TIMEOUT

UNREACHABLE, STATUS, RATE_LIMITED, NONSENSE = "unreachable", "status", "rate_limited", "nonsense"
CIRCUIT_OPEN = "circuit_open"
REQUESTS, RETRIES, PAUSES = "requests", "retries", "rate_limited"
LARGEST_REPLY = 2**22
"""Bytes of an answer above which it is nonsense."""
SHORTEST_SECRET = 6
"""Characters of a word of a header, such as a key behind ``Bearer``, that is kept out of messages."""
EXCERPT = 200
"""Characters of an answer that a message shows."""


class Reply(NamedTuple):
    """Hold the JSON that a server answered, or the ``reason`` why there is none."""

    reason: str | None
    message: str = ""
    value: Any = None


class _Try(NamedTuple):
    reply: Reply
    again: bool = False
    """Whether another try may do better; when all fail, the server counts as gone."""
    pause: float = 0.0
    """Seconds that the server asks everyone to wait."""


class Server:
    """One server, asked in rounds; what is learned of it in one round holds in the next.

    ``counts`` are what the requests of the last round needed. ``secrets`` maps headers to their values.
    """

    def __init__(self, config: RewardServerConfig, url: str, secrets: dict[str, str]) -> None:
        self.config, self._url, self._secrets = config, url, secrets
        self.counts: Counter[str] = Counter()
        self._jitter = random.Random()
        self._not_before = 0.0
        self._failures = 0
        self._opened: float | None = None
        self._probing = False

    def ask(self, bodies: Sequence[Any]) -> list[Reply]:
        """Post each of the ``bodies`` as JSON and return the replies, in their order."""
        self.counts = Counter()
        if not bodies:
            return []
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(self._ask(bodies))

    async def _ask(self, bodies: Sequence[Any]) -> list[Reply]:
        slots = asyncio.Semaphore(self.config.concurrency)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.config.concurrency),
            timeout=aiohttp.ClientTimeout(total=self.config.timeout),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **self._secrets},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as session:

            async def one(body: Any) -> Reply:
                async with slots:
                    return await self._with_tries(session, json.dumps(body, default=str).encode())

            return list(await asyncio.gather(*map(one, bodies)))

    async def _with_tries(self, session: aiohttp.ClientSession, body: bytes) -> Reply:
        config, probe = self.config, False
        if self._opened is not None:
            if self._probing or time.monotonic() < self._opened + config.open_seconds:
                return self._refused()
            self._probing = probe = True
        tried = _Try(Reply(None))
        for number in range(1 + config.retries):
            if number:
                self.counts[RETRIES] += 1
                wait = min(config.backoff * 2 ** min(number - 1, 60), config.longest_wait)
                await asyncio.sleep(max(tried.pause, wait * self._jitter.uniform(0.5, 1.0)))
                if self._opened is not None and not probe:
                    return self._refused()
            await self._turn()
            self.counts[REQUESTS] += 1
            tried = await self._once(session, body)
            # Whatever came of it: a server that never answers is given up after its own limits.
            advance("requests to servers that judge")
            if tried.pause:
                self._not_before = max(self._not_before, time.monotonic() + tried.pause)
            if not tried.again:
                break
        self._note(tried)
        return tried.reply

    def _note(self, tried: _Try) -> None:
        """Open the circuit after the last of many failures, close it after a sign of life."""
        self._probing = False
        advance("requests to reward servers")
        if not tried.again or tried.reply.reason == RATE_LIMITED:
            self._failures, self._opened = 0, None
            return
        self._failures += 1
        if self._failures >= self.config.open_after:
            self._opened = time.monotonic()

    def _refused(self) -> Reply:
        self.counts[CIRCUIT_OPEN] += 1
        words = f"the last {self._failures} requests to the server failed; nothing is sent to it for a while"
        return Reply(CIRCUIT_OPEN, words)

    async def _turn(self) -> None:
        """Wait until a request may be sent: the server asked for a pause, or the rate is reached."""
        while (wait := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        if self.config.rate is not None:
            self._not_before = time.monotonic() + 1 / self.config.rate

    async def _once(self, session: aiohttp.ClientSession, body: bytes) -> _Try:
        try:
            async with session.post(self._url, data=body, allow_redirects=False) as response:
                return self._judged(response, await _content(response))
        except TimeoutError:
            return _Try(Reply(TIMEOUT, f"no answer within {self.config.timeout:g} s"), again=True)
        except aiohttp.ClientResponseError as error:
            return _Try(Reply(NONSENSE, self._told(f"the answer is no HTTP: {error.message}")), again=True)
        except (aiohttp.ClientError, OSError) as error:
            return _Try(Reply(UNREACHABLE, self._told(f"{type(error).__name__}: {error}")), again=True)

    def _judged(self, response: aiohttp.ClientResponse, content: bytes) -> _Try:
        text, status = self._told(content.decode("utf-8", "replace")), response.status
        if 200 <= status < 300:
            try:
                if len(content) > LARGEST_REPLY:
                    raise ValueError(f"more than {LARGEST_REPLY} bytes")
                return _Try(Reply(None, value=json.loads(text)))
            except (ValueError, RecursionError) as error:
                return _Try(Reply(NONSENSE, f"the answer is no JSON ({error!s:.80}): {text[:EXCERPT]!r}"))
        words = f"HTTP status {status}: {text[:EXCERPT]!r}"
        if status == 429:
            self.counts[PAUSES] += 1
        pause = self._pause(response) if status in (429, 503) else 0.0
        again = status in (408, 429) or status >= 500
        return _Try(Reply(RATE_LIMITED if status == 429 else STATUS, words), again, pause)

    def _pause(self, response: aiohttp.ClientResponse) -> float:
        """Return the seconds that ``Retry-After`` asks for, as a number or a date; 0 for anything else."""
        text = response.headers.get("Retry-After", "").strip()
        try:
            seconds = (
                float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
            )
        except (ValueError, TypeError, OverflowError):
            return 0.0
        return min(max(seconds, 0.0), self.config.longest_wait)

    def _told(self, text: str) -> str:
        for secret in self._secrets.values():
            for word in (secret, *secret.split()):
                text = text.replace(word, HIDDEN) if len(word) >= SHORTEST_SECRET else text
        return encodable(text)


async def _content(response: aiohttp.ClientResponse) -> bytes:
    """Return what was answered, cut somewhere above the largest size."""
    content = bytearray()
    async for data in response.content.iter_any():
        content.extend(data)
        if len(content) > LARGEST_REPLY:
            response.close()
            break
    return bytes(content)


def secret_headers(config: RewardServerConfig, key_from: str | None = None) -> dict[str, str]:
    """Return the headers whose values environment variables hold; ``key_from`` names that of an API key."""
    headers = {header: os.environ[name] for header, name in config.headers.items()}
    return headers | ({} if key_from is None else {"Authorization": f"Bearer {os.environ[key_from]}"})
