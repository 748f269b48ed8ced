"""Types that roles exchange: ragged batches of rows.

Dimensions: P prompts, G samples per prompt, B = P*G rows, N tokens in all rows together. A *row* is one
sequence (prompt followed by response). A ragged tensor is the concatenation of its rows, whose lengths are
``lengths`` [B]. There is no padding.

Every per-token tensor is aligned with its tokens: ``log_probs[t] = log p(token[t] | token[:t])``, and 0 for
the first token of a row. All tensors are on the CPU; roles copy the tensors that they need to their device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

BANNED = -1e30
"""Bias of a token that is never sampled. It is finite: JSON has no infinity, and 0 * infinity is NaN."""


class SamplingParameters(NamedTuple):
    """Sampling parameters of one prompt's responses.

    Example: ``SamplingParameters(temperature=0.7, top_p=0.9, max_response_tokens=1024)``.
    """

    temperature: float = 1.0
    """Divisor of the logits of a turn's first token; 0 means greedy decoding."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling at a turn's first token; 1 is off."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 is off."""
    max_response_tokens: int = 256
    """Length limit of the response in tokens; see `tokens_toward_limit` for the tokens that count."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the response."""
    min_p: float = 0.0
    """Smallest probability relative to the most likely token; 0 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs. The bias is added to the logit before the division by the temperature; `BANNED`
    bans the token."""
    min_response_tokens: int = 0
    """Number of response tokens before a stop token can be sampled; 0 is off."""

    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative logits, of tokens that occur in the prompt or the
    response; 1 is off."""
    presence_penalty: float = 0.0
    """Value that is subtracted from the logits of the response's tokens; 0 is off."""
    frequency_penalty: float = 0.0
    """Value that is subtracted from a token's logit for each occurrence in the response; 0 is off."""
    stop_texts: tuple[str, ...] = ()
    """Texts of several tokens that end the response; see `rollout.stopping`."""

    # Add new fields at the end: checkpoints store the values in order, and older checkpoints lack the last.
    no_repeat_ngram_size: int = 0
    """Length n of the n-grams that may occur only once in prompt and response together; 0 is off."""
    last_temperature: float = 1.0
    """Temperature after ``temperature_tokens`` tokens of a turn, if these are more than 0."""
    temperature_tokens: int = 0
    """Number of tokens of a turn over which the temperature changes linearly; 0 keeps it constant."""
    last_top_p: float = 1.0
    """``top_p`` after ``top_p_tokens`` tokens of a turn, if these are more than 0."""
    top_p_tokens: int = 0
    """Number of tokens of a turn over which ``top_p`` changes linearly; 0 keeps it constant."""

    @property
    def changes_over_tokens(self) -> bool:
        """Return whether temperature or top-p change over the tokens of a turn."""
        return self.temperature_tokens > 0 or self.top_p_tokens > 0

    @property
    def has_penalties(self) -> bool:
        """Return whether penalties change the logits of tokens that occur earlier in the row."""
        has_count_penalty = self.presence_penalty != 0 or self.frequency_penalty != 0
        return has_count_penalty or self.repetition_penalty != 1

    @property
    def has_rules(self) -> bool:
        """Return whether any rule changes logits, before temperature and filters are applied."""
        has_bans = self.min_response_tokens > 0 or self.no_repeat_ngram_size > 0
        return bool(self.logit_bias) or has_bans or self.has_penalties

    def with_greedy_decoding(self) -> SamplingParameters:
        """Return the parameters with temperature 0, and without filters, which would have no effect."""
        greedy = self._replace(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return greedy._replace(temperature_tokens=0, top_p_tokens=0)


class LogitRules(NamedTuple):
    """Rules that changed the logits of one row, and the positions in the row at which they apply.

    Example: ``LogitRules(SamplingParameters(logit_bias=((17, -2.0),)), prompt_tokens=8)``.
    """

    sampling: SamplingParameters
    """Sampling parameters of the row, which contain the rules."""
    prompt_tokens: int
    """Number of tokens before the first token of the response."""
    turn_starts: tuple[int, ...] = ()
    """Index in the row of each turn's first token; empty if the temperature is constant over a turn."""


FINISH_STOP = 0
"""The response ended with a stop token, or with a token that completes a stop text."""
FINISH_LENGTH = 1
"""The response reached ``max_response_tokens``, or the episode reached its largest number of turns."""
FINISH_FAILED = 2
"""The engine or the environment failed on this row; the row is invalid everywhere downstream."""
UNFINISHED = 3
"""The response was interrupted and will be continued; such a row is never in a train batch."""


class Outcome(NamedTuple):
    """Result of an episode in an environment: a reward or a failure.

    Example: ``Outcome(reward=1.0, components={"format": 1.0})``.
    """

    reward: float | None = None
    """Reward of the episode; None if a reward function or model computes it."""
    components: Mapping[str, float] = {}
    """Name -> value of the reward's components."""
    failure: str | None = None
    """Reason of a failed episode; None for a valid episode."""
    message: str = ""
    """Description of the failure."""
    calls: tuple[Sequence[Mapping[str, Any]], ...] = ()
    """Tool calls that a parser found in each turn of the policy."""
    dropped_tokens: int = 0
    """Tokens of an observation that did not fit into the row, which ended the episode."""


def split_rows(values: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Split a ragged [N, ...] tensor into one view per row."""
    return torch.split(values, lengths.tolist())


def row_index(lengths: Tensor, token_count: int | None = None) -> Tensor:
    """Return the row number of each token: [N] int64.

    ``token_count`` is N. Without it, N is computed from ``lengths``; on a GPU the host waits for the result.
    """
    rows = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=token_count)


def token_index(lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the positions of all tokens of ``rows`` [b] int64, row after row: [n] int64.

    For a tensor with several items per token, pass the number of items of each token as ``lengths`` [N] and
    the token positions as ``rows``. The result is then the positions of all items of these tokens.
    """
    counts = lengths[rows]
    source_start = (lengths.cumsum(0) - lengths)[rows]
    result_start = counts.cumsum(0) - counts

    # All tokens of a row have the same distance between their index in the result and in the batch.
    shift = source_start - result_start
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)


def row_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """Count the tokens of each row where a [N] bool mask is true: [B] int64."""
    return torch.zeros(len(lengths), dtype=torch.long).index_add_(0, row_index(lengths), mask.long())


# Ragged per token: `support` holds `support_sizes[t]` token ids for token t.
_SUPPORT: Mapping[str, str] = {"support": "support_sizes"}


def turn_starts(rollouts: Rollouts) -> Tensor:
    """Mark the first token of each turn of the policy: [N] bool.

    A turn starts where the mask changes to true, and at the first token of a row without a prompt.
    """
    mask = rollouts.response_mask
    follows_response = torch.cat([torch.zeros(min(1, len(mask)), dtype=torch.bool), mask[:-1]])

    # The token before the first token of a row belongs to another row.
    row_starts = rollouts.lengths.cumsum(0) - rollouts.lengths
    follows_response[row_starts[rollouts.lengths > 0]] = False
    return mask & ~follows_response


def observation_token_counts(rollouts: Rollouts) -> Tensor:
    """Count the environment's tokens of each row, which follow the first turn of the policy: [B] int64."""
    # Number of turns that started up to each token, over all rows.
    turn_count = turn_starts(rollouts).long().cumsum(0)

    # Number of turns in earlier rows: tokens with a larger count are after the first turn of their own row.
    row_starts = rollouts.lengths.cumsum(0) - rollouts.lengths
    count_before = torch.cat([torch.zeros(1, dtype=torch.long), turn_count])
    earlier_turns = count_before[row_starts]
    after_first_turn = turn_count > earlier_turns[row_index(rollouts.lengths)]
    return row_counts(after_first_turn & ~rollouts.response_mask, rollouts.lengths)


def tokens_toward_limit(rollouts: Rollouts) -> Tensor:
    """Count the tokens of each row that count towards its ``max_response_tokens``: [B] int64.

    These are the policy's tokens, the environment's tokens after the first turn of the policy, and the
    dropped tokens of an observation that did not fit.

    Example: the count is 9 for 3 sampled tokens, an observation of 4 tokens, and 2 more sampled tokens.
    Prompt tokens are not counted.
    """
    counts = row_counts(rollouts.response_mask, rollouts.lengths) + observation_token_counts(rollouts)
    if rollouts.outcomes is None:
        return counts

    # A row without an outcome has not ended, so nothing was dropped from it.
    dropped = [0 if outcome is None else outcome.dropped_tokens for outcome in rollouts.outcomes]
    return counts + torch.tensor(dropped)


def _select(values: Tensor | None, index: Tensor) -> Tensor | None:
    """Index an optional tensor; return None unchanged."""
    return None if values is None else values[index]


class _RaggedBatch:
    """Base class of the ragged batch types, with selection, concatenation and device copies of their rows."""

    TOKEN_FIELDS: tuple[str, ...] = ()
    """Names of the tensors [N, ...]."""
    ROW_FIELDS: tuple[str, ...] = ()
    """Names of the tensors [B]."""
    TUPLE_FIELDS: tuple[str, ...] = ()
    """Names of the tuples of length B."""
    ITEM_FIELDS: Mapping[str, str] = MappingProxyType({})
    """Name of a tensor with several items per token -> name of the token field with the number of items."""
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, ids: Sequence[int]):
        """Return a batch of the rows with the row numbers ``ids``, in the order of ``ids``."""
        ids = list(ids)
        row_ids = torch.tensor(ids, dtype=torch.long)
        token_positions = token_index(self.lengths, row_ids)

        # Optional fields that are None stay None.
        changes: dict[str, Any] = {}
        for name in self.TOKEN_FIELDS:
            changes[name] = _select(getattr(self, name), token_positions)
        for name, count_name in self.ITEM_FIELDS.items():
            value = getattr(self, name)
            if value is not None:
                value = value[token_index(getattr(self, count_name), token_positions)]
            changes[name] = value
        for name in self.ROW_FIELDS:
            changes[name] = _select(getattr(self, name), row_ids)
        for name in self.TUPLE_FIELDS:
            value = getattr(self, name)
            changes[name] = None if value is None else tuple(value[row] for row in ids)

        return replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def to(self, device: torch.device):
        """Return the batch with its tensors on ``device``."""
        tensors: dict[str, Any] = {}
        for name in (*self.TOKEN_FIELDS, *self.ITEM_FIELDS, *self.ROW_FIELDS):
            value = getattr(self, name)
            if value is not None:
                tensors[name] = value.to(device)
        return replace(self, **tensors)  # pyright: ignore[reportArgumentType]

    @classmethod
    def concatenate(cls, batches: Sequence[Any]):
        """Concatenate batches; a tensor field must be set in all of them or in none."""
        concatenated_fields: dict[str, Any] = {}
        for name in (*cls.TOKEN_FIELDS, *cls.ITEM_FIELDS, *cls.ROW_FIELDS):
            values = [getattr(batch, name) for batch in batches]
            concatenated_fields[name] = None if values[0] is None else torch.cat(values)

        # A tuple field may be None in some batches: their rows get None.
        for name in cls.TUPLE_FIELDS:
            values = [getattr(batch, name) for batch in batches]
            if all(value is None for value in values):
                concatenated_fields[name] = None
                continue
            row_values: list[Any] = []
            for value, batch in zip(values, batches, strict=True):
                row_values.extend(value or (None,) * len(batch))
            concatenated_fields[name] = tuple(row_values)

        # Fields that are not per row are taken from the first batch.
        names = [item.name for item in fields(cls)]  # pyright: ignore[reportArgumentType]
        other_fields = {name: getattr(batches[0], name) for name in names if name not in concatenated_fields}
        return cls(**concatenated_fields, **other_fields)


