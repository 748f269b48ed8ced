"""The table of model families: each module of this package defines one as ``FAMILY``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.shapes.family import Family

_ENTRIES: list[Family] = [
    import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)
]
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ENTRIES}
"""Every family that can be trained, by ``model_type``."""
