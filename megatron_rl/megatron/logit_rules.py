"""Rules that changed the logits before sampling, applied to tiles of the trainer's logits.

The selected tokens of a micro-batch are the tokens whose log-probs are computed. The selected tokens of one
row (sequence) are consecutive, and the rules of a row depend only on the position in the row. A micro-batch
therefore has one `RowRules` per row. The rules change the logits of the selected tokens row by row, in place.

The definitions and their order are vLLM's. A bias is added to the logits, and `BANNED` is added to the logits
of banned tokens. The repetition penalty divides the positive logits of earlier tokens, prompt included, and
multiplies their negative logits. Frequency and presence penalties are subtracted from the logits of earlier
tokens of the response. Temperature and filters are applied after these rules.

A temperature that changes over the tokens of a turn is one value per token, see `token_temperatures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_rl.types import BANNED, LogitRules, SamplingParameters


@dataclass(frozen=True)
class Penalties:
    """Repetition, presence and frequency penalties of one row, with the tokens that they count.

    Example, for the last two tokens of a row with a prompt of one token: ``Penalties(tokens=[5, 6, 6, 5],
    tokens_before=[2, 3], prompt_tokens=1, repetition=1.2, presence=0.0, frequency=0.0)``.
    """

    tokens: Tensor
    """[m] int64 token ids of the row."""
    tokens_before: Tensor
    """[count] int64 number of the row's tokens before each of its selected tokens."""
    prompt_tokens: int
    """Number of tokens before the response."""
    repetition: float
    """Divisor of the positive logits of all earlier tokens, and factor of their negative logits."""
    presence: float
    """Value that is subtracted from the logits of earlier tokens of the response."""
    frequency: float
    """Value that is subtracted for each occurrence in the response."""

    def apply_penalties(
        self,
        logits: Tensor,
        selection: slice,
        first_token_id: int,
        slope: Tensor | None,
    ) -> None:
        """Apply the penalties to logits [n, columns] of one row (sequence), in place.

        The row's selected tokens are the tokens whose log-probs are computed. ``logits`` belong to n
        consecutive selected tokens; ``selection`` is the range of their indices among all selected tokens of
        the row. ``first_token_id`` is the token id of the first column. If ``slope`` [n, columns] is not
        None, it is multiplied by the derivative of the changed logits with respect to the original logits.
        """
        tokens_before = self.tokens_before[selection]
        columns = self.tokens - first_token_id
        if self.repetition != 1:
            is_earlier = _count_occurrences(columns, tokens_before, logits) > 0
            factor = torch.full_like(logits, self.repetition)
            factor.masked_fill_(logits > 0, 1 / self.repetition).masked_fill_(~is_earlier, 1.0)
            logits.mul_(factor)
            if slope is not None:
                slope.mul_(factor)

        if self.presence != 0 or self.frequency != 0:
            response_columns = columns[self.prompt_tokens :]
            counts = _count_occurrences(response_columns, tokens_before - self.prompt_tokens, logits)
            logits.sub_(counts.sign() * self.presence).sub_(counts.mul_(self.frequency))


def _count_occurrences(columns: Tensor, tokens_before: Tensor, logits: Tensor) -> Tensor:
    """Count how often each token of this vocabulary shard occurs in the row before each selected position.

    ``columns`` [m] are the columns of the row's m tokens in ``logits`` [n, V / tp]; a negative or too large
    number is a token of another shard, which is not counted. ``tokens_before`` [n], ascending, is the
    number of the row's tokens before each position. The result [n, V / tp] has the dtype of ``logits``.
    """
    # A token is counted at all positions after it, from `first_position` on. An extra row and an extra column
    # collect tokens after the last position and tokens of other shards.
    num_positions, num_columns = logits.shape
    token_index = torch.arange(len(columns), device=columns.device)
    first_position = torch.searchsorted(tokens_before, token_index, right=True)
    in_shard = (columns >= 0) & (columns < num_columns)
    counted_columns = torch.where(in_shard, columns, num_columns)

    counts = logits.new_zeros(num_positions + 1, num_columns + 1)
    counts.index_put_((first_position, counted_columns), counts.new_ones(()), accumulate=True)
    return counts[:num_positions, :num_columns].cumsum(0)


