"""Optimizer shards of one layout: which layouts may read them, and which part of a parameter a rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.checkpoint.shards import ParameterBox
from megatron_rl.config.checkpoint_meta import fits_any_layout, is_gathered, require_layout
from megatron_rl.errors import UserError


def test_shards_without_an_index_need_their_own_layout(tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict.fromkeys(
        ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"), 1
    )
    saved: dict[str, Any] = {
        "layout": {**sizes, "pipeline": 2, "world_size": 2},
        "optimizer_layout": "same",
    }
    meta = {"step": 3, "roles": {"actor": saved}}
    require_layout(tmp_path, "actor", meta, {**sizes, "pipeline": 2})
    with pytest.raises(UserError, match="in the shards of another layout") as refused:
        require_layout(tmp_path, "actor", meta, sizes)
    assert all(text in str(refused.value) for text in ("pipeline 1", "pipeline 2", "steps=3"))
    assert not fits_any_layout(meta)

    saved["indexed_shards"] = True
    require_layout(tmp_path, "actor", meta, sizes)
    assert fits_any_layout(meta) and not is_gathered(meta)


@pytest.mark.parametrize(("begin", "end"), [(0, 48), (0, 1), (5, 6), (11, 29), (24, 48), (47, 48), (0, 24)])
def test_a_rank_reads_the_slices_that_reach_into_its_range(begin: int, end: int) -> None:
    """The up projection of a fused one, 4 of its 8 rows of 6, as layer 3 of a stacked tensor."""
    box = ParameterBox("w", start=(3, 4, 0), size=(1, 4, 6), first=24, strides=(0, 6, 1))
    near = box.narrow_to_range(begin, end)

    # The elements of the flattened parameter that both describe, of those in the range.
    wanted = set(range(24, 48)) & set(range(begin, end))
    values = torch.arange(48).as_strided(near.size, near.strides, near.offset_of(near.start))
    found = set(values.flatten().tolist())
    assert wanted <= found <= set(range(24, 48))
    assert len(found) <= len(wanted) + 2 * 5, "no more than the rest of the first and last row"
