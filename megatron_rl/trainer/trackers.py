"""What experiment trackers are told of a run, each through its own client, from a thread of its own."""

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

MOST_WAITING = 10_000
CLOSING_SECONDS, FAILING_SECONDS = 60.0, 5.0
"""Time that trackers have for what still waits at the end of a job, and where it ends by an exception."""
_EVENTS = "events.out.tfevents."

Columns = Mapping[str, Sequence[Any]]


class Tracker(Protocol):
    """Take what a run measures; ``phase`` is ``train`` or the name of a stage."""

    def begin(self, phase: str, resumed_step: int | None) -> None:
        """Expect steps of a phase, from after ``resumed_step``, or from its start where that is None."""
        ...

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Take the finite metrics of a step."""
        ...

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """Take samples as a table; ``kind`` is ``step`` or ``eval_NAME``."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class Trackers:
    """Pass on to every tracker of the settings what it is told, in order, without waiting for any.

    One that raises is left out from then on, and ``say`` is told once. ``about`` is configuration, versions
    and hardware; ``resumed`` says whether trackers go on with the run that the folder names. Make it on one
    rank only.
    """

    def __init__(
        self,
        config: LoggingConfig,
        folder: RunFolder,
        about: Mapping[str, Any],
        *,
        resumed: bool,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._folder, self._about, self._say = config, folder, about, say
        self._resumed = resumed
        self._trackers: dict[str, Tracker] = {}
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._serve, name="trackers", daemon=True)
        self._thread.start()

    def begin(self, phase: str, resumed_step: int | None) -> None:
        """See `Tracker.begin`."""
        self._put("begin", phase, resumed_step)

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.write`."""
        self._put("write", phase, step, dict(values))

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """Pass on the first samples of a table, as many as the settings say."""
        if self._config.samples:
            first = {
                name: [_cell(v) for v in values[: self._config.samples]] for name, values in columns.items()
            }
            self._put("samples", kind, step, first)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Wait until everything is passed on, so many seconds at most."""
        self._put("close")
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"warning: trackers have not taken everything within {seconds:g} s")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(CLOSING_SECONDS if kind is None else FAILING_SECONDS)

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            return  # a tracker hangs: the run's own files have everything

    def _serve(self) -> None:
        wanted: dict[str, Callable[[], Tracker]] = {
            name: lambda name=name: self._open(name) for name in self._config.trackers
        }
        if self._config.prometheus is not None:
            address = self._config.prometheus
            wanted["prometheus"] = lambda: Prometheus(address)
        for name, make in wanted.items():
            self._attempt(name, lambda name=name, make=make: self._trackers.__setitem__(name, make()))
        method = ""
        while method != "close":
            method, arguments = self._queue.get()
            for name, tracker in list(self._trackers.items()):
                self._attempt(name, partial(getattr(tracker, method), *arguments))

    def _attempt(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever a client raises: the run is worth more than its tracker
            self._trackers.pop(name, None)
            reason = first_line(error)
            self._say(f"warning: the tracker {name} failed, and gets nothing more of this run: {reason}")

    def _open(self, name: str) -> Tracker:
        if name == "tensorboard":
            return TensorBoard(self._folder)
        known = self._folder.path / "trackers.json"
        ids = self._ids(known)
        given = ids.get(name) if self._resumed else None
        tracker = CLIENTS[name](self._config, self._folder, self._about, given)
        write_text(known, json.dumps({**ids, name: tracker.id}, indent=1) + "\n")
        return tracker

    def _ids(self, known: Path) -> dict[str, Any]:
        """Return the ids under which trackers know the run; without them they begin a new one."""
        if not known.is_file():
            return {}
        try:
            ids = json.loads(known.read_text(encoding="utf-8"))
        except ValueError:
            ids = None
        if not isinstance(ids, dict):
            self._say(f"warning: {known} cannot be read: trackers begin a new run of their own")
            return {}
        return ids


class TensorBoard:
    """Write event files, in a folder for each phase."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._writers = folder.tensorboard, {}
        _tell_once()

    def begin(self, phase: str, resumed_step: int | None) -> None:
        """See `Tracker.begin`; the events of an earlier run are renamed, not lost."""
        from torch.utils.tensorboard.writer import SummaryWriter

        events = self._folder / phase
        if resumed_step is None:
            set_aside(events)
        else:
            _keep_order(events)
        purge = None if resumed_step is None else resumed_step + 1
        self._writers[phase] = SummaryWriter(str(events), purge_step=purge)

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.write`."""
        for name, value in values.items():
            self._writers[phase].add_scalar(name, value, step)
        self._writers[phase].flush()

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """See `Tracker.samples`."""
        rows = [
            json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in _rows(columns)
        ]
        # Lines that begin with four spaces are shown as they are.
        self._writers["train"].add_text(f"samples/{kind}", "\n".join(f"    {row}" for row in rows), step)

    def close(self) -> None:
        """See `Tracker.close`."""
        for writer in self._writers.values():
            writer.close()


@lru_cache(maxsize=1)
def _tell_once() -> None:
    """Have no traceback of TensorBoard's writing threads: what ended one is raised by the next write, too."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    tell = threading.excepthook

    def tell_others(failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.thread, _AsyncWriterThread):
            tell(failure)

    threading.excepthook = tell_others


