"""Rules that changed the logits before sampling, applied to tiles of the trainer's logits.

A rule depends on the row and on the position in it, never on the weights, and a row's selected tokens follow
one another. So the rules of a micro-batch are one `RowRules` per row, and a tile of logits is changed row by
row, in place.

Definitions are vLLM's: a bias is added to the logits before the temperature and the filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.types import BANNED, LogitRules, SamplingParameters


@dataclass(frozen=True)
class RowRules:
    """Rules of one row of a micro-batch.

    Example, for 5 selected tokens whose first 2 must not be a stop token:
    ``RowRules(first=10, count=5, no_stop=2, bias_ids=[], bias=[], stop_ids=[7])``.
    """

    first: int
    """Index of the row's first selected token among the selected tokens of the micro-batch."""
    count: int
    """Number of the row's selected tokens."""
    no_stop: int
    """Number of these tokens, from the first on, that must not be a stop token."""
    bias_ids: Tensor
    """[k] int64 token ids with a bias."""
    bias: Tensor
    """[k] float32 value that is added to each of these tokens' logits."""
    stop_ids: Tensor
    """[s] int64 stop tokens, empty without a minimum length."""


def build_row_rules(
    rules: Sequence[LogitRules | None],
    lengths: Tensor,
    selected: Tensor,
) -> tuple[RowRules, ...] | None:
    """Return the rules of a micro-batch in host memory, None if none of its rows has any.

    ``rules`` and ``lengths`` [B] are those of its rows, ``selected`` [n] the ascending positions of the
    selected tokens among the tokens of all rows.
    """
    if all(row is None for row in rules):
        return None

    ends = lengths.cumsum(0)
    bounds = torch.searchsorted(selected, torch.stack((ends - lengths, ends)))
    tensors: dict[SamplingParameters, tuple[Tensor, Tensor, Tensor]] = {}
    row_rules = []
    for row, rule in enumerate(rules):
        first = int(bounds[0, row])
        count = int(bounds[1, row]) - first
        if rule is None or not count:
            continue

        # Tensors that rows share are copied to the device once.
        sampling = rule.sampling
        if sampling not in tensors:
            tensors[sampling] = _rule_tensors(sampling)

        # A token at the index i of its row has i - prompt_tokens tokens of the response before it.
        index = selected[first : first + count] - (ends[row] - lengths[row])
        no_stop = int((index < rule.prompt_tokens + sampling.min_response_tokens).sum())
        row_rules.append(RowRules(first, count, no_stop, *tensors[sampling]))
    return tuple(row_rules)


def _rule_tensors(sampling: SamplingParameters) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids and values of the biases, and the stop tokens if a minimum length bans them."""
    ids = [token for token, _ in sampling.logit_bias]
    values = [value for _, value in sampling.logit_bias]
    stop_ids = sampling.stop_token_ids
    if not sampling.min_response_tokens:
        stop_ids = ()
    return (
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(stop_ids, dtype=torch.int64),
    )


def apply_rules(rules: Sequence[RowRules], logits: Tensor, begin: int, start: int) -> None:
    """Apply the rules to the logits [n, columns] of the selected tokens from ``begin`` on, in place.

    ``start`` is the token id of the first column.
    """
    for row in rules:
        first = max(row.first - begin, 0)
        last = min(row.first + row.count - begin, len(logits))
        if first >= last:
            continue
        _add_bias(logits[first:last], row.bias_ids - start, row.bias)

        last_no_stop = min(row.first + row.no_stop - begin, last)
        if last_no_stop > first:
            banned = torch.full_like(row.stop_ids, BANNED, dtype=torch.float32)
            _add_bias(logits[first:last_no_stop], row.stop_ids - start, banned)


def _add_bias(logits: Tensor, columns: Tensor, bias: Tensor) -> None:
    """Add ``bias`` [k] to the ``columns`` [k] of logits [n, V / tp], without the columns of other shards."""
    # Columns of other shards get 0: selecting the others would read their number from the device.
    is_here = (columns >= 0) & (columns < logits.shape[1])
    values = torch.where(is_here, bias, 0.0).to(logits.dtype)
    logits.index_add_(1, columns.clamp(0, logits.shape[1] - 1), values.expand(len(logits), -1))
