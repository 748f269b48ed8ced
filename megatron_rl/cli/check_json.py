"""The result of a check for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.algorithms.lookup import scoring_reason
from megatron_rl.check.configuration import CheckReport
from megatron_rl.config.budget import PHASES
from megatron_rl.config.load import flatten, to_plain


def report_json(report: CheckReport) -> dict[str, Any]:
    """Return the report as plain values; sizes are in bytes, lengths in tokens."""
    values = flatten(report.config)
    return {
        "valid": not report.errors,
        "untried": report.untried,
        "world_size": report.world_size,
        "errors": [error.to_json() for error in report.errors],
        "warnings": [warning.to_json() for warning in report.warnings],
        "config": {
            path: {"value": to_plain(value), "origin": origin.kind, "detail": origin.detail}
            for path, value in values.items()
            if (origin := report.origins[path]) is not None
        },
        "batch": dataclasses.asdict(report.batch) if report.batch else None,
        "scoring_pass": scoring_reason(report.config, report.algorithm) if report.algorithm else None,
        "roles": {
            role: {**dataclasses.asdict(layout), "data": layout.data}
            for role, layout in (report.layouts or {}).items()
        },
        "model": {**dataclasses.asdict(report.shape), "parameters": report.shape.parameters}
        if report.shape
        else None,
        "memory": [
            {
                "rank": memory.rank,
                "total": {phase: memory.total(phase) for phase in PHASES},
                "items": [dataclasses.asdict(item) for item in memory.items],
            }
            for memory in report.memory
        ],
        "weight_sync": {**dataclasses.asdict(report.sync), "received_most": report.sync.received_most}
        if report.sync
        else None,
        "training_records": report.records,
        "data": [dataclasses.asdict(looked) for looked in report.looked],
    }
