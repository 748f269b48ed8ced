"""Metrics that docs/metrics.md documents, and which test run has to write each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
WRITTEN_BY = {
    "a run with a warm-up": "eval/ reward/mean reward/valid group/ policy/ kl/ mismatch/ response/ memory/ "
    "throughput/ padding/ reshard/ time/generate time/reward time/score time/learn time/reshard "
    "time/evaluate time/checkpoint health/",
    "a run whose rewards fail": "reward/invalid_",
    "a run with an environment and a server": "environment/ reward/http/",
    "a run with a judge": "reward/judge/",
    "a run with filters": "filtered/ reward/saved/",
    "a run that refills": "filtered/refilled",
    "a run of several sources": "reward/mean/ data/",
    "a run that skips uniform prompts": "curriculum/",
    "a run with a memory target": "memory/tokens_per memory/pass_",
    "a run that is short of memory": "memory/split_",
    "a run with a critic": "critic/ reward/component/",
    "a run with a teacher": "kl/teacher",
    "a run with a teacher behind a server": "teacher/",
    "a run with a teacher's most likely tokens": "kl/teacher distillation/",
    "a run of a mixture": "router/",
    "a run that offloads": "offload/ time/offload",
    "a run that carries responses": "rollout/rounds rollout/partial rollout/carried "
    "rollout/not_begun staleness/token",
    "a run in the open order": "rollout/due rollout/complete",
    "a run with servers": "rollout/servers rollout/sampled_again",
    "a run that discards responses": "rollout/discarded",
    "a run that samples ahead": "staleness/m time/idle_",
    "a run with limits of its own": "response/limit/ response/truncated_fraction/",
    "a run whose temperature changes": "rollout/temperature",
    "a run with older weights": "staleness/m rollout/version",
}
"""Description of a run -> prefixes of the metrics that it has to write, separated by spaces."""


def documented() -> list[str]:
    """Return the metrics in the page's table as patterns: capitals or a star stand for a word.

    A name with an optional part in brackets becomes two patterns, without and with that part.
    """
    table = re.search(r"\| metric \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None
    names: list[str] = []
    for row in table[1].splitlines():
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            # A name that begins with a slash shares the prefix of the name before it.
            if name.startswith("/"):
                name = names[-1].rpartition("/")[0] + name

            # Brackets enclose an optional part: without it, and with it.
            without_option = re.sub(r"\[.*\]", "", name)
            with_option = re.sub(r"[][]", "", name)
            names += dict.fromkeys((without_option, with_option))
    return names


def _longest_prefix(name: str) -> str:
    """Return the longest of all runs' prefixes that a metric begins with; empty for a metric of no run."""
    prefixes = " ".join(WRITTEN_BY.values()).split()
    matching = [prefix for prefix in prefixes if name.startswith(prefix)]
    return max(matching, key=len, default="")


def unwritten(run: str, lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the documented patterns that ``run`` must write, but that match no metric of its lines."""
    recorded = {name for line in lines for name in line}
    # Only metrics that this run has to write; others depend on its features.
    prefixes = tuple(WRITTEN_BY[run].split())
    expected = [name for name in documented() if _longest_prefix(name) in prefixes]
    assert expected, run

    def pattern(name: str) -> str:
        return re.sub(r"[A-Z]+|\*", "[a-z0-9_]+", name)

    return [name for name in expected if not any(re.fullmatch(pattern(name), metric) for metric in recorded)]
