"""Experiment trackers: a background thread calls the trackers' clients, so that training never waits."""

from __future__ import annotations

import json
import os
import platform
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config.run_folder import RunFolder, set_aside
from megatron_rl.config.sections.logging import LoggingConfig
from megatron_rl.durable import write_text
from megatron_rl.errors import first_line

MAX_QUEUED = 10_000
"""Maximum number of queued calls. A full queue means that a tracker hangs: further calls are dropped."""
CLOSING_SECONDS = 60.0
"""Seconds to wait for queued calls at the end of a complete job."""
FAILING_SECONDS = 5.0
"""Seconds to wait for queued calls at the end of a job that ends by an exception."""
_EVENT_FILE_PREFIX = "events.out.tfevents."
"""Prefix of the names of TensorBoard's event files; the creation time in seconds follows the prefix."""

Columns = Mapping[str, Sequence[Any]]
"""Samples as a table: name of a column -> values of its rows."""


class Tracker(Protocol):
    """Client of one experiment tracker.

    The argument ``phase`` of the methods is ``train`` for reinforcement learning, or the name of a stage.
    """

    def begin_phase(self, phase: str, resumed_step: int | None) -> None:
        """Prepare for the metrics of a phase; ``resumed_step`` is the last step before a resume, or None."""
        ...

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step to the tracker; all values are finite."""
        ...

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Send samples to the tracker as a table; ``kind`` is ``step`` or ``eval_NAME``."""
        ...

    def close(self) -> None:
        """Send all queued data and end the tracker's run."""
        ...


class Trackers:
    """All configured trackers; calls are queued, and a thread executes them in order.

    A tracker that raises an exception is disabled with a warning. Only one rank may construct `Trackers`.

    ``run_info``: configuration, versions and hardware of the run.
    ``resumed``: whether to continue the trackers' runs whose ids are stored in the run folder.
    ``print_line``: prints a line on the console.
    """

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        run_info: Mapping[str, Any],
        *,
        resumed: bool,
        print_line: Callable[[str], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._run_info = run_info
        self._resumed = resumed
        self._print_line = print_line
        self._trackers: dict[str, Tracker] = {}
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MAX_QUEUED)

        # A daemon thread, so that a client that hangs does not prevent the process from ending.
        self._thread = threading.Thread(target=self._serve_calls, name="trackers", daemon=True)
        self._thread.start()

    def begin_phase(self, phase: str, resumed_step: int | None) -> None:
        """Queue `Tracker.begin_phase` for all trackers."""
        self._enqueue("begin_phase", phase, resumed_step)

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Queue `Tracker.write` for all trackers."""
        self._enqueue("write", phase, step, dict(values))

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Queue `Tracker.write_samples` for all trackers, with the first `logging.samples` rows."""
        limit = self._config.samples
        if limit:
            rows = {name: [_to_cell(value) for value in values[:limit]] for name, values in columns.items()}
            self._enqueue("write_samples", kind, step, rows)

    def close(self, time_limit: float = CLOSING_SECONDS) -> None:
        """Close the trackers after all queued calls; return after at most ``time_limit`` seconds."""
        self._enqueue("close")
        self._thread.join(time_limit)
        if self._thread.is_alive():
            self._print_line(f"warning: trackers have not received all metrics within {time_limit:g} s")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self.close(CLOSING_SECONDS if error_type is None else FAILING_SECONDS)

    def _enqueue(self, method: str, *arguments: Any) -> None:
        """Queue a call of a method of all trackers; drop it if the queue is full."""
        # A dropped call loses no data: the run folder contains all metrics and samples.
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            return

    def _serve_calls(self) -> None:
        """Open the trackers, then execute queued calls until `close`."""
        # Open the trackers in this thread, since importing a client takes seconds.
        for name in self._config.trackers:
            self._call_or_disable(name, partial(self._open_tracker, name))
        if self._config.prometheus is not None:
            self._call_or_disable(
                "prometheus",
                partial(self._open_prometheus, self._config.prometheus),
            )

        # Stop after executing `close`, the last call.
        method = ""
        while method != "close":
            method, arguments = self._queue.get()
            for name, tracker in list(self._trackers.items()):
                self._call_or_disable(name, partial(getattr(tracker, method), *arguments))

    def _call_or_disable(self, name: str, action: Callable[[], Any]) -> None:
        """Call ``action``, which uses the tracker ``name``; disable the tracker after any exception."""
        try:
            action()
        except Exception as error:
            self._trackers.pop(name, None)
            reason = first_line(error)
            self._print_line(f"warning: the tracker {name} failed and is disabled for this run: {reason}")

    def _open_tracker(self, name: str) -> None:
        """Open the tracker ``name``, and store the id of its run, which a resumed job needs."""
        if name == "tensorboard":
            self._trackers[name] = TensorBoard(self._folder)
            return

        # Store the id before the first step, so that a run that is killed early can be continued.
        ids_file = self._folder.path / "trackers.json"
        ids = self._read_ids(ids_file)
        resumed_id = ids.get(name) if self._resumed else None
        tracker = CLIENTS[name](self._config, self._folder, self._run_info, resumed_id)
        write_text(ids_file, json.dumps({**ids, name: tracker.id}, indent=1) + "\n")
        self._trackers[name] = tracker

    def _open_prometheus(self, address: str) -> None:
        """Open the Prometheus endpoint at ``address``, such as "127.0.0.1:9400"."""
        self._trackers["prometheus"] = Prometheus(address)

    def _read_ids(self, ids_file: Path) -> dict[str, Any]:
        """Return the id of this run in each tracker, by name; {} for an absent or damaged file."""
        if not ids_file.is_file():
            return {}
        try:
            ids = json.loads(ids_file.read_text(encoding="utf-8"))
        except ValueError:
            ids = None
        if not isinstance(ids, dict):
            self._print_line(f"warning: {ids_file} cannot be read: the trackers begin a new run")
            return {}
        return ids


