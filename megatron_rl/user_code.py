"""Import of the user's modules, by name or by file.

The module itself imports little, since every contained worker, a restricted process for the user's code,
imports it at its start. A run keeps copies of the files of that code (`megatron_rl.contained.code_copy`).
With `use_copies`, modules are executed from those copies but keep their names and paths, so that tracebacks
name the user's file and other modules in its folder can be imported.
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

# Resolved path of a file -> the copy of its content, which is executed instead of the file.
_copies: dict[str, bytes] = {}


class _CopyLoader(SourceFileLoader):
    """Loader of a module from the copy of its file."""

    def get_data(self, path: str) -> bytes:
        """Return the content of the copy."""
        if path in _copies:
            return _copies[path]
        return super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the copy without the bytecode cache: the file's .pyc may belong to another version."""
        data = self.get_data(self.path)

        # Let tracebacks show the lines of the copy, not of the file.
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        linecache.cache[self.path] = (len(data), None, lines, self.path)
        return self.source_to_code(data, self.path)


class _CopyFinder:
    """Finder of modules with a copy, along the search path that Python would use for the files."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of a module that has a copy; None for other modules."""
        name = fullname.rpartition(".")[2]
        if path is None:
            path = sys.path

        for entry in path:
            folder = os.path.join(os.path.realpath(entry), name)
            # As Python does, prefer a package to a module of the same name.
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
    """Execute modules from ``copies``, resolved path -> content, in place of the files with these paths."""
    _copies.update(copies)
    if _copies and _CopyFinder not in sys.meta_path:
        sys.meta_path.insert(0, _CopyFinder)  # type: ignore[arg-type]


def load_module(location: str) -> ModuleType:
    """Import ``module``, or ``path/to/file.py`` once per process; return the module.

    A file is relative to the current directory and may import other files of its folder. Exceptions of the
    import pass through. Raises ImportError for an empty ``location``.
    """
    if not location:
        raise ImportError("there is no `:` between a file or module and the name")
    if not location.endswith(".py"):
        return importlib.import_module(location)

    file = Path(location).resolve()
    has_copy = str(file) in _copies
    if not has_copy and not file.is_file():
        raise FileNotFoundError(f"no such file: {location}")

    # Files of the same name in different folders need different module names.
    name = f"_user_{abs(hash(str(file)))}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]

    loader = _CopyLoader(name, str(file)) if has_copy else None
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    # Register the module before its execution: dataclasses and pickle look it up by name.
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))

    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_module(name: str) -> tuple[Path | None, str | None]:
    """Find the file of a module without importing the module or its parents.

    Return the file, or the part of the name that does not exist. Both are None for a module that is not a
    Python file.
    """
    search_path: list[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    components = name.split(".")
    for position, component in enumerate(components):
        spec = None
        if component.isidentifier() and search_path is not None:
            spec = PathFinder.find_spec(component, search_path)
        if spec is None and position == 0 and component in sys.modules:
            # An editable install may not be on sys.path, but an imported module has its spec.
            spec = sys.modules[component].__spec__

        if spec is None and position == 0 and component in sys.builtin_module_names:
            return None, None
        if spec is None:
            return None, ".".join(components[: position + 1])

        search_path = None
        if spec.submodule_search_locations is not None:
            search_path = list(spec.submodule_search_locations)

    if spec is not None and spec.origin is not None:
        return Path(spec.origin), None
    # A folder without __init__.py is a namespace package, which defines nothing.
    if search_path is not None:
        return None, f"{name}.__init__"
    return None, None


def missing_file(location: str, key: str, noun: str = "file") -> UserError:
    """Return the error for a Python file that does not exist."""
    return UserError(
        f"the {noun} {location} does not exist",
        where=key,
        expected="an existing Python file",
        got=f"no such file, seen from {Path.cwd()}",
        fix="correct the path; it is relative to the directory the run is started in",
    )


def require_file(location: str, key: str, noun: str = "file") -> None:
    """Raise UserError if ``location`` is the path of a Python file that does not exist."""
    if location.endswith(".py") and not Path(location).is_file():
        raise missing_file(location, key, noun)


def load_path(path: str, key: str) -> Any:
    """Import and return the object that ``file.py:Name`` or ``module:Name`` names.

    A file is relative to the directory in which the run is started. Raises UserError, also for an exception
    in the user's code.
    """
    location, _, name = path.rpartition(":")
    module = import_user_module(location, key)

    if not hasattr(module, name):
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        close = nearest(name, public)
        raise UserError(
            f"{location} has no {name!r}",
            where=key,
            expected="a name that it defines",
            got=path,
            fix=f"did you mean {close!r}?" if close else f"define {name} there",
        )
    return getattr(module, name)


def import_user_module(location: str, key: str) -> ModuleType:
    """Import ``module`` or ``file.py``; raises UserError, also for an exception in the user's code."""
    require_file(location, key)
    try:
        return load_module(location)
    # The user's module may raise any exception, or be a script that exits.
    except (Exception, SystemExit) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == location.partition(".")[0]
        fix = "correct the module; python -c 'import ...' shows the same error"
        if is_absent:
            fix = "check the spelling, or add the module's folder to PYTHONPATH"

        raise UserError(
            f"cannot import {location}",
            where=key,
            expected="file.py:Name or module:Name that can be imported",
            got=f"{type(error).__name__}: {error}",
            fix=fix,
        ) from error
