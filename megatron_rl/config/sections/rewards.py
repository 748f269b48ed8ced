"""What judges responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.sections.bounds import (
    LARGE,
    MANY,
    MOST_ROWS,
    POSITIVE,
    PROCESSES,
    SECONDS,
    SHARE,
    STEPS,
    TOKENS,
    WEIGHT,
)
from megatron_rl.config.sections.limits import LimitsConfig
from megatron_rl.config.sections.models import LIKE_ACTOR, OWN_MEGATRON, LayoutConfig, LoraConfig
from megatron_rl.config.sections.stages import PairsConfig
from megatron_rl.config.setting import required, setting

FUNCTION = "function"


@dataclass(frozen=True)
class RewardModelConfig:
    """Describe one reward model, which scores a row at its last token."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "A `*ForSequenceClassification` checkpoint with one label and the actor's tokenizer, or with "
        "`training` any policy of that tokenizer.",
        unset="with training: model.path, after `sft` and `preference` where they are",
    )
    weight: float = setting(1.0, "Factor of the score in the reward.", **WEIGHT)
    layout: LayoutConfig | None = setting(
        None, "Ranks and parallelism of the reward model.", unset="the actor's"
    )
    offload: bool = setting(False, "Move the model to host memory while other roles work.")
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)
    training: PairsConfig | None = setting(
        None, "Training of the reward model before the first step.", unset="none"
    )
    lora: LoraConfig | None = setting(
        None,
        "Adapters that `training` trains in the place of the weights, beside the head; the model that it "
        "leaves has them added in.",
        unset="every weight is trained",
    )


@dataclass(frozen=True)
class RewardLimitsConfig(LimitsConfig):
    """Bound what a call of the reward function may use, with all that it starts; else the row is invalid.

    A run says at its start which of these the machine's kernel does not enforce.
    """

    cpu_seconds: float = setting(60.0, "Processor time of a call.", **SECONDS)


@dataclass(frozen=True, kw_only=True)
class RewardServerConfig:
    """Say where a server is and how patient the run is with it.

    The first rank of the job speaks with it: numbers of requests are those of the whole job.
    """

    url: str = required(
        "Address that samples are posted to; secrets belong in headers.", example="http://host:8000/score"
    )
    headers: dict[str, str] = setting(
        {},
        "Headers of a request: for each the name of the environment variable that holds its value, such as "
        "SCORER_TOKEN. No process of your code gets such a variable unless `limits.environment` names it, "
        "and nothing writes its value down.",
    )
    concurrency: int = setting(16, "Requests open at once.", unit="requests", **MANY)
    rate: float | None = setting(
        None, "Most requests per second.", unit="1/second", unset="no limit", **POSITIVE
    )
    timeout: float = setting(30.0, "Time after which a request has failed.", **SECONDS)
    retries: int = setting(
        3,
        "Further tries of a request where the server is not reached, is too slow, has an error of its own or "
        "asks for a pause.",
        unit="tries",
        at_least=0,
        at_most=1000,
    )
    backoff: float = setting(0.5, "Wait before the first further try; it doubles with each.", **SECONDS)
    longest_wait: float = setting(
        60.0, "Longest wait before a further try, whatever the server asks for.", **SECONDS
    )
    open_after: int = setting(
        8,
        "Requests running that fail with all their tries, after which nothing is sent for a while: the "
        "circuit is open, and samples are invalid at once.",
        unit="requests",
        **MANY,
    )
    open_seconds: float = setting(30.0, "Time after which an open circuit lets one request try.", **SECONDS)
    weight: float = setting(1.0, "Factor of its reward in the sum.", **WEIGHT)


SENDS = ("prompt", "response", "ground_truth", "metadata", "turns", "tokens", "group")


