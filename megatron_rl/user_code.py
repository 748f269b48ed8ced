"""The user's code: import of its modules, and copies of the modules' files from the start of a run.

A process that is restarted in the middle of a run executes the same code as before, even if the user has
edited the files. The run folder also documents the code that computed the rewards. The trainer copies the
files that the configuration names, and the user's modules that these files import (`read_user_code`,
`write_copy`). Data files that the code opens are not copied.

A sandboxed process is a restricted process for the user's code. It executes the copies of modules
(`execute_copies`) under the original names and paths, so that tracebacks name the user's file, and the file
can import further modules of its folder. Every sandboxed process imports this module at its start, so this
module must import quickly.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from megatron_rl.errors import UserError, nearest

MANIFEST = "files.json"
"""Name of the file in a copy that lists the copied files and their digests."""
MAX_FILES = 500
"""Largest number of files of one package that are copied; further files are loaded from their own paths."""
_THIS_PACKAGE = "megatron_rl"

_executed_copies: dict[str, bytes] = {}
"""Resolved path of a file -> copy of its content, which this process executes instead of the file."""
_active_copies: dict[str, bytes] = {}
"""Resolved path of a file -> copy of its content, for the sandboxed processes that this process starts."""


# Import


class _CopyLoader(SourceFileLoader):
    """Import loader that executes the run's copy of a module's file instead of the file itself."""

    def get_data(self, path: str) -> bytes:
        """Return the copied content of the file at ``path``; read the file if there is no copy."""
        if path in _executed_copies:
            return _executed_copies[path]
        return super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the run's copy of a module's file.

        Does not use the bytecode cache: the user may have edited the file since the copy was made, and the
        .pyc then belongs to the edited file.
        """
        data = self.get_data(self.path)

        # Let tracebacks show the lines that are executed, not the lines of an edited file.
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        linecache.cache[self.path] = (len(data), None, lines, self.path)
        return self.source_to_code(data, self.path)


class _CopyFinder:
    """Import finder for modules whose file has a copy from the start of the run.

    It searches the same folders as Python's own finder.
    """

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of a module, to load the run's copy of the module's file.

        Returns None if the run has no copy of the file.
        """
        name = fullname.rpartition(".")[2]
        if path is None:
            path = sys.path

        for search_folder in path:
            package_folder = os.path.join(os.path.realpath(search_folder), name)
            package_file = os.path.join(package_folder, "__init__.py")
            module_file = f"{package_folder}.py"
            # As Python does, prefer a package to a module of the same name.
            for file, locations in ((package_file, [package_folder]), (module_file, None)):
                if file in _executed_copies:
                    return importlib.util.spec_from_file_location(
                        fullname,
                        file,
                        loader=_CopyLoader(fullname, file),
                        submodule_search_locations=locations,
                    )
        return None


def execute_copies(copies: Mapping[str, bytes]) -> None:
    """Make later imports execute copies of files; ``copies`` maps a resolved file path to its content."""
    _executed_copies.update(copies)
    if _executed_copies and _CopyFinder not in sys.meta_path:
        sys.meta_path.insert(0, _CopyFinder)  # type: ignore[arg-type]


def load_module(location: str) -> ModuleType:
    """Import the module at ``location``, ``module.name`` or ``path/to/file.py``, once per process.

    A file is relative to the current directory and may import other files of its folder. Exceptions that the
    module raises are not caught. Raises ImportError for an empty location.

    A sandboxed process is a restricted process for the user's code. It executes the copy of the file that the
    run made at its start, instead of the file.
    """
    # A location is the text before the `:` of ``location:name``, and is empty if there is no `:`.
    if not location:
        raise ImportError("there is no `:` between a file or module and the name")
    if not location.endswith(".py"):
        return importlib.import_module(location)

    file = Path(location).resolve()
    has_copy = str(file) in _executed_copies
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

    Returns (file, None) for an existing module and (None, missing name) for a missing module or parent, such
    as (None, "a.b") for the name "a.b.c". Returns (None, None) for a module that is not a Python file.
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


def missing_python_file_error(location: str, key: str, noun: str = "file") -> UserError:
    """Return the error for a missing Python file; ``key`` is the setting that names it."""
    return UserError(
        f"the {noun} {location} does not exist",
        where=key,
        expected="an existing Python file",
        got=f"no such file; the current directory is {Path.cwd()}",
        fix="correct the path; it is relative to the directory the run is started in",
    )


def require_python_file(location: str, key: str, noun: str = "file") -> None:
    """Raise UserError about the setting ``key`` if ``location`` is the path of a missing Python file."""
    if location.endswith(".py") and not Path(location).is_file():
        raise missing_python_file_error(location, key, noun)


def load_object(path: str, key: str) -> Any:
    """Import the module of ``path``, ``file.py:Name`` or ``module:Name``, and return its attribute ``Name``.

    A file is relative to the directory in which the run is started. Raises UserError about the setting
    ``key``, also if the user's code raises an exception.
    """
    location, _, name = path.rpartition(":")
    module = import_user_module(location, key)

    if not hasattr(module, name):
        public_names = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        suggestion = nearest(name, public_names)
        raise UserError(
            f"{location} has no {name!r}",
            where=key,
            expected="a name that it defines",
            got=path,
            fix=f"did you mean {suggestion!r}?" if suggestion else f"define {name} there",
        )
    return getattr(module, name)


def import_user_module(location: str, key: str) -> ModuleType:
    """Import ``module.name`` or ``file.py``; raise UserError about the setting ``key`` if that fails."""
    require_python_file(location, key)
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


# Copies


def active_copies() -> Mapping[str, bytes]:
    """Return the copies of user code that new sandboxed processes will execute: file path -> content.

    The run copies the files of the user's code once, so that later edits of the files do not change the run.
    """
    return _active_copies


def activate_copies(files: Mapping[str, bytes]) -> None:
    """Set the copies of user code that new sandboxed processes will execute: file path -> content."""
    _active_copies.clear()
    _active_copies.update(files)


def read_user_code(specs: Iterable[str]) -> dict[str, bytes]:
    """Read the files that ``specs`` name, and recursively the files that they import.

    A spec is ``file.py:name`` or ``module:name``. Returns a mapping from the path of a file to its content.
    """
    files: dict[str, bytes] = {}
    pending: list[Path] = []
    for spec in specs:
        module = spec.rpartition(":")[0]
        if module.endswith(".py"):
            pending.append(Path(module).resolve())
        else:
            pending.extend(_module_files(module.partition(".")[0], _user_search_path()))

    # Follow the import statements of each file.
    while pending:
        file = pending.pop()
        if str(file) in files:
            continue
        try:
            files[str(file)] = file.read_bytes()
        except OSError:
            # The process that loads the module reports the error.
            continue
        for name in _imported_names(files[str(file)]):
            pending.extend(_module_files(name, (file.parent, *_user_search_path())))
    return files


def compute_files_digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the names and contents of files; ``files`` maps a path to the content."""
    digest = hashlib.sha256()
    for path in sorted(files):
        name = _path_in_copy(path).encode("utf-8", "surrogateescape")
        # Hash the lengths, too: without them, another split into name and content could have the same digest.
        for field in (name, files[path]):
            digest.update(len(field).to_bytes(8, "little") + field)
    return digest.hexdigest()


