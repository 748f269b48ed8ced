"""The forms of a response while it is generated, from its prompt to the ragged batch of a step.

Every sequence just has a prompt and a number of tokens that follow it, some sampled by the policy and some
observed from an environment. All that schedulers do is to give it more of them until it has a finish reason.

    PromptBatch -> SequenceGroup of Sequences -> GenerationRequest -> Completion -> NewTokens -> Rollouts
"""

from __future__ import annotations

from array import array
from collections import abc
from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_rl.rewards.worker import Answer
from megatron_rl.types import FINISH_FAILED, UNFINISHED, Outcome, PromptBatch, SamplingParameters

OBSERVED = -1
"""Version of a token that the policy did not sample, but observed from an environment."""


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


@dataclass
class Sequence:
    """One sample of one prompt: an episode, and a row of the batch that is learned from.

    Tokens are kept in arrays of machine numbers, not in lists: a step may have tens of millions of them on
    every rank.

    Example:
        >>> from megatron_rl.types import FINISH_LENGTH
        >>> sequence = Sequence(array("q", [5, 6]), SamplingParameters(), seed=1234, policy_version=3)
        >>> sequence.append_sampled(Completion(0, [7, 8], [-0.5, -1.5], FINISH_LENGTH), version=3)
        >>> sequence.append_observed([9])
        >>> sequence.tokens.tolist(), sequence.versions.tolist(), sequence.is_finished
        ([7, 8, 9], [3, 3, -1], False)
    """

    prompt: array
    """[prompt tokens] int64: the record's prompt, or that of an environment that opened with its own."""

    sampling: SamplingParameters
    """Temperature, filters, stop tokens and the most tokens of a response."""

    seed: int
    """Seed of all that is random in the sequence, in [0, 2**63)."""

    policy_version: int
    """Version of the weights that sampled the oldest token; of the newest weights while there is none."""

    tokens: array = field(default_factory=lambda: array("q"))
    """[n] int64: the token ids after the prompt."""

    log_probs: array = field(default_factory=lambda: array("d"))
    """[n] float64: the engine's log-prob of each token, 0 for observed ones. float32 once gathered."""

    versions: array = field(default_factory=lambda: array("i"))
    """[n] int32: the version of the weights that sampled each token, `OBSERVED` for observed ones."""

    support_sizes: array = field(default_factory=lambda: array("i"))
    """[n] int32: how many token ids the filters left to each draw, 0 where nothing was filtered."""

    support: array = field(default_factory=lambda: array("i"))
    """[sum of support_sizes] int32: those token ids, token after token."""

    experts: Tensor | None = None
    """[prompt tokens + n, layers, k] int16: the experts of each token, -1 where unknown; may be shorter."""

    finish_reason: int = UNFINISHED
    """``FINISH_*``, or ``UNFINISHED``."""

    finished_in: int = 0
    """Number of the token round in which the sequence finished, 0 where it was finished before."""

    outcome: Outcome | None = None
    """Reward or failure that the environment ended with, None without one or before its end."""

    @property
    def is_finished(self) -> bool:
        """Return whether nothing more is sampled for the sequence."""
        return self.finish_reason != UNFINISHED

    @property
    def sampled_tokens(self) -> int:
        """Return how many tokens the policy sampled."""
        return len(self.versions) - self.versions.count(OBSERVED)

    def is_sampled(self, position: int) -> bool:
        """Return whether the policy sampled the token at this position after the prompt."""
        return self.versions[position] != OBSERVED

    def append_sampled(self, completion: Completion, version: int) -> None:
        """Append an engine's answer, sampled by weights of ``version``."""
        count = len(completion.tokens)
        self.tokens.extend(completion.tokens)
        self.log_probs.extend(completion.log_probs)
        self.versions.extend([version] * count)
        self.support_sizes.extend(map(len, completion.support or [()] * count))
        for token_ids in completion.support:
            self.support.extend(token_ids)
        if completion.experts is not None:
            self.experts = completion.experts

    def append_observed(self, tokens: abc.Sequence[int]) -> None:
        """Append what an environment said."""
        count = len(tokens)
        self.tokens.extend(tokens)
        self.log_probs.extend([0.0] * count)
        self.versions.extend([OBSERVED] * count)
        self.support_sizes.extend([0] * count)

    def copy(self) -> Sequence:
        """Return a copy for a scheduler: the buffer's own changes once all ranks have the new tokens."""
        return replace(
            self,
            tokens=self.tokens[:],
            log_probs=self.log_probs[:],
            versions=self.versions[:],
            support_sizes=self.support_sizes[:],
            support=self.support[:],
        )


@dataclass
class SequenceGroup:
    """The samples of one prompt: advantages compare them, so they are learned from together.

    A group is *waiting* while it has no sequences, then *running*, and *finished* when all its sequences are.

    Example:
        A prompt of which two responses are sampled by weights of version 3::

            SequenceGroup(prompt=prompts.rows([0]), sequences=[Sequence(...), Sequence(...)])
    """

    prompt: PromptBatch
    """The record, as a batch of one prompt."""

    sequences: list[Sequence] = field(default_factory=list)
    """G sequences, `batch.samples_per_prompt` of them; none while the group is waiting."""

    early_rewards: dict[str, dict[int, Answer]] = field(default_factory=dict)
    """Rewards computed while other groups were sampled: name of the scorer -> sample -> its answer."""

    @property
    def is_waiting(self) -> bool:
        """Return whether no sequence of the prompt was started."""
        return not self.sequences

    @property
    def is_finished(self) -> bool:
        """Return whether all sequences are finished."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def is_unstarted(self) -> bool:
        """Return whether no sequence has a token or is finished, so that a new seed would lose nothing."""
        return not any(sequence.is_finished or sequence.sampled_tokens for sequence in self.sequences)

    @property
    def finished_in(self) -> int | None:
        """Return the token round in which the last sequence finished, None while one is unfinished."""
        return max(one.finished_in for one in self.sequences) if self.is_finished else None

    @property
    def sampled_tokens(self) -> int:
        """Return how many tokens the policy sampled in all sequences."""
        return sum(sequence.sampled_tokens for sequence in self.sequences)

    def age(self, version: int) -> int:
        """Return by how many updates the oldest token is older than weights of ``version``."""
        return version - min(sequence.policy_version for sequence in self.sequences)
