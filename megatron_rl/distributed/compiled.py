"""Dynamic-shape compilation of Megatron-Core's fused functions.

With one kernel for all shapes, the results of a step do not depend on the shapes in earlier steps.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import activations, jit
from megatron.core.transformer import transformer_config, utils

_ACTIVATION_MODULES = (activations, utils, transformer_config)
"""Modules with activation functions, which Megatron compares by identity with configuration fields."""


def compile_for_any_shape() -> None:
    """Recompile the fused functions of Megatron-Core with dynamic shapes from the first call on.

    By default torch compiles for the first shape, then for any shape, and stops compiling after eight
    kernels. The kernels would depend on the order of shapes, and a resumed run would differ in the last bits
    from the uninterrupted run. torch's global switch is not used, because vLLM in the same process reads it,
    too.
    """
    compile_function = partial(torch.compile, dynamic=True)

    # Modules that are imported later read the decorator from here.
    setattr(jit, "jit_fuser", compile_function)

    # Do not replace activation functions, since Megatron tests `activation_func == quick_gelu`, for example.
    compiled_functions: dict[int, Any] = {}
    for module in _ACTIVATION_MODULES:
        for value in vars(module).values():
            if _original_function(value) is not None:
                compiled_functions[id(value)] = value

    def recompile_attributes(owner: Any) -> None:
        for name, value in list(vars(owner).items()):
            if value is torch.compile:
                # A module that has imported `jit_fuser` has torch.compile under this name.
                setattr(owner, name, compile_function)
                continue

            # Compile a function only once, even if several modules import it.
            function = _original_function(value)
            if function is not None:
                if id(value) not in compiled_functions:
                    compiled_functions[id(value)] = compile_function(function)
                setattr(owner, name, compiled_functions[id(value)])
            elif inspect.isclass(value) and value.__module__ == getattr(owner, "__name__", None):
                recompile_attributes(value)

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core."):
            recompile_attributes(module)


def _original_function(value: Any) -> Callable[..., Any] | None:
    """Return the original function of a torch-compiled function, or None for any other value."""
    if not inspect.isfunction(value):
        return None
    return getattr(value, "_torchdynamo_orig_callable", None)
