"""Each example that two ranks run takes a step of the task, from the data that its own script makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import small_data

RANKS = Path(__file__).with_name("example_ranks.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "launch/examples"
SECONDS = 400.0


def test_each_example_takes_a_step(fork: Any, tmp_path: Path) -> None:
    made, runs = tmp_path / "made", tmp_path / "runs"
    small_data.make(made / "quickstart")
    fork(EXAMPLES / "moe/make.py", 1, made / "quickstart/model", made / "moe")
    fork(EXAMPLES / "own_data/make.py", 1, made / "own_data")
    fork(EXAMPLES / "tools/make.py", 1, made / "tools")
    said = fork(RANKS, 2, made, runs, timeout=SECONDS).stdout
    names = ("own_reward", "own_loss", "moe", "own_data", "tools", "megatron_lm")
    assert [name for name in names if f"example {name} ok" not in said] == []
    for name in names:
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").open()]
        assert lines[-1]["step"] == 1 and lines[-1]["mismatch/abs_diff"] < 1e-4, name
        assert "eval/held_out/accuracy" in lines[-1], name
    assert (runs / "out/latest_checkpointed_iteration.txt").is_file()
