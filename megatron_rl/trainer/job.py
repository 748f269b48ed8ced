"""A job on this rank: run folder, console, stop signals, failures, and the lock of the run folder.

A failed rank never waits for the other ranks, which may be waiting for it inside a collective. It reports its
phase and step and ends its process immediately; the launcher then ends the other ranks. Only one job at a
time can lock a run folder.
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

from megatron_rl.config.load import describe_changes, dump, to_plain, without_secrets
from megatron_rl.config.placement import accelerated_job, role_layouts
from megatron_rl.config.run_folder import RunFolder, folder_of_checkpoint
from megatron_rl.config.schema import RunConfig
from megatron_rl.contained.process import escape_unprintable
from megatron_rl.data.token_files import TokenFiles
from megatron_rl.distributed import device, watch
from megatron_rl.distributed.exchange import barrier, gather_objects
from megatron_rl.distributed.watch import last_calls
from megatron_rl.durable import file_error, write_text
from megatron_rl.errors import EXIT_BAD_INPUT, UserError, first_line
from megatron_rl.launcher import current_launch, report_errors
from megatron_rl.rewards.judgement import is_function_path
from megatron_rl.shapes.accelerator import ENVIRONMENT, accelerator_defaults
from megatron_rl.shapes.layout import problems
from megatron_rl.trainer.logging import redirect_output
from megatron_rl.trainer.loop import Phases
from megatron_rl.trainer.memory_report import out_of_memory_error
from megatron_rl.trainer.starts import Start, describe_current_start, write_start
from megatron_rl.trainer.trackers import Trackers, describe_host
from megatron_rl.user_code import (
    activate_copies,
    read_copy,
    read_user_code,
    write_copy,
)
from megatron_rl.versions import DISTRIBUTIONS_AFFECTING_RESULTS, installed_versions

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that request a stop: from launchers, terminals, and schedulers before they preempt a job."""

_REPORT_SECONDS = 1.0
"""Seconds that the other ranks of a stopped job wait, so that one rank can report the error."""
REPEATED_SIGNAL_SECONDS = 10.0
"""Seconds in which another SIGUSR1 counts as the same request and is ignored: Slurm signals every process of
a job step, and torchrun forwards the signal, too."""

CURRENT_COPY_FILE = "current"
"""Name of a file in the folder of code copies; the file contains the name of the copy in use."""


