"""Run the command line with an engine that stops for random times, other ones on every rank."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.rollout.engines.torch.engine import TorchEngine

LONGEST = 0.05


def delay_steps() -> None:
    """Sleep up to ``LONGEST`` seconds before each step of the engine."""
    source = random.Random(int(os.environ["RANK"]))
    step = TorchEngine.step

    def late(*values: Any, **named: Any) -> Any:
        time.sleep(source.uniform(0, LONGEST))
        return step(*values, **named)

    setattr(TorchEngine, "step", late)


if __name__ == "__main__":
    delay_steps()
    sys.exit(main())
