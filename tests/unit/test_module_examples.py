"""The examples in the documentation of every module hold, under the names that the module has today."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from megatron_rl.config import sampling_profiles

ROOT = Path(__file__).resolve().parents[2]

# tests/unit/test_algorithms_examples.py runs those of the algorithms, with tensors of its own.
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "megatron_rl").rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8") and "algorithms" not in path.parts
)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_hold(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An example registers a profile, which all configurations loaded later in this process would have.
    monkeypatch.setattr(sampling_profiles, "_registered_profiles", {})
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert not results.failed
