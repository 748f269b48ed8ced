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
from megatron_rl.config.roles import CRITIC, role_of, with_role_sections
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
    config: RunConfig, models: Mapping[str, Path], batch: BatchPlan, rank: int, world_size: int
) -> SimulatedRank:
    """Build a rank of the job in this process and take it through a step's phases on full micro-batches.

    ``config`` is resolved, ``models`` are the files of the roles' sizes. No weights are read, and the rollout
    engine is left out. A process can do this once.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    device.simulate()
    device.initialize()
    config = _with_models(config, models)
    algorithm, simulation = algorithm_of(config), Simulation()
    with simulation.measured():
        with simulation.phase("build"):
            actor = build_actor(config, updates=config.steps)
            scorers = build_scorers(config, algorithm, actor)
            reward = [build_reward_model(config, name).role for name in config.reward.models]

        roles = [actor, *scorers.values(), *reward]
        critic = scorers.get(CRITIC.name)
        for role in roles:
            if role.model is not None:
                simulation.name_groups(_kinds(role.model.groups))
        rows = _full_rows(config, batch, [role.layout for role in roles])
        learners = {role: partial(objective, algorithm) for role, objective in
                    ((actor, policy_objective), (critic, value_objective)) if role is not None}  # fmt: skip
        with simulation.phase("first step"):
            for role in learners:
                with role.resident():
                    role.step()
            for role in roles:
                role.residency.leave()
        resting = simulation.phases["first step"].end
        for role in roles:
            with role.resident(Use.READ), simulation.phase("score"):
                _exchange(simulation, role, rows)
                role.infer(rows)
        for role, objective in learners.items():
            with role.resident():
                with simulation.phase("learn"):
                    _exchange(simulation, role, rows)
                    role.accumulate(rows, objective)
                with simulation.phase("step"):
                    role.step()
    job, *made = memberships()
    groups = [("the job", len(job)), *((simulation.kind(ranks), len(ranks)) for ranks in made)]
    return SimulatedRank(rank, simulation.phases, resting, groups)


def _with_models(config: RunConfig, models: Mapping[str, Path]) -> RunConfig:
    """Return the configuration with every model at the folder whose sizes were read."""

    def folder(section: str) -> str:
        return str(models.get(role_of(section), models["actor"]).parent)

    def at_folder(name: str, section: Any) -> Any:
        return section if isinstance(section, ActorConfig) else replace(section, path=folder(name))

    return with_role_sections(replace(config, model=replace(config.model, path=folder("actor"))), at_folder)


def _full_rows(config: RunConfig, batch: BatchPlan, layouts: list[ParallelLayout]) -> TrainBatch:
    """Return rows that fill as many micro-batches as a pipeline has in flight, and one more."""
    budget = batch.tokens_per_microbatch
    per = -(-budget // batch.longest_row)
    length = budget // per
    count = (
        max(
            layout.data
            * min(
                batch.microbatches,
                2 * layout.pipeline if layout.virtual_pipeline > 1 else layout.pipeline + 1,
            )
            for layout in layouts
        )
        * per
    )
    prompt = length * config.data.max_prompt_tokens // batch.longest_row
    mask = (torch.arange(length) >= prompt).repeat(count)
    values, rows = torch.ones(1).expand(count * length), torch.ones(count, dtype=torch.long)
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
    )  # fmt: skip


def _exchange(simulation: Simulation, role: ModelRole, rows: TrainBatch) -> None:
    """Tell what neighbouring stages send to each other: equal micro-batches of the full budget."""
    if role.model is None:
        return
    config, layout = role.model.transformer_config, role.layout
    parts = layout.context * layout.token_shards
    length = int(rows.lengths[0]) * max(1, role.tokens_per_microbatch // int(rows.lengths[0]))
    tokens = -(-length // role.model.token_multiple) * role.model.token_multiple
    simulation.boundary = (tokens // parts, 1, config.hidden_size)


def _kinds(groups: ParallelGroups) -> dict[str, object]:
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
