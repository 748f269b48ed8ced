"""Generation, and what connects it with the learner: weight sync, mismatch, asynchrony."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.config.engines import ENGINES, EngineCapabilities, engine_capabilities
from megatron_rl.config.sections.bounds import (
    ENDLESS,
    MOST_STEPS,
    MOST_TOKENS,
    POSITIVE,
    PROCESSES,
    RANKS,
    SECONDS,
    SHARE,
    TOKENS,
    WAIT,
)
from megatron_rl.config.sections.limits import LimitsConfig
from megatron_rl.config.sections.models import RANKS_LISTED
from megatron_rl.config.setting import required, setting

_LONGEST_ROW = "the sum of data.max_prompt_tokens and rollout.max_response_tokens is the longest row"
_FURTHER = "ours is the fraction of further prompts"
CLOSED, OPEN = "closed", "open"
RECOMPUTE, KEEP = "recompute", "keep"


@dataclass(frozen=True)
class EnvironmentConfig:
    """Name what the policy talks to, turn by turn; every further key is a setting of that class.

    An episode whose environment fails is invalid, as one whose reward failed is. The limits are of a process
    and all that it starts; a run says at its start which of them the machine's kernel does not enforce.
    """

    name: str = required(
        "A class derived from megatron_rl.Environment: module:Class, or path/to/file.py:Class.",
        example="my_env.py:Calculator",
    )
    max_turns: int = setting(
        16,
        "Most turns of the policy; an episode that would go on is truncated.",
        unit="turns",
        **ENDLESS,
        also_called={"verl": "max_assistant_turns", "NeMo-RL": "max_rollout_turns"},
    )
    turn_timeout: float = setting(
        30.0, "Time after which an environment that does not answer a turn has failed.", **SECONDS
    )
    workers: int = setting(
        1,
        "Processes per engine replica that environments run in.",
        **PROCESSES,
        also_called={"verl": "agent.num_workers"},
    )
    tool_parser: str | None = setting(
        None,
        "The parser of vLLM that finds calls of tools in a turn, such as `hermes`.",
        unset="none: turns are text alone",
        also_called={"vLLM": "tool_call_parser", "verl": "multi_turn.format"},
    )
    limits: LimitsConfig = setting(LimitsConfig(), "What a process of environments may use.")
    settings: dict[str, Any] = setting({}, "Settings of the class.", takes_rest=True)


@dataclass(frozen=True)
class ServerConfig:
    """Say where vLLM's API servers are that sample for the run, and how patient it is with them.

    Every server must be there when the run starts. One that is lost later costs its requests, which others
    sample again, and gets work again once it is back and has the newest weights.
    """

    urls: tuple[str, ...] = setting(
        (),
        "Addresses of the servers, such as `http://host:8000`; `check` shows the command that starts one.",
        also_called={"TRL": "vllm_server_base_url", "slime": "rollout_external_engine_addrs"},
        conversion="ours is a list, with `engine: server`",
    )
    request_timeout: float = setting(
        600.0, "Time after which a server that has not answered a request counts as lost.", **SECONDS
    )
    update_timeout: float = setting(
        300.0,
        "Time that a server has to meet the trainers, and for each call that brings it weights.",
        **SECONDS,
    )
    wait: float = setting(300.0, "Time that a step waits while no server is there.", **WAIT)


@dataclass(frozen=True)
class RolloutConfig:
    """Describe generation: the engine, its layout, and how responses are sampled.

    With ``oversample`` a step takes the groups that are complete first. The others are continued in the next
    step with ``partial``, else discarded; their prompts then come again, and prompts with short responses
    are learned from more often. Which are complete first is counted in rounds of tokens in the ``closed``
    order, and told by the clock in the ``open`` one.
    """

    VALUE_KEY: ClassVar[str] = "engine"

    engine: str = setting(
        "vllm",
        "What generates: vLLM in the ranks, a plain torch model for small tests, vLLM's API servers, or an "
        "engine of your own, by path: what is called as `make_engine` calls it, and gives a `Generator` and "
        "`WeightStore` in one.",
        choices=tuple(ENGINES),
        or_path=True,
        also_called={
            "verl": "rollout.name",
            "NeMo-RL": "generation.backend",
            "common": "inference_engine, rollout_backend, rollout.backend",
        },
    )
    ranks: tuple[int, ...] | None = setting(
        None,
        'Ranks of the engine: a list, or ranges such as "0-31,40".',
        unset="what `placement` gives the rollout",
        also_called={
            "slime": "rollout_num_gpus",
            "OpenRLHF": "vllm_num_engines",
            "common": "rollout_gpus",
        },
        conversion={
            "rollout_num_gpus": RANKS_LISTED,
            "rollout_gpus": "ours lists the ranks",
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
    temperature: float = setting(
        1.0,
        "Temperature that responses are sampled with, and that log-probs are computed with.",
        more_than=0,
        at_most=100,
        per_task=True,
        advice="sample with 1.0; greedy training samples of one prompt would all be equal",
        also_called={
            "slime": "rollout_temperature",
            "common": "sampling_temperature",
            "Megatron-LM": "grpo_default_temperature",
        },
    )
    top_p: float = setting(
        1.0,
        "Share of probability that is sampled from.",
        more_than=0,
        at_most=1,
        per_task=True,
        advice="1.0 switches top-p off",
        also_called={"slime": "rollout_top_p", "Megatron-LM": "grpo_default_top_p"},
    )
    top_k: int = setting(
        0,
        "Number of tokens that are sampled from; 0 means all.",
        unit="tokens",
        at_least=0,
        at_most=MOST_TOKENS,
        per_task=True,
        advice="0 switches top-k off",
        also_called={"slime": "rollout_top_k"},
    )
    min_p: float = setting(
        0.0,
        "Smallest probability that is sampled from, as a share of the largest.",
        **SHARE,
        per_task=True,
        advice="0 switches min-p off",
    )
    max_response_tokens: int = setting(
        256,
        "Longest response; with an environment, all that follows the prompt together.",
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
            ("rollout_max_context_len", "max_total_sequence_length", "max_model_len"), _LONGEST_ROW
        )
        | {
            "sequence_length": _LONGEST_ROW,
            "inference_max_seq_length": _LONGEST_ROW,
        },
    )
    stop: tuple[str, ...] = setting(
        (),
        "Texts, of one token each, that end a response beside the model's own.",
        per_task=True,
        also_called={
            "slime": "rollout_stop",
            "NeMo-RL": "stop_strings",
            "common": "stop_words, stop_sequences",
        },
    )
    sampling_profiles: dict[str, dict[str, Any]] = setting(
        {},
        "Sampling of single tasks, by task: temperature, top_p, top_k, min_p, max_response_tokens, stop.",
        also_called={"common": "sampling_profile, register_sampling_profile"},
        conversion="ours has a section for each task: rollout.sampling_profiles: {TASK: {temperature: 0.7}}",
    )
    order: str = setting(
        CLOSED,
        "What a step learns from: what was sampled for it, the same in every run (`closed`), or the groups "
        "that are complete first by the clock (`open`).",
        choices=(CLOSED, OPEN),
        advice="open needs rollout ranks of their own, asynchrony.steps_ahead, rollout.oversample and "
        "rollout.partial; its runs cannot be repeated",
    )
    on_update: str = setting(
        RECOMPUTE,
        "How responses of the open order go on when weights arrive: from keys and values that the new "
        "weights compute again (`recompute`), or from those of the older ones (`keep`).",
        choices=(RECOMPUTE, KEEP),
        advice="keep saves a prefill at each update; tokens after it are then of a mixture of policies, "
        "which no weights alone agree with",
    )
    oversample: float = setting(
        0.0,
        "Fraction of further prompts sampled beside those of a step.",
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
        "Tokens per response after which the closed order looks at which over-sampled groups are complete.",
        **TOKENS,
        unset="an eighth of max_response_tokens",
    )
    max_in_flight: int | None = setting(
        None,
        "Most episodes that a replica samples at once; it begins further ones of a step as others end.",
        unit="episodes",
        unset="what the engine works on at once: `rollout.vllm.max_num_seqs`",
        **ENDLESS,
        also_called={
            "prime-rl": "max_inflight_rollouts",
            "slime": "sglang_server_concurrency",
            "AReaL": "max_concurrent_rollouts",
            "common": "rollout_per_device_batch_size",
        },
        conversion={
            "sglang_server_concurrency": "",
            "rollout_per_device_batch_size": "ours is the most episodes of a replica at once; leave it "
            "out to have the engine's own",
        },
    )
    environment: EnvironmentConfig | None = setting(
        None,
        "What the policy talks to: `{name: my_env.py:Calculator, max_turns: 8}`.",
        unset="none: one turn, a response",
        also_called={
            "verl": "multi_turn.enable",
            "slime": "custom_generate_function_path",
            "OpenRLHF": "agent_func_path",
            "ms-swift": "multi_turn_scheduler",
        },
        conversion="ours names a class: {name: my_env.py:Calculator}",
    )
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
    float32_head: bool = setting(
        True,
        "Compute vLLM's logits in float32, as the trainer does, also where the model is of another dtype.",
    )
    server: ServerConfig = setting(ServerConfig(), "The servers of `engine: server`.")
    vllm: dict[str, Any] = setting(
        {}, "Fields of vLLM's EngineArgs.", also_called={"verl": "engine_kwargs", "NeMo-RL": "vllm_cfg"}
    )

    def prompts_in_flight(self, wanted: int) -> int:
        """Return how many prompts are sampled at once for ``wanted`` complete groups.

        Example:
            >>> RolloutConfig(oversample=0.3).prompts_in_flight(8)
            11
        """
        return wanted + math.ceil(wanted * self.oversample - 1e-9)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Return what the engine can do."""
        return engine_capabilities(self.engine)

    @property
    def most_in_flight(self) -> int | None:
        """Return the most episodes that a replica samples at once, None where no setting bounds them."""
        bounds = [self.max_in_flight, self.vllm.get("max_num_seqs")]
        return min((bound for bound in bounds if isinstance(bound, int)), default=None)

    @property
    def truncates(self) -> bool:
        """Say whether some task is sampled from some of the tokens only."""
        common = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        settings = [common | profile for profile in ({}, *self.sampling_profiles.values())]
        return any(leaves_out(s["top_p"], s["top_k"], s["min_p"]) for s in settings)


