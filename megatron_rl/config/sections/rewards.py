"""Rewards: a function, tests of programs, a server, an LLM judge, and reward models.

Any number of these rewards can be set, and the reward of a row is their weighted sum. If one of them fails
for a row, the row is invalid: it has no reward, which is different from a reward of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.sections.bounds import (
    LARGE,
    MANY,
    MAX_ROWS,
    POSITIVE,
    PROCESSES,
    SECONDS,
    SHARE,
    STEPS,
    TOKENS,
    WEIGHT,
    LimitsConfig,
)
from megatron_rl.config.sections.models import (
    AFTER_STAGES,
    LIKE_ACTOR,
    OWN_MEGATRON,
    LayoutConfig,
    LoraConfig,
)
from megatron_rl.config.sections.stages import PairsConfig
from megatron_rl.config.setting import required, setting

# Name of the reward function among the scorers.
FUNCTION = "function"


@dataclass(frozen=True)
class RewardModelConfig:
    """Reward model: the reward of a row is the model's output at the last token."""

    VALUE_KEY: ClassVar[str] = "path"

    path: str | None = setting(
        None,
        "A `*ForSequenceClassification` checkpoint with one label and the actor's tokenizer; with "
        "`training`, also any policy with that tokenizer.",
        unset=f"with training: {AFTER_STAGES}",
    )
    weight: float = setting(1.0, "Factor of its reward in the sum.", **WEIGHT)
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
        "Adapters that `training` trains in place of the weights, together with the head. They are merged "
        "into the weights of the model that it writes.",
        unset="every weight is trained",
    )


