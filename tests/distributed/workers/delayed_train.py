"""Run the command line with an engine that sleeps for random times, different on every rank."""

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
    """Sleep up to ``LONGEST`` seconds before each step of the engine."""
    # Replicas then finish in orders that change from run to run, which results must not depend on.
    source = random.Random(int(os.environ["RANK"]))
    step = TorchEngine.step

    def late(*values: Any, **keywords: Any) -> Any:
        time.sleep(source.uniform(0, LONGEST))
        return step(*values, **keywords)

    setattr(TorchEngine, "step", late)


if __name__ == "__main__":
    delay_steps()
    sys.exit(main())