class Client:
    """Hold what trackers with servers share: the run's ``id``, given where it goes on."""

    def __init__(
        self, config: LoggingConfig, folder: RunFolder, about: Mapping[str, Any], given: str | None
    ) -> None:
        self.id = given or uuid.uuid4().hex[:21]
        self.name = config.name or folder.path.resolve().name
        self.about = about

    def begin(self, phase: str, resumed_step: int | None) -> None:
        """See `Tracker.begin`; steps that were sent before are sent again."""


class Wandb(Client):
    """Send to Weights & Biases; offline below ``wandb/``, for ``wandb sync``."""

    def __init__(
        self, config: LoggingConfig, folder: RunFolder, about: Mapping[str, Any], given: str | None
    ) -> None:
        import wandb

        super().__init__(config, folder, about, given)
        self._wandb = wandb
        self._run = wandb.init(
            project=config.project,
            name=self.name,
            id=self.id,
            resume="allow",
            dir=str(folder.path),
            config=dict(self.about),
            allow_val_change=True,
            mode="offline" if config.offline else None,
        )
        self._run.define_metric("*", step_metric="step")

    def begin(self, phase: str, resumed_step: int | None) -> None:
        """See `Tracker.begin`; a stage has an axis of its own."""
        if phase != "train":
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.write`."""
        self._run.log({**values, "step" if phase == "train" else f"{phase}/step": step})

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """See `Tracker.samples`."""
        rows: Any = _rows(columns)
        table = self._wandb.Table(columns=list(columns), data=rows, allow_mixed_types=True)
        self._run.log({f"samples/{kind}": table, "step": step})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


class Mlflow(Client):
    """Send to MLflow; offline into ``mlflow.db`` and ``mlartifacts/`` of the run folder."""

    def __init__(
        self, config: LoggingConfig, folder: RunFolder, about: Mapping[str, Any], given: str | None
    ) -> None:
        if config.offline:
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when the client is imported
        from mlflow import MlflowClient

        super().__init__(config, folder, about, given)
        place = folder.path.resolve()
        self._client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}" if config.offline else None)
        if given is None:
            experiment = self._client.get_experiment_by_name(config.project)
            artifacts = (place / "mlartifacts").as_uri() if config.offline else None
            experiment_id = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(config.project, artifact_location=artifacts)
            )
            self.id = self._client.create_run(experiment_id, run_name=self.name).info.run_id
        else:
            self._client.update_run(self.id, status="RUNNING")
        for key in ("versions", "hardware"):
            self._client.set_tag(self.id, key, json.dumps(self.about.get(key)))
        self._client.log_dict(self.id, dict(self.about), "about.json")

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.write`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(name, value, now, step) for name, value in values.items()])

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """See `Tracker.samples`."""
        table = {name: list(values) for name, values in columns.items()}
        self._client.log_table(self.id, table, f"samples/{kind}_{step}.json")

    def close(self) -> None:
        """See `Tracker.close`."""
        self._client.set_terminated(self.id)


class Swanlab(Client):
    """Send to SwanLab; offline below ``swanlab/``, for ``swanlab sync``."""

    def __init__(
        self, config: LoggingConfig, folder: RunFolder, about: Mapping[str, Any], given: str | None
    ) -> None:
        import swanlab

        super().__init__(config, folder, about, given)
        self._swanlab = swanlab
        swanlab.init(
            project=config.project,
            name=self.name,
            id=self.id,
            resume="allow",
            log_dir=str(folder.path / "swanlab"),
            config=dict(self.about),
            mode="offline" if config.offline else "online",
        )

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.write`."""
        self._swanlab.log(dict(values), step=step)

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """See `Tracker.samples`."""
        table = self._swanlab.echarts.Table()
        table.add(list(columns), _rows(columns))
        self._swanlab.log({f"samples/{kind}": table}, step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._swanlab.finish()


CLIENTS: Mapping[str, Callable[..., Any]] = {"wandb": Wandb, "mlflow": Mlflow, "swanlab": Swanlab}


class Prometheus:
    """Serve the newest value of every metric, with its own name as a label."""

    def __init__(self, address: str) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        registry = CollectorRegistry()
        self._values = Gauge("megatron_rl", "The newest value of a metric.", ["metric"], registry=registry)
        host, _, port = address.rpartition(":")
        self._server, _ = start_http_server(int(port), host, registry)

    def begin(self, phase: str, resumed_step: int | None) -> None:
        """See `Tracker.begin`."""

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.write`."""
        for name, value in {**values, f"{phase}/at_step": float(step)}.items():
            self._values.labels(name).set(value)

    def samples(self, kind: str, step: int, columns: Columns) -> None:
        """See `Tracker.samples`; there is no place for them."""

    def close(self) -> None:
        """See `Tracker.close`."""
        self._server.shutdown()


def host() -> dict[str, Any]:
    """Return this host's name and processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "host": platform.node(),
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
    }


def _rows(columns: Columns) -> list[list[Any]]:
    return [list(row) for row in zip(*columns.values(), strict=True)]


def _cell(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)


def _keep_order(events: Path) -> None:
    """Number event files anew where the next one would not come after them.

    TensorBoard reads them in the order of their names, which begin with the time; clocks are set back, and
    two starts may fall into one second.
    """
    files = sorted(events.glob(_EVENTS + "*"))
    if not files or files[-1].name < f"{_EVENTS}{int(time.time()):010d}":
        return
    for number, file in enumerate(files):
        rest = file.name.removeprefix(_EVENTS).partition(".")[2]
        file.rename(file.with_name(f"{_EVENTS}{number:010d}.{rest}"))
