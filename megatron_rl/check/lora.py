"""Rules of adapters: layers that can have one, and the file that they start from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.errors import UserError, nearest
from megatron_rl.shapes.lora import (
    ENGINE_RANKS,
    PEFT_CONFIG,
    TARGETS,
    Lora,
    adapted,
    target_problems,
)
from megatron_rl.shapes.pretrained import PretrainedModel

_PLAIN = {
    "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None, "fan_in_fan_out": False,
    "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip
"""Settings of PEFT that make something else of an adapter than two matrices -> their value without it."""


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
                fix=f"write {nearest(name, TARGETS) or TARGETS[0]}",
            )
    if lora.targets is not None and (not lora.targets or len(set(lora.targets)) < len(lora.targets)):
        yield UserError(
            "the layers with adapters are none, or one of them twice",
            where=f"{where}.targets",
            expected="some of " + ", ".join(TARGETS) + ", each once",
            got=f"[{', '.join(lora.targets)}]",
            fix=f"remove {where}.targets to have all",
        )
    if lora.sync == "adapter" and (engine != "vllm" or lora.rank > ENGINE_RANKS[-1]):
        yield UserError(
            "the rollout engine cannot keep these adapters apart from its weights",
            where=f"{where}.sync",
            expected=f"merged, or rollout.engine=vllm and a rank of at most {ENGINE_RANKS[-1]}",
            got=f"{lora.sync} with rollout.engine={engine} and rank {lora.rank}"
            if engine
            else f"{lora.sync}, for a role that no engine samples with",
            fix=f"set {where}.sync=merged",
        )


def check_adapted_model(
    lora: LoraConfig, model: PretrainedModel, where: str = "actor.lora"
) -> Iterator[UserError]:
    """Yield what is wrong between adapters at ``where`` and a model, and with the file they start from."""
    targets = Lora.of(model.shape, lora.rank, lora.targets).targets
    errors = target_problems(model.shape, targets, f"{where}.targets")
    yield from errors
    if errors or lora.path is None:
        return
    path = Path(lora.path) / PEFT_CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        yield from list(_file_problems(lora, model, targets, stored, where))  # all, or that it is damaged
    except (OSError, ValueError, AttributeError, TypeError) as error:
        yield UserError(
            "the adapter to start from cannot be read",
            where=f"{where}.path",
            expected=f"a directory with {PEFT_CONFIG} and adapter_model.safetensors, as PEFT writes them",
            got=f"{path}: {error}",
            fix=f"correct {where}.path, or remove it to start from new adapters",
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
