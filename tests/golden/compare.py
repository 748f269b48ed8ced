"""Compare two recordings of the golden runs, number by number, to the last bit.

    launch/golden.sh compare DIR_A DIR_B

Differing values are listed by run and step, with the metric, sample column or tensor. Metrics that only one
recording has are listed separately. `renamed.yaml` beside this file maps A's old names of metrics, files and
columns to new ones.

Exit code 0: no difference; 1: a value differs, or a run, step, table or tensor is missing; 3: only names of
metrics differ.
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
    """Differences between two recordings of one run, as lines of text."""

    metrics: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def differences(self) -> int:
        """Return the number of values that differ."""
        return len(self.metrics) + len(self.samples) + len(self.weights)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the recordings of two folders and print the differences; return the exit code."""
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

    options = parser.parse_args(arguments)
    renamed = read_renamed()
    files = [*options.a.glob("*.json"), *options.b.glob("*.json")]
    runs = sorted({file.stem for file in files})
    if not runs:
        parser.error(f"no recordings in {options.a} or {options.b}")

    # Values decide the exit code before names do: a renamed metric must not hide a difference.
    value_differences = 0
    name_differences = 0
    for run in runs:
        a = read_recording(options.a / f"{run}.json")
        b = read_recording(options.b / f"{run}.json")
        # A run that only one revision has counts as a difference.
        if a is None or b is None:
            recorded = options.a
            if a is None:
                recorded = options.b
            print(f"{run}: recorded only in {recorded}")
            value_differences += 1
            continue
        comparison = compare(rename(a, renamed), b)
        print_comparison(run, comparison, counts(b))
        value_differences += comparison.differences()
        name_differences += len(comparison.names)

    if value_differences:
        return DIFFERENT
    if name_differences:
        return RENAMED_ONLY
    return 0


def read_renamed() -> dict[str, str]:
    """Return the mapping of old to new names, empty without `renamed.yaml`."""
    if not RENAMED.exists():
        return {}
    import yaml

    return yaml.safe_load(RENAMED.read_text()) or {}


def read_recording(file: Path) -> dict[str, Any] | None:
    """Return a recording, or None if it does not exist."""
    if not file.exists():
        return None
    return json.loads(file.read_text())


def rename(value: Any, renamed: Mapping[str, str]) -> Any:
    """Return nested mappings with their keys renamed."""
    if not isinstance(value, Mapping):
        return value
    return {renamed.get(name, name): rename(nested_value, renamed) for name, nested_value in value.items()}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two recordings of a run."""
    comparison = Comparison()
    # Stages come first, as in the run: a difference there explains the later ones.
    for file in sorted(
        {*a["metrics"], *b["metrics"]},
        key=lambda name: (name == "metrics.jsonl", name),
    ):
        first = a["metrics"].get(file, {})
        second = b["metrics"].get(file, {})
        comparison.names += one_sided_names(file, first, second)
        comparison.metrics += [f"{file} {line}" for line in differing_metrics(first, second)]

    comparison.samples = list(differing_digests(a["samples"], b["samples"]))
    comparison.weights = list(differing_digests(a["weights"], b["weights"]))
    return comparison


def one_sided_names(file: str, a: Table, b: Table) -> list[str]:
    """Describe the metrics that only one side has, with their steps."""
    # For example a metric that was renamed, or one that a new feature adds.
    lines = []
    for side, having, lacking in (("A", a, b), ("B", b, a)):
        if not lacking:
            continue  # a missing file counts as a difference of values instead
        for name in union(*having.values()):
            if not any(name in values for values in lacking.values()):
                steps = [step for step, values in having.items() if name in values]
                lines.append(f"only in {side}: {file} {name} (steps {', '.join(steps)})")
    return lines


def differing_metrics(a: Table, b: Table) -> Iterator[str]:
    """Yield a line for each value that differs and each step that one side lacks, in order of steps."""
    # A metric that one side never has is a difference of names, reported once and not in every step.
    common = set(union(*a.values())) & set(union(*b.values()))
    for step in sorted({*a, *b}, key=int):
        if step not in a or step not in b:
            yield f"step {step}: only in {side_of(step, a)}"
            continue
        for name in sorted(common & {*a[step], *b[step]}):
            first = a[step].get(name, "absent")
            second = b[step].get(name, "absent")
            if first != second:
                yield f"step {step} {name}: {number(first)} and {number(second)}{distance(first, second)}"


def differing_digests(a: Table, b: Table) -> Iterator[str]:
    """Yield a line for each digest that differs or that one side lacks."""
    # Groups are steps of samples, or folders of weights.
    for group in sorted({*a, *b}, key=natural):
        if group not in a or group not in b:
            yield f"{group}: only in {side_of(group, a)}"
            continue
        for name in union(a[group], b[group]):
            if name not in a[group] or name not in b[group]:
                yield f"{group} {name}: only in {side_of(name, a[group])}"
            elif a[group][name] != b[group][name]:
                yield f"{group} {name}"


def side_of(key: str, a: Mapping[str, Any]) -> str:
    """Return the name of the side that has a key which only one side has."""
    return "A" if key in a else "B"


def union(*mappings: Mapping[str, Any]) -> list[str]:
    """Return the sorted keys of all mappings."""
    return sorted({name for mapping in mappings for name in mapping})


def natural(name: str) -> list[Any]:
    """Return a sort key that puts step_2 before step_10."""
    # Numbers compare as numbers and before words, so that the types of two keys never mix.
    components = name.replace(".", "_").split("_")
    key: list[Any] = []
    for component in components:
        if component.isdigit():
            key.append((0, int(component), ""))
        else:
            key.append((1, 0, component))
    return key


def number(text: str | None) -> str:
    """Return a hexadecimal number in decimal, with all its digits."""
    if text is None:
        return "not finite"
    if text == "absent":
        return text
    return repr(float.fromhex(text))


def distance(a: str | None, b: str | None) -> str:
    """Return the relative difference of two numbers as text, empty if one is missing or not finite."""
    if a is None or b is None or "absent" in (a, b):
        return ""
    # Recordings contain hexadecimal numbers.
    x = float.fromhex(a)
    y = float.fromhex(b)
    scale = max(abs(x), abs(y))
    # Numbers that compare equal can still differ in their bits.
    if not scale:
        return " (signs of zero)"
    return f" (relative {abs(x - y) / scale:.1e})"


def counts(recording: Mapping[str, Any]) -> str:
    """Return the numbers of a recording's metrics, columns and tensors as text."""
    values = sum(len(step) for file in recording["metrics"].values() for step in file.values())
    columns = sum(len(group) for group in recording["samples"].values())
    tensors = sum(len(group) for group in recording["weights"].values())
    return f"{values} metrics, {columns} columns of samples, {tensors} tensors"


def print_comparison(run: str, comparison: Comparison, size: str) -> None:
    """Print the differences of a run: the first lines of each kind, and their number."""
    if not comparison.differences():
        print(f"{run}: equal ({size})")
    for kind in ("metrics", "samples", "weights"):
        print_some(f"{run}: {kind} that differ", getattr(comparison, kind))
    print_some(f"{run}: names of metrics on one side alone", comparison.names)


def print_some(title: str, lines: Sequence[str]) -> None:
    """Print a title with the number of lines, and the first lines below it; nothing without lines."""
    if not lines:
        return
    print(f"{title}: {len(lines)}")
    for line in lines[:SHOWN]:
        print(f"  {line}")
    if len(lines) > SHOWN:
        print(f"  … and {len(lines) - SHOWN} more")


if __name__ == "__main__":
    sys.exit(main())
