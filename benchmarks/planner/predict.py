"""Predictions of the quantities of a scenario, with one function per kind of scenario.

A prediction gets only the scenario's inputs, and not its measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from peers import (
    decode_milliseconds,
    find_method,
    gathering_seconds,
    make_sync_seconds,
    model_flops_per_token,
    predict_sync_volume,
    serving_tokens_per_second,
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
    learn_memory,
    learn_seconds,
    peak_training_memory,
    predict_optimizer_step,
    replica_work,
    score_memory,
    score_seconds,
)
from megatron_rl.planning.predict.placement import PlacementProblem, Planner, plan_grouping
from megatron_rl.planning.predict.search import RECOMPUTE, rollout_plans, training_front
from megatron_rl.planning.predict.step import RoleSeconds, compose_step
from megatron_rl.shapes.hardware import GB
from megatron_rl.shapes.layout import ParallelLayout

Prediction = dict[str, Any]
"""Predicted quantities, by the keys of the scenario's field ``measured``."""

_MICRO_BATCHES = (1, 2, 4)
_PREFILL_TOKENS = 8192
"""Number of prompt tokens that an engine with continuous batching prefills at a time."""
_STATE_BYTES = 16
"""Bytes per parameter of weights, gradients and Adam's states."""


def _pretraining_batch(scenario: Scenario) -> StepBatch:
    """Return the batch of a pretraining benchmark: rows of equal length, without responses."""
    section = scenario.section("batch")
    sequence = scenario.sequence
    # Without a global batch, use one row per data-parallel rank.
    replicas = 256

    if scenario.layout:
        replicas = scenario.layout.data

    rows = int(section.get("global_batch") or replicas)
    lengths = response_lengths(sequence, sequence, "fixed")
    return StepBatch(rows, 1, 1, 0.0, lengths, sequence, bool(section.get("packing", False)))


def _train_choice(
    scenario: Scenario,
    role: str,
    batch: StepBatch,
    gpus: int,
    offload_allowed: bool = True,
) -> TrainChoice:
    """Return the scenario's training layout of a role, or the planner's choice without one.

    Raises UserError if no layout fits.
    """
    model = scenario.model(role)
    machine = scenario.machine
    recompute = scenario.raw.get("recompute")

    micro_batch = scenario.section("batch").get("micro_batch")
    if scenario.layout is not None:
        return TrainChoice(
            model,
            scenario.layout,
            recompute or "none",
            scenario.optimizer,
            int(micro_batch or 1),
            exchanges_heads=False,
        )

    # If no layout fits with the scenario's recomputation, try more recomputation, and then offloading.
    attempts: list[tuple[Sequence[str], bool]] = []
    if recompute:
        attempts.append(((recompute,), False))

    attempts.append((RECOMPUTE, False))
    if offload_allowed:
        attempts.append((RECOMPUTE, True))

    for recomputes, offload in attempts:
        plans = training_front(
            model,
            gpus,
            machine,
            batch,
            scenario.optimizer,
            recomputes=recomputes,
            micro_batches=(int(micro_batch),) if micro_batch else _MICRO_BATCHES,
            offload_allowed=offload,
            exchanges_heads=False,
        )

        if plans:
            return plans[0].choice

    required_gigabytes = _STATE_BYTES * model.parameters / gpus / GB
    raise UserError(
        f"scenario {scenario.name}: {model.name} does not fit on {gpus} GPUs in any layout",
        where=f"{scenario.name}.layout",
        expected=f"at most {machine.usable_memory / GB:.0f} GB on each of {gpus} GPUs",
        got=f"{required_gigabytes:.0f} GB of weights, gradients and optimizer when evenly cut",
        fix="more GPUs, optimizer offload, or a smaller model",
    )


