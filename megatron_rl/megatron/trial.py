"""Try Megatron's settings of every role without building a model: ``python -m megatron_rl.megatron.trial``.

Reads a JSON list of roles from standard input, each with ``role``, ``model`` (a config.json), ``layout``,
``scalar_head``, ``dtype``, ``recompute``, ``fused``, ``overrides`` and ``optimizer`` (a section or null), and
writes a JSON object to standard output: the roles whose TransformerConfig cannot be made, and why; behind
their name stands `` optimizer`` where it is the OptimizerConfig.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.errors import UserError
from megatron_rl.megatron.transformer_settings import (
    optimizer_settings,
    role_settings,
    transformer_settings,
)
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import describe, read_json

_PACKAGES = ("", ".transformer", ".fusions", ".quantization", ".dist_checkpointing", ".optimizer")
_UNUSED = ("torch.distributed._tensor", "torch.distributed._symmetric_memory")


def refusals(roles: list[dict[str, Any]]) -> dict[str, str]:
    """Return for each role whose settings Megatron refuses what it says."""
    transformer, latent, optimizer = _config_classes()
    refused = {}
    for role in roles:
        try:
            model = describe(read_json(Path(role["model"])))
            model = model.with_scalar_head() if role["scalar_head"] else model
            layout = ParallelLayout(**{**role["layout"], "ranks": tuple(role["layout"]["ranks"])})
            settings = transformer_settings(model, layout, getattr(torch, role["dtype"]), role["fused"])
            settings |= role_settings(layout, role["recompute"], role["overrides"])
        except UserError:
            continue  # the checks of files and layouts say so
        try:
            (latent if model.shape.mla else transformer)(**settings)
        except Exception as error:  # whatever Megatron does with a value that it cannot use
            refused[role["role"]] = f"{type(error).__name__}: {error}".strip()
        try:
            if role["optimizer"] is not None:
                optimizer(**optimizer_settings(OptimizerConfig(**role["optimizer"])))
        except Exception as error:
            refused[f"{role['role']} optimizer"] = f"{type(error).__name__}: {error}".strip()
    return refused


def _config_classes() -> tuple[Any, Any, Any]:
    """Import Megatron's configuration classes alone: its packages as a whole take four times as long."""
    specification = importlib.util.find_spec("megatron")
    assert specification is not None and specification.submodule_search_locations
    folders = [Path(folder) for folder in specification.submodule_search_locations]
    for package in _PACKAGES:
        module = types.ModuleType(f"megatron.core{package}")
        module.__path__ = [str(folder / f"core{package.replace('.', '/')}") for folder in folders]
        sys.modules[module.__name__] = module
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]
    # Nothing runs here, and the compiler's import takes longer than all the rest.
    setattr(torch, "compile", lambda function=None, **_: function or (lambda decorated: decorated))
    import megatron.core.parallel_state  # noqa: F401 - the entrance to a circle of imports
    from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    return TransformerConfig, MLATransformerConfig, MegatronOptimizerConfig


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(refusals(json.load(sys.stdin)), sys.stdout)
