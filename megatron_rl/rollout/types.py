"""Types of generation, from a prompt to the ragged batch of a step.

Every sequence just has a prompt and a number of tokens after it, some sampled by the policy and some observed
from an environment. A scheduler appends tokens until the sequence has a finish reason. Interruptions, turns
and weight updates only affect when tokens are appended.

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
"""Version of a token that came from an environment or a prompt, and was not sampled by any weights."""


@dataclass(frozen=True)
class GenerationRequest:
    """Request to an engine for further tokens of one sequence.

    Example:
        >>> request = GenerationRequest(0, [5, 6, 7], SamplingParameters(), limit=16, seed=1234, done=1)
        >>> len(request.tokens) - request.done  # tokens of the prompt
        2
    """

    number: int
    """Identifier of the request, unique among the open requests of an engine."""

    tokens: abc.Sequence[int]
    """Token ids of the prompt and of the response so far."""

    sampling: SamplingParameters
    """Temperature, filters and stop tokens."""

    limit: int
    """Maximum number of tokens to sample, at least 1."""

    seed: int
    """Seed of the sequence's random draws, in [0, 2**63), equal in all requests of one sequence."""

    done: int = 0
    """Number of response tokens in ``tokens``. An engine skips this number of draws of the seed's random
    stream, so that the continuation does not repeat them."""

    turn_tokens: int = 0
    """Number of tokens at the end of ``tokens`` that belong to the turn which the request continues. Stop
    texts are searched only in this turn, and schedules over tokens count from its start."""


@dataclass(frozen=True)
class Completion:
    """Tokens that an engine sampled for one request.

    Example:
        >>> make_failed_completion(3)
        Completion(number=3, tokens=(), log_probs=(), finish_reason=2, support=(), experts=None)
    """

    number: int
    """Identifier of the request."""

    tokens: abc.Sequence[int]
    """Sampled token ids. The last token may be a stop token, or complete a stop text. Empty if the request
    failed."""

    log_probs: abc.Sequence[float]
    """Natural log-prob of each of ``tokens`` at the sampling temperature, after the filters."""

    finish_reason: int
    """``FINISH_STOP``, ``FINISH_LENGTH`` (the request's limit was reached), or ``FINISH_FAILED``."""

    support: abc.Sequence[abc.Sequence[int]] = ()
    """Sampling support of each sampled token: the token ids that passed the filters (top-k, top-p and min-p),
    or no ids if all tokens passed. Empty without filters."""

    experts: Tensor | None = None
    """[tokens, layers, experts per token] int16: the experts to which each token of request and completion
    was routed, except the last token, which was never an input. None unless the engine records them."""


def make_failed_completion(number: int) -> Completion:
    """Make the completion of a request that the engine could not sample."""
    return Completion(number, (), (), FINISH_FAILED)


