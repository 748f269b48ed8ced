"""Predict what a scenario measures, by kind; sees a scenario's inputs only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from peers import (
    decode_milliseconds,
    gathering_seconds,
    method_of,
    model_flops_per_token,
    serving_tokens_per_second,
    sync_of,
    volume,
)
from scenario import Scenario

from megatron_rl.config.roles import spec_of
from megatron_rl.errors import UserError
from megatron_rl.planning.predict.batch import StepBatch, response_lengths
from megatron_rl.planning.predict.generate import (
    RolloutLayout,
    generate_seconds,
    prefill_workspace_bytes,
    rollout_weight_bytes,
)
from megatron_rl.planning.predict.learn import (
    TrainChoice,
    fullest_training,
    learn_memory,
    learn_seconds,
    optimizer_step,
    replica_work,
    score_memory,
    score_seconds,
)
from megatron_rl.planning.predict.placement import Planner, Problem, best_grouping
from megatron_rl.planning.predict.search import RECOMPUTE, rollout_plans, training_front
from megatron_rl.planning.predict.step import RoleSeconds, compose_step
from megatron_rl.shapes.hardware import GB
from megatron_rl.shapes.layout import ParallelLayout

Prediction = dict[str, Any]


def _pretraining_batch(scenario: Scenario) -> StepBatch:
    given, sequence = scenario.section("batch"), scenario.sequence
    rows = int(given.get("global_batch") or (scenario.layout.data if scenario.layout else 256))
    lengths = response_lengths(sequence, sequence, "fixed")
    return StepBatch(rows, 1, 1, 0.0, lengths, sequence, bool(given.get("packing", False)))


def _choice(
    scenario: Scenario, role: str, batch: StepBatch, gpus: int, offload_allowed: bool = True
) -> TrainChoice:
    """Return the stated training cut of a role, or the planner's own."""
    model, machine = scenario.model(role), scenario.machine
    recompute = scenario.raw.get("recompute")
    micro = scenario.section("batch").get("micro_batch")
    if scenario.layout is not None:
        stated = scenario.layout, recompute or "none", scenario.optimizer, int(micro or 1)
        return TrainChoice(model, *stated, exchanges_heads=False)
    # A stated recompute may not fit any cut; a heavier one, then offload, are the only ways to run.
    stages = [((recompute,), False)] if recompute else []
    stages += [(RECOMPUTE, False)] + ([(RECOMPUTE, True)] if offload_allowed else [])
    for stated, offload in stages:
        plans = training_front(
            model,
            gpus,
            machine,
            batch,
            scenario.optimizer,
            recomputes=stated,
            micro_batches=(int(micro),) if micro else (1, 2, 4),
            offload_allowed=offload,
            exchanges_heads=False,
        )
        if plans:
            return plans[0].choice
    raise UserError(
        f"scenario {scenario.name}: {model.name} does not fit on {gpus} GPUs in any layout",
        where=f"{scenario.name}.layout",
        expected=f"at most {machine.usable_memory / GB:.0f} GB on each of {gpus} GPUs",
        got=f"{16 * model.parameters / gpus / GB:.0f} GB of weights, gradients and optimizer when evenly cut",
        fix="more GPUs, optimizer offload, or a smaller model",
    )


def _rollout(scenario: Scenario, batch: StepBatch) -> RolloutLayout:
    """Return the stated rollout cut, or the fastest one."""
    stated = scenario.rollout(scenario.rollout_gpus)
    if stated is not None:
        return stated
    machine = scenario.machine
    plans = rollout_plans(
        scenario.model(),
        scenario.rollout_gpus,
        machine,
        batch,
        scenario.memory_fraction,
        scenario.engine,
        max_sequences=scenario.section("rollout").get("max_sequences"),
    )
    if not plans:
        raise UserError(
            f"scenario {scenario.name}: no rollout cut of {scenario.model().name} fits",
            where=f"{scenario.name}.rollout",
            expected=f"weights and cache within {scenario.memory_fraction:.0%} of {machine.gpu.name}",
            fix="more GPUs or a larger rollout.memory_fraction",
        )
    return plans[0].layout


def pretrain_throughput(scenario: Scenario) -> Prediction:
    """Predict TFLOP/s per GPU, model FLOPs utilization and tokens per second per GPU."""
    batch, machine, sequence = _pretraining_batch(scenario), scenario.machine, scenario.sequence
    choice = _choice(scenario, "actor", batch, scenario.gpus)
    work = replica_work(choice, batch, batch.rows)
    step = optimizer_step(choice, machine, work)
    seconds = step.total
    if scenario.fully_sharded:
        seconds += gathering_seconds(choice, machine, work, step.compute)
    convention = scenario.section("flops_convention")
    per_token = model_flops_per_token(
        choice.model,
        sequence,
        str(convention.get("attention", "full")),
        bool(convention.get("recompute_counted", False)) and choice.recompute == "full",
    )
    rate = batch.rows * sequence / seconds / scenario.gpus
    return {
        "tflops_per_gpu": rate * per_token / 1e12,
        "model_flops_utilization": rate * per_token / machine.gpu.peak(machine.precision),
        "tokens_per_second_per_gpu": rate,
        "seconds_total": seconds,
    }


