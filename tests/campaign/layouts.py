"""Train one step of every family in every layout of four ranks; compare all tensors with one rank's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megatron_rl.megatron.model_spec import describe_model
from tests.campaign.campaign import HELD, Case, Result
from tests.conftest import ROOT, STANDIN, launch_environment
from tests.distributed import test_layout_invariance as layouts
from tests.hf_models import FAMILIES, save_model

PATIENCE = 5.0
"""Seconds that a layout may take; each launch may take 600 more."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the families with their layouts, up to ``count`` layouts in total."""
    yield from _cases({"seed": seed}, count, FAMILIES)


def fused_cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the families and layouts that Transformer Engine's layers support."""
    families = [
        name for name in FAMILIES if not describe_model(layouts.config_of(name)).shape.needs_plain_layers
    ]
    yield from _cases({"seed": seed, "fused": True}, count, families)


def _cases(settings: Mapping[str, Any], count: int, families: Iterable[str]) -> Iterator[Case]:
    for family in families:
        # Count without building: a family has hundreds of layouts.
        layout_count = len(list(islice(_layouts(family, settings), max(count, 0))))
        count -= layout_count
        if layout_count:
            yield Case(
                family,
                family,
                {**settings, "layouts": layout_count},
                weight=layout_count,
            )


def _layouts(family: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from layouts.every_layout(family)


def try_case(case: Case, work: Path) -> Result:
    """Train a family's step on one rank and in its layouts; report every difference above rounding.

    The single rank has Megatron's local layers; fused cases compare Transformer Engine's stand-in with them.
    """
    family = case.name
    folder = work / case.name
    shutil.rmtree(folder, ignore_errors=True)
    model = save_model(family, folder / family)
    torch.manual_seed(case.settings["seed"])

    torch.save(layouts.make_batch(model), folder / family / "batch.pt")
    fused = bool(case.settings.get("fused"))
    entries = list(islice(_layouts(family, case.settings), case.settings["layouts"]))
    # One launch per number of ranks: starting processes takes longer than a layout's step.
    for ranks, plan in ((1, [layouts.case(family)]), (layouts.RANKS, entries)):
        (folder / "plan.json").write_text(json.dumps(plan))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]

        packages = [STANDIN] if fused and ranks > 1 else []

        process = subprocess.run(
            [*command, str(layouts.WORKER), str(folder), "plan.json"],
            cwd=ROOT,
            env=launch_environment(*packages),
            capture_output=True,
            text=True,
            check=False,
            timeout=600 + PATIENCE * len(plan),
        )
        if process.returncode:
            return Result("broken", process.stderr[-4000:])

    differences = [
        difference for entry in entries for difference in layouts.differences(folder, entry, fused)
    ]
    if differences:
        return Result("lost", "\n".join(differences), {"differences": len(differences)})

    shutil.rmtree(folder)
    return Result(HELD)
