"""Table of block types: each module of this package except `block` defines its type as ``KIND``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_rl.shapes.blocks.block import FeedForward, Mixer

MIXERS: dict[str, type[Mixer]] = {}
"""Every mixer by name."""
FEED_FORWARDS: dict[str, type[FeedForward]] = {}
"""Every feed-forward by name."""
for _module in iter_modules(__path__):
    if _module.name == "block":
        continue
    _kind = import_module(f"{__name__}.{_module.name}").KIND
    if issubclass(_kind, Mixer):
        MIXERS[_kind.name] = _kind
    else:
        FEED_FORWARDS[_kind.name] = _kind
