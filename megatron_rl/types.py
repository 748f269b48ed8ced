"""The values that cross between roles: ragged batches of rows, with every field's shape.

Letters: P prompts, G samples per prompt, B = P*G rows, N tokens in all rows together.
A *row* is one sequence (prompt followed by response). Ragged tensors are concatenated rows;
``lengths`` [B] says where one ends. Nothing is padded.

Every per-token tensor is aligned with the token it describes:
``log_probs[t] = log p(token[t] | token[:t])``; the first token of a row has value 0 there.
All tensors live on the CPU here; roles move what they need to their device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SamplingParameters(NamedTuple):
    """How one prompt's responses are sampled: ``top_p=1``, ``top_k=0`` and ``min_p=0`` switch filters off.

    ``temperature=0`` means greedy decoding.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0

    def greedy(self) -> SamplingParameters:
        """Return the same with greedy decoding, which no filter changes."""
        return self._replace(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


FINISH_STOP = 0
"""The response ended with a stop token."""
FINISH_LENGTH = 1
"""The response reached ``max_response_tokens``, or the episode its last turn."""
FINISH_FAILED = 2
"""The engine or the environment failed on this row; the row is invalid everywhere downstream."""
UNFINISHED = 3
"""The response was interrupted and is to be continued; no learner sees such a row."""


class Outcome(NamedTuple):
    """Say what an environment made of an episode: a reward with components, None where others judge, or a
    ``failure`` by its reason, with a message. ``calls`` are the tools' calls of each turn of the policy,
    where a parser finds any. ``dropped_tokens`` counts the tokens of an observation that found no room in
    the row, and so ended the episode.
    """

    reward: float | None = None
    components: Mapping[str, float] = {}
    failure: str | None = None
    message: str = ""
    calls: tuple[Sequence[Mapping[str, Any]], ...] = ()
    dropped_tokens: int = 0


def split_rows(values: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Split a ragged [N, ...] tensor into one view per row."""
    return torch.split(values, lengths.tolist())


def row_index(lengths: Tensor) -> Tensor:
    """Return for each token the number of its row: [N] int64."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def token_index(lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the positions of all tokens of ``rows`` [b] int64, row after row: [n] int64.

    Likewise of all items of tokens, where ``lengths`` [N] counts the items of each token.
    """
    counts = lengths[rows]
    first = (lengths.cumsum(0) - lengths)[rows]
    shift = first - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)


def row_counts(mask: Tensor, lengths: Tensor) -> Tensor:
    """Return how many tokens of each row a [N] bool mask marks: [B] int64."""
    return torch.zeros(len(lengths), dtype=torch.long).index_add_(0, row_index(lengths), mask.long())


_SUPPORT: Mapping[str, str] = {"support": "support_sizes"}


def turn_starts(rollouts: Rollouts) -> Tensor:
    """Return which tokens begin a turn of the policy: [N] bool. A row begins with its prompt."""
    mask = rollouts.response_mask
    before = torch.cat([torch.zeros(min(1, len(mask)), dtype=torch.bool), mask[:-1]])
    return mask & ~before


def observed_counts(rollouts: Rollouts) -> Tensor:
    """Return how many tokens of each row stand behind its first turn and are not the policy's: [B] int64."""
    starts = turn_starts(rollouts).long().cumsum(0)
    ends = rollouts.lengths.cumsum(0)
    earlier = torch.cat([torch.zeros(1, dtype=torch.long), starts])[ends - rollouts.lengths]
    begun = starts > earlier[row_index(rollouts.lengths)]
    return row_counts(begun & ~rollouts.response_mask, rollouts.lengths)


def limited_counts(rollouts: Rollouts) -> Tensor:
    """Return the tokens of each row that count towards its ``max_response_tokens``: [B] int64.

    These are the policy's own tokens, those that an environment added between and behind them, and those of
    an observation that had no room left.

    Example: a row of a prompt, 3 sampled tokens, an observation of 4 and 2 more sampled tokens counts 9.
    """
    counts = row_counts(rollouts.response_mask, rollouts.lengths) + observed_counts(rollouts)
    if rollouts.outcomes is not None:
        counts = counts + torch.tensor(
            [0 if one is None else one.dropped_tokens for one in rollouts.outcomes]
        )
    return counts


class _Rows:
    """Row selection shared by the ragged batch types below.

    ``TOKEN_FIELDS`` are [N], ``ROW_FIELDS`` are [B] tensors, ``TUPLE_FIELDS`` are tuples of length B.
    ``ITEM_FIELDS`` hold several items a token, token after token: name -> the token field that counts them.
    """

    TOKEN_FIELDS: tuple[str, ...] = ()
    ROW_FIELDS: tuple[str, ...] = ()
    TUPLE_FIELDS: tuple[str, ...] = ()
    ITEM_FIELDS: Mapping[str, str] = MappingProxyType({})
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, ids: Sequence[int]):
        """Return the batch that holds the rows ``ids``, in that order."""
        ids = list(ids)
        index = torch.tensor(ids, dtype=torch.long)
        changes: dict[str, Any] = {}
        tokens = token_index(self.lengths, index)
        for name in self.TOKEN_FIELDS:
            value = getattr(self, name)
            changes[name] = None if value is None else value[tokens]
        for name, counts in self.ITEM_FIELDS.items():
            value = getattr(self, name)
            changes[name] = None if value is None else value[token_index(getattr(self, counts), tokens)]
        for name in self.ROW_FIELDS:
            value = getattr(self, name)
            changes[name] = None if value is None else value[index]
        for name in self.TUPLE_FIELDS:
            value = getattr(self, name)
            changes[name] = None if value is None else tuple(value[row] for row in ids)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def to(self, device: torch.device):
        """Return the batch with its tensors on ``device``."""
        names = (*self.TOKEN_FIELDS, *self.ITEM_FIELDS, *self.ROW_FIELDS)
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{k: None if v is None else v.to(device) for k, v in tensors.items()})  # pyright: ignore[reportArgumentType]

    @classmethod
    def concatenate(cls, parts: Sequence[Any]):
        """Join batches row after row; a field that is None in one part must be None in all."""
        changes: dict[str, Any] = {}
        for name in (*cls.TOKEN_FIELDS, *cls.ITEM_FIELDS, *cls.ROW_FIELDS):
            values = [getattr(part, name) for part in parts]
            changes[name] = None if values[0] is None else torch.cat(values)
        for name in cls.TUPLE_FIELDS:
            values = [getattr(part, name) for part in parts]
            known = [value or (None,) * len(part) for value, part in zip(values, parts, strict=True)]
            joined = tuple(item for value in known for item in value)
            changes[name] = None if all(value is None for value in values) else joined
        rest = {f.name: getattr(parts[0], f.name) for f in fields(cls) if f.name not in changes}  # pyright: ignore[reportArgumentType]
        return cls(**changes, **rest)


