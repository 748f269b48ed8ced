"""Compatibility of a machine's own packages and driver with the GPU packages that are to be installed.

Compiled packages (vLLM, Transformer Engine, flash-attn, Apex) load only with the torch release that they were
built for. A container's own torch and compiled packages are kept, and only compatible packages are added.
Everything here therefore compares *releases* (2.13), never strings: a container's
``2.13.0a0+9186a08b2c.nv26.07`` and the package index's ``2.13.0+cu130`` are the same release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TORCH = "2.13.0"
VLLM = "0.32.0"
TRANSFORMER_ENGINE = "2.20.2"

VLLM_SERIES = ("0.32",)
"""Series of vLLM with which the replacements of its parts in this package were compared."""

CUDA = 13
"""Major version of CUDA that the index's torch and vLLM are built for."""

OLDEST_DRIVER = {13: 580, 12: 525}
"""Oldest driver branch that runs programs of a major version of CUDA, by NVIDIA's compatibility table."""

BUILT_FOR_TORCH = (
    "vllm", "transformer-engine", "transformer-engine-torch", "flash-attn", "apex", "torchvision",
    "torchaudio",
)  # fmt: skip
"""Packages with compiled parts that load only with the torch release they were built for."""

NVIDIA_APEX = "0.1"
"""Version of NVIDIA's Apex, which no index has. The package `apex` of the index is a web framework (0.9)."""

WITHOUT_FUSED_VARLEN = (8, 0)
"""Compute capability up to which Transformer Engine (2.20.2) has no fused attention for packed rows."""

BUILD_VLLM = (
    f"build vLLM against this torch: git clone --branch v{VLLM} https://github.com/vllm-project/vllm; "
    "cd vllm; python use_existing_torch.py; pip install --no-build-isolation -e ."
)


@dataclass(frozen=True)
class Finding:
    """Result of one check of the machine.

    Example:
        Finding("error", "driver", "550.54 runs CUDA 12 at most", "update the driver to 580 or later")
    """

    level: str
    """``ok``, ``note``, ``warning`` or ``error``."""

    name: str
    """Subject of the check: a package, the driver, the disk."""

    text: str
    """Result, in one sentence."""

    fix: str | None = None
    """Step that corrects the problem; None without a problem."""


