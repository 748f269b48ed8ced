"""Check the packages for training on GPUs (GPU stack) against a machine's own packages and driver.

Compiled packages (vLLM, Transformer Engine, flash-attn, Apex) load only with the torch release for which they
were built. A container's own torch is never replaced, and only packages that are compatible with it are
installed. So all functions here compare *releases* (2.13) and not strings: a container's
``2.13.0a0+9186a08b2c.nv26.07`` and the package index's ``2.13.0+cu130`` are the same release.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.planning.machine import BUILT_TOGETHER, Finding, foreign_apex_finding, is_nvidia_apex
from megatron_rl.versions import distribution_name, release_series

TORCH_OF_VLLM = {"0.32": "2.13.0", "0.33": "2.14.0"}
"""Supported series of vLLM -> the torch version for which the series is built.

This package replaces parts of vLLM, and the replacements are tested only with these series. ``launch/setup.sh
--gpu --vllm SERIES`` has a lock file per series."""

TRANSFORMER_ENGINE = "2.20.2"

TOOLKIT = 13
"""Major version of CUDA for which the package index's torch and vLLM are built."""

OLDEST_DRIVER = {13: 580, 12: 525}
"""Major version of CUDA -> oldest driver branch that runs it, by NVIDIA's compatibility table."""

COMPILED_HERE = "transformer-engine-torch"
"""Package that is distributed as source, and compiled after the others against the installed torch."""

FROM_OTHER_INDEXES = frozenset({"torch", "vllm", "transformer-engine-cu13"})
"""Packages that come from other indexes for CUDA 12, since the package index has wheels only for CUDA 13."""

SEPARATE_PACKAGES = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvidia-ml-py")
"""Prefixes of NVIDIA's packages that are not part of CUDA and not a dependency of torch."""


def pinned_versions(lock: str) -> dict[str, str]:
    """Parse the text of a lock file, with lines ``name==version``, to the version of each distribution.

    Example:
        >>> pinned_versions("# The GPU stack.\\nnvidia_ml_py==13.1  # for NVML\\n")
        {'nvidia-ml-py': '13.1'}
    """
    versions = {}
    for line in lock.splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            versions[distribution_name(name)] = version
    return versions


def _vllm_build_advice(version: str) -> str:
    """Return the advice to build a version of vLLM against the installed torch, with the commands."""
    return (
        f"build vLLM against this torch: git clone --branch v{version} https://github.com/vllm-project/vllm; "
        "cd vllm; python tools/use_existing_torch.py; pip install -r requirements/build/cuda.txt; "
        "pip install --no-build-isolation -e ."
    )


def check_package_compatibility(versions: Mapping[str, str], pinned: Mapping[str, str]) -> list[Finding]:
    """Compare a machine's own packages with the GPU stack that will be installed next to them.

    ``versions`` are the versions of the machine's distributions, ``pinned`` the versions in a lock file (see
    `pinned_versions`). A finding of level error stops the installation. A warning names a package to test or
    to build after the installation. Nothing is imported or installed.
    """
    findings = []
    torch = versions.get("torch")
    vllm = versions.get("vllm")
    supported_series = list(TORCH_OF_VLLM)

    # Collect the packages that are compiled against torch; Triton is not.
    extensions = []
    for name in BUILT_TOGETHER:
        if name in versions and name not in ("torch", "triton"):
            extensions.append(name)

    # This package replaces parts of vLLM, which may have moved or changed in other series.
    if vllm is not None and _version_series(vllm) not in supported_series:
        findings.append(
            Finding(
                "error",
                "vllm",
                f"{vllm} is installed, and only vLLM {' or '.join(supported_series)} is supported",
                f"use a container with vLLM {supported_series[-1]}, or with torch {pinned['torch']} and "
                "without vLLM",
            )
        )

    # Compiled packages are useless without their torch.
    if torch is None and extensions:
        findings.append(
            Finding(
                "error",
                "torch",
                f"{', '.join(extensions)} without the torch that they were built for",
                f"pip uninstall {' '.join(extensions)}, or use a container that has torch too",
            )
        )

    # The wheel of vLLM will be installed next to this torch.
    if torch is not None and vllm is None:
        findings += _check_torch_without_vllm(torch, extensions, pinned)

    apex = versions.get("apex")
    if apex is not None and not is_nvidia_apex(apex):
        findings.append(foreign_apex_finding(apex))
    return findings


def _version_series(version: str) -> str:
    """Return the major and the minor version number as text, such as 0.32."""
    return "{}.{}".format(*release_series(version))


