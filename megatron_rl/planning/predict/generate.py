"""Seconds and bytes of generation: decode steps, prefill, and a batch that runs to its longest response.

A decode step reads the weights and the cache once and computes two FLOPs per active parameter and sequence
(Pope et al. 2022, arXiv 2211.05102). Its time also includes two all-reduces per layer, a fixed cost per
layer, and the engine's host loop. A batch lasts until its longest response ends. The time of a decode step is
therefore integrated over the response length, with the number of unfinished sequences at each length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log2

from megatron_rl.planning.predict.batch import ResponseLengths, StepBatch
from megatron_rl.planning.predict.learn import elementwise_bytes, local_members
from megatron_rl.shapes.hardware import GB, Machine
from megatron_rl.shapes.memory import rollout_parameters
from megatron_rl.shapes.model import ModelShape

POINTS = 32
"""Number of response lengths at which a decode step is evaluated to integrate over lengths."""
_CACHE_BYTES = 2
"""Largest size of a key-value cache element, in bytes; smaller if weights have fewer bytes."""
_PREFILL_TOKENS = 8192
"""Number of tokens of a prefill batch, for which the engine must reserve memory for activations."""
_ENGINE_SHARE = 0.25
"""Fraction of the engine's fixed memory that counts towards its `memory_fraction`."""


@dataclass(frozen=True)
class RolloutLayout:
    """Layout of a model for generation.

    Example: ``RolloutLayout(tensor=4, replicas=2)`` serves two replicas on eight GPUs.
    """

    tensor: int = 1
    """Tensor parallelism of a replica."""
    pipeline: int = 1
    """Number of pipeline stages of a replica."""
    expert: int = 1
    """Number of GPUs over which routed experts are distributed."""
    replicas: int = 1
    """Number of data-parallel replicas of the engine."""
    max_sequences: int | None = None
    """Largest number of sequences that a replica decodes at a time, or None for the engine's default."""
    memory_fraction: float = 0.6
    """Fraction of a GPU's memory that the engine reserves."""
    engine: str = "current"
    """Name of the engine's constants in constants.json."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class DecodeCost:
    """Time model of a decode step: coefficients in seconds.

    A step of B sequences with mean context c takes
    ``fixed + per_sequence B + per_cached_token B c + max(weights(B), compute_per_sequence B)`` seconds.

    Example: a dense model on one pipeline stage::

        DecodeCost(
            fixed=5e-3,
            per_sequence=1e-5,
            per_cached_token=2e-9,
            dense_weights=6e-3,
            expert_weights=0.0,
            compute_per_sequence=4e-5,
            hit_probability=0.0,
            load_spread=0.0,
            pipeline=1,
        )
    """

    fixed: float
    """Seconds of a step that do not depend on its sequences."""
    per_sequence: float
    """Seconds per sequence."""
    per_cached_token: float
    """Seconds to read the keys and values of a cached token."""
    dense_weights: float
    """Seconds to read the dense weights."""
    expert_weights: float
    """Seconds to read all routed experts."""
    compute_per_sequence: float
    """Seconds of matrix products per sequence."""
    hit_probability: float
    """Mean probability that a sequence is routed to a given expert."""
    load_spread: float
    """Standard deviation of an expert's load, relative to the mean load."""
    pipeline: int
    """Number of pipeline stages, over which the sequences are divided."""

    def seconds(self, batch: float, context: float) -> float:
        """Return the seconds of one step of ``batch`` sequences with ``context`` cached tokens on average."""
        # The pipeline stages compute different sequences at the same time.
        sequences = batch / self.pipeline
        weight_seconds = self.dense_weights
        if self.expert_weights:
            hits = max(1.0, sequences) * self.hit_probability
            weight_seconds += self.expert_weights * fraction_of_experts_read(hits, self.load_spread)
        # Matrix products overlap with reading the weights, so the slower of the two counts.
        slower_seconds = max(weight_seconds, self.compute_per_sequence * sequences)
        cache_seconds = self.per_cached_token * sequences * context
        return self.fixed + self.per_sequence * sequences + cache_seconds + slower_seconds