@dataclass(frozen=True)
class RewardLimitsConfig(LimitsConfig):
    """Limits of one call of the reward function, with all the processes that it starts.

    A row whose call exceeds a limit is invalid. A run reports at its start which limits the kernel of the
    machine does not enforce.
    """

    # In addition to the timeout, which is wall-clock time: a call that sleeps uses no processor time.
    cpu_seconds: float = setting(60.0, "Processor time of a call.", **SECONDS)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Server that computes rewards or log-probs of samples, and the limits of requests to it.

    One rank of the job sends all requests, so that the limits apply to the complete job.
    """

    url: str = required(
        "Address that samples are posted to. Secrets belong in `headers`.", example="http://host:8000/score"
    )
    headers: dict[str, str] = setting(
        {},
        "Headers of a request, each with the name of the environment variable that has its value, such as "
        "SCORER_TOKEN. A process of your code gets such a variable only if `limits.environment` names it, "
        "and its value is never written to a file.",
    )
    # Load on the server.
    concurrency: int = setting(16, "Largest number of open requests.", unit="requests", **MANY)
    rate: float | None = setting(
        None, "Largest number of requests per second.", unit="1/second", unset="no limit", **POSITIVE
    )
    timeout: float = setting(30.0, "Time after which a request without response has failed.", **SECONDS)

    # Retries handle temporary failures. After several failures the circuit opens: requests fail at once, so
    # that a step does not wait for the retries of each of its rows.
    retries: int = setting(
        3,
        "Retries of a request if the server cannot be reached, is too slow, has an internal error, or asks "
        "for a pause.",
        unit="tries",
        at_least=0,
        at_most=1000,
    )
    backoff: float = setting(0.5, "Wait before the first retry, doubled before each further one.", **SECONDS)
    longest_wait: float = setting(
        60.0, "Longest wait before a retry, also if the server asks for a longer one.", **SECONDS
    )
    open_after: int = setting(
        8,
        "Number of consecutive requests that fail with all their retries, after which the circuit is open: "
        "nothing is sent for `open_seconds`, and samples are invalid without a request.",
        unit="requests",
        **MANY,
    )
    open_seconds: float = setting(30.0, "Time after which an open circuit allows one request.", **SECONDS)


@dataclass(frozen=True, kw_only=True)
class RewardServerConfig(ServerConfig):
    """Server that computes rewards, and the limits of requests to it.

    The first rank of the job sends all requests, so that the limits apply to the complete job.
    """

    weight: float = setting(1.0, "Factor of its reward in the sum.", **WEIGHT)


# Parts of a sample that can be sent; the first four by default.
SENDABLE_PARTS = ("prompt", "response", "ground_truth", "metadata", "turns", "tokens", "group")


@dataclass(frozen=True, kw_only=True)
class HttpRewardConfig(RewardServerConfig):
    """Server of your own that receives samples by POST and returns their rewards.

    A request is ``{"samples": [{"prompt": ..., "response": ..., ...}, ...]}`` and its response
    ``{"rewards": [...]}``. Each reward is a number, a mapping of named numbers with ``reward`` among them, or
    ``{"error": "why the sample has no reward"}``.
    """

    # Only what a server needs: tokens and turns are long.
    sends: tuple[str, ...] = setting(
        SENDABLE_PARTS[:4],
        f"Parts of a sample among {', '.join(SENDABLE_PARTS[:6])}. With group, a request has all samples "
        "of a prompt.",
    )
    samples_per_request: int = setting(1, "Samples of a request.", unit="samples", **MANY)


# The last line has a fixed form, since `score_line` must find the number in free text.
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
    """LLM judge behind any server with OpenAI's chat completions.

    A parser reads the reward from the judge's response. Like a reward function, it runs contained.
    """

    url: str = required(
        "Address of the server's API, without /chat/completions.", example="http://host:8000/v1"
    )
    model: str = required("Name of the model at the server.", example="Qwen/Qwen2.5-72B-Instruct")
    key_from: str | None = setting(
        None,
        "Name of the environment variable with the API key, such as JUDGE_API_KEY.",
        unset="no key",
    )
    template: str = setting(
        TEMPLATE,
        "Prompt of the judge: text in which {prompt}, {response} and {ground_truth} are replaced, or "
        "path/to/file.py:function, which is called as a reward function and returns text or chat messages.",
    )
    parser: str = setting(
        "megatron_rl.rewards.judgement:score_line",
        "Function that reads the judge's response: a reward function with a further parameter `judgement`, "
        "which returns None for a response without verdict. The default reads the last line `Score: N`.",
    )
    # Greedy by default, so that the same response gets the same reward.
    temperature: float = setting(0.0, "Temperature of the judge.", at_least=0, at_most=LARGE)
    max_tokens: int = setting(512, "Largest length of the judge's response.", **TOKENS)
    parameters: dict[str, Any] = setting({}, "Further parameters of the request.")
    # Calls of a judge are slow or cost money, and samples of one prompt are often equal.
    cache: int = setting(
        100_000,
        "Number of responses with a verdict that are cached, so that an equal request is not sent again, "
        "also within a step; 0 caches none.",
        unit="answers",
        at_least=0,
        at_most=MAX_ROWS,
    )
    limits: RewardLimitsConfig = setting(RewardLimitsConfig(), "Limits of a call of template or parser.")


@dataclass(frozen=True)
class CodeConfig:
    """Tests of programs: the last block of Python in a response is run with the tests of its ground truth.

    The ground truth is a list of tests, or JSON text of one. A test is ``{"stdin": "2 3", "stdout": "5"}``
    for the program's output, ``{"call": "add(2, 3)", "returns": 5}`` for a function's result, or Python with
    assertions, ``"assert add(2, 3) == 5"``. The program runs in a child process of the contained worker, and
    the comparison in another one. A program that fails, is too slow or exceeds a limit has not passed the
    test. The sample is invalid if its tests cannot be read, if a value of the program cannot be compared
    outside the program, or if the worker does not survive the program.
    """

    language: str = setting("python", "Language of the programs.", choices=("python",))
    scoring: str = setting(
        "all",
        "Reward of a program: 1 if it passes every test and else 0 (all), or the share of tests that it "
        "passes (share).",
        choices=("all", "share"),
    )
    # One limit per test stops an endless loop early, and one for all tests stops a slow program.
    test_timeout: float = setting(5.0, "Time limit of a program in one test.", **SECONDS)
    timeout: float = setting(
        60.0, "Time limit of a program in all its tests; it fails the remaining ones.", **SECONDS
    )
    workers: int = setting(1, "Processes per rank that test programs.", **PROCESSES)
    # Lower than the limits of a reward function, since the policy has written the program.
    limits: RewardLimitsConfig = setting(
        RewardLimitsConfig(memory_gib=1.0, processes=16), "Limits of a program."
    )
    weight: float = setting(1.0, "Factor of its reward in the sum.", **WEIGHT)


@dataclass(frozen=True)
class RewardConfig:
    """Reward of a response: a function, tests, a server, a judge, reward models, or their weighted sum.

    The function is called in worker processes. It can have the parameters ``prompt``, ``response``,
    ``ground_truth``, ``metadata`` and each name in ``arguments``; with ``**kwargs`` it gets all of them. It
    returns a number, or a mapping of named components with ``reward`` among them. It may be ``async def``.

    A parameter ``turns`` gets the conversation after the prompt: a list of ``{role, content}`` with the roles
    policy and environment, the number of ``tokens``, and the ``tool_calls`` of a turn with any. A parameter
    ``tokens`` gets a mapping of ``prompt``, ``response``, ``mask`` and ``log_probs``. A function with a
    parameter ``group`` is called once for all responses to a prompt: ``group`` lists their texts in place of
    ``response``, ``turns`` and ``tokens`` are lists too, and it returns a list with a reward for each, or
    with an exception or None for a response without reward.

    With several rewards, the reward of a row is their weighted sum. A row is invalid if any of its rewards
    fails.
    """

    VALUE_KEY: ClassVar[str] = "function"

    # The reward function.
    function: str | None = setting(
        None,
        "Reward function: module:function, or path/to/file.py:function.",
        unset="the other rewards of this section",
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
        {}, "Further arguments of the function, by parameter name.", also_called={"verl": "reward_kwargs"}
    )
    timeout: float = setting(10.0, "Time after which a call of the function has failed.", **SECONDS)
    workers: int = setting(
        1,
        "Processes per rank that call the function.",
        **PROCESSES,
        also_called={"verl": "reward_model.num_workers", "common": "reward.num_workers"},
    )
    concurrency: int = setting(
        16, "Largest number of open calls of an `async def` function per worker.", unit="calls", **MANY
    )
    # Failures. The limit is on several consecutive steps, since a single one may fail for a temporary
    # reason, such as a server's restart.
    max_invalid_fraction: float = setting(
        0.5,
        "Share of a step's rewards that may fail. A run that exceeds it in `invalid_steps` consecutive steps "
        "stops and reports why they fail.",
        **SHARE,
        advice="1 never stops a run",
    )
    invalid_steps: int = setting(
        3, "Number of consecutive steps above `max_invalid_fraction` that stop a run.", **STEPS
    )
    limits: RewardLimitsConfig = setting(RewardLimitsConfig(), "Limits of a call of the function.")
    weight: float = setting(
        1.0,
        "Factor of the function's reward in the sum.",
        **WEIGHT,
        also_called={"TRL": "reward_weights"},
        conversion={
            "reward_weights": "ours has a weight for each section of reward, and for each of reward.models"
        },
    )
    # The other rewards.
    code: CodeConfig | None = setting(None, "Tests of the programs in responses.", unset="none")
    http: HttpRewardConfig | None = setting(None, "A server that computes rewards.", unset="none")
    judge: JudgeConfig | None = setting(None, "An LLM judge.", unset="none")
    models: dict[str, RewardModelConfig] = setting(
        {},
        "Reward models by name.",
        also_called={
            "verl": "reward_model.model.path",
            "OpenRLHF": "reward_pretrain",
            "common": "reward_model_path, reward_model_name_or_path, reward.model",
        },
        conversion="ours has a name for each: NAME.path",
    )

    def with_function(self, function: str) -> RewardConfig:
        """Return settings for another function that is called with the same workers and limits."""
        return RewardConfig(
            function,
            timeout=self.timeout,
            workers=self.workers,
            concurrency=self.concurrency,
            limits=self.limits,
        )

    @property
    def scorer_weights(self) -> dict[str, float]:
        """Map each reward that is set, except reward models, to its weight."""
        weights: dict[str, float] = {}

        # The function comes first: accuracies are computed from the rewards of the first scorer.
        if self.function is not None:
            weights[FUNCTION] = self.weight

        sections = {"code": self.code, "http": self.http, "judge": self.judge}
        for name, section in sections.items():
            if section is not None:
                weights[name] = section.weight
        return weights