def training_memory_gigabytes(scenario: Scenario) -> Prediction:
    """Predict gigabytes on the fullest GPU while training."""
    batch = _pretraining_batch(scenario)
    choice = _choice(scenario, "actor", batch, scenario.train_gpus)
    layout = choice.layout
    stated = scenario.section("batch").get("global_batch")
    micro = stated / layout.data / choice.micro_batch if stated else 4 * layout.pipeline
    memory = fullest_training(
        choice,
        choice.micro_batch * scenario.sequence,
        max(1, round(micro)),
        scenario.constants.memory.logits_bytes_per_element,
    ).fullest
    activations = memory.activations + memory.logits
    return {
        "gigabytes_weights_and_gradients": (memory.weights + memory.gradients) / GB,
        "gigabytes_optimizer": memory.optimizer / GB,
        "gigabytes_activations": activations / GB,
        "gigabytes_total": (memory.states + activations) / GB,
    }


def _decode_inputs(scenario: Scenario) -> tuple[RolloutLayout, StepBatch, float]:
    batch = scenario.batch
    rollout = _rollout(scenario, batch)
    given = scenario.section("batch").get("concurrent_sequences")
    default = (
        batch.rows
        if "prompts" in scenario.section("batch")
        else (rollout.max_sequences or 1) * rollout.replicas
    )
    rows = float(given or default) / rollout.replicas
    return rollout, batch, rows


def decode_latency(scenario: Scenario) -> Prediction:
    """Predict milliseconds between tokens and peak memory of sequences that decode together."""
    rollout, batch, rows = _decode_inputs(scenario)
    model, machine, constants = scenario.model(), scenario.machine, scenario.constants
    rows = min(rows, rollout.max_sequences or rows)
    milliseconds = decode_milliseconds(model, rollout, machine, rows, batch.prompt, batch.lengths)
    cached = rows * (batch.prompt + batch.lengths.longest) * model.kv_bytes_per_gpu(rollout.tensor)
    static = scenario.engine == "static_batch"
    # A static batch prefills every prompt at once, a continuous one in pieces of 8,192 tokens.
    prefilled = rows * batch.prompt if static else min(rows * batch.prompt, 8192)
    peak = rollout_weight_bytes(model, rollout, machine) + cached
    peak += prefill_workspace_bytes(model, rollout, prefilled) + constants.memory.engine_gigabytes * GB
    return {"milliseconds_per_token": milliseconds, "gigabytes_memory_peak": peak / GB}


def serving_throughput(scenario: Scenario) -> Prediction:
    """Predict response tokens per second of all replicas, kept full or over a finite batch."""
    rollout, batch, rows = _decode_inputs(scenario)
    model, machine, constants = scenario.model(), scenario.machine, scenario.constants
    given = scenario.section("batch")
    if "prompts" in given and "concurrent_sequences" not in given:
        seconds = generate_seconds(model, rollout, batch, machine)
        share = constants.decode.rl_generate * constants.engines[rollout.engine].rl_share
        seconds = (seconds - constants.decode.rl_fixed_seconds) * share
        return {"tokens_per_second_total": batch.rows * batch.lengths.mean / seconds}
    if "concurrent_sequences" not in given:
        rows = float(rollout.max_sequences or constants.engines[rollout.engine].max_sequences)
    each = serving_tokens_per_second(model, rollout, machine, rows, batch.prompt, batch.lengths)
    return {"tokens_per_second_total": rollout.replicas * each}


