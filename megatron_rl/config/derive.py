"""Derived values of a configuration for a number of processes, and the arithmetic of its batches.

Every unset key is filled in here, once, with a reason that ``check`` prints next to the value. Later code
reads a resolved configuration and never derives a value again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.config.adapters import with_adapters
from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.config.placement import (
    HALF_PRESETS,
    layout_sections,
    role_layout,
    with_best_rank_order,
    with_ranks,
)
from megatron_rl.config.roles import MODEL_ROLES, NUMBER, TEACHER, spec_at, with_role_sections
from megatron_rl.config.schema import TRAIN, CheckpointConfig, RunConfig
from megatron_rl.config.sections.models import LayoutConfig
from megatron_rl.config.sections.response_limits import largest_limit
from megatron_rl.config.sections.rewards import RewardModelConfig
from megatron_rl.config.sections.rollout import AsynchronyConfig, MismatchConfig, RolloutConfig
from megatron_rl.config.sections.stages import PreferenceConfig
from megatron_rl.config.setting import with_value
from megatron_rl.config.stage_plan import stage_plans, starting_model
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape

# Micro-batches per pipeline stage that a derived token budget aims for. The idle fraction of a pipeline is
# (stages - 1) / (micro-batches + stages - 1), which is below 20 % at this number.
MICROBATCHES_PER_STAGE = 4

# Number of rounds into which a derived `rollout.round_tokens` divides the longest response.
ROUNDS_PER_RESPONSE = 8

# Default number of steps over which an unfinished response can be carried over.
CARRIED_STEPS = 2

# Largest derived token budget of a micro-batch, unless one row is longer.
MICROBATCH_TOKENS = 16384

# Smallest number of model parameters for which a job on several nodes saves its optimizer in shards.
_SHARDED_PARAMETERS = 1_000_000_000

# Environment variable with the seconds between torchrun's SIGTERM and SIGKILL to the ranks.
_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

MISMATCH: Mapping[str, tuple[float, float, str]] = {
    "float32": (1e-4, 1e-2, "kernels of trainer and engine round differently: by 8e-6 on a 135M model"),
    "bfloat16": (
        0.1,
        0.5,
        "bfloat16 has 8 bits of mantissa: on a 135M model trainer and engine differ by 0.02 to 0.04",
    ),
}
"""dtype -> (default of ``mismatch.warn``, default of ``mismatch.stop``, reason). The thresholds are mean
absolute log-prob differences per response token, in nats."""


@dataclass(frozen=True)
class BatchPlan:
    """Arithmetic of one step, from prompts to micro-batches.

    Numbers that may not divide evenly are pairs (smallest, largest). ``longest_row`` and the token counts are
    upper bounds, for prompts and responses of the largest length.

    Example: 64 prompts with 8 samples in 2 optimizer steps on 4 data-parallel ranks have ``rows=512``,
    ``rows_per_minibatch=(256, 256)``, ``rows_per_actor_rank=(64, 64)``.
    """

    prompts: int
    """Prompts that the step selects."""
    samples: int
    """Samples of each prompt."""
    rows: int
    """Rows that the step trains on: prompts x samples."""
    prompts_in_flight: int
    """Prompts in flight on all replicas, including over-sampled ones."""
    optimizer_steps: int
    """Mini-batches of the step."""
    epochs: int
    """Passes over the step's rows."""
    prompts_per_minibatch: tuple[int, int]
    """Prompts of a mini-batch."""
    rows_per_minibatch: tuple[int, int]
    """Rows of a mini-batch."""
    actor_data: int
    """Data-parallel size of the actor."""
    rows_per_actor_rank: tuple[int, int]
    """Rows of a mini-batch on one data-parallel rank."""
    replicas: int
    """Replicas of the rollout engine."""
    rows_per_replica: tuple[int, int]
    """Rows in flight that one replica samples."""
    longest_row: int
    """Tokens of the longest row."""
    tokens_per_step: int
    """Tokens of all rows, each with the length of the longest row."""
    tokens_per_microbatch: int
    """Token budget of a micro-batch."""
    rows_per_microbatch: int
    """Longest rows that fit into a micro-batch."""
    microbatches: int
    """Micro-batches of a mini-batch on one data-parallel rank."""

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps in one training step."""
        return self.optimizer_steps * self.epochs


@dataclass(frozen=True)
class ResolvedConfig:
    """Configuration with its derived values.

    Example: ``reasons["actor.layout.sequence_parallel"] == "on: tensor is 2"``.
    """

    config: RunConfig
    """Configuration in which every derived value is filled in."""
    reasons: Mapping[str, str]
    """Path of each derived value -> the reason."""


def even_shares(total: int, count: int) -> tuple[int, int]:
    """Divide ``total`` as evenly as possible into ``count`` integers; return the smallest and the largest.

    Example:
        >>> even_shares(10, 4)
        (2, 3)
    """
    return total // count, -(-total // count)


def smallest_world(config: RunConfig) -> int:
    """Return the smallest number of processes on which the parallel sizes of all roles fit.

    The number is divisible by the sizes of each layout, and large enough for every explicit rank.
    """
    divisors = []
    # Ranks count from 0, so an explicit rank r needs r + 1 processes.
    world_sizes = [0]
    for layout in layout_sections(config).values():
        if layout is None:
            continue
        if layout.ranks is not None:
            world_sizes.extend(rank + 1 for rank in layout.ranks)
            continue
        # Dense layers and experts have different parallel sizes on the same ranks.
        divisors.append(layout.tensor * layout.pipeline * layout.context)
        divisors.append(layout.expert * (layout.expert_tensor or 1) * layout.pipeline)

    if config.rollout.ranks is None:
        divisors.append(config.rollout.tensor)
    else:
        world_sizes.extend(rank + 1 for rank in config.rollout.ranks)

    min_world_size = max(world_sizes)
    if not divisors:
        return max(1, min_world_size)

    # Replace a size of 0 by 1: another rule reports the 0.
    common_divisor = math.lcm(*(max(1, size) for size in divisors))
    # These presets split the ranks into two halves, and a role has the ranks of one half.
    if config.placement in HALF_PRESETS:
        common_divisor *= 2
    # Round up to the next multiple.
    return common_divisor * max(1, -(-min_world_size // common_divisor))


def longest_response(config: RunConfig) -> int:
    """Return the largest number of tokens of a response, over all sampling profiles."""
    rollout = config.rollout
    limits = [rollout.response_limit]
    for value in rollout.limit_settings.values():
        # The values of sampling profiles may not have been validated yet.
        if isinstance(value, int | str | dict) and not isinstance(value, bool):
            limits.append(largest_limit(value, rollout.auto_limit))
    return max(limits)


def longest_row(config: RunConfig) -> int:
    """Return the largest number of tokens of a prompt with its response, over all sampling profiles."""
    return config.data.max_prompt_tokens + longest_response(config)


def longest_trained_row(config: RunConfig) -> int:
    """Return the largest number of tokens of a row that the job trains on, in any of its stages."""
    limits = [plan.settings.max_row_tokens or longest_row(config) for plan in stage_plans(config)]
    if config.job == TRAIN or not limits:
        limits.append(longest_row(config))
    return max(limits)


@dataclass(frozen=True)
class MicroBatchBounds:
    """Bounds of the tokens per micro-batch from row lengths and pipeline stages, without regard to memory.

    Example: 32 rows of up to 1,024 tokens on each rank, without a pipeline, have bounds of 1,024 and 32,768.
    """

    row_tokens: int
    """Tokens of the longest row: no micro-batch can be smaller."""
    even_tokens: int
    """Tokens per micro-batch if a rank's tokens of a mini-batch are divided evenly into ``microbatches``. May
    be below ``row_tokens``."""
    microbatches: int
    """Number of micro-batches of a mini-batch on one data-parallel rank."""


def microbatch_bounds(config: RunConfig, layout: ParallelLayout) -> MicroBatchBounds:
    """Return the bounds of the number of tokens in a micro-batch, for a role that trains on ``layout``."""
    row_tokens = longest_trained_row(config)
    batch = config.batch
    num_rows = batch.prompts_per_step * batch.samples_per_prompt
    _, rows_per_minibatch = even_shares(num_rows, batch.optimizer_steps)
    if config.job != TRAIN:
        stage_rows = [
            plan.settings.records_per_step * len(plan.settings.RESPONSES) for plan in stage_plans(config)
        ]
        rows_per_minibatch = max(stage_rows, default=rows_per_minibatch)

    # Only a pipeline needs several micro-batches. Without a pipeline, fewer and larger ones are faster.
    stages = layout.pipeline
    microbatches = MICROBATCHES_PER_STAGE * stages if stages > 1 else 1
    # The bounds apply to all steps, so compute them for a step in which every row has the largest length.
    _, rows_per_rank = even_shares(rows_per_minibatch, layout.data)
    even_tokens = -(-rows_per_rank * row_tokens // microbatches)
    return MicroBatchBounds(row_tokens, even_tokens, microbatches)


def token_budget(config: RunConfig, layout: ParallelLayout) -> tuple[int, str]:
    """Return the derived tokens per micro-batch for a role that trains on ``layout``, and the reason."""
    bounds = microbatch_bounds(config, layout)
    row_tokens = bounds.row_tokens
    budget = max(row_tokens, min(bounds.even_tokens, MICROBATCH_TOKENS))

    if budget == row_tokens:
        return budget, f"the longest row has {row_tokens} tokens"
    if budget == bounds.even_tokens and layout.pipeline > 1:
        return budget, f"{bounds.microbatches} micro-batches keep {layout.pipeline} pipeline stages busy"
    if budget == bounds.even_tokens:
        return budget, "a mini-batch fits in one micro-batch"
    return budget, f"at most {MICROBATCH_TOKENS} tokens, and never less than the longest row"


def batch_plan(config: RunConfig, layouts: Mapping[str, ParallelLayout]) -> BatchPlan:
    """Compute the `BatchPlan` of a valid configuration; ``layouts`` maps roles to their layouts."""
    batch = config.batch
    actor = layouts["actor"]
    rollout = layouts["rollout"]
    samples = batch.samples_per_prompt
    in_flight = config.rollout.prompts_in_flight(batch.prompts_per_step)

    # Divide prompts, not rows, into mini-batches: the samples of a prompt stay in one mini-batch.
    fewest_prompts, most_prompts = even_shares(batch.prompts_per_step, batch.optimizer_steps)
    fewest_rows = fewest_prompts * samples
    most_rows = most_prompts * samples
    fewest_rows_per_rank = fewest_rows // actor.data
    most_rows_per_rank = -(-most_rows // actor.data)

    row_tokens = longest_row(config)
    budget = batch.tokens_per_microbatch or token_budget(config, actor)[0]
    rows_per_microbatch = max(1, budget // row_tokens)
    return BatchPlan(
        prompts=batch.prompts_per_step,
        samples=samples,
        rows=batch.prompts_per_step * samples,
        prompts_in_flight=in_flight,
        optimizer_steps=batch.optimizer_steps,
        epochs=batch.epochs,
        prompts_per_minibatch=(fewest_prompts, most_prompts),
        rows_per_minibatch=(fewest_rows, most_rows),
        actor_data=actor.data,
        rows_per_actor_rank=(fewest_rows_per_rank, most_rows_per_rank),
        replicas=rollout.data,
        rows_per_replica=even_shares(in_flight * samples, rollout.data),
        longest_row=row_tokens,
        tokens_per_step=batch.prompts_per_step * samples * row_tokens,
        tokens_per_microbatch=budget,
        rows_per_microbatch=rows_per_microbatch,
        microbatches=-(-most_rows_per_rank // rows_per_microbatch),
    )


def with_needed_roles(config: RunConfig, algorithm: Any, reasons: dict[str, str]) -> RunConfig:
    """Add a default section for each role that ``algorithm`` needs and ``config`` does not have.

    The reason for each section is added to ``reasons``.
    """
    for spec in MODEL_ROLES:
        if spec.need is None or spec.named or not spec.is_needed_by(algorithm) or spec.sections(config):
            continue
        # No default teacher: teachers of single tasks may cover all tasks, or a server runs the teacher.
        if spec is TEACHER and (config.teachers or config.teacher_server is not None):
            continue

        reasons[f"{spec.section}.path"] = spec.need.reason.format(name=config.algorithm.name)
        config = with_value(config, spec.section, spec.section_class())
    return config


def resolve(
    config: RunConfig, world_size: int, algorithm: Any = None, shape: ModelShape | None = None
) -> ResolvedConfig:
    """Fill in every unset value of a configuration, and record the reason for each derived value.

    ``algorithm`` is the run's algorithm, which may need a reference or a critic; None if it is not available.
    ``shape`` is the shape of the actor's model, which determines the best order of the rollout's ranks; None
    if it is not available.
    """
    reasons: dict[str, str] = {}
    if config.world_size is None:
        reasons["world_size"] = "number of processes of this job"

    # The order matters. Roles come first, since every later step loops over the roles. Ranks and models come
    # before adapters, which depend on which roles share the actor's model and ranks.
    config = with_needed_roles(config, algorithm, reasons)
    config = _with_placement(config, world_size, shape, reasons)
    config = _with_starting_models(config, reasons)
    config = _with_training_settings(config, reasons)
    config = _with_repeatable_passes(config, reasons)
    config = with_adapters(config, shape, reasons)

    # The default of attention depends on this machine: a plan for another machine has to set it.
    model = config.model
    if model.attention is None:
        attention, reasons["model.attention"] = default_attention()
        model = replace(model, attention=attention)

    batch = config.batch
    if batch.tokens_per_microbatch is None:
        layout = role_layout(config.actor.layout, "actor.layout")
        budget, reasons["batch.tokens_per_microbatch"] = token_budget(config, layout)
        batch = replace(batch, tokens_per_microbatch=budget)

    resolved = replace(
        config,
        world_size=world_size,
        model=model,
        sft=_fill_stage(config.sft, "sft", config, reasons),
        preference=_fill_preference(_fill_stage(config.preference, "preference", config, reasons), reasons),
        batch=batch,
        checkpoint=_fill_checkpoint(config, world_size, shape, reasons),
        mismatch=_fill_mismatch(config.mismatch, model.dtype, reasons),
        rollout=_fill_rollout(config.rollout, reasons),
        asynchrony=_fill_asynchrony(config, reasons),
    )
    return ResolvedConfig(resolved, reasons)


def _with_starting_models(config: RunConfig, reasons: dict[str, str]) -> RunConfig:
    """Set the path of roles without an explicit model to the model that reinforcement learning starts from.

    That model is the result of the actor's last stage, so the reference equals the policy at the first step.
    """
    model = starting_model(config)
    source = "model.path"
    if config.preference is not None:
        source = "model.path after the training on preferences (preference)"
    elif config.sft is not None:
        source = "model.path after the supervised warm-up (sft)"

    def fill_path(path: str, section: Any) -> Any:
        """Return the role's section at ``path`` with a model path; record the reason if it was unset."""
        if path == "actor" or section.path is not None:
            return section

        reason = f"the starting model: {source}"
        if spec_at(path).head == NUMBER:
            reason += ", with a new head"
        # Roles that were added because the algorithm needs them already have a reason.
        key = f"{path}.path"
        if key in reasons:
            reason = f"{reasons[key]}; {reason}"
        reasons[key] = reason
        return replace(section, path=model)

    return with_role_sections(config, fill_path)


