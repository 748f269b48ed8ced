"""Test the guarantees of a run on many generated cases of each kind in `KINDS`.

    launch/campaign.sh [KIND|all] [--count N] [--seed S] [--out DIR]

Each kind is a module beside this one with ``cases(seed, count)``, whose first cases are the same for every
greater count, and ``try_case(case, work)``, which returns a `Result`. A finished case is a line of
``DIR/KIND.jsonl`` and is not tried again, so an interrupted campaign resumes; delete the line, or the file,
to repeat the case. Exit code 1: a guarantee was broken.
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
    "damages": 200,
    "inputs": 1000,
    "rewards": 360,
    "leaks": 2000,
    "layouts": 2000,
    "kills": 200,
    "examples": 100,
    "fused_layouts": 1000,
    "simulations": 100,
    "combinations": 200,
    "matrices": 1000,
}
"""Kind of case -> number of cases without ``--count``, in the order of ``all``."""

HELD = "held"
OUTCOMES = (
    HELD,
    "lost",
    "unclear",
    "hang",
    "left over",
    "accepted",
    "failed",
    "broken",
)
"""How a case can end.

- ``held``: the guarantee held.
- ``lost``: a number, sample or file was lost or appeared twice.
- ``unclear``: an error was a traceback, or did not name its cause.
- ``hang``: the case did not end in time.
- ``left over``: processes, files or shared memory remained after the end.
- ``accepted``: an invalid input was accepted silently.
- ``failed``: a command of an example, or a test, failed.
- ``broken``: the campaign's own code failed.
"""


@dataclass(frozen=True)
class Case:
    """Trial that JSON values describe: equal cases are the same trial."""

    name: str
    """Unique in its kind and seed."""
    group: str
    """Row of the table that counts the case."""
    settings: Mapping[str, Any]
    weight: int = 1
    """Number of trials that the case counts for."""


@dataclass(frozen=True)
class Result:
    """Result of a case."""

    outcome: str
    """One of `OUTCOMES`."""
    detail: str = ""
    """Text that a person needs to investigate the case."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Sums for the table: how often something happened in this case, whatever its outcome."""


def incomplete_errors(
    errors: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return the errors, in the form of the check's JSON, that lack one of the four parts."""
    required = ("message", "where", "expected", "got", "fix")
    return [error for error in errors if not all(error[field] for field in required)]


class Kind(Protocol):
    """Interface of the modules of trials."""

    def cases(self, seed: int, count: int) -> Iterable[Case]:
        """Return cases with a total weight of at least ``count``."""
        ...

    def try_case(self, case: Case, work: Path) -> Result:
        """Try a case in the folder ``work``, which all cases of the kind share and which persists."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the cases of the command line; return the exit code."""
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

    options = parser.parse_args(arguments)
    # An exception and not the default end, so that `finally` blocks end child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    selected_kinds = [options.kind]
    if options.kind == "all":
        selected_kinds = list(KINDS)
    results = {}
    for kind in selected_kinds:
        count = options.count or KINDS[kind]
        results[kind] = run(kind, count, options.seed, options.out.resolve())

    for kind, lines in results.items():
        print(table(kind, lines), flush=True)
    return int(any(line["outcome"] != HELD for lines in results.values() for line in lines))


def run(kind: str, count: int, seed: int, out: Path) -> list[dict[str, Any]]:
    """Try the cases of a kind that have no result yet; return the results of all."""
    module: Kind = importlib.import_module(f"tests.campaign.{kind}")  # type: ignore[assignment]
    work = out / kind
    work.mkdir(parents=True, exist_ok=True)
    file = out / f"{kind}.jsonl"
    recorded_lines = read_results(file)

    lines = []
    cases = list(module.cases(seed, count))
    for number, case in enumerate(cases, start=1):
        # A case with a result is not tried again.
        key = json.dumps([seed, asdict(case)], sort_keys=True)
        if key not in recorded_lines:
            line = try_and_record(module, case, work) | {
                "seed": seed,
                "case": asdict(case),
            }

            # Each result is written at once, so that an interrupted campaign loses one case at most.
            with file.open("a") as target:
                target.write(json.dumps(line) + "\n")
            recorded_lines[key] = line

            # The last line of an error names its cause.
            progress = f"{kind} {number}/{len(cases)} {case.name}: {line['outcome']} {line['seconds']:.1f} s"
            if line["outcome"] != HELD:
                progress += f": {line['detail'].strip().splitlines()[-1:]}"
            print(progress, flush=True)
        lines.append(recorded_lines[key])
    return lines


def try_and_record(module: Kind, case: Case, work: Path) -> dict[str, Any]:
    """Try one case and return its line of the results file."""
    started = time.monotonic()
    try:
        result = module.try_case(case, work)
    except Exception:
        result = Result("broken", traceback.format_exc())
    if result.outcome not in OUTCOMES:
        result = Result("broken", f"no outcome is named {result.outcome!r}: {result.detail}")
    return asdict(result) | {"seconds": round(time.monotonic() - started, 2)}


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a results file by seed and case, without a line that was cut off at the end."""
    if not file.exists():
        return {}

    lines = {}
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            # A campaign that was killed may have left half a line.
            continue
        lines[json.dumps([line["seed"], line["case"]], sort_keys=True)] = line
    return lines


def table(kind: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a kind's table: one row per group with the weight of each outcome, then the sums of counts."""
    # A case counts in its group and in the last row.
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    counts: Counter[str] = Counter()
    for line in lines:
        case = line["case"]
        for group in (case["group"], "in all"):
            outcomes[group][line["outcome"]] += case["weight"]
        counts.update(line["counts"])

    # Outcomes that did not occur have no column.
    columns = [name for name in OUTCOMES if name == HELD or outcomes["in all"][name]]
    width = max([len(kind), *map(len, outcomes)])
    rows = [f"{kind:<{width}}  " + "  ".join(f"{name:>9}" for name in ("tried", *columns))]
    for group in sorted(outcomes, key=lambda name: (name == "in all", name)):
        numbers = [
            outcomes[group].total(),
            *(outcomes[group][name] for name in columns),
        ]
        rows.append(f"{group:<{width}}  " + "  ".join(f"{number:>9}" for number in numbers))

    rows += [f"  {name}: {number:g}" for name, number in sorted(counts.items())]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
