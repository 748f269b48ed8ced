"""Simulate a step of training on one rank of a job, at its real size, without GPUs.

The trainer's code builds the roles and runs their phases on tensors without storage, in a process group whose
other ranks do not exist. `Simulation` counts bytes, kernels and messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithms import policy_objective, value_objective
from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.config.adapters import separate_lora
from megatron_rl.config.budget import SimulatedRank, SyncMessages
from megatron_rl.config.derive import BatchPlan
from megatron_rl.config.roles import ACTOR, CRITIC, role_of, with_role_sections
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ActorConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups, groups_of_this_rank
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.megatron.residency import ResidencyLevel
from megatron_rl.planning.reshard import find_config, plan_offline
from megatron_rl.planning.simulation.device import Simulation
from megatron_rl.progress import progress_count
from megatron_rl.roles.build import build_actor, build_forward_roles, build_reward_model
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import Lora
from megatron_rl.types import TrainBatch
from megatron_rl.weights.plan import schedule_phases

_SUPPORT_TOKENS = 16
"""Assumed number of tokens that the filters of sampling keep at each position."""


def simulate_step(
    config: RunConfig,
    config_files: Mapping[str, Path],
    batch: BatchPlan,
    rank: int,
    world_size: int,
) -> SimulatedRank:
    """Build a rank of the job in this process, and run the phases of a step on full micro-batches.

    ``config`` is resolved, ``config_files`` are the config.json files of the roles. Weights are not read, and
    the rollout engine is omitted. A process can call this function only once.
    """
    # Initialise this process as a rank of the complete job, although no other process exists.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
    )
    device.become_simulated_rank()
    device.initialize()
    config = _with_model_folders(config, config_files)
    algorithm = algorithm_of(config)
    simulation = Simulation()

    with simulation.measure():
        with simulation.phase("build"):
            actor = build_actor(config, updates=config.steps)
            forward_roles = build_forward_roles(config, algorithm, actor)
            reward_models = [build_reward_model(config, name).role for name in config.reward.models]

        # Name the process groups, which now exist: traffic is counted by the name of the group.
        roles = [actor, *forward_roles.values(), *reward_models]
        for role in roles:
            if role.model is not None:
                simulation.name_groups(_groups_by_name(role.model.groups))

        objectives: dict[ModelRole, Any] = {actor: partial(policy_objective, algorithm)}
        actor.squared_probs = algorithm.needs_squared_probs
        critic = forward_roles.get(CRITIC.name)
        if critic is not None:
            objectives[critic] = partial(value_objective, algorithm)
        rows = _make_full_rows(config, batch, [role.layout for role in roles])
        train_rows = _with_teacher_columns(rows, algorithm.distillation.top_tokens)

        # The first optimizer step allocates the optimizer states; then offload every role.
        with simulation.phase("first step"):
            for role in objectives:
                with role.resident():
                    role.step()
            for role in roles:
                role.residency.offload_all()
        resting_bytes = simulation.phases["first step"].end

        _run_phases(simulation, roles, objectives, rows, train_rows)

    # The first group is the world.
    world_ranks, *groups = groups_of_this_rank()
    group_sizes = [("the job", len(world_ranks))]
    group_sizes += [(simulation.group_name(ranks), len(ranks)) for ranks in groups]
    sync = None
    if config.rollout.capabilities.in_process:
        sync = _sync_messages(config, config_files[ACTOR.name], actor.layout, rank)
    return SimulatedRank(rank, simulation.phases, resting_bytes, group_sizes, sync)


def _run_phases(
    simulation: Simulation,
    roles: Sequence[ModelRole],
    objectives: Mapping[ModelRole, Any],
    rows: TrainBatch,
    train_rows: TrainBatch,
) -> None:
    """Run the forward pass of every role, then a training step of each role with an objective.

    ``train_rows`` are ``rows`` with additional columns that only a training step reads.
    """
    for role in roles:
        with role.resident(ResidencyLevel.READ_WEIGHTS), simulation.phase("score"):
            _set_boundary_shape(simulation, role, rows)
            with _count_microbatches(simulation, "score", role):
                role.infer(rows)

    for role, objective in objectives.items():
        with role.resident():
            with simulation.phase("learn"):
                _set_boundary_shape(simulation, role, train_rows)
                with _count_microbatches(simulation, "learn", role):
                    role.accumulate(train_rows, objective)
            with simulation.phase("step"):
                role.step()


def _sync_messages(
    config: RunConfig,
    model: Path,
    layout: ParallelLayout,
    rank: int,
) -> SyncMessages:
    """Count a rank's peers and messages in a weight sync from an actor with this layout."""
    hf_config = find_config(str(model))
    rollout_ranks = config.rollout.ranks
    assert rollout_ranks is not None

    # Adapters that are synchronised separately are sent without the base weights.
    adapters = None
    lora = separate_lora(config)
    if lora is not None:
        adapters = Lora.for_model(describe_model(hf_config).shape, lora.rank, lora.targets)

    plan = plan_offline(
        hf_config,
        layout,
        rollout_ranks,
        config.rollout.tensor,
        getattr(torch, config.model.dtype),
        ranks_per_node=config.gpus_per_node,
        whole_experts=bool(config.rollout.vllm.get("enable_expert_parallel")),
        lora=adapters,
        settings=config.actor.megatron,
    )

    num_sent = 0
    num_received = 0
    schedule = schedule_phases(plan, config.hybrid_engine.staging_bytes)
    for (sender, receiver), count in schedule.message_counts.items():
        if sender == rank:
            num_sent += count
        if receiver == rank:
            num_received += count
    return SyncMessages(
        peers=plan.peer_counts.get(rank, 0),
        sent=num_sent,
        received=num_received,
    )


