"""Modules that the user wrote, by name or by file. Workers load it too: the standard library alone.

A run keeps copies of the files that its contained code is made of (`megatron_rl.contained.code_copy`). With
`use_copies`, modules are executed from those: under their own names and paths, so that errors name the user's
file and what stands beside it is found.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from megatron_rl.errors import UserError, nearest

_copies: dict[str, bytes] = {}
"""Contents of files by their resolved paths, which count in the place of the files."""


class _CopyLoader(SourceFileLoader):
    """Loader of a module from the copy of its file."""

    def get_data(self, path: str) -> bytes:
        """Return the copy's content."""
        return _copies[path] if path in _copies else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the copy; what Python compiled of the file itself may be of another content."""
        data = self.get_data(self.path)
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        linecache.cache[self.path] = (len(data), None, lines, self.path)
        return self.source_to_code(data, self.path)


class _CopyFinder:
    """Finder of modules whose files have copies, by the search path that holds without them."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has a copy, None for every other."""
        name = fullname.rpartition(".")[2]
        for entry in sys.path if path is None else path:
            folder = os.path.join(os.path.realpath(entry), name)
            for file, locations in ((os.path.join(folder, "__init__.py"), [folder]), (f"{folder}.py", None)):
                if file in _copies:
                    return importlib.util.spec_from_file_location(
                        fullname,
                        file,
                        loader=_CopyLoader(fullname, file),
                        submodule_search_locations=locations,
                    )
        return None


def use_copies(copies: Mapping[str, bytes]) -> None:
    """Load modules from the contents of ``copies``, by resolved path, wherever a file has one."""
    _copies.update(copies)
    if _copies and _CopyFinder not in sys.meta_path:
        sys.meta_path.insert(0, _CopyFinder)  # type: ignore[arg-type]


def load_module(place: str) -> ModuleType:
    """Import ``module``, or ``path/to/file.py`` once per process; raises whatever the import raises.

    A file is relative to the current directory and may import its neighbours. An empty place is an
    ImportError.
    """
    if not place:
        raise ImportError("there is no `:` between a file or module and the name")
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place).resolve()
    copied = str(file) in _copies
    if not copied and not file.is_file():
        raise FileNotFoundError(f"no such file: {place}")
    name = f"_user_{abs(hash(str(file)))}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _CopyLoader(name, str(file)) if copied else None
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
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


def find_module(name: str) -> tuple[Path | None, str | None]:
    """Return the file of a module without importing it or its parents, or the part that is missing.

    Both are None for a module that is no Python file.
    """
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    parts = name.split(".")
    for position, part in enumerate(parts):
        spec = PathFinder.find_spec(part, places) if part.isidentifier() and places is not None else None
        if spec is None and position == 0 and part in sys.modules:
            spec = sys.modules[part].__spec__  # packages that are edited where they lie are not on sys.path
        if spec is None:
            builtin = position == 0 and part in sys.builtin_module_names
            return None, None if builtin else ".".join(parts[: position + 1])
        places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    origin = spec.origin if spec is not None else None
    if origin is None and places is not None:  # a folder without __init__.py: nothing is defined in it
        return None, f"{name}.__init__"
    return (Path(origin) if origin else None), None


def missing_file(place: str, where: str, what: str = "file") -> UserError:
    """Return the error of a Python file that does not exist."""
    return UserError(
        f"the {what} {place} does not exist",
        where=where,
        expected="an existing Python file",
        got=f"no such file, seen from {Path.cwd()}",
        fix="correct the path; it is relative to the directory the run is started in",
    )


def require_file(place: str, where: str, what: str = "file") -> None:
    """Raise UserError where ``place`` is the path of a Python file that does not exist."""
    if place.endswith(".py") and not Path(place).is_file():
        raise missing_file(place, where, what)


def load_path(path: str, where: str) -> Any:
    """Return what ``file.py:Name`` or ``module:Name`` names; raises UserError, also where the code fails.

    A file is relative to the directory that the run is started in.
    """
    place, _, name = path.rpartition(":")
    require_file(place, where)
    try:
        module = load_module(place)
    except (Exception, SystemExit) as error:  # the user's own module may fail in any way, or be a script
        absent = isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]
        raise UserError(
            f"cannot import {place}",
            where=where,
            expected="file.py:Name or module:Name that can be imported",
            got=f"{type(error).__name__}: {error}",
            fix="check the spelling, or add the module's folder to PYTHONPATH"
            if absent
            else "correct the module; python -c 'import ...' shows the same error",
        ) from error
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        close = nearest(name, public)
        raise UserError(
            f"{place} has no {name!r}",
            where=where,
            expected="a name that it defines",
            got=path,
            fix=f"did you mean {close!r}?" if close else f"define {name} there",
        )
    return getattr(module, name)
