"""Limits of responses that follow earlier lengths, compared with NumPy's quantiles."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.config.sections.response_limits import AutoLimitConfig, prompt_limit
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.rollout.collate import make_waiting_groups
from megatron_rl.rollout.limits import AutoLimits, compute_length_metrics
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    FINISH_STOP,
    PromptBatch,
    Rollouts,
    SamplingParameters,
)
from tests.sampling import make_prompts

AUTO = AutoLimitConfig(at_most=50, at_least=4, quantile=0.9, margin=1.25, responses=6, window=20)
CONFIG = RolloutConfig(
    max_response_tokens="auto", auto_limit=AUTO, sampling_profiles={"fixed": {"max_response_tokens": 7}}
)


def prompts_of(lengths: list[int]) -> PromptBatch:
    return make_prompts([[1] * length for length in lengths], SamplingParameters(max_response_tokens=50))


def responses(prompts: int, lengths: list[int], reasons: list[int]) -> Rollouts:
    """Return rows of a prompt token and a response, dealt to the prompts in turns."""
    rows = torch.tensor(lengths) + 1
    mask = torch.cat([torch.tensor([False] + [True] * length) for length in lengths])
    count = int(rows.sum())
    return Rollouts(
        tokens=torch.zeros(count, dtype=torch.long),
        lengths=rows,
        response_mask=mask,
        rollout_log_probs=torch.zeros(count),
        group=torch.arange(len(lengths)) % prompts,
        finish_reason=torch.tensor(reasons),
        policy_version=torch.zeros(len(lengths), dtype=torch.long),
        temperature=torch.ones(len(lengths)),
        max_response_tokens=torch.full((len(lengths),), 50),
    )


def test_a_limit_is_a_quantile_of_the_latest_lengths_of_its_task_and_prompt_length():
    generator = random.Random(3)
    limits = AutoLimits(CONFIG)
    prompts = replace(prompts_of([3, 5, 3]), tasks=("sum", "sum", "fixed"))
    seen: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(12):
        lengths = [generator.randint(1, 40) for _ in range(6)]
        reasons = [generator.choice([FINISH_STOP, FINISH_LENGTH, FINISH_FAILED]) for _ in lengths]
        limits.record_lengths(prompts, responses(3, lengths, reasons))
        for row, (length, reason) in enumerate(zip(lengths, reasons, strict=True)):
            if row % 3 < 2 and reason != FINISH_FAILED:
                seen[row % 3].append(length)

        for prompt, tokens in ((0, 3), (1, 5)):
            expected = AUTO.at_most
            if len(seen[prompt]) >= AUTO.responses:
                latest = np.array(seen[prompt][-AUTO.window :], dtype=np.float64)
                length = np.quantile(latest, AUTO.quantile, method="inverted_cdf")
                expected = int(np.clip(np.ceil(length * AUTO.margin), AUTO.at_least, AUTO.at_most))
            assert limits.compute_limit("sum", tokens) == expected
            # Prompts of up to 4 and of 5 to 8 tokens are classes, and each task has its own.
            assert limits.compute_limit("sum", {3: 4, 5: 8}[tokens]) == expected
    assert limits.compute_limit("sum", 9) == limits.compute_limit("other", 3) == AUTO.at_most

    started = limits.with_limits(make_waiting_groups(prompts))
    found = [group.prompt.sampling[0].max_response_tokens for group in started]
    assert found[:2] == [limits.compute_limit("sum", 3), limits.compute_limit("sum", 5)]
    # A task with a number of its own keeps what its prompt has.
    assert found[2] == prompts.sampling[2].max_response_tokens

    restored = AutoLimits(CONFIG)
    restored.load_state_dict(limits.state_dict())
    assert restored.compute_limit("sum", 3) == limits.compute_limit("sum", 3) < AUTO.at_most


def test_a_limit_that_cuts_off_most_responses_grows_and_one_above_all_shrinks():
    limits = AutoLimits(CONFIG)
    prompts = replace(prompts_of([3]), tasks=("sum",))
    limits.record_lengths(prompts, responses(1, [2] * 20, [FINISH_STOP] * 20))
    assert limits.compute_limit("sum", 3) == AUTO.at_least
    found = []
    for _ in range(14):
        limit = limits.compute_limit("sum", 3)
        found.append(limit)
        limits.record_lengths(prompts, responses(1, [limit] * 20, [FINISH_LENGTH] * 20))
    assert found == sorted(found) and found[-1] == AUTO.at_most
    limits.record_lengths(prompts, responses(1, [8] * 20, [FINISH_STOP] * 20))
    assert limits.compute_limit("sum", 3) == 10


def test_metrics_of_lengths_are_by_task():
    prompts = replace(prompts_of([3, 5, 3]), tasks=("sum", "sum", "fixed"))
    rows = responses(3, [1, 2, 3, 4, 5, 6], [FINISH_STOP, FINISH_LENGTH, FINISH_LENGTH] * 2)
    values = compute_length_metrics(prompts, rows, CONFIG).values()
    assert values == {
        "response/truncated_fraction/sum": 0.5,
        "response/truncated_fraction/fixed": 1.0,
        "response/limit/sum": 50.0,
    }


@pytest.mark.parametrize(("tokens", "limit"), [(1, 64), (64, 64), (65, 256), (512, 256), (513, 1024)])
def test_a_table_has_the_limit_of_the_first_row_that_fits(tokens: int, limit: int):
    table = {"more": 1024, "512": 256, "64": 64}
    assert prompt_limit(table, tokens, AUTO) == limit
    config = RolloutConfig(max_response_tokens=table)
    assert config.response_limit == 1024 and config.limit_of("any", tokens) == limit
