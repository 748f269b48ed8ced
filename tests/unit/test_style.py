"""The style of the code: rules that hold everywhere, and counts that may fall and never rise."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
RATCHET = Path(__file__).with_name("style_ratchet.yaml")
"""Counts for the package, and for `outside`, as they were when they last fell."""
OUTSIDE = "outside the package"
"""Key of the counts for tests' helpers, benchmarks and examples."""

IMPERATIVES = {
    "Answer", "Be", "Call", "Do", "Find", "Forget", "Get", "Give", "Have", "Hold", "Keep", "Know", "Let",
    "Make", "Name", "Read", "Say", "Show", "Stand", "Take", "Tell", "Watch", "Write",
}  # fmt: skip
"""First words of a docstring that describe an action: a class is a thing."""

LONGEST_SUBJECT = 72


def modules() -> tuple[Path, ...]:
    """Return the modules of the package."""
    return tuple(sorted((ROOT / "megatron_rl").rglob("*.py")))


def outside() -> tuple[Path, ...]:
    """Return the modules of tests' helpers, benchmarks and examples; tests themselves are not counted."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    # benchmarks may have virtual environments in folders of its own.
    paths += [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks/planner").glob("*.py")]
    return tuple(sorted([*paths, *(ROOT / "launch/examples").rglob("*.py")]))


def first_word(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").split(" ", 1)[0]


@cache
def count_text(paths: tuple[Path, ...]) -> Counter[str]:
    """Count the constructs that make code dense to read."""
    counts: Counter[str] = Counter()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.IfExp):
                counts["conditional expressions"] += 1
                nested = any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse, node.test))
                counts["conditional expressions inside another one"] += nested
            elif isinstance(node, ast.Assign):
                is_pair = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
                counts["several assignments in one statement"] += is_pair
            elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                counts["comprehensions with several loops"] += len(node.generators) > 1
            elif isinstance(node, ast.ClassDef):
                counts["class docstrings that are imperatives"] += first_word(node) in IMPERATIVES
    return counts


def test_the_text_gets_no_denser():
    package = yaml.safe_load(RATCHET.read_text(encoding="utf-8"))
    others = package.pop(OUTSIDE)
    for allowed, paths in ((package, modules()), (others, outside())):
        counts = count_text(paths)
        risen = {kind: (counts[kind], most) for kind, most in allowed.items() if counts[kind] > most}
        assert not risen, f"now, and at most (docs/contributing/style.md has the rules): {risen}"


def test_the_ratchet_names_every_count():
    package = yaml.safe_load(RATCHET.read_text(encoding="utf-8"))
    others = package.pop(OUTSIDE)
    assert set(package) == set(others) == set(count_text(modules()))


def test_new_commits_have_short_subjects():
    """Compare the subjects of the newest commits; a checkout without history has none."""
    log = subprocess.run(
        ["git", "log", "-10", "--no-merges", "--format=%s"], cwd=ROOT, capture_output=True, text=True
    )
    too_long = [subject for subject in log.stdout.splitlines() if len(subject) > LONGEST_SUBJECT]
    assert not too_long, f"more than {LONGEST_SUBJECT} characters: {too_long}"
