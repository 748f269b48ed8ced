"""Bounds of processes that run a user's code."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.setting import setting


@dataclass(frozen=True)
class LimitsConfig:
    """Bound what a process of the user's code may use, with all that it starts."""

    memory_gib: float = setting(8.0, "Memory of a process.", unit="GiB", more_than=0, at_most=1024)
    files: int = setting(256, "Files open at once.", unit="files", at_least=16, at_most=2**20)
    file_gib: float = setting(1.0, "Size of the largest file.", unit="GiB", more_than=0, at_most=1024)
    processes: int = setting(
        64, "Processes that it may have started.", unit="processes", at_least=0, at_most=4096
    )
    network: bool = setting(False, "Let it reach the network.")
    read: tuple[str, ...] = setting(
        (),
        "Files and folders that it sees beside Python's own, the folder of its code and the folders that "
        "modules are imported from: data, models, a device such as /dev/nvidia0.",
    )
    write: bool = setting(
        False,
        "Let it write to the folder that the run is started in, the folder of its code and what `read` "
        "names; without, it has temporary folders in memory alone.",
    )
    environment: tuple[str, ...] = setting(
        (),
        "Names of environment variables that it has beside the usual ones (PATH, HOME, LANG, those of "
        "Python, OpenMP and torch), secrets among them.",
    )
