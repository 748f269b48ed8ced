"""Rules on fields that pass through to Megatron-Core and vLLM, read from their installed sources.

The sources are parsed, not imported: an import would take longer than the whole check.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.check.rewards import find_module
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, nearest

MEGATRON = (
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.model_parallel_config", "ModelParallelConfig"),
)
VLLM = (("vllm.engine.arg_utils", "EngineArgs"),)

OURS: Mapping[str, str] = {
    "actor.megatron.tensor_model_parallel_size": "actor.layout.tensor",
    "actor.megatron.pipeline_model_parallel_size": "actor.layout.pipeline",
    "actor.megatron.virtual_pipeline_model_parallel_size": "actor.layout.virtual_pipeline",
    "actor.megatron.context_parallel_size": "actor.layout.context",
    "actor.megatron.expert_model_parallel_size": "actor.layout.expert",
    "actor.megatron.expert_tensor_parallel_size": "actor.layout.expert_tensor",
    "actor.megatron.sequence_parallel": "actor.layout.sequence_parallel",
    "actor.megatron.recompute_granularity": "actor.recompute",
    "actor.megatron.params_dtype": "model.dtype",
    "actor.megatron.bf16": "model.dtype",
    "actor.megatron.fp16": "model.dtype",
    "rollout.vllm.model": "model.path",
    "rollout.vllm.dtype": "model.dtype",
    "rollout.vllm.seed": "seed",
    "rollout.vllm.tensor_parallel_size": "rollout.tensor",
    "rollout.vllm.gpu_memory_utilization": "rollout.memory_fraction",
}
"""Fields that a run sets itself, and the name that sets them."""


def check_passthrough(config: RunConfig) -> list[UserError]:
    """Return unknown fields of ``actor.megatron`` and ``rollout.vllm``, and fields that are set elsewhere."""
    errors = _check("actor.megatron", config.actor.megatron, MEGATRON, "Megatron-Core's TransformerConfig")
    return errors + _check("rollout.vllm", config.rollout.vllm, VLLM, "vLLM's engine arguments")


def _check(
    path: str, values: Mapping[str, Any], classes: tuple[tuple[str, str], ...], owner: str
) -> list[UserError]:
    errors = []
    known = fields_of(classes) if values else None
    for name, value in values.items():
        where = f"{path}.{name}"
        if where in OURS:
            errors.append(
                UserError(
                    f"`{where}` is set by the run itself: it is called `{OURS[where]}` here",
                    where=where,
                    expected=f"`{OURS[where]}`",
                    got=f"`{name}: {value}`",
                    fix=f"write `{OURS[where]}`",
                )
            )
        elif known is not None and name not in known:
            close = nearest(name, known)
            errors.append(
                UserError(
                    f"{owner} of the installed version has no field `{name}`"
                    + (f"; did you mean `{close}`?" if close else ""),
                    where=where,
                    expected=f"a field of {owner}",
                    got=f"`{name}: {value}`",
                    fix=f"write `{path}.{close}`" if close else "remove it",
                )
            )
    return errors


def fields_of(classes: tuple[tuple[str, str], ...]) -> set[str] | None:
    """Return the annotated fields of classes in installed modules, or None where one is not installed."""
    found: set[str] = set()
    for module, name in classes:
        file, missing = find_module(module)
        if missing is not None or file is None or file.suffix != ".py":
            return None
        fields = _fields(file, name)
        if not fields:
            return None  # another version keeps them elsewhere: building will say what is wrong
        found |= fields
    return found


def _fields(file: Path, name: str) -> set[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return set()