def _with_placement(
    config: RunConfig, world_size: int, shape: ModelShape | None, reasons: dict[str, str]
) -> RunConfig:
    """Set every role's ranks and fill in its layout."""
    if config.placement in HALF_PRESETS:
        ranks_reason = f"placement {config.placement}"
    elif world_size > 1:
        ranks_reason = f"every rank of the job (0-{world_size - 1})"
    else:
        ranks_reason = "the only rank of the job"

    explicit_layouts = layout_sections(config)
    has_derived_rollout = config.rollout.ranks is None
    config = with_ranks(config, world_size)
    if has_derived_rollout:
        reasons["rollout.ranks"] = ranks_reason
    if has_derived_rollout and shape is not None and config.job == TRAIN:
        config, order_reason = with_best_rank_order(config, shape)
        reasons["rollout.ranks"] += f", in {order_reason}"
    actor_ranks = config.actor.layout.ranks

    def fill_layout(section_path: str, section: Any) -> Any:
        """Return a role's section with a complete layout, and record the reason for each derived value."""
        path = f"{section_path}.layout"
        layout = section.layout
        explicit_layout = explicit_layouts[path]
        if explicit_layout is None:
            reasons[path] = f"the actor's sizes; {ranks_reason}"
            if layout.ranks == actor_ranks:
                reasons[path] = "the actor's"
            explicit_layout = layout
        elif explicit_layout.ranks is None:
            reasons[f"{path}.ranks"] = ranks_reason
        return replace(section, layout=_fill_layout(explicit_layout, layout, path, reasons))

    return with_role_sections(config, fill_layout)


