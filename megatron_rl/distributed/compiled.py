"""What Megatron-Core compiles, compiled so that a step's numbers do not depend on the steps before it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import activations, jit
from megatron.core.transformer import transformer_config, utils

_NAMING = (activations, utils, transformer_config)
"""Modules whose activations are values of settings, which Megatron compares with the functions themselves."""


def compile_for_any_shape() -> None:
    """Have the functions that Megatron-Core's modules compile take any shape from their first call on.

    By default torch compiles for the shape that comes first, then for any, and after eight kernels no more:
    a resumed run meets shapes in another order than the uninterrupted one, and would differ from it in last
    bits. torch's own switch is not used: vLLM in the same process reads it too.
    """
    compile_function = partial(torch.compile, dynamic=True)
    setattr(jit, "jit_fuser", compile_function)  # for modules that are imported later
    renewed = {id(value): value for module in _NAMING for value in vars(module).values() if _compiled(value)}

    def renew(owner: Any) -> None:
        for name, value in list(vars(owner).items()):
            if value is torch.compile:
                setattr(owner, name, compile_function)  # `jit_fuser`, as the module imported it
            elif (plain := _compiled(value)) is not None:
                if id(value) not in renewed:
                    renewed[id(value)] = compile_function(plain)
                setattr(owner, name, renewed[id(value)])
            elif inspect.isclass(value) and value.__module__ == getattr(owner, "__name__", None):
                renew(value)

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core."):
            renew(module)


def _compiled(value: Any) -> Callable[..., Any] | None:
    """Return the function that torch compiled into ``value``, None where it is something else."""
    return getattr(value, "_torchdynamo_orig_callable", None) if inspect.isfunction(value) else None
