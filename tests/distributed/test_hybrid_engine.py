"""Megatron weights in vLLM: bit-identical to vLLM's own load, least traffic, bounded staging, verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.hybrid_engine_ranks import CASES
from tests.hf_models import save_model

SUITE = {4: (0, 1, 2, 4, 8, 10)}
"""Indices of `CASES` by ranks: orders and subsets of ranks, shared heads, each kind of layer once."""


@pytest.mark.parametrize(
    ("ranks", "indices"),
    [
        *SUITE.items(),
        *(
            pytest.param(
                ranks,
                sorted({*range(len(cases))} - {*SUITE.get(ranks, ())}),
                marks=pytest.mark.campaign,
            )
            for ranks, cases in CASES.items()
        ),
    ],
)
def test_engine_holds_the_trained_weights_in_every_pair_of_layouts(fork, tmp_path, ranks, indices):
    for case in (CASES[ranks][0], *(CASES[ranks][index] for index in indices)):
        path = tmp_path / case.folder
        if not path.exists():
            save_model(case.family, path, **case.shape)
    script = Path(__file__).with_name("hybrid_engine_ranks.py")
    assert "all cases passed" in fork(script, ranks, tmp_path, *indices, timeout=500).stdout
