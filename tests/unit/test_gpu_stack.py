"""Which machines' packages and drivers go with the GPU stack, by the strings that images really have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.planning.gpu_stack import (
    TOOLKIT,
    TORCH_OF_VLLM,
    TRANSFORMER_ENGINE,
    check_driver,
    check_package_compatibility,
    missing_requirements,
    pinned_versions,
)
from megatron_rl.versions import release_series

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "launch").glob("constraints-gpu-py*.txt"))
PINNED = {
    lock.stem.rpartition("-vllm")[2]: pinned_versions(lock.read_text(encoding="utf-8"))
    for lock in LOCKS
    if "-py312-" in lock.name
}
"""Series of vLLM -> the versions of its GPU stack."""

FITS = {
    "a bare machine": {},
    "the index's torch": {"torch": "2.13.0"},
    "PyTorch's image for CUDA 13": {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"},
    "vLLM's image": {"torch": "2.13.0+cu130", "vllm": "0.32.0", "flash-attn": "2.8.3"},
    "vLLM's image, patched": {"torch": "2.13.0+cu130", "vllm": "0.32.1+cu130"},
    "vLLM's image for CUDA 12": {"torch": "2.13.0+cu129", "vllm": "0.32.0+cu129"},
    "vLLM's newer image": {"torch": "2.14.0+cu130", "vllm": "0.33.0", "flash-attn": "2.8.3"},
    "an image with a vLLM built for the vendor's torch": {
        "torch": "2.13.0a0+9186a08b2c.nv26.07",
        "vllm": "0.32.0",
        "transformer-engine": "2.17.0+2e559f06",
        "apex": "0.1",
    },
}
"""Images whose packages stay as they are, and nothing has to be said."""

TRIED_AFTERWARDS = {
    "NVIDIA's image of 26.06": {"torch": "2.13.0a0+8145d630e8.nv26.6.54250401"},
    "NVIDIA's image of 26.07": {
        "torch": "2.13.0a0+9186a08b2c.nv26.07",
        "transformer-engine": "2.17.0+2e559f06",
        "apex": "0.1",
    },
}
"""Images whose torch has the right release and the vendor's own build: vLLM's import decides."""

REFUSED = {
    "NVIDIA's image of 25.03": {"torch": "2.7.0a0+7c8ec84dab.nv25.03", "transformer-engine": "2.1.0+8eb1712"},
    "NVIDIA's image of 25.06": {"torch": "2.8.0a0+5228986c39.nv25.06", "apex": "0.1"},
    "NVIDIA's image of 25.09": {"torch": "2.9.0a0+50eac811a6.nv25.09", "transformer-engine": "2.7.0"},
    "NVIDIA's image of 25.10": {
        "torch": "2.9.0a0+145a3a7bda.nv25.10",
        "flash-attn": "2.7.4.post1+25.10",
        "torchvision": "0.24.0a0+094e7af5",
    },
    "NVIDIA's image of 25.12": {"torch": "2.10.0a0+b4e4ee81d3.nv25.12"},
    "NVIDIA's image of 26.03": {"torch": "2.11.0a0+a6c236b9fd.nv26.03.46836102"},
    "NVIDIA's image of 26.04": {"torch": "2.12.0a0+0291f960b6.nv26.04.48445190"},
    "NVIDIA's image of 26.08": {"torch": "2.14.0a0+4fdf77b940.nv26.08"},
    "NVIDIA's image of vLLM of 26.03": {
        "torch": "2.11.0a0+a6c236b9fd.nv26.03.46836102",
        "vllm": "0.17.1+a03ca76a.nv26.03",
    },
    "PyTorch's image of an older release": {"torch": "2.9.1+cu128"},
    "an older image of vLLM": {"torch": "2.9.1+cu129", "vllm": "0.15.0"},
    "vLLM of another series": {"torch": "2.14.0", "vllm": "0.34.0"},
    "Apex without torch": {"apex": "0.1"},
}


def levels(versions: dict[str, str]) -> list[str]:
    return [finding.level for finding in check_package_compatibility(versions, PINNED["0.32"])]


@pytest.mark.parametrize("image", FITS)
def test_an_image_that_fits_stays_as_it_is(image: str):
    assert levels(FITS[image]) == []


@pytest.mark.parametrize("image", TRIED_AFTERWARDS)
def test_a_vendors_build_of_the_release_is_tried(image: str):
    findings = check_package_compatibility(TRIED_AFTERWARDS[image], PINNED["0.32"])
    assert [finding.level for finding in findings] == ["warning"]
    assert findings[0].fix is not None
    assert "tools/use_existing_torch.py" in findings[0].fix


@pytest.mark.parametrize("image", REFUSED)
def test_an_image_of_another_release_is_refused_with_a_fix(image: str):
    findings = check_package_compatibility(REFUSED[image], PINNED["0.32"])
    assert [finding.level for finding in findings] == ["error"]
    assert findings[0].fix


def test_a_newer_torch_names_what_would_have_to_be_built():
    (finding,) = check_package_compatibility({"torch": "2.15.0", "flash-attn": "2.8.3"}, PINNED["0.33"])
    assert "flash-attn of this machine cannot load with" in finding.text
    assert finding.fix is not None
    assert "tools/use_existing_torch.py" in finding.fix


@pytest.mark.parametrize(("torch", "series"), [("2.14.0a0+4fdf77b940.nv26.08", "0.33"), ("2.13.0", "0.32")])
def test_a_torch_of_the_other_stack_is_led_to_it(torch: str, series: str):
    (other,) = PINNED.keys() - {series}
    (finding,) = check_package_compatibility({"torch": torch}, PINNED[other])
    assert finding.level == "error"
    assert finding.fix is not None
    assert f"launch/setup.sh --gpu --vllm {series}" in finding.fix
    assert [found.level for found in check_package_compatibility({"torch": torch}, PINNED[series])] in (
        [],
        ["warning"],
    )


def test_the_indexs_apex_is_named_as_what_it_is():
    (finding,) = check_package_compatibility({"torch": "2.13.0", "apex": "0.9.10.dev0"}, PINNED["0.32"])
    assert finding.level == "warning"
    assert "web framework" in finding.text


@pytest.mark.parametrize(("driver", "fits"), [("580.65.06", True), ("590.12", True), ("575.57.08", False)])
def test_a_driver_is_compared_before_the_download(driver: str, fits: bool):
    assert (check_driver(driver, "2.13.0") is None) == fits


def test_a_driver_of_cuda_12_is_led_to_the_builds_for_it():
    finding = check_driver("550.54.15", "2.13.0")
    assert finding is not None
    assert finding.fix is not None
    assert "--cuda 12" in finding.fix
    assert check_driver("550.54.15", "2.13.0", toolkit_version=12) is None


def test_a_driver_older_than_cuda_12_has_to_be_updated():
    finding = check_driver("470.82.01", "2.13.0")
    assert finding is not None
    assert finding.fix == "update the driver to 580 or later"


@pytest.mark.parametrize("version", ["", "unknown", "main"])
def test_a_version_without_numbers_is_no_release(version: str):
    assert release_series(version) == (0, 0)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_bare_machine_gets_the_whole_lock(lock: Path):
    missing = missing_requirements(lock.read_text(encoding="utf-8"), {})
    series = lock.stem.rpartition("-vllm")[2]
    torch = TORCH_OF_VLLM[series]
    expected = {f"torch=={torch}", f"vllm=={series}.0", f"transformer-engine=={TRANSFORMER_ENGINE}"}
    assert expected <= set(missing)
    assert all("==" in requirement for requirement in missing)
    assert any(requirement.startswith("nvidia-cudnn-cu13==") for requirement in missing)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_container_keeps_its_torch_and_cuda_libraries(lock: Path):
    machine = {"torch": "2.13.0a0+9186a08b2c.nv26.07", "transformer_engine": "2.17.0", "numpy": "2.3.0"}
    missing = missing_requirements(lock.read_text(encoding="utf-8"), machine)
    names = {requirement.partition("==")[0].lower() for requirement in missing}
    assert not names & {"torch", "triton", "numpy", "transformer-engine", "nvidia-cudnn-cu13"}
    assert "transformer-engine-cu13" not in names  # a part of another version beside the container's own
    assert {"vllm", "megatron-core", "transformers"} <= names
    # Needed by vLLM and Transformer Engine, and no part of CUDA.
    assert {"nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvidia-ml-py"} <= names


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_cudas_compiler_is_of_the_release_of_its_headers(lock: Path):
    lines = lock.read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    # Headers refuse a compiler of another release, and kernels that are compiled on demand need both.
    parts = ("runtime", "nvcc", "crt", "cccl", "nvrtc")
    assert {release_series(versions[f"nvidia-cuda-{part}"]) for part in parts} == {(TOOLKIT, 0)}
    assert release_series(versions["nvidia-nvvm"]) == (TOOLKIT, 0)


def test_a_driver_of_cuda_12_gets_torch_and_vllm_from_their_own_indexes():
    missing = missing_requirements(LOCKS[0].read_text(encoding="utf-8"), {}, toolkit_version=12)
    names = {requirement.partition("==")[0].lower() for requirement in missing}
    assert not names & {"torch", "vllm", "transformer-engine-cu13", "nvidia-nccl-cu13"}
    assert {"transformer-engine", "megatron-core"} <= names