@dataclass(frozen=True)
class RepeatedNgrams:
    """Tokens that would repeat an n-gram of one row, for each of its selected positions.

    Example, for a row with 2 selected tokens, where the second must not be token 7:
    ``RepeatedNgrams(selected_index=[1], tokens=[7], offsets=[0, 0, 1])``.
    """

    selected_index: Tensor
    """[p] int64, ascending: index of the selected token at which each id of ``tokens`` is banned."""
    tokens: Tensor
    """[p] int64 ids of banned tokens; a selected token may have the same id several times."""
    offsets: numpy.ndarray
    """[count + 1] index in ``tokens`` of each selected token's first id; in host memory, so that slicing does
    not read the device."""

    def ban_tokens(self, logits: Tensor, selection: slice, first_token_id: int) -> None:
        """Add `BANNED` to the logits of tokens that would repeat an n-gram, in place.

        A row's selected tokens are the tokens whose log-probs are computed. ``logits`` [n, columns] belong to
        n consecutive selected tokens; ``selection`` is the range of their indices among all selected tokens
        of the row. ``first_token_id`` is the token id of the first column.
        """
        first, end = self.offsets[[selection.start, selection.stop]].tolist()
        if first == end:
            return

        # Add 0 for columns of other shards, as in `_add_bias`.
        columns = self.tokens[first:end] - first_token_id
        in_shard = (columns >= 0) & (columns < logits.shape[1])
        bias = torch.where(in_shard, BANNED, 0.0).to(logits.dtype)
        rows = self.selected_index[first:end] - selection.start
        logits.index_put_((rows, columns.clamp(0, logits.shape[1] - 1)), bias, accumulate=True)


def find_repeated_ngrams(tokens: Tensor, selected_positions: Tensor, ngram_size: int) -> RepeatedNgrams:
    """Find the tokens that would repeat an n-gram of the row at one of its selected positions.

    ``tokens`` [m] are the tokens of one row, ``selected_positions`` [count] the ascending positions of its
    selected tokens, and ``ngram_size`` is n, at least 2. At a position, a token is banned if the n - 1
    tokens before the position, followed by this token, already occur earlier in the row.
    """
    row_tokens = tokens.numpy()
    positions = selected_positions.numpy()
    if len(row_tokens) < ngram_size:
        no_pairs = torch.empty(0, dtype=torch.int64)
        return RepeatedNgrams(no_pairs, no_pairs, numpy.zeros(len(positions) + 1, numpy.int64))

    # Window w contains the n - 1 tokens from w on, and precedes the token at w + n - 1. Equal windows have
    # equal ids.
    windows = numpy.lib.stride_tricks.sliding_window_view(row_tokens[:-1], ngram_size - 1)
    _, window_ids = numpy.unique(windows, axis=0, return_inverse=True)

    # Sort windows by id, then by position: the earlier windows that equal a window come directly before it.
    sorted_windows = numpy.argsort(window_ids, kind="stable")
    sorted_ids = window_ids[sorted_windows]
    num_earlier = numpy.arange(len(sorted_windows)) - numpy.searchsorted(sorted_ids, sorted_ids)
    sorted_index = numpy.empty_like(sorted_windows)
    sorted_index[sorted_windows] = numpy.arange(len(sorted_windows))

    # Pair the window before each selected token with all earlier equal windows: their next tokens are banned.
    selected_windows = positions - (ngram_size - 1)
    has_window = selected_windows >= 0
    selected_indices = sorted_index[selected_windows[has_window]]
    num_pairs = numpy.zeros(len(positions), numpy.int64)
    num_pairs[has_window] = num_earlier[selected_indices]
    offsets = numpy.concatenate(([0], num_pairs.cumsum()))

    # For each pair, compute the index of the selected token and the start of the earlier window.
    pair_selected_index = numpy.repeat(numpy.arange(len(positions)), num_pairs)
    first_pair_indices = numpy.zeros(len(positions), numpy.int64)
    first_pair_indices[has_window] = selected_indices - num_earlier[selected_indices]
    index_in_pairs = numpy.arange(offsets[-1]) - offsets[pair_selected_index]
    earlier_windows = sorted_windows[first_pair_indices[pair_selected_index] + index_in_pairs]
    banned_tokens = row_tokens[earlier_windows + ngram_size - 1].astype(numpy.int64)
    return RepeatedNgrams(torch.from_numpy(pair_selected_index), torch.from_numpy(banned_tokens), offsets)


