"""Copies of the user's contained code, made at the start of a run.

A process that is restarted in the middle of a run executes the same code as the first one, even if the files
have been edited meanwhile, and the run folder contains the code that computed its rewards. The copies are of
the files that a configuration names, and of the modules next to them that they import, as far as import
statements show. Other files that the code reads are read from their own paths.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MANIFEST = "files.json"
"""File of a copy that lists its files with their digests."""
MAX_FILES = 500
"""Largest number of files of one package that are copied; further files are loaded from their own paths."""
_THIS_PACKAGE = "megatron_rl"

_active_copies: dict[str, bytes] = {}


def active_copies() -> Mapping[str, bytes]:
    """Return the copies from which this process's contained processes load their modules."""
    return _active_copies


def use_copies_of(files: Mapping[str, bytes]) -> None:
    """Make contained processes that are started from now on load these files' modules from ``files``."""
    _active_copies.clear()
    _active_copies.update(files)


def read_code(specs: Iterable[str]) -> dict[str, bytes]:
    """Return the contents, by path, of files named as ``file.py:name`` and of the files that they import."""
    files: dict[str, bytes] = {}
    pending: list[Path] = []
    for spec in specs:
        module = spec.rpartition(":")[0]
        if module.endswith(".py"):
            pending.append(Path(module).resolve())
        else:
            pending.extend(_module_files(module.partition(".")[0], _search_path()))

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
            pending.extend(_module_files(name, (file.parent, *_search_path())))
    return files


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the files' names and contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        # Lengths separate names from contents, so that different sets of files give different bytes.
        for content in (_name_in_copy(name).encode("utf-8", "surrogateescape"), files[name]):
            total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()


def write_copy(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files into a subfolder of ``folder``, named by their digest; return the subfolder."""
    digest = digest_of(files)
    target = folder / digest[:16]
    for name, content in files.items():
        path = target / _name_in_copy(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"sha256": digest, "files": digests}, indent=2)
    (target / MANIFEST).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    return target


def read_copy(target: Path) -> dict[str, bytes] | None:
    """Return the files of a copy that `write_copy` wrote, or None if it is incomplete or was changed."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape"))
        files = {name: (target / _name_in_copy(name)).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if digest_of(files) == manifest.get("sha256") else None


def _name_in_copy(path: str) -> str:
    """Return a file's path in a copy: relative to the current folder, or the whole path if outside of it."""
    relative = os.path.relpath(path)
    return path.lstrip("/") if relative.startswith("..") else relative


def _search_path() -> Iterator[Path]:
    """Yield the search path without the folders of Python and of installed packages."""
    installations = (os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    for entry in (*sys.path, os.getcwd()):
        folder = os.path.realpath(entry or os.getcwd())
        if not folder.startswith(installations) and "site-packages" not in folder and os.path.isdir(folder):
            yield Path(folder)


def _module_files(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the files of the module or package ``name`` in the first folder that contains it."""
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
