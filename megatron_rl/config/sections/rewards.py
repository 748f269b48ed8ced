"""What judges responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl.config.sections.bounds import LARGE, MOST_ROWS, MOST_SECONDS, MOST_STEPS
from megatron_rl.config.sections.limits import LimitsConfig
from megatron_rl.config.sections.models import LIKE_ACTOR, OWN_MEGATRON, LayoutConfig
from megatron_rl.config.sections.stages import PairsConfig
from megatron_rl.config.setting import setting


@dataclass(frozen=True)
class RewardModelConfig:
    """Describe one reward model, which scores a row at its last token."""

    path: str | None = setting(
        None,
        "A `*ForSequenceClassification` checkpoint with one label and the actor's tokenizer, or with "
        "`training` any policy of that tokenizer.",
        unset="with training: model.path, after `sft` and `preference` where they are",
    )
    weight: float = setting(1.0, "Factor of the score in the reward.", at_least=-LARGE, at_most=LARGE)
    layout: LayoutConfig | None = setting(
        None, "Ranks and parallelism of the reward model.", unset="the actor's"
    )
    offload: bool = setting(False, "Move the model to host memory while other roles work.")
    megatron: dict[str, Any] | None = setting(None, OWN_MEGATRON, unset=LIKE_ACTOR)
    training: PairsConfig | None = setting(
        None, "Training of the reward model before the first step.", unset="none"
    )


@dataclass(frozen=True)
class RewardLimitsConfig(LimitsConfig):
    """Bound what a call of the reward function may use, with all that it starts; else the row is invalid.

    A run says at its start which of these the machine's kernel does not enforce.
    """

    cpu_seconds: float = setting(
        60.0, "Processor time of a call.", unit="seconds", more_than=0, at_most=MOST_SECONDS
    )


@dataclass(frozen=True)
class RewardConfig:
    """Say what judges a response: a function, reward models, or a weighted sum of both.

    The function is called in worker processes as ``function(prompt=, response=, ground_truth=, metadata=,
    **arguments)`` and returns a number, or a mapping of named components that holds ``reward``. Where it has
    a parameter ``turns`` it is given what was said behind the prompt, as a list of ``{role, content}`` with
    the roles policy and environment; where it has ``tokens``, a mapping of ``prompt``, ``response``, ``mask``
    and ``log_probs``. One with a parameter ``group`` is called once for all responses to a prompt, whose
    texts ``group`` lists instead of ``response``; ``turns`` and ``tokens`` are then lists too, and it returns
    a reward for each, an exception or None where there is none. It may be ``async def``. The reward of a row
    is ``weight`` times the function's plus the sum over ``models`` of their weights times their scores; where
    one of them fails the row is invalid.
    """

    function: str | None = setting(
        None,
        "module:function, or path/to/file.py:function.",
        unset="reward models alone",
        also_called={
            "verl": "custom_reward_function.path, custom_reward_function.name",
            "slime": "custom_rm_path",
        },
        conversion={
            "custom_reward_function.path": "path/to/file.py:function",
            "custom_reward_function.name": "path/to/file.py:function",
            "custom_rm_path": "module:function",
        },
    )
    arguments: dict[str, Any] = setting(
        {}, "Further arguments of the function.", also_called={"verl": "reward_kwargs"}
    )
    timeout: float = setting(
        10.0,
        "Time after which a call of the function has failed.",
        unit="seconds",
        more_than=0,
        at_most=MOST_SECONDS,
    )
    workers: int = setting(
        1, "Processes per rank that call the function.", unit="processes", at_least=1, at_most=1024
    )
    concurrency: int = setting(
        16,
        "Calls of an `async def` function that a worker has open at once.",
        unit="calls",
        at_least=1,
        at_most=MOST_ROWS,
    )
    max_invalid_fraction: float = setting(
        0.5,
        "Share of a step's rewards that may fail; a run whose steps go over it `invalid_steps` times running "
        "stops and says why they fail.",
        at_least=0,
        at_most=1,
        advice="1 never stops a run",
    )
    invalid_steps: int = setting(
        3,
        "Steps running over `max_invalid_fraction` that stop a run.",
        unit="steps",
        at_least=1,
        at_most=MOST_STEPS,
    )
    limits: RewardLimitsConfig = setting(RewardLimitsConfig(), "What a call of the function may use.")
    weight: float = setting(
        1.0, "Factor of the function's reward in the sum.", at_least=-LARGE, at_most=LARGE
    )
    models: dict[str, RewardModelConfig] = setting(
        {},
        "Reward models by name.",
        also_called={"verl": "reward_model.model.path"},
        conversion="ours has a name for each: NAME.path",
    )
