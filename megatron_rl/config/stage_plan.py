"""Stages before reinforcement learning: their order, their settings, and the model that each writes.

A model gets its final name only when it is complete, so a stage has ended if its model exists. A restart
needs no further state to continue with the right stage.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.roles import ACTOR, REWARD_MODELS, ROLES, role_sections
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.stages import StageConfig


@dataclass(frozen=True)
class StagePlan:
    """Stage before reinforcement learning, with its settings, its trained role and its output model.

    Example: ``StagePlan("sft", "sft", "actor", config.sft, Path("RUN_DIR/stages/sft/hf"))``.
    """

    name: str
    """Name of the stage's metrics, log and folder."""
    where: str
    """Configuration path of the stage's section."""
    role: str
    """Section of the role that the stage trains."""
    settings: StageConfig
    """The stage's section of the configuration."""
    model: Path
    """Hugging Face checkpoint that the stage writes."""

    @property
    def has_ended(self) -> bool:
        """Return whether the stage has ended: it writes its model atomically at its end."""
        return self.model.is_dir()


def stage_plans(config: RunConfig) -> tuple[StagePlan, ...]:
    """Return the stages of a configuration in the order in which they run."""
    folder = RunFolder(config.run_dir)
    plans = []
    # Supervised training first: its result is the reference policy of preference training.
    if config.sft is not None:
        plans.append(StagePlan("sft", "sft", "actor", config.sft, folder.stage_model("sft")))
    if config.preference is not None:
        plans.append(StagePlan("dpo", "preference", "actor", config.preference, folder.stage_model("dpo")))

    for path, section in REWARD_MODELS.sections(config).items():
        if section.training is not None:
            name = path.removeprefix(f"{REWARD_MODELS.section}.")
            model = folder.reward_model(name)
            plans.append(StagePlan(f"reward_{name}", f"{path}.training", path, section.training, model))
    return tuple(plans)


# Keys and sections that only the job `train` reads.
_REINFORCEMENT = (
    "data.train",
    "data.sources",
    "data.weights",
    "reward",
    "steps",
    "placement",
    "algorithm",
    "batch",
    "actor.optimizer",
    *(spec.section for spec in ROLES if spec is not ACTOR),
    "teacher_server",
    "hybrid_engine",
    "mismatch",
    "asynchrony",
    "evaluation",
    "checkpoint.best",
    "checkpoint.best_is",
    "sft",
    "preference",
)

# Keys of the job `train` that the jobs without RL read as well, since they limit the rows of every job.
_ROW_LIMITS = ("rollout.max_response_tokens", "rollout.sampling_profiles", "batch.tokens_per_microbatch")

# Job without RL, which runs only a training stage -> configuration section of the stage.
SECTIONS = {"sft": "sft", "prefer": "preference", "reward-model": "reward.models.NAME.training"}


def job_reads(job: str, path: str) -> bool:
    """Return whether a job reads the key at ``path``. The jobs without RL, such as ``sft``, read few keys."""
    if job not in SECTIONS:
        return True
    return not _is_at_or_below(path, *_REINFORCEMENT) or _is_at_or_below(path, *_stage_keys(job))


def _stage_keys(job: str) -> tuple[str, ...]:
    """Return the keys and sections of `_REINFORCEMENT` that a job without RL, such as ``sft``, reads."""
    return (*_ROW_LIMITS, SECTIONS[job].partition(".NAME")[0])


def _is_at_or_below(path: str, *sections: str) -> bool:
    """Return whether a path is one of ``sections`` or below one of them."""
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def reset_unread_keys(config: RunConfig) -> RunConfig:
    """Return the configuration with the default value for every key that its job does not read.

    A job that runs only a training stage, such as SFT, does not read most of the keys for RL. With the
    defaults, mistakes in these keys cannot stop the job.
    """
    if config.job not in SECTIONS:
        return config
    config = _reset_section(config, config.job, "")

    # Remove reward models that are not trained: the job would load them without using them.
    models = {name: model for name, model in config.reward.models.items() if model.training is not None}
    return replace(config, reward=replace(config.reward, models=models))


def _reset_section(section: Any, job: str, prefix: str) -> Any:
    """Return a section with the default value for every key that a job does not read.

    ``prefix`` is the section's path with a dot at the end, empty for the complete configuration.
    """
    changed_values = {}
    for item in fields(section):
        path = f"{prefix}{item.name}"
        value = getattr(section, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()

        # A job reads a section if it reads a key in the section.
        is_read = job_reads(job, path) or any(_is_at_or_below(name, path) for name in _stage_keys(job))
        if not is_read and default is not MISSING:
            changed_values[item.name] = default
        elif is_dataclass(value):
            changed_values[item.name] = _reset_section(value, job, f"{path}.")
    return replace(section, **changed_values)


def pending_stages(config: RunConfig) -> tuple[StagePlan, ...]:
    """Return the stages that still have to run.

    If a stage of the actor has ended, earlier stages of the actor do not run again, even if their models were
    deleted: the ended stage started from these models.
    """
    plans = stage_plans(config)
    first_pending = 0
    for index, plan in enumerate(plans):
        if plan.role == "actor" and plan.has_ended:
            first_pending = index + 1
    return tuple(plan for plan in plans[first_pending:] if not plan.has_ended)


def existing_models(config: RunConfig) -> dict[str, str]:
    """Map each existing folder of a model or adapter that a run reads to the folder's configuration key.

    The key of a stage's output model is the path of the stage's section.
    """
    # Later stages of a role replace earlier ones.
    last_plan_by_role = {plan.role: plan for plan in stage_plans(config) if plan.has_ended}
    folders_and_keys = [(str(plan.model), plan.where) for plan in last_plan_by_role.values()]
    folders_and_keys.append((config.model.path, "model.path"))
    for section_path, section in role_sections(config).items():
        model = getattr(section, "path", None)
        lora = getattr(section, "lora", None)
        if model is not None:
            folders_and_keys.append((model, f"{section_path}.path"))
        if lora is not None and lora.path is not None:
            folders_and_keys.append((lora.path, f"{section_path}.lora.path"))

    # Insert in reverse order: if several keys have the same folder, the first key is used.
    return {folder: key for folder, key in reversed(folders_and_keys) if Path(folder).is_dir()}


def starting_model(config: RunConfig) -> str:
    """Return the path of the model that reinforcement learning starts from, after all stages of the actor."""
    return _last_model(config, [plan for plan in stage_plans(config) if plan.role == "actor"])


def current_model(config: RunConfig) -> str:
    """Return the path of the actor's newest existing model: the result of its last ended stage."""
    plans = [plan for plan in stage_plans(config) if plan.role == "actor"]
    return _last_model(config, [plan for plan in plans if plan.has_ended])


def _last_model(config: RunConfig, plans: list[StagePlan]) -> str:
    """Return the output model of the last stage in ``plans``; without stages, ``model.path``."""
    return str(plans[-1].model) if plans else config.model.path
