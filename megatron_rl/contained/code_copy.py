"""Copies of the user's code that runs contained, made at the start of a run.

A process that is started again in the middle of a run executes what the first one did, whatever was edited
meanwhile; and the run folder holds the code that its rewards are of. Copied are the files that a
configuration names and the modules beside them that they import, as far as the text of the imports tells;
whatever else code reads, it reads from where it is.
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
MOST_FILES = 500
"""Files of a package that are copied; of a larger one, the rest is loaded from where it is."""
_OURS = "megatron_rl"

_kept: dict[str, bytes] = {}


def kept_copies() -> Mapping[str, bytes]:
    """Return the copies that contained processes of this one load their modules from."""
    return _kept


def keep_copies(files: Mapping[str, bytes]) -> None:
    """Have every contained process that starts from now on load these files' modules from ``files``."""
    _kept.clear()
    _kept.update(files)


def read_code(specs: Iterable[str]) -> dict[str, bytes]:
    """Return the content, by resolved path, of the user's files behind names such as ``file.py:name``."""
    files: dict[str, bytes] = {}
    pending: list[Path] = []
    for spec in specs:
        place = spec.rpartition(":")[0]
        if place.endswith(".py"):
            pending.append(Path(place).resolve())
        else:
            pending.extend(_module_files(place.partition(".")[0], _search_path()))

    while pending:
        file = pending.pop()
        if str(file) in files:
            continue
        try:
            files[str(file)] = file.read_bytes()
        except OSError:
            continue  # said where the module is loaded
        for name in _imported(files[str(file)]):
            pending.extend(_module_files(name, (file.parent, *_search_path())))
    return files


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the files' names and contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        for part in (_name_in_copy(name).encode("utf-8", "surrogateescape"), files[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def write_copy(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write the files below ``folder``, in one that is named by their digest, and return that one."""
    digest = digest_of(files)
    target = folder / digest[:16]
    for name, content in files.items():
        path = target / _name_in_copy(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    listed = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"sha256": digest, "files": listed}, indent=2)
    (target / MANIFEST).write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
    return target


def read_copy(target: Path) -> dict[str, bytes] | None:
    """Return the files of a copy that `write_copy` made; None where it is not complete, or was changed."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape"))
        files = {name: (target / _name_in_copy(name)).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if digest_of(files) == manifest.get("sha256") else None


def _name_in_copy(path: str) -> str:
    """Return the name of a file in a copy: as seen from the current directory, or of the whole path."""
    inside = os.path.relpath(path)
    return path.lstrip("/") if inside.startswith("..") else inside


def _search_path() -> Iterator[Path]:
    """Yield the folders of the search path that are the user's: neither Python's nor its packages'."""
    installed = (os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    for entry in (*sys.path, os.getcwd()):
        folder = os.path.realpath(entry or os.getcwd())
        if not folder.startswith(installed) and "site-packages" not in folder and os.path.isdir(folder):
            yield Path(folder)


def _module_files(name: str, folders: Iterable[Path]) -> list[Path]:
    """Return the files of the module or package ``name`` in the first of the folders that has it."""
    if not name or name == _OURS or name in sys.builtin_module_names:
        return []
    for folder in folders:
        package, module = folder / name, folder / f"{name}.py"
        if (package / "__init__.py").is_file():
            return sorted(package.rglob("*.py"))[:MOST_FILES]
        if module.is_file():
            return [module]
        if package.is_dir() and any(package.glob("*.py")):  # a package without __init__.py
            return sorted(package.rglob("*.py"))[:MOST_FILES]
    return []


def _imported(source: bytes) -> set[str]:
    """Return the first names of the modules that a file imports."""
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