def leaves_out(top_p: float, top_k: int, min_p: float) -> bool:
    """Say whether these filters draw from some of the tokens only."""
    return top_p < 1 or top_k > 0 or min_p > 0


@dataclass(frozen=True)
class HybridEngineConfig:
    """Bound and check the movement of weights from the actor into the rollout engine."""

    staging_bytes: int = setting(
        256 * 2**20,
        "Memory that a rank may use for weights under way.",
        unit="bytes",
        at_least=1 << 16,
        at_most=1 << 40,
        advice="268435456 (256 MiB) is the default",
        also_called={"verl": "update_weights_bucket_megabytes", "slime": "update_weight_buffer_size"},
        conversion={"update_weights_bucket_megabytes": "ours counts bytes"},
    )
    verify: str = setting(
        "full",
        "Compare checksums after each weight sync: of every tensor, of some, or of none.",
        choices=("full", "sampled", "off"),
    )


@dataclass(frozen=True)
class MismatchConfig:
    """Set when the difference of trainer and rollout log-probs warns and when it stops the run.

    Both are the mean absolute difference per response token.
    """

    warn: float | None = setting(
        None, "Difference from which a step warns.", unit="nats", unset="by model.dtype", **POSITIVE
    )
    stop: float | None = setting(
        None, "Difference from which the run stops.", unit="nats", unset="by model.dtype", **POSITIVE
    )


@dataclass(frozen=True)
class AsynchronyConfig:
    """Let rollout ranks sample ahead of the learner.

    More than 0 steps ahead needs rollout ranks that no other role uses. A response that would become older
    than ``max_staleness`` is waited for.
    """

    VALUE_KEY: ClassVar[str] = "steps_ahead"

    steps_ahead: int = setting(
        0,
        "Updates by which the rollouts of a step are old; 0 is the synchronous order.",
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
        "Most updates by which a token that is learned from may be old.",
        unit="steps",
        unset="steps_ahead, and with rollout.partial two more",
        at_least=0,
        at_most=MOST_STEPS,
        advice="steps_ahead, and with rollout.partial more",
        also_called={
            "AReaL": "max_head_offpolicyness",
            "NeMo-RL": "max_trajectory_age_steps",
            "prime-rl": "max_off_policy_steps",
        },
    )
