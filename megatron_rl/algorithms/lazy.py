"""torch, and the modules of tensor functions, imported at their first use.

`check` names, constructs and shows the pieces of an algorithm without torch. So the modules that define
pieces take these names from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch

    from megatron_rl.algorithms import groups as groups
    from megatron_rl.algorithms import ragged as ragged
else:

    class _Module:
        """Stand for a module that is imported when one of its names is asked for."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self.name), name)

    torch = _Module("torch")
    groups = _Module("megatron_rl.algorithms.groups")
    ragged = _Module("megatron_rl.algorithms.ragged")
