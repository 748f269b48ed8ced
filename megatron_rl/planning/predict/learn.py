"""Seconds and bytes of a role's two phases, scoring (a forward pass) and learning.

Schedule: t_mb (m + (p - 1) / v) with the slowest stage's t_mb (Narayanan et al. 2021, section 2.2).
Data parallelism: reduce-scatter of gradients and all-gather of 2-byte parameters, partly overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log, sqrt

from megatron_rl.planning.predict.batch import StepBatch
from megatron_rl.planning.predict.layer import LayerSeconds, gather_seconds, layer_seconds
from megatron_rl.shapes.hardware import Constants, Machine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora, adapted_parameter_count, adapter_parameter_count
from megatron_rl.shapes.memory import (
    RUNTIME_BYTES,
    Layers,
    OptimizerChoice,
    TrainingMemory,
    fullest_parameters,
    representative_stages,
    scoring_memory,
    training_memory,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pipeline_stages import default_stage_layers, end_settings


@dataclass(frozen=True)
class TrainChoice:
    """Say how one trained or scored model runs on its GPUs.

    ``lora`` learns in the place of its weights; ``exchanges_heads`` says how sequences that are cut attend.
    """

    model: ModelShape
    layout: ParallelLayout
    recompute: str = "none"
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    micro_batch: int = 1
    transformer_engine: bool = True
    lora: Lora | None = None
    exchanges_heads: bool = True

    @property
    def built(self) -> Layers:
        """Return how its layers are built."""
        fused = self.transformer_engine and not self.model.plain_layers
        return Layers(fused=fused, recompute=self.recompute)


@dataclass(frozen=True)
class RoleMemory:
    """Hold the bytes on the fullest GPU while a role works, and the most that any GPU holds while it rests.

    The two need not be one GPU: an early pipeline stage has more activations, an end more parameters.
    """

    fullest: TrainingMemory
    resting: float

    @property
    def total(self) -> float:
        """Return the peak."""
        return self.fullest.total


@dataclass(frozen=True)
class Work:
    """Say what one pass over rows holds, for one data-parallel replica.

    ``tokens`` per micro-batch, ``micro_batches`` per replica, ``context`` mean attended keys.
    """

    tokens: float
    micro_batches: float
    context: float


@dataclass(frozen=True)
class OptimizerStep:
    """Hold seconds of one optimizer step: forward and backward, exposed gradient exchange, update."""

    compute: float
    exchange: float
    update: float

    @property
    def total(self) -> float:
        """Return all seconds."""
        return self.compute + self.exchange + self.update


def replica_work(choice: TrainChoice, batch: StepBatch, rows: float) -> Work:
    """Split ``rows`` sequences over the data-parallel replicas into micro-batches.

    With packing a micro-batch holds up to ``micro_batch * longest`` tokens, never less than a row;
    without, ``micro_batch`` rows padded to the longest of them. A replica gets at least one row.
    """
    mean, longest = batch.mean_row, batch.longest
    of_replica = max(1.0, rows / choice.layout.data)
    if batch.packing:
        rows_each = min(max(1.0, choice.micro_batch * longest / mean - 0.5), of_replica)
        tokens = rows_each * mean
    else:
        rows_each = min(float(choice.micro_batch), of_replica)
        padded = mean if rows_each <= 1 else mean + (longest - mean) * (1 - 1 / rows_each)
        tokens = rows_each * padded
    return Work(tokens, max(1.0, of_replica / rows_each), batch.context)


def _stage_seconds(
    model: ModelShape, layout: ParallelLayout, per_layer: float, head: float
) -> tuple[float, float]:
    """Return (slowest, mean) stage seconds; the head rides on the last stage.

    Layers are dealt out so that the slowest stage takes least: the head's may have fewer.
    """
    layers, pipeline = model.layers, layout.pipeline
    mean = (layers * per_layer + head) / pipeline
    if pipeline == 1:
        return mean, mean
    if layout.virtual_pipeline == 1:
        return min(
            max(ceil((layers - last) / (pipeline - 1)) * per_layer, last * per_layer + head)
            for last in range(layers // pipeline + 1)
        ), mean
    return min(max(mean, ceil(mean / per_layer) * per_layer), mean + head * 0.5), mean


def _pipeline_seconds(
    choice: TrainChoice, machine: Machine, work: Work, per_layer: float, head: float
) -> float:
    """Return seconds of all micro-batches whose layers take ``per_layer`` seconds each."""
    model, layout = choice.model, choice.layout
    slow, mean = _stage_seconds(model, layout, per_layer, head)
    total = slow * work.micro_batches + mean * (layout.pipeline - 1) / layout.virtual_pipeline
    if layout.pipeline > 1:
        cluster, efficiency = machine.cluster, machine.constants.efficiency
        share = layout.tensor if layout.sequence_parallel else 1
        sent = 2.0 * model.hidden * work.tokens / layout.context / share
        stride = layout.tensor * layout.context * layout.data
        inside = stride * 2 <= cluster.domain
        rate = (cluster.gpu.nvlink if inside else cluster.network) * efficiency.network
        hops = work.micro_batches * layout.virtual_pipeline + layout.pipeline - 1
        total += efficiency.pipeline_exposed * 2.0 * hops * sent / rate
    return total


def _learning_parameters(choice: TrainChoice) -> tuple[int, int]:
    """Return the dense and the expert parameters that learn on a rank of the stage that has most."""
    model, layout, lora = choice.model, choice.layout, choice.lora
    if lora is None:
        return fullest_parameters(model, layout)
    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    return max((adapter_parameter_count(model, layout, layers, lora) for layers in stages), key=sum)


def _gradient_exchange_seconds(choice: TrainChoice, machine: Machine) -> float:
    layout = choice.layout
    dense, expert = _learning_parameters(choice)
    bytes_each = choice.optimizer.gradient_bytes + 2.0
    total = gather_seconds(machine, layout.data * layout.context, layout.tensor, dense * bytes_each)
    if expert:
        stride = layout.expert * layout.expert_tensor
        total += gather_seconds(machine, layout.expert_data, stride, expert * bytes_each)
    return total


def _update_seconds(choice: TrainChoice, machine: Machine) -> float:
    layout, optimizer, efficiency = choice.layout, choice.optimizer, machine.constants.efficiency
    dense, expert = _learning_parameters(choice)
    parameters = dense + expert
    if optimizer.distributed:
        parameters = dense / (layout.data * layout.context) + expert / layout.expert_data
    moved = parameters * efficiency.optimizer_bytes_per_parameter
    seconds = moved / (machine.gpu.hbm * efficiency.hbm)
    if optimizer.offload:
        # Gradients go to the host and parameters come back; the update itself runs at host memory rate.
        moved = parameters * (optimizer.gradient_bytes + 2.0 + 2.0 * optimizer.state_bytes)
        seconds += moved / machine.host_rate
    return seconds


def _layer_of(choice: TrainChoice, machine: Machine, work: Work) -> LayerSeconds:
    return layer_seconds(
        choice.model,
        choice.layout,
        machine,
        work.tokens,
        work.context,
        choice.built.fused,
        frozen=choice.lora is not None,
        exchanges=choice.exchanges_heads,
    )


def optimizer_step(choice: TrainChoice, machine: Machine, work: Work, share: float = 1.0) -> OptimizerStep:
    """Return seconds of one optimizer step (forward, backward, gradient exchange, update).

    ``share`` is the part of the kernels' pace that the surrounding loop keeps; it slows computation,
    not the gradient exchange.
    """
    layer = _layer_of(choice, machine, work)
    per_layer, head = layer.forward + layer.backward, layer.head_forward + layer.head_backward
    if choice.recompute == "full":
        per_layer += layer.forward
    elif choice.recompute == "selective":
        per_layer += layer.attention
    return OptimizerStep(
        compute=_pipeline_seconds(choice, machine, work, per_layer, head) / share,
        exchange=machine.constants.efficiency.data_exposed * _gradient_exchange_seconds(choice, machine),
        update=_update_seconds(choice, machine),
    )


def routing_imbalance(model: ModelShape, layout: ParallelLayout, spread: float) -> float:
    """Return the tokens of the fullest expert-parallel rank over the mean, which every layer waits for.

    Pretraining benchmarks force an even load; what is trained on in reinforcement learning does not have
    one. With ``spread`` the standard deviation of an expert's load over its mean, a rank of E / ep experts
    has spread / sqrt(E / ep), and the largest of ep such loads lies sqrt(2 ln ep) deviations above the
    mean (expected maximum of normal variables).
    """
    if not model.experts or layout.expert == 1:
        return 1.0
    deviation = spread * sqrt(layout.expert / model.experts)
    return 1.0 + deviation * sqrt(2.0 * log(layout.expert))


def _loop_share(choice: TrainChoice, batch: StepBatch, constants: Constants) -> float:
    """Return the share of a pretraining pace that a reinforcement-learning loop keeps.

    Uneven rows unbalance replicas and leave packed micro-batches partly empty; routing is uneven; the rest
    is fp32 logits, loading and offloading.
    """
    share = constants.efficiency.rl_loop
    if batch.lengths.scale is not None or batch.packing:
        share *= constants.efficiency.rl_uneven_rows
    return share / routing_imbalance(choice.model, choice.layout, constants.efficiency.routing_spread)


def learn_seconds(choice: TrainChoice, batch: StepBatch, machine: Machine) -> float:
    """Return seconds of all optimizer steps of one role, every epoch of them."""
    work = replica_work(choice, batch, batch.rows / batch.optimizer_steps)
    share = machine.constants.efficiency.rl_train * _loop_share(choice, batch, machine.constants)
    return batch.epochs * batch.optimizer_steps * optimizer_step(choice, machine, work, share).total


def score_seconds(choice: TrainChoice, batch: StepBatch, machine: Machine) -> float:
    """Return seconds of one forward pass of one role over a step's rows."""
    work = replica_work(choice, batch, batch.rows)
    layer = _layer_of(choice, machine, work)
    once = _pipeline_seconds(choice, machine, work, layer.forward, layer.head_forward)
    return once / (machine.constants.efficiency.rl_log_probs * _loop_share(choice, batch, machine.constants))


