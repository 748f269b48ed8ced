"""Rows are shared out completely and evenly; packed attention equals plain attention."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.megatron.packing import (
    balance_work,
    compute_row_work,
    make_bucketed_rows,
    min_bins_bound,
    pack_into_bins,
    partition_rows,
)

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 200), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_every_row_has_one_place_and_counts_are_equal(lengths, data_parallel, budget, multiple):
    parts = partition_rows(lengths, data_parallel, budget, multiple)
    assert sorted(row for share in parts for micro in share for row in micro) == list(range(len(lengths)))
    counts = {len(share) for share in parts}
    assert len(parts) == data_parallel and len(counts) == 1 and counts.pop() % multiple == 0
    for share in parts:
        for micro in share:
            assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


def fewest_by_trying(lengths, budget):
    """Return the smallest number of bins, from every assignment of items to bins."""
    for count in range(len(lengths) + 1):
        for places in itertools.product(range(count), repeat=len(lengths)):
            bins = [[n for n, place in zip(lengths, places, strict=True) if place == b] for b in range(count)]
            if all(len(held) <= 1 or sum(held) <= budget for held in bins):
                return count
    raise AssertionError


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), max_size=6), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_bins_are_as_few_as_can_be(lengths, budget):
    bins = pack_into_bins(lengths, budget)
    assert sorted(item for part in bins for item in part) == list(range(len(lengths)))
    assert all(len(part) <= 1 or sum(lengths[item] for item in part) <= budget for part in bins)
    fewest = fewest_by_trying(lengths, budget)
    assert min_bins_bound(lengths, budget) <= fewest == len(bins)


def test_a_packing_that_best_fit_misses_is_found():
    """Best fit puts 7 and 6 together, one token short of full, and then needs a third bin."""
    lengths = [7, 6, 5, 4, 4, 2]
    found = [sum(lengths[item] for item in part) for part in pack_into_bins(lengths, 14)]
    assert found == [14, 14]


@given(LENGTHS, st.integers(1, 4), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_micro_batches_are_as_few_as_packing_all_rows_together_allows(lengths, data_parallel, budget):
    (count,) = {len(share) for share in partition_rows(lengths, data_parallel, budget)}
    assert count == max(1, -(-len(pack_into_bins(lengths, budget)) // data_parallel))


def responses(kind, rows, longest, seed):
    """Return lengths of rows as reinforcement learning has them: a prompt and a response up to a limit."""
    source = random.Random(seed)
    draw = {
        "short": lambda: source.randint(1, 12),
        "long tail": lambda: int(source.lognormvariate(6.3, 0.9)),
        "thinking": lambda: int(source.lognormvariate(8.0, 0.7)),
        "cut off": lambda: longest if source.random() < 0.4 else source.randint(100, longest),
        "uniform": lambda: source.randint(1, longest),
    }[kind]
    return [
        source.randint(5, 300 if longest > 1000 else 8) + max(1, min(draw(), longest)) for _ in range(rows)
    ]


@pytest.mark.parametrize("kind", ["short", "long tail", "thinking", "cut off", "uniform"])
@pytest.mark.parametrize("ranks", [1, 8, 32])
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_realistic_rows_are_hardly_padded_few_and_balanced(kind, ranks, tensor):
    """A step's rows: padding below 2 %, few micro-batches, and work within 10 % of the mean."""
    longest, rows = (12, 4096) if kind == "short" else (8192, 512)
    for seed in range(3):
        lengths = responses(kind, rows, longest, seed)
        budget = max(2 * (longest + 300), -(-sum(lengths) // (ranks * 4)))
        shares = partition_rows(lengths, ranks, budget, attention_crossover_length=12.0 * 4096)
        micros = [sum(lengths[row] for row in micro) for share in shares for micro in share]
        # Sequence parallelism cuts a micro-batch into equal parts.
        padding = sum(-tokens % tensor or (0 if tokens else tensor) for tokens in micros)
        assert padding / (sum(micros) + padding) < 0.02
        assert max(micros) <= budget
        assert len(shares[0]) <= -(-sum(lengths) // (ranks * budget)) + 1
        work = compute_row_work(lengths, 12.0 * 4096)
        loads = [sum(work[row] for micro in share for row in micro) for share in shares]
        assert max(loads) <= 1.1 * sum(loads) / ranks


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=50), st.integers(1, 8))
def test_balance_is_within_the_bound_of_the_longest_first_rule(work, parts):
    loads = [sum(work[item] for item in part) for part in balance_work(work, parts)]
    assert max(loads) <= sum(work) / parts + max(work) + 1e-6


def test_balance_of_equal_work_is_even():
    assert sorted(len(part) for part in balance_work([1.0] * 12, 4)) == [3, 3, 3, 3]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_buckets_hold_every_token_once_and_pad_by_less_than_a_quarter(lengths):
    packed = make_bucketed_rows(lengths)
    total = sum(lengths)
    flat = torch.cat([bucket.flatten() for bucket in packed.buckets])
    assert flat[packed.restore].tolist() == list(range(total))
    assert packed.positions.tolist() == [p for length in lengths for p in range(length)]
    for bucket in packed.buckets:
        longest = bucket.shape[1]
        shortest = min(len(row.unique()) for row in bucket)
        assert longest <= 8 or longest < 1.25 * shortest


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped keys", "repeated keys"])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_equals_attention_row_by_row(window, grouped, monkeypatch):
    from types import SimpleNamespace

    from megatron_rl.megatron import layers

    monkeypatch.setattr(layers, "_supports_grouped_keys", lambda query: grouped)
    generator = torch.Generator().manual_seed(3)
    lengths, heads, groups, size = [5, 1, 17, 9], 4, 2, 8
    config = SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=groups,
        params_dtype=torch.float64,
        kv_channels=size,
        multi_latent_attention=False,
        window_size=None if window is None else (window, 0),
        window_attn_skip_freq=None,
        softmax_type="vanilla",
    )
    one = SimpleNamespace(size=lambda: 1)
    alone = SimpleNamespace(tp=one, cp=one)
    attention = layers.PackedAttention(config, 1, pg_collection=alone)  # pyright: ignore[reportArgumentType]
    total = sum(lengths)
    query, key, value = (
        torch.randn(total, 1, count, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (heads, groups, groups)
    )
    packed = make_bucketed_rows(lengths)
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
    gradients = torch.autograd.grad(found.square().sum(), (query, key, value))
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value))
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-12)
