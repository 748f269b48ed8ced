"""What is allowed but rarely meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.lookup import scoring_reason
from megatron_rl.algorithms.returns import Vapo
from megatron_rl.check.model.untried import untried_settings
from megatron_rl.check.stages import unused_settings
from megatron_rl.config.derive import BatchPlan
from megatron_rl.config.field_types import format_ranges
from megatron_rl.config.roles import MODEL_ROLES
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.setting import sections_of
from megatron_rl.config.stage_plan import stage_plans
from megatron_rl.errors import UserError
from megatron_rl.shapes.hardware import load_constants
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.memory import rollout_parameters
from megatron_rl.shapes.model import DTYPE_BYTES, ModelShape

_HIGH_RATE = 1e-3


@dataclass
class _Warnings:
    found: list[UserError] = field(default_factory=list)

    def add(self, message: str, where: str, got: str, fix: str, expected: str | None = None) -> None:
        self.found.append(UserError(message, where=where, expected=expected, got=got, fix=fix))


def check_warnings(
    config: RunConfig,
    world_size: int,
    layouts: Mapping[str, ParallelLayout],
    batch: BatchPlan | None,
    shape: ModelShape | None,
    algorithm: Algorithm | None,
    records: int | None,
) -> list[UserError]:
    """Return warnings for a configuration without errors; ``records`` is the number of training records.

    ``batch`` is None for a job without reinforcement learning.
    """
    warnings = _Warnings()
    if batch is not None:
        _sampling(config, algorithm, warnings)
        _batch(config, batch, records, warnings)
        _learning(config, warnings)
        _waits(config, warnings)
        if algorithm is not None and config.actor.routing_replay == "update":
            _replay(config, algorithm, warnings)
    _schedule(config, warnings)
    warnings.found.extend(unused_settings(config))
    _placement(config, world_size, layouts, shape, warnings)
    if algorithm is not None:
        _unneeded_roles(config, algorithm, warnings)
    warnings.found.extend(untried_settings(config))
    return warnings.found


def _unneeded_roles(config: RunConfig, algorithm: Algorithm, warnings: _Warnings) -> None:
    """Warn of each role that the configuration has and the algorithm does not need."""
    for spec in MODEL_ROLES:
        if spec.need is None or spec.needed(algorithm):
            continue

        for path in spec.sections(config):
            lacks = spec.need.lacks.format(advantage=type(algorithm.advantage).__name__)
            warnings.add(
                spec.need.unused,
                path,
                f"algorithm {config.algorithm.name} {lacks}",
                f"remove `{path}`, or {spec.need.choice}",
            )


def _sampling(config: RunConfig, algorithm: Algorithm | None, warnings: _Warnings) -> None:
    rollout = config.rollout
    alone = config.batch.samples_per_prompt == 1
    if alone and algorithm is not None and algorithm.advantage.compares_samples:
        warnings.add(
            f"{config.algorithm.name} compares samples of one prompt, and there is only one",
            "batch.samples_per_prompt",
            "1",
            "set it to 8 or more, or choose an algorithm without groups",
            "2 or more",
        )
    advantage, longest = algorithm and algorithm.advantage, rollout.max_response_tokens
    if isinstance(advantage, Vapo) and advantage.alpha * longest <= 1:
        warnings.add(
            "VAPO's lambda is 0 for every response: the policy learns from the critic's errors alone",
            "algorithm.advantage",
            f"alpha {advantage.alpha:g} with responses of at most {longest} tokens",
            f"set algorithm.advantage={{alpha: {20 / longest:.2g}}}",
            f"alpha above {1 / longest:.3g}: lambda is 1 - 1 / (alpha * response length)",
        )
    for name, described in config.evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        if described.samples > 1 and described.temperature == 0:
            warnings.add(
                "greedy evaluation gives the same answer every time",
                f"{where}.samples",
                f"{described.samples} samples at temperature 0",
                f"set {where}.samples=1, or a temperature above 0",
            )


def _batch(config: RunConfig, batch: BatchPlan, records: int | None, warnings: _Warnings) -> None:
    if batch.prompts_per_minibatch[0] != batch.prompts_per_minibatch[1]:
        low, high = batch.prompts_per_minibatch
        warnings.add(
            "optimizer steps get different numbers of prompts",
            "batch.optimizer_steps",
            f"{batch.prompts} prompts over {batch.optimizer_steps} optimizer steps: {low} or {high} each",
            "choose a divisor of prompts_per_step",
            f"a divisor of {batch.prompts}",
        )
    if batch.rows_per_minibatch[0] < batch.actor_data:
        warnings.add(
            "some data-parallel ranks have no row in a mini-batch and wait",
            "batch.prompts_per_step",
            f"{batch.rows_per_minibatch[0]} rows over {batch.actor_data} data-parallel copies",
            "raise prompts_per_step, lower optimizer_steps, or use more tensor or pipeline parallelism",
            f"{batch.actor_data} rows or more in a mini-batch",
        )
    if batch.rows < batch.replicas:
        warnings.add(
            "some rollout replicas have nothing to generate",
            "batch.prompts_per_step",
            f"{batch.rows} rows for {batch.replicas} replicas",
            "raise prompts_per_step or samples_per_prompt, or raise rollout.tensor",
        )
    if records is not None and records < config.batch.prompts_per_step:
        warnings.add(
            "a step takes more prompts than the training data has",
            "batch.prompts_per_step",
            f"{config.batch.prompts_per_step} prompts per step, {records} records",
            "lower prompts_per_step, or add data: prompts would repeat within a step",
        )


def _schedule(config: RunConfig, warnings: _Warnings) -> None:
    updates = config.steps * config.batch.optimizer_steps * config.batch.epochs
    lengths = {f"{plan.where}.optimizer": plan.settings.steps for plan in stage_plans(config)}
    for path, optimizer in sections_of(config, OptimizerConfig):
        length = lengths.get(path, updates)  # None: a stage that is stated in epochs
        if length is not None and optimizer.warmup_steps > length > 0:
            warnings.add(
                "the learning rate is still warming up when the run ends",
                f"{path}.warmup_steps",
                str(optimizer.warmup_steps),
                "lower warmup_steps or raise steps; a short first try may stay as it is",
                f"at most the {length} optimizer steps of the run",
            )
        ends = (None, optimizer.learning_rate)
        if optimizer.decay != "constant" and optimizer.minimum_learning_rate in ends:
            warnings.add(
                "the learning rate is to decay, but ends where it starts",
                f"{path}.minimum_learning_rate",
                f"decay {optimizer.decay} from {optimizer.learning_rate:g} to {optimizer.learning_rate:g}",
                f"set {path}.minimum_learning_rate=0, or {path}.decay=constant",
            )


def _replay(config: RunConfig, algorithm: Algorithm, warnings: _Warnings) -> None:
    if scoring_reason(config, algorithm) is None:
        warnings.add(
            "there is no pass whose experts could be repeated: the one update has the old policy's weights",
            "actor.routing_replay",
            "update, with one optimizer step per batch",
            "remove it, or set actor.routing_replay=rollout",
            "several optimizer steps per batch",
        )


def _learning(config: RunConfig, warnings: _Warnings) -> None:
    if config.actor.optimizer.learning_rate > _HIGH_RATE:
        warnings.add(
            "the learning rate is high for reinforcement learning",
            "actor.optimizer.learning_rate",
            f"{config.actor.optimizer.learning_rate:g}",
            "1e-6 is usual for billions of parameters, up to 1e-4 for very small models",
        )
    if config.gpu is not None:
        try:
            load_constants().gpu(config.gpu)
        except UserError as error:
            warnings.add(
                f"`plan` does not know the GPU {config.gpu!r} by itself",
                "gpu",
                config.gpu,
                error.fix or "name another",
                error.expected,
            )
    if not config.evaluation.sets:
        warnings.add(
            "nothing is evaluated: there is no held-out data",
            "evaluation.sets",
            "nothing",
            "set evaluation.sets.held_out to a data set that is not trained on",
        )


def _waits(config: RunConfig, warnings: _Warnings) -> None:
    """Warn of waits for a reward that the hang detector would take for a hang."""
    reward = config.reward
    waits: dict[str, float] = {}
    if reward.function is not None:
        waits["reward.timeout"] = reward.timeout
    if reward.code is not None:
        waits["reward.code.timeout"] = reward.code.timeout
    for name, server in (("http", reward.http), ("judge", reward.judge)):
        if server is not None:
            waits[f"reward.{name}.timeout"] = server.timeout
            waits[f"reward.{name}.longest_wait"] = server.longest_wait
            waits[f"reward.{name}.rate"] = 0.0 if server.rate is None else 1 / server.rate
    for path, seconds in waits.items():
        if seconds >= config.rank_timeout:
            warnings.add(
                f"{path} allows a wait that ends the job: no rank makes progress meanwhile",
                path,
                f"{seconds:g} s between two requests" if path.endswith("rate") else f"{seconds:g} s",
                f"raise {path}" if path.endswith("rate") else f"lower {path}, or set rank_timeout above it",
                f"less than rank_timeout, {config.rank_timeout:g} s",
            )


def _placement(
    config: RunConfig,
    world_size: int,
    layouts: Mapping[str, ParallelLayout],
    shape: ModelShape | None,
    warnings: _Warnings,
) -> None:
    used = {rank for layout in layouts.values() for rank in layout.ranks}
    idle = tuple(rank for rank in range(world_size) if rank not in used)
    if idle:
        warnings.add(
            f"{len(idle)} of {world_size} ranks have no role and do nothing",
            "world_size",
            f"idle: {format_ranges(idle)}",
            "give these ranks to a role, or start fewer processes",
        )
    for role, layout in layouts.items():
        if layout.tensor <= config.gpus_per_node:
            continue
        fix = "keep tensor within a node and use pipeline parallelism between nodes"
        if role == "rollout":
            if _needs_nodes(config, shape):
                continue
            # A replica has no pipeline: its tensor size is all that there is to choose.
            fix = f"set {layout.path}.tensor={config.gpus_per_node} where one node holds the model's weights"
        warnings.add(
            f"tensor parallelism of the {role} reaches over nodes, where the network is slow",
            f"{layout.path}.tensor",
            f"tensor {layout.tensor} on nodes of {config.gpus_per_node} GPUs",
            fix,
            f"at most {config.gpus_per_node}",
        )


def _needs_nodes(config: RunConfig, shape: ModelShape | None) -> bool:
    """Say whether the weights of a rollout replica are known not to fit in the GPUs of one node."""
    if shape is None or config.gpu_memory_gib is None:
        return False
    weights = rollout_parameters(shape, config.gpus_per_node) * DTYPE_BYTES[config.model.dtype]
    return weights > config.rollout.memory_fraction * config.gpu_memory_gib * 2**30