def fullest_training(
    choice: TrainChoice,
    tokens: float,
    micro_batches: int,
    logits_bytes_per_element: float | None = None,
) -> RoleMemory:
    """Return the bytes on the fullest GPU while it trains micro-batches of ``tokens`` tokens.

    ``logits_bytes_per_element`` is of a framework that has the logits of a whole micro-batch at once; None
    takes them chunk by chunk.
    """
    model, layout = choice.model, choice.layout
    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    stated = end_settings(model.layers, layout.pipeline, layout.virtual_pipeline) is not None
    built, lora, held = choice.built, choice.lora, []
    for stage in representative_stages(len(stages)) if stated else range(len(stages)):
        adapters = None if lora is None else adapter_parameter_count(model, layout, stages[stage], lora)
        memory = training_memory(
            model, layout, stages, stage, choice.optimizer, built, tokens, micro_batches, adapters
        )
        if logits_bytes_per_element is not None and memory.logits:
            shard = tokens / layout.context * model.vocab / layout.tensor
            memory = replace(memory, logits=shard * logits_bytes_per_element)
        held.append(memory)
    if not stated:
        # Such layers need a pipeline layout of one's own, which evens out what stages hold between steps.
        names = ("weights", "gradients", "optimizer")
        mean = {name: sum(getattr(memory, name) for memory in held) / len(held) for name in names}
        held = [replace(memory, **mean) for memory in held]
    return _role_memory(held)