@dataclass(frozen=True)
class PromptBatch(_RaggedBatch):
    """P prompts as tokens, with the data that rewards read.

    Example: two prompts of 2 and 3 tokens have ``tokens=[5, 7, 5, 8, 9]``, ``lengths=[2, 3]``,
    ``prompt_ids=[0, 1]``, ``tasks=("math", "math")``, ``ground_truths=("4", "12")``.
    """

    tokens: Tensor
    """[N] int64, token ids."""
    lengths: Tensor
    """[P] int64, number of tokens of each prompt."""
    prompt_ids: Tensor
    """[P] int64, position in the data set."""
    tasks: tuple[str, ...]
    """P task names."""
    prompts: tuple[str, ...]
    """Texts of the P prompts."""
    ground_truths: tuple[Any, ...]
    """P reference answers of any type."""
    metadata: tuple[Mapping[str, Any], ...]
    """P mappings: the remaining fields of each record."""
    sampling: tuple[SamplingParameters, ...]
    """Sampling parameters of each of the P prompts."""
    profiles: tuple[str, ...] | None = None
    """P names of sampling profiles; a name without a profile uses the rollout's settings. None uses each
    prompt's task as the name."""
    sources: tuple[str, ...] | None = None
    """P names of the prompts' sources in `data.sources`; None if the prompts come from another data set."""
    template_kwargs: tuple[Mapping[str, Any], ...] | None = None
    """P mappings of arguments for the chat template that renders the prompt; None for no arguments."""

    TOKEN_FIELDS = ("tokens",)
    ROW_FIELDS = ("lengths", "prompt_ids")
    TUPLE_FIELDS = (
        "tasks", "prompts", "ground_truths", "metadata", "sampling",
        "profiles", "sources", "template_kwargs",
    )  # fmt: skip

    @property
    def profile_names(self) -> tuple[str, ...]:
        """Return the name of each prompt's sampling profile, which defaults to the prompt's task."""
        # Prompts from an older checkpoint have None in place of a name.
        profiles = self.profiles or (None,) * len(self)
        return tuple(profile or task for profile, task in zip(profiles, self.tasks, strict=True))

    def with_offset(self, offset: int) -> PromptBatch:
        """Return the prompts with ``offset`` added to every id of ``prompt_ids``."""
        return replace(self, prompt_ids=self.prompt_ids + offset)

    def repeat(self, samples: int) -> PromptBatch:
        """Repeat each prompt ``samples`` times; the copies of a prompt are consecutive rows."""
        row_ids: list[int] = []
        for row in range(len(self)):
            row_ids.extend([row] * samples)
        return self.rows(row_ids)


