"""The forms of a response while it is generated, from its prompt to the ragged batch of a step.

Every sequence just has a prompt and a number of tokens that follow it, some sampled by the policy and some
observed from an environment. All that schedulers do is to give it more of them until it has a finish reason.

    PromptBatch -> SequenceGroup of Sequences -> GenerationRequest -> Completion -> NewTokens -> Rollouts
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.types import FINISH_FAILED, SamplingParameters


@dataclass(frozen=True)
class GenerationRequest:
    """Request to an engine for the continuation of one sequence.

    Example:
        >>> request = GenerationRequest(0, [5, 6, 7], SamplingParameters(), limit=16, seed=1234, done=1)
        >>> len(request.tokens) - request.done  # tokens of the prompt
        2
    """

    number: int
    """Name of the request until it is answered, unique among the open requests of an engine."""

    tokens: abc.Sequence[int]
    """Token ids of the prompt and of all that follows it so far."""

    sampling: SamplingParameters
    """Temperature, filters and stop tokens."""

    limit: int
    """Most tokens to sample, 1 or more."""

    seed: int
    """Seed of the sequence's random numbers, in [0, 2**63): equal in all requests of one sequence."""

    done: int = 0
    """Tokens after the prompt that ``tokens`` ends with: the random numbers are those that follow them."""


@dataclass(frozen=True)
class Completion:
    """Answer of an engine to one request.

    Example:
        >>> failed_completion(3)
        Completion(number=3, tokens=(), log_probs=(), finish_reason=2, support=(), experts=None)
    """

    number: int
    """That of the request."""

    tokens: abc.Sequence[int]
    """Sampled token ids; a stop token is the last of them. Empty where the request has failed."""

    log_probs: abc.Sequence[float]
    """Natural log-prob of each of ``tokens`` at the sampling temperature, after the filters."""

    finish_reason: int
    """``FINISH_STOP``, ``FINISH_LENGTH`` where ``limit`` was reached, or ``FINISH_FAILED``."""

    support: abc.Sequence[abc.Sequence[int]] = ()
    """Token ids that the filters left to each draw, one list per token; empty where nothing was filtered."""

    experts: Tensor | None = None
    """[tokens, layers, k] int16: the experts that each token of the request and of the answer, but for the
    last one, was routed to. None unless the engine was asked for them."""


def failed_completion(number: int) -> Completion:
    """Return the answer to a request that could not be sampled."""
    return Completion(number, (), (), FINISH_FAILED)
