"""The metrics that the documentation names, and which run of the tests writes which of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
WRITTEN_BY = {
    "a run with a warm-up": "eval/ reward/mean reward/valid group/ policy/ kl/ mismatch/ response/ memory/ "
    "throughput/ padding/ reshard/ time/generate time/reward time/score time/learn time/reshard "
    "time/evaluate time/checkpoint",
    "a run whose rewards fail": "reward/invalid_",
    "a run with an environment and servers": "environment/ reward/http/ reward/judge/",
    "a run with a critic": "critic/ reward/component/",
    "a run of a mixture": "router/",
    "a run that offloads": "offload/ time/offload",
    "a run that carries responses": "rollout/rounds rollout/partial rollout/carried "
    "rollout/not_begun staleness/token",
    "a run in the open order": "rollout/due rollout/complete",
    "a run with servers": "rollout/servers rollout/sampled_again",
    "a run that discards responses": "rollout/discarded",
    "a run that samples ahead": "staleness/m time/idle_",
}
"""Run -> the beginnings of the names that it has to write."""


def documented() -> list[str]:
    """Return the metrics in the page's table as patterns: capitals or a star stand for a word."""
    table = re.search(r"\| metric \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None
    names: list[str] = []
    for row in table[1].splitlines():
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            whole = name if not name.startswith("/") else names[-1].rpartition("/")[0] + name
            names += dict.fromkeys((re.sub(r"\[.*\]", "", whole), re.sub(r"[][]", "", whole)))
    return names


def unwritten(run: str, lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the metrics of the page that a run has to write and that none of its lines has."""
    written = {name for line in lines for name in line}
    beginnings = tuple(WRITTEN_BY[run].split())
    wanted = [name for name in documented() if name.startswith(beginnings)]
    assert wanted, run

    def pattern(name: str) -> str:
        return re.sub(r"[A-Z]+|\*", "[a-z0-9_]+", name)

    return [name for name in wanted if not any(re.fullmatch(pattern(name), other) for other in written)]
