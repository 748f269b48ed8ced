"""Batches of an asynchronous run: rollout ranks sample for later steps while the other ranks learn.

Nothing runs in threads. Every rank takes the same `train_step`, and calls of a role return at once on ranks
that do not hold it; so rollout ranks still generate when the others learn from rollouts sampled before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.rewards import prompts_to_sample
from megatron_rl.config.schema import RunConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import ReplicaGroup, gather_objects
from megatron_rl.distributed.groups import communicator
from megatron_rl.metrics import Metrics
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.dynamic_sampling import ROUND_CEILING, informative, take_informative
from megatron_rl.trainer.evaluation import EvaluationSet, ask
from megatron_rl.trainer.loop import Phases, step_seed
from megatron_rl.trainer.sample import (
    Pending,
    RolloutSource,
    SampledBatch,
    ScoredBatch,
    gathered,
    grade,
    staleness,
)
from megatron_rl.types import Rollouts


class AheadBatches:
    """Batches that rollout ranks of their own sampled ``steps_ahead`` steps before others learn from them.

    Dynamic sampling cannot wait for rewards here: each batch has as many prompts as the share of groups that
    taught something in the last learned batch calls for, and a step that lacks groups goes on with fewer.

    ``queue`` holds the rollouts that are sampled and not yet learned from, and is state of the run. The
    weights that sample also answer the evaluation ``sets``, whose ``answers`` are there when the step ends.
    Making one is collective over the world.
    """

    def __init__(self, config: RunConfig, roles: Roles, algorithm: Algorithm, source: RolloutSource) -> None:
        self.config = config
        self.roles = roles
        self.algorithm = algorithm
        self.source = source
        self.ahead = config.asynchrony.steps_ahead
        self.queue: list[SampledBatch] = []
        self.sets: Sequence[EvaluationSet] = ()
        self.answers: list[Rollouts] = []

        outside = set(roles.rollout.layout.ranks)
        ranks = tuple(rank for rank in range(device.world_size()) if rank not in outside)
        self.learners: tuple[int, ...] | None = ranks
        self.learns = device.rank() in ranks
        communicator(ranks)

    @contextmanager
    def next(
        self, step: int, phase: Phases, learners: ReplicaGroup
    ) -> Iterator[tuple[ScoredBatch | None, Metrics]]:
        """Give the oldest rollouts, while later ones are sampled with the newest weights.

        See `BatchSource.next`.
        """
        world = ReplicaGroup(gather_stats=phase.gather_stats)
        batch, counts = None, None
        with self.roles.hybrid_engine.generation_mode() as measured:
            while len(self.queue) < min(self.ahead, self.config.steps - step + 1):
                # Only before the first step: nothing has been sampled yet.
                pending = self._sample(step + len(self.queue), phase)
                self.queue.append(self.source.finish(pending, world))

            asked = self._ask(phase)
            pending = None
            if step + self.ahead <= self.config.steps:
                pending = self._sample(step + self.ahead, phase)

            sampled = self.queue.pop(0)
            if self.learns:
                measured += self._staleness(sampled)
                batch, counts = self._reward(sampled, phase, learners)
            yield batch, measured

            # Whoever comes here first waits for the others.
            with phase("idle_learn" if self.learns else "idle_rollout"):
                if pending is not None:
                    self.queue.append(self.source.finish(pending, world))
                self.answers = [gathered(self.roles.rollout, one, world) for one in asked]

        if self.algorithm.dynamic_sampling.further_rounds:
            # Ranks that only sample learn here how many groups taught something.
            self.source.informative = next(filter(None, gather_objects(counts)))

    def _ask(self, phase: Phases) -> list[Pending]:
        """Have the rollout answer evaluation sets; ranks that learn return at once."""
        with nullcontext() if self.learns or not self.sets else phase("evaluate"):
            return ask(self.roles, self.sets, self.config.seed)

    def _wanted(self) -> int:
        """Return for how many prompts the next batch is sampled."""
        wanted = self.config.batch.prompts_per_step
        if not self.algorithm.dynamic_sampling.further_rounds:
            return wanted
        kept, sampled = self.source.informative
        return prompts_to_sample(wanted + kept, kept, sampled, ceiling=ROUND_CEILING * wanted)

    def _sample(self, step: int, phase: Phases) -> Pending:
        """Start sampling the batch of ``step``; ranks that learn return at once."""
        seed, wanted = step_seed(self.config, step), self._wanted()
        if self.learns:
            return self.source.start(wanted, seed)
        with phase("generate"):
            return self.source.start(wanted, seed)

    def _staleness(self, sampled: SampledBatch) -> Metrics:
        """Return how old the rollouts are; raise StalenessError where they are too old to learn from."""
        bound = self.config.asynchrony.max_staleness
        assert bound is not None
        return staleness(self.roles.hybrid_engine.version, sampled.rollouts, bound)

    def _reward(
        self, sampled: SampledBatch, phase: Phases, learners: ReplicaGroup
    ) -> tuple[ScoredBatch, tuple[int, int]]:
        """Return the rewarded rows, and the numbers of groups that taught something and of all.

        Collective over the learners.
        """
        with phase("reward"):
            batch = grade(self.roles, sampled, learners)
        counts = informative(batch)
        if self.algorithm.dynamic_sampling.further_rounds:
            batch = take_informative(batch, self.config.batch.prompts_per_step, instead=batch)
        return batch, counts
