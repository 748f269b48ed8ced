"""Rules on evaluation: sets, what judges them, and the metric that the best checkpoints are chosen by."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.check.rewards.functions import Called, check_function
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.bounds import LONGEST_NAME
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.errors import UserError, nearest

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def evaluation_set_errors(name: str, described: EvaluationSetConfig) -> Iterator[UserError]:
    """Yield what is wrong with the names of an evaluation set and with the functions that judge it."""
    where = f"evaluation.sets.{name}"
    taken = (*described.metrics(), *(f"{other}_failed" for other in described.evaluators))
    for path, word, others in (
        (where, name, ()),
        *((f"{where}.evaluators", e, taken) for e in described.evaluators),
    ):
        if not _NAME.fullmatch(word) or word in others or len(word) > LONGEST_NAME:
            yield UserError(
                "a name of evaluation is that of a metric already"
                if word in others
                else "a name of evaluation cannot be part of a metric's name",
                where=path,
                expected=f"letters, digits, underscores, dots and hyphens, {LONGEST_NAME} at most"
                + (f"; none of {', '.join(others)}" if others else ""),
                got=repr(word[: LONGEST_NAME + 1]),
                fix="give it another name",
            )
    for key, function in described.functions().items():
        yield from check_function(Called(function, f"{where}.{key}"))


def best_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield what is wrong with the metric that checkpoints are compared by."""
    best, sets = config.checkpoint.best, config.evaluation.sets
    if best is None:
        if config.evaluation.patience is not None:
            yield UserError(
                "patience needs a metric that is to get better",
                where="evaluation.patience",
                expected="checkpoint.best",
                got="no checkpoint.best",
                fix="set checkpoint.best=eval/NAME/accuracy, or remove evaluation.patience",
            )
        return
    known = [f"eval/{name}/{metric}" for name, described in sets.items() for metric in described.metrics()]
    known += [
        f"eval/{name}/{evaluator}" for name, described in sets.items() for evaluator in described.evaluators
    ]
    components = tuple(
        f"eval/{name}/{evaluator}/" for name, described in sets.items() for evaluator in described.evaluators
    )
    if best in known or (components and best.startswith(components)):
        return
    close = nearest(best, known)
    yield UserError(
        "no evaluation measures the metric that the best checkpoints are chosen by",
        where="checkpoint.best",
        expected=f"one of {', '.join(known)}"
        if known
        else "a metric of an evaluation set, and there is none",
        got=best,
        fix=f"did you mean {close}?" if close else "name a metric of a set in evaluation.sets",
    )