def _with_model_folders(config: RunConfig, config_files: Mapping[str, Path]) -> RunConfig:
    """Return the configuration with every role's model path set to the folder of its config.json."""

    def folder(section_path: str) -> str:
        """Return the folder of a role's config.json; it defaults to the actor's."""
        config_file = config_files.get(role_of(section_path), config_files[ACTOR.name])
        return str(config_file.parent)

    def with_folder(section_path: str, section: Any) -> Any:
        """Return a role's section with the folder of its config.json as path."""
        # The actor's path is model.path, which is set below.
        if isinstance(section, ActorConfig):
            return section
        return replace(section, path=folder(section_path))

    model = replace(config.model, path=folder(ACTOR.section))
    return with_role_sections(replace(config, model=model), with_folder)


def _with_teacher_columns(rows: TrainBatch, top_tokens: int) -> TrainBatch:
    """Add placeholders for a teacher's most likely tokens, ``top_tokens`` per position, to rows.

    The simulation needs only their shapes. With 0 tokens the rows are returned unchanged.
    """
    if not top_tokens:
        return rows
    num_tokens = len(rows.tokens)
    ids = torch.arange(top_tokens, dtype=torch.int32)
    return replace(
        rows,
        teacher_top_ids=ids.expand(num_tokens, top_tokens),
        teacher_top_log_probs=torch.ones(1, 1).expand(num_tokens, top_tokens + 1),
    )


def _make_full_rows(
    config: RunConfig,
    batch: BatchPlan,
    layouts: list[ParallelLayout],
) -> TrainBatch:
    """Create the rows of enough full micro-batches to fill every role's pipeline.

    There are at most as many micro-batches as in a step.
    """
    # Fill a micro-batch with as few rows as possible, all of the same length.
    token_limit = batch.tokens_per_microbatch
    rows_per_microbatch = -(-token_limit // batch.longest_row)
    length = token_limit // rows_per_microbatch

    microbatches = 0
    for layout in layouts:
        # An interleaved schedule has up to two micro-batches per stage in flight.
        in_flight = layout.pipeline + 1
        if layout.virtual_pipeline > 1:
            in_flight = 2 * layout.pipeline
        layout_microbatches = layout.data * min(batch.microbatches, in_flight)
        microbatches = max(microbatches, layout_microbatches)
    num_rows = microbatches * rows_per_microbatch
    num_tokens = num_rows * length

    # The ratio of prompt to response length is the ratio of their limits.
    prompt_length = length * config.data.max_prompt_tokens // batch.longest_row
    row_mask = torch.arange(length) >= prompt_length

    # Expand a single stored value: the rows of a large job may not fit in this machine's memory.
    token_ones = torch.ones(1).expand(num_tokens)
    tokens = torch.ones(1, dtype=torch.long).expand(num_tokens)
    row_ones = torch.ones(num_rows, dtype=torch.long)

    # If sampling truncates distributions, every position also has the ids of the remaining tokens.
    support_sizes = None
    support = None
    if config.rollout.truncates:
        ids = torch.ones(1, dtype=torch.int32)
        support_sizes = (ids * _SUPPORT_TOKENS).expand(num_tokens)
        support = ids.expand(num_tokens * _SUPPORT_TOKENS)

    return TrainBatch(
        tokens=tokens,
        lengths=row_ones * length,
        response_mask=row_mask.repeat(num_rows),
        loss_weights=token_ones,
        temperature=torch.ones(num_rows),
        advantages=token_ones,
        returns=token_ones,
        old_log_probs=token_ones,
        rollout_log_probs=token_ones,
        ref_log_probs=token_ones,
        old_values=token_ones,
        value_weights=token_ones,
        group=row_ones,
        response_counts=row_ones,
        support_sizes=support_sizes,
        support=support,
        position=torch.arange(num_rows),
    )


@contextmanager
def _count_microbatches(simulation: Simulation, phase: str, role: ModelRole) -> Iterator[None]:
    """Count the micro-batches that a role runs inside this context, and add them to the phase ``phase``."""
    first_count = progress_count("micro-batches")
    yield
    if role.model is not None:
        # Every micro-batch counts once per virtual stage.
        num_passes = progress_count("micro-batches") - first_count
        simulation.phases[phase].microbatches += num_passes // len(role.model.wrapped)


def _set_boundary_shape(simulation: Simulation, role: ModelRole, rows: TrainBatch) -> None:
    """Set the shape of the activations that pipeline stages exchange.

    All rows have the same length, so all micro-batches have the same number of tokens.
    """
    if role.model is None:
        return

    # The tokens of a micro-batch are padded for the kernels and sharded over ranks.
    row_length = int(rows.lengths[0])
    num_rows = max(1, role.tokens_per_microbatch // row_length)
    num_tokens = row_length * num_rows
    padding = -num_tokens % role.model.token_multiple

    # Activations are [tokens, 1, hidden]: the rows of a micro-batch are packed into one.
    num_shards = role.layout.context * role.layout.token_shards
    shard_tokens = (num_tokens + padding) // num_shards
    simulation.boundary_shape = (shard_tokens, 1, role.model.transformer_config.hidden_size)


def _groups_by_name(groups: ParallelGroups) -> dict[str, object]:
    """Return the process groups of a role, by the names under which their traffic is counted."""
    return {
        "tensor": groups.tensor,
        "context": groups.context,
        "expert": groups.expert,
        "pipeline": groups.pipeline,
        "data": groups.data_context,
        "expert data": groups.expert_data,
        "embedding": groups.embedding,
        "model": groups.model,
        "all ranks": groups.all,
    }
