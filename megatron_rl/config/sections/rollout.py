"""Generation of responses, and its connection with training: weight sync, mismatch, asynchrony.

The learner computes log-probs of exactly the distribution that was sampled from, so every sampling parameter
is a key of the run and none is an argument of a single request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megatron_rl.config.engines import ENGINES, EngineCapabilities, engine_capabilities, engines_with
from megatron_rl.config.field_types import convert_value, field_hints, type_text
from megatron_rl.config.sections.bounds import (
    ENDLESS,
    MAX_STEPS,
    MAX_TOKENS,
    POSITIVE,
    PROCESSES,
    RANKS,
    SECONDS,
    SHARE,
    TOKENS,
    WAIT,
    LimitsConfig,
)
from megatron_rl.config.sections.filters import FiltersConfig
from megatron_rl.config.sections.models import RANKS_LISTED
from megatron_rl.config.sections.response_limits import (
    AUTO,
    AutoLimitConfig,
    ResponseLimit,
    largest_limit,
    prompt_limit,
    smallest_limit,
    table_errors,
)
from megatron_rl.config.sections.schedules import (
    LOWEST_TEMPERATURE,
    changes_over_steps,
    changes_over_tokens,
    schedule_errors,
    smallest_value,
)
from megatron_rl.config.setting import Setting, required, setting, setting_of
from megatron_rl.errors import UserError, nearest, range_error, requirement_error

# Conversions from names of other projects that several keys share.
_LONGEST_ROW = "the sum of data.max_prompt_tokens and rollout.max_response_tokens is the longest row"
_FURTHER = "ours is the fraction of further prompts"

# Largest bias of a token's logit, as in the API of OpenAI: a factor of e^100 of its probability.
MAX_BIAS = 100.0

# Largest number of biased tokens in vLLM's newer model runner (0.32, MAX_NUM_LOGIT_BIAS_TOKENS).
MAX_BIASED_TOKENS = 1024

# Orders of sampling: in rounds of tokens, with equal results in every run, or by the clock.
CLOSED = "closed"
OPEN = "open"

# Whether the key-value cache of interrupted responses is recomputed or kept after a weight update.
RECOMPUTE = "recompute"
KEEP = "keep"


@dataclass(frozen=True)
class EnvironmentConfig:
    """Environment of a conversation with the policy; every further key is a setting of its class.

    An episode whose environment fails is invalid, like a response whose reward fails. The limits apply to a
    process with all the processes that it starts. A run reports at its start which limits the kernel of the
    machine does not enforce.
    """

    name: str = required(
        "A class derived from megatron_rl.Environment: module:Class, or path/to/file.py:Class.",
        example="my_env.py:Calculator",
    )
    max_turns: int = setting(
        16,
        "Largest number of turns of the policy. An episode that would need more is truncated.",
        unit="turns",
        **ENDLESS,
        also_called={"verl": "max_assistant_turns", "NeMo-RL": "max_rollout_turns"},
    )
    turn_timeout: float = setting(
        30.0, "Time after which an environment that has not answered a turn counts as failed.", **SECONDS
    )
    workers: int = setting(
        1,
        "Processes per engine replica for its environments.",
        **PROCESSES,
        also_called={"verl": "agent.num_workers"},
    )
    tool_parser: str | None = setting(
        None,
        "vLLM's parser of tool calls in a turn, such as `hermes`.",
        unset="none: turns are only text",
        also_called={"vLLM": "tool_call_parser", "verl": "multi_turn.format"},
    )
    limits: LimitsConfig = setting(LimitsConfig(), "Limits of a process of environments.")
    settings: dict[str, Any] = setting({}, "Settings of the class.", collects_unknown_names=True)


@dataclass(frozen=True)
class ServerConfig:
    """vLLM's API servers that sample for the run, and the time limits of requests to them.

    Every server must respond when the run starts. If a server fails later, the other servers sample its
    requests again. A failed server receives new requests after it has recovered and has the newest weights.
    """

    # Empty by default: only `engine: server` needs servers.
    urls: tuple[str, ...] = setting(
        (),
        "Addresses of the servers, such as `http://host:8000`; `check` shows the command that starts one.",
        also_called={"TRL": "vllm_server_base_url", "slime": "rollout_external_engine_addrs"},
        conversion="ours is a list, with `engine: server`",
    )
    # A request returns a complete response, which takes minutes for a long response on a busy server.
    request_timeout: float = setting(
        600.0, "Time after which a server that has not answered a request counts as lost.", **SECONDS
    )
    update_timeout: float = setting(
        300.0,
        "Time limit for a server to join the trainers for a weight sync, and for each call that sends "
        "weights.",
        **SECONDS,
    )
    wait: float = setting(300.0, "Time that a step waits while no server is available.", **WAIT)


@dataclass(frozen=True)
class RolloutConfig:
    """Generation: the engine, its layout, and the sampling of responses.

    With ``oversample``, a step trains on the groups that are completed first. With ``partial``, unfinished
    groups are continued in the next step. Without ``partial``, they are discarded and their prompts are
    sampled again later, so that prompts with short responses are trained on more often. The ``closed`` order
    measures completion in rounds of tokens, the ``open`` order by the clock.
    """

    VALUE_KEY: ClassVar[str] = "engine"

    # Engine and its ranks.
    engine: str = setting(
        "vllm",
        "Rollout engine: vLLM in the ranks (vllm), a plain torch model for small tests (torch), vLLM's API "
        "servers (server), or the path of your own: a class that `make_engine` calls with its arguments, "
        "whose objects are both a `Generator` and a `WeightStore`.",
        choices=tuple(ENGINES),
        allows_path=True,
        also_called={
            "verl": "rollout.name",
            "NeMo-RL": "generation.backend",
            "common": "inference_engine, rollout_backend, rollout.backend",
        },
    )
    ranks: tuple[int, ...] | None = setting(
        None,
        'Ranks of the engine: a list, or ranges such as "0-31,40".',
        unset="the ranks that `placement` gives the rollout",
        also_called={
            "slime": "rollout_num_gpus",
            "OpenRLHF": "vllm_num_engines",
            "common": "rollout_gpus",
        },
        conversion={
            "rollout_num_gpus": RANKS_LISTED,
            "rollout_gpus": RANKS_LISTED,
            "vllm_num_engines": "the number of engines is that of the ranks / rollout.tensor",
        },
    )
    tensor: int = setting(
        1,
        "Tensor parallelism of a replica; the number of replicas follows from the ranks.",
        **RANKS,
        advice="1 switches it off",
        also_called={
            "verl": "rollout.tensor_model_parallel_size",
            "slime": "rollout_num_gpus_per_engine",
            "OpenRLHF": "vllm_tensor_parallel_size",
            "NeMo-RL": "generation.vllm_cfg.tensor_parallel_size",
            "common": "rollout_tp, gen_tp",
        },
    )
    # Sampling. The defaults are the model's own distribution, which the policy gradient assumes.
    temperature: float | dict[str, Any] = setting(
        1.0,
        "Temperature of sampling, and of the log-probs that are computed in training; or its course over "
        "steps, `{start: 1.0, end: 0.6, steps: 200}`, or over the tokens of a turn: `{start: 1.0, end: 0.6, "
        "over: 64}`.",
        more_than=0,
        at_most=100,
        per_task=True,
        advice="sample with 1.0; greedy training samples of one prompt would all be equal",
        also_called={
            "slime": "rollout_temperature",
            "common": "sampling_temperature, temperature_schedule",
            "Megatron-LM": "grpo_default_temperature",
        },
        conversion={
            "temperature_schedule": "ours is {start: 1.0, end: 0.6, steps: 200} over steps, or {start: 1.0, "
            "end: 0.6, over: 64} over the tokens of a turn"
        },
    )
    top_p: float | dict[str, Any] = setting(
        1.0,
        "Probability mass of the tokens that are sampled from; or its course over steps or tokens, as that "
        "of `temperature`: `{start: 0.9, end: 0.95, over: 64}`.",
        more_than=0,
        at_most=1,
        per_task=True,
        advice="1.0 switches top-p off",
        also_called={
            "slime": "rollout_top_p",
            "Megatron-LM": "grpo_default_top_p",
            "common": "top_p_schedule",
        },
        conversion={
            "top_p_schedule": "ours is {start: 0.9, end: 0.95, over: 64} over the tokens of a turn, or "
            "{start: 0.9, end: 0.95, steps: 200} over steps"
        },
    )
    top_k: int = setting(
        0,
        "Number of most likely tokens that are sampled from; 0 means all.",
        unit="tokens",
        at_least=0,
        at_most=MAX_TOKENS,
        per_task=True,
        advice="0 switches top-k off",
        also_called={"slime": "rollout_top_k"},
    )
    min_p: float = setting(
        0.0,
        "Smallest probability of a token that is sampled from, as a share of the largest.",
        **SHARE,
        per_task=True,
        advice="0 switches min-p off",
    )
    max_response_tokens: int | str | dict[str, Any] = setting(
        256,
        "Largest length of a response; with an environment, of everything after the prompt together. A "
        "number, a table by prompt length (`{64: 64, 512: 256, more: 1024}`), or `auto`: see `auto_limit`.",
        choices=(AUTO,),
        **TOKENS,
        per_task=True,
        also_called={
            "verl": "max_response_length, response_length",
            "slime": "rollout_max_response_len, rollout_max_context_len",
            "NeMo-RL": "max_new_tokens, max_total_sequence_length",
            "TRL": "max_completion_length",
            "OpenRLHF": "generate_max_len, max_response_len",
            "vLLM": "max_tokens, max_model_len",
            "common": "max_response_tokens",
            "ROLL": "sequence_length",
            "Megatron-LM": "inference_max_seq_length",
        },
        conversion=dict.fromkeys(
            (
                "rollout_max_context_len",
                "max_total_sequence_length",
                "max_model_len",
                "sequence_length",
                "inference_max_seq_length",
            ),
            _LONGEST_ROW,
        ),
    )
    auto_limit: AutoLimitConfig = setting(
        AutoLimitConfig(), "Limits of responses with `max_response_tokens: auto`."
    )
    # Texts of one token become stop token ids, like the model's own; see `rollout.stopping` for longer ones.
    stop: tuple[str, ...] = setting(
        (),
        "Texts that end a response in addition to the model's own end tokens. A text of one token ends it at "
        "this token, a text of several at the token that completes the text; both are part of the response.",
        per_task=True,
        also_called={
            "slime": "rollout_stop",
            "NeMo-RL": "stop_strings",
            "common": "stop_words, stop_sequences",
        },
    )
    # Rules that change logits before the temperature and the filters, in the engine and in the trainer.
    min_response_tokens: int = setting(
        0,
        "Number of tokens after the prompt among which no end token is sampled. "
        "`rollout.filters.min_tokens` removes short responses instead.",
        unit="tokens",
        at_least=0,
        at_most=MAX_TOKENS,
        per_task=True,
        advice="0 switches it off",
        also_called={"vLLM": "min_tokens", "SGLang": "min_new_tokens", "ROLL": "min_response_length"},
    )
    banned_tokens: tuple[str, ...] = setting(
        (),
        "Tokens that are never sampled: texts of one token each, or ids as `token_id:17`.",
        per_task=True,
        also_called={"vLLM": "bad_words", "common": "bad_words_ids, suppress_tokens, banned_token_ids"},
        conversion="ours are single tokens: texts of one token each, or token_id:17",
    )
    logit_bias: dict[str, float] = setting(
        {},
        "Values that are added to the logits of single tokens, by text of one token or as `token_id:17`.",
        per_task=True,
        also_called={"SGLang": "custom_logit_processor", "common": "logits_bias, sequence_bias"},
        conversion='ours is a section: logit_bias: {" the": -2.0, "token_id:17": 1.5}',
    )
    repetition_penalty: float = setting(
        1.0,
        "Divisor of positive logits, and factor of other logits, for tokens in the prompt or the response.",
        more_than=0,
        at_most=100,
        per_task=True,
        advice="1.0 switches it off; above 1 tokens repeat less",
    )
    # vLLM refuses values outside of [-2, 2], as the API of OpenAI does.
    presence_penalty: float = setting(
        0.0,
        "Value that is subtracted from the logits of tokens in the response.",
        at_least=-2,
        at_most=2,
        per_task=True,
        advice="0 switches it off; above 0 tokens repeat less",
    )
    frequency_penalty: float = setting(
        0.0,
        "Value that is subtracted from a token's logit for each occurrence in the response.",
        at_least=-2,
        at_most=2,
        per_task=True,
        advice="0 switches it off; above 0 tokens repeat less",
    )
    no_repeat_ngram_size: int = setting(
        0,
        "Length of token n-grams that may occur only once in prompt and response together: a token that "
        "would repeat one is not sampled.",
        unit="tokens",
        at_least=0,
        at_most=MAX_TOKENS,
        per_task=True,
        advice="0 switches it off; 4 bans repeated n-grams of four tokens",
        also_called={"vLLM": "ngram_size"},
    )
    sampling_profiles: dict[str, dict[str, Any]] = setting(
        {},
        "Sampling of individual tasks, by name of the task: temperature, top_p, top_k, min_p, "
        "max_response_tokens, stop, min_response_tokens, banned_tokens, logit_bias, no_repeat_ngram_size and "
        "the three penalties; or the name of a profile.",
    )
    # Loading replaces it by the profile's settings, see `config.sampling_profiles`.
    sampling_profile: str | None = setting(
        None,
        "Profile of the whole run: a name of `sampling_profiles`, or `file.py:NAME` of one that "
        "`megatron_rl.sampling_profile` registers there. It replaces settings of this section.",
        unset="none",
        also_called={"common": "register_sampling_profile"},
        conversion="ours takes a name: sampling_profile: careful; megatron_rl.sampling_profile registers one",
    )
    # Order of sampling, and what happens to responses that are not complete when a step ends.
    order: str = setting(
        CLOSED,
        "Groups that a step trains on: those sampled for it, equal in every run (`closed`), or those that "
        "are complete first by the clock (`open`).",
        choices=(CLOSED, OPEN),
        advice="open needs separate rollout ranks, asynchrony.steps_ahead, rollout.oversample and "
        "rollout.partial; its runs cannot be repeated",
    )
    on_update: str = setting(
        RECOMPUTE,
        "Continuation of responses in the open order after a weight sync: with keys and values recomputed by "
        "the new weights (`recompute`), or with the cached ones of the older weights (`keep`).",
        choices=(RECOMPUTE, KEEP),
        advice="keep saves a prefill at each update; later tokens are then sampled from a mixture of "
        "policies, whose log-probs no single set of weights computes",
    )
    # Over-sampling hides the longest responses: a step need not wait for them.
    oversample: float = setting(
        0.0,
        "Prompts sampled in addition to a step's own, as a fraction of them.",
        **SHARE,
        advice="0.25 samples a quarter more prompts than a step needs; 0 is off",
        also_called={
            "verl": "over_sample_rate, gen_batch_size",
            "slime": "over_sampling_batch_size",
            "NeMo-RL": "batch_multiplier",
        },
        conversion={
            "gen_batch_size": f"{_FURTHER}: gen_batch_size / train_batch_size - 1",
            "over_sampling_batch_size": f"{_FURTHER}: over_sampling_batch_size / rollout_batch_size - 1",
            "batch_multiplier": f"{_FURTHER}: batch_multiplier - 1",
        },
    )
    partial: bool = setting(
        False,
        "Continue unfinished responses in the next step.",
        also_called={"slime": "partial_rollout", "common": "enable_partial_rollout"},
    )
    round_tokens: int | None = setting(
        None,
        "Tokens per response after which the closed order counts the complete over-sampled groups.",
        **TOKENS,
        unset="an eighth of max_response_tokens",
    )
    max_in_flight: int | None = setting(
        None,
        "Largest number of episodes that a replica samples concurrently. Further ones begin as others end.",
        unit="episodes",
        unset="the number of sequences that the engine schedules: `rollout.vllm.max_num_seqs`",
        **ENDLESS,
        also_called={
            "prime-rl": "max_inflight_rollouts",
            "slime": "sglang_server_concurrency",
            "AReaL": "max_concurrent_rollouts",
            "common": "rollout_per_device_batch_size",
        },
        conversion={
            "sglang_server_concurrency": "",
            "rollout_per_device_batch_size": "ours is the largest number of episodes of a replica at once; "
            "leave it out to have the engine's own",
        },
    )
    # Responses that are removed before any reward is computed.
    filters: FiltersConfig = setting(
        FiltersConfig(), "Filters that remove finished responses before any reward is computed."
    )
    # Conversations.
    environment: EnvironmentConfig | None = setting(
        None,
        "Environment of conversations: `{name: my_env.py:Calculator, max_turns: 8}`.",
        unset="none: one turn, a response",
        also_called={
            "verl": "multi_turn.enable",
            "slime": "custom_generate_function_path",
            "OpenRLHF": "agent_func_path",
            "ms-swift": "multi_turn_scheduler",
        },
        conversion="ours names a class: {name: my_env.py:Calculator}",
    )
    # The rest of the memory is for the trainer, whose weights and optimizer remain on the device unless
    # offloaded.
    memory_fraction: float = setting(
        0.6,
        "Fraction of a GPU's memory for the engine's weights and key-value cache.",
        more_than=0,
        at_most=1,
        advice="0.6 leaves room for the trainer",
        also_called={
            "vLLM": "gpu_memory_utilization",
            "slime": "sglang_mem_fraction_static",
            "OpenRLHF": "vllm_gpu_memory_utilization",
            "SGLang": "mem_fraction_static",
            "common": "gpu_memory_fraction",
        },
    )
    # On by default: the trainer's logits are float32, and different rounding in the engine would be a
    # mismatch of every token.
    float32_head: bool = setting(
        True,
        "Compute vLLM's logits in float32, as the trainer does, also for a model of another dtype.",
    )
    # Servers, and pass-through settings of the engine.
    server: ServerConfig = setting(ServerConfig(), "The servers of `engine: server`.")
    vllm: dict[str, Any] = setting(
        {}, "Fields of vLLM's EngineArgs.", also_called={"verl": "engine_kwargs", "NeMo-RL": "vllm_cfg"}
    )

    def prompts_in_flight(self, count: int) -> int:
        """Return the number of prompts in flight for a step that needs ``count`` complete groups.

        Example:
            >>> RolloutConfig(oversample=0.3).prompts_in_flight(8)
            11
        """
        # Subtract an epsilon: the product may exceed the exact integer by rounding, as in 100 * 0.07 > 7.
        return count + math.ceil(count * self.oversample - 1e-9)

    @property
    def response_limit(self) -> int:
        """Return the largest number of tokens of a response, for tasks without a limit in their profile."""
        return largest_limit(self.max_response_tokens, self.auto_limit)

    def limit_setting(self, task: str) -> ResponseLimit:
        """Return `max_response_tokens` of a task, from its sampling profile or else from the rollout."""
        return self.sampling_profiles.get(task, {}).get("max_response_tokens", self.max_response_tokens)

    def limit_of(self, task: str, prompt_tokens: int) -> int:
        """Return the response limit of one prompt, in tokens; with `auto`, the largest limit."""
        return prompt_limit(self.limit_setting(task), prompt_tokens, self.auto_limit)

    @property
    def limit_settings(self) -> dict[str, ResponseLimit]:
        """Map the path of each `max_response_tokens`, of the rollout or a sampling profile, to its value."""
        limits: dict[str, ResponseLimit] = {"rollout.max_response_tokens": self.max_response_tokens}
        for task, profile in self.sampling_profiles.items():
            if "max_response_tokens" in profile:
                path = f"rollout.sampling_profiles.{task}.max_response_tokens"
                limits[path] = profile["max_response_tokens"]
        return limits

    @property
    def capabilities(self) -> EngineCapabilities:
        """Return the capabilities of the rollout engine, which the rules of `check` and the trainer read."""
        return engine_capabilities(self.engine)

    @property
    def in_flight_limit(self) -> int | None:
        """Return the largest number of episodes that a replica samples at once; None if unbounded."""
        # vLLM schedules at most `max_num_seqs` sequences at once.
        limits = [self.max_in_flight, self.vllm.get("max_num_seqs")]
        return min((limit for limit in limits if isinstance(limit, int)), default=None)

    @property
    def bans_ngrams(self) -> bool:
        """Return whether any task has `no_repeat_ngram_size`."""
        return any(settings["no_repeat_ngram_size"] for _, settings in task_settings(self))

    @property
    def truncates(self) -> bool:
        """Return whether top-p, top-k or min-p truncates the distribution of any task."""
        for _, settings in task_settings(self):
            if filters_tokens(smallest_value(settings["top_p"]), settings["top_k"], settings["min_p"]):
                return True
        return False

    @property
    def changes_over_tokens(self) -> bool:
        """Return whether the temperature or top-p of any task changes over the tokens of a turn."""
        return any(changes_over_tokens(value) for _, value in _schedules(self))

    @property
    def changes_over_steps(self) -> bool:
        """Return whether the temperature or top-p of any task changes over steps."""
        return any(changes_over_steps(value) for _, value in _schedules(self))

    def task_setting(self, task: str, name: str) -> Any:
        """Return the value of a sampling setting for a task, from its profile or else from the rollout."""
        return self.sampling_profiles.get(task, {}).get(name, getattr(self, name))


def changes_temperature(rollout: RolloutConfig) -> bool:
    """Return whether the temperature of any task changes over steps."""
    for path, value in _schedules(rollout):
        if path.endswith(".temperature") and changes_over_steps(value):
            return True
    return False


def _schedules(rollout: RolloutConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, value) for each temperature and top-p that is a schedule instead of a number."""
    for name in ("temperature", "top_p"):
        values = {f"rollout.{name}": getattr(rollout, name)}
        for task, profile in rollout.sampling_profiles.items():
            values[f"rollout.sampling_profiles.{task}.{name}"] = profile.get(name)

        for path, value in values.items():
            if isinstance(value, Mapping):
                yield path, value