def _fill_layout(
    explicit_layout: LayoutConfig, layout: LayoutConfig, path: str, reasons: dict[str, str]
) -> LayoutConfig:
    """Return ``layout`` with ``expert_tensor`` and ``sequence_parallel``; its ranks are already set.

    ``explicit_layout`` is the layout as the user configured it. If the user did not set ``expert_tensor`` or
    ``sequence_parallel``, the reason for its derived value is added to ``reasons``.
    """
    parallel_layout = role_layout(layout, path)
    # If the user set no layout at all, ``reasons[path]`` already explains the complete layout.
    if path not in reasons and explicit_layout.expert_tensor is None:
        reasons[f"{path}.expert_tensor"] = "by default each expert is on one rank"
    if path not in reasons and explicit_layout.sequence_parallel is None:
        on_or_off = "on" if layout.tensor > 1 else "off"
        reasons[f"{path}.sequence_parallel"] = f"{on_or_off}: tensor is {layout.tensor}"
    return replace(
        layout,
        expert_tensor=parallel_layout.expert_tensor,
        sequence_parallel=parallel_layout.sequence_parallel,
    )


def _with_training_settings(config: RunConfig, reasons: dict[str, str]) -> RunConfig:
    """Fill in the optimizer settings of trained roles and the stages that train reward models."""

    def fill_training(path: str, section: Any) -> Any:
        """Return a role's section with complete settings of its optimizer or its training stage."""
        if isinstance(section, RewardModelConfig):
            training = _fill_stage(section.training, f"{path}.training", config, reasons)
            return replace(section, training=training)
        if not spec_at(path).trains:
            return section
        return replace(section, optimizer=_fill_optimizer(section.optimizer, f"{path}.optimizer", reasons))

    return with_role_sections(config, fill_training)


