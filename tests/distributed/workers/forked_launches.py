"""Run a Python script and fork each torchrun that it starts: ``forked_launches.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.campaign.forked import Forked, preload
from tests.campaign.runs import LAUNCHER_NAMES
from tests.rank_server import become

_ORIGINAL_POPEN = subprocess.Popen


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process: fork it from this one for torchrun, execute any other program."""
    # The first word is the path of the interpreter.
    if list(command[1:3]) == ["-m", "torch.distributed.run"]:
        return Forked(command, **options)

    return _ORIGINAL_POPEN(command, **options)


if __name__ == "__main__":
    preload()
    # The script must not take itself for a rank of the job that runs this worker.
    for name in LAUNCHER_NAMES:
        os.environ.pop(name, None)
    setattr(subprocess, "Popen", start)
    become(sys.argv[1:], module=False)