class TensorBoard:
    """Tracker that writes event files of TensorBoard, in one folder per phase."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.tensorboard
        self._writers = {}
        _silence_writer_threads()

    def begin_phase(self, phase: str, resumed_step: int | None) -> None:
        """Open an event file for a phase, such as "train".

        A new run (without ``resumed_step``) renames the folder with an earlier run's event files. A resumed
        run continues in the same folder: TensorBoard ignores the steps after ``resumed_step`` in the existing
        files. Existing files are renamed only if their names would sort after the name of the new file.
        """
        from torch.utils.tensorboard.writer import SummaryWriter

        events_folder = self._folder / phase
        purge_step = None
        if resumed_step is None:
            set_aside(events_folder)
        else:
            _rename_event_files_if_newer(events_folder)
            purge_step = resumed_step + 1
        self._writers[phase] = SummaryWriter(str(events_folder), purge_step=purge_step)

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step as scalars of the phase's event file."""
        for name, value in values.items():
            self._writers[phase].add_scalar(name, value, step)
        self._writers[phase].flush()

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Write the samples as a text, one line of JSON per sample."""
        lines = [
            json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in _to_rows(columns)
        ]
        # In Markdown, lines that begin with four spaces are shown verbatim.
        text = "\n".join(f"    {line}" for line in lines)
        self._writers["train"].add_text(f"samples/{kind}", text, step)

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()


@lru_cache(maxsize=1)
def _silence_writer_threads() -> None:
    """Suppress tracebacks of TensorBoard's writer threads: the next write raises the same error."""
    from tensorboard.summary.writer.event_file_writer import (
        _AsyncWriterThread,
    )

    original_hook = threading.excepthook

    def report_other_failures(failure: threading.ExceptHookArgs) -> None:
        """Report an exception of any thread that is not a writer thread of TensorBoard."""
        if not isinstance(failure.thread, _AsyncWriterThread):
            original_hook(failure)

    threading.excepthook = report_other_failures


