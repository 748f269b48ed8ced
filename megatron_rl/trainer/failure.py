"""Say which rank failed, in which role and phase, and end the process so that the job ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.config.errors import EXIT_BAD_INPUT, UserError
from megatron_rl.config.schema import LayoutConfig, RunConfig
from megatron_rl.parallel import device
from megatron_rl.trainer.phases import Phases


@contextmanager
def report_failure(config: RunConfig, phases: Phases) -> Iterator[None]:
    """Report an exception of the block and leave the process at once.

    Other ranks may wait for this one inside a collective, so nothing here waits for them: the launcher
    ends them when this process is gone. What the user can mend exits with 2, anything else with 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except UserError as error:
        # Every rank finds the same mistake in the same input; one of them says so.
        if device.rank() == 0 or phases.current not in ("start", "data"):
            print(f"\nerror: {error}", file=sys.stderr, flush=True)
        _leave(EXIT_BAD_INPUT)
    except BaseException as error:
        place = f"rank {device.rank()} ({describe_rank(config, device.rank())})"
        print(
            f"\n{place} failed in phase '{phases.current}' of step {phases.step}: "
            f"{type(error).__name__}: {error}\n{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Orderly interpreter shutdown would wait for communicators whose other ends are stuck.
    os._exit(code)


def describe_rank(config: RunConfig, rank: int) -> str:
    """Return which roles a rank holds and its place in them."""
    words = []
    layouts: dict[str, LayoutConfig] = {"actor": config.actor.layout}
    if config.reference is not None and config.reference.layout is not None:
        layouts["reference"] = config.reference.layout
    layouts["rollout"] = LayoutConfig(ranks=config.rollout.ranks, tensor=config.rollout.tensor)
    for role, layout in layouts.items():
        if layout.ranks is None or rank not in layout.ranks:
            continue
        index, tensor = divmod(layout.ranks.index(rank), layout.tensor)
        if role == "rollout":
            words.append(f"rollout: replica {index}, tensor {tensor}")
            continue
        index //= layout.context
        pipeline, data = divmod(
            index, len(layout.ranks) // (layout.tensor * layout.pipeline * layout.context)
        )
        words.append(f"{role}: tensor {tensor}, pipeline {pipeline}, data {data}")
    return "; ".join(words) or "no role"
