"""What follows from an actor with adapters: which layers have them, and what its reference and engine get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.roles import role_sections, with_role_sections
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ActorConfig, LoraConfig
from megatron_rl.config.stage_plan import starting_model
from megatron_rl.shapes.lora import AdaptedModel, adapted, default_targets
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained


def with_adapters(config: RunConfig, shape: ModelShape | None, reasons: dict[str, str]) -> RunConfig:
    """Fill in the factor and the layers of the roles' adapters, where they can be known.

    ``shape`` is that of the actor's model, and of other roles' that start from the same one.
    """

    def fill(where: str, section: Any) -> Any:
        lora = getattr(section, "lora", None)
        if lora is None:
            return section
        if lora.alpha is None:
            reasons[f"{where}.lora.alpha"] = "rank: an adapter adds the product of its matrices as it is"
            lora = replace(lora, alpha=float(lora.rank))
        if lora.targets is None and shape is not None and _has_actor_shape(config, section):
            reasons[f"{where}.lora.targets"] = "the linear layers of the model that can have adapters"
            lora = replace(lora, targets=default_targets(shape))
        return replace(section, lora=lora)

    return with_role_sections(config, fill)


def _has_actor_shape(config: RunConfig, section: Any) -> bool:
    return isinstance(section, ActorConfig) or section.path in (None, starting_model(config))


def adapters_of(config: RunConfig) -> dict[str, LoraConfig]:
    """Return the adapters of the roles that learn them, by the sections of these."""
    adapters = {path: getattr(section, "lora", None) for path, section in role_sections(config).items()}
    return {path: lora for path, lora in adapters.items() if lora is not None}


def own_base_reason(config: RunConfig) -> str | None:
    """Return why the critic has a base of its own, None where it is the actor's, in a resolved run."""
    actor, critic = config.actor, config.critic
    assert critic is not None
    reasons = {
        "critic.lora is not set": critic.lora is None,
        "actor.lora is not set": actor.lora is None,
        "critic.path is another model": critic.path != starting_model(config),
        "critic.layout is not the actor's": critic.layout != actor.layout,
        "critic.megatron is set": critic.megatron is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def lora_apart(config: RunConfig) -> LoraConfig | None:
    """Return the adapters that the rollout engine gets apart from the weights, None where it gets none."""
    lora = config.actor.lora
    return lora if lora is not None and lora.sync == "adapter" else None


def separate_adapters(config: RunConfig) -> AdaptedModel | None:
    """Return what the adapters of `lora_apart` are of; reads the model's config.json."""
    lora = lora_apart(config)
    if lora is None:
        return None
    model = read_pretrained(Path(config.model.path) / "config.json")
    return adapted(model, lora.rank, lora.alpha, lora.targets)


def reference_is_base(config: RunConfig) -> bool:
    """Say whether the reference is the actor's own model before its adapters learned, in a resolved run.

    So it is where the actor has adapters and the reference states neither another model nor another layout.
    """
    actor, reference = config.actor, config.reference
    if actor.lora is None or reference is None or reference.megatron is not None:
        return False
    return (reference.path, reference.layout) == (starting_model(config), actor.layout)
