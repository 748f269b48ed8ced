"""Run torchrun in a forked process: ``forked_torchrun.py PID_FILE ARGUMENTS``.

torchrun's process ID is written to ``PID_FILE``. The variable ``SHUTDOWN_SECONDS`` is the time that torchrun
waits for ranks to end before it kills them, 30 s by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import PContext

from tests.campaign.forked import Forked, preload
from tests.campaign.runs import LAUNCHER_NAMES

if __name__ == "__main__":
    preload()
    if seconds := os.environ.get("SHUTDOWN_SECONDS"):
        # torchrun closes the ranks after a failure with the default timeout (torch 2.13).
        PContext.close.__defaults__ = (None, int(seconds))

    # torchrun's ranks must not inherit the variables of this rank.
    environment = dict(os.environ)
    for name in LAUNCHER_NAMES:
        environment.pop(name, None)

    pid_file = Path(sys.argv[1])
    command = [sys.executable, "-m", "torch.distributed.run", *sys.argv[2:]]
    torchrun = Forked(command, env=environment)
    pid_file.write_text(str(torchrun.pid))
    print("exit code of torchrun:", torchrun.wait(), flush=True)
