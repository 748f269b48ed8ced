"""Rules of adapters: layers that can have one, and the file that they start from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.check.model.weights import read_header
from megatron_rl.config.engines import engine_capabilities, engines_with
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.errors import UserError, nearest
from megatron_rl.shapes.lora import (
    ENGINE_RANKS,
    MLP,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    TARGETS,
    Lora,
    adapted,
    adapts_experts,
    target_problems,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import PretrainedModel

_PLAIN = {
    "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None, "fan_in_fan_out": False,
    "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None,
}  # fmt: skip
"""Settings of PEFT that make something else of an adapter than two matrices -> their value without it."""
CHECKPOINT_LAYERS = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
}  # fmt: skip
"""Names of layers in most checkpoints, which PEFT's users write -> Megatron's layer that holds them."""


def check_lora(lora: LoraConfig, engine: str | None, where: str = "actor.lora") -> Iterator[UserError]:
    """Yield the errors of adapters at ``where`` that no model can have, or that the rollout engine cannot.

    ``engine`` is None for a role that no engine samples with.
    """
    for name in lora.targets or ():
        if name not in TARGETS:
            yield UserError(
                f"there is no linear layer {name!r}",
                where=f"{where}.targets",
                expected="some of " + ", ".join(TARGETS),
                got=repr(name),
                fix=f"write {CHECKPOINT_LAYERS.get(name) or nearest(name, TARGETS) or ' or '.join(TARGETS)}",
            )
    if lora.targets is not None and (not lora.targets or len(set(lora.targets)) < len(lora.targets)):
        yield UserError(
            "the layers with adapters are none, or one of them twice",
            where=f"{where}.targets",
            expected="some of " + ", ".join(TARGETS) + ", each once",
            got=f"[{', '.join(lora.targets)}]",
            fix=f"remove {where}.targets to have all",
        )
    separate = engine is not None and engine_capabilities(engine).adapter_sync
    if lora.sync == "adapter" and (not separate or lora.rank > ENGINE_RANKS[-1]):
        yield UserError(
            "the rollout engine cannot keep these adapters apart from its weights",
            where=f"{where}.sync",
            expected=f"merged, or {engines_with(adapter_sync=True)} and a rank of at most {ENGINE_RANKS[-1]}",
            got=f"{lora.sync} with rollout.engine={engine} and rank {lora.rank}"
            if engine
            else f"{lora.sync}, for a role that no engine samples with",
            fix=f"set {where}.sync=merged",
        )


def idle_adapters(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of adapters of reward models that learn nothing."""
    for name, model in config.reward.models.items():
        if model.lora is not None and model.training is None:
            yield UserError(
                "nothing trains the adapters of a reward model that only scores",
                where=f"reward.models.{name}.lora",
                expected=f"reward.models.{name}.training beside it",
                got="no training",
                fix=f"remove reward.models.{name}.lora, or say what trains it",
            )


