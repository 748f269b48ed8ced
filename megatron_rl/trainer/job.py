"""A job on this rank: its folder and console, the signals that stop it, and how it ends when something fails.

The one idea: a rank that fails never waits for others, which may wait for it inside a collective. It reports
where it was and ends its process at once; the launcher then ends the others. One job at a time can hold the
lock of a run folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from megatron_rl.config.load import changes, dump, to_plain, without_secrets
from megatron_rl.config.placement import accelerated_job, role_layouts
from megatron_rl.config.run_folder import RunFolder, folder_of_checkpoint
from megatron_rl.config.schema import RunConfig
from megatron_rl.contained.code_copy import (
    read_code,
    read_copy,
    use_copies_of,
    write_copy,
)
from megatron_rl.contained.process import escape_unprintable
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.distributed import device, watch
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.distributed.watch import last_calls
from megatron_rl.durable import file_error, write_text
from megatron_rl.errors import EXIT_BAD_INPUT, UserError, first_line
from megatron_rl.launcher import current_launch, report_errors
from megatron_rl.rewards.judgement import is_function
from megatron_rl.shapes.accelerator import ENVIRONMENT, accelerator_defaults
from megatron_rl.shapes.layout import problems
from megatron_rl.trainer.logging import output_to
from megatron_rl.trainer.loop import Phases
from megatron_rl.trainer.memory_report import out_of_memory_error
from megatron_rl.trainer.starts import Start, current_start, write_start
from megatron_rl.trainer.trackers import Trackers, host
from megatron_rl.versions import NUMBERS_DEPEND_ON, installed_versions

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a job to stop: from launchers, terminals, and schedulers before they preempt it."""

_REPORT_SECONDS = 1.0
"""Time that the other ranks of a stopped job leave the one that reports the error."""
ECHO_SECONDS = 10.0
"""Time within which a second SIGUSR1 is the same request: Slurm signals every process of a job step, and
torchrun passes on the signal that it got itself."""

CURRENT_CODE = "current"
"""File next to the code copies that names the one in use."""


@dataclass(frozen=True)
class Job:
    """Settings and resources of a job on this rank, which all its parts share."""

    config: RunConfig
    """Resolved configuration."""
    folder: RunFolder
    """Run folder."""
    console: TextIO
    """Stream to the user's console on the main rank, to the rank's log on others."""
    phases: Phases
    """Current phase and step of this rank."""
    main: bool
    """Whether this is the one rank that writes the run folder, the console and to trackers."""
    stop: Stop
    """Whether the job was asked to stop."""
    trackers: Trackers | None = None
    """Experiment trackers, on the main rank."""
    first_start: datetime | None = None
    """Current time for chat templates: the run's first start, so that a resumed run has the same prompts."""
    start: Start | None = None
    """Command, revision, versions and hardware of this job, on the main rank."""

    @property
    def token_files(self) -> TokenFiles:
        """Return the files in which the job stores its tokenised data."""
        return TokenFiles(self.folder.tokens, self.say)

    def say(self, text: str) -> None:
        """Print a text on the console of the main rank; its lines after the first are indented.

        Thus a text from outside, such as a reward function's message, cannot look like a line of the run.
        """
        if self.main:
            self.console.write(escape_unprintable(text).replace("\n", "\n    ") + "\n")
            self.console.flush()

    def stop_if_asked(self, save: Callable[[int], Path], error: UserError | None = None) -> None:
        """Save the current step with ``save`` and end the job, if any rank was asked to stop or has an error.

        ``error``: reason for an orderly end, which its rank reports. Gathering the requests makes all ranks
        end after the same step. Collective over the world.
        """
        requests = gather_objects((self.stop.signal_number, error is not None))
        signals = [number for number, _ in requests if number is not None]
        if signals:
            code = 128 + signals[0]
            reason = signal.Signals(signals[0]).name
        elif any(has_error for _, has_error in requests):
            code = EXIT_BAD_INPUT
            reason = "the error below"
        else:
            return

        with self.phases("checkpoint"):
            path = save(self.phases.step)
        self.say(f"stopped by {reason} after step {self.phases.step}: saved {path}; exit code {code}")
        # No rank may end before all have written their part of the checkpoint.
        barrier()
        raise Stopped(code, error)

    def join(self) -> None:
        """Start communication between the ranks, then write the folder's first files.

        Collective over the world.
        """
        if self.config.deterministic:
            device.use_deterministic_kernels()

        # CUDA and PyTorch's allocator read their variables when the device is first used.
        layouts = role_layouts(self.config, device.world_size())
        job = accelerated_job(self.config, layouts)
        device.set_environment(accelerator_defaults(job, ENVIRONMENT))

        # From here on the hang detector ends ranks that wait for a rank that does not respond.
        watch.join(
            self.config.rank_timeout,
            lambda: f"{self.stop.rank_text} {self.phases.location}",
            self.stop.end_process,
            self.folder.flight_records,
        )

        # The main rank writes the folder, after comparing with the files of an earlier job.
        if self.main:
            for change in self._changes():
                self.say(f"warning: this run resumes with a changed setting: {change}")
            self.folder.write_config(dump(without_secrets(self.config)))
            if self.first_start is not None:
                self.folder.write_first_start(self.first_start)
            if self.start is not None:
                write_start(self.folder, self.start, resumed=_resumes(self.config, self.folder))
            if self.config.checkpoint.resume == "never":
                self.folder.start_over()
        # Other ranks write into the folder next, which `start_over` may still be clearing.
        barrier()

    def _changes(self) -> list[str]:
        """Return the settings that differ from the run being resumed."""
        resume = self.config.checkpoint.resume
        folder = self.folder
        if resume not in ("auto", "never"):
            folder = folder_of_checkpoint(Path(resume))
        if resume == "never" or folder is None or not (folder.config.is_file() and folder.has_begun()):
            return []
        return changes(
            folder.config.read_text(encoding="utf-8", errors="replace"),
            self.config,
        )


