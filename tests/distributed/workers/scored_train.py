"""Run the command line, and hold a step against what it says of the actor's scoring pass.

``SCORING_PASS`` set to 1 lets the actor score each batch before it learns from it, whatever the settings say.
A step that stops at a mismatch first writes which of the actor's weights have moved. At the end a rank says
how often metrics travelled between the ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from megatron_rl.cli.main import main
from megatron_rl.megatron.model import live_parameters
from megatron_rl.metrics import Metrics
from megatron_rl.trainer import run
from megatron_rl.trainer.loop import MismatchError

train_step = run.train_step
all_gather_object = dist.all_gather_object
travelled: list[Metrics] = []


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


def counted(values: list[Any], value: Any, group: Any = None) -> None:
    """Gather as torch does, and keep what is of metrics."""
    if isinstance(value, Metrics):
        travelled.append(value)
    all_gather_object(values, value, group=group)


if __name__ == "__main__":
    run.train_step = observed
    dist.all_gather_object = counted
    code = main()
    print(f"metrics travelled {len(travelled)} times", flush=True)
    sys.exit(code)
