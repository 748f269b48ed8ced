"""Run the command line and report changed weights and the number of exchanges of metrics.

With ``SCORING_PASS=1`` the actor computes log-probs of each batch before it trains on the batch, whatever the
configuration is. A step that ends with a mismatch prints the names of the actor's changed weights. At the end
each rank prints how often it exchanged metrics.
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

original_train_step = run.train_step
original_all_gather_object = dist.all_gather_object
exchanged: list[Metrics] = []
"""Metrics that this rank has exchanged."""


def observed_train_step(source: Any, roles: Any, *arguments: Any) -> Any:
    """Run `train_step`, with a scoring pass if requested; print the changed weights after a mismatch."""
    if os.environ.get("SCORING_PASS") == "1":
        roles.scoring_pass = True

    # Copies, since the optimizer changes the weights in place.
    parameters = live_parameters(roles.actor.model)
    weights_before = {name: parameter.clone() for name, parameter in parameters.items()}
    try:
        return original_train_step(source, roles, *arguments)
    except MismatchError:
        weights_after = live_parameters(roles.actor.model)
        changed_names = [
            name for name, weight in weights_before.items() if not weight.equal(weights_after[name])
        ]
        print(f"changed weights: {changed_names}", flush=True)
        raise


def counting_all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
    """Gather objects as torch does, and count the metrics among them."""
    if isinstance(value, Metrics):
        exchanged.append(value)
    original_all_gather_object(values, value, group=group)


if __name__ == "__main__":
    run.train_step = observed_train_step
    dist.all_gather_object = counting_all_gather_object
    code = main()
    # Each rank prints its own number: the exchange is collective, so they must agree.
    print(f"metrics exchanged {len(exchanged)} times", flush=True)
    sys.exit(code)