def fraction_of_experts_read(hits: float, spread: float) -> float:
    """Return the fraction of experts that a step reads if ``hits`` sequences use an expert on average.

    Expert loads are gamma-distributed, with a standard deviation of ``spread`` times the mean, and the hits
    of an expert are Poisson-distributed: popular experts have many hits, and other experts are not read.
    Without spread the fraction is 1 - exp(-hits).
    """
    if not spread:
        return 1.0 - exp(-hits)
    gamma_shape = 1.0 / spread**2
    return 1.0 - (1.0 + hits / gamma_shape) ** -gamma_shape


def decode_cost(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> DecodeCost:
    """Compute the time model of a decode step on one replica."""
    constants = machine.constants
    gpu = machine.gpu
    tensor = rollout.tensor
    decode = constants.decode
    engine = constants.engines[rollout.engine]
    weight_bytes = machine.bytes_per_weight
    weight_bandwidth = gpu.hbm * decode.weight_bandwidth
    expert_gpus = max(tensor, rollout.expert)

    # A decode step looks up a few rows of the input embedding, but reads all other weights.
    dense_parameters = model.parameters - model.routed_expert_parameters
    if not model.tied:
        dense_parameters -= model.embedding_parameters

    seconds_per_layer = decode.layer_seconds
    if model.experts:
        seconds_per_layer += decode.layer_seconds_moe

    # Norms, activations and permutations of one token in every layer, then sampling.
    moved_bytes = model.layers * elementwise_bytes(model, tensor, token_shards=1)
    per_sequence = engine.sequence_seconds + decode.sequence_seconds
    per_sequence += moved_bytes / (gpu.hbm * constants.efficiency.hbm)

    # All-reduces have a latency per layer, which grows with the number of ranks, and a cost per sequence.
    if expert_gpus > 1:
        # The latency grows with log2 of the group size. The growth per doubling is larger across nodes.
        doublings = log2(min(expert_gpus, machine.cluster.domain))
        seconds_per_layer += decode.layer_seconds_per_doubling * doublings
        allreduce_rate = gpu.nvlink * decode.allreduce_bandwidth_share
        local_gpus = local_members(machine.cluster, expert_gpus, 1)
        if local_gpus < expert_gpus:
            seconds_per_layer += decode.layer_seconds_network * log2(expert_gpus / local_gpus)
            network_rate = local_gpus * machine.cluster.network * constants.efficiency.network
            allreduce_rate = min(allreduce_rate, network_rate)

        # Two all-reduces per layer; each moves the bfloat16 activations of a token twice.
        activation_bytes = 2.0 * model.hidden
        reduced_bytes = 4.0 * model.layers * activation_bytes * (expert_gpus - 1) / expert_gpus
        per_sequence += reduced_bytes / allreduce_rate

    # Each step reads and writes the recurrent state of each row, for mixers with such a state.
    cache_rate = gpu.hbm * decode.kv_bandwidth
    element_bytes = min(_CACHE_BYTES, weight_bytes)
    per_sequence += 2.0 * model.state_bytes_per_row(tensor, element_bytes) / cache_rate

    # Two FLOPs per parameter that a token uses.
    flops_per_sequence = 2.0 * (dense_parameters + model.active_expert_parameters)
    flop_rate = gpu.achieved_flops(machine.precision, decode.gemm)

    # Routing is uniform on average.
    hit_probability = 0.0
    if model.experts:
        hit_probability = model.experts_per_token / model.experts
    return DecodeCost(
        fixed=model.layers * seconds_per_layer + decode.step_seconds + engine.step_seconds,
        per_sequence=per_sequence,
        per_cached_token=model.kv_bytes_per_gpu(tensor, element_bytes) / cache_rate,
        dense_weights=weight_bytes * dense_parameters / tensor / weight_bandwidth,
        expert_weights=weight_bytes * model.routed_expert_parameters / expert_gpus / weight_bandwidth,
        compute_per_sequence=flops_per_sequence / tensor / flop_rate,
        hit_probability=hit_probability,
        load_spread=constants.efficiency.routing_spread,
        pipeline=rollout.pipeline,
    )


def prefill_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    tokens: float,
    prompt_length: float,
) -> float:
    """Return the seconds in which one replica prefills ``tokens`` tokens of prompts of a given length."""
    # A token of a prompt attends to half of the prompt on average.
    expert_flops = 2.0 * model.active_expert_parameters
    token_flops = model.layer_flops - expert_flops + model.attention_flops(prompt_length / 2)

    # Narrow experts reduce efficiency, as if they had more FLOPs. Without expert parallelism, tensor ranks
    # shard them.
    if expert_flops:
        expert_width = model.expert_width * rollout.expert / max(rollout.tensor, rollout.expert)
        token_flops += expert_flops * (1.0 + machine.constants.efficiency.expert_gemm_width / expert_width)

    flop_rate = machine.gpu.achieved_flops(machine.precision, machine.constants.decode.prefill_gemm)
    return tokens * token_flops / (rollout.gpus * flop_rate)


