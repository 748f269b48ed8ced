"""Fit efficiency factors to a run's own phase times.

A run folder's metrics.jsonl holds seconds per phase (time/generate, time/score, time/learn,
time/reshard); the ratio of predicted to measured seconds scales the factor of that phase. One factor
per phase is all a single run can tell apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megatron_rl.config.errors import UserError
from megatron_rl.planner.constants import Constants, packaged
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.lengths import response_lengths
from megatron_rl.planner.memory import OptimizerChoice
from megatron_rl.planner.model_shape import load_model
from megatron_rl.planner.rl_step import (
    RlBatch,
    TrainChoice,
    step_forward_seconds,
    step_generate_seconds,
    step_train_seconds,
)
from megatron_rl.planner.weight_sync import sync_seconds

_PHASES = {
    "generate": ("time/generate",),
    "log_probs": ("time/score",),
    "train": ("time/learn",),
    "weight_sync": ("time/reshard",),
}


def read_metrics(run_dir: str) -> dict[str, list[float]]:
    """Return every number of metrics.jsonl by name, without the first step (it warms up)."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"no metrics in {run_dir}", where="--calibrate", expected=str(path), fix="give a run folder"
        )
    steps: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # a run that was cut off leaves half a line
        if isinstance(entry, dict):
            steps.append(entry)
    values: dict[str, list[float]] = {}
    for entry in steps[1:] or steps:
        for name, value in entry.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(name, []).append(float(value))
    return values


def _config(run_dir: str) -> Mapping[str, Any]:
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise UserError(f"no config.yaml in {run_dir}", where="--calibrate", expected=str(path))
    return yaml.safe_load(path.read_text()) or {}


def _number(values: Mapping[str, list[float]], *names: str) -> float | None:
    return next((median(values[name]) for name in names if values.get(name)), None)


def _count(ranks: Any, world: int) -> int:
    if ranks is None:
        return world
    if isinstance(ranks, int):
        return 1
    if isinstance(ranks, str):
        parts = [part.split("-") for part in ranks.replace(" ", "").split(",") if part]
        return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)
    return len(ranks)


def predicted_phases(
    config: Mapping[str, Any],
    values: Mapping[str, list[float]],
    gpu: str,
    constants: Constants,
    model: str | None,
) -> dict[str, float]:
    """Return predicted seconds per phase of the run that a config.yaml describes."""
    shape = load_model(model or config["model"]["path"])
    given, rollout, actor = config.get("batch") or {}, config.get("rollout") or {}, config.get("actor") or {}
    layout = actor.get("layout") or {}
    world = int(config.get("world_size") or _number(values, "world_size") or 1)
    cluster = constants.cluster(gpu, world, config.get("gpus_per_node"))
    train_gpus, rollout_gpus = _count(layout.get("ranks"), world), _count(rollout.get("ranks"), world)
    sizes = {
        name: int(layout.get(name) or 1)
        for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
    }
    data = max(1, train_gpus // (sizes["tensor"] * sizes["pipeline"] * sizes["context"]))
    cut = replace(Layout(data=data, sequence_parallel=sizes["tensor"] > 1), **sizes)
    longest = float(rollout.get("max_response_tokens") or 256)
    prompt = (
        _number(values, "prompt/length")
        or float((config.get("data") or {}).get("max_prompt_tokens") or 1024) / 2
    )
    mean = _number(values, "response/length", "response/length_mean") or longest / 4
    batch = RlBatch(
        prompts=int(given.get("prompts_per_step") or 64),
        samples=int(given.get("samples_per_prompt") or 8),
        optimizer_steps=int(given.get("optimizer_steps") or 1) * int(given.get("epochs") or 1),
        prompt=prompt,
        lengths=response_lengths(min(mean, longest), longest, "variable"),
        longest=float(given.get("tokens_per_microbatch") or prompt + longest),
    )
    tensor = int(rollout.get("tensor") or 1)
    replicas = max(1, rollout_gpus // tensor)
    engine = RolloutLayout(
        tensor=tensor, replicas=replicas, memory_fraction=float(rollout.get("memory_fraction") or 0.6)
    )
    choice = TrainChoice(
        shape,
        cut,
        str(actor.get("recompute") or "none"),
        OptimizerChoice(offload=bool((actor.get("optimizer") or {}).get("offload"))),
    )
    precision = "bf16"
    passes = 2 if config.get("reference") else 1
    sync = sync_seconds(
        shape, cut, engine, cluster, constants, "planned_peer_to_peer", precision, rollout_gpus, train_gpus
    )
    return {
        "generate": step_generate_seconds(shape, engine, batch, cluster, constants, precision)
        - constants.decode.rl_fixed_seconds,
        "log_probs": passes * step_forward_seconds(choice, batch, cluster, constants, precision),
        "train": step_train_seconds(choice, batch, cluster, constants, precision),
        "weight_sync": sync,
    }


def calibrate(
    run_dir: str, gpu: str, constants: Constants, model: str | None = None
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return (constants override, {phase: (predicted, measured) seconds}) of a run folder.

    Raises UserError when the folder has no phase times.
    """
    values, config = read_metrics(run_dir), _config(run_dir)
    predicted = predicted_phases(config, values, gpu, constants, model)
    phases: dict[str, tuple[float, float]] = {}
    for phase, names in _PHASES.items():
        measured = _number(values, *names)
        if measured is not None and measured > 0:
            phases[phase] = (predicted[phase], measured)
    if not phases:
        raise UserError(
            f"{run_dir}/metrics.jsonl has no phase times",
            where="--calibrate",
            expected="one of " + ", ".join(name for names in _PHASES.values() for name in names),
            got=", ".join(sorted(values)[:10]) or "no numbers",
            fix="give the folder of a run of at least one step",
        )
    override: dict[str, Any] = {"calibrated_from": str(run_dir)}
    factors = {name: before / after for name, (before, after) in phases.items()}
    efficiency = {}
    if "train" in factors:
        efficiency["rl_train"] = constants.efficiency.rl_train * factors["train"]
    if "log_probs" in factors:
        efficiency["rl_log_probs"] = constants.efficiency.rl_log_probs * factors["log_probs"]
    if efficiency:
        override["efficiency"] = efficiency
    if "generate" in factors:
        override["decode"] = {"rl_generate": constants.decode.rl_generate * factors["generate"]}
    if "weight_sync" in factors:
        sync, scale = constants.weight_sync, factors["weight_sync"]
        override["weight_sync"] = {
            "planned_fixed_seconds": sync.planned_fixed_seconds / scale,
            "planned_network": sync.planned_network * scale,
        }
    unknown = set(override) - set(packaged()) - {"calibrated_from"}
    assert not unknown, unknown
    return override, phases
