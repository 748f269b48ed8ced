"""Storage of the samples of steps and evaluations, and console lines about failed rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_rl.callbacks import Callbacks
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.durable import replace_file
from megatron_rl.metrics import Metrics, merge_metrics
from megatron_rl.rewards.function import Failure, last_lines
from megatron_rl.roles.build import Roles
from megatron_rl.trainer.evaluation import EvaluationResult, failure_lines
from megatron_rl.trainer.job import Job
from megatron_rl.trainer.loop import StepResult
from megatron_rl.trainer.rewards import (
    distinct_failures,
    unused_scorers_warning,
)
from megatron_rl.types import PromptBatch, Rollouts, row_counts

MAX_CONSOLE_CHARACTERS = 300
"""Maximum length of a failed reward's message on the console."""


class SampleWriter:
    """Writer of the samples of steps and evaluations, to the run folder and to the trackers."""

    def __init__(
        self,
        job: Job,
        roles: Roles,
        callbacks: Callbacks,
    ) -> None:
        self.job = job
        self._callbacks = callbacks
        self.roles = roles
        self._warned_of_unused_scorers = False

    def store_evaluation(self, step: int, results: Sequence[EvaluationResult]) -> Metrics:
        """Store the responses of an evaluation, print the failures of all ranks and return the metrics.

        Collective over the world.
        """
        # Print the first line of every rank, then the second lines, without repeated lines: a failure that
        # occurs on every rank is printed once.
        lines_by_rank = gather_objects(list(failure_lines(results, step)))
        for lines_at_index in zip_longest(*lines_by_rank, fillvalue=""):
            for line in dict.fromkeys(lines_at_index):
                if line:
                    self.job.print(line)

        if self.job.is_main:
            for result in results:
                columns = self._common_columns(result.prompts, result.rollouts)
                columns["reward"] = result.rewards.tolist()
                columns["failure"] = list(result.reasons)
                self._store_table(f"eval_{result.name}", step, columns)
        return merge_metrics(result.metrics for result in results)

    def store_step(self, step: int, result: StepResult | None) -> tuple[Counter[str], list[Failure]]:
        """Store the step's samples with their rewards, and print examples of failed rewards.

        Returns the number of failed rewards of all ranks by reason, and the examples. Collective over the
        world.
        """
        # Gather the failures: each rank has only the failures of the rows for which it computed rewards.
        failures: Sequence[Failure] = ()
        batch = None
        if result is not None:
            batch = result.batch
        if batch is not None:
            failures = batch.failures
        local_reasons = Counter(failure.reason for failure in failures)
        reasons: Counter[str] = Counter()
        rank_examples: list[Failure] = []
        for rank_reasons, rank_failures in gather_objects((local_reasons, distinct_failures(failures))):
            reasons += rank_reasons
            rank_examples += rank_failures
        examples = distinct_failures(rank_examples)
        if not self.job.is_main or batch is None:
            return reasons, examples

        self._print_failures(step, reasons, examples)

        # Warn once per run: later steps would repeat the warning.
        config = self.job.config
        warning = unused_scorers_warning(config.reward, batch.rollouts.outcomes, config.data.source_rewards)
        if warning and not self._warned_of_unused_scorers:
            self.job.print(f"step {step}: {warning}")
            self._warned_of_unused_scorers = True

        # Store a table with one row per response.
        columns = self._common_columns(batch.prompts, batch.rollouts)
        columns["group"] = batch.rollouts.group.tolist()
        if batch.prompts.sources is not None:
            columns["source"] = list(batch.prompts.sources)
        columns["reward"] = batch.scores.rewards.tolist()
        for name, values in batch.scores.components.items():
            columns[f"component/{name}"] = values.tolist()
        columns["valid"] = batch.scores.valid.tolist()
        if result is not None and result.advantages is not None:
            # A row without a valid reward has no advantage: store NaN, as in the column of rewards.
            advantages = result.advantages.masked_fill(~batch.scores.valid, float("nan"))
            columns["advantage"] = advantages.tolist()
        columns["failure"] = list(batch.reasons)
        columns["policy_version"] = batch.rollouts.policy_version.tolist()
        self._store_table("step", step, columns)
        self._callbacks.call_method("on_samples", step, columns)
        return reasons, examples

    def _print_failures(
        self,
        step: int,
        reasons: Counter[str],
        examples: Sequence[Failure],
    ) -> None:
        """Print examples of failed rewards, then the counts of failures by reason.

        The counts are omitted if every failed reward of the step is among the examples.
        """
        for failure in examples:
            message = last_lines(failure.message, MAX_CONSOLE_CHARACTERS)
            self.job.print(f"step {step}: a reward failed ({failure.reason}): {message}")
        if reasons.total() > len(examples):
            counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            self.job.print(f"step {step}: {reasons.total()} rewards failed in all: {counts}")

    def _store_table(
        self,
        kind: str,
        step: int,
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        """Write a table of samples to the run folder and the trackers; ``kind`` is "step" or "eval_NAME"."""
        write_rollouts(self.job.folder, step, columns, kind=kind)
        if self.job.trackers is not None:
            self.job.trackers.write_samples(kind, step, columns)

    def _common_columns(self, prompts: PromptBatch, rollouts: Rollouts) -> dict[str, Any]:
        """Return the columns that training and evaluation samples have in common: name -> values."""
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


def write_rollouts(
    folder: RunFolder,
    step: int,
    columns: Mapping[str, Sequence[Any]],
    limit: int | None = None,
    kind: str = "step",
) -> Path:
    """Write a table of samples to ``rollouts/KIND_STEP.parquet`` of the run folder; return the file's path.

    ``kind``: "step" for training samples, "eval_NAME" for the responses to an evaluation set.
    Only the first ``limit`` rows are written, or all for None. A column whose values have no common Parquet
    type is stored as JSON text.
    """
    import pyarrow
    import pyarrow.parquet

    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        length_by_column = {name: len(values) for name, values in columns.items()}
        raise ValueError(f"columns of different lengths: {length_by_column}")
    row_count = lengths.pop()
    if limit is not None:
        row_count = min(row_count, limit)

    arrays: dict[str, Any] = {"step": pyarrow.array([step] * row_count, pyarrow.int64())}
    for name, values in columns.items():
        written_values = list(values[:limit])
        try:
            array = pyarrow.array(written_values)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            array = pyarrow.array([json.dumps(value, default=str) for value in written_values])
        # Without a value, the type is unknown. Such a column, for example the failures of a step without
        # failures, is a text column in the files of other steps, so store it as text here, too.
        if pyarrow.types.is_null(array.type):
            array = array.cast(pyarrow.string())
        arrays[name] = array

    table_path = folder.rollouts / f"{kind}_{step}.parquet"
    table = pyarrow.table(arrays)
    replace_file(table_path, lambda temporary_path: pyarrow.parquet.write_table(table, temporary_path))
    return table_path
