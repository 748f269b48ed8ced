"""Run the command line with an engine whose steps take random times, different on every rank."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.rollout.engines.torch.engine import TorchEngine

LONGEST = 0.05
"""Longest sleep in seconds."""


def delay_steps() -> None:
    """Make the engine sleep up to `LONGEST` seconds before each step."""
    # Replicas then finish in an order that changes from run to run, which results must not depend on.
    generator = random.Random(int(os.environ["RANK"]))
    original_step = TorchEngine.step

    def delayed_step(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(generator.uniform(0, LONGEST))
        return original_step(*arguments, **keywords)

    # setattr, since a type checker refuses the assignment to a method.
    setattr(TorchEngine, "step", delayed_step)


if __name__ == "__main__":
    delay_steps()
    sys.exit(main())