def write_copy(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into a subfolder of ``folder`` that is named after their digest; return the subfolder.

    ``files`` maps the path of a file to the content.
    """
    digest = compute_files_digest(files)
    copy_folder = folder / digest[:16]
    for name, content in files.items():
        path = copy_folder / _path_in_copy(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    copy_folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"sha256": digest, "files": digests}, indent=2)
    (copy_folder / MANIFEST).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    return copy_folder


def read_copy(copy_folder: Path) -> dict[str, bytes] | None:
    """Read a copy that `write_copy` wrote; return None if the copy is incomplete or was changed.

    The result maps the path of each original file to the copied content.
    """
    try:
        text = (copy_folder / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape")
        manifest = json.loads(text)
        files = {name: (copy_folder / _path_in_copy(name)).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if compute_files_digest(files) == manifest.get("sha256") else None


def _path_in_copy(path: str) -> str:
    """Return the relative path of a file's copy in the run's folder of copied user code.

    A file in the current folder keeps its path relative to that folder. For any other file, the leading ``/``
    of its path is removed.
    """
    relative = os.path.relpath(path)
    return path.lstrip("/") if relative.startswith("..") else relative


def _user_search_path() -> Iterator[Path]:
    """Yield the folders of ``sys.path`` that belong neither to Python nor to installed packages."""
    installations = (os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    for search_folder in (*sys.path, os.getcwd()):
        folder = os.path.realpath(search_folder or os.getcwd())
        if not folder.startswith(installations) and "site-packages" not in folder and os.path.isdir(folder):
            yield Path(folder)


def _module_files(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the files of the module or package ``name`` in the first of ``folders`` that contains it.

    The result is empty for this package and for Python's built-in modules, and has at most `MAX_FILES` files.
    """
    if not name or name == _THIS_PACKAGE or name in sys.builtin_module_names:
        return []
    for folder in folders:
        package = folder / name
        module = folder / f"{name}.py"
        if (package / "__init__.py").is_file():
            return sorted(package.rglob("*.py"))[:MAX_FILES]

        if module.is_file():
            return [module]
        # A namespace package, without __init__.py.
        if package.is_dir() and any(package.glob("*.py")):
            return sorted(package.rglob("*.py"))[:MAX_FILES]
    return []


def _imported_names(source: bytes) -> set[str]:
    """Return the top-level names of the modules that a file imports, or an empty set if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return set()

    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names
