"""Experiment trackers that receive a run's metrics in addition to the run folder."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.setting import REMOVED, setting

# Tracker -> module of its client, which `pip install megatron_rl[NAME]` installs.
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab"}


@dataclass(frozen=True)
class LoggingConfig:
    """Experiment trackers for metrics, samples, the configuration, versions and hardware.

    A thread of the first rank sends the metrics of metrics.jsonl to each tracker, under the same names. A run
    never waits for a tracker. If a tracker fails, the run reports it once and continues without it. A resumed
    run continues its curves in the trackers.
    """

    # TensorBoard needs no server and no account.
    trackers: tuple[str, ...] = setting(
        ("tensorboard",),
        f"Trackers among {', '.join(TRACKERS)}. The client of each finds its server as usual, by environment "
        "variables or a login.",
        also_called={
            "verl": "trainer.logger",
            "TRL": "report_to",
            "slime": "use_wandb, use_tensorboard",
            "NeMo-RL": "wandb_enabled, tensorboard_enabled, mlflow_enabled, swanlab_enabled",
            "common": "wandb, tensorboard, mlflow, swanlab, log_with",
        },
        conversion={
            "trainer.logger": "a list of tensorboard, wandb, mlflow and swanlab",
            "report_to": "a list of tensorboard, wandb, mlflow and swanlab",
            "log_with": "a list of tensorboard, wandb, mlflow and swanlab",
        },
        their_values={
            "use_wandb": {True: ["wandb"], False: REMOVED},
            "use_tensorboard": {True: ["tensorboard"], False: REMOVED},
            "wandb_enabled": {True: ["wandb"], False: REMOVED},
            "tensorboard_enabled": {True: ["tensorboard"], False: REMOVED},
            "mlflow_enabled": {True: ["mlflow"], False: REMOVED},
            "swanlab_enabled": {True: ["swanlab"], False: REMOVED},
            "wandb": {True: ["wandb"], False: REMOVED},
            "tensorboard": {True: ["tensorboard"], False: REMOVED},
            "mlflow": {True: ["mlflow"], False: REMOVED},
            "swanlab": {True: ["swanlab"], False: REMOVED},
            "report_to": {"wandb": ["wandb"], "tensorboard": ["tensorboard"], "none": REMOVED},
        },
    )
    # For machines without network.
    offline: bool = setting(
        False,
        "Write trackers' files only below run_dir, from which their own commands can upload them later.",
        also_called={"slime": "wandb_mode"},
        their_values={"wandb_mode": {"offline": True, "online": False}},
    )
    project: str = setting(
        "megatron_rl",
        "Project, or experiment, of the run in trackers.",
        also_called={
            "verl": "project_name",
            "slime": "wandb_project",
            "common": "wandb_project_name, tracker_project_name",
        },
    )
    name: str | None = setting(
        None,
        "Name of the run in trackers.",
        unset="that of run_dir",
        also_called={
            "verl": "experiment_name",
            "TRL": "run_name",
            "slime": "wandb_group",
            "OpenRLHF": "wandb_run_name",
            "common": "wandb_name, wandb_run",
            "Megatron-LM": "wandb_exp_name",
        },
    )
    # All samples are in the run's folder; trackers need a few to look at.
    samples: int = setting(
        8,
        "Number of samples of each step and evaluation that trackers get as a table; 0 sends none.",
        unit="rows",
        at_least=0,
        at_most=10_000,
        also_called={
            "verl": "log_val_generations",
            "TRL": "num_completions_to_print",
            "NeMo-RL": "num_val_samples_to_print",
        },
    )
    prometheus: str | None = setting(
        None,
        "Address host:port at which the first rank serves the newest metrics to Prometheus, as "
        'megatron_rl{metric="reward/mean"}.',
        unset="none",
    )
