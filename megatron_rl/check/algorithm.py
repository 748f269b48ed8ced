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
        algorithm = algorithm_of(config)
        return algorithm, _profile_errors(config, algorithm)
    except UserError as error:
        return ALGORITHMS.get(config.algorithm.name), list(each(error))


def _profile_errors(config: RunConfig, algorithm: Algorithm) -> list[UserError]:
    """Return the errors of an overlong buffer beside the shorter limits of sampling profiles."""
    if algorithm.overlong.limit is not None:
        return []
    limits = {
        f"rollout.sampling_profiles.{task}.max_response_tokens": profile["max_response_tokens"]
        for task, profile in config.rollout.sampling_profiles.items()
        if isinstance(profile.get("max_response_tokens"), int)
    }
    return list(algorithm.overlong.buffer_errors("algorithm.overlong", limits))
