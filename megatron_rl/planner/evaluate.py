"""Evaluate a file of scenarios: predict from inputs alone, then compare with what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.planner.constants import Constants
from megatron_rl.planner.predict import predict
from megatron_rl.planner.scenario import Scenario, without_answers
from megatron_rl.planner.tolerance import compared, inside, ratio


@dataclass
class Outcome:
    """Hold one scenario's predictions beside its measurements."""

    id: str
    kind: str
    predicted: dict[str, Any]
    measured: dict[str, Any]
    ratio: dict[str, float | None] = field(default_factory=dict)
    inside_by_key: dict[str, bool] = field(default_factory=dict)
    error: str | None = None

    @property
    def inside_tolerance(self) -> bool:
        """Say whether every measured key is inside its tolerance."""
        return self.error is None and all(self.inside_by_key.values())

    def record(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values."""
        return {
            "id": self.id,
            "kind": self.kind,
            "predicted": _plain(self.predicted),
            "measured": self.measured,
            "ratio": self.ratio,
            "inside_tolerance": self.inside_tolerance,
            "inside_tolerance_by_key": self.inside_by_key,
            "error": self.error,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def read_scenarios(path: str) -> list[dict[str, Any]]:
    """Read a JSON list of scenarios (or one scenario); raises UserError on anything else."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"no scenario file {path}", where="--scenario", fix="give an existing JSON file")
    try:
        data = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}", where=f"{path}:{error.lineno}") from None
    data = [data] if isinstance(data, Mapping) else data
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise UserError(f"{path} is not a list of scenarios", where=path, expected="a JSON list of objects")
    return [dict(entry) for entry in data]


def _choices(raw: Mapping[str, Any], key: str) -> Sequence[Any] | None:
    if key == "best":
        return list(raw.get("candidates") or ())
    if key == "best_rollout_tensor":
        return (raw.get("rollout") or {}).get("candidates_tensor") or [1, 2, 4, 8]
    return None


def _compare(raw: Mapping[str, Any], outcome: Outcome) -> None:
    tolerances = raw.get("tolerance") or {}
    for key, measured in outcome.measured.items():
        value = outcome.predicted.get(key)
        outcome.ratio[key] = ratio(value, measured)
        tolerance = tolerances.get(key) if isinstance(tolerances, Mapping) else tolerances
        outcome.inside_by_key[key] = inside(value, measured, tolerance, _choices(raw, key))


def evaluate(entries: Sequence[Mapping[str, Any]], constants: Constants) -> list[Outcome]:
    """Predict and compare every scenario; an error in one is recorded and does not stop the rest."""
    outcomes = []
    for raw in entries:
        scenario = Scenario(without_answers(raw), constants)
        outcome = Outcome(scenario.name, str(raw.get("kind")), {}, dict(raw.get("measured") or {}))
        try:
            outcome.predicted = predict(scenario)
            _compare(raw, outcome)
        except UserError as error:
            outcome.error = str(error)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OverflowError) as error:
            # A malformed field; the entry's author needs the scenario, not a traceback.
            outcome.error = f"scenario {scenario.name}: {type(error).__name__}: {error}"
        outcomes.append(outcome)
    _across(entries, {outcome.id: outcome for outcome in outcomes})
    return outcomes


def _across(entries: Sequence[Mapping[str, Any]], by_id: Mapping[str, Outcome]) -> None:
    """Check the rules that relate one scenario to another of the same file."""
    for raw in entries:
        own = by_id[str(raw.get("id", "?"))]
        rules = raw.get("compare") or []
        for rule in [rules] if isinstance(rules, Mapping) else rules:
            other = by_id.get(str(rule["other"]))
            label = f"{rule['key']} against {rule['other']}"
            mine = own.predicted.get(rule["key"])
            theirs = other.predicted.get(rule["key"]) if other else None
            if mine is None or theirs is None:
                own.inside_by_key[label] = False
                continue
            value, good = compared(mine, theirs, rule)
            own.ratio[label] = value
            own.inside_by_key[label] = good


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if isfinite(value) else "does not fit"
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a text table, one line per measured key."""
    lines = [f"{'id':8} {'quantity':36} {'predicted':>14} {'measured':>16} {'ratio':>7}  tolerance"]
    for outcome in outcomes:
        if outcome.error:
            lines += [f"{outcome.id:8} error"] + [f"    {line}" for line in outcome.error.splitlines()]
        keys = list(outcome.measured) or list(outcome.predicted)
        keys += [key for key in outcome.inside_by_key if key not in keys]
        for key in keys:
            found = outcome.ratio.get(key)
            verdict = {True: "inside", False: "OUTSIDE", None: ""}[outcome.inside_by_key.get(key)]
            predicted, measured = outcome.predicted.get(key, ""), outcome.measured.get(key, "")
            lines.append(
                f"{outcome.id:8} {key:36} {_number(predicted):>14} {_number(measured):>16} "
                f"{'' if found is None else format(found, '.3f'):>7}  {verdict}"
            )
    good = sum(outcome.inside_tolerance for outcome in outcomes)
    lines.append(f"{good} of {len(outcomes)} scenarios inside tolerance")
    return "\n".join(lines)
