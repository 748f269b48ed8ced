"""The table of model families: each module of this package defines one as ``FAMILY``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.shapes.family import Family

_ENTRIES: list[Family] = [
    import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)
]
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ENTRIES}
"""Every family that can be trained, by the ``model_type`` of its class in transformers."""
BY_MODEL_TYPE: dict[str, Family] = {}
"""The same families by every ``model_type`` that a config.json may have."""
for _family in _ENTRIES:
    BY_MODEL_TYPE.update(dict.fromkeys(_family.model_types, _family))
