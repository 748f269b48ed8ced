"""Simulate ranks of each shipped configuration of a large job, and hold the estimate of `check` to them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.campaign import HELD, Case, Result
from tests.golden import record

APART = 10.0
"""Percent by which `check` may differ from a simulated rank."""
PATIENCE = 1800
_ROW = re.compile(r"^ +(\d+)  (at rest|score|learn) .* ([+-][\d.]+)%$", re.MULTILINE)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the configurations that are named after their GPUs; a seed changes nothing."""
    files = sorted((record.ROOT / "configs").rglob("*gpu.yaml"))[:count]
    yield from (Case(file.relative_to(record.ROOT).as_posix(), file.stem, {}) for file in files)


def try_case(case: Case, work: Path) -> Result:
    """Run `check --simulate` as a user does."""
    words = [sys.executable, "-m", "megatron_rl", "check", case.name, "--simulate", "--without-files"]
    done = subprocess.run(
        words,
        cwd=record.ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )

    rows = _ROW.findall(done.stdout)
    if done.returncode or not rows:
        return Result("lost", f"exit code {done.returncode}: {(done.stderr or done.stdout)[-500:]}")

    far = [f"rank {rank}, {phase}: {apart} %" for rank, phase, apart in rows if abs(float(apart)) > APART]
    if far:
        return Result("lost", "; ".join(far))

    most = max(abs(float(apart)) for _, _, apart in rows)
    return Result(HELD, f"at most {most} % apart", {"phases": len(rows)})
