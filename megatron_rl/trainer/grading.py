"""Put what function and reward models say of each row together into one reward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_rl.parallel.exchange import gather_rows
from megatron_rl.roles.build import Roles
from megatron_rl.roles.reward import COMPONENT
from megatron_rl.types import FINISH_FAILED, PromptBatch, Rollouts

FUNCTION = "function"


class Grades(NamedTuple):
    """Hold rewards [B] (NaN where not ``valid`` [B]) and their named components, each [B]."""

    rewards: Tensor
    valid: Tensor
    components: dict[str, Tensor]


def grade(roles: Roles, prompts: PromptBatch, rollouts: Rollouts) -> Grades:
    """Judge every row; ``prompts`` has one entry per row.

    A row is valid where every judge gave a finite score. With reward models the function's own reward is
    the component ``function``, what it names ``function/NAME``, and each model's score one of the model's
    name. Collective over the world.
    """
    # All judges are asked before any answer is gathered: those on ranks of their own work at the same time.
    answers = [model.infer(rollouts) for model in roles.reward_models]
    values = dict(gather_rows(roles.reward.infer(prompts, rollouts)).values)
    rewards, valid = values.pop("rewards"), values.pop("valid")
    components = {name.removeprefix(COMPONENT): value for name, value in values.items()}
    if not answers:
        return Grades(rewards, valid, components)
    components = {FUNCTION: rewards} | {f"{FUNCTION}/{name}": value for name, value in components.items()}
    rewards = roles.reward.weight * rewards
    for model, answer in zip(roles.reward_models, answers, strict=True):
        scores = gather_rows(answer).values[model.name]
        components[model.name] = scores
        rewards = rewards + model.weight * scores
    valid = valid & rewards.isfinite() & (rollouts.finish_reason != FINISH_FAILED)
    return Grades(rewards.masked_fill(~valid, float("nan")), valid, components)
