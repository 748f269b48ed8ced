"""Construction of every role's Megatron configurations, to find settings that Megatron refuses.

The command ``check`` runs ``python -m megatron_rl.megatron.trial`` in a separate process, because this module
replaces some of Megatron's packages.

Standard input is a JSON list of roles, each with ``role``, ``model`` (the path of a config.json), ``layout``,
``scalar_head``, ``dtype``, ``recompute``, ``fused``, ``overrides``, ``optimizer`` (a section or null) and
``ddp``. Standard output is a JSON object with Megatron's reason for each configuration that it refuses. The
keys are ``<role>`` for the TransformerConfig, ``<role> optimizer`` and ``<role> ddp``.
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
from megatron_rl.shapes.pretrained import parse_pretrained, read_json

_PACKAGES = (
    "", ".transformer", ".fusions", ".quantization", ".dist_checkpointing", ".optimizer", ".distributed",
)  # fmt: skip
"""Packages of megatron.core whose modules are imported without running the package's ``__init__``."""
_IMPORTING_FIELDS = ("apply_rope_fusion", "moe_permute_fusion")
"""Fields for which TransformerConfig (0.16.1) imports modules that need the packages' ``__init__``."""
_UNUSED_MODULES = ("torch.distributed._tensor", "torch.distributed._symmetric_memory")
"""Modules that Megatron imports if they exist, but that no configuration needs."""


def collect_refusals(roles: list[dict[str, Any]]) -> dict[str, str]:
    """Return Megatron's reason for each configuration that it refuses.

    ``roles`` are JSON objects with the model, layout, dtype and Megatron settings of each role. The keys of
    the result are ``<role>``, ``<role> optimizer`` and ``<role> ddp``.
    """
    needs_packages = any(role["overrides"].get(name) for role in roles for name in _IMPORTING_FIELDS)
    model_config_module, optimizer_config_class, ddp_config_class = _import_config_classes(needs_packages)
    reasons: dict[str, str] = {}
    for role in roles:
        try:
            model = parse_pretrained(read_json(Path(role["model"])))
            if role["scalar_head"]:
                model = model.with_scalar_head()
            layout_values = dict(role["layout"])
            layout_values["ranks"] = tuple(layout_values["ranks"])
            layout = ParallelLayout(**layout_values)
            settings = transformer_settings(
                model,
                layout,
                getattr(torch, role["dtype"]),
                role["fused"],
            )
            settings |= role_settings(layout, role["recompute"], role["overrides"])
        except UserError:
            # Return only Megatron's reasons: the command `check` reports this error itself.
            continue

        # Megatron's classes raise errors of any type for an unsupported value.
        config_class = getattr(model_config_module, model.shape.config_class)
        try:
            config_class(**settings)
        except Exception as error:
            reasons[role["role"]] = f"{type(error).__name__}: {error}".strip()

        # Only a role that trains has an optimizer and DDP.
        if role["optimizer"] is None:
            continue
        try:
            ddp_config_class(**role["ddp"])
        except Exception as error:
            reasons[f"{role['role']} ddp"] = f"{type(error).__name__}: {error}".strip()
        try:
            optimizer_config_class(**optimizer_settings(OptimizerConfig(**role["optimizer"])))
        except Exception as error:
            reasons[f"{role['role']} optimizer"] = f"{type(error).__name__}: {error}".strip()
    return reasons


def _import_config_classes(complete_import: bool) -> tuple[Any, Any, Any]:
    """Return Megatron's module ``transformer_config``, its OptimizerConfig and its DDP configuration.

    Without ``complete_import`` the ``__init__.py`` files of their packages are not run. The import then takes
    a quarter of the time.
    """
    if not complete_import:
        _avoid_slow_imports()

    # Megatron's modules have circular imports, which work if this module is imported first.
    import megatron.core.parallel_state  # noqa: F401
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.transformer import transformer_config

    return transformer_config, MegatronOptimizerConfig, DistributedDataParallelConfig


def _avoid_slow_imports() -> None:
    """Make later imports of Megatron's modules fast: run no package's ``__init__.py``, and compile nothing.

    `torch.compile` is replaced by a function that returns its argument.
    """
    specification = importlib.util.find_spec("megatron")
    assert specification is not None and specification.submodule_search_locations
    folders = [Path(folder) for folder in specification.submodule_search_locations]

    # Register empty packages, so that modules are imported without running any __init__.py.
    for package in _PACKAGES:
        module = types.ModuleType(f"megatron.core{package}")
        module.__path__ = [str(folder / f"core{package.replace('.', '/')}") for folder in folders]
        sys.modules[module.__name__] = module
    # None makes the import fail, as if the module did not exist.
    for name in _UNUSED_MODULES:
        sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]

    # No kernel is compiled here, and importing the compiler takes longer than all other imports.
    setattr(torch, "compile", _skip_compilation)


def _skip_compilation(function: Any = None, **_: Any) -> Any:
    """Replace `torch.compile`, as a function or as a decorator with options: return functions unchanged."""

    def return_unchanged(decorated: Any) -> Any:
        return decorated

    if function is None:
        return return_unchanged
    return function


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(collect_refusals(json.load(sys.stdin)), sys.stdout)