@contextmanager
def job(config: RunConfig, explicit: Sequence[str] = ()) -> Iterator[Job]:
    """Lock the run folder, redirect output to the rank's log and yield the job; leave the job at the end.

    ``explicit``: keys that the user has set, for the record of the start. A failure of any rank is
    reported with its rank, roles and phase and ends the process, and with it the job. Collective over the
    world.
    """
    # The ranks cannot communicate yet, so each of them creates the folders that do not exist.
    phases = Phases()
    folder = RunFolder(config.run_dir).create()
    main = device.rank() == 0
    rank_text = describe_rank(config, device.rank())
    stop_seconds = config.checkpoint.stop_seconds
    assert stop_seconds is not None, "the configuration is resolved"
    with (
        # Outermost: a rank may be stopped while it reports the failure that a lost peer caused.
        report_stop(rank_text, phases, stop_seconds) as stop,
        report_failure(config, phases),
        only_job_in(folder.path, sys.stdout) if main else nullcontext(),
        output_to(folder.rank_log(device.rank()), main) as console,
    ):
        start = None
        if main:
            start = current_start(installed_versions(NUMBERS_DEPEND_ON), _hardware(), explicit)
        # Innermost, so that trackers are closed before the console is.
        with open_trackers(config, folder, console) if main else nullcontext() as trackers:
            yield Job(
                config,
                folder,
                console,
                phases,
                main,
                stop,
                trackers,
                _first_start(config, folder),
                start,
            )

        # Only without an exception: a failed rank leaves at once, see `report_failure`.
        watch.leave()


def _first_start(config: RunConfig, folder: RunFolder) -> datetime:
    """Return when the run was first started, the same on every rank, before the ranks can communicate."""
    now = datetime.now().replace(microsecond=0)
    resume = config.checkpoint.resume

    # A time stored in the folder is of an earlier run. Without it, ranks that start at different seconds
    # only agree on the day.
    if resume == "never":
        return now.replace(hour=0, minute=0, second=0)

    first_start = None
    if resume != "auto":
        resumed_folder = folder_of_checkpoint(Path(resume))
        if resumed_folder is not None:
            first_start = resumed_folder.read_first_start()
    return first_start or folder.keep_first_start(now)


def open_trackers(config: RunConfig, folder: RunFolder, console: TextIO) -> Trackers:
    """Return the trackers of a job; they continue their run if the job resumes."""

    def say(text: str) -> None:
        console.write(text + "\n")
        console.flush()

    # Configuration, versions and hardware, with which the numbers of runs can be compared later.
    run_info = {
        "configuration": to_plain(without_secrets(config)),
        "versions": installed_versions(NUMBERS_DEPEND_ON),
        "hardware": _hardware(),
    }
    return Trackers(config.logging, folder, run_info, resumed=_resumes(config, folder), say=say)