@dataclass(frozen=True, kw_only=True)
class HttpRewardConfig(RewardServerConfig):
    """Have a server of your own judge: it is posted samples and answers with their rewards.

    A request is ``{"samples": [{"prompt": ..., "response": ..., ...}, ...]}``, its answer
    ``{"rewards": [...]}`` with a number for each sample, a mapping of named numbers that holds ``reward``, or
    ``{"error": "why there is none"}``.
    """

    sends: tuple[str, ...] = setting(
        SENDS[:4],
        f"What a sample holds, of {', '.join(SENDS[:6])}; with group, a request has all samples of a prompt.",
    )
    samples_per_request: int = setting(1, "Samples of a request.", unit="samples", **MANY)


TEMPLATE = """Problem:
{prompt}

Reference answer:
{ground_truth}

Answer to be judged:
{response}

Is the answer right? Say why in a few words, and end with a line "Score: N", where N is a number from 0 \
(wrong) to 1 (right)."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(RewardServerConfig):
    """Have a language model judge, behind any server with OpenAI's chat completions.

    What it says is read by a parser, which runs contained as reward functions do.
    """

    url: str = required(
        "Address of the server's API, to which /chat/completions is added.", example="http://host:8000/v1"
    )
    model: str = required("Name of the model at the server.", example="Qwen/Qwen2.5-72B-Instruct")
    key_from: str | None = setting(
        None,
        "Name of the environment variable that holds the API key, such as JUDGE_API_KEY.",
        unset="no key",
    )
    template: str = setting(
        TEMPLATE,
        "What the judge is asked: text in which {prompt}, {response} and {ground_truth} are replaced, or "
        "path/to/file.py:function, called as a reward function and returning text or chat messages.",
    )
    parser: str = setting(
        "megatron_rl.rewards.judgement:score_line",
        "Function that reads the judge's answer: a reward function with a further parameter `judgement`, "
        "which returns None where there is no verdict. The default reads the last line `Score: N`.",
    )
    temperature: float = setting(0.0, "Temperature of the judge.", at_least=0, at_most=LARGE)
    max_tokens: int = setting(512, "Longest answer.", **TOKENS)
    parameters: dict[str, Any] = setting({}, "Further parameters of the request.")
    cache: int = setting(
        100_000,
        "Answers with a verdict that are kept: what was asked before, or twice in a step, is not asked "
        "again; 0 keeps none.",
        unit="answers",
        at_least=0,
        at_most=MOST_ROWS,
    )
    limits: RewardLimitsConfig = setting(RewardLimitsConfig(), "What a call of template or parser may use.")


@dataclass(frozen=True)
class CodeConfig:
    """Judge programs by tests: the last block of Python in a response is run against the ground truth.

    The ground truth is a list of tests, or JSON text of one: ``{"stdin": "2 3", "stdout": "5"}`` for what the
    program prints, ``{"call": "add(2, 3)", "returns": 5}`` for what a function of it returns, or Python with
    assertions, ``"assert add(2, 3) == 5"``. The program runs in a process below the contained worker, and the
    test that compares in another one. A program that fails, is too slow or goes over a limit has not passed
    the test; where tests cannot be read, only the program could compare, or the worker does not survive the
    program, the sample is invalid.
    """

    language: str = setting("python", "Language of the programs.", choices=("python",))
    scoring: str = setting(
        "all",
        "`all`: 1 for a program that passes every test, else 0; `share`: the share of tests passed.",
        choices=("all", "share"),
    )
    test_timeout: float = setting(5.0, "Time of a program in one test.", **SECONDS)
    timeout: float = setting(
        60.0, "Time of a program in all its tests; it has not passed those that are left then.", **SECONDS
    )
    workers: int = setting(1, "Processes per rank that test programs.", **PROCESSES)
    limits: RewardLimitsConfig = setting(
        RewardLimitsConfig(memory_gib=1.0, processes=16), "What a program may use."
    )
    weight: float = setting(1.0, "Factor of its reward in the sum.", **WEIGHT)


@dataclass(frozen=True)
class RewardConfig:
    """Say what judges a response: a function, tests, a server, a judge, reward models, or a weighted sum.

    The function is called in worker processes with those of ``prompt``, ``response``, ``ground_truth``,
    ``metadata`` and ``arguments`` that it names among its parameters, or all where it has ``**kwargs``. It
    returns a number, or a mapping of named components that holds ``reward``. Where it has
    a parameter ``turns`` it is given what was said behind the prompt, as a list of ``{role, content}`` with
    the roles policy and environment, the number of ``tokens``, and ``tool_calls`` where a turn has any; where
    it has ``tokens``, a mapping of ``prompt``, ``response``, ``mask`` and ``log_probs``. One with a parameter
    ``group`` is called once for all responses to a prompt, whose texts ``group`` lists instead of
    ``response``; ``turns`` and ``tokens`` are then lists too, and it returns a reward for each, an exception
    or None where there is none. It may be ``async def``. Where several judge, the reward of a row is the sum
    of what they say, each times its weight; where one of them fails the row is invalid.
    """

    VALUE_KEY: ClassVar[str] = "function"

    function: str | None = setting(
        None,
        "module:function, or path/to/file.py:function.",
        unset="what else there is",
        also_called={
            "verl": "custom_reward_function.path, custom_reward_function.name",
            "slime": "custom_rm_path",
            "TRL": "reward_funcs",
            "OpenRLHF": "remote_rm_url",
            "common": "reward_function, reward_fn, reward_fn_path, reward.fn",
        },
        conversion={
            "custom_reward_function.path": "path/to/file.py:function",
            "custom_reward_function.name": "path/to/file.py:function",
            "custom_rm_path": "module:function",
            "remote_rm_url": "path/to/file.py:function; a server is `reward.http`",
        },
    )
    arguments: dict[str, Any] = setting(
        {}, "Further arguments of the function.", also_called={"verl": "reward_kwargs"}
    )
    timeout: float = setting(10.0, "Time after which a call of the function has failed.", **SECONDS)
    workers: int = setting(
        1,
        "Processes per rank that call the function.",
        **PROCESSES,
        also_called={"verl": "reward_model.num_workers", "common": "reward.num_workers"},
    )
    concurrency: int = setting(
        16, "Calls of an `async def` function that a worker has open at once.", unit="calls", **MANY
    )
    max_invalid_fraction: float = setting(
        0.5,
        "Share of a step's rewards that may fail; a run whose steps go over it `invalid_steps` times running "
        "stops and says why they fail.",
        **SHARE,
        advice="1 never stops a run",
    )
    invalid_steps: int = setting(3, "Steps running over `max_invalid_fraction` that stop a run.", **STEPS)
    limits: RewardLimitsConfig = setting(RewardLimitsConfig(), "What a call of the function may use.")
    weight: float = setting(
        1.0,
        "Factor of the function's reward in the sum.",
        **WEIGHT,
        also_called={"TRL": "reward_weights"},
        conversion={
            "reward_weights": "ours has a weight for each section of reward, and for each of reward.models"
        },
    )
    code: CodeConfig | None = setting(None, "Tests of the programs in responses.", unset="none")
    http: HttpRewardConfig | None = setting(None, "A server that judges.", unset="none")
    judge: JudgeConfig | None = setting(None, "A language model that judges.", unset="none")
    models: dict[str, RewardModelConfig] = setting(
        {},
        "Reward models by name.",
        also_called={
            "verl": "reward_model.model.path",
            "OpenRLHF": "reward_pretrain",
            "common": "reward_model_path, reward_model_name_or_path",
        },
        conversion="ours has a name for each: NAME.path",
    )

    @property
    def scorers(self) -> dict[str, float]:
        """Return the weights of what judges besides reward models, by the name of its setting."""
        sections = {"code": self.code, "http": self.http, "judge": self.judge}
        weights = {name: section.weight for name, section in sections.items() if section is not None}
        return weights if self.function is None else {FUNCTION: self.weight, **weights}
