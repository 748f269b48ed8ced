"""The step in another order: rollout ranks sample for later steps while the other ranks learn.

Nothing runs in threads. Every rank makes the same calls as in `train_step`, and those of a role return at
once on ranks that do not hold it; so rollout ranks are still generating when the others have gone on to learn
from rollouts that were sampled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from megatron_rl.algorithms import Algorithm, AlgorithmState, estimate
from megatron_rl.algorithms.rewards import prompts_to_sample
from megatron_rl.config.schema import RunConfig
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import Members, gather_objects
from megatron_rl.parallel.groups import communicator
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.dynamic_sampling import ROUND_CEILING, informative, take_informative
from megatron_rl.trainer.evaluation import EvaluationSet, ask
from megatron_rl.trainer.loop import (
    Phases,
    StepResult,
    actor_learns,
    learn,
    score,
    step_result,
    step_seed,
)
from megatron_rl.trainer.sample import Pending, RolloutSource, SampledBatch, gathered, grade, staleness
from megatron_rl.types import Rollouts


class AheadTrainer:
    """Hold the rollouts that are sampled and not yet learned from: at most ``steps_ahead`` batches.

    Dynamic sampling cannot wait for rewards here: each batch has as many prompts as the share of groups that
    taught something in the last learned batch calls for, and a step that lacks groups goes on with fewer.

    ``queue`` is state of the run. Making one is collective over the world.
    """

    def __init__(self, config: RunConfig, roles: Roles, algorithm: Algorithm, source: RolloutSource) -> None:
        self.config, self.roles, self.algorithm, self.source = config, roles, algorithm, source
        self.ahead = config.asynchrony.steps_ahead
        self.queue: list[SampledBatch] = []
        outside = set(roles.rollout.layout.ranks)
        self.learners = tuple(rank for rank in range(device.world_size()) if rank not in outside)
        self.learns = device.rank() in self.learners
        communicator(self.learners)

    def step(
        self, state: AlgorithmState, step: int, phase: Phases, sets: Sequence[EvaluationSet] = ()
    ) -> tuple[StepResult | None, list[Rollouts]]:
        """Learn from the oldest rollouts while later ones are sampled with the newest weights.

        These answer ``sets`` first. Returns the step's result, None on ranks that only sample, and the
        answers. Collective over the world.
        """
        result, counts, everyone = None, None, Members(traffic=phase.rows)
        with self.roles.hybrid_engine.generation_mode() as synced:
            while len(self.queue) < min(self.ahead, self.config.steps - step + 1):
                # Only before the first step: nothing has been sampled yet.
                pending = self._sample(step + len(self.queue), phase)
                self.queue.append(self.source.finish(pending, everyone))
            asked = self._ask(sets, phase)
            pending = None
            if step + self.ahead <= self.config.steps:
                pending = self._sample(step + self.ahead, phase)
            sampled = self.queue.pop(0)
            if self.learns:
                result, counts = self._learn(sampled, synced, state, step, phase)
            # Whoever comes here first waits for the others.
            with phase("idle_learn" if self.learns else "idle_rollout"):
                if pending is not None:
                    self.queue.append(self.source.finish(pending, everyone))
                answers = [gathered(self.roles.rollout, one, everyone) for one in asked]
        if self.algorithm.dynamic_sampling.further_rounds:
            self.source.informative = next(filter(None, gather_objects(counts)))
        if actor_learns(self.config, self.roles, step):
            self.roles.hybrid_engine.mark_updated()
        return result, answers

    def _ask(self, sets: Sequence[EvaluationSet], phase: Phases) -> list[Pending]:
        """Have the rollout answer evaluation sets; ranks that learn return at once."""
        with nullcontext() if self.learns or not sets else phase("evaluate"):
            return ask(self.roles, sets, self.config.seed)

    def _wanted(self) -> int:
        """Return for how many prompts the next batch is sampled."""
        wanted = self.config.batch.prompts_per_step
        if not self.algorithm.dynamic_sampling.further_rounds:
            return wanted
        kept, sampled = self.source.informative
        return prompts_to_sample(wanted + kept, kept, sampled, ceiling=ROUND_CEILING * wanted)

    def _sample(self, step: int, phase: Phases) -> Pending:
        seed, wanted = step_seed(self.config, step), self._wanted()
        if self.learns:
            return self.source.start(wanted, seed)
        with phase("generate"):
            return self.source.start(wanted, seed)

    def _learn(
        self, sampled: SampledBatch, metrics: Metrics, state: AlgorithmState, step: int, phase: Phases
    ) -> tuple[StepResult, tuple[int, int]]:
        """Return the step's result, and the numbers of groups that taught something and of all.

        ``metrics`` are of the step so far. Collective over the ranks that learn.
        """
        roles, algorithm, config = self.roles, self.algorithm, self.config
        learners, version = Members(self.learners, phase.rows), roles.hybrid_engine.version
        assert config.asynchrony.max_staleness is not None
        metrics += staleness(version, sampled.rollouts, config.asynchrony.max_staleness)
        with phase("reward"):
            batch = grade(roles, sampled, learners)
        counts = informative(batch)
        if algorithm.dynamic_sampling.further_rounds:
            batch = take_informative(batch, config.batch.prompts_per_step, instead=batch)
        with phase("score"):
            batch = score(batch, roles, config, step, learners)
        with phase("estimate"):
            train_batch, estimated = estimate(batch.rollouts, batch.scores, algorithm, state)
        with phase("learn"):
            learned = learn(train_batch, batch, roles, algorithm, state, config, step, learners)
        return step_result(batch, estimated, metrics, learned, algorithm, state), counts
