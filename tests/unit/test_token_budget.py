"""Tokens per micro-batch from a share of a GPU's memory: the estimate, the measured peaks, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_workspace import write_workspace
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.config.load import dump, load, load_text
from megatron_rl.config.token_budget import TokenBudget, initial_budget

GIB = 2**30


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*overrides: str, world_size: int = 4) -> CheckReport:
    return check_config(load("config.yaml", overrides), world_size)


def budget(tokens: int = 4096, max_tokens: int = 65536) -> TokenBudget:
    return TokenBudget(tokens, min_tokens=512, max_tokens=max_tokens, allowed=80e9, estimate=4096)


def test_a_target_needs_a_gpu_and_excludes_fixed_micro_batches(workspace):
    (alone,) = checked("batch.memory_target=0.9").errors
    assert "no known GPU is named" in alone.message and "--on h100" in (alone.fix or "")
    (unknown,) = checked("batch.memory_target=0.9", "gpu=abacus").errors
    assert "gpu=abacus, whose memory is unknown" in (unknown.got or "")
    (both,) = checked("batch.memory_target=0.9", "gpu=h100", "batch.tokens_per_microbatch=777").errors
    assert "are both set" in both.message and "or batch.memory_target" in (both.fix or "")


def test_a_resolved_configuration_with_a_target_loads_again(workspace):
    report = checked("batch.memory_target=0.9", "gpu=h100")
    assert not report.errors
    again = check_config(load_text(dump(report.config)), 4)
    assert not again.errors, again.errors[0]
    assert again.config.batch == report.config.batch
    origin = report.origins["batch.tokens_per_microbatch"]
    assert origin.detail.endswith("is estimated within 90% of 79.2 GiB (memory_target)")


def test_the_estimate_fills_the_target_and_no_more(workspace):
    """With less and less memory: a whole mini-batch, as many tokens as fit, the longest row."""
    budgets = []
    for gib in (80, 7.385, 7):
        report = checked("batch.memory_target=0.8", f"gpu_memory_gib={gib}", "batch.samples_per_prompt=64")
        tokens = report.config.batch.tokens_per_microbatch
        assert tokens is not None and report.batch is not None
        budgets.append(tokens)
        peak = max(rank.phase_peak(phase) for rank in report.memory for phase in ("score", "learn"))
        if tokens > report.batch.longest_row:
            assert peak <= 0.8 * gib * GIB
        assert report.batch.tokens_per_microbatch == tokens
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] == report.batch.longest_row, budgets
    assert budgets[0] == 2048 and 16 < budgets[1] < 2048, budgets
    assert "the longest row" in report.origins["batch.tokens_per_microbatch"].detail


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_ranks_that_reduce_gradients_at_the_end_can_repeat_a_pass(workspace):
    def ddp(*overrides: str) -> dict[str, object]:
        report = checked("batch.memory_target=0.9", "gpu=h100", "actor.layout.pipeline=1", *overrides)
        assert not report.errors, report.errors[0]
        return dict(report.config.actor.ddp)

    assert ddp("actor.layout.tensor=1") == {"overlap_grad_reduce": False}
    assert ddp("actor.layout.tensor=2") == {}
    assert ddp("actor.layout.tensor=1", "actor.ddp.overlap_grad_reduce=true") == {"overlap_grad_reduce": True}


@given(
    st.integers(512, 65536),
    st.floats(0, 100e9),
    st.floats(1e3, 1e9),
    st.one_of(st.none(), st.integers(1, 65536)),
)
def test_a_budget_stays_between_the_longest_row_and_the_target(tokens, resident, per_token, split):
    after = budget(tokens).after_step(resident, per_token, split)
    assert 512 <= after.tokens <= after.max_tokens
    assert after.tokens == 512 or after.tokens <= 2 * tokens
    # Never more than the measurement allows, except for what was too little to change.
    if after.tokens > max(512, tokens):
        assert resident + per_token * after.tokens <= 80e9
    if split is not None:
        assert after.tokens <= max(512, split)
        assert after.after_step(0.0, 1.0, None).tokens <= max(512, split), (
            "a split budget does not rise again"
        )


def test_a_budget_without_measurements_stays():
    assert budget().after_step(None, None, None) == budget()
    assert budget().after_step(39e9, 10e6, None).tokens == 4100 - 4, "too small a rise"
    assert budget().after_step(42e9, 10e6, None).tokens == 3800


def test_a_checkpoint_of_another_estimate_is_not_taken():
    saved = budget(7000).state_dict()
    assert budget().restore(saved) == budget(7000)
    assert budget().restore(None) == budget()
    assert budget().restore({**saved, "estimate": 5000}) == budget()
    assert budget().restore({**saved, "allowed": 70e9}) == budget()


def test_a_run_without_a_target_has_no_budget(workspace):
    assert initial_budget(checked().config) is None
    config = checked("batch.memory_target=0.9", "gpu=h100").config
    first = initial_budget(config)
    assert first is not None and first.tokens == first.estimate == config.batch.tokens_per_microbatch
    assert first.min_tokens <= first.tokens <= first.max_tokens
