"""The roles with a model of their own: where the section of each stands, and what each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ActorConfig, CriticConfig, ReferenceConfig
from megatron_rl.config.sections.rewards import RewardModelConfig

RoleConfig = ActorConfig | CriticConfig | ReferenceConfig | RewardModelConfig


def role_sections(config: RunConfig) -> dict[str, RoleConfig]:
    """Return the section of every role with a model by its configuration path, the actor's first."""
    sections = {"actor": config.actor, "critic": config.critic, "reference": config.reference}
    sections |= {f"reward.models.{name}": model for name, model in config.reward.models.items()}
    return {path: section for path, section in sections.items() if section is not None}


def with_role_sections(config: RunConfig, change: Callable[[str, Any], Any]) -> RunConfig:
    """Return the configuration with what ``change`` makes of each role's path and section."""
    changed = {path: change(path, section) for path, section in role_sections(config).items()}
    models = {name: changed[f"reward.models.{name}"] for name in config.reward.models}
    return replace(
        config,
        actor=changed["actor"],
        critic=changed.get("critic"),
        reference=changed.get("reference"),
        reward=replace(config.reward, models=models),
    )


def stated_models(config: RunConfig) -> dict[str, str | None]:
    """Return the model that each role beside the actor states, by its section; None: it has the actor's."""
    sections = role_sections(config).items()
    return {path: section.path for path, section in sections if not isinstance(section, ActorConfig)}


def role_of(path: str) -> str:
    """Return the role whose section, or layout, stands at a configuration path; see `where_of`."""
    return path.removesuffix(".layout").replace("reward.models.", "reward.")


def section_of(role: str) -> str:
    """Return the configuration path of the section of a role with a model; see `role_of`."""
    return where_of(role).removesuffix(".layout")


def where_of(role: str) -> str:
    """Return the configuration path of a role's layout."""
    if role == "rollout":
        return "rollout"
    return f"{role.replace('reward.', 'reward.models.', 1)}.layout"
