"""Rows are shared out completely and evenly; packed attention equals plain attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.packing import balance, pack_rows, partition

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_every_row_has_one_place_and_counts_are_equal(lengths, data_parallel, budget, multiple):
    parts = partition(lengths, data_parallel, budget, multiple)
    assert sorted(row for share in parts for micro in share for row in micro) == list(range(len(lengths)))
    counts = {len(share) for share in parts}
    assert len(parts) == data_parallel and len(counts) == 1 and counts.pop() % multiple == 0
    for share in parts:
        for micro in share:
            assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=50), st.integers(1, 8))
def test_balance_is_within_the_bound_of_the_longest_first_rule(work, parts):
    loads = [sum(work[item] for item in part) for part in balance(work, parts)]
    assert max(loads) <= sum(work) / parts + max(work) + 1e-6


def test_balance_of_equal_work_is_even():
    assert sorted(len(part) for part in balance([1.0] * 12, 4)) == [3, 3, 3, 3]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_buckets_hold_every_token_once_and_pad_less_than_twice(lengths):
    packed = pack_rows(lengths, torch.device("cpu"))
    total = sum(lengths)
    flat = torch.cat([bucket.flatten() for bucket in packed.buckets])
    assert flat[packed.restore].tolist() == list(range(total))
    assert packed.positions.tolist() == [p for length in lengths for p in range(length)]
    for bucket in packed.buckets:
        longest = bucket.shape[1]
        assert longest <= 8 or longest < 2 * min(
            length for length in lengths if (max(8, 1 << (length - 1).bit_length())) >= longest
        )


@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_equals_attention_row_by_row(window):
    from types import SimpleNamespace

    from megatron_rl.parallel.layers import PackedAttention

    generator = torch.Generator().manual_seed(3)
    lengths, heads, groups, size = [5, 1, 17, 9], 4, 2, 8
    config = SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=groups,
        window_size=None if window is None else (window, 0),
        window_attn_skip_freq=None,
    )
    alone = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    attention = PackedAttention(config, 1, pg_collection=alone)  # pyright: ignore[reportArgumentType]
    total = sum(lengths)
    query = torch.randn(total, 1, heads, size, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(total, 1, groups, size, generator=generator, dtype=torch.float64) for _ in "kv")
    packed = pack_rows(lengths, torch.device("cpu"))
    found = attention(query, key, value, None, packed_seq_params=packed)

    expected = torch.zeros(total, heads, size, dtype=torch.float64)
    start = 0
    for length in lengths:
        for head in range(heads):
            rows = slice(start, start + length)
            q, k, v = query[rows, 0, head], key[rows, 0, head // 2], value[rows, 0, head // 2]
            scores = q @ k.T / size**0.5
            distance = torch.arange(length)[:, None] - torch.arange(length)[None]
            seen = (distance >= 0) & (distance <= (window if window is not None else length))
            expected[rows, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        start += length
    torch.testing.assert_close(found, expected.flatten(1)[:, None], rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.square().sum(), query)
    (wanted,) = torch.autograd.grad(expected.square().sum(), query)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