class ServerTracker:
    """Base class of trackers that send to a server, or write files for a server while offline.

    ``id``: id of the run in the tracker: ``resumed_id`` for a resumed run, otherwise a new id. ``name``: name
    of the run in the tracker.
    """

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        run_info: Mapping[str, Any],
        resumed_id: str | None,
    ) -> None:
        self.id = resumed_id or uuid.uuid4().hex[:21]
        self.name = config.name or folder.path.resolve().name
        self.run_info = run_info

    def begin_phase(self, phase: str, resumed_step: int | None) -> None:
        """Do nothing: if a resumed run repeats steps, the tracker has the metrics of these steps twice."""


class Wandb(ServerTracker):
    """Tracker for Weights & Biases; offline it writes ``wandb/`` of the run folder, for ``wandb sync``."""

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        run_info: Mapping[str, Any],
        resumed_id: str | None,
    ) -> None:
        # Imported here because the clients are optional packages.
        import wandb

        super().__init__(config, folder, run_info, resumed_id)
        self._wandb = wandb
        self._run = wandb.init(
            project=config.project,
            name=self.name,
            id=self.id,
            resume="allow",
            dir=str(folder.path),
            config=dict(self.run_info),
            allow_val_change=True,
            mode="offline" if config.offline else None,
        )
        # W&B's built-in step must increase, but a resumed run repeats steps: use a metric as the axis.
        self._run.define_metric("*", step_metric="step")

    def begin_phase(self, phase: str, resumed_step: int | None) -> None:
        """Define a separate step axis for the metrics of a stage."""
        if phase != "train":
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step to the run; each phase has a separate step axis."""
        if phase == "train":
            self._run.log({**values, "step": step})
        else:
            self._run.log({**values, f"{phase}/step": step})

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Log the samples as a table of the step."""
        rows: Any = _to_rows(columns)
        table = self._wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self._run.log({f"samples/{kind}": table, "step": step})

    def close(self) -> None:
        """Send all queued data and finish the run."""
        self._run.finish()


class Mlflow(ServerTracker):
    """Tracker for MLflow; offline it writes ``mlflow.db`` and ``mlartifacts/`` of the run folder."""

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        run_info: Mapping[str, Any],
        resumed_id: str | None,
    ) -> None:
        # Set the variable before the import: the client reads it when it is imported.
        if config.offline:
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow import MlflowClient

        super().__init__(config, folder, run_info, resumed_id)
        database: str | None = None
        artifacts: str | None = None
        if config.offline:
            run_folder = folder.path.resolve()
            database = f"sqlite:///{run_folder / 'mlflow.db'}"
            artifacts = (run_folder / "mlartifacts").as_uri()

        self._client = MlflowClient(database)
        if resumed_id is None:
            experiment_id = self._experiment_id(config.project, artifacts)
            self.id = self._client.create_run(experiment_id, run_name=self.name).info.run_id
        else:
            self._client.update_run(self.id, status="RUNNING")

        # Store versions and hardware also as tags, which MLflow can search.
        for key in ("versions", "hardware"):
            self._client.set_tag(self.id, key, json.dumps(self.run_info.get(key)))
        self._client.log_dict(self.id, dict(self.run_info), "about.json")

    def _experiment_id(self, project: str, artifacts: str | None) -> str:
        """Return the id of the project's experiment, which is created if it does not exist."""
        experiment = self._client.get_experiment_by_name(project)
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(project, artifact_location=artifacts)

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step as one batch."""
        from mlflow.entities import Metric

        milliseconds = int(time.time() * 1000)
        metrics = [Metric(name, value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics)

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Log the samples as a JSON file of the run's artifacts."""
        table = {name: list(values) for name, values in columns.items()}
        self._client.log_table(self.id, table, f"samples/{kind}_{step}.json")

    def close(self) -> None:
        """Mark the run as terminated."""
        self._client.set_terminated(self.id)


