"""Rules on servers that judge: where they are, what they are told, and whether they and samplers answer."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence

from megatron_rl.config.sections.rewards import SENDS, JudgeConfig, RewardConfig, RewardServerConfig
from megatron_rl.errors import UserError, nearest
from megatron_rl.redaction import is_secret
from megatron_rl.rewards.judgement import is_function

PATIENCE = 2.0
"""Seconds that all servers together have to answer."""
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def servers(reward: RewardConfig) -> Iterator[tuple[str, RewardServerConfig]]:
    """Yield the section and the settings of every server that judges."""
    for name, config in (("http", reward.http), ("judge", reward.judge)):
        if config is not None:
            yield f"reward.{name}", config


def check_servers(reward: RewardConfig) -> Iterator[UserError]:
    """Yield what is wrong with servers as far as that can be known without asking them."""
    for where, config in servers(reward):
        yield from _check_url(f"{where}.url", config.url)
        for header, name in config.headers.items():
            yield from _check_header(f"{where}.headers", header)
            yield from _check_variable(f"{where}.headers", name)
    if reward.http is not None:
        yield from _check_sends(reward.http.sends)
    if reward.judge is not None:
        yield from _check_judge(reward.judge)


def _check_url(where: str, url: str) -> Iterator[UserError]:
    problem = None
    try:
        parts = urllib.parse.urlsplit(url)
        names = [name for name, _ in urllib.parse.parse_qsl(parts.query)]
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
            problem = repr(url)
        elif parts.username is not None or parts.password is not None or any(map(is_secret, names)):
            # What is wrong with it must not be shown.
            yield UserError(
                "the address of a server holds a secret, and a run writes its settings down",
                where=where,
                expected="an address without user, password or key",
                got=f"an address at {parts.hostname} with one",
                fix="name an environment variable that holds it in headers: Authorization: SERVER_TOKEN",
            )
            return
        elif parts.port == 0:
            problem = repr(url)
    except ValueError as error:
        problem = f"{url!r}: {error}"
    if problem is not None:
        yield UserError(
            "the address of a server is none",
            where=where,
            expected="http://HOST:PORT/PATH or https://HOST/PATH",
            got=problem,
            fix="correct it",
        )


def _check_header(where: str, header: str) -> Iterator[UserError]:
    if not _HEADER.fullmatch(header):
        yield UserError(
            "a header has a name that HTTP does not know",
            where=where,
            expected="letters, digits and -",
            got=repr(header),
            fix="correct the name",
        )


def _check_variable(where: str, name: str) -> Iterator[UserError]:
    """Yield the error of an environment variable; what may be a secret itself is not shown."""
    expected = "the name of an environment variable that looks like a secret's, as SERVER_TOKEN or MY_API_KEY"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not is_secret(name):
        yield UserError(
            "a secret is not named by an environment variable that user code is kept from",
            where=where,
            expected=expected,
            got=f"{len(name)} characters that are no such name",
            fix="put the secret into such a variable, and write its name here",
        )
        return
    value = os.environ.get(name, "")
    if value.strip() and value.isprintable() and value.isascii():
        return
    yield UserError(
        f"the environment variable {name} holds no secret",
        where=where,
        expected="one line of printable characters",
        got="text that no header can hold" if value.strip() else "nothing",
        fix=f"export {name}=... where the run is started",
    )


def _check_sends(sends: tuple[str, ...]) -> Iterator[UserError]:
    wrong = [name for name in sends if name not in SENDS]
    if not wrong and sends:
        return
    close = nearest(wrong[0], SENDS) if wrong else None
    yield UserError(
        "the server would be sent what no sample has" if wrong else "the server would be sent nothing",
        where="reward.http.sends",
        expected=f"some of {', '.join(SENDS)}",
        got=", ".join(map(repr, wrong)) or "nothing",
        fix=f"write {close}" if close else "remove it" if wrong else "remove the setting",
    )


def _check_judge(judge: JudgeConfig) -> Iterator[UserError]:
    if judge.key_from is not None:
        yield from _check_variable("reward.judge.key_from", judge.key_from)
    if not is_function(judge.template) and "{response}" not in judge.template:
        yield UserError(
            "the judge is not shown what it is to judge",
            where="reward.judge.template",
            expected="text with {response}, or path/to/file.py:function",
            got=f"{judge.template!r:.80}",
            fix="write {response} where the response is to stand",
        )
    for name in [name for name in ("model", "messages", "stream", "n") if name in judge.parameters]:
        yield UserError(
            "a parameter of the judge's request is not free",
            where=f"reward.judge.parameters.{name}",
            expected="parameters other than model, messages, stream and n",
            got=repr(name),
            fix="set reward.judge.model" if name == "model" else "remove it",
        )


def silent_servers(
    reward: RewardConfig, samplers: Sequence[str] = (), health_path: str | None = None
) -> Iterator[UserError]:
    """Yield warnings of servers that do not answer now; they may be there when the run starts.

    ``samplers`` are the addresses of a run's engine: each must answer at ``health_path``, if there is one.
    """
    judges = {where: config.url for where, config in servers(reward)}
    problems = _problems([*judges.values(), *samplers], [None] * len(judges) + [health_path] * len(samplers))
    for (where, _), problem in zip(judges.items(), problems, strict=False):
        if problem is not None:
            yield UserError(
                "the server that is to judge does not answer now",
                where=f"{where}.url",
                expected="an answer of any kind",
                got=problem,
                fix="start it before the run, or correct the address",
            )
    silent = [
        f"{url}: {problem}"
        for url, problem in zip(samplers, problems[len(judges) :], strict=True)
        if problem is not None
    ]
    if silent:
        yield UserError(
            f"of {len(samplers)} servers that are to sample, {len(silent)} do not answer now",
            where="rollout.server.urls",
            expected="a server of rollout.engine at each address, started as SERVERS shows",
            got="\n".join(silent),
            fix="start them before the run, or correct the addresses",
        )


def _problems(urls: Sequence[str], health_paths: Sequence[str | None]) -> list[str | None]:
    """Ask at all addresses at once; return why nobody answers there, None where someone does.

    See `_problem` for ``health_paths``, one for each address.
    """
    problems: list[str | None] = [f"no answer within {PATIENCE:g} s"] * len(urls)

    def ask(place: int) -> None:
        problems[place] = _problem(urls[place], health_paths[place])

    threads = [threading.Thread(target=ask, args=(place,), daemon=True) for place in range(len(urls))]
    until = time.monotonic() + PATIENCE
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(problems)


def _problem(url: str, health_path: str | None) -> str | None:
    """Return why nobody answers at ``url``; with a ``health_path`` only status 200 there is an answer."""
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                parts.netloc, timeout=PATIENCE, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=PATIENCE)
        if health_path is not None:
            connection.request("GET", health_path)
        else:
            connection.request("HEAD", parts.path or "/")
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    if health_path is not None and status != 200:
        return f"HTTP status {status} at {health_path}"
    return None
