"""Run the command line, and hold a step against what it says of the actor's scoring pass.

``SCORING_PASS`` set to 1 lets the actor score each batch before it learns from it, whatever the settings say.
A step that stops at a mismatch first writes which of the actor's weights have moved.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron_rl.cli.main import main
from megatron_rl.parallel.model import live_parameters
from megatron_rl.trainer import run
from megatron_rl.trainer.loop import MismatchError

train_step = run.train_step


def observed(source: Any, roles: Any, *rest: Any) -> Any:
    """Take a step as `train_step` does."""
    roles.scoring_pass = roles.scoring_pass or os.environ.get("SCORING_PASS") == "1"
    before = {name: value.clone() for name, value in live_parameters(roles.actor.model).items()}
    try:
        return train_step(source, roles, *rest)
    except MismatchError:
        after = live_parameters(roles.actor.model)
        moved = [name for name, value in before.items() if not value.equal(after[name])]
        print(f"weights that moved: {moved}", flush=True)
        raise


if __name__ == "__main__":
    run.train_step = observed
    sys.exit(main())
