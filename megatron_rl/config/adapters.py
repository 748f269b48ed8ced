"""LoRA adapters of the roles: their target layers, and which roles share the actor's base weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.roles import ADAPTED, INITIAL, role_sections, spec_at, with_role_sections
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ActorConfig, LoraConfig
from megatron_rl.config.stage_plan import starting_model
from megatron_rl.shapes.lora import AdaptedModel, default_targets, make_adapted_model
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained


def with_adapters(config: RunConfig, shape: ModelShape | None, reasons: dict[str, str]) -> RunConfig:
    """Fill in the scaling factor and the target layers of the roles' adapters.

    ``shape`` is the shape of the actor's model, None if it is not available. The target layers are filled in
    only for roles that start from this model. The reason for each derived value is added to ``reasons``
    under the path of the value.
    """

    def fill_lora(path: str, section: Any) -> Any:
        """Return the role's section at ``path`` with complete adapter settings."""
        lora = getattr(section, "lora", None)
        if lora is None:
            return section

        if lora.alpha is None:
            reasons[f"{path}.lora.alpha"] = "equal to rank: the scale alpha / rank is 1"
            lora = replace(lora, alpha=float(lora.rank))
        if lora.targets is None and shape is not None and _has_actor_shape(config, section):
            reasons[f"{path}.lora.targets"] = "the linear layers of the model that can have adapters"
            lora = replace(lora, targets=default_targets(shape))
        return replace(section, lora=lora)

    return with_role_sections(config, fill_lora)


def _has_actor_shape(config: RunConfig, section: Any) -> bool:
    """Return whether the role of a section is the actor, or starts from the actor's model."""
    return isinstance(section, ActorConfig) or section.path in (None, starting_model(config))


def adapters_of(config: RunConfig) -> dict[str, LoraConfig]:
    """Map the section path of each role with adapters to the role's adapter settings."""
    adapters = {path: getattr(section, "lora", None) for path, section in role_sections(config).items()}
    return {path: lora for path, lora in adapters.items() if lora is not None}


def separate_base_reason(config: RunConfig, path: str) -> str | None:
    """Return why the role at ``path`` cannot share the actor's base weights; None if it shares them.

    ``config`` is resolved, and `RoleSpec.shares` of the role is `ADAPTED`.
    """
    actor = config.actor
    section: Any = role_sections(config)[path]
    # Missing adapters come first: without them, other differences from the actor do not matter.
    reason_applies = {
        f"{path}.lora is not set": section.lora is None,
        "actor.lora is not set": actor.lora is None,
        f"{path}.path is another model": section.path != starting_model(config),
        f"{path}.layout is not the actor's": section.layout != actor.layout,
        f"{path}.megatron is set": section.megatron is not None,
    }
    for reason, applies in reason_applies.items():
        if applies:
            return reason
    return None


def separate_lora(config: RunConfig) -> LoraConfig | None:
    """Return the actor's LoRA settings if weight syncs send only the adapters (`lora.sync`), else None."""
    lora = config.actor.lora
    return lora if lora is not None and lora.sync == "adapter" else None


def separately_synced_adapters(config: RunConfig) -> AdaptedModel | None:
    """Return the actor's LoRA adapters, layer by layer, if weight syncs send only the adapters, else None.

    Otherwise the adapters are merged into the weights before a sync. Reads the model's config.json.
    """
    lora = separate_lora(config)
    if lora is None:
        return None
    # vLLM needs the names of the layers, which depend on the model's family.
    model = read_pretrained(Path(config.model.path) / "config.json")
    return make_adapted_model(model, lora.rank, lora.alpha, lora.targets)


def is_initial_actor(config: RunConfig, path: str) -> bool:
    """Return whether a role runs on the actor's model, with the actor's adapters switched off.

    This is true if all of these conditions hold:
    - the actor has adapters;
    - the section at ``path`` exists, and `RoleSpec.shares` of the role is `INITIAL`, as for a reference;
    - the role starts from the actor's starting model and has the actor's parallel layout;
    - the role has no ``megatron`` settings.

    ``config`` is resolved.
    """
    actor = config.actor
    section: Any = role_sections(config).get(path)
    if spec_at(path).shares != INITIAL or actor.lora is None or section is None:
        return False
    if section.megatron is not None:
        return False
    return (section.path, section.layout) == (starting_model(config), actor.layout)


def shares_actor_base(config: RunConfig, path: str) -> bool:
    """Return whether the role at ``path`` has its own adapters on the base weights of the actor."""
    if spec_at(path).shares != ADAPTED or path not in adapters_of(config):
        return False
    return separate_base_reason(config, path) is None