@dataclass(frozen=True)
class Rollouts(_RaggedBatch):
    """B sampled rows: prompt and response tokens with the engine's log-probs.

    In a conversation with an environment, the environment's tokens are between the response tokens.

    Example: one prompt of 2 tokens with responses of 1 and 2 tokens has ``lengths=[3, 4]``, ``group=[0, 0]``,
    ``response_mask=[F, F, T,  F, F, T, T]``, ``finish_reason=[FINISH_STOP, FINISH_LENGTH]``.
    """

    tokens: Tensor
    """[N] int64, token ids."""
    lengths: Tensor
    """[B] int64, tokens of each row."""
    response_mask: Tensor
    """[N] bool, true on response tokens."""
    rollout_log_probs: Tensor
    """[N] float32, natural log at the sampling temperature; 0 on prompt tokens."""
    group: Tensor
    """[B] int64, equal for the samples of one prompt."""
    finish_reason: Tensor
    """[B], ``FINISH_*`` or ``UNFINISHED``."""
    policy_version: Tensor
    """[B] int64, version of the weights that sampled the row's oldest token."""
    temperature: Tensor
    """[B] float32, sampling temperature; that of the first token if ``rules`` change it over tokens."""
    token_versions: Tensor | None = None
    """[N] int32, version of the weights that sampled each token, -1 on prompt tokens; None if each row was
    sampled by one version."""
    support_sizes: Tensor | None = None
    """[N] int32, number of ids in ``support`` for each token; 0 if no token was filtered out."""
    support: Tensor | None = None
    """[K] int32, token ids that passed top-p, top-k and min-p, concatenated over the tokens;
    ``rollout_log_probs`` are normalised over them."""
    experts: Tensor | None = None
    """[N, layers, k] int16, experts that the engine routed each token to; -1 if the engine reported none."""
    max_response_tokens: Tensor | None = None
    """[B] int64, length limit of each row in tokens, see `tokens_toward_limit`; None if unlimited."""
    outcomes: tuple[Outcome | None, ...] | None = None
    """B outcomes of episodes, None for rows that have not ended; None if there is no environment."""
    rules: tuple[LogitRules | None, ...] | None = None
    """B `LogitRules`, with None for a row without rules; None if no row has rules."""

    TOKEN_FIELDS = (
        "tokens", "response_mask", "rollout_log_probs", "token_versions", "support_sizes", "experts",
    )  # fmt: skip
    ITEM_FIELDS = _SUPPORT
    ROW_FIELDS = (
        "lengths", "group", "finish_reason", "policy_version", "temperature", "max_response_tokens",
    )  # fmt: skip
    TUPLE_FIELDS = ("outcomes", "rules")


