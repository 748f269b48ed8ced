"""Run the command line, observing training steps and the exchange of metrics.

``SCORING_PASS=1`` lets the actor score each batch before it trains on it, whatever the configuration says.
A step that stops at a mismatch prints which of the actor's weights have changed. At the end each rank
prints how often metrics were exchanged.
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
exchanged: list[Metrics] = []


def observed(source: Any, roles: Any, *arguments: Any) -> Any:
    """Run `train_step` with the scoring pass of the environment; report changed weights on a mismatch."""
    roles.scoring_pass = roles.scoring_pass or os.environ.get("SCORING_PASS") == "1"
    weights_before = {name: value.clone() for name, value in live_parameters(roles.actor.model).items()}
    try:
        return train_step(source, roles, *arguments)
    except MismatchError:
        weights_after = live_parameters(roles.actor.model)
        changed = [name for name, value in weights_before.items() if not value.equal(weights_after[name])]
        print(f"changed weights: {changed}", flush=True)
        raise


def counted(values: list[Any], value: Any, group: Any = None) -> None:
    """Gather objects as torch does, and count the metrics among them."""
    if isinstance(value, Metrics):
        exchanged.append(value)
    all_gather_object(values, value, group=group)


if __name__ == "__main__":
    run.train_step = observed
    dist.all_gather_object = counted
    code = main()
    print(f"metrics exchanged {len(exchanged)} times", flush=True)
    sys.exit(code)
