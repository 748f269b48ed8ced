"""Learn every rank's boxes: each rank tells its own once, equal ones travel once."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.parallel.boxes import BoxGroup
from megatron_rl.types import TensorBox

Gather = Callable[[Any], list[Any]]
"""Give every rank's value to every rank, in one fixed order. Collective."""


def gather_layout(
    boxes: Sequence[TensorBox] | None, dtypes: Mapping[str, torch.dtype], rank: int, gather: Gather
) -> list[BoxGroup]:
    """Return the boxes of all ranks, ranks with equal boxes as one group.

    ``boxes`` is None on ranks that hold none; ``dtypes`` are of this rank's storages. Collective over the
    ranks of ``gather``, which all return the same.
    """
    content = None
    digest = None
    if boxes is not None:
        used = {box.storage for box in boxes}
        content = (
            tuple(replace(box, rank=-1) for box in boxes),
            {name: dtype for name, dtype in sorted(dtypes.items()) if name in used},
        )
        digest = hashlib.sha256(pickle.dumps(content)).hexdigest()
    holders: dict[str, list[int]] = {}
    for other, found in gather((rank, digest)):
        if found is not None:
            holders.setdefault(found, []).append(other)
    tells = digest is not None and rank == min(holders[digest])
    told = dict(item for item in gather((digest, content) if tells else None) if item is not None)
    return [
        BoxGroup(tuple(sorted(ranks)), told[found][0], told[found][1])
        for found, ranks in sorted(holders.items(), key=lambda item: min(item[1]))
    ]