@dataclass(frozen=True)
class Job:
    """Configuration and resources of a job on this rank: run folder, console, stop request and trackers."""

    config: RunConfig
    """Resolved configuration."""
    folder: RunFolder
    """Folder with everything that the run writes."""
    console: TextIO
    """Stream to the user's console on the main rank, to the rank's log file on others."""
    phases: Phases
    """Current phase and step of this rank."""
    is_main: bool
    """Whether this is rank 0, the only rank that writes the run folder, the console and the trackers."""
    stop: StopRequest
    """State of this rank's stop request."""
    trackers: Trackers | None = None
    """Experiment trackers on the main rank, None on others."""
    first_start: datetime | None = None
    """Time of the run's first start. Chat templates use it as the current time, so that a resumed run has the
    same prompts."""
    start: Start | None = None
    """Command, revision, versions and hardware of this job, on the main rank."""

    @property
    def token_files(self) -> TokenFiles:
        """Return the storage of tokenised data in the run folder."""
        return TokenFiles(self.folder.tokens, self.print)

    def print(self, text: str) -> None:
        """Print a message on the main rank's console, and indent its lines after the first.

        Without the indent, a message from user code, such as a reward function's, could look like lines that
        the run printed.
        """
        if self.is_main:
            self.console.write(escape_unprintable(text).replace("\n", "\n    ") + "\n")
            self.console.flush()

    def stop_if_requested(self, save: Callable[[int], Path], error: UserError | None = None) -> None:
        """Save the current step and raise Stopped, if any rank has received a stop signal or has an error.

        Call it after each step. All ranks gather the requests, so that they end after the same step.
        ``save``: function that writes a checkpoint of a step and returns its path. ``error``: error with
        which this rank stops the run, such as the error of a health rule, or None. The run can then be
        resumed. Collective over the world.
        """
        requests = gather_objects((self.stop.signal_number, error is not None))
        signals = [signal_number for signal_number, _ in requests if signal_number is not None]
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
        self.print(f"stopped by {reason} after step {self.phases.step}: saved {path}; exit code {code}")
        # No rank may end before all have written their files of the checkpoint.
        barrier()
        raise Stopped(code, error)

    def join_ranks(self) -> None:
        """Start communication between the ranks, then write the run folder's configuration.

        Collective over the world.
        """
        if self.config.deterministic:
            device.use_deterministic_kernels()

        # Set before the first use of the device, when CUDA and PyTorch's allocator read these variables.
        layouts = role_layouts(self.config, device.world_size())
        accelerated = accelerated_job(self.config, layouts)
        device.set_environment(accelerator_defaults(accelerated, ENVIRONMENT))

        # From here on, the hang detector ends ranks that wait for an unresponsive rank.
        watch.join_job(
            self.config.rank_timeout,
            lambda: f"{self.stop.rank_text} {self.phases.location}",
            self.stop.end_process,
            self.folder.flight_records,
        )

        # The main rank compares the settings with an earlier job's settings before it overwrites them.
        if self.is_main:
            for changed_setting in self._changed_settings():
                self.print(f"warning: this run resumes with a changed setting: {changed_setting}")
            self.folder.write_config(dump(without_secrets(self.config)))
            # `first_start` is the time of the run's first launch, and `start` the record of this launch.
            if self.first_start is not None:
                self.folder.write_first_start(self.first_start)
            if self.start is not None:
                write_start(self.folder, self.start, resumed=_resumes_run(self.config, self.folder))
            # `start_over` renames the checkpoints of an earlier run in this folder.
            if self.config.checkpoint.resume == "never":
                self.folder.start_over()
        # Other ranks must not write checkpoints before `start_over` has renamed the folders.
        barrier()

    def _changed_settings(self) -> list[str]:
        """Return a description of each setting that differs from the run being resumed."""
        resume = self.config.checkpoint.resume
        folder = self.folder
        if resume not in ("auto", "never"):
            folder = folder_of_checkpoint(Path(resume))
        if resume == "never" or folder is None or not (folder.config.is_file() and folder.has_begun()):
            return []
        return describe_changes(
            folder.config.read_text(encoding="utf-8", errors="replace"),
            self.config,
        )


@contextmanager
def open_job(config: RunConfig, explicit_keys: Sequence[str] = ()) -> Iterator[Job]:
    """Lock the run folder, redirect output to the rank's log and yield the job.

    ``explicit_keys``: configuration keys that the user has set. The record of this launch in ``starts.json``
    contains them. If the block raises an exception, the exception is reported with the rank, its roles and
    its phase; then this process ends, and thereby the job. Without an exception, the ranks destroy their
    process groups after the block. Collective over the world.
    """
    # The ranks cannot communicate yet, so each of them creates the folders that do not exist.
    phases = Phases()
    folder = RunFolder(config.run_dir).create()
    is_main = device.rank() == 0
    rank_text = describe_rank(config, device.rank())
    stop_seconds = config.checkpoint.stop_seconds
    assert stop_seconds is not None, "the configuration is resolved"
    with (
        # Outermost, because a rank can be stopped while it reports a failure.
        handle_stop_signals(rank_text, phases, stop_seconds) as stop,
        report_failure(config, phases),
        lock_run_folder(folder.path, sys.stdout) if is_main else nullcontext(),
        redirect_output(folder.rank_log(device.rank()), is_main) as console,
    ):
        start = None
        if is_main:
            versions = installed_versions(DISTRIBUTIONS_AFFECTING_RESULTS)
            start = describe_current_start(versions, _describe_hardware(), explicit_keys)
        # Innermost, so that trackers are closed before the console.
        with open_trackers(config, folder, console) if is_main else nullcontext() as trackers:
            yield Job(
                config,
                folder,
                console,
                phases,
                is_main,
                stop,
                trackers,
                _first_start_time(config, folder),
                start,
            )

        # Not after an exception: `report_failure` ends a failed rank's process immediately.
        watch.leave_job()


