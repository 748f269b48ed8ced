"""Take a step of every family in every product of parallel sizes on four ranks; compare its every tensor."""

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

from megatron_rl.megatron.model_spec import pretrained
from tests.campaign.campaign import HELD, Case, Result
from tests.conftest import ROOT, STANDIN, launch_environment
from tests.distributed import test_layout_invariance as layouts
from tests.hf_models import FAMILIES, save_model

PATIENCE = 5.0
"""Seconds that a layout may take, and each launch a hundred more."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the families, each with its layouts, until there are ``count`` of these."""
    yield from _cases({"seed": seed}, count, FAMILIES)


def fused_cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the same for families and layouts that Transformer Engine's layers have."""
    families = [name for name in FAMILIES if not pretrained(layouts.config_of(name)).shape.plain_layers]
    yield from _cases({"seed": seed, "fused": True}, count, families)


def _cases(settings: Mapping[str, Any], count: int, families: Iterable[str]) -> Iterator[Case]:
    for family in families:
        chosen = len(list(islice(_layouts(family, settings), max(count, 0))))
        count -= chosen
        if chosen:
            yield Case(family, family, {**settings, "layouts": chosen}, weight=chosen)


def _layouts(family: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from layouts.every_layout(family)


def try_case(case: Case, work: Path) -> Result:
    """Take a family's steps on one rank and in its layouts; any difference above rounding is told.

    The one rank has plain layers; the others have Transformer Engine's, in torch, where these are asked for.
    """
    family = case.name
    folder = work / case.name
    shutil.rmtree(folder, ignore_errors=True)
    model = save_model(family, folder / family)
    torch.manual_seed(case.settings["seed"])

    torch.save(layouts.make_batch(model), folder / family / "batch.pt")
    fused = bool(case.settings.get("fused"))
    entries = list(islice(_layouts(family, case.settings), case.settings["layouts"]))
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

        ended = subprocess.run(
            [*command, str(layouts.WORKER), str(folder), "plan.json"],
            cwd=ROOT,
            env=launch_environment(*packages),
            capture_output=True,
            text=True,
            check=False,
            timeout=600 + PATIENCE * len(plan),
        )
        if ended.returncode:
            return Result("broken", ended.stderr[-4000:])

    wrong = [words for entry in entries for words in layouts.differences(folder, entry, fused)]
    if wrong:
        return Result("lost", "\n".join(wrong), {"differences": len(wrong)})

    shutil.rmtree(folder)
    return Result(HELD)
