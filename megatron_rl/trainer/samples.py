"""What a run samples, stored for its report and trackers, with a word on rewards that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.metrics import Metrics, merge
from megatron_rl.rewards.function import Failure, ending
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.evaluation import EvaluationResult, failure_lines
from megatron_rl.trainer.job import Job
from megatron_rl.trainer.logging import write_rollouts
from megatron_rl.trainer.loop import StepResult
from megatron_rl.trainer.reward_failures import never_asked, of_each_kind
from megatron_rl.types import row_counts


class Samples:
    """Store the samples of steps and evaluations in a job's folder, and tell its trackers."""

    def __init__(self, job: Job, roles: Roles) -> None:
        self.job, self.roles = job, roles
        self._warned = False

    def keep_evaluation(self, step: int, results: Sequence[EvaluationResult]) -> Metrics:
        """Store the answers, say what failed, and return what was measured. Collective over the world."""
        for lines in zip_longest(*gather_objects(list(failure_lines(results, step))), fillvalue=""):
            for line in dict.fromkeys(filter(None, lines)):
                self.job.say(line)
        if self.job.main:
            for result in results:
                columns = self._columns(result.prompts, result.rollouts)
                columns["reward"] = result.rewards.tolist()
                columns["failure"] = list(result.reasons)
                self._keep(f"eval_{result.name}", step, columns)
        return merge(result.metrics for result in results)

    def keep_step(self, step: int, result: StepResult | None) -> tuple[Counter[str], list[Failure]]:
        """Store the step's samples with their judgement; return and say why rewards failed, with examples.

        Collective over the world.
        """
        failures = () if result is None else result.batch.failures
        reasons = Counter(failure.reason for failure in failures)
        totals, shown = zip(*gather_objects((reasons, of_each_kind(failures))), strict=True)
        reasons, examples = sum(totals, Counter()), of_each_kind(chain.from_iterable(shown))
        if not self.job.main or result is None:
            return reasons, examples
        for failure in examples:
            self.job.say(f"step {step}: a reward failed ({failure.reason}): {ending(failure.message, 300)}")
        if reasons.total() > len(examples):
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            self.job.say(f"step {step}: {reasons.total()} rewards failed in all: {counts}")
        batch, rollouts = result.batch, result.batch.rollouts
        unasked = never_asked(self.job.config.reward, rollouts.outcomes)
        if unasked and not self._warned:
            self.job.say(f"step {step}: {unasked}")
            self._warned = True
        columns = self._columns(batch.prompts, rollouts)
        columns["group"] = rollouts.group.tolist()
        columns["reward"] = batch.scores.rewards.tolist()
        columns["valid"] = batch.scores.valid.tolist()
        columns["failure"] = list(batch.reasons)
        columns["policy_version"] = rollouts.policy_version.tolist()
        self._keep("step", step, columns)
        return reasons, examples

    def _keep(self, kind: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        write_rollouts(self.job.folder, step, columns, kind=kind)
        if self.job.trackers is not None:
            self.job.trackers.samples(kind, step, columns)

    def _columns(self, prompts: Any, rollouts: Any) -> dict[str, Any]:
        columns = {
            "prompt": list(prompts.prompts),
            "response": self.roles.reward.responses(rollouts),
            "ground_truth": ["" if truth is None else str(truth) for truth in prompts.ground_truths],
            "length": row_counts(rollouts.response_mask, rollouts.lengths).tolist(),
            "finish_reason": rollouts.finish_reason.tolist(),
        }
        if rollouts.outcomes is not None:
            columns["conversation"] = self.roles.reward.conversations(rollouts)
        return columns