def _check_torch_without_vllm(
    torch_version: str, extensions: list[str], pinned: Mapping[str, str]
) -> list[Finding]:
    """Compare the torch of a machine without vLLM with the torch for which vLLM's wheel is built.

    ``torch_version`` is the machine's torch, and ``extensions`` are its packages that are compiled against
    it. ``pinned`` are the versions in the lock file.
    """
    vllm_version = pinned["vllm"]
    if release_series(torch_version) != release_series(pinned["torch"]):
        text = f"{torch_version} is installed, and vLLM {vllm_version} is built for torch {pinned['torch']}"
        if extensions:
            text += f"; {', '.join(extensions)} of this machine cannot load with torch {pinned['torch']}"
        return [Finding("error", "torch", text, _other_torch_fix(torch_version, pinned))]

    # With a vendor's build of the same release, wheels usually load. Only an import after the installation
    # can test it.
    if "a0+" in torch_version or ".nv" in torch_version:
        text = f"{torch_version} is the vendor's build of the release that vLLM {vllm_version} is built for"
        return [
            Finding(
                "warning",
                "torch",
                text,
                f"if `import vllm` fails afterwards, {_vllm_build_advice(vllm_version)}",
            )
        ]
    return []


def _other_torch_fix(torch_version: str, pinned: Mapping[str, str]) -> str:
    """Return the fix for a torch release that differs from the release for which the pinned vLLM is built."""
    for vllm_series, required_torch in TORCH_OF_VLLM.items():
        if release_series(torch_version) == release_series(required_torch):
            return f"launch/setup.sh --gpu --vllm {vllm_series} installs the vLLM that is built for it"

    series = _version_series(pinned["vllm"])
    fix = f"use a container with torch {pinned['torch']}, or with a vLLM {series} of its own"
    # A build from source succeeds only against a newer torch.
    if release_series(torch_version) > release_series(pinned["torch"]):
        fix += f"; or {_vllm_build_advice(pinned['vllm'])}"
    return fix


def missing_requirements(lock: str, versions: Mapping[str, str], toolkit_version: int = TOOLKIT) -> list[str]:
    """Return the requirements of a lock file to install in addition to a machine's own packages.

    ``lock`` is the text of the lock file, with lines ``name==version``. ``versions`` are the versions of the
    machine's own packages, and ``toolkit_version`` is the major version of CUDA to install for.

    NVIDIA's wheels of CUDA libraries are omitted in two cases: the machine already has torch, or
    ``toolkit_version`` differs from `TOOLKIT`. In both cases torch brings its own CUDA libraries.
    """
    system_names = {distribution_name(name) for name in versions}
    excluded_names = system_names | {COMPILED_HERE}
    # All packages of Transformer Engine must have the same version: do not mix packages of the container with
    # packages of the lock file.
    if "transformer-engine" in system_names:
        excluded_names |= {"transformer-engine-cu12", "transformer-engine-cu13"}
    if toolkit_version != TOOLKIT:
        excluded_names |= FROM_OTHER_INDEXES
    torch_has_libraries = "torch" in system_names or toolkit_version != TOOLKIT

    requirements = []
    for name, version in pinned_versions(lock).items():
        if name in excluded_names:
            continue
        if torch_has_libraries and _is_device_library(name):
            continue
        requirements.append(f"{name}=={version}")
    return requirements


def _is_device_library(name: str) -> bool:
    """Return whether a distribution is Triton or a CUDA library, on which the wheels of torch depend."""
    if name == "triton":
        return True
    return name.startswith("nvidia-") and not name.startswith(SEPARATE_PACKAGES)


def check_driver(driver_version: str, torch_version: str, toolkit_version: int = TOOLKIT) -> Finding | None:
    """Return an error if the driver is too old for the CUDA version that the torch wheel is built for.

    Returns None if the driver is recent enough. ``torch_version`` is the version of the torch wheel, and
    ``toolkit_version`` the major version of its CUDA. Call this before the download of torch and CUDA, which
    is about 5 GB.
    """
    branch = release_series(driver_version)[0]
    oldest_branch = OLDEST_DRIVER[toolkit_version]
    if branch >= oldest_branch:
        return None

    torch = f"torch {torch_version}"
    text = f"{driver_version} does not run CUDA {toolkit_version}, which the wheel of {torch} is built for"
    fix = f"update the driver to {oldest_branch} or later"
    # The build for CUDA 12 runs on older drivers.
    if branch >= OLDEST_DRIVER[12]:
        fix += (
            f"; or launch/setup.sh --gpu --cuda 12 takes {torch}+cu129 and vLLM's wheel for CUDA 12 instead"
        )
    return Finding("error", "driver", text, fix)
