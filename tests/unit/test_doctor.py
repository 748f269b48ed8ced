"""A machine's own packages are compared with the GPU stack before anything is installed."""

from __future__ import annotations

import ast
import ctypes
import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from megatron_rl.planning import machine
from megatron_rl.planning.gpu_stack import TORCH_OF_VLLM

ROOT = Path(__file__).resolve().parents[2]


def test_extras_name_the_versions_that_are_tried() -> None:
    source = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    lists = [node for node in source.body if isinstance(node, ast.Assign) and "readme" not in ast.dump(node)]
    names: dict[str, Any] = {"Path": Path, "__file__": ""}
    exec(compile(ast.Module(lists, []), "setup.py", "exec"), names)
    extras = names["EXTRAS"]
    for extra in ("cpu", "gpu"):
        wanted = {need.name: need.specifier for need in map(Requirement, extras[extra])}
        for name, version in machine.TESTED_VERSIONS.items():
            specifier = wanted.get(name, wanted.get(f"{name}-cpu"))
            assert specifier is not None and specifier.contains(version), (extra, name)
    vllm = Requirement(next(need for need in extras["gpu"] if "vllm" in need)).specifier
    series = [f"0.{number}" for number in range(20, 40)]
    assert [name for name in series if vllm.contains(name)] == [*TORCH_OF_VLLM]


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


def nvidia_smi(folder: Path, driver: str) -> Path:
    """Write a program that answers as nvidia-smi of one H100 does; return its folder."""
    folder.mkdir(parents=True)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, {driver}, Default'\n")
    tool.chmod(0o755)
    return folder


def before_install(
    python: Path, requirements: Path, *options: str, tools: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [python / "bin/python", "-m", "megatron_rl", "doctor", "--before-install", requirements]
    command += ["--lock", ROOT / "launch/constraints-gpu-py312-vllm0.32.txt", *options]
    path = os.pathsep.join([*([str(tools)] if tools else []), os.environ["PATH"]])
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
    )


def test_a_container_keeps_its_builds_or_is_refused(tmp_path: Path) -> None:
    fits = container(tmp_path / "fits", torch="2.13.0+cu130", transformer_engine="2.20.2", apex="0.1")
    done = before_install(fits, tmp_path / "missing.txt")
    assert done.returncode == 0, done.stdout + done.stderr
    missing = {line.partition("==")[0] for line in (tmp_path / "missing.txt").read_text().splitlines()}
    assert {"vllm", "megatron-core"} <= missing
    assert not missing & {"torch", "transformer-engine", "apex", "nvidia-cudnn-cu13"}
    other = container(tmp_path / "other", torch="2.9.0", apex="0.1")
    done = before_install(other, tmp_path / "missing.txt")
    assert done.returncode == 1 and "torch: 2.9.0 is installed" in done.stdout and "fix:" in done.stdout
    hidden = next((other / "lib").glob("python*/site-packages")) / "torch-2.13.0.dist-info"
    hidden.mkdir()
    (hidden / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    words = "from megatron_rl.planning import machine; print([vars(it) for it in machine.check_packages()])"
    python = str(other / "bin/python")
    told = subprocess.run([python, "-c", words], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"2.13.0 of {other} hides 2.9.0" in told
    assert importlib.metadata.version("torch").startswith(machine.TESTED_VERSIONS["torch"])


def test_a_driver_that_cannot_run_the_stack_is_named_before_anything_is_downloaded(tmp_path: Path) -> None:
    bare = container(tmp_path / "bare")
    old = nvidia_smi(tmp_path / "old", "550.54.15")
    done = before_install(bare, tmp_path / "missing.txt", tools=old)
    assert done.returncode == 1
    assert "driver: 550.54.15 does not run CUDA 13" in done.stdout
    assert "--cuda 12" in done.stdout

    done = before_install(bare, tmp_path / "missing.txt", "--cuda", "12", tools=old)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vllm==" not in (tmp_path / "missing.txt").read_text()

    new = nvidia_smi(tmp_path / "new", "580.95.05")
    assert before_install(bare, tmp_path / "missing.txt", tools=new).returncode == 0


def test_the_runtime_compiler_of_attention_is_opened(tmp_path: Path) -> None:
    """The loader opens them by name, as cuDNN does."""
    finding = machine.check_runtime_compiler(13, tmp_path)
    opened = [name for name in ("libnvrtc.so.13", "libcuda.so.1") if can_be_opened(name)]
    assert (finding.level == "ok") == (len(opened) == 2)

    # A version that no machine has.
    finding = machine.check_runtime_compiler(99, tmp_path)
    assert finding.level == "error" and "libnvrtc.so.99" in finding.text
    assert "nvidia-cuda-nvrtc" in str(finding.fix)
    library = tmp_path / "cu99/lib/libnvrtc.so.99"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    assert f"LD_LIBRARY_PATH={library.parent}" in str(machine.check_runtime_compiler(99, tmp_path).fix)


def can_be_opened(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