def _hardware() -> dict[str, Any]:
    """Return this host, the device of this rank and the number of ranks."""
    return {**host(), "device": device.name(), "ranks": device.world_size()}


def _resumes(config: RunConfig, folder: RunFolder) -> bool:
    """Return whether a job continues what its run folder has."""
    return folder.has_begun() and config.checkpoint.resume != "never"


def describe_rank(config: RunConfig, rank: int) -> str:
    """Describe a rank by its roles and its coordinates in each of them.

    Example: ``rank 1 (actor: tensor 0, pipeline 1, data 0; rollout: replica 0, tensor 1)``.
    """
    roles = []
    for role, layout in role_layouts(config, device.world_size()).items():
        # `export` runs on any number of ranks, to which the layouts of the run's roles need not fit.
        if rank not in layout.ranks or problems(layout):
            continue

        position = layout.coordinates(rank)
        if role == "rollout":
            roles.append(f"rollout: replica {position.data}, tensor {position.tensor}")
        else:
            roles.append(
                f"{role}: tensor {position.tensor}, pipeline {position.pipeline}, data {position.data}"
            )
    return f"rank {rank} ({'; '.join(roles) or 'no role'})"


# Failures.


@contextmanager
def report_failure(config: RunConfig, phases: Phases) -> Iterator[None]:
    """Report an exception of the block and end the process at once.

    Other ranks may wait for this one inside a collective, so nothing here waits for them: the launcher ends
    them when this process has ended. The exit code is 2 for errors that the user can correct, else 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        # Only outside of `report_stop`, which handles SIGINT itself.
        raise
    except Stopped as stopped:
        # State is saved and all ranks know: only the rank with the error has something to report.
        if stopped.error is not None:
            report_errors(stopped.error)
        elif stopped.code:
            # The launcher kills all ranks when the first one has failed: let the report be written before.
            time.sleep(_REPORT_SECONDS)
        _end_process(stopped.code)
    except UserError as error:
        report_errors(error)
        _end_process(EXIT_BAD_INPUT)
    except BaseException as error:
        # A full disk or a removed folder is not a bug: report a user error, without a traceback.
        user_error = _user_error(config, error)
        if user_error is not None:
            report_errors(user_error)
            _end_process(EXIT_BAD_INPUT)

        rank_text = describe_rank(config, device.rank())
        user_error = out_of_memory_error(config, error, rank_text, phases.current, phases.step)
        if user_error is not None:
            report_errors(user_error)
            _end_process(EXIT_BAD_INPUT)

        print(
            f"\n{rank_text} failed {phases.location}: {type(error).__name__}: {error}\n"
            f"{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        _end_process(1)


def _user_error(config: RunConfig, error: BaseException) -> UserError | None:
    """Return the error for the user if files or disks caused the exception, None otherwise."""
    removed = _removed_folder_error(config, error)
    if removed is not None:
        return removed
    # A missing file is more likely a bug of this package.
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return file_error(error, Path(config.run_dir))
    return None


def _removed_folder_error(config: RunConfig, error: BaseException) -> UserError | None:
    """Return the error of a run folder that was removed or moved during the run, None otherwise.

    The exception comes from the first access to the folder that failed, and does not name the reason.
    """
    removed = [folder for folder in RunFolder(config.run_dir).directories() if not folder.is_dir()]
    if not removed:
        return None
    return UserError(
        "the run folder was removed, or moved, while the run wrote to it",
        where=f"run_dir: {config.run_dir}",
        expected="a folder that exists until the run has ended",
        got=f"no directory {removed[0]}; then {first_line(error)}",
        fix="move it back and start again, which resumes from its newest checkpoint; or set another run_dir",
    )


def _end_process(code: int) -> None:
    """End the process without the interpreter's shutdown, which would wait for stuck communicators."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Signals.


