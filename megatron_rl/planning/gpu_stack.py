"""The packages that train on GPUs, and whether a machine's own packages and driver go with them.

Compiled packages (vLLM, Transformer Engine, flash-attn, Apex) load with the torch release that they were
built for. A container brings torch with its own builds: it stays, and only packages that fit beside it are
installed. So everything here compares *releases* (2.13), never strings: a container's
``2.13.0a0+9186a08b2c.nv26.07`` and the index's ``2.13.0+cu130`` are the same release.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.planning.machine import BUILT_TOGETHER, TRIED, Finding, foreign_apex, is_nvidia_apex
from megatron_rl.versions import distribution_name, release

TORCH = TRIED["torch"]
VLLM = TRIED["vllm"]
TRANSFORMER_ENGINE = "2.20.2"

VLLM_SERIES = ("0.32",)
"""Series of vLLM whose parts that a rank replaces were compared with this package's."""

TOOLKIT = 13
"""Major version of CUDA that the index's torch and vLLM are built for."""

OLDEST_DRIVER = {13: 580, 12: 525}
"""Oldest driver branch that runs programs of a major version of CUDA, by NVIDIA's compatibility table."""

BUILD_VLLM = (
    f"build vLLM against this torch: git clone --branch v{VLLM} https://github.com/vllm-project/vllm; "
    "cd vllm; python tools/use_existing_torch.py; pip install -r requirements/build/cuda.txt; "
    "pip install --no-build-isolation -e ."
)

COMPILED_HERE = "transformer-engine-torch"
"""Package that comes as source and is compiled against the installed torch, after everything else."""

FROM_OTHER_INDEXES = frozenset({"torch", "vllm", "transformer-engine-cu13"})
"""Packages whose wheels on the package index are for CUDA 13."""

SEPARATE_PACKAGES = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvidia-ml-py")
"""Prefixes of NVIDIA's packages that are not part of CUDA, which no torch brings."""


def unfit_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Compare a machine's own packages with the GPU stack that would be installed beside them.

    ``versions`` maps names of distributions to their versions. An error stops the installation; a warning
    names a package to try or to build afterwards. Nothing is imported or installed.
    """
    findings = []
    torch = versions.get("torch")
    vllm = versions.get("vllm")

    # Triton is not compiled against torch.
    extensions = [name for name in BUILT_TOGETHER if name in versions]
    extensions = [name for name in extensions if name not in ("torch", "triton")]

    # Any other series of vLLM may have moved or changed the parts that a rank replaces.
    if vllm is not None and _series(vllm) not in VLLM_SERIES:
        findings.append(
            Finding(
                "error",
                "vllm",
                f"{vllm} is here, and a rank replaces parts of vLLM {' or '.join(VLLM_SERIES)}",
                f"use a container with vLLM {VLLM_SERIES[-1]}, or one with torch {TORCH} and without vLLM",
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

    # vLLM's wheel would be installed beside this torch.
    if torch is not None and vllm is None:
        findings += _torch_without_vllm(torch, extensions)

    apex = versions.get("apex")
    if apex is not None and not is_nvidia_apex(apex):
        findings.append(foreign_apex(apex))
    return findings


def _series(version: str) -> str:
    """Return the major and minor number of a version, such as 0.32."""
    return "{}.{}".format(*release(version))


def _torch_without_vllm(torch: str, extensions: list[str]) -> list[Finding]:
    """Compare a machine's torch with the one that vLLM's wheel was built for."""
    if release(torch) != release(TORCH):
        text = f"{torch} is here, and vLLM {VLLM} is built for torch {TORCH}"
        if extensions:
            text += f", which {', '.join(extensions)} of this machine cannot load with"

        # Offer a build from source only against a newer torch.
        fix = f"use a container with torch {TORCH}, or with a vLLM {VLLM_SERIES[-1]} of its own"
        if release(torch) > release(TORCH):
            fix += f"; or {BUILD_VLLM}"
        return [Finding("error", "torch", text, fix)]

    # A vendor's own build of the same release: wheels for it usually load, which the import after the
    # installation shows.
    if "a0+" in torch or ".nv" in torch:
        text = f"{torch} is the vendor's build of the release that vLLM {VLLM} is built for"
        return [Finding("warning", "torch", text, f"if `import vllm` fails afterwards, {BUILD_VLLM}")]
    return []


def missing_requirements(lock: str, versions: Mapping[str, str], toolkit: int = TOOLKIT) -> list[str]:
    """Return the lines of a lock file that have to be installed beside a machine's own packages.

    ``lock`` is the file's text, a ``name==version`` a line; ``versions`` maps the names of the machine's own
    packages to their versions. A torch of the machine's own comes with the CUDA libraries it was built with,
    and so does a torch for another CUDA: NVIDIA's wheels in the lock are left out then.
    """
    system_names = {distribution_name(name) for name in versions}
    excluded = system_names | {COMPILED_HERE}
    # Its parts are of one version: a part of the lock beside a container's own one does not load.
    if "transformer-engine" in system_names:
        excluded |= {"transformer-engine-cu12", "transformer-engine-cu13"}
    if toolkit != TOOLKIT:
        excluded |= FROM_OTHER_INDEXES
    brings_libraries = "torch" in system_names or toolkit != TOOLKIT

    requirements = []
    for line in lock.splitlines():
        requirement = line.partition("#")[0].strip()
        name = distribution_name(requirement.partition("==")[0])
        if not requirement or name in excluded:
            continue
        if brings_libraries and _is_device_library(name):
            continue
        requirements.append(requirement)
    return requirements


def _is_device_library(name: str) -> bool:
    """Return whether a distribution is one of the libraries that a wheel of torch brings."""
    if name == "triton":
        return True
    return name.startswith("nvidia-") and not name.startswith(SEPARATE_PACKAGES)


def unfit_driver(driver: str, toolkit: int = TOOLKIT) -> Finding | None:
    """Compare a driver's version with the CUDA of the torch that would be installed.

    Done before anything is downloaded: a torch that the driver cannot run is 5 GB of packages.
    """
    branch = release(driver)[0]
    oldest_branch = OLDEST_DRIVER[toolkit]
    if branch >= oldest_branch:
        return None

    text = f"{driver} does not run CUDA {toolkit}, which torch {TORCH} of the index is built for"
    fix = f"update the driver to {oldest_branch} or later"
    # The build for CUDA 12 runs on older drivers.
    if branch >= OLDEST_DRIVER[12]:
        fix += (
            f"; or launch/setup.sh --gpu --cuda 12 takes torch {TORCH}+cu129 and vLLM's wheel for CUDA 12 "
            "instead"
        )
    return Finding("error", "driver", text, fix)
