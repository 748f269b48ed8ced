"""Loading of torch's cuDNN, so that a process does not mix two versions of cuDNN.

cuDNN consists of several libraries. Transformer Engine loads them by name, from CUDA_HOME or from the library
path. If torch's own cuDNN is in the same process, the process mixes libraries of two versions: on an H100
with cuDNN 9.14 on the machine and 9.19 in torch's wheels, `torch.backends.cudnn.version()` and every
convolution raised. The dynamic loader does not search for a library that is already loaded, so this module
loads torch's libraries first.
"""

from __future__ import annotations

import ctypes
import warnings
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.distributed import device

_MAPS = Path("/proc/self/maps")
"""List of the files that are mapped into this process's memory; it exists only on Linux."""


def load_cudnn_of_torch() -> None:
    """Load every library of torch's cuDNN. Call it before the first import of Megatron-Core.

    Does nothing if Transformer Engine is not installed, if this rank has no GPU, or if torch has loaded no
    cuDNN. Warns if libraries of a different cuDNN are already loaded.
    """
    if device.on_host() or find_spec("transformer_engine") is None:
        return

    # torch has loaded the main library, libcudnn.so. The other libraries of cuDNN are in the same folder.
    maps = ""
    if _MAPS.is_file():
        maps = _MAPS.read_text()
    files = mapped_libraries(maps)
    main_files = [file for file in files if file.name.startswith("libcudnn.so")]
    if not main_files:
        return

    # A different cuDNN that is already loaded cannot be replaced: the user must restart without it.
    folder = main_files[0].parent
    foreign_folders = sorted({file.parent for file in files} - {folder})
    if foreign_folders:
        warnings.warn(
            f"cuDNN was loaded from {foreign_folders[0]}, and torch has its own in {folder}: export "
            f"LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH before Python starts",
            stacklevel=2,
        )
        return

    for file in sorted(folder.glob("libcudnn*.so.*")):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def mapped_libraries(maps: str) -> list[Path]:
    """Return the paths of cuDNN's libraries in ``maps``, the text of ``/proc/PID/maps``.

    Each path is returned once, in the order of its first line.
    """
    # The path is the last column; a library has one line per segment.
    lines = [line for line in maps.splitlines() if "/libcudnn" in line]
    files = [Path(line.split()[-1]) for line in lines]
    return list(dict.fromkeys(files))
