"""Simulate a step of training on one rank of a job, at its real size, without machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithms import policy_objective, value_objective
from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.config.budget import SimulatedRank
from megatron_rl.config.derive import BatchPlan
from megatron_rl.config.roles import ACTOR, CRITIC, role_of, with_role_sections
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import ActorConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups, memberships
from megatron_rl.megatron.residency import Use
from megatron_rl.planning.simulation.device import Simulation
from megatron_rl.roles.build import build_actor, build_reward_model, build_scorers
from megatron_rl.roles.model_role import ModelRole
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import TrainBatch


def simulate(
    config: RunConfig,
    models: Mapping[str, Path],
    batch: BatchPlan,
    rank: int,
    world_size: int,
) -> SimulatedRank:
    """Build a rank of the job in this process and run the phases of a step on full micro-batches.

    ``config`` is resolved, ``models`` are the config.json files of the roles. No weights are read, and the
    rollout engine is left out. A process can do this once.
    """
    # Initialise as a rank of the complete job, of which only this process exists.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    device.simulate()
    device.initialize()
    config = _with_model_folders(config, models)
    algorithm = algorithm_of(config)
    simulation = Simulation()

    with simulation.measured():
        with simulation.phase("build"):
            actor = build_actor(config, updates=config.steps)
            scorers = build_scorers(config, algorithm, actor)
            reward_models = [build_reward_model(config, name).role for name in config.reward.models]

        roles = [actor, *scorers.values(), *reward_models]
        for role in roles:
            if role.model is not None:
                simulation.name_groups(_group_kinds(role.model.groups))
        learners = {actor: partial(policy_objective, algorithm)}
        critic = scorers.get(CRITIC.name)
        if critic is not None:
            learners[critic] = partial(value_objective, algorithm)
        rows = _full_rows(config, batch, [role.layout for role in roles])

        # The first optimizer step allocates the optimizer states; after it every role is at rest.
        with simulation.phase("first step"):
            for role in learners:
                with role.resident():
                    role.step()
            for role in roles:
                role.residency.leave()
        resting = simulation.phases["first step"].end

        # Forward passes without gradients, then a training step of each learner.
        for role in roles:
            with role.resident(Use.READ), simulation.phase("score"):
                _set_boundary(simulation, role, rows)
                role.infer(rows)
        for role, objective in learners.items():
            with role.resident():
                with simulation.phase("learn"):
                    _set_boundary(simulation, role, rows)
                    role.accumulate(rows, objective)
                with simulation.phase("step"):
                    role.step()

    job, *groups = memberships()
    sizes = [("the job", len(job))]
    sizes += [(simulation.kind(ranks), len(ranks)) for ranks in groups]
    return SimulatedRank(rank, simulation.phases, resting, sizes)


def _with_model_folders(config: RunConfig, models: Mapping[str, Path]) -> RunConfig:
    """Return the configuration with every role's model at the folder of its config.json."""

    def folder(section_path: str) -> str:
        """Return the folder of the config.json of a section's role, by default of the actor's."""
        return str(models.get(role_of(section_path), models[ACTOR.name]).parent)

    def with_folder(section_path: str, section: Any) -> Any:
        # The actor's model is model.path.
        if isinstance(section, ActorConfig):
            return section
        return replace(section, path=folder(section_path))

    model = replace(config.model, path=folder(ACTOR.section))
    return with_role_sections(replace(config, model=model), with_folder)


def _full_rows(
    config: RunConfig,
    batch: BatchPlan,
    layouts: list[ParallelLayout],
) -> TrainBatch:
    """Return rows that fill as many micro-batches as a pipeline has in flight, and one more."""
    # The longest rows that fit into a micro-batch.
    budget = batch.tokens_per_microbatch
    rows_per_microbatch = -(-budget // batch.longest_row)
    length = budget // rows_per_microbatch

    microbatches = 0
    for layout in layouts:
        # An interleaved schedule has up to two per stage in flight.
        in_flight = layout.pipeline + 1
        if layout.virtual_pipeline > 1:
            in_flight = 2 * layout.pipeline
        microbatches = max(microbatches, layout.data * min(batch.microbatches, in_flight))
    count = microbatches * rows_per_microbatch

    prompt = length * config.data.max_prompt_tokens // batch.longest_row
    mask = (torch.arange(length) >= prompt).repeat(count)
    # Expand a single stored value: the rows of a large job may not fit in this machine's memory.
    values = torch.ones(1).expand(count * length)
    rows = torch.ones(count, dtype=torch.long)
    return TrainBatch(
        tokens=torch.ones(1, dtype=torch.long).expand(count * length),
        lengths=rows * length,
        response_mask=mask,
        loss_weights=values,
        temperature=torch.ones(count),
        advantages=values,
        returns=values,
        old_log_probs=values,
        rollout_log_probs=values,
        ref_log_probs=values,
        old_values=values,
        value_weights=values,
        group=rows,
        response_counts=rows,
        position=torch.arange(count),
    )


def _set_boundary(simulation: Simulation, role: ModelRole, rows: TrainBatch) -> None:
    """Set the shape of the activations that pipeline stages exchange, for equal and full micro-batches."""
    if role.model is None:
        return

    # The tokens of a micro-batch are padded for the kernels and sharded over ranks.
    layout = role.layout
    row_length = int(rows.lengths[0])
    length = row_length * max(1, role.tokens_per_microbatch // row_length)
    multiple = role.model.token_multiple
    tokens = -(-length // multiple) * multiple
    shards = layout.context * layout.token_shards
    simulation.boundary = (tokens // shards, 1, role.model.transformer_config.hidden_size)


def _group_kinds(groups: ParallelGroups) -> dict[str, object]:
    """Return the process groups of a role by the names under which they are counted."""
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
