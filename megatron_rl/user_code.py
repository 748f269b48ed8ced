"""Modules that the user wrote, by name or by file. Workers load it too: the standard library alone."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(place: str) -> ModuleType:
    """Import ``module``, or ``path/to/file.py`` once per process; raises whatever the import raises.

    A file is relative to the current directory and may import its neighbours.
    """
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {place}")
    name = f"_user_{abs(hash(str(file)))}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
