"""Batches of an asynchronous run: rollout ranks sample for later steps while other ranks (learners) train.

There are no threads. Every rank runs the same `train_step`, and a call of a role returns immediately on ranks
without the role. So while the rollout's ranks generate, the learners compute log-probs of a batch that was
sampled ``steps_ahead`` steps before, and update the weights.
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
from megatron_rl.trainer.evaluation import EvaluationSet, start_evaluation
from megatron_rl.trainer.loop import Phases, step_seed
from megatron_rl.trainer.rewards import (
    ROUND_CEILING,
    ScoredBatch,
    compute_rewards,
    count_informative,
    select_informative_groups,
)
from megatron_rl.trainer.sample import (
    PendingRound,
    RolloutSource,
    SampledBatch,
    gather_complete_round,
    staleness_metrics,
)
from megatron_rl.types import Rollouts


class AheadBatches:
    """Batch source of an asynchronous run: rollout ranks sample each batch ``steps_ahead`` steps early.

    Dynamic sampling cannot wait for the rewards of a batch here. Instead, the last trained batch determines
    how many prompts are sampled: the fewer informative groups (whose rewards are not all equal) it had, the
    more prompts. A step with too few informative groups uses all groups.

    ``queue``: sampled batches that have not been trained on yet; checkpoints store them.
    ``sets``: evaluation sets of a deferred evaluation. The next step samples responses to these sets and its
        new batch with the same weights.
    ``responses``: responses to each of ``sets``, which the next step has sampled.

    Construction is collective over the world.
    """

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        algorithm: Algorithm,
        source: RolloutSource,
    ) -> None:
        self.config = config
        self.roles = roles
        self.algorithm = algorithm
        self.source = source
        self.queue: list[SampledBatch] = []
        self.sets: Sequence[EvaluationSet] = ()
        self.responses: list[Rollouts] = []

        rollout_ranks = set(roles.rollout.layout.ranks)
        learner_ranks = tuple(rank for rank in range(device.world_size()) if rank not in rollout_ranks)
        self.learners: tuple[int, ...] | None = learner_ranks
        self._is_learner = device.rank() in learner_ranks
        # Create the learners' communicator on all ranks now: the creation is collective over the world, and
        # rollout ranks never use it later.
        communicator(learner_ranks)

    @contextmanager
    def produce_batch(
        self,
        step: int,
        phases: Phases,
        learners: ReplicaGroup,
    ) -> Iterator[tuple[ScoredBatch | None, Metrics]]:
        """Yield the oldest batch of the queue, while rollout ranks sample the next with the newest weights.

        See `BatchSource.produce_batch`.
        """
        # New tokens are gathered onto all ranks, since all ranks store the queue.
        world = ReplicaGroup(gather_stats=phases.gather_stats)
        steps_ahead = self.config.asynchrony.steps_ahead
        batch = None
        group_counts = None

        with self.roles.hybrid_engine.generation_mode() as metrics:
            # Fill the queue: it has too few batches in the first step after a start.
            while len(self.queue) < min(steps_ahead, self.config.steps - step + 1):
                pending = self._start_sampling(step + len(self.queue), phases)
                self.queue.append(self.source.finish_round(pending, world))

            # These calls generate on the rollout's ranks, and return immediately on learners.
            pending_evaluations = self._start_evaluation(phases)
            pending = None
            if step + steps_ahead <= self.config.steps:
                pending = self._start_sampling(step + steps_ahead, phases)

            # Meanwhile, the learners train on the oldest batch.
            sampled = self.queue.pop(0)
            if self._is_learner:
                metrics += self._staleness_metrics(sampled)
                batch, group_counts = self._compute_rewards(sampled, phases, learners)
            yield batch, metrics

            # The first gather starts when both learners and rollout ranks are ready: this wait is idle time.
            with phases("idle_learn" if self._is_learner else "idle_rollout"):
                if pending is not None:
                    self.queue.append(self.source.finish_round(pending, world))
                self.responses = [
                    gather_complete_round(self.roles.rollout, pending_evaluation, world)
                    for pending_evaluation in pending_evaluations
                ]

        if self.algorithm.dynamic_sampling.further_rounds:
            # Rollout ranks need these counts for the size of the next batch, but have no rewards: use the
            # first learner's counts on all ranks.
            learner_counts = [counts for counts in gather_objects(group_counts) if counts is not None]
            self.source.group_counts = learner_counts[0]

    def _start_evaluation(self, phases: Phases) -> list[PendingRound]:
        """Sample responses to the evaluation sets on the rollout's ranks; return immediately on learners."""
        timer = nullcontext()
        if self.sets and not self._is_learner:
            timer = phases("evaluate")
        with timer:
            return start_evaluation(self.roles, self.sets, self.config.seed)

    def _start_sampling(self, step: int, phases: Phases) -> PendingRound:
        """Sample the batch of ``step`` on the rollout's ranks; return immediately on learners."""
        seed = step_seed(self.config, step)
        timer = nullcontext()
        if not self._is_learner:
            timer = phases("generate")
        with timer:
            return self.source.start_round(self._count_prompts_to_sample(), seed)

    def _count_prompts_to_sample(self) -> int:
        """Return the number of prompts of the next batch.

        With dynamic sampling, the number is larger if few groups of the last batch were informative.
        """
        prompts_per_step = self.config.batch.prompts_per_step
        if not self.algorithm.dynamic_sampling.further_rounds:
            return prompts_per_step

        informative, total = self.source.group_counts
        ceiling = ROUND_CEILING * prompts_per_step
        # `prompts_to_sample` subtracts the informative groups, as if the next batch could use them. They have
        # already been trained on, so add their number to the required groups.
        required_groups = prompts_per_step + informative
        return prompts_to_sample(required_groups, informative, total, ceiling=ceiling)

    def _staleness_metrics(self, sampled: SampledBatch) -> Metrics:
        """Return a batch's age in weight updates as metrics; raise StalenessError if it is too old."""
        max_updates = self.config.asynchrony.max_staleness
        assert max_updates is not None
        return staleness_metrics(self.roles.hybrid_engine.version, sampled.rollouts, max_updates)

    def _compute_rewards(
        self,
        sampled: SampledBatch,
        phases: Phases,
        learners: ReplicaGroup,
    ) -> tuple[ScoredBatch, tuple[int, int]]:
        """Compute a batch's rewards; return it with the numbers of informative groups and of all groups.

        Collective over the learners.
        """
        with phases("reward"):
            batch = compute_rewards(self.roles, sampled, learners)
        group_counts = count_informative(batch)
        if self.algorithm.dynamic_sampling.further_rounds:
            batch = select_informative_groups(batch, self.config.batch.prompts_per_step, fallback=batch)
        return batch, group_counts
