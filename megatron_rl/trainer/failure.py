"""Say which rank failed, in which role and phase, and end the process so that the job ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.config.placement import role_layouts
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import EXIT_BAD_INPUT, UserError
from megatron_rl.launcher import report_errors
from megatron_rl.parallel import device
from megatron_rl.trainer.phases import Phases
from megatron_rl.trainer.stop import Stopped


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
    except Stopped as stopped:
        _leave(stopped.code)
    except UserError as error:
        report_errors(error)
        _leave(EXIT_BAD_INPUT)
    except BaseException as error:
        place = describe_rank(config, device.rank())
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
    """Return a rank with the roles it holds and its place in them."""
    words = []
    for role, layout in role_layouts(config, device.world_size()).items():
        if rank not in layout.ranks:
            continue
        place = layout.coordinates(rank)
        if role == "rollout":
            words.append(f"rollout: replica {place.data}, tensor {place.tensor}")
        else:
            words.append(f"{role}: tensor {place.tensor}, pipeline {place.pipeline}, data {place.data}")
    return f"rank {rank} ({'; '.join(words) or 'no role'})"
