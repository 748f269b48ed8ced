"""Rules on sizes: number of processes, parallel layouts, tokens of a row, and memory of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.config.budget import PHASES, RankMemory, checkpoint_memory
from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.config.derive import longest_row, smallest_world
from megatron_rl.config.engines import engines_with
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.config.sections.response_limits import AUTO
from megatron_rl.errors import UserError, range_error
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.layout import ParallelLayout, problems
from megatron_rl.shapes.model import ModelShape

MEMORY_TOLERANCE = 0.2
"""Tolerance of memory estimates, as a share of a GPU's memory: only an estimate beyond it is an error.

Estimates count the tensors that a rank allocates, and approximate kernel workspaces and fragmentation by a
constant.
"""

_GIB = 2**30


def check_world(config: RunConfig, launched_processes: int | None) -> Iterator[UserError]:
    """Yield the error for a number of processes that is out of range or differs from ``world_size``."""
    if launched_processes is not None and not 1 <= launched_processes <= MAX_WORLD:
        fix = "start a number of processes that is a multiple of the layouts' parallel sizes"
        yield range_error("world size", launched_processes, f"1 to {MAX_WORLD} processes", fix=fix)
        return

    # Without an explicit world size, any number of processes is valid here.
    if launched_processes is None or config.world_size is None or launched_processes == config.world_size:
        return
    processes = "1 process" if launched_processes == 1 else f"{launched_processes} processes"
    yield UserError(
        "the number of processes is not `world_size`",
        where="world_size",
        expected=f"{config.world_size} processes, as in world_size",
        got=processes,
        fix=f"torchrun --nproc-per-node {config.world_size} -m megatron_rl train ..., set "
        f"world_size={launched_processes}, or remove world_size",
    )


def smallest_valid_world(config: RunConfig) -> int | None:
    """Return the smallest number of processes that every role's sizes divide; None if above ``MAX_WORLD``."""
    # Without this bound, parallel sizes such as 10**9 would make later rules build a layout with 10**9 ranks.
    world_size = smallest_world(config)
    return world_size if world_size <= MAX_WORLD else None


def check_layout(
    role: str, layout: ParallelLayout, world_size: int, config: RunConfig
) -> Iterator[UserError]:
    """Yield the errors for a role's layout: its sizes, its ranks, and tensor parallelism of the engine."""
    yield from problems(layout, world_size, smallest_valid_world(config))

    engine = config.rollout.engine
    capabilities = config.rollout.capabilities
    if role == "rollout" and not capabilities.tensor_parallel and layout.tensor > 1:
        reason = f"the {engine} engine does not shard the model over ranks"
        if not capabilities.in_process:
            reason = "ranks only send requests; the command that starts a server sets its tensor parallelism"
        yield UserError(
            reason,
            where="rollout.tensor",
            expected=f"1 with rollout.engine={engine}",
            got=str(layout.tensor),
            fix=f"set rollout.tensor=1, or {engines_with(tensor_parallel=True)}",
        )


def check_lengths(config: RunConfig, shape: ModelShape) -> Iterator[UserError]:
    """Yield the error for rows (prompt and response) with more tokens than the model has positions."""
    row_tokens = longest_row(config)
    excess = row_tokens - shape.max_positions
    if config.job == TRAIN and excess > 0:
        prompt_tokens = config.data.max_prompt_tokens
        key = "rollout.max_response_tokens"
        if config.rollout.max_response_tokens == AUTO:
            key = "rollout.auto_limit.at_most"

        yield UserError(
            "prompt and response together are longer than the model's positions",
            where=key,
            expected=f"data.max_prompt_tokens + max_response_tokens <= {shape.max_positions} "
            "(max_position_embeddings of the model; index_topk if the model has sparse attention)",
            got=f"{prompt_tokens} + {row_tokens - prompt_tokens} = {row_tokens}",
            fix=f"lower {key} or data.max_prompt_tokens, together by {excess} tokens",
        )


def check_top_tokens(algorithm: Algorithm, shape: ModelShape) -> Iterator[UserError]:
    """Yield the error for a distillation over more tokens than the actor's vocabulary has."""
    top_tokens = algorithm.distillation.top_tokens
    if top_tokens > shape.vocab:
        yield range_error(
            "algorithm.distillation.k",
            top_tokens,
            f"at most {shape.vocab}, the tokens of the model",
            fix="64 tokens usually have nearly all of the teacher's probability",
        )


def check_microbatch_budget(config: RunConfig) -> Iterator[UserError]:
    """Yield the error for a micro-batch budget (tokens) below the longest row."""
    budget = config.batch.tokens_per_microbatch
    row_tokens = longest_row(config)
    if config.job == TRAIN and budget is not None and budget < row_tokens:
        yield UserError(
            "`batch.tokens_per_microbatch` is below the length of the longest row",
            where="batch.tokens_per_microbatch",
            expected=f"at least data.max_prompt_tokens + rollout.max_response_tokens = {row_tokens}",
            got=str(budget),
            fix=f"raise it to {row_tokens} or more, or remove it to have it derived",
        )


