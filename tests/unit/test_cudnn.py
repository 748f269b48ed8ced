"""Of two cuDNNs on a machine, a process uses the one that torch brings."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.distributed import cudnn
from tests.conftest import run_bounded

WHEEL = "/venv/nvidia/cudnn/lib"
MACHINE = "/usr/lib/x86_64-linux-gnu"


def maps(*files: str) -> str:
    """Return lines as Linux writes them, two for each file."""
    return "".join(f"7f00-7f01 r-xp 00000000 fe:00 1  {file}\n" * 2 for file in ("/usr/bin/python3", *files))


def test_libraries_are_found_among_the_mapped_files() -> None:
    found = cudnn.mapped_libraries(maps(f"{WHEEL}/libcudnn.so.9", f"{MACHINE}/libcudnn_graph.so.9.14.0"))
    assert found == [Path(WHEEL) / "libcudnn.so.9", Path(MACHINE) / "libcudnn_graph.so.9.14.0"]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the libraries that are loaded, on a machine with a GPU and Transformer Engine."""
    names: list[str] = []
    monkeypatch.setattr(cudnn, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr(cudnn.device, "on_host", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", lambda file, mode: names.append(Path(file).name))
    monkeypatch.setattr(cudnn, "_MAPS", tmp_path / "maps")
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9"):
        (tmp_path / name).touch()
    return names


def test_all_parts_of_torchs_are_loaded(tmp_path: Path, loaded: list[str]) -> None:
    cudnn._MAPS.write_text(maps(f"{tmp_path}/libcudnn.so.9"))
    cudnn.load_cudnn_of_torch()
    assert loaded == ["libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_ops.so.9"]


def test_another_one_that_is_loaded_is_said(tmp_path: Path, loaded: list[str]) -> None:
    """As seen on an H100: torch's own, and the parts of the machine's."""
    cudnn._MAPS.write_text(maps(f"{tmp_path}/libcudnn.so.9", f"{MACHINE}/libcudnn_graph.so.9.14.0"))
    with pytest.warns(UserWarning, match=f"from {MACHINE}, .* export LD_LIBRARY_PATH={tmp_path}:"):
        cudnn.load_cudnn_of_torch()
    assert not loaded


def test_a_torch_without_cudnn_loads_none(loaded: list[str]) -> None:
    cudnn._MAPS.write_text(maps())
    cudnn.load_cudnn_of_torch()
    assert not loaded


MODULES = ("trainer.run", "trainer.dataflow", "megatron.model", "distributed.groups")
FIRST_IMPORT = """
import importlib, os, sys
import torch

class Finder:
    def find_spec(name, *_):
        if name == "megatron.core":
            loaded = "megatron_rl.distributed.cudnn" in sys.modules
            print(module, "loads it before" if loaded else "loads it too late", flush=True)
            os._exit(0)

assert not any(name.startswith("megatron") for name in sys.modules if "editable" not in name)
for module in sys.argv[1:]:
    if os.fork() == 0:
        sys.meta_path.insert(0, Finder)
        importlib.import_module("megatron_rl." + module)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said_by_imports() -> list[str]:
    """Return what processes say that import one module each, as soon as Megatron-Core is to be imported."""
    ended = run_bounded([sys.executable, "-c", FIRST_IMPORT, *MODULES], 240)
    assert ended.returncode == 0, ended.output
    return ended.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_it_is_loaded_before_megatron_is_imported(module: str, said_by_imports: list[str]) -> None:
    assert f"{module} loads it before" in said_by_imports
