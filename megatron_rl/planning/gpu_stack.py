"""GPU stack: the packages for training on GPUs, and their compatibility with a machine's packages and driver.

Compiled packages (vLLM, Transformer Engine, flash-attn, Apex) load only with the torch release for which they
were built. A container's own torch is never replaced, and only packages that are compatible with it are
installed. So all functions here compare *releases* (2.13), never strings: a container's
``2.13.0a0+9186a08b2c.nv26.07`` and the package index's ``2.13.0+cu130`` are the same release.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.planning.machine import BUILT_TOGETHER, Finding, foreign_apex_finding, is_nvidia_apex
from megatron_rl.versions import distribution_name, release_series

TORCH_OF_VLLM = {"0.32": "2.13.0", "0.33": "2.14.0"}
"""Supported series of vLLM -> the torch version for which the series is built.

A rank replaces parts of vLLM, and the replacements were compared only with these series. ``launch/setup.sh
--gpu --vllm SERIES`` has a lock file for each of them."""

TRANSFORMER_ENGINE = "2.20.2"

TOOLKIT = 13
"""Major version of CUDA for which the package index's torch and vLLM are built."""

OLDEST_DRIVER = {13: 580, 12: 525}
"""Major version of CUDA -> oldest driver branch that runs it, by NVIDIA's compatibility table."""

COMPILED_HERE = "transformer-engine-torch"
"""Package that is distributed as source, and compiled against the installed torch after all others."""

FROM_OTHER_INDEXES = frozenset({"torch", "vllm", "transformer-engine-cu13"})
"""Packages whose wheels on the package index are for CUDA 13."""

SEPARATE_PACKAGES = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvidia-ml-py")
"""Prefixes of NVIDIA's packages that are not part of CUDA, and are not installed with any torch."""