@dataclass(frozen=True)
class Scores:
    """Rewards, log-probs and values of the rows of one `Rollouts`.

    Optional fields are None if no role computed them.

    Example: two rows whose second reward failed have ``rewards=[1.0, nan]``, ``valid=[True, False]``,
    ``components={}``.
    """

    rewards: Tensor
    """[B] float32; NaN, never 0, for a reward that failed."""
    valid: Tensor
    """[B] bool, false for a reward that failed."""
    components: Mapping[str, Tensor]
    """Name -> [B], the reward's components."""
    old_log_probs: Tensor | None = None
    """[N] float32, the actor's log-probs before the step's first update."""
    ref_log_probs: Tensor | None = None
    """[N] float32, the reference policy's log-probs."""
    teacher_log_probs: Tensor | None = None
    """[N] float32, log-probs of the distillation teacher."""
    teacher_top_ids: Tensor | None = None
    """[N, k] int32, the teacher's k most likely token ids at each position, -1 in unused slots."""
    teacher_top_log_probs: Tensor | None = None
    """[N, k + 1] float32, the teacher's log-probs of ``teacher_top_ids``; the last is the log of the total
    probability of all other tokens."""
    values: Tensor | None = None
    """[N] float32, the critic's values."""
    entropy: Tensor | None = None
    """[N] float32, entropy of the old policy in nats."""
    squared_probs: Tensor | None = None
    """[N] float32, sum over the vocabulary of the old policy's squared probabilities at each position."""
    experts: Tensor | None = None
    """[N, layers, k] int16, experts of the actor's forward pass, for updates that replay the routing."""
    baseline_rewards: Tensor | None = None
    """[B] float32, reward of a greedy response to the row's prompt (ReMax)."""
    baseline_lengths: Tensor | None = None
    """[B] int64, tokens of the greedy response, counted as in `tokens_toward_limit`."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [N] float32, outputs of roles without a field here, such as a reference's ``ref_entropy``."""