def _first_start_time(config: RunConfig, folder: RunFolder) -> datetime:
    """Return the time of the run's first start, equal on all ranks.

    Process groups do not exist yet, so ranks read the time from the run folder. A new run in an existing
    folder uses the start of the current day instead.
    """
    now = datetime.now().replace(microsecond=0)
    resume = config.checkpoint.resume

    # With "never", a time in the folder belongs to an earlier run. Ranks start at different seconds, so
    # without a shared file they can only agree on the day.
    if resume == "never":
        return now.replace(hour=0, minute=0, second=0)

    first_start = None
    if resume != "auto":
        resumed_folder = folder_of_checkpoint(Path(resume))
        if resumed_folder is not None:
            first_start = resumed_folder.read_first_start()
    return first_start or folder.store_first_start(now)


def open_trackers(config: RunConfig, folder: RunFolder, console: TextIO) -> Trackers:
    """Open the trackers of a job; if the job resumes, they append to the tracked run."""

    def print_line(text: str) -> None:
        """Print a line on the console."""
        console.write(text + "\n")
        console.flush()

    # Information that explains later why the metrics of two runs differ.
    run_info = {
        "configuration": to_plain(without_secrets(config)),
        "versions": installed_versions(DISTRIBUTIONS_AFFECTING_RESULTS),
        "hardware": _describe_hardware(),
    }
    return Trackers(
        config.logging, folder, run_info, resumed=_resumes_run(config, folder), print_line=print_line
    )


def _describe_hardware() -> dict[str, Any]:
    """Return the name and processor of this host, the device of this rank and the number of ranks."""
    return {**describe_host(), "device": device.product_name(), "ranks": device.world_size()}


def _resumes_run(config: RunConfig, folder: RunFolder) -> bool:
    """Return whether a job resumes the run that its run folder contains, instead of starting a new one."""
    return folder.has_begun() and config.checkpoint.resume != "never"


def describe_rank(config: RunConfig, rank: int) -> str:
    """Describe a rank in messages: its roles, and its parallel coordinates in each role.

    Example: ``rank 1 (actor: tensor 0, pipeline 1, data 0; rollout: replica 0, tensor 1)``.
    """
    role_texts = []
    for role, layout in role_layouts(config, device.world_size()).items():
        # `export` runs on any number of ranks, for which the layouts of the run's roles may be invalid.
        if rank not in layout.ranks or problems(layout):
            continue

        position = layout.coordinates(rank)
        if role == "rollout":
            role_texts.append(f"rollout: replica {position.data}, tensor {position.tensor}")
        else:
            role_texts.append(
                f"{role}: tensor {position.tensor}, pipeline {position.pipeline}, data {position.data}"
            )
    return f"rank {rank} ({'; '.join(role_texts) or 'no role'})"


# Failures.


@contextmanager
def report_failure(config: RunConfig, phases: Phases) -> Iterator[None]:
    """Report an exception of the block and end this process immediately.

    Other ranks may wait for this one inside a collective, so nothing here waits for them. The launcher ends
    them after this process has ended. The exit code is 2 for errors that the user can correct, else 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        # Python raises this only outside `handle_stop_signals`, which handles SIGINT.
        raise
    except Stopped as stopped:
        # All ranks have saved their state. Only the rank with the error reports it.
        if stopped.error is not None:
            report_errors(stopped.error)
        elif stopped.code:
            # The launcher kills all ranks when the first rank ends with an error: wait until the rank with
            # the error has reported it.
            time.sleep(_REPORT_SECONDS)
        _end_process(stopped.code)
    except BaseException as error:
        user_error = _user_error(config, phases, error)
        if user_error is not None:
            report_errors(user_error)
            _end_process(EXIT_BAD_INPUT)

        print(
            f"\n{describe_rank(config, device.rank())} failed {phases.location}: "
            f"{type(error).__name__}: {error}\n{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        _end_process(1)


def _user_error(config: RunConfig, phases: Phases, error: BaseException) -> UserError | None:
    """Return the error to report to the user without a traceback, or None if the exception is a bug."""
    if isinstance(error, UserError):
        return error

    # A full disk, a removed folder or too little device memory is not a bug.
    removed_folder = _removed_folder_error(config, error)
    if removed_folder is not None:
        return removed_folder
    # A missing file is more likely a bug of this package than a user's mistake.
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return file_error(error, Path(config.run_dir))
    rank_text = describe_rank(config, device.rank())
    return out_of_memory_error(config, error, rank_text, phases.current, phases.step)


def _removed_folder_error(config: RunConfig, error: BaseException) -> UserError | None:
    """Return a UserError if the run folder was removed or moved during the run, otherwise None.

    ``error``: exception of the first failed access to the folder, whose text may not mention the folder.
    """
    missing_folders = [folder for folder in RunFolder(config.run_dir).directories() if not folder.is_dir()]
    if not missing_folders:
        return None
    return UserError(
        "the run folder was removed, or moved, while the run wrote to it",
        where=f"run_dir: {config.run_dir}",
        expected="a folder that exists until the run has ended",
        got=f"no directory {missing_folders[0]}; then {first_line(error)}",
        fix="move it back and start again, which resumes from its newest checkpoint; or set another run_dir",
    )


def _end_process(code: int) -> None:
    """End this process without the interpreter's shutdown, which would wait for blocked communicators."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Signals.