def check_memory_target(config: RunConfig, target_tokens: int | None = None) -> Iterator[UserError]:
    """Yield the errors for a ``batch.memory_target`` without a GPU, or with explicit tokens per micro-batch.

    ``target_tokens`` is the number of tokens per micro-batch that was computed from the target, or None
    before that. An explicit number is valid if it equals ``target_tokens``: the resolved configuration of a
    run contains both.
    """
    batch = config.batch
    if batch.memory_target is None:
        return

    # The target is a share of a GPU's memory, which must be known.
    config_with_gpu, _ = with_gpu_memory(config)
    if config_with_gpu.gpu_memory_gib is None:
        got = "neither" if config.gpu is None else f"gpu={config.gpu}, whose memory is unknown"
        yield UserError(
            "`batch.memory_target` is a share of a GPU's memory, and no known GPU is named",
            where="batch.memory_target",
            expected="gpu or gpu_memory_gib in the configuration",
            got=got,
            fix="add gpu=h100 or gpu_memory_gib=80, or run `check` with --on h100",
        )

    # An explicit number of tokens would contradict the number that is computed from the target.
    if target_tokens is not None and batch.tokens_per_microbatch not in (None, target_tokens):
        yield UserError(
            "`batch.tokens_per_microbatch` and `batch.memory_target` are both set",
            where="batch.tokens_per_microbatch",
            expected=f"one of them; memory_target={batch.memory_target:g} sets {target_tokens} tokens "
            "at first",
            got=str(batch.tokens_per_microbatch),
            fix="remove batch.tokens_per_microbatch, or batch.memory_target",
        )


def with_gpu_memory(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Fill in ``gpu_memory_gib`` from the named ``gpu``.

    Returns the configuration, and a mapping from the filled-in key to the reason, empty if nothing changed.
    """
    # An explicit `gpu_memory_gib` overrides the memory of the named GPU.
    if config.gpu is None or config.gpu_memory_gib is not None:
        return config, {}
    try:
        gpu = load_constants().gpu(config.gpu)
    except UserError:
        return config, {}  # an unknown GPU is a warning of `check_warnings`
    gpu_memory_gib = round(gpu.memory / _GIB, 1)
    reasons = {"gpu_memory_gib": f"the memory of gpu={config.gpu}"}
    return replace(config, gpu_memory_gib=gpu_memory_gib), reasons


def check_memory(
    config: RunConfig, ranks: Sequence[RankMemory], key: str
) -> tuple[list[UserError], list[UserError]]:
    """Return errors and warnings for phases in which a rank needs more memory than its GPU has.

    An estimate above the limit by more than `MEMORY_TOLERANCE` is an error, else a warning. ``key`` is the
    setting that determines the memory of a GPU.
    """
    errors: list[UserError] = []
    warnings: list[UserError] = []
    gpu_gib = config.gpu_memory_gib
    if gpu_gib is None or not ranks:
        return errors, warnings

    # Each phase has its own peak, since different tensors are resident.
    tolerated_gib = gpu_gib * (1 + MEMORY_TOLERANCE)
    for phase in PHASES:
        fullest_rank = max(ranks, key=lambda memory: memory.phase_peak(phase))
        estimated_gib = fullest_rank.phase_peak(phase) / _GIB
        if estimated_gib <= gpu_gib:
            continue

        # The three largest items show the user which setting to change.
        items = [item for item in fullest_rank.items if phase in item.phases]
        items.sort(key=lambda item: item.bytes, reverse=True)
        largest_items = ", ".join(f"{item.name} {item.bytes / _GIB:.1f}" for item in items[:3])
        finding = UserError(
            f"rank {fullest_rank.rank} is estimated to need more memory than a GPU has in the phase {phase}",
            where=key,
            expected=f"at most {gpu_gib:g} GiB; up to {tolerated_gib:.1f} may fit, since the estimate is "
            f"trusted within {MEMORY_TOLERANCE:.0%}",
            got=f"{estimated_gib:.1f} GiB of {gpu_gib:g} GiB; largest: {largest_items}",
            fix=_memory_fix(config),
        )

        if estimated_gib > tolerated_gib:
            errors.append(finding)
        else:
            warnings.append(finding)
    return errors, warnings


def check_checkpoint(
    config: RunConfig, layouts: Mapping[str, ParallelLayout], ranks: Sequence[RankMemory]
) -> Iterator[UserError]:
    """Yield the error for a checkpoint that needs more host memory than a node has."""
    memory = checkpoint_memory(config, layouts, ranks)
    layout = config.checkpoint.optimizer_layout
    host_gib = config.host_memory_gib
    if memory is None or layout is None or host_gib is None:
        return
    required_gib = memory.host_bytes(layout) / _GIB
    if required_gib <= host_gib:
        return

    # With the layout `ANY`, every rank gathers the complete optimizer states in host memory. With `SAME`,
    # each rank writes only its own shards. Suggest `SAME` only if it fits.
    sharded_gib = memory.host_bytes(SAME) / _GIB
    fix = "use more nodes"
    if layout == ANY and sharded_gib <= host_gib:
        fix = f"set checkpoint.optimizer_layout=same, which needs {sharded_gib:.1f} GiB"
    yield UserError(
        "a checkpoint is estimated to need more memory than the host of a node has",
        where="checkpoint.optimizer_layout",
        expected=f"at most host_memory_gib={host_gib:g}",
        got=f"{required_gib:.1f} GiB for the {memory.ranks} ranks of a node, with the layout {layout}",
        fix=fix,
    )


def _memory_fix(config: RunConfig) -> str:
    """Return the fix for a rank that needs too much memory: settings to change, in one sentence."""
    changes = ["raise tensor or pipeline", "use more GPUs"]
    if config.job == TRAIN:
        if config.actor.recompute != "full":
            changes.append("set actor.recompute=full")
        if not config.actor.offload:
            changes.append("set actor.offload=true")
        if not config.actor.optimizer.offload:
            changes.append("set actor.optimizer.offload=true")
    changes.append("lower batch.tokens_per_microbatch")
    return ", ".join(changes[:-1]) + f", or {changes[-1]}"
