"""Seconds and tokens of generation: decode steps, prefill, and a whole batch run to its longest response.

A decode step reads the weights and the cache once and computes two FLOPs per active parameter and
sequence (Pope et al. 2022, arXiv 2211.05102); it adds two all-reduces a layer, a fixed cost per layer,
and the engine's host loop. A batch lasts until its longest response ends, so step time is integrated
over the response length with the sequences that are still alive, not taken at the mean length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, isinf, log2

from megatron_rl.planner.communication import local_members
from megatron_rl.planner.compute import elementwise_bytes
from megatron_rl.planner.constants import Cluster, Constants
from megatron_rl.planner.layout import Layout, RolloutLayout
from megatron_rl.planner.lengths import Lengths
from megatron_rl.planner.memory import PRECISION_BYTES, kv_capacity_bytes
from megatron_rl.shapes.model import ModelShape

_POINTS = 32


@dataclass(frozen=True)
class StepCost:
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


def step_cost(
    model: ModelShape, rollout: RolloutLayout, cluster: Cluster, constants: Constants, precision: str
) -> StepCost:
    """Derive the decode-step coefficients of a model on one replica."""
    decode, gpu, tensor = constants.decode, cluster.gpu, rollout.tensor
    engine = constants.engines[rollout.engine]
    size = PRECISION_BYTES.get(precision, 2)
    bandwidth = gpu.hbm * decode.weight_bandwidth
    spread = max(tensor, rollout.expert)
    # The input embedding is looked up, not read.
    dense = (
        model.parameters - model.routed_expert_parameters - (0 if model.tied else model.embedding_parameters)
    )
    per_layer = decode.layer_seconds + (decode.layer_seconds_moe if model.experts else 0.0)
    # Norms, activations and permutations of one token in every layer, then sampling.
    moved = model.layers * elementwise_bytes(model, Layout(tensor=tensor))
    per_sequence = engine.sequence_seconds + decode.sequence_seconds
    per_sequence += moved / (gpu.hbm * constants.efficiency.hbm)
    if spread > 1:
        doublings = log2(min(spread, cluster.domain))
        per_layer += decode.layer_seconds_per_doubling * doublings
        rate = gpu.nvlink * decode.allreduce_bandwidth_share
        local = local_members(cluster, spread, 1)
        if local < spread:
            per_layer += decode.layer_seconds_network * log2(spread / local)
            rate = min(rate, local * cluster.network * constants.efficiency.network)
        per_sequence += 4.0 * model.layers * (spread - 1) / spread * model.hidden * 2.0 / rate
    context_free = 2.0 * (dense + model.moe_layers * model.experts_per_token * model.expert_parameters)
    return StepCost(
        fixed=model.layers * per_layer + decode.step_seconds + engine.step_seconds,
        per_sequence=per_sequence,
        per_cached_token=model.kv_bytes_per_gpu(tensor, min(2, size)) / (gpu.hbm * decode.kv_bandwidth),
        dense_weights=size * dense / tensor / bandwidth,
        expert_weights=size * model.routed_expert_parameters / spread / bandwidth,
        flops=context_free
        / tensor
        / (gpu.peak(precision) * min(1.0, decode.gemm * gpu.gemm_efficiency / 0.7)),
        hit=model.experts_per_token / model.experts if model.experts else 0.0,
        spread=constants.efficiency.routing_spread,
        pipeline=rollout.pipeline,
    )


def prefill_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    tokens: float,
    prompt: float,
) -> float:
    """Return seconds to prefill ``tokens`` prompt tokens of sequences ``prompt`` long on one replica."""
    active_experts = 2.0 * model.moe_layers * model.experts_per_token * model.expert_parameters
    flops = tokens * (model.layer_flops - active_experts + model.attention_flops(prompt / 2))
    if active_experts:
        # Narrow experts cost efficiency, as in training; without expert parallelism tensor ranks cut them.
        width = model.expert_width * rollout.expert / max(rollout.tensor, rollout.expert)
        flops += tokens * active_experts * (1.0 + constants.efficiency.expert_gemm_width / width)
    rate = (
        cluster.gpu.peak(precision)
        * constants.decode.prefill_gemm
        * min(1.0, cluster.gpu.gemm_efficiency / 0.7)
    )
    return flops / (rollout.gpus * rate)


def cache_tokens(
    model: ModelShape,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    resident: float = 0.0,
) -> float:
    """Return how many tokens the cache of one replica holds (negative when weights do not fit).

    The cache has the precision of the weights, two bytes at most.
    """
    room = kv_capacity_bytes(model, rollout, cluster.gpu.memory, precision, constants, resident)
    each = model.kv_bytes_per_gpu(rollout.tensor, min(2, PRECISION_BYTES.get(precision, 2)))
    return room / each * rollout.pipeline if each else room


def generate_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    rows: float,
    prompt: float,
    lengths: Lengths,
    samples_per_prompt: int = 1,
    resident: float = 0.0,
) -> float:
    """Return seconds until the last of ``rows`` responses on one replica is complete.

    Steps run to the longest response; where more sequences are alive than the engine or its cache
    holds, they take turns. Infinite when the cache does not hold one sequence.
    """
    engine = constants.engines[rollout.engine]
    capacity = cache_tokens(model, rollout, cluster, constants, precision, resident)
    if capacity < prompt + lengths.longest:
        return inf
    most = rollout.max_sequences or engine.max_sequences
    cost = step_cost(model, rollout, cluster, constants, precision)
    shared = samples_per_prompt if engine.prefix_caching else 1
    total = prefill_seconds(model, rollout, cluster, constants, precision, rows * prompt / shared, prompt)
    width = lengths.longest / _POINTS
    cached_prompt = prompt / shared
    for point in range(_POINTS):
        length = (point + 0.5) * width
        alive = max(1.0, rows * lengths.alive(length))
        running = min(alive, most, max(1.0, capacity / (cached_prompt + length)))
        total += width * cost.seconds(running, prompt + length) * alive / running
    return total


def decode_milliseconds(
    model: ModelShape,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    rows: float,
    prompt: float,
    lengths: Lengths,
) -> float:
    """Return the mean milliseconds between tokens when ``rows`` sequences decode together."""
    cost = step_cost(model, rollout, cluster, constants, precision)
    width = lengths.longest / _POINTS
    total = weight = 0.0
    for point in range(_POINTS):
        length = (point + 0.5) * width
        alive = rows * lengths.alive(length)
        total += alive * cost.seconds(max(1.0, alive), prompt + length)
        weight += alive
    return 1e3 * total / weight


def serving_tokens_per_second(
    model: ModelShape,
    rollout: RolloutLayout,
    cluster: Cluster,
    constants: Constants,
    precision: str,
    concurrent: float,
    prompt: float,
    lengths: Lengths,
) -> float:
    """Return response tokens per second of one replica that is kept full by a queue.

    Running sequences are mid-response on average, and each response's prefill takes its turn.
    """
    engine = constants.engines[rollout.engine]
    middle = lengths.mean_square() / (2.0 * lengths.mean)
    capacity = cache_tokens(model, rollout, cluster, constants, precision)
    running = min(concurrent, rollout.max_sequences or engine.max_sequences, capacity / (prompt + middle))
    if running < 1.0:
        return 0.0
    cost = step_cost(model, rollout, cluster, constants, precision)
    prefill = prefill_seconds(model, rollout, cluster, constants, precision, prompt, prompt)
    per_token = cost.seconds(running, prompt + middle) + running * prefill / lengths.mean
    return running / per_token