def _schedule_errors(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors of each temperature and top-p that is a schedule, in the rollout and its profiles."""
    for path, value in _schedules(rollout):
        name = path.rpartition(".")[2]
        # The sampler clamps positive temperatures to at least `LOWEST_TEMPERATURE`. A schedule below this
        # bound would be clamped, and the temperatures that are used would not be linear.
        lower_bound = 0.0
        if name == "temperature":
            lower_bound = LOWEST_TEMPERATURE
        yield from schedule_errors(path, value, profile_fields()[name], lower_bound)

        if changes_over_tokens(value) and not rollout.capabilities.token_history:
            choices = engines_with(token_history=True)
            yield UserError(
                f"rollout.engine={rollout.engine} does not change `{name}` over the tokens of a turn",
                where=path,
                expected=f"{choices}, or a number or a schedule over steps",
                got=f"a schedule over tokens with rollout.engine={rollout.engine}",
                fix=f"set {choices}, or write steps instead of over",
            )


def filters_tokens(top_p: float, top_k: int, min_p: float) -> bool:
    """Return whether top-p, top-k or min-p can exclude tokens from sampling."""
    return top_p < 1 or top_k > 0 or min_p > 0


def profile_fields() -> dict[str, Setting]:
    """Return the rollout settings that a sampling profile can override: name -> description."""
    descriptions = {item.name: setting_of(item) for item in fields(RolloutConfig)}

    return {name: description for name, description in descriptions.items() if description.per_task}


def profile_errors(rollout: RolloutConfig) -> list[UserError]:
    """Validate the sampling profiles against the types and bounds of the rollout section; return the errors.

    A profile is a plain mapping, which the parser does not validate. A key that is missing in a profile keeps
    the value of the rollout section.
    """
    descriptions = profile_fields()
    errors = []
    for task, profile in rollout.sampling_profiles.items():
        for name, value in profile.items():
            path = f"rollout.sampling_profiles.{task}.{name}"
            if name not in descriptions:
                errors.append(_profile_name_error(path, name, list(descriptions)))
                continue

            # Use the type and the bounds of the same key in the rollout section.
            hint = field_hints(RolloutConfig)[name]
            description = descriptions[name]
            accepted, typed_value = convert_value(hint, value)
            if not accepted or description.value_error(path, typed_value) is not None:
                expected = type_text(hint)
                if description.bounds_text():
                    expected += f", {description.bounds_text()}"

                fix = "correct it, or remove it to use the value of the rollout section"
                errors.append(range_error(path, value, expected, fix=fix))
    return errors


def limit_errors(rollout: RolloutConfig, longest_prompt: int) -> Iterator[UserError]:
    """Yield the errors in tables of response limits and in the settings of `auto` limits."""
    is_auto = False
    for path, value in rollout.limit_settings.items():
        is_auto = is_auto or value == AUTO
        if isinstance(value, dict):
            yield from table_errors(path, value, longest_prompt)
    if not is_auto:
        return

    # `auto` computes a quantile of the latest response lengths in a window, and clamps it between two bounds.
    auto = rollout.auto_limit
    if auto.at_least > auto.at_most:
        yield UserError(
            "the smallest limit of responses is above the largest",
            where="rollout.auto_limit.at_least",
            expected=f"at most rollout.auto_limit.at_most ({auto.at_most})",
            got=str(auto.at_least),
            fix=f"set rollout.auto_limit.at_least={auto.at_most} or less",
        )

    # A class is a task with prompts of similar lengths. Its limit is computed as soon as `responses` lengths
    # are available. The window retains only the latest `window` lengths, so `responses` cannot exceed it.
    if auto.responses > auto.window:
        yield UserError(
            "a class of prompts never has as many lengths as its limit requires",
            where="rollout.auto_limit.responses",
            expected=f"at most rollout.auto_limit.window ({auto.window})",
            got=str(auto.responses),
            fix=f"set rollout.auto_limit.responses={auto.window} or less",
        )

    # Over-sampling discards long responses, so `auto` would count only short ones. With `partial`, long
    # responses are continued and counted later.
    if rollout.oversample and not rollout.partial:
        yield UserError(
            "the limits would follow only short responses: over-sampling discards the long ones",
            where="rollout.max_response_tokens",
            expected="a number or a table with rollout.oversample, or rollout.partial=true",
            got="auto with rollout.oversample and without rollout.partial",
            fix="set rollout.partial=true, or a number",
        )


def _profile_name_error(path: str, name: str, valid_names: list[str]) -> UserError:
    """Return the error for the key ``name`` at ``path``, which a sampling profile does not have."""
    message = f"`{path}` is not a sampling setting"
    fix = "remove it"

    suggestion = nearest(name, valid_names)
    if suggestion:
        message += f"; did you mean `{suggestion}`?"
        fix = f"write `{suggestion}`"
    expected = f"one of {', '.join(valid_names)}"
    return UserError(message, where=path, expected=expected, got=f"`{name}`", fix=fix)


def stop_strings(rollout: RolloutConfig) -> dict[str, Sequence[str]]:
    """Map the path of each setting of stop texts, in the rollout or a sampling profile, to the texts."""
    # A profile's stop texts replace the rollout's and do not add to them.
    texts: dict[str, Sequence[str]] = {"rollout.stop": rollout.stop}
    for task, profile in rollout.sampling_profiles.items():
        if "stop" in profile:
            texts[f"rollout.sampling_profiles.{task}.stop"] = profile["stop"]
    return texts


def task_settings(rollout: RolloutConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, complete sampling settings) of the rollout section and of each sampling profile."""
    common = {name: getattr(rollout, name) for name in profile_fields()}
    yield "rollout", common

    # A profile contains only the settings that differ from the rollout's.
    for task, profile in rollout.sampling_profiles.items():
        yield f"rollout.sampling_profiles.{task}", common | profile


def rule_errors(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors of logit rules (biases, bans, penalties) and of scheduled temperatures and top-p.

    The settings must already have valid types.
    """
    yield from _schedule_errors(rollout)
    yield from _penalty_errors(rollout)
    for path, settings in task_settings(rollout):
        yield from _ngram_errors(path, settings["no_repeat_ngram_size"], rollout)
        min_tokens = settings["min_response_tokens"]

        # Limits may depend on the prompt or on earlier lengths: the minimum must fit the smallest limit.
        lowest_limit = smallest_limit(settings["max_response_tokens"], rollout.auto_limit)
        if min_tokens > lowest_limit:
            yield range_error(
                f"{path}.min_response_tokens",
                min_tokens,
                f"at most {lowest_limit}, the smallest limit of max_response_tokens",
                fix="lower it, or raise max_response_tokens",
            )

        # vLLM's server (0.32) clamps a larger bias without an error, to the range of OpenAI's API.
        for token_text, bias in settings["logit_bias"].items():
            if abs(bias) > MAX_BIAS:
                expected = f"from -{MAX_BIAS:g} to {MAX_BIAS:g}"
                fix = "give a smaller one; rollout.banned_tokens has tokens that are never sampled"
                yield range_error(f"{path}.logit_bias.{token_text}", bias, expected, fix=fix)

        # A banned token is sent to vLLM as a very negative bias, so it counts towards vLLM's limit.
        num_biased_tokens = len({*settings["logit_bias"], *settings["banned_tokens"]})
        if num_biased_tokens > MAX_BIASED_TOKENS:
            yield UserError(
                "more tokens have a bias or are banned than vLLM supports",
                where=f"{path}.logit_bias",
                expected=f"{MAX_BIASED_TOKENS} tokens of logit_bias and banned_tokens together",
                got=f"{num_biased_tokens}",
                fix="remove some",
            )


def _ngram_errors(path: str, size: int, rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield the errors of `no_repeat_ngram_size` in the settings at ``path``."""
    key = f"{path}.no_repeat_ngram_size"
    # With n-grams of one token, every token could occur only once.
    if size == 1:
        yield range_error(
            key,
            size,
            "0, or 2 tokens or more",
            fix="write 2 or more; rollout.frequency_penalty makes single tokens rarer",
        )

    if size and not rollout.capabilities.token_history:
        choices = engines_with(token_history=True)
        got = f"rollout.engine={rollout.engine}"
        yield requirement_error(key, size, choices, got=got, fix=f"set {choices}")


def _penalty_errors(rollout: RolloutConfig) -> Iterator[UserError]:
    """Yield an error for each presence or frequency penalty if a response may need several requests.

    For a penalty, vLLM counts only the response tokens of the current request. If a response is split over
    several requests, its earlier tokens are in the prompt of the current request and are not counted.
    """
    # With any of these settings, a response may be split over several requests.
    is_set_by_key = {
        "rollout.environment": rollout.environment is not None,
        "rollout.oversample": rollout.oversample > 0,
        "rollout.partial": rollout.partial,
    }
    multi_request_keys = [key for key, is_set in is_set_by_key.items() if is_set]
    if not multi_request_keys:
        return

    # Name only the first of these settings in the error.
    multi_request_key = multi_request_keys[0]
    for path, settings in task_settings(rollout):
        for name in ("presence_penalty", "frequency_penalty"):
            if settings[name]:
                yield requirement_error(
                    f"{path}.{name}",
                    settings[name],
                    "responses that are one request of the engine each",
                    got=f"{multi_request_key} is set, so a response may be split over several requests",
                    fix=f"remove {multi_request_key}, or use rollout.repetition_penalty",
                )


def biased_token_texts(rollout: RolloutConfig) -> dict[str, Sequence[str]]:
    """Map the path of each setting of biased or banned tokens to the texts of these tokens."""
    texts: dict[str, Sequence[str]] = {}
    for path, settings in task_settings(rollout):
        texts[f"{path}.banned_tokens"] = settings["banned_tokens"]
        texts[f"{path}.logit_bias"] = list(settings["logit_bias"])
    return texts


def explicit_token_id(text: str) -> int | None:
    """Parse the token id in a text such as ``token_id:17``; return None for any other text.

    Example:
        >>> explicit_token_id("token_id:17"), explicit_token_id("17")
        (17, None)
    """
    prefix, _, digits = text.partition(":")
    if prefix != "token_id" or not digits.isdecimal():
        return None
    return int(digits)


def rule_token_error(setting: str, text: str, tokens: Sequence[str]) -> UserError:
    """Return the error for a ``text`` in `logit_bias` or `banned_tokens` that is not a single token.

    ``setting`` is the path of the setting with the text, and ``tokens`` are the tokens of the text.
    """
    return UserError(
        f"the text {text!r} is not one token of this model",
        where=setting,
        expected="texts that the tokenizer turns into exactly one known token, or token_id:17",
        got=f"{len(tokens)} tokens: {list(tokens)}",
        fix="name a single token; a leading space often belongs to it",
    )


def unknown_token_id_error(setting: str, text: str, vocabulary_size: int) -> UserError:
    """Return the error for a ``text``, such as ``token_id:17``, whose token id is not in the vocabulary.

    ``setting`` is the configuration key with the text.
    """
    return UserError(
        f"{text} is not a token of this model",
        where=setting,
        expected=f"an id from 0 to {vocabulary_size - 1}",
        got=text,
        fix="correct the id",
    )


def stop_text_error(
    setting: str,
    text: str,
    tokens: Sequence[str],
    unknown_token: str | None,
    decoded: str,
) -> UserError | None:
    """Return the error for a stop text that the model cannot generate, or None if it can.

    ``setting`` is the path of the setting with the text. ``tokens`` are the tokens of the text, ``decoded``
    is the text decoded from them, and ``unknown_token`` is the tokenizer's token for unknown text.
    """
    # Compare without outer spaces: a tokenizer may drop them from a text, but keeps them inside a response.
    if tokens and unknown_token not in tokens and text.strip() in decoded:
        return None

    return UserError(
        f"the stop text {text!r} is never part of a response of this model",
        where=setting,
        expected="texts of known tokens, which the tokenizer does not change",
        got=f"{len(tokens)} tokens: {list(tokens)}, with the text {decoded!r}",
        fix="choose another text, or add this one to the tokenizer as a special token",
    )


def stop_engine_error(setting: str, text: str, engine: str) -> UserError:
    """Return the error for a stop text of several tokens with an engine that stops only at token ids.

    ``setting`` is the path of the setting with the text.
    """
    choices = engines_with(stop_texts=True)
    return UserError(
        f"rollout.engine={engine} ends a response at tokens, not at texts of several tokens",
        where=setting,
        expected=f"{choices}, or stop texts of one token each",
        got=repr(text),
        fix=f"set {choices}, or remove the text",
    )


@dataclass(frozen=True)
class HybridEngineConfig:
    """Weight sync from the actor into the rollout engine: when, in what memory, and how it is verified."""

    # A version is a step in which the actor learns: optimizer steps within one step are not counted.
    every: int = setting(
        1,
        "Versions of the policy from one weight sync to the next. In between, responses are sampled from "
        "older weights. With 0, all responses are sampled from the initial weights.",
        unit="versions",
        at_least=0,
        at_most=MAX_STEPS,
        advice="1 samples every step from the newest weights; 0 is for offline algorithms",
        also_called={
            "slime": "update_weights_interval",
            "common": "reshard_interval, enable_resharding, weight_sync_interval, sync_every, sync_interval",
        },
        their_values={"enable_resharding": {True: 1, False: 0}},
    )
    staging_bytes: int = setting(
        256 * 2**20,
        "Memory of a rank for weights in transfer.",
        unit="bytes",
        at_least=1 << 16,
        at_most=1 << 40,
        advice="268435456 (256 MiB) is the default",
        also_called={"verl": "update_weights_bucket_megabytes", "slime": "update_weight_buffer_size"},
        conversion={"update_weights_bucket_megabytes": "ours counts bytes"},
    )
    # Full by default: wrong weights in the engine would otherwise show only as slow learning.
    verify: str = setting(
        "full",
        "Comparison of checksums after each weight sync: of every tensor (full), of some (sampled), or of "
        "none (off).",
        choices=("full", "sampled", "off"),
    )


@dataclass(frozen=True)
class MismatchConfig:
    """Thresholds for the difference between the log-probs of trainer and rollout.

    The difference is the mean absolute difference over response tokens. If it is larger than rounding
    explains, the engine's weights or its sampling distribution differ from the trainer's.
    """

    warn: float | None = setting(
        None,
        "Difference above which the health rule `mismatch` fires.",
        unit="nats",
        unset="by model.dtype",
        **POSITIVE,
    )
    stop: float | None = setting(
        None, "Difference from which the run stops.", unit="nats", unset="by model.dtype", **POSITIVE
    )


@dataclass(frozen=True)
class AsynchronyConfig:
    """Sampling ahead of training, on separate rollout ranks.

    More than 0 steps ahead needs rollout ranks that no other role uses. A step waits for a response that
    would otherwise become older than ``max_staleness``.
    """

    VALUE_KEY: ClassVar[str] = "steps_ahead"

    # Each step ahead is one more update between the sampling of a token and its training.
    steps_ahead: int = setting(
        0,
        "Age of a step's rollouts in updates; 0 is the synchronous order.",
        unit="steps",
        at_least=0,
        at_most=64,
        advice="1 is one-step-off-policy, 0 the synchronous order",
        also_called={
            "prime-rl": "async_level, max_async_level",
            "OpenRLHF": "async_train",
            "common": "one_step_off_policy",
        },
        their_values={"async_train": {True: 1, False: 0}, "one_step_off_policy": {True: 1, False: 0}},
    )
    max_staleness: int | None = setting(
        None,
        "Largest age of a trained token in updates.",
        unit="steps",
        unset="steps_ahead, with rollout.partial two more, and with hybrid_engine.every the versions between",
        at_least=0,
        at_most=MAX_STEPS,
        advice="steps_ahead, and with rollout.partial more",
        also_called={
            "AReaL": "max_head_offpolicyness",
            "NeMo-RL": "max_trajectory_age_steps",
            "prime-rl": "max_off_policy_steps",
            "common": "staleness, staleness_threshold",
        },
    )
