"""Run commands one after another in the same ranks. ``in_turn.py PLAN``, a JSON list of command lines.

The output of each command goes to a file beside the plan, named after its index; a command that fails ends
the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_rl.cli.main import main


def redirect(file: Path) -> None:
    """Send the output of this process to the end of ``file``."""
    sys.stdout.flush()
    sys.stderr.flush()
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    os.close(opened)


if __name__ == "__main__":
    # All runs share this process, so the process group of the first has to survive for the next ones.
    setattr(dist, "destroy_process_group", lambda *_: None)
    plan = Path(sys.argv[1])
    for number, command in enumerate(json.loads(plan.read_text())):
        redirect(plan.with_suffix(f".{number}"))
        code = main(command)
        if code:
            sys.exit(code)
