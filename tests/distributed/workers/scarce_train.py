"""Run the command line with a simulated shortage of memory, or with simulated readings of a GPU's memory.

``SCARCE=RANK:STEP:TOKENS``: on that rank and in that step the actor runs out of memory in a micro-batch of
more tokens. ``MEASURED=ALLOWED``: the readings of a pass begin 1 MiB below ALLOWED bytes and grow by 1.5 MiB,
on the second rank by 1.6 MiB.
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
original_train_step = run.train_step


def scarce_train_step(source: Any, roles: Any, *arguments: Any) -> Any:
    """Run `train_step` with the shortage that ``SCARCE`` describes."""
    rank, step, max_tokens = (int(number) for number in os.environ["SCARCE"].split(":"))
    # The fourth of the remaining arguments of `train_step` is the number of the step.
    is_scarce = device.rank() == rank and arguments[3] == step

    shortage: Any = nullcontext()
    if is_scarce:
        model = roles.actor.model
        # Hidden states have 4 bytes per feature.
        token_bytes = model.transformer_config.hidden_size * 4
        shortage = scarce(model, max_tokens * token_bytes)
    with shortage:
        return original_train_step(source, roles, *arguments)


def simulated_reading(*, reset_peak: bool = False) -> device.MemoryReading:
    """Return the memory reading that ``MEASURED`` describes."""
    begin = int(float(os.environ["MEASURED"])) - MIB
    # Ranks differ, so that the smallest micro-batch of all ranks has to be agreed on.
    growth = int((1.5 + 0.1 * device.rank()) * MIB)
    return device.MemoryReading(
        allocated=begin,
        peak=begin + growth,
        other_bytes=0,
        total=8 * 2**30,
    )


if __name__ == "__main__":
    if "SCARCE" in os.environ:
        run.train_step = scarce_train_step
    if "MEASURED" in os.environ:
        device.read_memory = simulated_reading
    sys.exit(main())