def check_adapted_model(
    lora: LoraConfig,
    model: PretrainedModel,
    where: str = "actor.lora",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[UserError]:
    """Yield what is wrong between adapters at ``where`` and a model, and with the file they start from.

    ``settings`` are Megatron's for the model.
    """
    targets = Lora.of(model.shape, lora.rank, lora.targets).targets
    errors = target_problems(model.shape, targets, f"{where}.targets")
    if adapts_experts(model.shape, targets):
        errors += _expert_problems(lora, model.shape, where, settings or {})
    yield from errors
    if errors or lora.path is None:
        return
    path = Path(lora.path) / PEFT_CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = list(_file_problems(lora, model, targets, stored, where))  # all, or that it is damaged
        yield from found or list(_tensor_problems(lora, model, targets, where))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        yield UserError(
            "the adapter to start from cannot be read",
            where=f"{where}.path",
            expected=f"a directory with {PEFT_CONFIG} and adapter_model.safetensors, as PEFT writes them",
            got=f"{path}: {error}",
            fix=f"correct {where}.path, or remove it to start from new adapters",
        )


def _expert_problems(
    lora: LoraConfig, shape: ModelShape, where: str, settings: Mapping[str, Any]
) -> Iterator[UserError]:
    """Yield what goes with adapters of attention alone, not with those of experts."""
    if lora.sync == "adapter":
        yield UserError(
            "adapters of experts cannot be kept apart from the rollout engine's weights: vLLM's kernels of "
            "experts have none on hosts, and elsewhere keep the weights in an order of their own",
            where=f"{where}.sync",
            expected="merged, or targets of attention alone",
            got=f"adapter, with {', '.join(lora.targets or ())}",
            fix=f"set {where}.sync=merged",
        )
    overlap = "moe_shared_expert_overlap"
    if shape.shared_width and settings.get(overlap):
        yield UserError(
            "adapters of shared experts exchange tokens in the layers they are on, and overlapping has none",
            where=f"{where}.targets",
            expected=f"targets without {' and '.join(MLP)}, or Megatron's {overlap}: false",
            got=f"{', '.join(lora.targets or ())}, and {overlap}: true",
            fix=f"remove {overlap}",
        )


def _file_problems(
    lora: LoraConfig, model: PretrainedModel, targets: tuple[str, ...], stored: dict[str, Any], where: str
) -> Iterator[UserError]:
    place = f"{lora.path}/{PEFT_CONFIG}"
    for name, stated, value in (
        ("rank", lora.rank, stored.get("r")),
        ("alpha", lora.alpha or float(lora.rank), stored.get("lora_alpha")),
    ):
        if not isinstance(value, int | float) or not math.isclose(value, stated):
            yield UserError(
                f"the adapter to start from has another {name}",
                where=f"{where}.{name}",
                expected=f"{value}, of {place}",
                got=f"{stated:g}",
                fix=f"set {where}.{name} to {value}",
            )
    modules, named = adapted(model, lora.rank, lora.alpha, targets).modules(), stored.get("target_modules")
    missing = sorted(set(named) - set(modules)) if isinstance(named, list) else [str(named)]
    if missing:
        yield UserError(
            "the adapter to start from is of other layers too",
            where=f"{where}.targets",
            expected="layers that hold " + ", ".join(missing),
            got=", ".join(targets) + ": " + ", ".join(modules),
            fix=f"name the layer in {where}.targets, or train an adapter without it",
        )
    for name, plain in _PLAIN.items():
        if stored.get(name, plain) not in (plain, None, [], {}):
            yield UserError(
                f"the adapter to start from uses PEFT's {name}",
                where=f"{where}.path",
                expected=f"{name}: {json.dumps(plain)} in {place}",
                got=json.dumps(stored[name]),
                fix="start from an adapter of two plain matrices",
            )


def _tensor_problems(
    lora: LoraConfig, model: PretrainedModel, targets: tuple[str, ...], where: str
) -> Iterator[UserError]:
    """Yield the error of a file with tensors that no adapter of the model takes; those it lacks are new."""
    assert lora.path is not None
    path = Path(lora.path) / PEFT_WEIGHTS
    shapes = adapted(model, lora.rank, lora.alpha, targets).tensor_shapes()
    stored = {name.removeprefix(PEFT_PREFIX): tensor.shape for name, tensor in read_header(path).items()}
    wrong = sorted(name for name, shape in stored.items() if shapes.get(name) != tuple(shape))
    if wrong:
        yield UserError(
            "the adapter to start from has tensors that no layer of the model takes",
            where=f"{where}.path",
            expected=f"A and B of layers as the model's checkpoint names them, such as {list(shapes)[-1]}",
            got=f"{len(wrong)} others in {path}, {wrong[0]} {list(stored[wrong[0]])} among them",
            fix="start from an adapter of this model; experts that lie in one tensor have to be taken apart",
        )
