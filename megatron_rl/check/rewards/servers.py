"""Rules on reward servers: their URLs, headers and requests, and whether the servers respond now."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence

from megatron_rl.config.sections.rewards import SENDABLE_PARTS, JudgeConfig, RewardConfig, RewardServerConfig
from megatron_rl.error_forms import unknown_choice
from megatron_rl.errors import UserError, nearest
from megatron_rl.redaction import is_secret
from megatron_rl.rewards.judgement import is_function

PATIENCE = 2.0
"""Timeout for the responses of all servers together, in seconds: `check` should take less than five."""

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""Pattern of an HTTP header name: a token of RFC 9110, section 5.6.2."""

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SET_BY_JUDGE = ("model", "messages", "stream", "n")
"""Parameters of a judge's request that the run sets itself."""


def servers(reward: RewardConfig) -> Iterator[tuple[str, RewardServerConfig]]:
    """Yield the key and the settings of every reward server: ``reward.http`` and ``reward.judge``."""
    for name, config in (("http", reward.http), ("judge", reward.judge)):
        if config is not None:
            yield f"reward.{name}", config


def check_servers(reward: RewardConfig) -> Iterator[UserError]:
    """Yield the errors of the servers' settings, without sending a request."""
    for section, config in servers(reward):
        yield from _url_errors(f"{section}.url", config.url)
        for header, variable in config.headers.items():
            yield from _header_errors(f"{section}.headers", header)
            yield from _variable_errors(f"{section}.headers", variable)

    if reward.http is not None:
        yield from _sends_errors(reward.http.sends)
    if reward.judge is not None:
        yield from _judge_errors(reward.judge)


def _url_errors(path: str, url: str) -> Iterator[UserError]:
    """Yield the error of an invalid URL, or of one with a secret, which is not shown."""
    # urlsplit accepts almost any text, so check each part.
    try:
        address = urllib.parse.urlsplit(url)
        parameters = [name for name, _ in urllib.parse.parse_qsl(address.query)]
        valid = (
            address.scheme in ("http", "https") and address.hostname and not re.search(r"[\s\x00-\x1f]", url)
        )
        has_login = address.username is not None or address.password is not None

        # Do not print a URL with a secret in the report.
        if valid and (has_login or any(map(is_secret, parameters))):
            yield UserError(
                "the server URL contains a secret, and a run writes its settings to files",
                where=path,
                expected="a URL without user, password or key",
                got=f"a URL of {address.hostname} with one",
                fix="name an environment variable that holds it in headers: Authorization: SERVER_TOKEN",
            )
            return

        # urlsplit accepts port 0, on which no server listens.
        problem = None if valid and address.port != 0 else repr(url)
    except ValueError as error:  # brackets or a port that urlsplit refuses
        problem = f"{url!r}: {error}"
    if problem is not None:
        yield UserError(
            "invalid server URL",
            where=path,
            expected="http://HOST:PORT/PATH or https://HOST/PATH",
            got=problem,
            fix="correct it",
        )


def _header_errors(path: str, header: str) -> Iterator[UserError]:
    if not _HEADER_NAME.fullmatch(header):
        yield UserError(
            "invalid name of an HTTP header",
            where=path,
            expected="letters, digits and -",
            got=repr(header),
            fix="correct the name",
        )


def _variable_errors(path: str, name: str) -> Iterator[UserError]:
    """Yield the error of an environment variable for a secret: an invalid name, or no valid value here.

    An invalid name may be the secret itself, so it is not printed.
    """
    if not _VARIABLE_NAME.fullmatch(name) or not is_secret(name):
        yield UserError(
            "a secret has to be named by an environment variable that user code cannot read",
            where=path,
            expected="the name of an environment variable that looks like a secret's, as SERVER_TOKEN or "
            "MY_API_KEY",
            got=f"{len(name)} characters that are no such name",
            fix="put the secret into such a variable, and write its name here",
        )
        return

    # The run reads the variable on this machine.
    value = os.environ.get(name, "")
    if value.strip() and value.isprintable() and value.isascii():
        return
    yield UserError(
        f"the environment variable {name} holds no secret",
        where=path,
        expected="one line of printable characters",
        got="text that no header can hold" if value.strip() else "nothing",
        fix=f"export {name}=... where the run is started",
    )


