"""The step in another order: rollout ranks sample for later steps while the other ranks learn.

Nothing runs in threads. Every rank makes the same calls as in `train_step`, and those of a role return at
once on ranks that do not hold it; so rollout ranks are still generating when the others have gone on to learn
from rollouts that were sampled before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_rl.algorithms import Algorithm, AlgorithmState
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import among, gather_metrics
from megatron_rl.parallel.groups import communicator
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.loop import StepResult, critic_warm_up, learn_from, step_seed
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.sampling import Sampled, Sampling, finish_sampling, grade_sampled, start_sampling
from megatron_rl.types import PromptBatch


class StalenessError(RuntimeError):
    """Report rollouts that are older than the run allows."""


class AheadTrainer:
    """Hold the rollouts that are sampled and not yet learned from: at most ``steps_ahead`` batches.

    ``queue`` is state of the run. Making one is collective over the world.
    """

    def __init__(self, config: RunConfig, roles: Roles, algorithm: Algorithm) -> None:
        self.config, self.roles, self.algorithm = config, roles, algorithm
        self.ahead = config.asynchrony.steps_ahead
        self.queue: list[Sampled] = []
        outside = set(roles.rollout.layout.ranks)
        self.learners = tuple(rank for rank in range(device.world_size()) if rank not in outside)
        self.learns = device.rank() in self.learners
        communicator(self.learners)

    def step(
        self, draw: Callable[[int], PromptBatch], state: AlgorithmState, step: int, phase: Phases
    ) -> StepResult | None:
        """Learn from the oldest rollouts while later ones are sampled with the newest weights.

        None on ranks that only sample. Collective over the world.
        """
        wanted = self.config.batch.prompts_per_step
        result = None
        with self.roles.hybrid_engine.generation_mode():
            metrics = self.roles.hybrid_engine.sync_metrics
            while len(self.queue) < min(self.ahead, self.config.steps - step + 1):
                # Only before the first step: nothing has been sampled yet.
                pending = self._sample(draw(wanted), step + len(self.queue), phase)
                self.queue.append(finish_sampling(pending, self.config))
            pending = None
            if step + self.ahead <= self.config.steps:
                pending = self._sample(draw(wanted), step + self.ahead, phase)
            sampled = self.queue.pop(0)
            if self.learns:
                with among(self.learners):
                    result = self._learn(sampled, metrics, state, step, phase)
            # Whoever comes here first waits for the others.
            with phase("idle_learn" if self.learns else "idle_rollout"):
                if pending is not None:
                    self.queue.append(finish_sampling(pending, self.config))
        if step > critic_warm_up(self.config, self.roles):
            self.roles.hybrid_engine.mark_updated()
        return result

    def _sample(self, prompts: PromptBatch, step: int, phase: Phases) -> Sampling:
        seed = step_seed(self.config, step)
        if self.learns:
            return start_sampling(prompts, self.roles, self.algorithm, self.config, seed)
        with phase("generate"):
            return start_sampling(prompts, self.roles, self.algorithm, self.config, seed)

    def _learn(
        self, sampled: Sampled, metrics: Metrics, state: AlgorithmState, step: int, phase: Phases
    ) -> StepResult:
        version = self.roles.hybrid_engine.version
        metrics += staleness(version, sampled.rollouts.policy_version, self.ahead)
        graded, also = grade_sampled(sampled, self.roles, self.config, phase)
        result = learn_from(graded, self.roles, self.algorithm, state, self.config, step, phase)
        return replace(result, metrics=result.metrics + gather_metrics(metrics + also))


def staleness(version: int, sampled_with: torch.Tensor, bound: int) -> Metrics:
    """Return how many updates old the rows' policies are; raise StalenessError beyond ``bound``."""
    age = (version - sampled_with).float()
    if len(age) and int(age.max()) > bound:
        raise StalenessError(
            f"rollouts of version {int(sampled_with.min())} came to a learner at version {version}; "
            f"asynchrony.steps_ahead allows {bound} updates between them"
        )
    return Metrics.mean("staleness/mean", float(age.sum()), len(age)) + Metrics.maximum(
        "staleness/max", float(age.max()) if len(age) else 0.0
    )
