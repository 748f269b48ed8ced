"""Row seeds, filters and draws, against their definitions."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.rollout.sampling import (
    derive_continuation_seed,
    derive_row_seeds,
    draw_tokens,
    resolve_log_prob_temperature,
    scale_and_filter_logits,
)
from megatron_rl.types import (
    SamplingParameters,
)


def settings(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, rows: int = 1
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p))


def test_row_seeds_depend_on_seed_and_position_alone():
    seeds = derive_row_seeds(3, range(1000))
    assert len(set(seeds)) == 1000
    assert derive_row_seeds(3, [7, 999]) == [seeds[7], seeds[999]]
    assert not set(seeds) & set(derive_row_seeds(4, range(1000)))
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_of_a_response_draw_from_streams_of_their_own():
    seeds = [
        derive_continuation_seed(seed, done) for seed in derive_row_seeds(3, range(100)) for done in range(10)
    ]
    assert len(set(seeds)) == 1000
    assert seeds[::10] == derive_row_seeds(3, range(100))


def test_temperature_divides():
    logits = torch.randn(3, 11, dtype=torch.bfloat16)
    assert torch.equal(
        scale_and_filter_logits(logits, *settings(0.7, rows=3)), logits.float() / torch.tensor(0.7)
    )


def test_top_k_keeps_the_k_largest_and_their_ties():
    kept = scale_and_filter_logits(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), *settings(top_k=2)).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]
    assert scale_and_filter_logits(torch.zeros(1, 4), *settings(top_k=9)).isfinite().all()


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.45, [0]), (0.5, [0]), (0.51, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_with_enough_mass(top_p: float, expected: list[int]):
    logits = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log()
    kept = scale_and_filter_logits(logits, *settings(top_p=top_p)).isfinite()[0]
    assert kept.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.0, [0, 1, 2, 3]), (0.3, [0, 1, 2]), (0.45, [0, 1]), (1.0, [0])]
)
def test_min_p_is_a_share_of_the_largest_probability(min_p: float, expected: list[int]):
    kept = scale_and_filter_logits(
        torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log(), *settings(min_p=min_p)
    ).isfinite()
    assert kept[0].nonzero().flatten().tolist() == expected


def test_filters_are_per_row_and_top_p_sees_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(3, 1)
    temperature, top_p = torch.ones(3), torch.tensor([1.0, 0.6, 0.5])
    kept = scale_and_filter_logits(logits, temperature, torch.tensor([0, 0, 2]), top_p, torch.zeros(3))
    kept = kept.isfinite()
    assert kept.sum(1).tolist() == [4, 2, 1]  # the third row: 0.4 of 0.7 is more than half


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.0, 0.2])
    count = 20000
    generators = [torch.Generator().manual_seed(seed) for seed in derive_row_seeds(1, range(count))]
    drawn = draw_tokens(
        probabilities.log().expand(count, 4), torch.zeros(count, dtype=torch.bool), generators
    )
    share = drawn.bincount(minlength=4) / count
    assert share[2] == 0
    assert torch.allclose(share, probabilities, atol=4 * (0.25 / count) ** 0.5)


def test_a_row_draws_from_its_own_stream():
    logits = torch.randn(3, 50)
    sampled = torch.zeros(3, dtype=torch.bool)
    together = draw_tokens(logits, sampled, [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)])
    alone = draw_tokens(logits[1:2], sampled[:1], [torch.Generator().manual_seed(6)])
    assert together[1] == alone[0]
    greedy = draw_tokens(logits, ~sampled, [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)])
    assert torch.equal(greedy, logits.argmax(1))


def test_log_probs_of_greedy_rows_hold_at_temperature_one():
    assert resolve_log_prob_temperature(SamplingParameters(temperature=0.0)) == 1.0
    assert resolve_log_prob_temperature(SamplingParameters(temperature=0.6)) == 0.6
    assert resolve_log_prob_temperature(SamplingParameters(temperature=0.001)) == 0.01
