"""Run torchrun in a forked process: the first argument is the file for its process ID, the rest its own.

``SHUTDOWN_SECONDS`` in the environment is the time that it gives ranks to end, 30 s by default.
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
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_NAMES}
    torchrun = Forked(
        [sys.executable, "-m", "torch.distributed.run", *sys.argv[2:]],
        env=environment,
    )
    Path(sys.argv[1]).write_text(str(torchrun.pid))
    print("exit code of torchrun:", torchrun.wait(), flush=True)
