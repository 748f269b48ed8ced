"""Seconds and bytes of generation: decode steps, prefill, and a whole batch run to its longest response.

A decode step reads the weights and the cache once and computes two FLOPs per active parameter and
sequence (Pope et al. 2022, arXiv 2211.05102); it adds two all-reduces a layer, a fixed cost per layer,
and the engine's host loop. A batch lasts until its longest response ends, so step time is integrated
over the response length with the sequences that are still alive, not taken at the mean length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, isinf, log2

from megatron_rl.planning.predict.batch import Lengths, StepBatch
from megatron_rl.planning.predict.layer import elementwise_bytes, local_members
from megatron_rl.shapes.hardware import GB, Machine
from megatron_rl.shapes.memory import rollout_parameters
from megatron_rl.shapes.model import ModelShape

POINTS = 32
"""At how many response lengths a step is costed; the sum stands for the integral over lengths."""


@dataclass(frozen=True)
class RolloutLayout:
    """Cut a model for generation; ``expert`` spreads routed experts over that many GPUs."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    replicas: int = 1
    max_sequences: int | None = None
    memory_fraction: float = 0.6
    engine: str = "current"

    @property
    def gpus(self) -> int:
        """Count the GPUs of one replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class DecodeCost:
    """Hold what one decode step costs, as coefficients: seconds for B sequences at mean context c.

    ``fixed + per_sequence B + cached B c + max(weights(B), flops B)``.
    """

    fixed: float
    per_sequence: float
    per_cached_token: float
    dense_weights: float
    expert_weights: float
    flops: float
    hit: float  # mean probability that one sequence needs a given expert
    spread: float  # standard deviation of an expert's load over its mean
    pipeline: int

    def seconds(self, batch: float, context: float) -> float:
        """Return seconds of one step of ``batch`` sequences at mean ``context`` cached tokens."""
        batch = batch / self.pipeline
        weights = self.dense_weights
        if self.expert_weights:
            weights += self.expert_weights * experts_read(max(1.0, batch) * self.hit, self.spread)
        read = max(weights, self.flops * batch)
        return self.fixed + self.per_sequence * batch + self.per_cached_token * batch * context + read


def experts_read(hits: float, spread: float) -> float:
    """Return the share of experts that a step reads when each is needed by ``hits`` sequences on average.

    Loads are gamma-distributed with ``spread`` as deviation over mean, needs Poisson: popular experts are
    hit many times while others are not read at all. Even loads give 1 - exp(-hits).
    """
    shape = 1.0 / spread**2 if spread else inf
    return 1.0 - (exp(-hits) if isinf(shape) else (1.0 + hits / shape) ** -shape)


def decode_cost(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> DecodeCost:
    """Derive the decode-step coefficients of a model on one replica."""
    constants, gpu, tensor = machine.constants, machine.gpu, rollout.tensor
    decode, engine = constants.decode, constants.engines[rollout.engine]
    size = machine.weight_bytes
    bandwidth = gpu.hbm * decode.weight_bandwidth
    spread = max(tensor, rollout.expert)
    # The input embedding is looked up, not read.
    dense = (
        model.parameters - model.routed_expert_parameters - (0 if model.tied else model.embedding_parameters)
    )
    per_layer = decode.layer_seconds + (decode.layer_seconds_moe if model.experts else 0.0)
    # Norms, activations and permutations of one token in every layer, then sampling.
    moved = model.layers * elementwise_bytes(model, tensor, token_shards=1)
    per_sequence = engine.sequence_seconds + decode.sequence_seconds
    per_sequence += moved / (gpu.hbm * constants.efficiency.hbm)
    if spread > 1:
        doublings = log2(min(spread, machine.cluster.domain))
        per_layer += decode.layer_seconds_per_doubling * doublings
        rate = gpu.nvlink * decode.allreduce_bandwidth_share
        local = local_members(machine.cluster, spread, 1)
        if local < spread:
            per_layer += decode.layer_seconds_network * log2(spread / local)
            rate = min(rate, local * machine.cluster.network * constants.efficiency.network)
        per_sequence += 4.0 * model.layers * (spread - 1) / spread * model.hidden * 2.0 / rate
    context_free = 2.0 * (dense + model.active_expert_parameters)
    flop_rate = gpu.rate_at(machine.precision, decode.gemm)
    return DecodeCost(
        fixed=model.layers * per_layer + decode.step_seconds + engine.step_seconds,
        per_sequence=per_sequence,
        per_cached_token=model.kv_bytes_per_gpu(tensor, min(2, size)) / (gpu.hbm * decode.kv_bandwidth),
        dense_weights=size * dense / tensor / bandwidth,
        expert_weights=size * model.routed_expert_parameters / spread / bandwidth,
        flops=context_free / tensor / flop_rate,
        hit=model.experts_per_token / model.experts if model.experts else 0.0,
        spread=constants.efficiency.routing_spread,
        pipeline=rollout.pipeline,
    )


def prefill_seconds(
    model: ModelShape, rollout: RolloutLayout, machine: Machine, tokens: float, prompt: float
) -> float:
    """Return seconds to prefill ``tokens`` prompt tokens of sequences ``prompt`` long on one replica."""
    gpu, decode = machine.gpu, machine.constants.decode
    active_experts = 2.0 * model.active_expert_parameters
    flops = tokens * (model.layer_flops - active_experts + model.attention_flops(prompt / 2))
    if active_experts:
        # Narrow experts cost efficiency, as in training; without expert parallelism tensor ranks cut them.
        width = model.expert_width * rollout.expert / max(rollout.tensor, rollout.expert)
        flops += tokens * active_experts * (1.0 + machine.constants.efficiency.expert_gemm_width / width)
    rate = gpu.rate_at(machine.precision, decode.prefill_gemm)
    return flops / (rollout.gpus * rate)


def rollout_weight_bytes(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> float:
    """Return weight bytes on one rollout GPU."""
    parameters = rollout_parameters(model, rollout.tensor, rollout.expert, rollout.pipeline)
    return machine.weight_bytes * parameters


def prefill_workspace_bytes(model: ModelShape, rollout: RolloutLayout, tokens: float) -> float:
    """Return live activation bytes of a prefill over ``tokens`` tokens: 6h + 6f/t each."""
    inner = (
        model.experts_per_token * model.expert_width + model.shared_width
        if model.experts
        else model.mlp_width
    )
    return tokens * (6.0 * model.hidden + 6.0 * inner / rollout.tensor)


def cache_tokens(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> float:
    """Return how many tokens the cache of one replica holds (negative when weights do not fit).

    The cache has the precision of the weights, two bytes at most.
    """
    memory = machine.constants.memory
    room = min(rollout.memory_fraction, memory.usable_share) * machine.gpu.memory
    room -= 0.25 * memory.engine_gigabytes * GB + prefill_workspace_bytes(model, rollout, 8192)
    room -= rollout_weight_bytes(model, rollout, machine)
    each = model.kv_bytes_per_gpu(rollout.tensor, min(2, machine.weight_bytes))
    return room / each * rollout.pipeline if each else room


def replica_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    rows: float,
    prompt: float,
    lengths: Lengths,
    samples_per_prompt: int = 1,
) -> float:
    """Return seconds until the last of ``rows`` responses on one replica is complete.

    Steps run to the longest response; where more sequences are alive than the engine or its cache
    holds, they take turns. Infinite when the cache does not hold one sequence.
    """
    engine = machine.constants.engines[rollout.engine]
    capacity = cache_tokens(model, rollout, machine)
    if capacity < prompt + lengths.longest:
        return inf
    most = rollout.max_sequences or engine.max_sequences
    cost = decode_cost(model, rollout, machine)
    shared = samples_per_prompt if engine.prefix_caching else 1
    total = prefill_seconds(model, rollout, machine, rows * prompt / shared, prompt)
    width = lengths.longest / POINTS
    cached_prompt = prompt / shared
    for point in range(POINTS):
        length = (point + 0.5) * width
        alive = max(1.0, rows * lengths.alive(length))
        running = min(alive, most, max(1.0, capacity / (cached_prompt + length)))
        total += width * cost.seconds(running, prompt + length) * alive / running
    return total


def steady_seconds(
    model: ModelShape, rollout: RolloutLayout, machine: Machine, rows: float, batch: StepBatch
) -> float:
    """Return seconds in which one replica of the open order completes ``rows`` responses.

    So many are always in flight, and those beyond by `StepBatch.oversample`: none waits for the longest.
    When weights arrive, once in these seconds, the keys and values of all in the engine are computed anew.
    Infinite when the cache does not hold one sequence.
    """
    engine, prompt, lengths = machine.constants.engines[rollout.engine], batch.prompt, batch.lengths
    capacity = cache_tokens(model, rollout, machine)
    if capacity < prompt + lengths.longest:
        return inf
    written = lengths.mean_square() / (2.0 * lengths.mean)  # of a response that is seen in flight
    most = rollout.max_sequences or engine.max_sequences
    flight = rows * (1.0 + (batch.oversample or 0.0))
    running = max(1.0, min(flight, most, capacity / (prompt + written)))
    anew = prefill_seconds(model, rollout, machine, running * (prompt + written), prompt + written)
    shared = batch.samples if engine.prefix_caching else 1
    begun = prefill_seconds(model, rollout, machine, rows * prompt / shared, prompt)
    each = decode_cost(model, rollout, machine).seconds(running, prompt + written)
    return begun + anew + rows * lengths.mean / running * each


def generate_seconds(model: ModelShape, rollout: RolloutLayout, batch: StepBatch, machine: Machine) -> float:
    """Return seconds of a step's generation over all replicas (rows are spread evenly)."""
    decode = machine.constants.decode
    rows = max(1.0, batch.rows / rollout.replicas)
    if batch.oversample is None:
        samples = min(batch.samples, max(1, round(rows)))
        once = replica_seconds(model, rollout, machine, rows, batch.prompt, batch.lengths, samples)
    else:
        once = steady_seconds(model, rollout, machine, rows, batch)
    share = decode.rl_generate * machine.constants.engines[rollout.engine].rl_share
    return decode.rl_fixed_seconds + once / share
