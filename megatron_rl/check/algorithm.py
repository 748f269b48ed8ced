"""The algorithm of a run: constructed, so that a name or a setting that fails is found before the run."""

from __future__ import annotations

from megatron_rl.algorithms.algorithm import ALGORITHMS, Algorithm
from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import UserError, each


def check_algorithm(config: RunConfig) -> tuple[Algorithm | None, list[UserError]]:
    """Return the run's algorithm, and every mistake in it.

    Where there are mistakes the algorithm is the named one with its own pieces, None for an unknown name.
    """
    try:
        return algorithm_of(config), []
    except UserError as error:
        return ALGORITHMS.get(config.algorithm.name), list(each(error))
