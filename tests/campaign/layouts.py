"""Take a step of every family in every product of parallel sizes on four ranks; compare its every tensor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from tests.campaign.campaign import HELD, Case, Result
from tests.conftest import ROOT, launch_environment
from tests.distributed import test_layout_invariance as layouts
from tests.hf_models import FAMILIES, save_model

PATIENCE = 5.0
"""Seconds that a layout may take, and each launch a hundred more."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the families, each with its layouts, until there are ``count`` of these."""
    for family in FAMILIES:
        chosen = [entry["name"] for entry in islice(layouts.every_layout(family), max(count, 0))]
        count -= len(chosen)
        if chosen:
            yield Case(family, family, {"seed": seed, "layouts": len(chosen)}, weight=len(chosen))


def try_case(case: Case, work: Path) -> Result:
    """Take a family's steps on one rank and in its layouts; any difference above rounding is told."""
    family, folder = case.name, work / case.name
    shutil.rmtree(folder, ignore_errors=True)
    model = save_model(family, folder / family)
    torch.manual_seed(case.settings["seed"])
    torch.save(layouts.make_batch(model), folder / family / "batch.pt")
    entries = list(islice(layouts.every_layout(family), case.settings["layouts"]))
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
        ended = subprocess.run(
            [*command, str(layouts.WORKER), str(folder), "plan.json"],
            cwd=ROOT, env=launch_environment(), capture_output=True, text=True, check=False,
            timeout=600 + PATIENCE * len(plan),
        )  # fmt: skip
        if ended.returncode:
            return Result("broken", ended.stderr[-4000:])
    wrong = [words for entry in entries for words in layouts.differences(folder, entry)]
    if wrong:
        return Result("lost", "\n".join(wrong), {"differences": len(wrong)})
    shutil.rmtree(folder)
    return Result(HELD)
