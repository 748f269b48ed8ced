"""Ragged rows are selected, joined and repeated without losing a token; metrics merge exactly."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.metrics import Metrics, merge_metrics
from megatron_rl.types import PromptBatch, SamplingParameters, TrainBatch, row_index, split_rows


def _batch(lengths):
    total = sum(lengths)
    return TrainBatch(
        tokens=torch.arange(total),
        lengths=torch.tensor(lengths, dtype=torch.long),
        response_mask=torch.arange(total) % 2 == 0,
        loss_weights=torch.arange(total).float(),
        temperature=torch.arange(len(lengths)).float(),
    )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_rows_come_in_the_order_asked_for(lengths, data):
    batch = _batch(lengths)
    ids = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10))
    picked = batch.rows(ids)
    assert len(picked) == len(ids)
    parts = split_rows(batch.tokens, batch.lengths)
    assert picked.tokens.tolist() == [token for row in ids for token in parts[row].tolist()]
    assert picked.temperature.tolist() == [float(row) for row in ids]
    assert picked.advantages is None


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_cut_and_joined_is_the_same(lengths):
    batch = _batch(lengths)
    joined = TrainBatch.concatenate([batch.rows([0]), batch.rows(range(1, len(lengths)))])
    assert torch.equal(joined.tokens, batch.tokens) and torch.equal(joined.lengths, batch.lengths)
    assert row_index(batch.lengths).tolist() == [r for r, n in enumerate(lengths) for _ in range(n)]


def test_repeat_puts_copies_of_a_prompt_next_to_each_other():
    prompts = PromptBatch(
        tokens=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 2]),
        prompt_ids=torch.tensor([7, 8]),
        tasks=("a", "b"),
        prompts=("x", "y"),
        ground_truths=(1, 2),
        metadata=({}, {}),
        sampling=(SamplingParameters(), SamplingParameters(temperature=0.0)),
    )
    assert prompts.repeat(2).prompt_ids.tolist() == [7, 7, 8, 8]
    assert prompts.repeat(2).tokens.tolist() == [1, 1, 2, 3, 2, 3]
    assert prompts.repeat(2).tasks == ("a", "a", "b", "b")


def test_metrics_merge_as_means_over_elements():
    parts = [
        Metrics.mean("a", 6, 4),
        Metrics.mean("a", 2, 4),
        Metrics.maximum("b", 3),
        Metrics.maximum("b", 1),
    ]
    assert merge_metrics(parts).values() == {"a": 1.0, "b": 3.0}
    assert Metrics.mean("empty", 0.0, 0.0).values() == {}
