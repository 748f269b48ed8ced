"""The step in another order: rollout ranks sample for later steps while the other ranks learn.

Nothing runs in threads. Every rank makes the same calls as in `train_step`, and those of a role return at
once on ranks that do not hold it; so rollout ranks are still generating when the others have gone on to learn
from rollouts that were sampled before.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.algorithms import Algorithm, AlgorithmState
from megatron_rl.algorithms.filters import prompts_to_sample
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import among, gather_metrics, gather_objects
from megatron_rl.parallel.groups import communicator
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.loop import StepResult, critic_warm_up, learn_from, step_seed
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.sampler import Sampled, Sampler, Sampling
from megatron_rl.trainer.sampling import ROUND_CEILING, grade_sampled, informative, take_informative
from megatron_rl.trainer.staleness import staleness


class AheadTrainer:
    """Hold the rollouts that are sampled and not yet learned from: at most ``steps_ahead`` batches.

    Dynamic sampling cannot wait for rewards here: each batch has as many prompts as the share of groups that
    taught something in the last learned batch calls for, and a step that lacks groups goes on with fewer.

    ``queue`` is state of the run. Making one is collective over the world.
    """

    def __init__(self, config: RunConfig, roles: Roles, algorithm: Algorithm, sampler: Sampler) -> None:
        self.config, self.roles, self.algorithm, self.sampler = config, roles, algorithm, sampler
        self.ahead = config.asynchrony.steps_ahead
        self.queue: list[Sampled] = []
        outside = set(roles.rollout.layout.ranks)
        self.learners = tuple(rank for rank in range(device.world_size()) if rank not in outside)
        self.learns = device.rank() in self.learners
        communicator(self.learners)

    def step(self, state: AlgorithmState, step: int, phase: Phases) -> StepResult | None:
        """Learn from the oldest rollouts while later ones are sampled with the newest weights.

        None on ranks that only sample. Collective over the world.
        """
        result, counts = None, None
        with self.roles.hybrid_engine.generation_mode():
            metrics = self.roles.hybrid_engine.sync_metrics
            while len(self.queue) < min(self.ahead, self.config.steps - step + 1):
                # Only before the first step: nothing has been sampled yet.
                pending = self._sample(step + len(self.queue), phase)
                self.queue.append(self.sampler.finish(pending))
            pending = None
            if step + self.ahead <= self.config.steps:
                pending = self._sample(step + self.ahead, phase)
            sampled = self.queue.pop(0)
            if self.learns:
                with among(self.learners):
                    result, counts = self._learn(sampled, metrics, state, step, phase)
            # Whoever comes here first waits for the others.
            with phase("idle_learn" if self.learns else "idle_rollout"):
                if pending is not None:
                    self.queue.append(self.sampler.finish(pending))
        if self.algorithm.dynamic_sampling:
            self.sampler.informative = next(filter(None, gather_objects(counts)))
        if step > critic_warm_up(self.config, self.roles):
            self.roles.hybrid_engine.mark_updated()
        return result

    def _wanted(self) -> int:
        """Return for how many prompts the next batch is sampled."""
        wanted = self.config.batch.prompts_per_step
        if not self.algorithm.dynamic_sampling:
            return wanted
        kept, sampled = self.sampler.informative
        return prompts_to_sample(wanted + kept, kept, sampled, ceiling=ROUND_CEILING * wanted)

    def _sample(self, step: int, phase: Phases) -> Sampling:
        seed, wanted = step_seed(self.config, step), self._wanted()
        if self.learns:
            return self.sampler.start(wanted, seed)
        with phase("generate"):
            return self.sampler.start(wanted, seed)

    def _learn(
        self, sampled: Sampled, metrics: Metrics, state: AlgorithmState, step: int, phase: Phases
    ) -> tuple[StepResult, tuple[int, int]]:
        """Return the step's result, and the numbers of groups that taught something and of all."""
        version, bound = self.roles.hybrid_engine.version, self.config.asynchrony.max_staleness
        assert bound is not None
        metrics += sampled.metrics + staleness(version, sampled.rollouts, bound)
        graded, also = grade_sampled(sampled, self.roles, self.config, phase)
        counts = informative(graded)
        if self.algorithm.dynamic_sampling:
            taken, more = take_informative(graded, self.config.batch.prompts_per_step)
            graded, also = taken or graded, also + more
        result = learn_from(graded, self.roles, self.algorithm, state, self.config, step, phase)
        return replace(result, metrics=result.metrics + gather_metrics(metrics + also)), counts
