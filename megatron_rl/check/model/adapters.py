"""Rules on LoRA adapters: their layers, their sync with the rollout engine, and PEFT files to start from.

PEFT's files are compared with the adapters that the configuration describes on its model: settings first,
then the names and shapes of tensors, from the header of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl import durable
from megatron_rl.check.model.weights import read_header
from megatron_rl.config.engines import engine_capabilities, engines_with
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.errors import UserError, requirement_error, unknown_choice_error
from megatron_rl.shapes.lora import (
    ENGINE_RANKS,
    MLP,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    TARGETS,
    Lora,
    adapts_experts,
    make_adapted_model,
    target_problems,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel, read_json_object

_PLAIN_PEFT = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
}
"""PEFT settings of LoRA variants -> the value with which an adapter is plain LoRA, two matrices A and B."""

CHECKPOINT_LAYERS = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
"""Hugging Face layer names, as PEFT configurations use them -> the Megatron layer that contains them."""


def check_lora(lora: LoraConfig, engine: str | None, key: str = "actor.lora") -> Iterator[UserError]:
    """Yield the errors for adapters that are invalid on every model, or that the engine cannot receive.

    ``key`` is the configuration key of the adapters. ``engine`` is the rollout engine for adapters of the
    actor, and None for adapters of other roles, which are not synced.
    """
    path = f"{key}.targets"
    for name in lora.targets or ():
        if name not in TARGETS:
            layer = CHECKPOINT_LAYERS.get(name) or " or ".join(TARGETS)
            yield unknown_choice_error(path, name, TARGETS, fallback_fix=f"write {layer}")

    targets = lora.targets
    if targets is not None and (not targets or len(set(targets)) < len(targets)):
        yield UserError(
            f"`{path}` is empty or names a layer twice",
            where=path,
            expected="some of " + ", ".join(TARGETS) + ", each once",
            got=f"[{', '.join(targets)}]",
            fix=f"remove {path} to have all",
        )

    # Adapters that are synced without the weights need an engine that stores them, with a supported rank.
    if lora.sync != "adapter":
        return
    max_rank = ENGINE_RANKS[-1]
    stores_adapters = engine is not None and engine_capabilities(engine).adapter_sync
    if not stores_adapters or lora.rank > max_rank:
        got = "a role that no engine samples with"
        if engine is not None:
            got = f"rollout.engine={engine} and rank {lora.rank}"
        condition = f"{engines_with(adapter_sync=True)} and a rank of at most {max_rank}"
        yield requirement_error(f"{key}.sync", lora.sync, condition, got=got, fix=f"set {key}.sync=merged")


def idle_adapter_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors for adapters of reward models that are not trained."""
    for name, model in config.reward.models.items():
        path = f"reward.models.{name}"
        if model.lora is not None and model.training is None:
            yield UserError(
                f"`{path}.lora` has no effect: the reward model is not trained",
                where=f"{path}.lora",
                expected=f"{path}.training as well",
                got="no training",
                fix=f"remove {path}.lora, or add {path}.training",
            )