def _rollout_layout(scenario: Scenario, batch: StepBatch) -> RolloutLayout:
    """Return the scenario's rollout layout, or the fastest layout; raises UserError if no layout fits."""
    layout = scenario.rollout(scenario.rollout_gpus)
    if layout is not None:
        return layout

    plans = rollout_plans(
        scenario.model(),
        scenario.rollout_gpus,
        scenario.machine,
        batch,
        scenario.memory_fraction,
        scenario.engine,
        max_sequences=scenario.section("rollout").get("max_sequences"),
    )

    if not plans:
        gpu = scenario.machine.gpu.name
        raise UserError(
            f"scenario {scenario.name}: no rollout cut of {scenario.model().name} fits",
            where=f"{scenario.name}.rollout",
            expected=f"weights and cache within {scenario.memory_fraction:.0%} of {gpu}",
            fix="more GPUs or a larger rollout.memory_fraction",
        )
    return plans[0].layout


def pretrain_throughput(scenario: Scenario) -> Prediction:
    """Predict TFLOP/s per GPU, model FLOPs utilization and tokens per second per GPU."""
    batch = _pretraining_batch(scenario)
    machine = scenario.machine
    choice = _train_choice(scenario, "actor", batch, scenario.gpus)
    work = replica_work(choice, batch, batch.rows)
    step = predict_optimizer_step(choice, machine, work)
    # Fully sharded training also gathers the weights for every micro-batch.
    seconds = step.total

    if scenario.fully_sharded:
        seconds += gathering_seconds(choice, machine, work, step.compute)

    # Count FLOPs as the paper does.
    convention = scenario.section("flops_convention")
    recompute_counted = bool(convention.get("recompute_counted", False)) and choice.recompute == "full"
    attention = str(convention.get("attention", "full"))
    flops_per_token = model_flops_per_token(choice.model, scenario.sequence, attention, recompute_counted)
    rate = batch.rows * scenario.sequence / seconds / scenario.gpus

    return {
        "tflops_per_gpu": rate * flops_per_token / 1e12,
        "model_flops_utilization": rate * flops_per_token / machine.gpu.peak_flops(machine.precision),
        "tokens_per_second_per_gpu": rate,
        "seconds_total": seconds,
    }


