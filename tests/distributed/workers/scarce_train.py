"""Run the command line on a host that is short of memory, or whose memory is read as that of a GPU.

``SCARCE=RANK:STEP:TOKENS`` lets the actor's layers refuse micro-batches of more tokens in that step on that
rank. ``MEASURED=ALLOWED`` reads a device on which a pass begins 1 MiB below ALLOWED bytes and adds 1.5 MiB,
on the second rank 1.6 MiB.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.distributed import device
from megatron_rl.trainer import run

sys.path.insert(0, str(Path(__file__).parent))
from scarce import scarce

MIB = 2**20
train_step = run.train_step


def short_of_memory(source: Any, roles: Any, *arguments: Any) -> Any:
    """Run `train_step` with the bound of the environment."""
    rank, step, tokens = (int(number) for number in os.environ["SCARCE"].split(":"))
    bound: Any = nullcontext()
    if device.rank() == rank and arguments[3] == step:
        model = roles.actor.model
        bound = scarce(model, tokens * model.transformer_config.hidden_size * 4)
    with bound:
        return train_step(source, roles, *arguments)


def measured(*, restart: bool = False) -> device.MemoryReading:
    """Return the reading of the environment."""
    begin = int(float(os.environ["MEASURED"])) - MIB
    added = int((1.5 + 0.1 * device.rank()) * MIB)
    return device.MemoryReading(allocated=begin, peak=begin + added, others=0, total=8 * 2**30)


if __name__ == "__main__":
    if "SCARCE" in os.environ:
        run.train_step = short_of_memory
    if "MEASURED" in os.environ:
        device.read_memory = measured
    sys.exit(main())