def pinned_versions(lock: str) -> dict[str, str]:
    """Return the version of each distribution in a lock file's text, which has lines ``name==version``.

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
    """Return, as advice, the commands that build a version of vLLM against the installed torch."""
    return (
        f"build vLLM against this torch: git clone --branch v{version} https://github.com/vllm-project/vllm; "
        "cd vllm; python tools/use_existing_torch.py; pip install -r requirements/build/cuda.txt; "
        "pip install --no-build-isolation -e ."
    )


def check_package_compatibility(versions: Mapping[str, str], pinned: Mapping[str, str]) -> list[Finding]:
    """Compare a machine's own packages with the GPU stack that is to be installed next to them.

    ``versions`` are the versions of the machine's distributions, ``pinned`` the versions in a lock file (see
    `pinned_versions`). A finding with level error stops the installation; a warning names a package to test
    or to build afterwards. Nothing is imported or installed.
    """
    findings = []
    torch = versions.get("torch")
    vllm = versions.get("vllm")
    series = list(TORCH_OF_VLLM)

    # Triton is not compiled against torch.
    extensions = [name for name in BUILT_TOGETHER if name in versions]
    extensions = [name for name in extensions if name not in ("torch", "triton")]

    # In other series of vLLM the parts that a rank replaces may have moved or changed.
    if vllm is not None and _version_series(vllm) not in series:
        findings.append(
            Finding(
                "error",
                "vllm",
                f"{vllm} is installed, and a rank replaces parts of vLLM {' or '.join(series)}",
                f"use a container with vLLM {series[-1]}, or with torch {pinned['torch']} and without vLLM",
            )
        )

    if torch is None and extensions:
        findings.append(
            Finding(
                "error",
                "torch",
                f"{', '.join(extensions)} without the torch that they were built for",
                f"pip uninstall {' '.join(extensions)}, or use a container that has torch too",
            )
        )

    # vLLM's wheel will be installed next to this torch.
    if torch is not None and vllm is None:
        findings += _check_torch_without_vllm(torch, extensions, pinned)

    apex = versions.get("apex")
    if apex is not None and not is_nvidia_apex(apex):
        findings.append(foreign_apex_finding(apex))
    return findings


def _version_series(version: str) -> str:
    """Return the series of a version, which is its major and minor number, such as 0.32."""
    return "{}.{}".format(*release_series(version))


def _check_torch_without_vllm(
    torch_version: str, extensions: list[str], pinned: Mapping[str, str]
) -> list[Finding]:
    """Compare the torch of a machine without vLLM with the torch for which vLLM's wheel is built.

    ``extensions`` are the machine's packages that are compiled against its torch, ``pinned`` the versions in
    the lock file.
    """
    vllm_version = pinned["vllm"]
    if release_series(torch_version) != release_series(pinned["torch"]):
        text = f"{torch_version} is installed, and vLLM {vllm_version} is built for torch {pinned['torch']}"
        if extensions:
            text += f", which {', '.join(extensions)} of this machine cannot load with"
        return [Finding("error", "torch", text, _other_torch_fix(torch_version, pinned))]

    # With a vendor's build of the same release wheels usually load; importing them after the installation
    # tests it.
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
    """Return the fix for a torch release for which the pinned vLLM was not built."""
    for vllm_series, built_for in TORCH_OF_VLLM.items():
        if release_series(torch_version) == release_series(built_for):
            return f"launch/setup.sh --gpu --vllm {vllm_series} installs the vLLM that is built for it"

    series = _version_series(pinned["vllm"])
    fix = f"use a container with torch {pinned['torch']}, or with a vLLM {series} of its own"
    # A build from source succeeds only against a newer torch.
    if release_series(torch_version) > release_series(pinned["torch"]):
        fix += f"; or {_vllm_build_advice(pinned['vllm'])}"
    return fix


def missing_requirements(lock: str, versions: Mapping[str, str], toolkit_version: int = TOOLKIT) -> list[str]:
    """Return the lines of a lock file that must be installed in addition to a machine's own packages.

    ``lock`` is the file's text, with lines ``name==version``; ``versions`` are the versions of the machine's
    own packages. If the machine has its own torch, or the torch for another CUDA is installed, that torch
    comes with its CUDA libraries, and NVIDIA's wheels in the lock file are left out.
    """
    system_names = {distribution_name(name) for name in versions}
    excluded = system_names | {COMPILED_HERE}
    # All parts of Transformer Engine must have one version: a part from the lock file does not load with the
    # container's own parts.
    if "transformer-engine" in system_names:
        excluded |= {"transformer-engine-cu12", "transformer-engine-cu13"}
    if toolkit_version != TOOLKIT:
        excluded |= FROM_OTHER_INDEXES
    torch_brings_libraries = "torch" in system_names or toolkit_version != TOOLKIT

    requirements = []
    for name, version in pinned_versions(lock).items():
        if name in excluded:
            continue
        if torch_brings_libraries and _is_device_library(name):
            continue
        requirements.append(f"{name}=={version}")
    return requirements


def _is_device_library(name: str) -> bool:
    """Return whether a distribution is one of the libraries that are installed with a wheel of torch."""
    if name == "triton":
        return True
    return name.startswith("nvidia-") and not name.startswith(SEPARATE_PACKAGES)


def check_driver(driver_version: str, torch_version: str, toolkit_version: int = TOOLKIT) -> Finding | None:
    """Compare a driver's version with the CUDA of ``torch_version``, the torch that would be installed.

    Returns None if the driver runs it. This is checked before any download, since a torch that the driver
    cannot run is 5 GB of packages.
    """
    branch = release_series(driver_version)[0]
    oldest_branch = OLDEST_DRIVER[toolkit_version]
    if branch >= oldest_branch:
        return None

    torch = f"torch {torch_version}"
    text = f"{driver_version} does not run CUDA {toolkit_version}, which {torch} of the index is built for"
    fix = f"update the driver to {oldest_branch} or later"
    # The build for CUDA 12 runs on older drivers.
    if branch >= OLDEST_DRIVER[12]:
        fix += (
            f"; or launch/setup.sh --gpu --cuda 12 takes {torch}+cu129 and vLLM's wheel for CUDA 12 instead"
        )
    return Finding("error", "driver", text, fix)