class Swanlab(ServerTracker):
    """Tracker for SwanLab; offline it writes below ``swanlab/`` of the run folder, for ``swanlab sync``."""

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        run_info: Mapping[str, Any],
        resumed_id: str | None,
    ) -> None:
        import swanlab

        # SwanLab's functions use the single run of the process.
        super().__init__(config, folder, run_info, resumed_id)
        self._swanlab = swanlab
        swanlab.init(
            project=config.project,
            name=self.name,
            id=self.id,
            resume="allow",
            log_dir=str(folder.path / "swanlab"),
            config=dict(self.run_info),
            mode="offline" if config.offline else "online",
        )

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step to the process's run."""
        self._swanlab.log(dict(values), step=step)

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Log the samples as a table of the step."""
        table = self._swanlab.echarts.Table()
        table.add(list(columns), _to_rows(columns))
        self._swanlab.log({f"samples/{kind}": table}, step=step)

    def close(self) -> None:
        """Send all queued data and finish the run."""
        self._swanlab.finish()


CLIENTS: Mapping[str, Callable[..., Any]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "swanlab": Swanlab,
}
"""Name in `logging.trackers` -> class of the tracker, for trackers with servers."""


class Prometheus:
    """Tracker that serves the newest value of every metric to Prometheus, labelled with the metric's name."""

    def __init__(self, address: str) -> None:
        from prometheus_client import (
            CollectorRegistry,
            Gauge,
            start_http_server,
        )

        # A separate registry, without the default metrics of the Python process.
        registry = CollectorRegistry()
        self._values = Gauge(
            "megatron_rl",
            "The newest value of a metric.",
            ["metric"],
            registry=registry,
        )
        interface, _, port = address.rpartition(":")
        self._server, _ = start_http_server(int(port), interface, registry)

    def begin_phase(self, phase: str, resumed_step: int | None) -> None:
        """Do nothing: the endpoint serves the newest values of any phase."""

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Replace the served values by the metrics of a step, and serve its number as ``PHASE/at_step``."""
        for name, value in values.items():
            self._values.labels(name).set(value)
        self._values.labels(f"{phase}/at_step").set(float(step))

    def write_samples(self, kind: str, step: int, columns: Columns) -> None:
        """Ignore samples: Prometheus stores numbers only."""

    def close(self) -> None:
        """Shut down the endpoint."""
        self._server.shutdown()


def describe_host() -> dict[str, Any]:
    """Return this host's name, processor and number of cores."""
    # Only Linux on x86 lists the processor's model; elsewhere, use the name of the architecture.
    processor = platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {
        "host": platform.node(),
        "processor": processor,
        "cores": os.cpu_count(),
    }


def _to_rows(columns: Columns) -> list[list[Any]]:
    """Convert a table from columns to rows: one list of values per sample."""
    return [list(row) for row in zip(*columns.values(), strict=True)]


def _to_cell(value: Any) -> Any:
    """Return numbers and texts unchanged; convert other values to JSON text for trackers that need it."""
    if isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value, default=str)


def _rename_event_files_if_newer(events_folder: Path) -> None:
    """Rename the existing event files if their names do not sort before the name of a new file.

    TensorBoard reads the files in the order of their names, which contain the time in seconds. A clock can be
    set back, and two runs can start in the same second.
    """
    event_files = sorted(events_folder.glob(_EVENT_FILE_PREFIX + "*"))
    if not event_files or event_files[-1].name < f"{_EVENT_FILE_PREFIX}{int(time.time()):010d}":
        return

    for number, file in enumerate(event_files):
        suffix = file.name.removeprefix(_EVENT_FILE_PREFIX).partition(".")[2]
        file.rename(file.with_name(f"{_EVENT_FILE_PREFIX}{number:010d}.{suffix}"))
