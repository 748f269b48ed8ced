"""Run the command line again and again with a disk at ``PLACE`` that is of another size each time.

``SIZES`` are numbers of KiB. What the disk holds after each run is printed: it goes away with the last.
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
    """Let this process mount what no other sees; any user may."""
    user = os.getuid()
    group = os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACES):
        raise OSError(ctypes.get_errno(), "this kernel has no user namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)


if __name__ == "__main__":
    own_mounts()
    os.dup2(1, 2)  # one order of what is printed and what is told of errors
    place = Path(os.environ["PLACE"])
    again = ""
    for size in os.environ["SIZES"].split():
        options = f"{again}size={size}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
        process = os.fork()
        if process == 0:
            sys.exit(main())
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        names = sorted(path.name for path in place.glob("checkpoints/*"))
        print(f"{size} KiB: exit code {code}, checkpoints {names}", flush=True)
        again = "remount,"
