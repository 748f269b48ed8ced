"""Keep the code that judges: every process of a run executes what was there at its start."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_rl.config.schema import RunConfig
from megatron_rl.contained.code_copy import keep_copies, read_code, read_copy, write_copy
from megatron_rl.distributed.exchange import gather_objects
from megatron_rl.durable import write_text
from megatron_rl.rewards.judgement import is_function
from megatron_rl.trainer.job import Job

CURRENT = "current"
"""File beside the copies that names the one in use."""


def keep_code(job: Job) -> None:
    """Copy the user's files that run contained into the run folder, and load them from the copy.

    Ranks that a launcher starts again go on with the copy of the ranks before. Collective over the world.
    """
    files = _files(job) if job.main else None
    keep_copies(gather_objects(files)[0])


def code_of(config: RunConfig) -> Iterator[str]:
    """Yield the names of what runs contained, as ``module:name`` or ``file.py:name``."""
    reward = config.reward
    if reward.function is not None:
        yield reward.function
    if reward.judge is not None:
        yield reward.judge.parser
        if is_function(reward.judge.template):
            yield reward.judge.template
    for described in config.evaluation.sets.values():
        yield from described.functions().values()
    if config.rollout.environment is not None:
        yield config.rollout.environment.name


def _files(job: Job) -> dict[str, bytes]:
    folder = job.folder.code
    try:
        before = (folder / CURRENT).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        before = ""

    if before and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        kept = read_copy(folder / before)
        if kept is not None:
            return kept
        job.say(f"warning: {folder / before} was changed or is not complete; the code is copied again")

    files = read_code(code_of(job.config))
    if not files:
        return files
    target = write_copy(folder, files)
    goes_on = job.folder.has_begun() and job.config.checkpoint.resume != "never"
    if before and before != target.name and goes_on:
        job.say(f"warning: this run goes on with other code: {folder / before} was used, now {target}")
    write_text(folder / CURRENT, target.name + "\n")
    return files
