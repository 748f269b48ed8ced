"""Run a Python script, and fork each torchrun that it starts: ``forked_launches.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.campaign.forked import Forked, preload
from tests.campaign.runs import LAUNCHER_NAMES
from tests.rank_server import become

EXECUTED = subprocess.Popen


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process: torchrun is forked from this one, any other program is executed."""
    if list(command[1:3]) == ["-m", "torch.distributed.run"]:
        return Forked(command, **options)
    return EXECUTED(command, **options)


if __name__ == "__main__":
    preload()
    # The script is no rank of a job.
    for name in LAUNCHER_NAMES:
        os.environ.pop(name, None)
    setattr(subprocess, "Popen", start)
    become(sys.argv[1:], module=False)
