"""Run the tests with the marker ``campaign``, which `launch/test.sh` leaves out.

A matrix, such as every family in several layouts, has cases that alone reach some code, and others that only
combine code that those reach. The suite runs the first; the others have the marker and run here.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.campaign.campaign import HELD, Case, Result
from tests.conftest import ROOT, launch_environment

SELECT = ("-m", "pytest", "-m", "campaign", "-p", "no:cacheprovider", "-q")
PATIENCE = 600
"""Seconds that each test of a case may take, as in the suite."""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield one case for each test function, up to ``count`` tests in total; the seed has no effect."""
    for name, tests in test_counts().items():
        if count <= 0:
            return
        count -= tests
        yield Case(
            name,
            Path(name.partition("::")[0]).stem,
            {"tests": tests},
            weight=tests,
        )


def test_counts(paths: Sequence[str] = ()) -> dict[str, int]:
    """Return the number of tests with the marker by function, in ``paths`` or everywhere."""
    command = [sys.executable, *SELECT, "--collect-only", *paths]
    collected = subprocess.run(
        command,
        cwd=ROOT,
        env=launch_environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    if collected.returncode:
        raise RuntimeError(f"pytest did not collect the tests: {collected.stdout[-2000:]}")
    tests = [line.partition("[")[0] for line in collected.stdout.splitlines() if "::" in line]
    return dict(Counter(tests))


def try_case(case: Case, work: Path) -> Result:
    """Run the tests of a function; their output goes to ``work``."""
    command = [sys.executable, *SELECT, case.name]
    log = work / f"{case.name.replace('/', '-').replace('::', '-')}.log"
    with log.open("w") as output:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=launch_environment(),
            stdout=output,
            stderr=output,
            check=False,
            timeout=PATIENCE * case.weight,
        ).returncode

    if code:
        return Result("failed", f"exit code {code}: {log}")
    return Result(HELD)
