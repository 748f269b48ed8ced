"""Import, log-probs and export of every family across tensor, pipeline, data and expert layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_layout_ranks import CASES

from tests.hf_models import save_model

SUITE = (0, 2, 4, 5, 8, 9, 10, 12, 13, 16, 18, 20, 25)
"""Indices of `CASES`: each axis, and each way to store attention, delta nets and experts, once."""
OTHERS = tuple(index for index in range(len(CASES)) if index not in SUITE)


@pytest.mark.parametrize("indices", [SUITE, pytest.param(OTHERS, marks=pytest.mark.campaign)])
def test_every_layout_loads_scores_and_exports(fork, tmp_path, indices):
    for family in {"qwen2", *(CASES[index][0] for index in indices)}:
        save_model(family, tmp_path / family)
    script = Path(__file__).with_name("hf_layout_ranks.py")
    assert "all cases" in fork(script, 4, tmp_path, *indices, timeout=400).stdout