def _with_repeatable_passes(config: RunConfig, reasons: dict[str, str]) -> RunConfig:
    """Disable ``overlap_grad_reduce`` for each role whose passes can then be repeated.

    A pass runs the micro-batches of a phase through a model. With a memory target, micro-batches are as
    large as possible. If a pass runs out of memory, it is repeated with smaller micro-batches. Without a
    memory target, the configuration is returned unchanged.
    """
    if config.batch.memory_target is None:
        return config

    def fill_ddp(path: str, section: Any) -> Any:
        """Disable ``overlap_grad_reduce`` in a role's section if the role's passes can then be repeated."""
        if not spec_at(path).trains or isinstance(section, RewardModelConfig) or section.layout is None:
            return section

        # A rank repeats a pass on its own, which is possible only if the pass has no collectives. If the
        # model is on one rank, a pass has collectives only with `overlap_grad_reduce` or
        # `overlap_param_gather`. If the user sets neither, disabling `overlap_grad_reduce` disables both.
        layout = role_layout(section.layout, f"{path}.layout")
        model_ranks = layout.tensor * layout.pipeline * layout.context * layout.expert * layout.expert_tensor
        explicit_overlaps = {"overlap_grad_reduce", "overlap_param_gather"} & section.ddp.keys()
        if model_ranks > 1 or layout.data == 1 or explicit_overlaps:
            return section
        reasons[f"{path}.ddp"] = "with batch.memory_target: a pass that runs out of memory can be repeated"
        return replace(section, ddp={**section.ddp, "overlap_grad_reduce": False})

    return with_role_sections(config, fill_ddp)


