"""Megatron weights in vLLM: bit-identical to vLLM's own load, least traffic, bounded staging, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.hybrid_engine_ranks import CASES
from tests.hf_models import save_model


@pytest.mark.parametrize("ranks", CASES)
def test_engine_holds_the_trained_weights_in_every_pair_of_layouts(fork, tmp_path, ranks):
    for case in CASES[ranks]:
        path = tmp_path / case.folder
        if not path.exists():
            save_model(case.family, path, **case.shape)
    script = Path(__file__).with_name("hybrid_engine_ranks.py")
    assert "all cases passed" in fork(script, ranks, tmp_path, timeout=500).stdout
