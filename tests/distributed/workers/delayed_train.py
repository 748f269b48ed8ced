"""Run the command line with an engine that stops for random times, other ones on every rank."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.rollout.torch import TorchEngine

LONGEST = 0.05


def delay_advance() -> None:
    """Sleep up to ``LONGEST`` seconds before each part of a response."""
    source = random.Random(int(os.environ["RANK"]))
    advance = TorchEngine.advance

    def late(*values: Any, **named: Any) -> Any:
        time.sleep(source.uniform(0, LONGEST))
        return advance(*values, **named)

    setattr(TorchEngine, "advance", late)


if __name__ == "__main__":
    delay_advance()
    sys.exit(main())