class Stopped(BaseException):
    """Orderly end of this rank after the job was asked to stop and its state was saved.

    ``error``: what asked for it on this rank, None for a signal.
    """

    def __init__(self, code: int, error: UserError | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.error = error


class Stop:
    """Stop request of this rank, with a limit on the time until its step has ended and is saved.

    ``signal_number``: the signal that asked the job to stop, None if there is none.
    ``rank_text``: description of this rank in messages.
    """

    def __init__(
        self,
        rank_text: str,
        phases: Phases,
        console: int,
        seconds: float,
    ) -> None:
        self.signal_number: int | None = None
        self.rank_text = rank_text
        self._phases = phases
        self._console = console
        self._seconds = seconds
        self._can_save = False
        self._asked = 0.0
        self._main_thread = threading.main_thread().ident

    @contextmanager
    def saves(self) -> Iterator[None]:
        """Defer a requested stop to the end of a step, where `Job.stop_if_asked` saves a checkpoint."""
        self._can_save = True
        try:
            yield
        finally:
            self._can_save = False

    def handle(self, number: int) -> None:
        """Handle a signal: stop after a step that can be saved, or else (or the second time) at once."""
        is_echo = time.monotonic() - self._asked < ECHO_SECONDS
        if number == self.signal_number == signal.SIGUSR1 and is_echo:
            return

        # The second signal ends at once: its sender does not want to wait for the step.
        name = signal.Signals(number).name
        if not self._can_save or self.signal_number is not None:
            self._end(number)
        self.signal_number = number
        self._asked = time.monotonic()
        message = f"\n{self.rank_text} was asked to stop ({name}): after this step\n"
        os.write(self._console, message.encode())

        # A step that waits for a lost rank never ends.
        timer = threading.Timer(self._seconds, self._end, args=(number,))
        timer.daemon = True
        timer.start()

    def end_process(self, message: str, code: int = 1) -> None:
        """Print the message on the console and end the process at once."""
        os.write(self._console, f"\n{message}\n".encode())
        os._exit(code)

    def _end(self, number: int) -> None:
        calls = last_calls(self._main_thread)
        self.end_process(
            f"{self.rank_text} was stopped {self._phases.location}, inside {calls}",
            128 + number,
        )


@contextmanager
def report_stop(rank_text: str, phases: Phases, seconds: float) -> Iterator[Stop]:
    """Handle `SIGNALS` inside the block: save after the step, or end at once and report the phase and call.

    Messages go to the standard error of the block's start. A rank whose step does not end within ``seconds``
    ends then. Python runs signal handlers only between bytecode instructions, so none runs while a collective
    blocks: the signal wakes a thread, which handles it.
    """
    console = os.dup(2)
    read_end, write_end = os.pipe()
    # `signal.set_wakeup_fd` demands a descriptor that does not block.
    os.set_blocking(write_end, False)

    # Under nohup a process must outlive its terminal, so SIGHUP stays ignored. Not under torchrun, which
    # kills ranks that ignore the signals it forwards.
    nohup = current_launch().alone and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [number for number in SIGNALS if not (nohup and number is signal.SIGHUP)]
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in handled}
    old_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    stop = Stop(rank_text, phases, console, seconds)

    def listen() -> None:
        while received := os.read(read_end, 1):
            if received[0] in SIGNALS:
                stop.handle(received[0])

    # A daemon: it must not keep a process alive whose main thread has ended.
    listener = threading.Thread(target=listen, name="report_stop", daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        # Closing the pipe ends the listener.
        os.close(write_end)
        listener.join()
        os.close(read_end)
        os.close(console)


# The user's code: every process of a run executes the files as they were at its start.


def keep_code(job: Job) -> None:
    """Copy the user's contained code into the run folder, and load it from the copy from now on.

    Ranks that a launcher restarts use the copy from before the restart. Collective over the world.
    """
    files = _code_files(job) if job.main else None
    use_copies_of(gather_objects(files)[0])


def code_of(config: RunConfig) -> Iterator[str]:
    """Yield the names of the code that runs in contained processes: ``module:name`` or ``file.py:name``."""
    reward = config.reward
    if reward.function is not None:
        yield reward.function
    if reward.judge is not None:
        yield reward.judge.parser
        if is_function(reward.judge.template):
            yield reward.judge.template

    for settings in config.evaluation.sets.values():
        yield from settings.functions().values()

    if config.rollout.filters.function is not None:
        yield config.rollout.filters.function
    if config.rollout.environment is not None:
        yield config.rollout.environment.name


def _code_files(job: Job) -> dict[str, bytes]:
    """Return the content of the user's files by path, from the copy in use or from a new copy."""
    folder = job.folder.code
    try:
        old_name = (folder / CURRENT_CODE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        old_name = ""

    # After a restart by the launcher, the files may have been edited since the start of the run.
    if old_name and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        files = read_copy(folder / old_name)
        if files is not None:
            return files
        job.say(f"warning: {folder / old_name} was changed or is not complete; the code is copied again")

    files = read_code(code_of(job.config))
    if not files:
        return files

    # Copies are named by their content: unchanged files share the copy of the previous run.
    copy = write_copy(folder, files)
    resumes = _resumes(job.config, job.folder)
    if old_name and old_name != copy.name and resumes:
        job.say(f"warning: this run resumes with other code: {folder / old_name} was used, now {copy}")
    write_text(folder / CURRENT_CODE, copy.name + "\n")
    return files


HEARTBEAT_SECONDS = 5.0
"""Interval in which the holder updates the lock file's modification time."""
STALE_SECONDS = 30.0
"""Time without a heartbeat after which a holder on another host counts as dead: six heartbeats."""

_LOCKED = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, where only the heartbeat protects."""


@contextlib.contextmanager
def only_job_in(run_dir: Path, console: Any = None) -> Iterator[None]:
    """Lock the folder inside the block, on the one rank that writes there.

    If another process holds the operating system's lock, another job is running. Not every file system
    carries locks from host to host: there the holder's heartbeat counts, and a lock without one for
    `STALE_SECONDS` is taken over, after waiting that long for a heartbeat. Raises UserError if another job
    holds the lock.
    """
    # Never unlinked: two jobs could otherwise lock two files of one name.
    path = run_dir / "run.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    stop_heartbeat = threading.Event()
    try:
        if not _acquire(descriptor):
            raise _locked_error(path, _holder(path))
        _wait_until_stale(path, console)

        # Shown in the error of another job that finds the folder locked.
        content = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%F %T"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        heartbeat = threading.Thread(
            target=_heartbeat,
            args=(descriptor, stop_heartbeat),
            name="run_lock",
            daemon=True,
        )
        heartbeat.start()
        try:
            yield
        finally:
            stop_heartbeat.set()
            heartbeat.join()
            # For jobs on other hosts, an empty file means that the lock is free.
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int) -> bool:
    """Acquire the operating system's lock; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _wait_until_stale(path: Path, console: Any) -> None:
    """Return once the holder in the lock file counts as dead; raise UserError at its next heartbeat."""
    holder = _holder(path)
    # The operating system has released the lock of a dead holder on this host, or we had not acquired it.
    if not holder or holder.get("host") == socket.gethostname():
        return

    # Compare times of one clock: that of this host may differ from the file server's.
    last_heartbeat = path.stat().st_mtime
    remaining = STALE_SECONDS - (_file_system_time(path.parent) - last_heartbeat)
    if remaining > 0 and console is not None:
        host = holder.get("host")
        print(
            f"{path} was held on {host} just now: waiting {remaining:.0f} s",
            file=console,
            flush=True,
        )
    while remaining > 0:
        time.sleep(min(remaining, 1.0))
        if path.stat().st_mtime != last_heartbeat:
            raise _locked_error(path, holder)
        remaining -= 1.0


def _file_system_time(folder: Path) -> float:
    """Return the current time by the clock of the file system of ``folder``: the mtime of a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".run.lock.") as probe:
        return os.stat(probe.name).st_mtime


def _holder(path: Path) -> dict[str, Any]:
    """Return the host, process and start of the lock's holder, empty if the file names none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _locked_error(path: Path, holder: dict[str, Any]) -> UserError:
    values = {"process": "?", "host": "?", "since": "?"} | holder
    return UserError(
        "another job trains in this run folder",
        where=str(path.parent),
        expected="a folder that no job is writing to",
        got="process {process} on {host}, since {since}".format_map(values),
        fix="wait for that job, end it, or set another run_dir",
    )


def _heartbeat(descriptor: int, stop: threading.Event) -> None:
    """Update the lock file's modification time until stopped."""
    while not stop.wait(HEARTBEAT_SECONDS):
        # A file system that is temporarily unavailable must not end the run.
        with contextlib.suppress(OSError):
            os.utime(descriptor)
