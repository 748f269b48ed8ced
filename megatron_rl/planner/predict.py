"""Predict what a scenario measures, by kind; sees a scenario's inputs only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.planner.constants import GB
from megatron_rl.planner.generation import decode_milliseconds, serving_tokens_per_second
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.lengths import response_lengths
from megatron_rl.planner.memory import prefill_workspace_bytes, rollout_weight_bytes, training_memory
from megatron_rl.planner.placement import Planner, Problem, best_grouping
from megatron_rl.planner.rl_step import RlBatch, TrainChoice, rl_step, step_generate_seconds
from megatron_rl.planner.scenario import Scenario
from megatron_rl.planner.search import (
    RECOMPUTE,
    forward_memory,
    memory_limit,
    memory_of,
    rollout_plans,
    training_front,
)
from megatron_rl.planner.training import model_flops_per_token, replica_work, train_seconds
from megatron_rl.planner.weight_sync import sync_seconds, volume

Prediction = dict[str, Any]


def _pretraining_batch(scenario: Scenario) -> RlBatch:
    given, sequence = scenario.part("batch"), scenario.sequence
    rows = int(given.get("global_batch") or (scenario.layout.data if scenario.layout else 256))
    lengths = response_lengths(sequence, sequence, "fixed")
    micro = int(given.get("micro_batch") or 1)
    return RlBatch(rows, 1, 1, 0.0, lengths, sequence, micro, bool(given.get("packing", False)))


def _choice(
    scenario: Scenario, role: str, batch: RlBatch, gpus: int, offload_allowed: bool = True
) -> TrainChoice:
    """Return the stated training cut of a role, or the planner's own."""
    model, cluster = scenario.model(role), scenario.cluster.resized(gpus)
    recompute = scenario.raw.get("recompute")
    micro = scenario.part("batch").get("micro_batch")
    if scenario.layout is not None:
        return TrainChoice(model, scenario.layout, recompute or "none", scenario.optimizer, int(micro or 1))
    limit = memory_limit(cluster, scenario.constants)
    # A stated recompute may not fit any cut; a heavier one, then offload, are the only ways to run.
    stages = [((recompute,), False)] if recompute else []
    stages += [(RECOMPUTE, False)] + ([(RECOMPUTE, True)] if offload_allowed else [])
    for stated, offload in stages:
        plans = training_front(
            model,
            gpus,
            cluster,
            scenario.constants,
            batch,
            scenario.precision,
            scenario.optimizer,
            recomputes=stated,
            micro_batches=(int(micro),) if micro else (1, 2, 4),
            offload_allowed=offload,
        )
        if plans:
            return plans[0].choice
    raise UserError(
        f"scenario {scenario.name}: {model.name} does not fit on {gpus} GPUs in any layout",
        where=f"{scenario.name}.layout",
        expected=f"at most {limit / GB:.0f} GB on each of {gpus} GPUs",
        got=f"{16 * model.parameters / gpus / GB:.0f} GB of weights, gradients and optimizer when evenly cut",
        fix="more GPUs, optimizer offload, or a smaller model",
    )


def _rollout(scenario: Scenario, batch: RlBatch) -> RolloutLayout:
    """Return the stated rollout cut, or the fastest one."""
    stated = scenario.rollout(scenario.rollout_gpus)
    if stated is not None:
        return stated
    cluster = scenario.cluster.resized(scenario.rollout_gpus)
    plans = rollout_plans(
        scenario.model(),
        scenario.rollout_gpus,
        cluster,
        scenario.constants,
        batch,
        scenario.precision,
        scenario.memory_fraction,
        scenario.engine,
        max_sequences=scenario.part("rollout").get("max_sequences"),
    )
    if not plans:
        raise UserError(
            f"scenario {scenario.name}: no rollout cut of {scenario.model().name} fits",
            where=f"{scenario.name}.rollout",
            expected=f"weights and cache within {scenario.memory_fraction:.0%} of {cluster.gpu.name}",
            fix="more GPUs or a larger rollout.memory_fraction",
        )
    return plans[0].layout


