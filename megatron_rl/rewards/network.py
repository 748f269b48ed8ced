"""Rewards from servers: one of the user's own, and a language model that judges."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from megatron_rl.config.sections.rewards import HttpRewardConfig, JudgeConfig, RewardConfig
from megatron_rl.contained.process import readable
from megatron_rl.errors import UserError
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.client import (
    CIRCUIT_OPEN,
    NONSENSE,
    PAUSES,
    REQUESTS,
    RETRIES,
    Reply,
    Server,
    secret_headers,
)
from megatron_rl.rewards.function import FunctionReward, RewardResult, Sample, rows_by_group
from megatron_rl.rewards.judgement import JUDGEMENT, filled, is_function
from megatron_rl.rewards.worker import (
    GROUP,
    TOKENS,
    TURNS,
    WRONG_TYPE,
    Answer,
    answer_of,
    scored,
)

REPORTED, UNREADABLE = "reported", "unreadable"
CACHE_HITS = "cache_hits"
_Request = tuple[str, int]


class HttpReward:
    """Score responses by a server of the user's; see `HttpRewardConfig` for what is said between them."""

    missing: tuple[str, ...] = ()

    def __init__(self, config: HttpRewardConfig) -> None:
        self.config = config
        self.takes = frozenset({TURNS, TOKENS, GROUP}.intersection(config.sends))
        self.server = Server(config, config.url, secret_headers(config))

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return rewards, validity, components and failures of B samples, in their order."""
        answers: dict[int, Answer] = {}
        parts = self._parts(samples)
        fields = [name for name in self.config.sends if name != GROUP]
        bodies = [
            {"samples": [{name: samples[row][name] for name in fields} for row in rows]} for rows in parts
        ]
        for rows, reply in zip(parts, self.server.ask(bodies), strict=True):
            answers |= dict(zip(rows, _rewards(reply, len(rows)), strict=True))
        took = measured("http", self.server.counts, len(samples))
        return RewardResult([answers[row] for row in range(len(samples))], took)

    def _parts(self, samples: Sequence[Sample]) -> list[Sequence[int]]:
        """Return the rows of each request."""
        if GROUP in self.takes:
            return [*rows_by_group(samples)]
        rows, size = range(len(samples)), self.config.samples_per_request
        return [rows[start : start + size] for start in rows[::size]]

    def close(self) -> None:
        """Do nothing: no connection outlives a step."""


def _rewards(reply: Reply, count: int) -> list[Answer]:
    """Return what a server says of ``count`` samples."""
    if reply.reason is not None:
        return [Answer(reply.reason, reply.message)] * count
    rewards = reply.value.get("rewards") if isinstance(reply.value, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        got = f"{reply.value!r:.200}" if not isinstance(rewards, list) else f"{len(rewards)} rewards"
        words = f'expected {{"rewards": [...]}} with {count} entries, got {got}'
        return [Answer(NONSENSE, words)] * count
    return [_reward(value) for value in rewards]


def _reward(value: Any) -> Answer:
    if isinstance(value, dict) and "reward" not in value and "error" in value:
        return Answer(REPORTED, readable(f"{value['error']!s:.500}"))
    answer = answer_of(scored(value))
    assert answer is not None, "what is scored is in the language of workers"
    return answer


class JudgeReward:
    """Score responses by what a language model says of them; see `JudgeConfig`.

    Template and parser are functions that run contained, but for a template that is text. What the
    judge says is kept by request where the parser could read it, so that the same sample is judged once;
    answers not used for longest go first.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        url = config.url.rstrip("/") + "/chat/completions"
        self.server = Server(config, url, secret_headers(config, config.key_from))
        self._kept: OrderedDict[_Request, str] = OrderedDict()
        self._functions: list[FunctionReward] = []
        try:
            self._parser = self._function(config.parser, "parser", further=(JUDGEMENT,))
            self._template = None
            if is_function(config.template):
                self._template = self._function(config.template, "template", writes=True)
        except BaseException:
            self.close()
            raise
        self.takes = frozenset[str]().union(*(function.takes for function in self._functions))
        self.missing = self._parser.missing
        usual = config.parser == JudgeConfig.parser
        self._wanted = " (a line that is `Score: N`, N from 0 to 1)" if usual else ""

    def _function(
        self, spec: str, name: str, *, writes: bool = False, further: Sequence[str] = ()
    ) -> FunctionReward:
        settings = RewardConfig(spec, limits=self.config.limits)
        function = FunctionReward(settings, "reward.judge", name, writes=writes, further=further)
        self._functions.append(function)
        if GROUP in function.takes:
            raise UserError(
                f"the {name} of the judge has a parameter `{GROUP}`: a judge is asked about single responses",
                where=f"reward.judge.{name}",
                expected="a function of one response",
                got=spec,
                fix="compare the responses of a group in reward.function",
            )
        return function

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Return rewards, validity, components and failures of B samples, in their order."""
        answers: dict[int, Answer] = {}
        requests: dict[int, _Request] = {}
        for row, written in enumerate(self._written(samples)):
            if written.reason is None:
                requests[row] = self._request(written.text, row)
            else:
                answers[row] = written
        judgements, counts = self._judgements(list(requests.values()))
        read: dict[int, str] = {}
        for row, request in requests.items():
            reply = judgements[request]
            if reply.reason is None:
                read[row] = reply.value
            else:
                answers[row] = Answer(reply.reason, reply.message)
        verdicts = self._parser.answers([{**samples[row], JUDGEMENT: text} for row, text in read.items()])
        for (row, text), verdict in zip(read.items(), verdicts, strict=True):
            if verdict.reason == WRONG_TYPE:
                verdict = Answer(
                    UNREADABLE, f"no verdict{self._wanted} in what the judge said: {text!r:.500}"
                )
            if verdict.reason is not None:
                self._kept.pop(requests[row], None)  # another answer may be readable
            answers[row] = verdict
        took = measured("judge", counts, len(samples))
        return RewardResult([answers[row] for row in range(len(samples))], took)

    def _written(self, samples: Sequence[Sample]) -> list[Answer]:
        if self._template is not None:
            return self._template.answers(samples)
        return [Answer(None, text=filled(self.config.template, sample)) for sample in samples]

    def _request(self, text: Any, row: int) -> _Request:
        """Return the request as JSON text, by which its answer is kept, unlike any other if none is."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        config = self.config
        body = {"temperature": config.temperature, "max_tokens": config.max_tokens, **config.parameters}
        text = json.dumps({**body, "model": config.model, "messages": messages}, sort_keys=True)
        return text, 0 if config.cache else row

    def _judgements(self, requests: Sequence[_Request]) -> tuple[dict[_Request, Reply], Counter[str]]:
        """Return the judge's text to each request, and what it took to get them."""
        kept = {
            request: Reply(None, value=self._kept[request]) for request in requests if request in self._kept
        }
        asked = [request for request in dict.fromkeys(requests) if request not in kept]
        replies = [_content(reply) for reply in self.server.ask([json.loads(text) for text, _ in asked])]
        for request in kept:
            self._kept.move_to_end(request)
        for request, reply in zip(asked, replies, strict=True):
            if reply.reason is None:
                self._kept[request] = reply.value
        while len(self._kept) > self.config.cache:
            self._kept.popitem(last=False)
        counts = self.server.counts + Counter({CACHE_HITS: len(requests) - len(asked)})
        return kept | dict(zip(asked, replies, strict=True)), counts

    def close(self) -> None:
        """End the processes of template and parser."""
        for function in self._functions:
            function.close()


def _content(reply: Reply) -> Reply:
    """Return the text of a chat completion."""
    if reply.reason is not None:
        return reply
    try:
        text = reply.value["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        return Reply(NONSENSE, f"no text at choices[0].message.content of {reply.value!r:.200}")
    return Reply(None, value=text)


def measured(name: str, counts: Counter[str], samples: int) -> Metrics:
    """Return what a round of requests took, per sample."""
    names = [REQUESTS, RETRIES, PAUSES, CIRCUIT_OPEN, *([CACHE_HITS] if name == "judge" else [])]
    metrics = Metrics()
    for what in names:
        metrics += Metrics.mean(f"reward/{name}/{what}", float(counts[what]), float(samples))
    return metrics