class Stopped(BaseException):
    """Exception that ends this rank after a stop request, once the job's state has been saved.

    ``code``: exit code. ``error``: this rank's error that requested the stop, or None.
    """

    def __init__(self, code: int, error: UserError | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.error = error


class StopRequest:
    """State of this rank's stop request, and handler of the signals that request a stop.

    ``signal_number``: the signal that requested a stop, or None without a request.
    ``rank_text``: description of this rank in messages.

    Arguments:
        phases: current phase and step of this rank.
        console_descriptor: file descriptor to which messages are written.
        stop_seconds: maximum time from a request until its step has ended and is saved.
    """

    def __init__(
        self,
        rank_text: str,
        phases: Phases,
        console_descriptor: int,
        stop_seconds: float,
    ) -> None:
        self.signal_number: int | None = None
        self.rank_text = rank_text
        self._phases = phases
        self._console_descriptor = console_descriptor
        self._stop_seconds = stop_seconds
        self._can_save = False
        self._last_request_time = 0.0
        self._main_thread = threading.main_thread().ident

    @contextmanager
    def defer_stops(self) -> Iterator[None]:
        """Inside the block, defer a requested stop to the end of the step.

        At the end of the step, `Job.stop_if_requested` saves a checkpoint and stops the run. Outside the
        block, a stop signal ends the process immediately.
        """
        self._can_save = True
        try:
            yield
        finally:
            self._can_save = False

    def handle_signal(self, signal_number: int) -> None:
        """Handle a signal: request a stop after the step, or end the process immediately.

        The process ends immediately if the step cannot be saved, or a stop has already been requested. A
        second SIGUSR1 within `REPEATED_SIGNAL_SECONDS` is ignored.
        """
        # Slurm and torchrun may both deliver the same SIGUSR1. The second delivery is not a second request.
        is_repeated = time.monotonic() - self._last_request_time < REPEATED_SIGNAL_SECONDS
        if signal_number == self.signal_number == signal.SIGUSR1 and is_repeated:
            return

        # A user who sends a second signal does not want to wait for the step.
        name = signal.Signals(signal_number).name
        if not self._can_save or self.signal_number is not None:
            self._end_after_signal(signal_number)
        self.signal_number = signal_number
        self._last_request_time = time.monotonic()
        message = f"\n{self.rank_text} was asked to stop ({name}), and will stop after this step\n"
        os.write(self._console_descriptor, message.encode())

        # Limit the time until the process ends: a step that waits for a lost rank never ends.
        timer = threading.Timer(self._stop_seconds, self._end_after_signal, args=(signal_number,))
        timer.daemon = True
        timer.start()

    def end_process(self, message: str, code: int = 1) -> None:
        """Print the message on the console and end the process immediately."""
        os.write(self._console_descriptor, f"\n{message}\n".encode())
        os._exit(code)

    def _end_after_signal(self, signal_number: int) -> None:
        """End the process because of a signal; print its phase and the main thread's innermost calls."""
        calls = last_calls(self._main_thread)
        self.end_process(
            f"{self.rank_text} was stopped {self._phases.location}, inside {calls}",
            128 + signal_number,
        )


@contextmanager
def handle_stop_signals(rank_text: str, phases: Phases, stop_seconds: float) -> Iterator[StopRequest]:
    """Handle `STOP_SIGNALS` inside the block: request a stop after the step, or end the process immediately.

    If the step does not end within ``stop_seconds`` after a request, the process ends. Python runs signal
    handlers only between bytecode instructions, so no handler would run while a collective blocks the main
    thread. Instead, a signal wakes a separate thread, which handles it.
    """
    # Messages use the current standard error, even if it is redirected later.
    console_descriptor = os.dup(2)
    read_end, write_end = os.pipe()
    # `signal.set_wakeup_fd` requires a non-blocking descriptor.
    os.set_blocking(write_end, False)

    # Under nohup a process must outlive its terminal, so SIGHUP remains ignored. This does not apply under
    # torchrun, which kills ranks that ignore the signals that it forwards.
    ignores_hangup = current_launch().alone and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    old_handlers: dict[signal.Signals, Any] = {}
    for signal_number in STOP_SIGNALS:
        if signal_number is signal.SIGHUP and ignores_hangup:
            continue
        # The handler does nothing: Python writes the signal's number into the pipe.
        old_handlers[signal_number] = signal.signal(signal_number, lambda *_: None)
    old_wakeup_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    stop = StopRequest(rank_text, phases, console_descriptor, stop_seconds)

    def listen() -> None:
        """Handle each signal whose number arrives in the pipe, until the pipe is closed."""
        while received := os.read(read_end, 1):
            if received[0] in STOP_SIGNALS:
                stop.handle_signal(received[0])

    # A daemon thread does not keep the process alive after its main thread has ended.
    listener = threading.Thread(target=listen, name="stop_signals", daemon=True)
    listener.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(old_wakeup_descriptor)
        for signal_number, handler in old_handlers.items():
            signal.signal(signal_number, handler)
        # Closing the pipe ends the listener.
        os.close(write_end)
        listener.join()
        os.close(read_end)
        os.close(console_descriptor)


# The user's code: every process of a run executes copies of the files, made at the run's start.


def copy_code(job: Job) -> None:
    """Copy the user's code for sandboxed processes into the run folder; later imports use the copy.

    After a restart by the launcher, ranks use the copy from before the restart. Collective over the world.
    """
    files = _load_code_files(job) if job.is_main else None
    activate_copies(gather_objects(files)[0])


def contained_functions(config: RunConfig) -> Iterator[str]:
    """Yield the paths of the user's functions that run in contained (sandboxed) processes.

    A path has the form ``module:name`` or ``file.py:name``.
    """
    reward = config.reward
    if reward.function is not None:
        yield reward.function
    yield from config.data.source_rewards.values()
    if reward.judge is not None:
        yield reward.judge.parser
        if is_function_path(reward.judge.template):
            yield reward.judge.template

    for settings in config.evaluation.sets.values():
        yield from settings.user_functions().values()

    if config.rollout.filters.function is not None:
        yield config.rollout.filters.function
    if config.rollout.environment is not None:
        yield config.rollout.environment.name


def _load_code_files(job: Job) -> dict[str, bytes]:
    """Return the content of the user's code files: path -> content.

    The files are copied into the run folder. After a restart of the ranks by torchrun, the files are not read
    again: the result is the content of this copy. If the copy was changed or is incomplete, the files are
    copied again.
    """
    folder = job.folder.code
    try:
        used_copy = (folder / CURRENT_COPY_FILE).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        used_copy = ""

    # torchrun counts its restarts in this variable. The files may have been edited since the first start.
    if used_copy and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        files = read_copy(folder / used_copy)
        if files is not None:
            return files
        job.print(f"warning: {folder / used_copy} was changed or is not complete; the code is copied again")

    files = read_user_code(contained_functions(job.config))
    if not files:
        return files

    # A copy's name is derived from its content, so that unchanged files share the copy of the previous run.
    new_copy = write_copy(folder, files)
    resumes_run = _resumes_run(job.config, job.folder)
    if used_copy and used_copy != new_copy.name and resumes_run:
        job.print(f"warning: this run resumes with other code: {folder / used_copy} was used, now {new_copy}")
    write_text(folder / CURRENT_COPY_FILE, new_copy.name + "\n")
    return files


HEARTBEAT_SECONDS = 5.0
"""Seconds between two updates of the lock file's modification time by the job that holds the lock."""
STALE_SECONDS = 30.0
"""Seconds without a heartbeat after which a job on another host counts as dead: six heartbeats."""

_LOCKED_ERRNOS = (errno.EACCES, errno.EAGAIN)
"""Error numbers of `flock` when another process has the lock."""
_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of `flock` on file systems without locks, where only heartbeats show that a job runs."""


@contextlib.contextmanager
def lock_run_folder(run_dir: Path, console: Any = None) -> Iterator[None]:
    """Lock the run folder inside the block; raise UserError if another job has locked it.

    The lock is a file lock (``flock``) on a file in the folder. Not every file system shares file locks
    between hosts, so the job also sends heartbeats: it updates the file's modification time regularly. If the
    file names a job on another host, this function first waits `STALE_SECONDS` for a heartbeat of that job.

    ``console``: stream for a message about the wait, or None. Only the main rank calls this function.
    """
    # The file is never removed: otherwise two jobs could lock two different files of the same name.
    path = run_dir / "run.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    stop_heartbeat = threading.Event()
    try:
        if not _acquire_lock(descriptor):
            raise _locked_error(path, _read_lock_holder(path))
        _wait_until_stale(path, console)

        # The error of another job that cannot lock the folder shows these values.
        content = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%F %T"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(content).encode(), 0)
        heartbeat = threading.Thread(
            target=_send_heartbeats,
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
            # An empty file means, for jobs on other hosts, that the folder is not locked.
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire_lock(descriptor: int) -> bool:
    """Acquire a file lock (``flock``) without waiting; return False if another process holds it.

    Returns True without a lock on a file system that does not support file locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED_ERRNOS:
            return False
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
    return True


def _wait_until_stale(path: Path, console: Any) -> None:
    """Wait until the job in the lock file has sent no heartbeat for `STALE_SECONDS`.

    A heartbeat is an update of the file's modification time. If the job sends one during the wait, the
    function raises UserError. It returns immediately if the file names no job, or a job on this host.
    ``console``: stream for a message about the wait, or None.
    """
    holder = _read_lock_holder(path)
    # A job on this host is dead: otherwise it would hold the operating system's lock, which we have acquired.
    if not holder or holder.get("host") == socket.gethostname():
        return

    # Compare two times of the file server's clock, which may differ from this host's.
    last_heartbeat = path.stat().st_mtime
    remaining = STALE_SECONDS - (_file_system_time(path.parent) - last_heartbeat)
    if remaining > 0 and console is not None:
        host = holder.get("host")
        print(
            f"{path} was locked by a job on {host}: waiting {remaining:.0f} s for its next heartbeat",
            file=console,
            flush=True,
        )
    while remaining > 0:
        time.sleep(min(remaining, 1.0))
        if path.stat().st_mtime != last_heartbeat:
            raise _locked_error(path, holder)
        remaining -= 1.0


def _file_system_time(folder: Path) -> float:
    """Return the current time on the clock of the file system: the modification time of a new file."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".run.lock.") as new_file:
        return os.stat(new_file.name).st_mtime


def _read_lock_holder(path: Path) -> dict[str, Any]:
    """Read host, process and start time of the job in the lock file; {} if the file names no job."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _locked_error(path: Path, holder: dict[str, Any]) -> UserError:
    """Return the error for a run folder that the job ``holder`` has locked."""
    holder_values = {"process": "?", "host": "?", "since": "?"} | holder
    return UserError(
        "another job trains in this run folder",
        where=str(path.parent),
        expected="a folder that no job is writing to",
        got="process {process} on {host}, since {since}".format_map(holder_values),
        fix="wait for that job, end it, or set another run_dir",
    )


def _send_heartbeats(lock_descriptor: int, stop: threading.Event) -> None:
    """Update the lock file's modification time every `HEARTBEAT_SECONDS` until ``stop`` is set."""
    while not stop.wait(HEARTBEAT_SECONDS):
        # A file system that is temporarily unavailable must not end the run.
        with contextlib.suppress(OSError):
            os.utime(lock_descriptor)
