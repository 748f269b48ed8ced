"""The rules of the code base that no other tool checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from megatron_rl.config.engines import ENGINES
from tests.readme_metrics import WRITTEN_BY, documented

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_rl"

# Where each foreign package may be imported.
OWNERS = {
    "torch.distributed": [
        "megatron_rl/distributed/*",
        "megatron_rl/weights/transfer.py",
        "megatron_rl/megatron/*",
        "megatron_rl/checkpoint/*",
        "megatron_rl/planning/*",
    ],
    "megatron": [
        "megatron_rl/distributed/*",
        "megatron_rl/megatron/*",
        "megatron_rl/checkpoint/*",
        "megatron_rl/planning/simulation/*",
    ],
    "vllm": ["megatron_rl/rollout/engines/vllm/*"],
    "transformer_engine": ["megatron_rl/distributed/*", "megatron_rl/megatron/*"],
    "apex": ["megatron_rl/distributed/*", "megatron_rl/megatron/*"],
}

DEVICE_NAME = re.compile(r"cuda|nccl|gloo", re.IGNORECASE)
DEVICE_TEXT = re.compile(r"(cuda|nccl|gloo|cpu)(:\S*)?|cpu:gloo.*|torch\.cuda.*", re.IGNORECASE)
DEVICE_MODULE = "megatron_rl/distributed/device.py"

# Spelled so that this file does not match itself.
DEVELOPER_PATH = re.compile(r"(?<![\w.$}])/(?:work|root|Users|home/\w+|opt/pypi)\b/?(?!space)")

# Containment, and the attacks on it, name the home of every machine's superuser.
NAMES_HOMES = {"megatron_rl/contained/visible.py", "tests/campaign/attacks.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tracked_files() -> tuple[Path, ...]:
    """Return every file of the repository: what git tracks or would, else what lies there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        skip = {".git", ".venv", "runs", "__pycache__", "build", "dist"}
        paths = [path for path in ROOT.rglob("*") if not skip.intersection(path.relative_to(ROOT).parts)]
    return tuple(sorted(path for path in paths if path.is_file()))


def python_files(*tops: str) -> list[Path]:
    return [f for f in tracked_files() if f.suffix == ".py" and relative(f).split("/")[0] in tops]


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import and every ``torch.distributed`` reached by attribute."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of the constant nodes that are docstrings or bare strings."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def test_foreign_packages_stay_in_their_layer() -> None:
    wrong = []
    for path in python_files("megatron_rl"):
        name = relative(path)
        for line, imported in imported_names(path):
            for package, owners in OWNERS.items():
                inside = imported == package or imported.startswith(package + ".")
                if inside and not any(fnmatch(name, owner) for owner in owners):
                    wrong.append(f"{name}:{line} imports {imported}; allowed in {', '.join(owners)}")
    assert not wrong, "\n".join(wrong)


def test_device_words_are_in_the_device_module_alone() -> None:
    wrong = []
    for path in python_files("megatron_rl"):
        if relative(path) == DEVICE_MODULE:
            continue
        tree = syntax(path)
        prose = docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                word = node.value if DEVICE_TEXT.fullmatch(node.value.strip()) else None
            elif isinstance(node, ast.Name):
                word = node.id if DEVICE_NAME.search(node.id) else None
            elif isinstance(node, ast.Attribute):
                word = node.attr if DEVICE_NAME.search(node.attr) else None
            else:
                word = None
            if word is not None:
                wrong.append(f"{relative(path)}:{node.lineno} {word!r}")
    assert not wrong, "these belong in distributed/device.py:\n" + "\n".join(wrong)


def test_nothing_compares_the_name_of_an_engine() -> None:
    """Capabilities of engines are in the table of `config.engines`, so that a new engine is one line."""
    wrong = []
    for path in python_files("megatron_rl"):
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Compare) and "engine" in ast.unparse(node):
                names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                wrong += [f"{relative(path)}:{node.lineno} {name!r}" for name in names & set(ENGINES)]
    assert not wrong, "ask rollout.capabilities instead:\n" + "\n".join(wrong)


def test_no_path_of_a_developers_machine() -> None:
    wrong = []
    for path in tracked_files():
        if relative(path) in NAMES_HOMES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or another binary file
        for number, line in enumerate(text.splitlines(), start=1):
            found = DEVELOPER_PATH.search(line)
            if found is not None and path != Path(__file__).resolve():
                wrong.append(f"{relative(path)}:{number} {found.group()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["check", "config", "shapes", "interop", "planning.predict", "metrics"])
def test_imports_without_torch(module: str) -> None:
    program = (
        "import importlib, pkgutil, sys\n"
        "for name in ('torch', 'transformers', 'megatron', 'vllm'): sys.modules[name] = None\n"
        f"package = importlib.import_module('megatron_rl.{module}')\n"
        "for found in pkgutil.walk_packages(getattr(package, '__path__', []), package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_import_of_the_package_loads_nothing_heavy() -> None:
    program = "import sys, megatron_rl; print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_public_names_exist_and_are_typed() -> None:
    package = import_module("megatron_rl")
    missing = [
        name for name, home in sorted(package.PUBLIC.items()) if not hasattr(import_module(home), name)
    ]
    assert not missing, f"megatron_rl promises {missing}, which their modules do not define"
    typed = {
        alias.asname: node.module
        for block in syntax(PACKAGE / "__init__.py").body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == package.PUBLIC


def test_public_functions_have_docstrings() -> None:
    bare = []
    for path in python_files("megatron_rl"):
        for node in syntax(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                bare.append(f"{relative(path)}:{node.lineno} {node.name}")
        if ast.get_docstring(syntax(path)) is None and path.name != "__init__.py":
            bare.append(f"{relative(path)}: the module")
    assert not bare, "without a docstring:\n" + "\n".join(bare)


def test_every_metric_of_the_documentation_is_looked_up_in_a_run() -> None:
    groups = [tuple(words.split()) for words in WRITTEN_BY.values()]
    names = documented()
    assert len(names) > 40
    lost = [name for name in names if not any(name.startswith(group) for group in groups)]
    assert not lost, f"no run of the tests has to write {lost}"
    dead = [word for group in groups for word in group if not any(name.startswith(word) for name in names)]
    assert not dead, f"docs/metrics.md names no metric that begins with {dead}"
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/distributed").glob("*.py"))
    assert all(f'unwritten("{run}"' in tests for run in WRITTEN_BY)


def rooms() -> list[Path]:
    return sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())


@pytest.mark.parametrize("room", rooms(), ids=lambda path: path.name)
def test_a_room_says_what_it_is_for_and_names_its_files(room: Path) -> None:
    text = (room / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {room.name}: ")
    for part in ("**The idea:**", "**May be touched:**", "**May not:**"):
        assert part in text, part
    files = {path for path in python_files("megatron_rl") if room in path.parents}
    names = {path.stem for path in files if path.parent == room and path.name != "__init__.py"}
    folders = {path.relative_to(room).parts[0] for path in files if path.parent != room}
    lost = {name for name in names | folders if not re.search(rf"\b{name}(\.py|/|[,:])", text)}
    assert not lost, f"{room.name}/README.md does not name {sorted(lost)}"
    listed = set(re.findall(r"(\w+)\.py", text))
    stems = {path.stem for path in python_files("megatron_rl")}
    assert listed <= stems, f"{room.name}/README.md names {sorted(listed - stems)}, which do not exist"