def _role_memory(held: Sequence[TrainingMemory]) -> RoleMemory:
    fullest = max(held, key=lambda memory: memory.total)
    return RoleMemory(replace(fullest, overhead=RUNTIME_BYTES), max(memory.states for memory in held))


def learn_memory(choice: TrainChoice, batch: StepBatch) -> RoleMemory:
    """Return the bytes of a role while it learns from a batch."""
    work = replica_work(choice, batch, batch.rows / batch.optimizer_steps)
    # The fullest micro-batch holds a whole longest row, whatever the mean fill.
    longest = choice.micro_batch * batch.longest if batch.packing else batch.longest
    return fullest_training(choice, max(work.tokens, longest), max(1, round(work.micro_batches)))


def merged_bytes(choice: TrainChoice) -> float:
    """Return the bytes of the weights with adapters added in that the fullest GPU makes for a sync."""
    model, layout, lora = choice.model, choice.layout, choice.lora
    if lora is None:
        return 0.0
    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    most = max(adapted_parameter_count(model, layout, layers, lora.targets) for layers in stages)
    return float(choice.built.dtype_bytes * most)


def score_memory(choice: TrainChoice, batch: StepBatch) -> RoleMemory:
    """Return the bytes of a role that only scores."""
    model, layout, tokens = choice.model, choice.layout, choice.micro_batch * batch.longest
    stages = default_stage_layers(model.layers, layout.pipeline, layout.virtual_pipeline)
    telling = representative_stages(len(stages))
    held = [scoring_memory(model, layout, stages, stage, choice.built, tokens) for stage in telling]
    return _role_memory(held)
