"""Where a run's metrics go beside its own folder."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.setting import setting

TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab"}
"""Tracker -> the module of its client; `pip install megatron_rl[NAME]` brings it."""


@dataclass(frozen=True)
class LoggingConfig:
    """Send metrics, samples, the configuration, versions and hardware to experiment trackers.

    They get the metrics of metrics.jsonl under the same names, from a thread of the first rank: a run waits
    for no tracker, and goes on without one that fails, which is said once. A run that goes on after a restart
    goes on in the trackers too.
    """

    trackers: tuple[str, ...] = setting(
        ("tensorboard",),
        f"Trackers, of {', '.join(TRACKERS)}; each is told where its server is in its own way, by the "
        "environment or its login.",
        also_called={"verl": "trainer.logger", "TRL": "report_to"},
    )
    offline: bool = setting(
        False, "Have trackers write below run_dir alone, to be sent later by their own commands."
    )
    project: str = setting(
        "megatron_rl",
        "Project, or experiment, that the run belongs to in trackers.",
        also_called={"verl": "project_name", "slime": "wandb_project"},
    )
    name: str | None = setting(
        None,
        "Name of the run in trackers.",
        unset="that of run_dir",
        also_called={"verl": "experiment_name", "TRL": "run_name"},
    )
    samples: int = setting(
        8,
        "Samples of each step and evaluation that trackers get as a table; 0 sends none.",
        unit="rows",
        at_least=0,
        at_most=10_000,
    )
    prometheus: str | None = setting(
        None,
        "Address host:port where the first rank serves the newest metrics to Prometheus, as "
        'megatron_rl{metric="reward/mean"}.',
        unset="none",
    )
