"""Compare the planner's predictions with published measurements.

    python benchmarks/planner/grade.py                  # the 21 points the constants are calibrated on
    python benchmarks/planner/grade.py FILE [--json FILE] [--constants FILE]    # scenarios of your own

README.md in this folder describes the format of scenarios. The exit code is 1 if a scenario is outside its
tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from predict import predict
from scenario import Scenario, without_measurements
from tolerance import compare_scenario_values, is_inside, ratio

from megatron_rl.errors import UserError
from megatron_rl.shapes.hardware import Constants, load_constants


@dataclass
class Outcome:
    """Predictions of one scenario with its measurements."""

    id: str
    """Id of the scenario."""
    kind: str
    """Kind of the scenario."""
    predicted: dict[str, Any]
    """Predicted quantities by key."""
    measured: dict[str, Any]
    """Measured quantities by key."""
    ratio: dict[str, float | None] = field(default_factory=dict)
    """Predicted / measured by key; for a rule between two scenarios, their ratio or difference."""
    inside_by_key: dict[str, bool] = field(default_factory=dict)
    """Whether the prediction is inside its tolerance, by key."""
    error: str | None = None
    """Reason why the scenario could not be predicted, or None."""

    @property
    def inside_tolerance(self) -> bool:
        """Return whether every measured key is inside its tolerance."""
        return self.error is None and all(self.inside_by_key.values())

    def record(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values."""
        return {
            "id": self.id,
            "kind": self.kind,
            "predicted": _to_json_value(self.predicted),
            "measured": self.measured,
            "ratio": self.ratio,
            "inside_tolerance": self.inside_tolerance,
            "inside_tolerance_by_key": self.inside_by_key,
            "error": self.error,
        }


def _to_json_value(value: Any) -> Any:
    """Convert a predicted value for JSON: infinity, the value of a layout that does not fit, becomes None."""
    if isinstance(value, Mapping):
        return {key: _to_json_value(item) for key, item in value.items()}
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def read_scenarios(path: str) -> list[dict[str, Any]]:
    """Read a JSON list of scenarios, or one scenario; raises UserError for any other content."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no scenario file {path}", where="command line", fix="give an existing JSON file")

    try:
        data = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}", where=f"{path}:{error.lineno}") from None

    if isinstance(data, Mapping):
        data = [data]
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise UserError(f"{path} is not a list of scenarios", where=path, expected="a JSON list of objects")
    return [dict(entry) for entry in data]


def _candidates(entry: Mapping[str, Any], key: str) -> Sequence[Any] | None:
    """Return the candidates of the choice ``key`` in the order of the scenario; None for other keys.

    The tolerance `ordering` counts steps in this order.
    """
    if key == "best":
        return list(entry.get("candidates") or ())
    if key == "best_rollout_tensor":
        return (entry.get("rollout") or {}).get("candidates_tensor") or [1, 2, 4, 8]
    return None


def _compare(entry: Mapping[str, Any], outcome: Outcome) -> None:
    """Compare the measurements of a scenario with the predictions, and store the result in ``outcome``."""
    tolerances = entry.get("tolerance") or {}
    for key, measurement in outcome.measured.items():
        prediction = outcome.predicted.get(key)
        outcome.ratio[key] = ratio(prediction, measurement)
        # A single tolerance applies to all keys.
        tolerance = tolerances
        if isinstance(tolerances, Mapping):
            tolerance = tolerances.get(key)
        outcome.inside_by_key[key] = is_inside(prediction, measurement, tolerance, _candidates(entry, key))


def evaluate(entries: Sequence[Mapping[str, Any]], constants: Constants) -> list[Outcome]:
    """Predict and compare every scenario; an error in a scenario does not stop the other scenarios."""
    outcomes = []
    for entry in entries:
        # The prediction gets a copy without the measurements.
        scenario = Scenario(without_measurements(entry), constants)
        outcome = Outcome(scenario.name, str(entry.get("kind")), {}, dict(entry.get("measured") or {}))
        try:
            outcome.predicted = predict(scenario)
            _compare(entry, outcome)
        except UserError as error:
            outcome.error = str(error)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as error:
            # Report a malformed field with the name of the scenario instead of a traceback.
            outcome.error = f"scenario {scenario.name}: {type(error).__name__}: {error}"
        outcomes.append(outcome)

    _compare_scenarios(entries, {outcome.id: outcome for outcome in outcomes})
    return outcomes


def _compare_scenarios(entries: Sequence[Mapping[str, Any]], by_id: Mapping[str, Outcome]) -> None:
    """Check the rules between two scenarios of the same file."""
    for entry in entries:
        outcome = by_id[str(entry.get("id", "?"))]
        # A single rule may be written without a list.
        rules = entry.get("compare") or []
        if isinstance(rules, Mapping):
            rules = [rules]

        for rule in rules:
            reference = by_id.get(str(rule["other"]))
            label = f"{rule['key']} against {rule['other']}"
            value = outcome.predicted.get(rule["key"])
            reference_value = None

            if reference is not None:
                reference_value = reference.predicted.get(rule["key"])

            # A rule with a failed or missing scenario is not fulfilled.
            if value is None or reference_value is None:
                outcome.inside_by_key[label] = False
                continue
            outcome.ratio[label], outcome.inside_by_key[label] = compare_scenario_values(
                value, reference_value, rule
            )


def _format_value(value: Any) -> str:
    """Format a value for a cell of the table."""
    if isinstance(value, float):
        if not isfinite(value):
            return "does not fit"
        return f"{value:.4g}"
    if isinstance(value, list | dict):
        return json.dumps(value)
    return str(value)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a text table, one line per measured key."""
    verdicts = {True: "inside", False: "OUTSIDE", None: ""}
    lines = [f"{'id':8} {'quantity':36} {'predicted':>14} {'measured':>16} {'ratio':>7}  tolerance"]
    for outcome in outcomes:
        if outcome.error:
            lines += [f"{outcome.id:8} error"] + [f"    {line}" for line in outcome.error.splitlines()]

        # List the measured keys (or all predicted keys, without measurements), then the rules.
        keys = list(outcome.measured) or list(outcome.predicted)
        keys += [key for key in outcome.inside_by_key if key not in keys]
        for key in keys:
            key_ratio = outcome.ratio.get(key)
            ratio_text = "" if key_ratio is None else f"{key_ratio:.3f}"
            prediction = _format_value(outcome.predicted.get(key, ""))
            measurement = _format_value(outcome.measured.get(key, ""))
            verdict = verdicts[outcome.inside_by_key.get(key)]
            lines.append(
                f"{outcome.id:8} {key:36} {prediction:>14} {measurement:>16} {ratio_text:>7}  {verdict}"
            )

    num_inside = sum(outcome.inside_tolerance for outcome in outcomes)
    lines.append(f"{num_inside} of {len(outcomes)} scenarios inside tolerance")
    return "\n".join(lines)


def main(command_line: Sequence[str] | None = None) -> int:
    """Print predictions and measurements; return 1 if a scenario is outside its tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", default=str(Path(__file__).with_name("points.json")))
    parser.add_argument("--json", metavar="FILE", help="write the outcomes as JSON")

    parser.add_argument("--constants", metavar="FILE", help="constants that override the packaged ones")
    options = parser.parse_args(command_line)

    try:
        outcomes = evaluate(read_scenarios(options.file), load_constants(options.constants))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2

    print(table(outcomes))
    if options.json:
        Path(options.json).write_text(json.dumps([outcome.record() for outcome in outcomes], indent=1) + "\n")
    return int(not all(outcome.inside_tolerance for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