@dataclass(frozen=True)
class PromptBatch(_Rows):
    """Hold P prompts as tokens, with what rewards need to judge their responses.

    ``tokens`` [N] int64, ``lengths`` [P] int64, ``prompt_ids`` [P] int64 (position in the data set),
    ``tasks`` P task names, ``prompts`` P prompt texts, ``ground_truths`` P values of any type,
    ``metadata`` P mappings, ``sampling`` P sampling parameters.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_ids: Tensor
    tasks: tuple[str, ...]
    prompts: tuple[str, ...]
    ground_truths: tuple[Any, ...]
    metadata: tuple[Mapping[str, Any], ...]
    sampling: tuple[SamplingParameters, ...]

    TOKEN_FIELDS = ("tokens",)
    ROW_FIELDS = ("lengths", "prompt_ids")
    TUPLE_FIELDS = ("tasks", "prompts", "ground_truths", "metadata", "sampling")

    def repeat(self, samples: int) -> PromptBatch:
        """Repeat each prompt ``samples`` times, copies of one prompt next to each other."""
        return self.rows([row for row in range(len(self)) for _ in range(samples)])


@dataclass(frozen=True)
class Rollouts(_Rows):
    """Hold B sampled rows: prompt and response tokens with the engine's own log-probs.

    ``tokens`` [N] int64; ``lengths`` [B]; ``response_mask`` [N] bool, true on response tokens;
    ``rollout_log_probs`` [N] float32, natural log at the sampling temperature, 0 on prompt tokens;
    ``group`` [B] int64, equal for samples of one prompt; ``finish_reason`` [B] (``FINISH_*``);
    ``policy_version`` [B] int64, the weights' version that sampled the row's oldest token; ``temperature``
    [B] float32. ``token_versions`` [N] int32 has the version of every token, -1 on prompt tokens, where a row
    may have been continued by newer weights; without it all tokens of a row are of one version.
    ``support`` [K] int32 has the token ids that top-p, top-k and min-p left to each token, of which
    ``rollout_log_probs`` are the distribution; ``support_sizes`` [N] int32 counts them, 0 where nothing was
    filtered out. ``experts`` [N, layers, k] int16 has those that the engine sent each token to, -1 where it
    did not say. ``max_response_tokens`` [B] int64 is the limit under which a row was sampled, see
    `limited_counts` for what it counts; None where nobody stated one.

    Where rows are conversations with an environment, what it said lies between the response tokens, and
    ``outcomes`` are B outcomes, None for rows that have not ended.
    """

    tokens: Tensor
    lengths: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    group: Tensor
    finish_reason: Tensor
    policy_version: Tensor
    temperature: Tensor
    token_versions: Tensor | None = None
    support_sizes: Tensor | None = None
    support: Tensor | None = None
    experts: Tensor | None = None
    max_response_tokens: Tensor | None = None
    outcomes: tuple[Outcome | None, ...] | None = None

    TOKEN_FIELDS = (
        "tokens", "response_mask", "rollout_log_probs", "token_versions", "support_sizes", "experts",
    )  # fmt: skip
    ITEM_FIELDS = _SUPPORT
    ROW_FIELDS = (
        "lengths", "group", "finish_reason", "policy_version", "temperature", "max_response_tokens",
    )  # fmt: skip
    TUPLE_FIELDS = ("outcomes",)


@dataclass(frozen=True)
class Scores:
    """Hold what the judging roles say of the rows of one `Rollouts`.

    ``rewards`` [B] float32 and ``valid`` [B] bool: a row whose reward failed is invalid and its reward
    is NaN, never 0. ``components`` name -> [B]. ``old_log_probs``, ``ref_log_probs``, ``values`` [N]
    float32, each None where no role computes it; ``entropy`` [N] of the old policy. ``experts`` as in
    `Rollouts`, of the actor's pass, where updates are to repeat it. ``columns`` name -> [N] float32 are the
    outputs of roles that have no field here, such as the ``ref_entropy`` of a reference.
    ``baseline_rewards`` [B] is the reward of a greedy response to the row's prompt, for ReMax, and
    ``baseline_lengths`` [B] int64 its tokens, counted as `limited_counts` does.
    """

    rewards: Tensor
    valid: Tensor
    components: Mapping[str, Tensor]
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    entropy: Tensor | None = None
    experts: Tensor | None = None
    baseline_rewards: Tensor | None = None
    baseline_lengths: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainBatch(_Rows):
    """Hold what a learner needs for rows whose loss weights are already global.

    ``loss_weights`` [N] float32 carries the loss aggregation: the loss of a mini-batch is
    ``sum_t loss_weights[t] * loss[t]`` over *all* its tokens on all ranks, so any split into
    micro-batches, data-parallel ranks or packed rows gives the same gradient. It is 0 on prompt
    tokens, on rejected tokens and on rows that do not take part. ``value_weights`` [N] is the same
    for the value loss. ``response_mask`` [N] bool marks the tokens that take part.
    ``advantages``, ``returns``, ``old_log_probs``, ``rollout_log_probs``, ``correction`` (importance
    weights of the rollout-to-trainer mismatch), ``ref_log_probs``, ``old_values`` are [N] float32;
    ``selected`` [N] bool marks tokens that a policy loss treats apart, chosen with statistics of the
    whole mini-batch; ``nll_weights`` [N] weigh an imitation loss beside it. ``temperature`` is [B];
    ``group`` [B] int64 keeps samples of one prompt in one mini-batch; ``response_counts`` [B] int64
    counts the response tokens before any were rejected, 0 for a failed row; ``position`` [B] int64 is the
    row's place among all of the step's. ``support_sizes``, ``support`` and ``experts`` as in `Rollouts`.
    """

    tokens: Tensor
    lengths: Tensor
    response_mask: Tensor
    loss_weights: Tensor
    temperature: Tensor
    advantages: Tensor | None = None
    returns: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    correction: Tensor | None = None
    ref_log_probs: Tensor | None = None
    old_values: Tensor | None = None
    value_weights: Tensor | None = None
    selected: Tensor | None = None
    nll_weights: Tensor | None = None
    group: Tensor | None = None
    response_counts: Tensor | None = None
    support_sizes: Tensor | None = None
    support: Tensor | None = None
    experts: Tensor | None = None
    position: Tensor | None = None

    TOKEN_FIELDS = (
        "tokens", "response_mask", "loss_weights", "advantages", "returns", "old_log_probs",
        "rollout_log_probs", "correction", "ref_log_probs", "old_values", "value_weights", "selected",
        "nll_weights", "support_sizes", "experts",
    )  # fmt: skip
    ITEM_FIELDS = _SUPPORT
    ROW_FIELDS = ("lengths", "temperature", "group", "response_counts", "position")


@dataclass(frozen=True)
class TensorBox:
    """Say where one box of a named canonical (Hugging Face) tensor lies in one rank's storage.

    The box is ``start[d] <= i_d < start[d] + size[d]`` in the tensor ``name``; its elements lie in the
    local parameter ``storage`` at ``offset + sum_d (i_d - start[d]) * stride[d]`` (in elements).
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    rank: int
    storage: str
    offset: int
    stride: tuple[int, ...]
