"""Simulate ranks of the shipped configurations for large jobs, and compare them with `check`'s prediction."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.campaign import HELD, Case, Result
from tests.golden import record

MAX_DIFFERENCE = 10.0
"""Percent by which the prediction may differ from a simulated rank."""
PATIENCE = 1800
"""Seconds that a simulation may take."""
_ROW = re.compile(r"^ +(\d+)  (at rest|score|learn) .* ([+-][\d.]+)%$", re.MULTILINE)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the configurations named after their GPUs; the seed has no effect."""
    files = sorted((record.ROOT / "configs").rglob("*gpu.yaml"))[:count]
    yield from (Case(file.relative_to(record.ROOT).as_posix(), file.stem, {}) for file in files)


def try_case(case: Case, work: Path) -> Result:
    """Run `check --simulate` as a user does."""
    command = [
        sys.executable,
        "-m",
        "megatron_rl",
        "check",
        case.name,
        "--simulate",
        "--without-files",
    ]
    process = subprocess.run(
        command,
        cwd=record.ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    rows = _ROW.findall(process.stdout)
    if process.returncode or not rows:
        return Result(
            "lost",
            f"exit code {process.returncode}: {(process.stderr or process.stdout)[-500:]}",
        )

    differing = [
        f"rank {rank}, {phase}: {difference} %"
        for rank, phase, difference in rows
        if abs(float(difference)) > MAX_DIFFERENCE
    ]
    if differing:
        return Result("lost", "; ".join(differing))

    maximum = max(abs(float(difference)) for _, _, difference in rows)
    return Result(HELD, f"at most {maximum} % difference", {"phases": len(rows)})
