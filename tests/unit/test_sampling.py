"""Row seeds, filters, draws and the ragged result, against their definitions."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.rollout.sampling import (
    FAILED,
    Response,
    draw,
    filtered_logits,
    log_prob_temperature,
    part_limit,
    part_seed,
    row_seeds,
    to_rollouts,
)
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    FINISH_STOP,
    UNFINISHED,
    PromptBatch,
    SamplingParameters,
)


def prompts(*rows: list[int], sampling: SamplingParameters | None = None) -> PromptBatch:
    count = len(rows)
    return PromptBatch(
        tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        prompt_ids=torch.arange(count),
        tasks=("",) * count,
        prompts=("",) * count,
        ground_truths=(None,) * count,
        metadata=({},) * count,
        sampling=(sampling or SamplingParameters(),) * count,
    )


def settings(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, rows: int = 1
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((rows,), value) for value in (temperature, top_k, top_p, min_p))


def test_row_seeds_depend_on_seed_and_position_alone():
    seeds = row_seeds(3, range(1000))
    assert len(set(seeds)) == 1000
    assert row_seeds(3, [7, 999]) == [seeds[7], seeds[999]]
    assert not set(seeds) & set(row_seeds(4, range(1000)))
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_of_a_response_draw_from_streams_of_their_own():
    seeds = [part_seed(seed, done) for seed in row_seeds(3, range(100)) for done in range(10)]
    assert len(set(seeds)) == 1000
    assert seeds[::10] == row_seeds(3, range(100))


def test_a_part_ends_at_its_limit_or_the_responses():
    assert part_limit(20, 0, None) == (20, FINISH_LENGTH)
    assert part_limit(20, 5, 15) == (15, FINISH_LENGTH)
    assert part_limit(20, 5, 14) == (14, UNFINISHED)


def test_temperature_divides():
    logits = torch.randn(3, 11, dtype=torch.bfloat16)
    assert torch.equal(filtered_logits(logits, *settings(0.7, rows=3)), logits.float() / torch.tensor(0.7))


def test_top_k_keeps_the_k_largest_and_their_ties():
    kept = filtered_logits(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), *settings(top_k=2)).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]
    assert filtered_logits(torch.zeros(1, 4), *settings(top_k=9)).isfinite().all()


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.45, [0]), (0.5, [0]), (0.51, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_with_enough_mass(top_p: float, expected: list[int]):
    logits = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log()
    kept = filtered_logits(logits, *settings(top_p=top_p)).isfinite()[0]
    assert kept.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize(
    ("min_p", "expected"), [(0.0, [0, 1, 2, 3]), (0.3, [0, 1, 2]), (0.45, [0, 1]), (1.0, [0])]
)
def test_min_p_is_a_share_of_the_largest_probability(min_p: float, expected: list[int]):
    kept = filtered_logits(torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log(), *settings(min_p=min_p)).isfinite()
    assert kept[0].nonzero().flatten().tolist() == expected


def test_filters_are_per_row_and_top_p_sees_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(3, 1)
    temperature, top_p = torch.ones(3), torch.tensor([1.0, 0.6, 0.5])
    kept = filtered_logits(logits, temperature, torch.tensor([0, 0, 2]), top_p, torch.zeros(3))
    kept = kept.isfinite()
    assert kept.sum(1).tolist() == [4, 2, 1]  # the third row: 0.4 of 0.7 is more than half


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.0, 0.2])
    count = 20000
    generators = [torch.Generator().manual_seed(seed) for seed in row_seeds(1, range(count))]
    drawn = draw(probabilities.log().expand(count, 4), torch.zeros(count, dtype=torch.bool), generators)
    share = drawn.bincount(minlength=4) / count
    assert share[2] == 0
    assert torch.allclose(share, probabilities, atol=4 * (0.25 / count) ** 0.5)


def test_a_row_draws_from_its_own_stream():
    logits = torch.randn(3, 50)
    sampled = torch.zeros(3, dtype=torch.bool)
    together = draw(logits, sampled, [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)])
    alone = draw(logits[1:2], sampled[:1], [torch.Generator().manual_seed(6)])
    assert together[1] == alone[0]
    greedy = draw(logits, ~sampled, [torch.Generator().manual_seed(seed) for seed in (5, 6, 7)])
    assert torch.equal(greedy, logits.argmax(1))


def test_log_probs_of_greedy_rows_hold_at_temperature_one():
    assert log_prob_temperature(SamplingParameters(temperature=0.0)) == 1.0
    assert log_prob_temperature(SamplingParameters(temperature=0.6)) == 0.6
    assert log_prob_temperature(SamplingParameters(temperature=0.001)) == 0.01


def test_result_is_ragged_and_aligned():
    batch = prompts([1, 2, 3], [4], [5, 6])
    responses = [Response([9, 8], [-0.5, -0.25], FINISH_STOP), FAILED, Response([7], [-1.0], FINISH_LENGTH)]
    result = to_rollouts(batch, responses, version=4)
    assert result.tokens.tolist() == [1, 2, 3, 9, 8, 4, 5, 6, 7]
    assert result.lengths.tolist() == [5, 1, 3]
    assert result.response_mask.tolist() == [False, False, False, True, True, False, False, False, True]
    assert result.rollout_log_probs.tolist() == [0, 0, 0, -0.5, -0.25, 0, 0, 0, -1.0]
    assert result.finish_reason.tolist() == [FINISH_STOP, FINISH_FAILED, FINISH_LENGTH]
    assert result.group.tolist() == [0, 1, 2]
    assert result.policy_version.tolist() == [4, 4, 4]
    assert not result.support_sizes.any() and not len(result.support)
    with pytest.raises(ValueError, match="one log-prob per token"):
        to_rollouts(prompts([1]), [Response([2], [], FINISH_STOP)], version=0)


def test_supports_follow_their_tokens():
    batch = prompts([1, 2], [3], [4])
    responses = [
        Response([9, 8], [-0.5, -0.25], FINISH_STOP, [[9, 7], [8]]),
        Response([5], [-1.0], FINISH_STOP),
        Response([6], [0.0], FINISH_STOP, [[4, 5, 6]]),
    ]
    result = to_rollouts(batch, responses, version=1)
    assert result.support_sizes.tolist() == [0, 0, 2, 1, 0, 0, 0, 3]
    assert result.support.tolist() == [9, 7, 8, 4, 5, 6]
    chosen = result.rows([2, 0])
    assert chosen.support_sizes.tolist() == [0, 3, 0, 0, 2, 1]
    assert chosen.support.tolist() == [4, 5, 6, 9, 7, 8]
    joined = type(result).concatenate([chosen, result.rows([1])])
    assert joined.rows([2, 1]).support.tolist() == [9, 7, 8]
    with pytest.raises(ValueError, match="a support per token"):
        to_rollouts(prompts([1]), [Response([2, 3], [0.0, 0.0], FINISH_STOP, [[2]])], version=0)


def test_no_rows():
    assert len(to_rollouts(prompts(), [], version=0)) == 0
