"""The one table of model families: each module of this package states one as ``FAMILY``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.shapes.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__))
}
"""Every family that can be trained, by ``model_type``."""