def pretrain_throughput(scenario: Scenario) -> Prediction:
    """Predict TFLOP/s per GPU, model FLOPs utilization and tokens per second per GPU."""
    batch, cluster = _pretraining_batch(scenario), scenario.cluster
    choice = _choice(scenario, "actor", batch, cluster.num_gpus)
    sequence, layout = scenario.sequence, choice.layout
    work = replica_work(
        batch.rows, sequence, sequence, sequence / 2, layout.data, choice.micro_batch, batch.packing
    )
    seconds = train_seconds(
        choice.model,
        layout,
        cluster,
        scenario.constants,
        scenario.precision,
        work,
        choice.recompute,
        choice.optimizer,
    )
    convention = scenario.part("flops_convention")
    per_token = model_flops_per_token(
        choice.model,
        sequence,
        str(convention.get("attention", "full")),
        bool(convention.get("recompute_counted", False)) and choice.recompute == "full",
    )
    rate = batch.rows * sequence / seconds / cluster.num_gpus
    return {
        "tflops_per_gpu": rate * per_token / 1e12,
        "model_flops_utilization": rate * per_token / cluster.gpu.peak(scenario.precision),
        "tokens_per_second_per_gpu": rate,
        "seconds_total": seconds,
    }


def training_memory_gigabytes(scenario: Scenario) -> Prediction:
    """Predict gigabytes on the fullest GPU while training."""
    batch = _pretraining_batch(scenario)
    choice = _choice(scenario, "actor", batch, scenario.train_gpus)
    layout = choice.layout
    stated = scenario.part("batch").get("global_batch")
    micro = stated / layout.data / choice.micro_batch if stated else 4 * layout.pipeline
    memory = training_memory(
        choice.model,
        layout,
        choice.optimizer,
        scenario.constants,
        choice.micro_batch * scenario.sequence,
        max(1, round(micro)),
        choice.recompute,
    )
    activations = memory.activations + memory.logits
    return {
        "gigabytes_weights_and_gradients": memory.weights_and_gradients / GB,
        "gigabytes_optimizer": memory.optimizer / GB,
        "gigabytes_activations": activations / GB,
        "gigabytes_total": (memory.states + activations) / GB,
    }


def _decode_inputs(scenario: Scenario) -> tuple[RolloutLayout, RlBatch, float]:
    batch = scenario.batch
    rollout = _rollout(scenario, batch)
    given = scenario.part("batch").get("concurrent_sequences")
    default = (
        batch.rows if "prompts" in scenario.part("batch") else (rollout.max_sequences or 1) * rollout.replicas
    )
    rows = float(given or default) / rollout.replicas
    return rollout, batch, rows


def decode_latency(scenario: Scenario) -> Prediction:
    """Predict milliseconds between tokens and peak memory of sequences that decode together."""
    rollout, batch, rows = _decode_inputs(scenario)
    model, constants = scenario.model(), scenario.constants
    rows = min(rows, rollout.max_sequences or rows)
    milliseconds = decode_milliseconds(
        model, rollout, scenario.cluster, constants, scenario.precision, rows, batch.prompt, batch.lengths
    )
    cached = rows * (batch.prompt + batch.lengths.longest) * model.kv_bytes_per_gpu(rollout.tensor)
    static = scenario.engine == "static_batch"
    # A static batch prefills every prompt at once, a continuous one in pieces of 8,192 tokens.
    prefilled = rows * batch.prompt if static else min(rows * batch.prompt, 8192)
    peak = rollout_weight_bytes(model, rollout, scenario.precision) + cached
    peak += prefill_workspace_bytes(model, rollout, prefilled) + constants.memory.engine_gigabytes * GB
    return {"milliseconds_per_token": milliseconds, "gigabytes_memory_peak": peak / GB}