@dataclass(frozen=True)
class TrainBatch(_RaggedBatch):
    """Rows to train on, with loss weights that already have their global denominators.

    The loss of a mini-batch is ``sum_t loss_weights[t] * loss[t]`` over *all* its tokens on all ranks, so any
    split into micro-batches, data-parallel ranks or packed rows gives the same gradient.

    Example: two rows of 1 prompt token with 1 and 2 response tokens under token-mean have
    ``lengths=[2, 3]``, ``response_mask=[F, T,  F, T, T]``, ``loss_weights=[0, 1/3,  0, 1/3, 1/3]``.
    """

    tokens: Tensor
    """[N] int64, token ids."""
    lengths: Tensor
    """[B] int64, tokens of each row."""
    response_mask: Tensor
    """[N] bool, response tokens in the loss: without rejected tokens and excluded rows."""
    loss_weights: Tensor
    """[N] float32, weights of the policy loss; 0 outside ``response_mask``."""
    temperature: Tensor
    """[B] float32, as in `Rollouts`."""
    advantages: Tensor | None = None
    """[N] float32, weights of the policy gradient."""
    returns: Tensor | None = None
    """[N] float32, targets of the critic."""
    old_log_probs: Tensor | None = None
    """[N] float32, log-probs of the policy before the step's first update."""
    rollout_log_probs: Tensor | None = None
    """[N] float32, the engine's log-probs."""
    correction: Tensor | None = None
    """[N] float32, importance weights of the rollout-to-trainer mismatch."""
    ref_log_probs: Tensor | None = None
    """[N] float32, the reference policy's log-probs."""
    teacher_top_ids: Tensor | None = None
    """[N, k] int32, as in `Scores`."""
    teacher_top_log_probs: Tensor | None = None
    """[N, k + 1] float32, as in `Scores`."""
    old_values: Tensor | None = None
    """[N] float32, the critic's values before the step's first update."""
    value_weights: Tensor | None = None
    """[N] float32, weights of the value loss; 0 outside ``response_mask``."""
    selected: Tensor | None = None
    """[N] bool, tokens with a different policy loss, selected by statistics of the complete mini-batch."""
    policy_mask: Tensor | None = None
    """[N] bool, tokens with a policy loss; None if every token of ``response_mask`` has a policy loss."""
    nll_weights: Tensor | None = None
    """[N] float32, weights of the imitation loss."""
    group: Tensor | None = None
    """[B] int64, equal for the samples of one prompt, which stay in one mini-batch."""
    response_counts: Tensor | None = None
    """[B] int64, number of response tokens before rejection; 0 for a failed row."""
    support_sizes: Tensor | None = None
    """[N] int32, as in `Rollouts`."""
    support: Tensor | None = None
    """[K] int32, as in `Rollouts`."""
    experts: Tensor | None = None
    """[N, layers, k] int16, as in `Rollouts`."""
    position: Tensor | None = None
    """[B] int64, index of the row among all rows of the step."""
    rules: tuple[LogitRules | None, ...] | None = None
    """B rules, as in `Rollouts`."""

    TOKEN_FIELDS = (
        "tokens", "response_mask", "loss_weights", "advantages", "returns", "old_log_probs",
        "rollout_log_probs", "correction", "ref_log_probs", "old_values", "value_weights", "selected",
        "policy_mask", "nll_weights", "support_sizes", "experts", "teacher_top_ids", "teacher_top_log_probs",
    )  # fmt: skip
    ITEM_FIELDS = _SUPPORT
    ROW_FIELDS = ("lengths", "temperature", "group", "response_counts", "position")
    TUPLE_FIELDS = ("rules",)


@dataclass(frozen=True)
class TensorBox:
    """Location of one box of a named canonical (Hugging Face) tensor in one rank's storage.

    The box is ``start[d] <= i_d < start[d] + size[d]`` of the tensor; element i is at
    ``offset + sum_d (i_d - start[d]) * stride[d]`` of the local parameter.

    Example: rank 1 of tensor-parallel size 2 holds the lower half of a [8, 4] weight:
    ``TensorBox("w", start=(4, 0), size=(4, 4), rank=1, storage="w_local", offset=0, stride=(4, 1))``.
    """

    name: str
    """Name of the canonical tensor."""
    start: tuple[int, ...]
    """First index in each dimension of the tensor."""
    size: tuple[int, ...]
    """Elements in each dimension."""
    rank: int
    """Rank that holds the box."""
    storage: str
    """Name of the rank's local parameter."""
    offset: int
    """First element of the box in the local parameter, in elements."""
    stride: tuple[int, ...]
    """Step of each dimension in the local parameter, in elements."""