def training_memory_gigabytes(scenario: Scenario) -> Prediction:
    """Predict the gigabytes on the GPU with the highest memory use in training."""
    batch = _pretraining_batch(scenario)
    choice = _train_choice(scenario, "actor", batch, scenario.train_gpus)
    layout = choice.layout

    # Without a global batch, use enough micro-batches to fill the pipeline.
    rows = scenario.section("batch").get("global_batch")

    micro_batches = 4 * layout.pipeline
    if rows:
        micro_batches = rows / layout.data / choice.micro_batch

    memory = peak_training_memory(
        choice,
        choice.micro_batch * scenario.sequence,
        max(1, round(micro_batches)),
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
    """Return the rollout layout, the batch, and the number of sequences that a replica decodes together."""
    batch = scenario.batch
    section = scenario.section("batch")
    rollout = _rollout_layout(scenario, batch)

    sequences = section.get("concurrent_sequences")
    if not sequences:
        sequences = batch.rows
        if "prompts" not in section:
            sequences = (rollout.max_sequences or 1) * rollout.replicas
    return rollout, batch, float(sequences) / rollout.replicas


def decode_latency(scenario: Scenario) -> Prediction:
    """Predict the milliseconds between tokens and the peak memory of sequences that decode together."""
    rollout, batch, sequences = _decode_inputs(scenario)
    model = scenario.model()
    machine = scenario.machine
    # Sequences beyond the engine's limit wait, and do not slow down the running sequences.
    sequences = min(sequences, rollout.max_sequences or sequences)
    milliseconds = decode_milliseconds(model, rollout, machine, sequences, batch.prompt_length, batch.lengths)

    # An engine with static batches prefills all prompts at once. Other engines prefill in chunks.
    prefill_tokens = sequences * batch.prompt_length
    if scenario.engine != "static_batch":
        prefill_tokens = min(prefill_tokens, _PREFILL_TOKENS)

    cache = sequences * (batch.prompt_length + batch.lengths.limit) * model.kv_bytes_per_gpu(rollout.tensor)
    peak = rollout_weight_bytes(model, rollout, machine) + cache
    engine_bytes = scenario.constants.memory.engine_gigabytes * GB
    peak += prefill_workspace_bytes(model, rollout, prefill_tokens) + engine_bytes
    return {"milliseconds_per_token": milliseconds, "gigabytes_memory_peak": peak / GB}


def serving_throughput(scenario: Scenario) -> Prediction:
    """Predict the response tokens per second of all replicas, with a queue or for a finite batch."""
    rollout, batch, sequences = _decode_inputs(scenario)
    model = scenario.model()
    machine = scenario.machine
    constants = scenario.constants
    section = scenario.section("batch")

    if "prompts" in section and "concurrent_sequences" not in section:
        # For a finite batch, remove the overheads of a reinforcement-learning loop.
        seconds = generate_seconds(model, rollout, batch, machine)
        share = constants.decode.rl_generate * constants.engines[rollout.engine].rl_share
        seconds = (seconds - constants.decode.rl_fixed_seconds) * share
        return {"tokens_per_second_total": batch.rows * batch.lengths.mean / seconds}

    # With a queue, the engine always has its maximum number of sequences.
    if "concurrent_sequences" not in section:
        sequences = float(rollout.max_sequences or constants.engines[rollout.engine].max_sequences)

    rate = serving_tokens_per_second(model, rollout, machine, sequences, batch.prompt_length, batch.lengths)
    return {"tokens_per_second_total": rollout.replicas * rate}


def rl_step_seconds(scenario: Scenario) -> Prediction:
    """Predict the phases and token rates of a step; with separate GPUs, the next step is sampled ahead."""
    batch = scenario.batch
    machine = scenario.machine
    gpus = scenario.train_gpus
    actor = _train_choice(scenario, "actor", batch, gpus)

    role_seconds = []
    for role in scenario.roles:
        choice = _train_choice(scenario, role, batch, gpus)
        learn = 0.0
        if spec_of(role).trains:
            learn = learn_seconds(choice, batch, machine)
        # The roles share all training GPUs, so one rank represents all ranks.
        role_seconds.append(RoleSeconds(role, (0,), score_seconds(choice, batch, machine), learn))

    rollout = _rollout_layout(scenario, batch)
    step = compose_step(
        role_seconds,
        generate=generate_seconds(actor.model, rollout, batch, machine),
        reshard=find_method(scenario.sync_method)(actor.model, actor.layout, rollout, machine),
        fixed=scenario.constants.efficiency.rl_fixed_seconds,
        samples_ahead=scenario.disaggregated,
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
    """Predict the seconds of a weight sync."""
    rollout = scenario.rollout(scenario.rollout_gpus)
    if rollout is None:
        rollout = scenario.rollout_with(min(8, scenario.rollout_gpus), scenario.rollout_gpus)

    layout = scenario.layout
    # The seconds of these methods depend on the training layout.
    if layout is None and scenario.sync_method in ("strided_reshard", "gather_and_load"):
        layout = _train_choice(scenario, "actor", scenario.batch, scenario.train_gpus).layout

    seconds = find_method(scenario.sync_method)(scenario.model(), layout, rollout, scenario.machine)
    return {"seconds_weight_sync": seconds}


def weight_sync_volume(scenario: Scenario) -> Prediction:
    """Predict the bytes per GPU of a weight sync between trainer and engine on the same GPUs."""
    rollout = scenario.rollout(scenario.rollout_gpus) or RolloutLayout()
    layout = scenario.layout or ParallelLayout((0,))
    volume = predict_sync_volume(scenario.model(), layout, rollout, scenario.sync_method, scenario.machine)

    return {
        "gigabytes_per_gpu": volume.received / GB,
        "gigabytes_parameters_peak": volume.peak / GB,
        "gigabytes_redundant": volume.redundant / GB,
    }


def placement_choice(scenario: Scenario) -> Prediction:
    """Predict the candidate placement with the shortest step, and its group sizes."""
    candidates = scenario.section("candidates")
    if not candidates:
        raise scenario.error("candidates", "placement name to list of groups of roles", None)

    # Plan for the trainer of HybridFlow: roles are swapped, and each role has its own pipeline stages.
    rollout = scenario.section("rollout")
    problem = PlacementProblem(
        models={role: scenario.model(role) for role in scenario.roles},
        algorithm=scenario.algorithm,
        batch=scenario.batch,
        machine=scenario.machine,
        optimizer=scenario.optimizer,
        engine=scenario.engine,
        sync_seconds=make_sync_seconds(scenario.sync_method),
        memory_fraction=rollout.get("memory_fraction"),
        max_sequences=rollout.get("max_sequences"),
        rollout_tensor=rollout.get("tensor"),
        roles_swap=True,
        context_parallel=True,
        exchanges_heads=False,
        shared_stage_split=False,
    )
    # For each candidate, choose the group sizes with the shortest step.
    planner = Planner(problem)
    plans = {name: plan_grouping(name, planner, groups) for name, groups in candidates.items()}

    fitting = {name: plan for name, plan in plans.items() if plan is not None}
    if not fitting:
        return {"best": None, "gpus_per_group": None, "seconds_by_candidate": {}}

    best = min(fitting, key=lambda name: fitting[name].step.total)
    return {
        "best": best,
        "gpus_per_group": fitting[best].gpus_per_group,
        "seconds_by_candidate": {name: plan.step.total for name, plan in fitting.items()},
    }


def rollout_tensor_choice(scenario: Scenario) -> Prediction:
    """Predict the rollout tensor size with the shortest generation, and the seconds of each size."""
    candidates = scenario.section("rollout").get("candidates_tensor") or [1, 2, 4, 8]
    gpus = scenario.rollout_gpus
    batch = scenario.batch

    seconds = {}
    for tensor in candidates:
        layout = scenario.rollout_with(int(tensor), gpus)
        seconds[int(tensor)] = generate_seconds(scenario.model(), layout, batch, scenario.machine)

    # A size that does not fit has infinite seconds.
    fitting = {tensor: value for tensor, value in seconds.items() if isfinite(value)}
    best = None
    ratio = None

    if fitting:
        best = min(fitting, key=fitting.__getitem__)
        if 8 in fitting:
            ratio = seconds[8] / seconds[best]

    return {
        "best_rollout_tensor": best,
        "seconds_ratio_tensor_8_to_best": ratio,
        "seconds_generate_by_tensor": {str(tensor): value for tensor, value in fitting.items()},
    }


def _training_fits(scenario: Scenario, batch: StepBatch, limit: float) -> bool:
    """Return whether training fits into memory, and the reference's forward pass in the same layout."""
    gpus = scenario.train_gpus
    # Without a layout, check whether any layout fits.
    if scenario.layout is None:
        try:
            _train_choice(scenario, "actor", batch, gpus, offload_allowed=False)
        except UserError:
            return False
        return True

    # The reference has the layout of the actor, and no gradients.
    choice = _train_choice(scenario, "actor", batch, gpus)
    if learn_memory(choice, batch).total > limit:
        return False

    reference = replace(choice, model=scenario.model("reference"))
    return score_memory(reference, batch).total <= limit


def fits_in_memory(scenario: Scenario) -> Prediction:
    """Predict whether training fits into GPU memory, and generation with the training state on the host."""
    limit = scenario.machine.usable_memory
    is_rl = scenario.raw.get("algorithm") in ("grpo", "ppo") or bool(scenario.section("rollout"))
    batch = scenario.batch if is_rl else _pretraining_batch(scenario)

    has_training = bool(scenario.layout or scenario.raw.get("optimizer") or is_rl)
    if has_training and not _training_fits(scenario, batch, limit):
        return {"fits": False}
    if not is_rl:
        return {"fits": True}

    try:
        rollout = _rollout_layout(scenario, batch)
    except UserError:
        return {"fits": False}
    return {"fits": isfinite(generate_seconds(scenario.model(), rollout, batch, scenario.machine))}


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
"""Kind of a scenario -> function that predicts its quantities."""


def predict(scenario: Scenario) -> Prediction:
    """Predict the quantities of a scenario by its kind."""
    return PREDICTORS[scenario.kind](scenario)