def _fill_stage(settings: Any, path: str, config: RunConfig, reasons: dict[str, str]) -> Any:
    """Fill in the unset settings of the training stage at ``path`` from settings of the run.

    If the configuration has no such stage, ``settings`` and the result are None.
    """
    if settings is None:
        return None

    if settings.checkpoint_every is None:
        reasons[f"{path}.checkpoint_every"] = "checkpoint.every"
        settings = replace(settings, checkpoint_every=config.checkpoint.every)
    if settings.max_row_tokens is None:
        reasons[f"{path}.max_row_tokens"] = "data.max_prompt_tokens + rollout.max_response_tokens"
        settings = replace(settings, max_row_tokens=longest_row(config))
    return replace(settings, optimizer=_fill_optimizer(settings.optimizer, f"{path}.optimizer", reasons))


def _fill_optimizer(optimizer: Any, path: str, reasons: dict[str, str]) -> Any:
    """Fill in the default of ``minimum_learning_rate`` for the optimizer at ``path``."""
    if optimizer.minimum_learning_rate is not None:
        return optimizer
    reasons[f"{path}.minimum_learning_rate"] = "equal to learning_rate"
    return replace(optimizer, minimum_learning_rate=optimizer.learning_rate)


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed with its PyTorch extension, without importing it.

    The extension is a separate package, which ``pip install transformer_engine`` does not install.
    """
    package = find_spec("transformer_engine")
    if package is None:
        return False
    folders = [Path(location) for location in package.submodule_search_locations or ()]

    # Wheels install the extension into wheel_lib; builds from source install it next to the package.
    has_extension = False
    for folder in folders:
        for parent in (folder, folder / "wheel_lib", folder.parent):
            has_extension = has_extension or any(parent.glob("transformer_engine_torch*.so"))
    return has_extension and any((folder / "pytorch").is_dir() for folder in folders)


def default_attention() -> tuple[str, str]:
    """Return the default implementation of attention on this machine, and the reason."""
    if has_transformer_engine():
        return "transformer_engine", "Transformer Engine is installed"
    return "torch", "Transformer Engine is not installed"


def _fill_checkpoint(
    config: RunConfig, world_size: int, shape: ModelShape | None, reasons: dict[str, str]
) -> CheckpointConfig:
    """Fill in ``optimizer_layout`` and ``stop_seconds``.

    ``optimizer_layout`` selects the format in which checkpoints store the states of distributed optimizers:
    `ANY` gathers complete states from the data-parallel ranks, `SAME` stores the shard of each rank.
    ``stop_seconds`` is the time that a stopped job has to save a last checkpoint.
    """
    checkpoint = config.checkpoint
    if checkpoint.optimizer_layout is None:
        optimizer_format = ANY
        reason = "the job has one node"
        nodes = -(-world_size // config.gpus_per_node)
        if nodes > 1:
            reason = "the model is small enough to be gathered"
            # Save shards only of large models. With a small model, a rank may have no parameter in some
            # buffer of the optimizer, and Megatron cannot save the shards of such a buffer.
            if shape is not None and shape.parameters >= _SHARDED_PARAMETERS and config.actor.lora is None:
                optimizer_format = SAME
                reason = f"the job has {nodes} nodes, and the model is too large to gather in host memory"
        reasons["checkpoint.optimizer_layout"] = reason
        checkpoint = replace(checkpoint, optimizer_layout=optimizer_format)

    if checkpoint.stop_seconds is None:
        timeout = float(os.environ.get(_SHUTDOWN_TIMEOUT, "30"))
        reasons["checkpoint.stop_seconds"] = f"torchrun allows {timeout:g} s, of which 5 s are for the exit"
        checkpoint = replace(checkpoint, stop_seconds=max(0.0, timeout - 5))
    return checkpoint


def _fill_preference(preference: PreferenceConfig | None, reasons: dict[str, str]) -> PreferenceConfig | None:
    """Fill in the default beta of the preference loss, as published in the paper of the loss."""
    if preference is None or preference.beta is not None:
        return preference
    if preference.loss == "simpo":
        reasons["preference.beta"] = "SimPO's, arXiv:2405.14734"
        return replace(preference, beta=2.0)
    reasons["preference.beta"] = "DPO's, arXiv:2305.18290"
    return replace(preference, beta=0.1)


def default_mismatch_thresholds(dtype: str) -> tuple[float, float, str]:
    """Return the defaults of ``mismatch.warn`` and ``mismatch.stop`` for a dtype, and their reason."""
    return MISMATCH.get(dtype, MISMATCH["bfloat16"])


def _fill_mismatch(mismatch: MismatchConfig, dtype: str, reasons: dict[str, str]) -> MismatchConfig:
    """Fill in the thresholds ``warn`` and ``stop`` with the defaults for a dtype.

    If one threshold is explicit, the other is bounded so that ``warn`` never exceeds ``stop``.
    """
    warn, stop, reason = default_mismatch_thresholds(dtype)
    if mismatch.warn is None:
        # An explicit `stop` may be below the default of `warn`.
        if mismatch.stop is not None:
            warn = min(warn, mismatch.stop)
        reasons["mismatch.warn"] = reason
        mismatch = replace(mismatch, warn=warn)
    if mismatch.stop is None:
        assert mismatch.warn is not None
        reasons["mismatch.stop"] = reason
        mismatch = replace(mismatch, stop=max(stop, mismatch.warn))
    return mismatch


def _fill_rollout(rollout: RolloutConfig, reasons: dict[str, str]) -> RolloutConfig:
    """Fill in ``round_tokens``, the number of tokens per response in a round of sampling."""
    if rollout.round_tokens is not None:
        return rollout
    reasons["rollout.round_tokens"] = f"1/{ROUNDS_PER_RESPONSE} of rollout.max_response_tokens"
    return replace(rollout, round_tokens=max(1, rollout.response_limit // ROUNDS_PER_RESPONSE))


def versions_between_syncs(config: RunConfig) -> int:
    """Return the largest number of weight versions by which the rollout engine lags behind the actor."""
    interval = config.hybrid_engine.every
    all_earlier_versions = max(0, config.steps - 1)
    # With an interval of 0, the engine keeps the weights from the start of the run.
    if interval == 0:
        return all_earlier_versions
    return min(interval - 1, all_earlier_versions)


def _fill_asynchrony(config: RunConfig, reasons: dict[str, str]) -> AsynchronyConfig:
    """Fill in ``max_staleness``, the largest age of a trained token in policy updates."""
    asynchrony = config.asynchrony
    if asynchrony.max_staleness is not None:
        return asynchrony

    staleness = asynchrony.steps_ahead
    reason = "asynchrony.steps_ahead"
    if config.rollout.partial:
        staleness += CARRIED_STEPS
        reason += f", and {CARRIED_STEPS} for rollout.partial"
    if config.hybrid_engine.every != 1:
        staleness += versions_between_syncs(config)
        reason += ", and the versions between two syncs (hybrid_engine.every)"
    reasons["asynchrony.max_staleness"] = reason
    return replace(asynchrony, max_staleness=staleness)
