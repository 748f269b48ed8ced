"""Run commands one after another in the same ranks: ``in_turn.py PLAN``.

``PLAN`` is a JSON file with a list of command lines. The output of command N goes to the file ``PLAN`` with
the suffix ``.N``. The ranks exit at the first command that fails.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_rl.cli.main import main


def redirect(file: Path) -> None:
    """Append the output of this process to ``file``."""
    # Buffered output belongs to the file of the last command.
    sys.stdout.flush()
    sys.stderr.flush()

    # Descriptors and not sys.stdout, since libraries in C write there too.
    file_descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file_descriptor, 1)
    os.dup2(file_descriptor, 2)
    os.close(file_descriptor)


if __name__ == "__main__":
    # All runs share this process, so the process group of the first has to survive for the next ones.
    setattr(dist, "destroy_process_group", lambda *_: None)
    plan = Path(sys.argv[1])
    commands = json.loads(plan.read_text())
    for index, command in enumerate(commands):
        redirect(plan.with_suffix(f".{index}"))
        code = main(command)
        if code:
            sys.exit(code)