@dataclass
class Sequence:
    """One sample of one prompt, with all values that training needs; one row of the training batch.

    Per-token values are arrays of machine numbers, not lists: a step may have tens of millions of tokens on
    every rank, and a list needs several times the memory.

    Example:
        >>> from megatron_rl.types import FINISH_LENGTH
        >>> sequence = Sequence(array("q", [5, 6]), SamplingParameters(), seed=1234, policy_version=3)
        >>> sequence.append_sampled(Completion(0, [7, 8], [-0.5, -1.5], FINISH_LENGTH), version=3)
        >>> sequence.append_observed([9])
        >>> sequence.tokens.tolist(), sequence.versions.tolist(), sequence.is_finished
        ([7, 8, 9], [3, 3, -1], False)
    """

    prompt: array
    """[prompt tokens] int64: the record's prompt, or the messages that an environment opened with."""

    sampling: SamplingParameters
    """Temperature, filters, stop tokens and maximum number of response tokens."""

    seed: int
    """Seed of the sequence's random draws and of its environment, in [0, 2**63)."""

    policy_version: int
    """Version of the weights that sampled the first token, or the current version before the first token."""

    tokens: array = field(default_factory=lambda: array("q"))
    """[n] int64: token ids of the response, the n tokens after the prompt."""

    log_probs: array = field(default_factory=lambda: array("d"))
    """[n] float64: the engine's log-prob of each token, 0 if observed. The gather rounds it to float32."""

    versions: array = field(default_factory=lambda: array("i"))
    """[n] int32: version of the weights that sampled each token, `OBSERVED` if observed."""

    support_sizes: array = field(default_factory=lambda: array("i"))
    """[n] int32: number of token ids in the sampling support of each token, see `Completion.support`; 0
    without filters or if observed."""

    support: array = field(default_factory=lambda: array("i"))
    """[sum of support_sizes] int32: token ids of the supports, concatenated."""

    experts: Tensor | None = None
    """[prompt tokens + n, layers, experts per token] int16: experts of each token, -1 where not recorded. The
    last tokens may be absent. None unless the engine records experts."""

    finish_reason: int = UNFINISHED
    """``FINISH_STOP``, ``FINISH_LENGTH``, ``FINISH_FAILED`` or ``UNFINISHED``."""

    finish_round: int = 0
    """Number of the token round in which the sequence finished, counted from 1 in each step; 0 if the
    sequence finished in an earlier step."""

    outcome: Outcome | None = None
    """Reward or failure of the sequence's environment; None without an environment or before it ends."""

    @property
    def is_finished(self) -> bool:
        """Return whether the sequence has a finish reason and gets no further tokens."""
        return self.finish_reason != UNFINISHED

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return len(self.versions) - self.versions.count(OBSERVED)

    def is_sampled(self, position: int) -> bool:
        """Return whether the policy sampled the token at this position of the response."""
        return self.versions[position] != OBSERVED

    def append_sampled(
        self,
        completion: Completion,
        version: int,
    ) -> None:
        """Append the tokens of a completion, sampled by weights of ``version``."""
        num_tokens = len(completion.tokens)
        self.tokens.extend(completion.tokens)
        self.log_probs.extend(completion.log_probs)
        self.versions.extend([version] * num_tokens)

        # The support of a token is the set of token ids that passed top-k, top-p and min-p. If none of these
        # filters is set, the engine returns no supports, and all sizes are 0.
        support_sizes = [len(token_ids) for token_ids in completion.support]
        self.support_sizes.extend(support_sizes or [0] * num_tokens)
        for token_ids in completion.support:
            self.support.extend(token_ids)

        # Replace the experts instead of appending: an engine records them for the whole request.
        if completion.experts is not None:
            self.experts = completion.experts

    def append_observed(self, tokens: abc.Sequence[int]) -> None:
        """Append the tokens of an environment's observation."""
        num_tokens = len(tokens)
        self.tokens.extend(tokens)
        # No policy has sampled these tokens. So they have no log-prob, no version of weights, and no sampling
        # support (the token ids that top-k and top-p left to sample from).
        self.log_probs.extend([0.0] * num_tokens)
        self.versions.extend([OBSERVED] * num_tokens)
        self.support_sizes.extend([0] * num_tokens)

    def copy(self) -> Sequence:
        """Return a copy to which a scheduler can append tokens without changing this sequence.

        A scheduler appends to its copies only. The original gets the new tokens of all replicas after the
        gather, so it stays equal on all ranks.
        """
        # `replace` alone would share the arrays, to which the scheduler appends.
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
    """Prompt with its samples, which are trained on in the same batch, since advantages compare them.

    A group is *waiting* while it has no sequences, then *running*, and *finished* when all its sequences are
    finished.

    Example:
        A prompt with two samples::

            SequenceGroup(prompt=prompts.rows([0]), sequences=[Sequence(...), Sequence(...)])
    """

    prompt: PromptBatch
    """The record of the data set, as a batch of one prompt."""

    sequences: list[Sequence] = field(default_factory=list)
    """The samples, `batch.samples_per_prompt` of them; empty while the group is waiting."""

    early_rewards: dict[str, dict[int, Answer]] = field(default_factory=dict)
    """Rewards computed while other groups were sampled: name of the scorer -> sequence's index -> reward."""

    @property
    def is_waiting(self) -> bool:
        """Return whether the group has no sequences yet."""
        return not self.sequences

    @property
    def is_finished(self) -> bool:
        """Return whether all sequences are finished."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def has_no_progress(self) -> bool:
        """Return whether the group has no finished sequence and no sampled token: a restart loses no work."""
        return not any(sequence.is_finished or sequence.num_sampled_tokens for sequence in self.sequences)

    @property
    def finish_round(self) -> int | None:
        """Return the number of the token round in which the group's last sequence finished.

        A step samples in one or more token rounds, each with a maximum number of tokens per sequence. The
        number is 0 if the group finished in an earlier step. Returns None for an unfinished group.
        """
        if not self.is_finished:
            return None
        return max(sequence.finish_round for sequence in self.sequences)

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled in all sequences."""
        return sum(sequence.num_sampled_tokens for sequence in self.sequences)

    def compute_age(self, version: int) -> int:
        """Compute the number of weight updates from the group's oldest token to weights ``version``."""
        # Versions only increase, so the first token of a sequence is its oldest.
        return version - min(sequence.policy_version for sequence in self.sequences)