def check_adapted_model(
    lora: LoraConfig,
    model: PretrainedModel,
    key: str = "actor.lora",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[UserError]:
    """Yield the errors for adapters on a model, and for the PEFT adapter that they start from.

    ``key`` is the key of the adapters' section; ``settings`` are the Megatron settings of the model.
    """
    refused_mixers = [mixer for mixer in model.shape.mixers if not mixer.takes_adapters]
    if refused_mixers:
        noun = refused_mixers[0].noun
        yield UserError(
            f"models with {noun} cannot have adapters",
            where=key,
            expected="no adapters, or another model",
            got=f"{model.shape.name}, with {model.shape.mixers[refused_mixers[0]]} {noun}",
            fix=f"remove {key}",
        )
        return

    if model.shape.sinks:
        yield UserError(
            "models with attention sinks and biases of experts cannot have adapters",
            where=key,
            expected="no adapters, or another model",
            got=model.shape.name,
            fix=f"remove {key}",
        )
        return

    # Targets that the model does not have, and settings that exclude adapters of experts.
    targets = Lora.for_model(model.shape, lora.rank, lora.targets).targets
    errors = target_problems(model.shape, targets, f"{key}.targets")
    uses_keys_as_values = any(copies > 1 for _, copies in model.shape.key_value_parameters)
    if lora.sync == "adapter" and uses_keys_as_values and "linear_qkv" in targets:
        # vLLM 0.32 adds the adapter of the key projection to keys only, not to values equal to the keys.
        errors.append(
            UserError(
                "some layers of this model use keys as values, and vLLM would adapt the keys alone",
                where=f"{key}.sync",
                expected="merged, or targets without linear_qkv",
                got="adapter",
                fix=f"set {key}.sync=merged",
            )
        )
    if adapts_experts(model.shape, targets):
        errors += _expert_adapter_errors(lora, model.shape, key, settings or {})
    yield from errors
    if errors or lora.path is None:
        return

    # The adapter to start from: first its settings, then its tensors, which are only comparable if the
    # settings match. If a file turns out to be unreadable, only that error is reported.
    file = Path(lora.path) / PEFT_CONFIG
    try:
        problems = list(_peft_config_errors(lora, model, targets, read_json_object(file), key))
        if not problems:
            problems = list(_peft_tensor_errors(lora, model, targets, key))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        yield UserError(
            "the adapter to start from cannot be read",
            where=f"{key}.path",
            expected=f"a directory with {PEFT_CONFIG} and {PEFT_WEIGHTS}, as PEFT writes them",
            got=f"{file}: {error}",
            fix=f"correct {key}.path, or remove it to start from new adapters",
        )
        return

    # Compare digests last, since that reads the files completely.
    yield from problems
    if not problems:
        yield from _damage_errors(Path(lora.path), f"{key}.path")


def _damage_errors(folder: Path, key: str) -> Iterator[UserError]:
    """Yield the error for an exported adapter whose files do not match their digests.

    Training does the same comparison before its first step. Adapters are small enough to be read here.
    """
    if not durable.is_sealed(folder):
        return

    digests = durable.read_digests(folder)
    problems = [f"{durable.DIGESTS} is missing or damaged"]
    if digests is not None:
        problems = durable.describe_damaged_files(folder, digests, list(digests))
    if problems:
        yield UserError(
            "the adapter to start from is damaged",
            where=key,
            expected="files with the content that was written",
            got="; ".join(problems),
            fix="restore it from a copy, or export it again; if the change is intended, remove "
            f"{folder / durable.DIGESTS}, which has the digests of the old files",
        )


def _expert_adapter_errors(
    lora: LoraConfig,
    shape: ModelShape,
    key: str,
    settings: Mapping[str, Any],
) -> Iterator[UserError]:
    """Yield the errors for settings that cannot be combined with adapters on experts."""
    targets = ", ".join(lora.targets or ())
    if lora.sync == "adapter":
        yield UserError(
            "adapters of experts cannot be synced separately from the weights: vLLM has no CPU kernel for "
            "these adapters, and its GPU kernels store the weights in a different order",
            where=f"{key}.sync",
            expected="merged, or targets only in attention",
            got=f"adapter, with {targets}",
            fix=f"set {key}.sync=merged",
        )

    # With this setting, Megatron's token dispatcher communicates for the shared experts, and the layers of
    # the shared experts do not communicate. Adapters communicate inside these layers.
    overlap = "moe_shared_expert_overlap"
    if shape.shared_width and settings.get(overlap):
        yield UserError(
            f"adapters of shared experts do not work with Megatron's {overlap}: with this setting, the "
            "layers of shared experts do not communicate, and their adapters have to communicate",
            where=f"{key}.targets",
            expected=f"targets without {' and '.join(MLP)}, or Megatron's {overlap}: false",
            got=f"{targets}, and {overlap}: true",
            fix=f"remove {overlap}",
        )


def _peft_config_errors(
    lora: LoraConfig,
    model: PretrainedModel,
    targets: tuple[str, ...],
    peft_config: Mapping[str, Any],
    key: str,
) -> Iterator[UserError]:
    """Yield the errors for configured adapters that differ from ``peft_config``, PEFT's saved settings."""
    # Rank and alpha must equal the saved values: A and B have this rank, and alpha scales their product.
    file = f"{lora.path}/{PEFT_CONFIG}"
    configured_and_saved = {
        "rank": (lora.rank, peft_config.get("r")),
        "alpha": (lora.alpha or lora.rank, peft_config.get("lora_alpha")),
    }
    for name, (configured, saved) in configured_and_saved.items():
        if not isinstance(saved, int | float) or not math.isclose(saved, configured):
            yield UserError(
                f"the adapter to start from has another {name}",
                where=f"{key}.{name}",
                expected=f"{saved}, of {file}",
                got=f"{configured:g}",
                fix=f"set {key}.{name} to {saved}",
            )

    # Every saved layer needs a configured adapter. Configured adapters of other layers are initialised.
    modules = make_adapted_model(model, lora.rank, lora.alpha, targets).modules()
    saved_modules = peft_config.get("target_modules")
    if isinstance(saved_modules, list):
        uncovered_modules = sorted(set(saved_modules) - set(modules))
    else:
        # PEFT also accepts a regular expression.
        uncovered_modules = [str(saved_modules)]
    if uncovered_modules:
        yield UserError(
            "the adapter to start from also adapts other layers",
            where=f"{key}.targets",
            expected="layers that contain " + ", ".join(uncovered_modules),
            got=", ".join(targets) + ": " + ", ".join(modules),
            fix=f"name the layer in {key}.targets, or train an adapter without it",
        )

    # LoRA variants, such as DoRA, compute something else from A and B.
    for name, plain_value in _PLAIN_PEFT.items():
        if peft_config.get(name, plain_value) not in (plain_value, None, [], {}):
            yield UserError(
                f"the adapter to start from uses PEFT's {name}",
                where=f"{key}.path",
                expected=f"{name}: {json.dumps(plain_value)} in {file}",
                got=json.dumps(peft_config[name]),
                fix="start from an adapter of plain LoRA, which has only two matrices",
            )


def _peft_tensor_errors(
    lora: LoraConfig,
    model: PretrainedModel,
    targets: tuple[str, ...],
    key: str,
) -> Iterator[UserError]:
    """Yield the error for saved adapter tensors with unexpected names or shapes.

    Missing tensors are not an error: an adapter without saved tensors gets new initial values.
    """
    assert lora.path is not None
    file = Path(lora.path) / PEFT_WEIGHTS
    expected_shapes = make_adapted_model(model, lora.rank, lora.alpha, targets).tensor_shapes()

    # PEFT's tensor names have the prefix of its wrapper classes.
    stored_shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in read_header(file).items():
        stored_shapes[name.removeprefix(PEFT_PREFIX)] = tensor.shape

    unexpected_names: list[str] = []
    for name, shape in sorted(stored_shapes.items()):
        if expected_shapes.get(name) != tuple(shape):
            unexpected_names.append(name)
    if unexpected_names:
        first_name = unexpected_names[0]
        yield UserError(
            "the adapter to start from has tensors that belong to no layer of the model",
            where=f"{key}.path",
            expected="only matrices A and B of the adapted layers, with names such as "
            f"{list(expected_shapes)[-1]}",
            got=f"{len(unexpected_names)} tensors with other names or shapes in {file}, such as "
            f"{first_name} {list(stored_shapes[first_name])}",
            fix="start from an adapter of this model; split tensors that contain several experts",
        )