def serving_throughput(scenario: Scenario) -> Prediction:
    """Predict response tokens per second of all replicas, kept full or over a finite batch."""
    rollout, batch, rows = _decode_inputs(scenario)
    model, cluster, constants = scenario.model(), scenario.cluster, scenario.constants
    given = scenario.part("batch")
    if "prompts" in given and "concurrent_sequences" not in given:
        seconds = step_generate_seconds(model, rollout, batch, cluster, constants, scenario.precision)
        share = constants.decode.rl_generate * constants.engines[rollout.engine].rl_share
        seconds = (seconds - constants.decode.rl_fixed_seconds) * share
        return {"tokens_per_second_total": batch.rows * batch.lengths.mean / seconds}
    if "concurrent_sequences" not in given:
        rows = float(rollout.max_sequences or constants.engines[rollout.engine].max_sequences)
    each = serving_tokens_per_second(
        model, rollout, cluster, constants, scenario.precision, rows, batch.prompt, batch.lengths
    )
    return {"tokens_per_second_total": rollout.replicas * each}


def rl_step_seconds(scenario: Scenario) -> Prediction:
    """Predict a step's phases and token rates."""
    batch = scenario.batch
    gpus = scenario.train_gpus
    roles = {role: _choice(scenario, role, batch, gpus) for role in scenario.roles}
    micro = scenario.part("batch").get("micro_batch") or roles["actor"].micro_batch
    phases = rl_step(
        scenario.algorithm,
        roles,
        _rollout(scenario, batch),
        replace(batch, micro_batch=int(micro)),
        scenario.cluster.resized(gpus),
        scenario.cluster.resized(scenario.rollout_gpus),
        scenario.constants,
        scenario.precision,
        scenario.sync_method,
        scenario.disaggregated,
    )
    rate = batch.tokens / phases.total
    return {
        "seconds_total": phases.total,
        "seconds_train": phases.train,
        "seconds_generate": phases.generate,
        "seconds_log_probs": phases.log_probs,
        "seconds_weight_sync": phases.weight_sync,
        "tokens_per_second_per_gpu": rate / scenario.cluster.num_gpus,
        "tokens_per_second_total": rate,
    }


def weight_sync(scenario: Scenario) -> Prediction:
    """Predict seconds of a weight synchronisation."""
    rollout = scenario.rollout(scenario.rollout_gpus) or scenario.rollout_with(
        min(8, scenario.rollout_gpus), scenario.rollout_gpus
    )
    layout = scenario.layout
    if layout is None and scenario.sync_method in ("strided_reshard", "gather_and_load"):
        layout = _choice(scenario, "actor", scenario.batch, scenario.train_gpus).layout
    seconds = sync_seconds(
        scenario.model(),
        layout,
        rollout,
        scenario.cluster,
        scenario.constants,
        scenario.sync_method,
        scenario.precision,
        scenario.rollout_gpus,
        scenario.train_gpus if scenario.layout else None,
    )
    return {"seconds_weight_sync": seconds}


def weight_sync_volume(scenario: Scenario) -> Prediction:
    """Predict bytes per GPU of a synchronisation in place."""
    rollout = scenario.rollout(scenario.rollout_gpus) or RolloutLayout()
    moved = volume(
        scenario.model(), scenario.layout or Layout(), rollout, scenario.sync_method, scenario.precision
    )
    return {
        "gigabytes_per_gpu": moved.received / GB,
        "gigabytes_parameters_peak": moved.peak / GB,
        "gigabytes_redundant": moved.redundant / GB,
    }


