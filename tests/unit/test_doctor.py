"""What a machine brings is held against the GPU stack before anything is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_rl.planning import machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, []),
        ({"torch": "2.13.0", "transformer-engine": "2.20.2", "apex": "0.1"}, []),
        ({"torch": "2.13.0+cu130"}, []),
        ({"torch": "2.9.0a0+50eac811a6.nv25.09", "vllm": "0.32.1+nv"}, []),
        (
            {"torch": "2.9.0a0+50eac811a6.nv25.09", "transformer-engine": "2.7", "apex": "0.1"},
            ["would bring torch 2.13.0, which transformer-engine, apex of this machine cannot load with"],
        ),
        ({"torch": "2.13.0", "vllm": "0.33.0"}, ["0.33.0 is here, and parts of vLLM 0.32 are replaced"]),
        ({"apex": "0.1"}, ["apex without the torch that they were built for"]),
    ],
)
def test_what_does_not_fit_is_said(versions: dict[str, str], words: list[str]) -> None:
    found = machine.stack_conflicts(versions)
    assert len(found) == len(words)
    for finding, text in zip(found, words, strict=True):
        assert text in finding.text and finding.level == "error" and finding.fix


def test_extras_name_the_versions_that_are_tried() -> None:
    source = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    lists = [node for node in source.body if isinstance(node, ast.Assign) and "readme" not in ast.dump(node)]
    names: dict[str, Any] = {"Path": Path, "__file__": ""}
    exec(compile(ast.Module(lists, []), "setup.py", "exec"), names)
    extras = names["EXTRAS"]
    for extra in ("cpu", "gpu"):
        wanted = {need.name: need.specifier for need in map(Requirement, extras[extra])}
        for name, version in machine.TRIED.items():
            specifier = wanted.get(name, wanted.get(f"{name}-cpu"))
            assert specifier is not None and specifier.contains(version), (extra, name)
    assert not Requirement(next(need for need in extras["gpu"] if "vllm" in need)).specifier.contains("0.33")


def container(folder: Path, **versions: str) -> Path:
    """Make an environment with packages of its own, and one above it that sees them, as a container has."""
    machine, site = folder / "machine", "lib/python{}.{}/site-packages".format(*sys.version_info)
    venv.create(machine)
    venv.create(folder / "venv")
    for name, version in versions.items():
        info = machine / site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "venv" / site / "machine.pth").write_text(f"{machine / site}\n")
    return folder / "venv"


def before_install(python: Path, constraints: Path) -> subprocess.CompletedProcess[str]:
    command = [python / "bin/python", "-m", "megatron_rl", "doctor", "--before-install", constraints]
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)


def test_a_container_keeps_its_builds_or_is_refused(tmp_path: Path) -> None:
    fits = container(tmp_path / "fits", torch="2.13.0+cu130", transformer_engine="2.20.2", apex="0.1")
    done = before_install(fits, tmp_path / "constraints")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = "apex==0.1\ntorch==2.13.0+cu130\ntransformer-engine==2.20.2\n"
    assert (tmp_path / "constraints").read_text() == kept
    other = container(tmp_path / "other", torch="2.9.0", apex="0.1")
    done = before_install(other, tmp_path / "constraints")
    assert done.returncode == 1 and "torch: 2.9.0 is here" in done.stdout and "fix:" in done.stdout
    hidden = next((other / "lib").glob("python*/site-packages")) / "torch-2.13.0.dist-info"
    hidden.mkdir()
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    words = "from megatron_rl.planning.machine import packages; print([vars(item) for item in packages()])"
    python = str(other / "bin/python")
    told = subprocess.run([python, "-c", words], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"2.13.0 of {other} hides 2.9.0" in told
    assert importlib.metadata.version("torch").startswith(machine.TRIED["torch"])
