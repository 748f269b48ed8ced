"""Run the command line once for each size of a disk that is mounted at ``PLACE``.

``SIZES`` are numbers of KiB. The checkpoints on the disk are printed after each run, since the disk
disappears with this process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.cli.main import main

NEW_NAMESPACES = 0x00020000 | 0x10000000  # of mounts and of users, from linux/sched.h


def own_mounts() -> None:
    """Move this process into a mount namespace of its own, which an unprivileged user may create."""
    user = os.getuid()
    group = os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACES):
        raise OSError(ctypes.get_errno(), "this kernel has no user namespaces")
    for name, value in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path("/proc/self", name).write_text(value)


if __name__ == "__main__":
    # A tmpfs of a fixed size behaves like a full disk, without privileges.
    own_mounts()
    os.dup2(1, 2)  # one stream, so that lines keep their order
    disk = Path(os.environ["PLACE"])
    remount = ""
    for size in os.environ["SIZES"].split():
        options = f"{remount}size={size}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)
        # Each run needs a fresh interpreter state, which a fork of this process is.
        process = os.fork()
        if process == 0:
            sys.exit(main())
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        names = sorted(path.name for path in disk.glob("checkpoints/*"))
        print(f"{size} KiB: exit code {code}, checkpoints {names}", flush=True)
        remount = "remount,"