def _sends_errors(sends: tuple[str, ...]) -> Iterator[UserError]:
    """Yield the errors of ``reward.http.sends``, the fields of a sample in a request."""
    if not sends:
        yield UserError(
            "`reward.http.sends` is empty: a request would have no sample",
            where="reward.http.sends",
            expected=f"some of {', '.join(SENDABLE_PARTS)}",
            got="nothing",
            fix="remove the setting",
        )
    for name in sends:
        if name not in SENDABLE_PARTS:
            suggestion = nearest(name, SENDABLE_PARTS)
            fix = f"write {suggestion}" if suggestion else "remove it"
            yield unknown_choice("reward.http.sends", name, list(SENDABLE_PARTS), fix=fix)


def _judge_errors(judge: JudgeConfig) -> Iterator[UserError]:
    """Yield the errors of an LLM judge: its key, its template and its request's parameters."""
    if judge.key_from is not None:
        yield from _variable_errors("reward.judge.key_from", judge.key_from)
    if not is_function(judge.template) and "{response}" not in judge.template:
        yield UserError(
            "the judge's template does not contain the response",
            where="reward.judge.template",
            expected="text with {response}, or path/to/file.py:function",
            got=f"{judge.template!r:.80}",
            fix="write {response} where the response is to stand",
        )

    # The run sets these itself, since they decide the form of the judge's response.
    for name in _SET_BY_JUDGE:
        if name in judge.parameters:
            yield UserError(
                f"`reward.judge.parameters.{name}` is set by the run itself",
                where=f"reward.judge.parameters.{name}",
                expected=f"parameters other than {', '.join(_SET_BY_JUDGE)}",
                got=repr(name),
                fix="set reward.judge.model" if name == "model" else "remove it",
            )


def silent_servers(
    reward: RewardConfig, samplers: Sequence[str] = (), health_path: str | None = None
) -> Iterator[UserError]:
    """Yield warnings of servers that do not respond now; they may be up when the run starts.

    ``samplers`` are the URLs of the rollout engine's servers; each must answer at ``health_path``, if
    their engine has one.
    """
    # Any response of a reward server counts; the engine's servers have a health endpoint.
    reward_urls = {section: config.url for section, config in servers(reward)}

    requests: list[tuple[str, str | None]] = [(url, None) for url in reward_urls.values()]
    requests += [(url, health_path) for url in samplers]

    problems = _request_all(requests)

    reward_problems = problems[: len(reward_urls)]
    for section, problem in zip(reward_urls, reward_problems, strict=True):
        if problem is not None:
            yield UserError(
                "the reward server does not answer now",
                where=f"{section}.url",
                expected="an answer of any kind",
                got=problem,
                fix="start it before the run, or correct the address",
            )

    sampler_problems = problems[len(reward_urls) :]
    silent = [
        f"{url}: {problem}"
        for url, problem in zip(samplers, sampler_problems, strict=True)
        if problem is not None
    ]
    if silent:
        yield UserError(
            f"{len(silent)} of {len(samplers)} servers of the rollout engine do not answer now",
            where="rollout.server.urls",
            expected="a server of rollout.engine at each address, started as SERVERS shows",
            got="\n".join(silent),
            fix="start them before the run, or correct the addresses",
        )


def _request_all(requests: Sequence[tuple[str, str | None]]) -> list[str | None]:
    """Send a request to each (URL, health path) in parallel; return the problem of each, None for a response.

    It uses daemon threads and no pool: a DNS lookup can block longer than `check` waits, and a pool would
    wait for it at exit.
    """
    problems: list[str | None] = [f"no answer within {PATIENCE:g} s"] * len(requests)

    def send(index: int) -> None:
        problems[index] = _request(*requests[index])

    threads = [threading.Thread(target=send, args=(index,), daemon=True) for index in range(len(requests))]
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.start()

    # All threads share one deadline.
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(problems)  # a copy, since late threads still write to it


def _request(url: str, health_path: str | None) -> str | None:
    """Send one request; return the problem, None for a healthy server.

    Without a ``health_path`` any status is healthy, with one only status 200 at that path.
    """
    address = urllib.parse.urlsplit(url)
    connection: http.client.HTTPConnection
    try:
        if address.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(address.netloc, timeout=PATIENCE, context=context)
        else:
            connection = http.client.HTTPConnection(address.netloc, timeout=PATIENCE)

        # A HEAD request starts no computation on a reward server, and any response shows that it is up.
        if health_path is not None:
            connection.request("GET", health_path)
        else:
            connection.request("HEAD", address.path or "/")

        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"

    if health_path is not None and status != 200:
        return f"HTTP status {status} at {health_path}"
    return None
