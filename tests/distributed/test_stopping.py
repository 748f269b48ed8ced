"""Stop texts of several tokens through `train`: rows of real engines, and the trainer's log-probs of them."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from test_roles import metrics
from test_step import grpo

from megatron_rl.types import FINISH_STOP

STOPS = [first + second for first in "0123456789+-*/=,." for second in "02468=+"]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_rows_end_at_stop_texts_in_token_rounds_and_with_filters(
    fork, material: Path, tmp_path: Path, engine: str
):
    rollout = {
        "engine": engine,
        "max_response_tokens": 24,
        "stop": STOPS,
        "top_k": 12,
        "oversample": 0.5,
        "round_tokens": 3,  # cuts stop texts in two
        "partial": True,
    }
    file = grpo(tmp_path / "run", material, engine, rollout=rollout, steps=3)
    fork("megatron_rl", 1, "train", file, module=True)
    lines = metrics(tmp_path / "run")
    assert len(lines) == 3 and all(line["mismatch/abs_diff"] < 1e-4 for line in lines)

    frames = [pandas.read_parquet(path) for path in sorted((tmp_path / "run/run/rollouts").glob("*.parquet"))]
    rows = pandas.concat(frames)
    ended = 0
    for text, length, reason in zip(rows.response, rows.length, rows.finish_reason, strict=True):
        is_ended = text.endswith(tuple(STOPS))
        # A token is a character. Sampled special tokens are part of a text, but not of the stored response.
        has_special = length > len(text) + (reason == FINISH_STOP and not is_ended)
        if has_special:
            continue
        assert not any(stop in text[:-1] for stop in STOPS), text
        assert not is_ended or reason == FINISH_STOP
        ended += is_ended
    assert ended > len(rows) / 5, rows.response.tolist()
