"""Hold the promises of a run against many cases, of the `KINDS` below.

    launch/campaign.sh [KIND|all] [--count N] [--seed S] [--out DIR]

Each kind is a module beside this one with ``cases(seed, count)``, whose first cases are the same for every
greater count, and ``try_case(case, work)``, which returns a `Result`. A finished case is a line of
``DIR/KIND.jsonl`` and is not tried again, so a campaign that was ended goes on where it was; delete the line,
or the file, to try it once more. Exit code 1: a promise was broken.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

KINDS: Mapping[str, int] = {
    "damages": 200, "inputs": 1000, "rewards": 360, "leaks": 2000, "layouts": 2000, "kills": 200,
    "examples": 100, "fused_layouts": 1000, "simulations": 100, "combinations": 200,
}  # fmt: skip
"""What can be tried, in the order of ``all``, and how much of it without ``--count``."""

HELD = "held"
OUTCOMES = (HELD, "lost", "unclear", "hang", "left over", "accepted", "failed", "broken")
"""How a case can end: the promise held; a number, sample or file was lost or came twice; an error was a
traceback, or did not name what is wrong; no end in time; processes, files or shared memory stayed behind;
what is wrong was taken without a word; an example's command failed; the campaign's own code did."""


@dataclass(frozen=True)
class Case:
    """Describe one trial by values that JSON holds: equal cases are the same trial.

    ``name`` is unique in its kind and seed, ``group`` is its row of the table, ``weight`` what it counts for.
    """

    name: str
    group: str
    settings: Mapping[str, Any]
    weight: int = 1


@dataclass(frozen=True)
class Result:
    """Say how a case ended: one of `OUTCOMES`, and in ``detail`` what a person needs to look into it.

    ``counts`` are sums for the table: what happened how often in this case, whatever its outcome.
    """

    outcome: str
    detail: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)


def vague(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the errors of a check, as its JSON has them, that lack a part."""
    parts = ("message", "where", "expected", "got", "fix")
    return [error for error in errors if not all(error[part] for part in parts)]


class Kind(Protocol):
    """A module of trials."""

    def cases(self, seed: int, count: int) -> Iterable[Case]:
        """Return cases of a weight of ``count`` in all, or just over it."""
        ...

    def try_case(self, case: Case, work: Path) -> Result:
        """Try a case; ``work`` is a folder that all cases of the kind share and that stays."""
        ...


def main(words: Sequence[str] | None = None) -> int:
    """Try the cases that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="launch/campaign.sh", description=__doc__)
    parser.add_argument("kind", nargs="?", default="all", choices=[*KINDS, "all"])
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        help=f"how many of the kind, if not {dict(KINDS)}",
    )

    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/campaign"),
        metavar="DIR",
    )

    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended
    kinds = list(KINDS) if options.kind == "all" else [options.kind]

    results = {
        kind: run(kind, options.count or KINDS[kind], options.seed, options.out.resolve()) for kind in kinds
    }
    for kind, lines in results.items():
        print(table(kind, lines), flush=True)
    return int(any(line["outcome"] != HELD for lines in results.values() for line in lines))


def run(kind: str, count: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """Try the cases of a kind that have no result yet; return the lines of all."""
    module: Kind = importlib.import_module(f"tests.campaign.{kind}")  # type: ignore[assignment]
    work = out / kind
    work.mkdir(parents=True, exist_ok=True)
    file = out / f"{kind}.jsonl"
    done = finished(file)

    lines = []
    cases = list(module.cases(seed, count))
    for number, case in enumerate(cases, start=1):
        key = json.dumps([seed, asdict(case)], sort_keys=True)
        if key not in done:
            line = tried(module, case, work) | {"seed": seed, "case": asdict(case)}
            with file.open("a") as target:
                target.write(json.dumps(line) + "\n")
            done[key] = line
            told = "" if line["outcome"] == HELD else f": {line['detail'].strip().splitlines()[-1:]}"
            progress = f"{kind} {number}/{len(cases)} {case.name}: {line['outcome']} {line['seconds']:.1f} s"
            print(progress + told, flush=True)
        lines.append(done[key])
    return lines


def tried(module: Kind, case: Case, work: Path) -> dict[str, Any]:
    """Return the line of one case."""
    begun = time.monotonic()
    try:
        result = module.try_case(case, work)
    except Exception:
        result = Result("broken", traceback.format_exc())
    if result.outcome not in OUTCOMES:
        result = Result("broken", f"no outcome is named {result.outcome!r}: {result.detail}")
    return asdict(result) | {"seconds": round(time.monotonic() - begun, 2)}


def finished(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a results file by seed and case; one that was cut off at the end is left out."""
    lines = {}
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines[json.dumps([line["seed"], line["case"]], sort_keys=True)] = line
    return lines


def table(kind: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of a kind: a row per group with the weight of each outcome, then the sums."""
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    for line in lines:
        case = line["case"]
        for group in (case["group"], "in all"):
            outcomes[group][line["outcome"]] += case["weight"]
        counts.update(line["counts"])

    shown = [name for name in OUTCOMES if name == HELD or outcomes["in all"][name]]
    width = max([len(kind), *map(len, outcomes)])
    rows = [f"{kind:<{width}}  " + "  ".join(f"{name:>9}" for name in ("tried", *shown))]
    for group in sorted(outcomes, key=lambda name: (name == "in all", name)):
        numbers = [outcomes[group].total(), *(outcomes[group][name] for name in shown)]
        rows.append(f"{group:<{width}}  " + "  ".join(f"{number:>9}" for number in numbers))

    rows += [f"  {name}: {number:g}" for name, number in sorted(counts.items())]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
