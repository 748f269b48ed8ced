"""The algorithm of a run: constructed, so that a name or a setting that fails is found before the run."""

from __future__ import annotations

from megatron_rl.algorithms.algorithm import ALGORITHMS, Algorithm
from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, each

NOISE = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""Megatron's settings by which a forward pass differs between training and scoring."""


def check_algorithm(config: RunConfig) -> tuple[Algorithm | None, list[UserError]]:
    """Return the run's algorithm, and every mistake in it.

    Where there are mistakes the algorithm is the named one with its own pieces, None for an unknown name.
    """
    try:
        return algorithm_of(config), []
    except UserError as error:
        return ALGORITHMS.get(config.algorithm.name), list(each(error))


def scoring_reason(config: RunConfig, algorithm: Algorithm) -> str | None:
    """Return why the actor scores a batch in a pass of its own before it learns from it.

    None where the learn pass says the same: its weights are still those that the old log-probs are of, and
    nothing asks for them earlier.
    """
    updates = config.batch.optimizer_steps * config.batch.epochs
    if updates > 1:
        return f"a batch is learned from in {updates} optimizer steps, and only the first has the old policy"
    if algorithm.needs_scoring_pass:
        return " and ".join(f"algorithm.{name}" for name in algorithm.needs_scoring_pass) + " asks for it"
    noise = [name for name in NOISE if config.actor.megatron.get(name)]
    return f"actor.megatron.{noise[0]} makes the learn pass random" if noise else None