def rl_step_seconds(scenario: Scenario) -> Prediction:
    """Predict a step's phases and token rates; disaggregated, the next step is sampled ahead."""
    batch, machine, gpus = scenario.batch, scenario.machine, scenario.train_gpus
    works, actor = [], _choice(scenario, "actor", batch, gpus)
    for role in scenario.roles:
        choice = _choice(scenario, role, batch, gpus)
        learn = learn_seconds(choice, batch, machine) if spec_of(role).trains else 0.0
        works.append(RoleSeconds(role, (0,), score_seconds(choice, batch, machine), learn))
    rollout = _rollout(scenario, batch)
    step = compose_step(
        works,
        generate=generate_seconds(actor.model, rollout, batch, machine),
        reshard=method_of(scenario.sync_method)(actor.model, actor.layout, rollout, machine),
        fixed=scenario.constants.efficiency.rl_fixed_seconds,
        ahead=scenario.disaggregated,
    )
    rate = batch.tokens / step.total
    return {
        "seconds_total": step.total,
        "seconds_train": step.seconds["learn"],
        "seconds_generate": step.seconds["generate"],
        "seconds_log_probs": step.seconds["score"] + step.seconds["reward"],
        "seconds_weight_sync": step.seconds["reshard"],
        "tokens_per_second_per_gpu": rate / scenario.gpus,
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
    seconds = method_of(scenario.sync_method)(scenario.model(), layout, rollout, scenario.machine)
    return {"seconds_weight_sync": seconds}


def weight_sync_volume(scenario: Scenario) -> Prediction:
    """Predict bytes per GPU of a synchronisation in place."""
    rollout = scenario.rollout(scenario.rollout_gpus) or RolloutLayout()
    layout = scenario.layout or ParallelLayout((0,))
    moved = volume(scenario.model(), layout, rollout, scenario.sync_method, scenario.machine)
    return {
        "gigabytes_per_gpu": moved.received / GB,
        "gigabytes_parameters_peak": moved.peak / GB,
        "gigabytes_redundant": moved.redundant / GB,
    }


def placement_choice(scenario: Scenario) -> Prediction:
    """Predict which candidate placement has the shortest step, and its group sizes."""
    candidates = scenario.section("candidates")
    if not candidates:
        raise scenario.error("candidates", "placement name to list of groups of roles", None)
    rollout = scenario.section("rollout")
    problem = Problem(
        models={role: scenario.model(role) for role in scenario.roles},
        algorithm=scenario.algorithm,
        batch=scenario.batch,
        machine=scenario.machine,
        optimizer=scenario.optimizer,
        engine=scenario.engine,
        sync_seconds=sync_of(scenario.sync_method),
        memory_fraction=rollout.get("memory_fraction"),
        max_sequences=rollout.get("max_sequences"),
        rollout_tensor=rollout.get("tensor"),
        roles_swap=True,
        context_parallel=True,
        exchanges_heads=False,
        stages_stated_once=False,
    )
    planner = Planner(problem)
    scored = {name: best_grouping(name, planner, groups) for name, groups in candidates.items()}
    fitting = {name: plan for name, plan in scored.items() if plan is not None}
    if not fitting:
        return {"best": None, "gpus_per_group": None, "seconds_by_candidate": {}}
    best = min(fitting, key=lambda name: fitting[name].step.total)
    return {
        "best": best,
        "gpus_per_group": fitting[best].gpus_per_group,
        "seconds_by_candidate": {name: plan.step.total for name, plan in fitting.items()},
    }


def rollout_tensor_choice(scenario: Scenario) -> Prediction:
    """Predict the rollout tensor size with the shortest generation, and seconds by size."""
    given = scenario.section("rollout").get("candidates_tensor") or [1, 2, 4, 8]
    gpus, batch = scenario.rollout_gpus, scenario.batch
    seconds = {}
    for tensor in given:
        layout = scenario.rollout_with(int(tensor), gpus)
        seconds[int(tensor)] = generate_seconds(scenario.model(), layout, batch, scenario.machine)
    fitting = {tensor: value for tensor, value in seconds.items() if isfinite(value)}
    best = min(fitting, key=fitting.__getitem__) if fitting else None
    ratio = seconds[8] / seconds[best] if best is not None and 8 in fitting else None
    return {
        "best_rollout_tensor": best,
        "seconds_ratio_tensor_8_to_best": ratio,
        "seconds_generate_by_tensor": {str(tensor): value for tensor, value in fitting.items()},
    }


def _training_fits(scenario: Scenario, batch: StepBatch, limit: float) -> bool:
    gpus = scenario.train_gpus
    if scenario.layout is None:
        try:
            _choice(scenario, "actor", batch, gpus, offload_allowed=False)
        except UserError:
            return False
        return True
    choice = _choice(scenario, "actor", batch, gpus)
    if learn_memory(choice, batch).total > limit:
        return False
    scored = replace(choice, model=scenario.model("reference"))
    return score_memory(scored, batch).total <= limit


def fits_in_memory(scenario: Scenario) -> Prediction:
    """Predict whether training and generation fit; training state waits on the host while it can."""
    limit = scenario.machine.usable_memory
    rl = scenario.raw.get("algorithm") in ("grpo", "ppo") or bool(scenario.section("rollout"))
    batch = scenario.batch if rl else _pretraining_batch(scenario)
    fits = not (scenario.layout or scenario.raw.get("optimizer") or rl) or _training_fits(
        scenario, batch, limit
    )
    if fits and rl:
        try:
            rollout = _rollout(scenario, batch)
        except UserError:
            return {"fits": False}
        fits = isfinite(generate_seconds(scenario.model(), rollout, batch, scenario.machine))
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
