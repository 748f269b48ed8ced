"""Rules on evaluation: names of sets and evaluators, and the metric that chooses the best checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megatron_rl.check.rewards.functions import FunctionRef, check_function
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.bounds import LONGEST_NAME
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.error_forms import requires, unknown_choice
from megatron_rl.errors import UserError, nearest

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Names that metrics and files can contain on every system and in every tracker."""


def evaluation_set_errors(name: str, evaluation_set: EvaluationSetConfig) -> Iterator[UserError]:
    """Yield the errors of an evaluation set's name, of its evaluators' names and of its functions."""
    path = f"evaluation.sets.{name}"
    yield from _name_errors(path, name)

    # Evaluators report under their own names, beside the set's metrics.
    failure_metrics = [f"{evaluator}_failed" for evaluator in evaluation_set.evaluators]
    reserved = [*evaluation_set.metrics(), *failure_metrics]

    for evaluator in evaluation_set.evaluators:
        yield from _name_errors(f"{path}.evaluators", evaluator, reserved)

    for key, function in evaluation_set.functions().items():
        yield from check_function(FunctionRef(function, f"{path}.{key}"))


def _name_errors(path: str, name: str, reserved: Sequence[str] = ()) -> Iterator[UserError]:
    """Yield the error of a name that cannot be part of a metric's name, or that is ``reserved``."""
    if _NAME.fullmatch(name) and name not in reserved and len(name) <= LONGEST_NAME:
        return

    message = "a name of evaluation cannot be part of a metric's name"
    if name in reserved:
        message = "a name of evaluation is that of a metric already"
    expected = f"letters, digits, underscores, dots and hyphens, {LONGEST_NAME} at most"
    if reserved:
        expected += f"; none of {', '.join(reserved)}"
    yield UserError(
        message, where=path, expected=expected, got=repr(name[: LONGEST_NAME + 1]), fix="give it another name"
    )


def best_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the error of a ``checkpoint.best`` that no evaluation computes, or of patience without it."""
    # Patience counts evaluations in which the metric of `checkpoint.best` has not improved.
    best = config.checkpoint.best
    if best is None:
        if config.evaluation.patience is not None:
            fix = "set checkpoint.best=eval/NAME/accuracy, or remove evaluation.patience"
            patience = config.evaluation.patience
            yield requires("evaluation.patience", patience, "checkpoint.best", got="no value", fix=fix)
        return

    # An evaluator that returns several numbers has a metric for each, whose name begins with the evaluator's.
    metrics: list[str] = []
    evaluators: list[str] = []
    for name, evaluation_set in config.evaluation.sets.items():
        metrics += [f"eval/{name}/{metric}" for metric in evaluation_set.metrics()]
        evaluators += [f"eval/{name}/{evaluator}" for evaluator in evaluation_set.evaluators]
    metrics += evaluators
    if best in metrics or any(best.startswith(f"{evaluator}/") for evaluator in evaluators):
        return

    if not metrics:
        fix = "add a set to evaluation.sets, or remove checkpoint.best"
        yield requires("checkpoint.best", best, "an evaluation set that measures it", got="none", fix=fix)
        return
    suggestion = nearest(best, metrics)
    fix = f"write {suggestion}" if suggestion else "name a metric of a set in evaluation.sets"
    yield unknown_choice("checkpoint.best", best, metrics, fix=fix)
