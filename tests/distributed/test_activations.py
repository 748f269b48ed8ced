"""The memory model's activations under tensor, sequence and expert parallelism."""

from __future__ import annotations

from pathlib import Path


def test_a_rank_keeps_what_is_counted(fork, tmp_path):
    script = Path(__file__).with_name("activation_ranks.py")
    assert "all cases" in fork(script, 2, tmp_path, timeout=400).stdout
