"""Run the command line on a disk that is mounted at ``PLACE``, once for each of its sizes.

The variable ``SIZES`` contains the sizes in KiB. Each run is followed by a line with the checkpoints on the
disk, since the disk disappears with this process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.cli.main import main

# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000


def unshare_mounts() -> None:
    """Move this process into a mount namespace of its own, which an unprivileged user may create."""
    user = os.getuid()
    group = os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "this kernel has no user namespaces")

    # The user becomes root of the namespace. The kernel requires "deny" before a group may be mapped.
    process = Path("/proc/self")
    (process / "setgroups").write_text("deny")
    (process / "uid_map").write_text(f"0 {user} 1")
    (process / "gid_map").write_text(f"0 {group} 1")


if __name__ == "__main__":
    # A tmpfs of a fixed size behaves like a full disk, without privileges.
    unshare_mounts()
    os.dup2(1, 2)  # one stream, so that lines keep their order
    disk = Path(os.environ["PLACE"])
    remount = ""
    for size in os.environ["SIZES"].split():
        options = f"{remount}size={size}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk]
        subprocess.run(command, check=True)

        # Each run needs a fresh interpreter state, which a fork of this process is.
        process = os.fork()
        if process == 0:
            sys.exit(main())

        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        names = sorted(path.name for path in disk.glob("checkpoints/*"))
        print(f"{size} KiB: exit code {code}, checkpoints {names}", flush=True)
        remount = "remount,"
