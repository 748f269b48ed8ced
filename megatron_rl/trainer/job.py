"""A job on this rank: its folder, its console, where it is, and how it ends when something fails."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from megatron_rl.config.load import changes, dump, to_plain, without_secrets
from megatron_rl.config.placement import role_layouts
from megatron_rl.config.run_folder import RunFolder, folder_of_checkpoint
from megatron_rl.config.schema import RunConfig
from megatron_rl.contained.process import readable
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.distributed import device, watch
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.durable import file_error
from megatron_rl.errors import EXIT_BAD_INPUT, UserError, first_line
from megatron_rl.launcher import report_errors
from megatron_rl.shapes.layout import problems
from megatron_rl.trainer.logging import output_to
from megatron_rl.trainer.loop import Phases
from megatron_rl.trainer.run_lock import only_job_in
from megatron_rl.trainer.stop import Stop, Stopped, report_stop
from megatron_rl.trainer.trackers import Trackers, host
from megatron_rl.versions import NUMBERS_DEPEND_ON, installed_versions


@dataclass(frozen=True)
class Job:
    """Hold what every part of a job needs: the settings, where it writes and where it is.

    ``main`` is true on the one rank that writes the run folder, speaks on the console and has ``trackers``.
    ``first_start`` is the time that a chat template takes for now, so that a run which is resumed on another
    day has the prompts that it began with.
    """

    config: RunConfig
    folder: RunFolder
    console: TextIO
    phases: Phases
    main: bool
    stop: Stop
    trackers: Trackers | None = None
    first_start: datetime | None = None

    @property
    def token_files(self) -> TokenFiles:
        """Return where the job keeps its data as tokens."""
        return TokenFiles(self.folder.tokens, self.say)

    def say(self, text: str) -> None:
        """Print a line on the console, on the main rank.

        Further lines of a text, such as what a reward function says, are indented: they are no lines of ours.
        """
        if self.main:
            self.console.write(readable(text).replace("\n", "\n    ") + "\n")
            self.console.flush()

    def stop_if_asked(self, save: Callable[[int], Path]) -> None:
        """End the job in order if any rank was asked to stop, with what ``save`` wrote of the present step.

        The same step ends it on all ranks. Collective over the world.
        """
        asked = [number for number in gather_objects(self.stop.asked) if number is not None]
        if not asked:
            return
        with self.phases("checkpoint"):
            saved = save(self.phases.step)
        code = 128 + asked[0]
        name = signal.Signals(asked[0]).name
        self.say(f"stopped by {name} after step {self.phases.step}: saved {saved}; exit code {code}")
        barrier()
        raise Stopped(code)

    def join(self) -> None:
        """Start communication between the ranks, then write the folder's first files.

        Collective over the world.
        """
        place, phases = self.stop.place, self.phases
        limit, records = self.config.rank_timeout, self.folder.flight_records
        watch.join(limit, lambda: f"{place} {phases.place}", self.stop.leave, records)
        if self.main:
            for words in self._changes():
                self.say(f"warning: this run goes on with another setting: {words}")
            self.folder.write_config(dump(without_secrets(self.config)))
            if self.first_start is not None:
                self.folder.write_first_start(self.first_start)
            if self.config.checkpoint.resume == "never":
                self.folder.start_over()
        barrier()

    def _changes(self) -> list[str]:
        """Return the settings that are not those of the run that goes on, none where none does."""
        resume = self.config.checkpoint.resume
        folder = self.folder if resume in ("auto", "never") else folder_of_checkpoint(Path(resume))
        if resume == "never" or folder is None or not (folder.config.is_file() and folder.has_begun()):
            return []
        return changes(folder.config.read_text(encoding="utf-8", errors="replace"), self.config)


@contextmanager
def job(config: RunConfig) -> Iterator[Job]:
    """Hold the run folder inside the block, send output to the rank's log, and leave the job at the end.

    A failure of any rank is reported with its rank, role and phase and ends the process, and with it the job.
    Collective over the world.
    """
    phases = Phases()
    folder = RunFolder(config.run_dir).create()
    main = device.rank() == 0
    with (
        # Outermost: a rank may be stopped while it reports the failure that a lost peer caused it.
        report_stop(describe_rank(config, device.rank()), phases, config.checkpoint.stop_seconds) as stop,
        report_failure(config, phases),
        only_job_in(folder.path, sys.stdout) if main else nullcontext(),
        output_to(folder.rank_log(device.rank()), main) as console,
    ):
        with trackers_of(config, folder, console) if main else nullcontext() as trackers:
            yield Job(config, folder, console, phases, main, stop, trackers, _first_start(config, folder))
        watch.leave()


def _first_start(config: RunConfig, folder: RunFolder) -> datetime:
    """Return when the run started first, the same on every rank, before ranks can speak to each other."""
    now = datetime.now().replace(microsecond=0)
    resume = config.checkpoint.resume

    # A folder's own time is that of an earlier run here, and the day is what ranks agree on without it.
    if resume == "never":
        return now.replace(hour=0, minute=0, second=0)

    resumed = None if resume == "auto" else folder_of_checkpoint(Path(resume))
    before = None if resumed is None else resumed.read_first_start()
    return before or folder.keep_first_start(now)


def trackers_of(config: RunConfig, folder: RunFolder, console: TextIO) -> Trackers:
    """Return the trackers of a job, which go on with the run where the job does."""

    def say(text: str) -> None:
        console.write(text + "\n")
        console.flush()

    resumed = folder.has_begun() and config.checkpoint.resume != "never"
    about = {
        "configuration": to_plain(without_secrets(config)),
        "versions": installed_versions(NUMBERS_DEPEND_ON),
        "hardware": {**host(), "device": device.name(), "ranks": device.world_size()},
    }
    return Trackers(config.logging, folder, about, resumed=resumed, say=say)


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
        removed = _removed_folder(config, error)
        if removed is not None:
            report_errors(removed)
            _leave(EXIT_BAD_INPUT)
        # A file that is missing is most likely a mistake of ours.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            told = file_error(error, Path(config.run_dir))
            if told is not None:
                report_errors(told)
                _leave(EXIT_BAD_INPUT)
        place = describe_rank(config, device.rank())
        print(
            f"\n{place} failed {phases.place}: {type(error).__name__}: {error}\n{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        _leave(1)


def _removed_folder(config: RunConfig, error: BaseException) -> UserError | None:
    """Return the error of a run folder that was removed or moved while the run wrote to it, None otherwise.

    What fails then is whatever came first to a file that is gone, and says nothing of the reason.
    """
    missing = [folder for folder in RunFolder(config.run_dir).directories() if not folder.is_dir()]
    if not missing:
        return None
    return UserError(
        "the run folder was removed, or moved, while the run wrote to it",
        where=f"run_dir: {config.run_dir}",
        expected="a folder that stays until the run has ended",
        got=f"no directory {missing[0]}; then {first_line(error)}",
        fix="put it back and start again, to go on from its newest checkpoint; or set another run_dir",
    )


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Orderly interpreter shutdown would wait for communicators whose other ends are stuck.
    os._exit(code)


def describe_rank(config: RunConfig, rank: int) -> str:
    """Describe a rank by its roles and its coordinates in each of them.

    Example: ``rank 1 (actor: tensor 0, pipeline 1, data 0; rollout: replica 0, tensor 1)``.
    """
    words = []
    for role, layout in role_layouts(config, device.world_size()).items():
        # `export` runs on any number of ranks, where the layouts of the run's roles need not fit.
        if rank not in layout.ranks or problems(layout):
            continue

        place = layout.coordinates(rank)
        if role == "rollout":
            words.append(f"rollout: replica {place.data}, tensor {place.tensor}")
        else:
            words.append(f"{role}: tensor {place.tensor}, pipeline {place.pipeline}, data {place.data}")
    return f"rank {rank} ({'; '.join(words) or 'no role'})"
