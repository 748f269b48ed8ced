"""Which fields of Megatron's TransformerConfig the roles' ``megatron`` may set, and what it refuses.

Names and types are compared with the installed sources. Then a process of its own makes the TransformerConfig
of every role, while the other rules run: see `parallel.trial`.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.check.installed_source import InstalledField, class_fields, field_error, find_module
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout

TRANSFORMER_CONFIG = (
    ("megatron.core.model_parallel_config", "ModelParallelConfig"),
    ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    ("megatron.core.transformer.transformer_config", "MLATransformerConfig"),
)
PATIENCE, LONG_PATIENCE = 3.5, 120.0
"""Seconds after the start of a check at which it stops waiting for Megatron: alone, and before a run."""

DERIVED: Mapping[str, str] = {
    "tensor_model_parallel_size": "actor.layout.tensor",
    "pipeline_model_parallel_size": "actor.layout.pipeline",
    "virtual_pipeline_model_parallel_size": "actor.layout.virtual_pipeline",
    "context_parallel_size": "actor.layout.context",
    "expert_model_parallel_size": "actor.layout.expert",
    "expert_tensor_parallel_size": "actor.layout.expert_tensor",
    "sequence_parallel": "actor.layout.sequence_parallel",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "num_moe_experts",
            "moe_ffn_hidden_size",
        ),
        "model.path",
    ),
}
"""Fields that follow from the checkpoint and the layout, and the key that sets them."""

SET_BY_RUN: Mapping[str, str] = {
    "recompute_granularity": "it is called `actor.recompute` here",
    "calculate_per_token_loss": "losses are sums with global weights, whose denominators are known before",
    "variable_seq_lengths": "packed micro-batches differ in length",
    "overlap_p2p_comm": "interleaved schedules give wrong results without it",
    "batch_p2p_comm": "interleaved schedules give wrong results with it",
    "pipeline_model_parallel_layout": "pipeline stages are stated by their ends, "
    "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, which weight syncs follow",
}
"""Further fields that the run sets, and why."""
_INSTEAD = {
    "recompute_granularity": "actor.recompute",
    "pipeline_model_parallel_layout": "actor.megatron.num_layers_in_first_pipeline_stage",
}


def check_model_settings(values: Mapping[str, Any], path: str = "actor.megatron") -> list[UserError]:
    """Return the errors of a role's settings at ``path``, compared with the installed version's fields."""
    installed = class_fields(*TRANSFORMER_CONFIG) if values else None
    errors = (_error(path, name, value, installed) for name, value in values.items())
    return [error for error in errors if error is not None]


def _error(
    path: str, name: str, value: Any, installed: Mapping[str, InstalledField] | None
) -> UserError | None:
    where, got, role = f"{path}.{name}", f"`{name}: {value}`", path.removesuffix("megatron")
    key = DERIVED.get(name, "").replace("actor.", role) or None
    reason = SET_BY_RUN.get(name) or (f"it is called `{key}` here" if key else None)
    if reason is not None:
        key = key or _INSTEAD.get(name)
        return UserError(
            f"`{where}` is set by the run itself: {reason}",
            where=where,
            expected=f"`{key}`" if key else "no value",
            got=got,
            fix=f"write `{key}`" if key else f"remove `{where}`",
        )
    if installed is None:
        return None
    return field_error(path, name, value, installed, "Megatron-Core's TransformerConfig")


@dataclass(frozen=True)
class TriedRole:
    """Say what a role's model is made of: ``model`` is a config.json."""

    role: str
    model: Path
    layout: ParallelLayout
    scalar_head: bool
    recompute: str
    fused: bool
    """Its layers are Transformer Engine's."""
    where: str
    """The path at which its settings stand."""
    settings: Mapping[str, Any]


class Trial:
    """Have Megatron make the TransformerConfig of every role in a process that is started at once.

    ``paths`` are those of all settings: where there are none nothing is tried. ``missing`` is the package
    that trying needs and that is not installed, if any. ``patience`` in seconds counts from the start of the
    process.
    """

    def __init__(self, paths: list[str], patience: float) -> None:
        self._paths = paths
        self._patience = patience
        self._start = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self.missing = next((name for name in ("torch", "megatron.core") if find_module(name)[1]), None)
        if paths and self.missing is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.parallel.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def result(self, roles: list[TriedRole], dtype: str) -> tuple[list[UserError], list[UserError]]:
        """Return errors and warnings: what Megatron refuses, and that it could not be asked."""
        if not self._paths:
            return [], []
        if self._process is None:
            return [], [self._untried(f"{self.missing} is not installed here")]
        request = [
            {
                "role": role.role,
                "model": str(role.model),
                "layout": dataclasses.asdict(role.layout),
                "scalar_head": role.scalar_head,
                "recompute": role.recompute,
                "fused": role.fused,
                "dtype": dtype,
                "overrides": dict(role.settings),
            }
            for role in roles
        ]
        left = max(0.1, self._patience - (time.monotonic() - self._start))
        try:
            answer, problem = self._process.communicate(json.dumps(request), timeout=left)
        except subprocess.TimeoutExpired:
            self.stop()
            return [], [self._untried(f"Megatron did not answer within {self._patience:g} seconds")]
        if self._process.returncode != 0:
            return [], [self._untried(problem.strip().rpartition("\n")[2] or "the process died")]
        refused = json.loads(answer)
        errors = [_refusal(role, refused[role.role]) for role in roles if role.role in refused]
        return errors, []

    def stop(self) -> None:
        """End the process, if it is still there."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def _untried(self, reason: str) -> UserError:
        return UserError(
            f"the values of {', '.join(self._paths)} were not tried",
            where=self._paths[0],
            expected="torch and megatron-core, to make the TransformerConfig of every role",
            got=reason,
            fix="check again where the run will be, or with more time; `train` makes the same test",
        )


def _refusal(role: TriedRole, message: str) -> UserError:
    values, path = role.settings, role.where
    named = next((name for name in values if name in message or len(values) == 1), None)
    return UserError(
        f"Megatron refuses the settings of the {role.role}'s model",
        where=f"{path}.{named}" if named else path,
        expected=f"values that fit the model and {role.layout.path}: {role.layout.words()}",
        got=message,
        fix="correct or remove " + (f"`{path}.{named}`" if named else "one of " + ", ".join(values)),
    )