@dataclass(frozen=True)
class RowRules:
    """Rules that changed the logits of one row before sampling, for the row's selected tokens.

    Example, for 5 selected tokens whose first 2 must not be a stop token:
    ``RowRules(first=10, count=5, num_tokens_without_stop=2, bias_ids=[], bias=[], stop_ids=[7])``.
    """

    first: int
    """Index of the row's first selected token among the selected tokens of the micro-batch."""
    count: int
    """Number of the row's selected tokens."""
    num_tokens_without_stop: int
    """Number of the row's first selected tokens that must not be a stop token."""
    bias_ids: Tensor
    """[k] int64 token ids with a bias."""
    bias: Tensor
    """[k] float32 values that are added to the logits of ``bias_ids``."""
    stop_ids: Tensor
    """[s] int64 stop tokens, empty without a minimum length."""
    penalties: Penalties | None = None
    """Penalties of earlier tokens, or None if the row has none."""
    ngrams: RepeatedNgrams | None = None
    """Tokens that would repeat an n-gram, or None if n-grams may be repeated."""


def build_row_rules(
    rules: Sequence[LogitRules | None],
    lengths: Tensor,
    tokens: Tensor,
    selected_positions: Tensor,
) -> tuple[RowRules, ...] | None:
    """Return the rules of a micro-batch in CPU memory, or None if no row has rules.

    The selected tokens of a micro-batch are the tokens whose log-probs are computed. ``selected_positions``
    [n] are their ascending positions in ``tokens`` [N], the concatenated rows. ``rules`` and the row
    ``lengths`` [B] have one element per row.
    """
    if not any(rule is not None and rule.sampling.has_rules for rule in rules):
        return None

    # Index of each row's first selected token, and of the first selected token after the row.
    ends = lengths.cumsum(0)
    starts = ends - lengths
    first_selected, end_selected = torch.searchsorted(selected_positions, torch.stack((starts, ends)))

    tensors_by_sampling: dict[SamplingParameters, tuple[Tensor, Tensor, Tensor]] = {}
    row_rules = []
    for row, rule in enumerate(rules):
        first = int(first_selected[row])
        count = int(end_selected[row]) - first
        if rule is None or not rule.sampling.has_rules or not count:
            continue

        # Tensors that rows share are copied to the device once.
        sampling = rule.sampling
        if sampling not in tensors_by_sampling:
            tensors_by_sampling[sampling] = _make_rule_tensors(sampling)
        rule_tensors = tensors_by_sampling[sampling]

        # A token with index i in its row comes after i - prompt_tokens tokens of the response. Stop tokens
        # are banned until the response has its minimum length.
        row_start = int(starts[row])
        row_tokens = tokens[row_start : int(ends[row])]
        positions_in_row = selected_positions[first : first + count] - row_start
        min_length = rule.prompt_tokens + sampling.min_response_tokens
        num_tokens_without_stop = int((positions_in_row < min_length).sum())
        penalties = None
        if sampling.has_penalties:
            penalties = Penalties(
                row_tokens,
                positions_in_row,
                rule.prompt_tokens,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        ngrams = None
        if sampling.no_repeat_ngram_size:
            ngrams = find_repeated_ngrams(row_tokens, positions_in_row, sampling.no_repeat_ngram_size)
        row_rules.append(RowRules(first, count, num_tokens_without_stop, *rule_tensors, penalties, ngrams))
    return tuple(row_rules)


def token_temperatures(
    temperature: Tensor,
    lengths: Tensor,
    rules: Sequence[LogitRules | None],
) -> Tensor:
    """Return the sampling temperature of each token of a micro-batch: [N] float32.

    ``temperature`` [N] has the temperature of each token's row; ``lengths`` [B] and ``rules`` have one
    element per row. If the temperature changes within a turn, only the values at sampled tokens are
    meaningful.
    """
    temperatures = temperature.clone()
    for row_temperatures, rule in zip(temperatures.split(lengths.tolist()), rules, strict=True):
        if rule is None or not rule.sampling.temperature_tokens or not rule.turn_starts:
            continue
        # Position of each token in its turn, counted from the first token of the turn.
        starts = torch.tensor(rule.turn_starts)
        index = torch.arange(len(row_temperatures))
        turn = torch.searchsorted(starts, index, right=True) - 1
        position_in_turn = index - starts[turn.clamp(min=0)]

        # In float64, as engines compute it in Python.
        sampling = rule.sampling
        fraction = (position_in_turn.double() / sampling.temperature_tokens).clamp(0.0, 1.0)
        change = sampling.last_temperature - sampling.temperature
        row_temperatures.copy_(sampling.temperature + change * fraction)
    return temperatures


def _make_rule_tensors(sampling: SamplingParameters) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors ``bias_ids``, ``bias`` and ``stop_ids`` of a `RowRules`, in host memory."""
    bias_ids = [token_id for token_id, _ in sampling.logit_bias]
    bias = [token_bias for _, token_bias in sampling.logit_bias]

    # Only a minimum length bans stop tokens.
    stop_ids = sampling.stop_token_ids
    if not sampling.min_response_tokens:
        stop_ids = ()
    return (
        torch.tensor(bias_ids, dtype=torch.int64),
        torch.tensor(bias, dtype=torch.float32),
        torch.tensor(stop_ids, dtype=torch.int64),
    )


def scales_logits(rules: Sequence[RowRules]) -> bool:
    """Return whether a rule multiplies logits, as repetition penalties do; other rules add constants."""
    return any(row_rules.penalties is not None and row_rules.penalties.repetition != 1 for row_rules in rules)


def apply_rules(
    rules: Sequence[RowRules],
    logits: Tensor,
    first_index: int,
    first_token_id: int,
    slope: Tensor | None = None,
) -> None:
    """Apply the rules to the logits [n, columns] of n selected tokens of a micro-batch, in place.

    ``first_index`` is the index of the first of these n tokens among all selected tokens of the micro-batch.
    ``first_token_id`` is the token id of the first column. If ``slope`` [n, columns] is not None, it is
    multiplied by the derivative of the changed logits with respect to the original logits.
    """
    for row_rules in rules:
        # ``logits[first:end]`` belong to the row's selected tokens.
        first = max(row_rules.first - first_index, 0)
        end = min(row_rules.first + row_rules.count - first_index, len(logits))
        if first >= end:
            continue
        _add_bias(logits[first:end], row_rules.bias_ids - first_token_id, row_rules.bias)

        no_stop_end = min(row_rules.first + row_rules.num_tokens_without_stop - first_index, end)
        if no_stop_end > first:
            ban_bias = torch.full_like(row_rules.stop_ids, BANNED, dtype=torch.float32)
            _add_bias(logits[first:no_stop_end], row_rules.stop_ids - first_token_id, ban_bias)

        # The same range, counted from the row's first selected token.
        selection = slice(first + first_index - row_rules.first, end + first_index - row_rules.first)
        if row_rules.ngrams is not None:
            row_rules.ngrams.ban_tokens(logits[first:end], selection, first_token_id)
        if row_rules.penalties is not None:
            row_slope = None
            if slope is not None:
                row_slope = slope[first:end]
            row_rules.penalties.apply_penalties(logits[first:end], selection, first_token_id, row_slope)


def _add_bias(logits: Tensor, columns: Tensor, bias: Tensor) -> None:
    """Add ``bias`` [k] to the ``columns`` [k] of logits [n, V / tp], except for columns of other shards."""
    # Add 0 for columns of other shards. Selecting the columns of this shard by a mask instead would wait for
    # the device, since the number of selected columns is not known on the CPU.
    in_shard = (columns >= 0) & (columns < logits.shape[1])
    local_bias = torch.where(in_shard, bias, 0.0).to(logits.dtype)
    logits.index_add_(1, columns.clamp(0, logits.shape[1] - 1), local_bias.expand(len(logits), -1))
