"""Look up the names that code imports from Megatron-Core, Transformer Engine and vLLM in their sources.

A version that this Python cannot install is then as good as an installed one. To record another version:

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-core==0.19.2 -d wheels
    unzip wheels/megatron_core-0.19.2-*.whl -d core; …
    python -m tests.library_names megatron-core==0.19.2=core transformer-engine==2.20.2=engine

rewrites these versions in `RECORD`, from folders that hold their packages.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests/library_names.json"
"""Distribution and version -> the names it has, of those that the package or Megatron-Core imports."""

PACKAGES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine", "vllm": "vllm"}
"""Distribution -> the package that it installs."""


@cache
def _syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_file(root: Path, module: str) -> Path | None:
    """Return the file of a module below ``root``; None for an unknown module."""
    path = root / module.replace(".", "/")
    for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that a module runs, those in its conditions and ``try`` included."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _absolute(file: Path, root: Path, statement: ast.ImportFrom) -> str:
    """Return the dotted module that an import names, also if it is relative."""
    if not statement.level:
        return statement.module or ""
    folder = file.parents[statement.level - 1].relative_to(root)
    module_path = list(folder.parts)
    # ``from . import name`` has no module.
    if statement.module:
        module_path.append(statement.module)
    return ".".join(module_path)


@cache
def module_names(root: Path, module: str) -> frozenset[str]:
    """Return the names that a module below ``root`` defines or imports."""
    file = module_file(root, module)
    names: set[str] = set()

    for statement in _statements(_syntax(file).body if file else []):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(statement.name)
        elif isinstance(statement, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and file is not None:
            for alias in statement.names:
                # A star import adds the names of its module.
                if alias.name == "*":
                    names |= module_names(root, _absolute(file, root, statement))
                else:
                    names.add(alias.asname or alias.name)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            # An annotated assignment has a single target.
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
            for target in targets:
                names |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}

    return frozenset(names)


def has_name(root: Path, dotted: str) -> bool:
    """Return whether ``dotted`` is a module below ``root``, or a name of one."""
    if module_file(root, dotted) is not None:
        return True
    module, _, name = dotted.rpartition(".")
    return name in module_names(root, module)


def names_in(files: list[Path], package: str, root: Path) -> set[str]:
    """Return the dotted names of ``package`` that files use, with its sources below ``root``.

    These are imported names, dotted names in strings (for ``import_module``), and attributes of imported
    modules.
    """
    dotted_text = re.compile(re.escape(package) + r"(\.\w+)+")
    names: set[str] = set()
    for file in files:
        # Most files do not name the package: parsing them would take most of the time.
        if package not in file.read_text(encoding="utf-8"):
            continue
        # Local name -> dotted module, to resolve attributes of imported modules.
        modules: dict[str, str] = {}
        for node in ast.walk(_syntax(file)):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(package + "."):
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    names.add(dotted)
                    if module_file(root, dotted):
                        modules[alias.asname or alias.name] = dotted
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if f"{alias.name}.".startswith(package + ".")}
            elif isinstance(node, ast.Constant) and dotted_text.fullmatch(str(node.value)):
                # A name in a string, for `import_module`.
                names.add(str(node.value))

        for node in ast.walk(_syntax(file)):
            if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                names.add(f"{modules[node.value.id]}.{node.attr}")
    return names


def package_files() -> list[Path]:
    """Return the sources of megatron_rl."""
    return sorted((ROOT / "megatron_rl").rglob("*.py"))


def record(folders: dict[str, Path]) -> None:
    """Rewrite the given versions in `RECORD`; ``folders`` holds the packages of each."""
    versions = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    engine_names: set[str] = set()
    for version, folder in folders.items():
        # Megatron-Core imports Transformer Engine, too: its names are recorded as well.
        if version.startswith("megatron-core=="):
            files = sorted((folder / "megatron/core").rglob("*.py"))
            engine_names |= names_in(files, "transformer_engine", folder)

    for version, folder in folders.items():
        package = PACKAGES[version.partition("==")[0]]
        names = names_in(package_files(), package, folder)
        if package == "transformer_engine":
            names |= engine_names
        versions[version] = sorted(name for name in names if has_name(folder, name))
    RECORD.write_text(json.dumps(versions, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    pairs = (argument.rpartition("=") for argument in sys.argv[1:])
    record({version: Path(folder).resolve() for version, _, folder in pairs})