def rollout_weight_bytes(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> float:
    """Return the bytes of model weights on one GPU of a rollout replica."""
    parameters = rollout_parameters(model, rollout.tensor, rollout.expert, rollout.pipeline)
    return machine.bytes_per_weight * parameters


def prefill_workspace_bytes(model: ModelShape, rollout: RolloutLayout, tokens: float) -> float:
    """Return the bytes of activations in a prefill of ``tokens`` tokens on one GPU."""
    # Most layers of a mixture of experts have routed experts.
    feed_forward = max(model.feed_forwards, key=lambda candidate: candidate.routed)
    inner_width = feed_forward.inner_width(model)

    # In bfloat16, 2 bytes each: three tensors of the hidden size (such as the residual stream and a norm),
    # and three of the feed-forward's shard (gate, up and their product).
    return tokens * (6.0 * model.hidden + 6.0 * inner_width / rollout.tensor)


def cache_capacity_tokens(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> float:
    """Return the capacity of one replica's key-value cache in tokens; negative if the weights do not fit.

    An element of the cache has as many bytes as a weight, but at most two. For a model that caches no keys
    and values, returns the free bytes, whose sign shows whether the weights fit.
    """
    memory = machine.constants.memory
    # The engine's fraction, minus its buffers, the activations of a prefill, and the weights.
    free_bytes = min(rollout.memory_fraction, memory.usable_share) * machine.gpu.memory
    free_bytes -= _ENGINE_SHARE * memory.engine_gigabytes * GB
    free_bytes -= prefill_workspace_bytes(model, rollout, _PREFILL_TOKENS)
    free_bytes -= rollout_weight_bytes(model, rollout, machine)

    token_bytes = model.kv_bytes_per_gpu(rollout.tensor, min(_CACHE_BYTES, machine.bytes_per_weight))
    if not token_bytes:
        return free_bytes
    return free_bytes / token_bytes * rollout.pipeline


def state_cache_tokens(model: ModelShape, rollout: RolloutLayout, machine: Machine) -> float:
    """Return the number of cached tokens that take as many bytes as the recurrent states of one row.

    Returns 0 for a model that caches no keys and values.
    """
    element_bytes = min(_CACHE_BYTES, machine.bytes_per_weight)
    token_bytes = model.kv_bytes_per_gpu(rollout.tensor, element_bytes)
    if not token_bytes:
        return 0.0
    return model.state_bytes_per_row(rollout.tensor, element_bytes) / token_bytes


def replica_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    rows: float,
    prompt_length: float,
    lengths: ResponseLengths,
    samples_per_prompt: int = 1,
) -> float:
    """Return the seconds until the last of ``rows`` responses on one replica is complete.

    Prompts have ``prompt_length`` tokens, and ``samples_per_prompt`` rows share a prompt. Decode steps
    continue to the end of the longest response. The engine decodes at most ``rollout.max_sequences``
    sequences at a time, and only as many as fit in the KV cache; the remaining sequences wait. The result is
    infinite if the KV cache has no room for one sequence.
    """
    engine = machine.constants.engines[rollout.engine]
    cache_capacity = cache_capacity_tokens(model, rollout, machine)
    state_tokens = state_cache_tokens(model, rollout, machine)
    if cache_capacity < prompt_length + lengths.limit + state_tokens:
        return inf

    sequence_limit = rollout.max_sequences or engine.max_sequences
    cost = decode_cost(model, rollout, machine)
    # With prefix caching the samples of a prompt share its prefill and its cache.
    rows_per_prefix = 1
    if engine.prefix_caching:
        rows_per_prefix = samples_per_prompt
    prefill_tokens = rows * prompt_length / rows_per_prefix
    total_seconds = prefill_seconds(model, rollout, machine, prefill_tokens, prompt_length)

    # Integrate over the response length: as rows end, steps get faster and more of the cache is free.
    interval = lengths.limit / POINTS
    cached_prompt_tokens = prompt_length / rows_per_prefix
    for point in range(POINTS):
        length = (point + 0.5) * interval
        unfinished_rows = max(1.0, rows * lengths.fraction_longer(length))
        cached_tokens = cached_prompt_tokens + length + state_tokens
        rows_that_fit = max(1.0, cache_capacity / cached_tokens)
        running_rows = min(unfinished_rows, sequence_limit, rows_that_fit)

        # Rows that do not fit wait until running rows end, which multiplies the number of steps.
        step_seconds = cost.seconds(running_rows, prompt_length + length)
        total_seconds += interval * step_seconds * unfinished_rows / running_rows
    return total_seconds


def open_order_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    machine: Machine,
    rows: float,
    batch: StepBatch,
) -> float:
    """Return the seconds in which one replica completes ``rows`` responses in the open order.

    In the open order, the trainer uses each response as soon as it is complete. ``rows`` sequences and the
    extra sequences of `StepBatch.oversample` are always in flight, so that the replica never waits for the
    longest response. There is one weight update in this time, after which the keys and values of all running
    sequences are recomputed. The result is infinite if the cache has no room for one sequence.
    """
    engine = machine.constants.engines[rollout.engine]
    prompt_length = batch.prompt_length
    lengths = batch.lengths
    cache_capacity = cache_capacity_tokens(model, rollout, machine)
    state_tokens = state_cache_tokens(model, rollout, machine)
    if cache_capacity < prompt_length + lengths.limit + state_tokens:
        return inf

    # Mean number of generated tokens of a response in flight. Long responses are in flight for longer, hence
    # E[l^2].
    mean_generated = lengths.mean_square() / (2.0 * lengths.mean)
    context = prompt_length + mean_generated
    sequence_limit = rollout.max_sequences or engine.max_sequences
    rows_in_flight = rows * (1.0 + (batch.oversample or 0.0))
    rows_that_fit = cache_capacity / (context + state_tokens)
    running_rows = max(1.0, min(rows_in_flight, sequence_limit, rows_that_fit))

    # Prefill new rows, with one prefill for all samples of a prompt if the engine caches prefixes. Recompute
    # running rows after the weight update.
    rows_per_prefix = 1
    if engine.prefix_caching:
        rows_per_prefix = batch.samples
    prefill_tokens = rows * prompt_length / rows_per_prefix
    seconds_to_prefill = prefill_seconds(model, rollout, machine, prefill_tokens, prompt_length)
    seconds_to_recompute = prefill_seconds(model, rollout, machine, running_rows * context, context)

    # Every step adds a token to each running row.
    decode_steps = rows * lengths.mean / running_rows
    step_seconds = decode_cost(model, rollout, machine).seconds(running_rows, context)
    return seconds_to_prefill + seconds_to_recompute + decode_steps * step_seconds


def generate_seconds(
    model: ModelShape,
    rollout: RolloutLayout,
    batch: StepBatch,
    machine: Machine,
) -> float:
    """Return the seconds of a step's generation.

    The rows (one row is a prompt with one response) are divided evenly over all replicas of the engine.
    """
    decode = machine.constants.decode
    rows = max(1.0, batch.rows / rollout.replicas)
    if batch.oversample is None:
        # If a replica has fewer rows than a prompt has samples, only these rows share a prefill.
        samples_per_prefill = min(batch.samples, max(1, round(rows)))
        seconds = replica_seconds(
            model, rollout, machine, rows, batch.prompt_length, batch.lengths, samples_per_prefill
        )
    else:
        # With oversampling, the engine always has extra sequences in flight, and the trainer uses each
        # response as soon as it is complete. This schedule is called the open order.
        seconds = open_order_seconds(model, rollout, machine, rows, batch)

    # In a reinforcement-learning loop an engine reaches a fraction of its standalone speed.
    rl_speed = decode.rl_generate * machine.constants.engines[rollout.engine].rl_share
    return decode.rl_fixed_seconds + seconds / rl_speed
