"""Models of a run's policy: built on a layout, with their weights and adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments
from megatron_rl.config.placement import megatron_settings
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.stage_plan import present_model, starting_model
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.peft import add_adapters, note_base
from megatron_rl.hf.weights import load_weights
from megatron_rl.megatron.model import ParallelModel, build_model
from megatron_rl.megatron.model_spec import read_hf_config
from megatron_rl.megatron.provider import Provider, load_provider
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import read_pretrained


def add_lora(config: RunConfig, model: ParallelModel | None, *, trainable: bool) -> None:
    """Give the actor's model the adapters that the configuration asks for.

    A file to start from is for the model at ``model.path``: a stage that has ended has added it in.
    """
    lora = config.actor.lora
    if lora is not None and model is not None:
        ended = present_model(config) != config.model.path
        add_adapters(model, replace(lora, path=None) if ended else lora, config.seed, trainable=trainable)
        note_base(model, stored_at(config, present_model(config)))


def stored_at(config: RunConfig, path: str | None) -> str:
    """Return where the weights of a role lie: the model's own folder until the actor's stages have ended."""
    if path is None or (path == starting_model(config) and not Path(path).is_dir()):
        return config.model.path
    return path


def _provider(config: RunConfig, path: str) -> Provider | None:
    """Return the user's code for the model at ``path``; models of other sizes are Megatron's own."""
    if config.model.provider is None:
        return None
    shapes = [read_pretrained(Path(place) / "config.json").shape for place in (config.model.path, path)]
    if len({replace(shape, name="", scalar_head=False, tied=False) for shape in shapes}) > 1:
        return None
    arguments, _ = checkpoint_arguments(config.model.path)
    return load_provider(config.model.provider, config.model.weights, arguments)


def build_policy(
    config: RunConfig,
    layout: ParallelLayout,
    *,
    path: str | None = None,
    recompute: str = "none",
    head: str = "lm",
    trainable: bool,
) -> ParallelModel | None:
    """Build a model on ``layout`` and load its Hugging Face weights; None on ranks outside.

    ``head`` is ``lm`` for a policy, ``value`` for a critic or a reward model. Collective over the world.
    """
    path = stored_at(config, path)
    groups = ParallelGroups(layout)
    if not groups.member:
        return None
    model = build_model(
        read_hf_config(path),
        groups,
        dtype=getattr(torch, config.model.dtype),
        recompute=recompute,
        overrides=megatron_settings(config, layout)[1],
        attention=config.model.attention,
        head=head,
        trainable=trainable,
        seed=config.seed,
        provider=_provider(config, path),
    )
    load_weights(model, path)
    return model
