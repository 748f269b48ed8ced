"""Compare two recordings of the golden runs, number by number, to the last bit.

    launch/golden.sh compare DIR_A DIR_B

Values that differ are listed by run, step and metric, sample column or tensor; names of metrics that one side
alone has are listed apart. Exit code 0: no difference; 1: values differ, or a run, step, table or tensor is
missing; 3: only names of metrics are. Where `renamed.yaml` lies beside this file, its names (old: new) of
metrics, files and columns are A's old ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RENAMED = Path(__file__).with_name("renamed.yaml")
SHOWN = 20
DIFFERENT = 1
RENAMED_ONLY = 3
"""Exit codes; 2 is a wrong command line."""

Table = Mapping[str, Mapping[str, Any]]


@dataclass
class Comparison:
    """Hold what differs between two recordings of one run."""

    metrics: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def differences(self) -> int:
        """Return how many values differ."""
        return len(self.metrics) + len(self.samples) + len(self.weights)


def main(words: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="launch/golden.sh compare", description=__doc__)
    parser.add_argument(
        "a",
        type=Path,
        metavar="DIR_A",
        help="the recording of the old revision",
    )

    parser.add_argument(
        "b",
        type=Path,
        metavar="DIR_B",
        help="the recording of the new revision",
    )

    options = parser.parse_args(words)
    renamed = read_renamed()
    runs = sorted({file.stem for side in (options.a, options.b) for file in side.glob("*.json")})
    if not runs:
        parser.error(f"no recordings in {options.a} or {options.b}")

    different = names = 0
    for run in runs:
        a, b = (read_recording(side / f"{run}.json") for side in (options.a, options.b))
        if a is None or b is None:
            print(f"{run}: recorded only in {options.a if b is None else options.b}")
            different += 1
            continue
        found = compare(rename(a, renamed), b)
        print_comparison(run, found, counts(b))
        different += found.differences()
        names += len(found.names)
    return DIFFERENT if different else RENAMED_ONLY if names else 0


def read_renamed() -> dict[str, str]:
    """Return the new names of what was renamed, by their old ones."""
    if not RENAMED.exists():
        return {}
    import yaml

    return yaml.safe_load(RENAMED.read_text()) or {}


def read_recording(file: Path) -> dict[str, Any] | None:
    """Return a recording, or None where there is none."""
    return json.loads(file.read_text()) if file.exists() else None


def rename(value: Any, renamed: Mapping[str, str]) -> Any:
    """Return nested mappings with new names in the place of old ones."""
    if not isinstance(value, Mapping):
        return value
    return {renamed.get(name, name): rename(inner, renamed) for name, inner in value.items()}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Return what differs between two recordings of a run."""
    found = Comparison()
    # What a run does before its first step comes first.
    for file in sorted({*a["metrics"], *b["metrics"]}, key=lambda name: (name == "metrics.jsonl", name)):
        mine, other = (side["metrics"].get(file, {}) for side in (a, b))
        found.names += one_sided_names(file, mine, other)
        found.metrics += [f"{file} {line}" for line in differing_metrics(mine, other)]

    found.samples = list(differing_digests(a["samples"], b["samples"]))
    found.weights = list(differing_digests(a["weights"], b["weights"]))
    return found


def one_sided_names(file: str, a: Table, b: Table) -> list[str]:
    """Return the metrics that one side never has, with the steps in which the other has them."""
    lines = []
    for side, mine, other in (("A", a, b), ("B", b, a)):
        if not other:
            continue  # the whole file is missing, which counts as a difference
        for name in union(*mine.values()):
            if not any(name in values for values in other.values()):
                steps = [step for step, values in mine.items() if name in values]
                lines.append(f"only in {side}: {file} {name} (steps {', '.join(steps)})")
    return lines


def differing_metrics(a: Table, b: Table) -> Iterator[str]:
    """Yield a line for each value that differs and each step that one side lacks, the earliest first."""
    shared = set(union(*a.values())) & set(union(*b.values()))
    for step in sorted({*a, *b}, key=int):
        if step not in a or step not in b:
            yield f"step {step}: only in {'A' if step in a else 'B'}"
            continue
        for name in sorted(shared & {*a[step], *b[step]}):
            mine, other = (side[step].get(name, "absent") for side in (a, b))
            if mine != other:
                yield f"step {step} {name}: {number(mine)} and {number(other)}{distance(mine, other)}"


def differing_digests(a: Table, b: Table) -> Iterator[str]:
    """Yield a line for each digest that differs, and for what one side lacks."""
    for group in sorted({*a, *b}, key=natural):
        if group not in a or group not in b:
            yield f"{group}: only in {'A' if group in a else 'B'}"
            continue
        for name in union(a[group], b[group]):
            if name not in a[group] or name not in b[group]:
                yield f"{group} {name}: only in {'A' if name in a[group] else 'B'}"
            elif a[group][name] != b[group][name]:
                yield f"{group} {name}"


def union(*mappings: Mapping[str, Any]) -> list[str]:
    """Return the names of all mappings, sorted."""
    return sorted({name for mapping in mappings for name in mapping})


def natural(name: str) -> list[Any]:
    """Return a sorting key that puts step_2 before step_10."""
    words = name.replace(".", "_").split("_")
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in words]


def number(text: str | None) -> str:
    """Return an exact number as people read it, with every digit that it needs."""
    if text is None:
        return "not finite"
    return text if text == "absent" else repr(float.fromhex(text))


def distance(a: str | None, b: str | None) -> str:
    """Return how far two numbers lie apart in proportion, where that can be said."""
    if a is None or b is None or "absent" in (a, b):
        return ""
    x = float.fromhex(a)
    y = float.fromhex(b)
    largest = max(abs(x), abs(y))
    return f" (relative {abs(x - y) / largest:.1e})" if largest else " (signs of zero)"


def counts(recording: Mapping[str, Any]) -> str:
    """Return how much a recording holds."""
    values = sum(len(step) for file in recording["metrics"].values() for step in file.values())
    columns, tensors = (
        sum(len(group) for group in recording[kind].values()) for kind in ("samples", "weights")
    )
    return f"{values} metrics, {columns} columns of samples, {tensors} tensors"


def print_comparison(run: str, found: Comparison, size: str) -> None:
    """Print what differs in a run: the first lines of each kind, and how many there are."""
    if not found.differences():
        print(f"{run}: equal ({size})")
    for kind in ("metrics", "samples", "weights"):
        print_some(f"{run}: {kind} that differ", getattr(found, kind))
    print_some(f"{run}: names of metrics on one side alone", found.names)


def print_some(title: str, lines: Sequence[str]) -> None:
    """Print the first lines below a title with their number, and nothing where there are none."""
    if not lines:
        return
    print(f"{title}: {len(lines)}")
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  … and {len(lines) - SHOWN} more")


if __name__ == "__main__":
    sys.exit(main())