def release(version: str) -> tuple[int, int]:
    """Return the release series of a version string, without patch, pre-release and build parts.

    Example:
        >>> release("2.13.0a0+9186a08b2c.nv26.07"), release("2.13.1+cu130"), release("0.32.1rc2.dev5+g12ab")
        ((2, 13), (2, 13), (0, 32))
    """
    numbers = re.match(r"v?(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        return (0, 0)
    return int(numbers[1]), int(numbers[2] or 0)


def unfit_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Compare a machine's own packages with the GPU stack that would be installed beside them.

    ``versions`` maps names of distributions to their versions. An error stops the installation; a warning
    names a package to test or build afterwards. Nothing is imported or installed.
    """
    findings = []
    torch = versions.get("torch")
    vllm = versions.get("vllm")
    compiled = [name for name in BUILT_FOR_TORCH if name in versions]

    if vllm is not None and "{}.{}".format(*release(vllm)) not in VLLM_SERIES:
        findings.append(
            Finding(
                "error",
                "vllm",
                f"{vllm} is here, and a rank replaces parts of vLLM {' or '.join(VLLM_SERIES)}",
                f"use a container with vLLM {VLLM_SERIES[-1]}, or one with torch {TORCH} and without vLLM",
            )
        )

    if torch is None and compiled:
        findings.append(
            Finding(
                "error",
                "torch",
                f"{', '.join(compiled)} without the torch that they were built for",
                f"pip uninstall {' '.join(compiled)}, or use a container that has torch too",
            )
        )

    if torch is not None and vllm is None:
        findings += _torch_without_vllm(torch, compiled)

    apex = versions.get("apex")
    if apex is not None and not is_nvidia_apex(apex):
        findings.append(
            Finding(
                "warning",
                "apex",
                f"{apex} is the index's web framework of that name, not NVIDIA's Apex ({NVIDIA_APEX})",
                "pip uninstall apex; Transformer Engine has the fused optimizer and kernels that Apex has",
            )
        )
    return findings


def _torch_without_vllm(torch: str, compiled: list[str]) -> list[Finding]:
    """Compare a machine's torch with the one that vLLM's wheel was built for."""
    if release(torch) != release(TORCH):
        text = f"{torch} is here, and vLLM {VLLM} is built for torch {TORCH}"
        if compiled:
            text += f", which {', '.join(compiled)} of this machine cannot load with"
        newer = release(torch) > release(TORCH)
        choice = f"use a container with torch {TORCH}, or with a vLLM {VLLM_SERIES[-1]} of its own"
        fix = f"{choice}; or {BUILD_VLLM}" if newer else choice
        return [Finding("error", "torch", text, fix)]

    # Wheels for the release usually load with a vendor's build of it; only an import can tell.
    if "a0+" in torch or ".nv" in torch:
        text = f"{torch} is the vendor's build of the release that vLLM {VLLM} is built for"
        return [Finding("warning", "torch", text, f"if `import vllm` fails afterwards, {BUILD_VLLM}")]
    return []


COMPILED_HERE = "transformer-engine-torch"
"""Source package that is compiled against the installed torch, after all other packages."""

ANOTHER_INDEX_FOR_CUDA_12 = frozenset({"torch", "vllm", "transformer-engine-cu13"})
"""Packages whose wheels on the package index are for CUDA 13."""


def missing_requirements(lock: str, versions: Mapping[str, str], cuda: int = CUDA) -> list[str]:
    """Return the lines of a lock file that must be installed in addition to a machine's own packages.

    ``lock`` is the file's text, with one ``name==version`` per line; ``versions`` maps the names of the
    machine's own packages to their versions. A machine's own torch, or a torch for another CUDA version,
    comes with its CUDA libraries: NVIDIA's wheels in the lock are then left out.
    """
    provided = {distribution_name(name) for name in versions}
    skipped = {COMPILED_HERE}
    if cuda != CUDA:
        skipped |= ANOTHER_INDEX_FOR_CUDA_12
    brings_cuda = "torch" in provided or cuda != CUDA

    requirements = []
    for line in lock.splitlines():
        requirement = line.partition("#")[0].strip()
        name = distribution_name(requirement.partition("==")[0])
        is_cuda_library = name.startswith("nvidia-") or name == "triton"
        if not requirement or name in provided | skipped or (brings_cuda and is_cuda_library):
            continue
        requirements.append(requirement)
    return requirements


def distribution_name(name: str) -> str:
    """Return a distribution's name in the form that indexes compare: lower case, words joined by hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_nvidia_apex(version: str) -> bool:
    """Return whether a version of the distribution `apex` is one of NVIDIA's Apex."""
    return release(version) == release(NVIDIA_APEX)


def unfit_driver(driver: str, torch_cuda: int = CUDA) -> Finding | None:
    """Compare a driver's version with the CUDA version of the torch that would be installed.

    Call this before the installation, which downloads several gigabytes.
    """
    branch = release(driver)[0]
    required_branch = OLDEST_DRIVER[torch_cuda]
    if branch >= required_branch:
        return None

    text = f"{driver} does not run CUDA {torch_cuda}, which torch {TORCH} of the index is built for"
    update = f"update the driver to {required_branch} or later"
    if branch < OLDEST_DRIVER[12]:
        return Finding("error", "driver", text, update)

    older_build = (
        f"launch/setup.sh --gpu --cuda 12 takes torch {TORCH}+cu129 and vLLM's wheel for CUDA 12 instead"
    )
    return Finding("error", "driver", text, f"{update}; or {older_build}")


def attention_note(capability: tuple[int, int]) -> Finding | None:
    """Return a note if a GPU's compute capability excludes fused attention over packed rows, else None."""
    if capability > WITHOUT_FUSED_VARLEN:
        return None
    text = "Transformer Engine has no fused attention for packed rows on compute capability {}.{}".format(
        *capability
    )
    return Finding("note", "attention", text, "torch's own variable-length attention is used instead")