def placement_choice(scenario: Scenario) -> Prediction:
    """Predict which candidate placement has the shortest step, and its group sizes."""
    candidates = scenario.part("candidates")
    if not candidates:
        raise scenario.error("candidates", "placement name to list of groups of roles", None)
    rollout = scenario.part("rollout")
    problem = Problem(
        models={role: scenario.model(role) for role in scenario.roles},
        algorithm=scenario.algorithm,
        batch=scenario.batch,
        cluster=scenario.cluster,
        constants=scenario.constants,
        precision=scenario.precision,
        optimizer=scenario.optimizer,
        engine=scenario.engine,
        sync_method=scenario.sync_method,
        memory_fraction=rollout.get("memory_fraction"),
        max_sequences=rollout.get("max_sequences"),
        rollout_tensor=rollout.get("tensor"),
    )
    planner = Planner(problem)
    scored = {name: best_grouping(name, planner, groups) for name, groups in candidates.items()}
    fitting = {name: plan for name, plan in scored.items() if plan is not None}
    if not fitting:
        return {"best": None, "gpus_per_group": None, "seconds_by_candidate": {}}
    best = min(fitting, key=lambda name: fitting[name].phases.total)
    return {
        "best": best,
        "gpus_per_group": fitting[best].gpus_per_group,
        "seconds_by_candidate": {name: plan.phases.total for name, plan in fitting.items()},
    }


def rollout_tensor_choice(scenario: Scenario) -> Prediction:
    """Predict the rollout tensor size with the shortest generation, and seconds by size."""
    given = scenario.part("rollout").get("candidates_tensor") or [1, 2, 4, 8]
    gpus, batch = scenario.rollout_gpus, scenario.batch
    seconds = {}
    for tensor in given:
        layout = scenario.rollout_with(int(tensor), gpus)
        seconds[int(tensor)] = step_generate_seconds(
            scenario.model(), layout, batch, scenario.cluster, scenario.constants, scenario.precision
        )
    fitting = {tensor: value for tensor, value in seconds.items() if isfinite(value)}
    best = min(fitting, key=fitting.__getitem__) if fitting else None
    ratio = seconds[8] / seconds[best] if best is not None and 8 in fitting else None
    return {
        "best_rollout_tensor": best,
        "seconds_ratio_tensor_8_to_best": ratio,
        "seconds_generate_by_tensor": {str(tensor): value for tensor, value in fitting.items()},
    }


def _training_fits(scenario: Scenario, batch: RlBatch, limit: float) -> bool:
    gpus = scenario.train_gpus
    if scenario.layout is None:
        try:
            _choice(scenario, "actor", batch, gpus, offload_allowed=False)
        except UserError:
            return False
        return True
    choice = _choice(scenario, "actor", batch, gpus)
    if memory_of(choice, batch, scenario.constants).total > limit:
        return False
    scored = replace(choice, model=scenario.model("reference"))
    return forward_memory(scored, batch, scenario.constants).total <= limit


def fits_in_memory(scenario: Scenario) -> Prediction:
    """Predict whether training and generation fit; training state waits on the host while it can."""
    limit = memory_limit(scenario.cluster, scenario.constants)
    rl = scenario.raw.get("algorithm") in ("grpo", "ppo") or bool(scenario.part("rollout"))
    batch = scenario.batch if rl else _pretraining_batch(scenario)
    fits = not (scenario.layout or scenario.raw.get("optimizer") or rl) or _training_fits(
        scenario, batch, limit
    )
    if fits and rl:
        try:
            rollout = _rollout(scenario, batch)
        except UserError:
            return {"fits": False}
        seconds = step_generate_seconds(
            scenario.model(), rollout, batch, scenario.cluster, scenario.constants, scenario.precision
        )
        fits = isfinite(seconds)
    return {"fits": bool(fits)}


PREDICTORS: Mapping[str, Callable[[Scenario], Prediction]] = {
    "pretrain_throughput": pretrain_throughput,
    "training_memory": training_memory_gigabytes,
    "decode_latency": decode_latency,
    "serving_throughput": serving_throughput,
    "rl_step": rl_step_seconds,
    "weight_sync": weight_sync,
    "weight_sync_volume": weight_sync_volume,
    "placement_choice": placement_choice,
    "rollout_tensor_choice": rollout_tensor_choice,
    "fits_in_memory": fits_in_memory,
}


def predict(scenario: Scenario) -> Prediction:
    """Predict every key of the scenario's kind."""
    return PREDICTORS[scenario.kind](scenario)
