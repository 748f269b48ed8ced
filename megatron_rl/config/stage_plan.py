"""The stages before reinforcement learning: which there are, in which order, and what each leaves."""

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
    """Hold what the configuration says of one stage.

    ``name`` names its metrics, its log and its folder, ``where`` is the configuration path of its settings,
    ``role`` the role that learns. ``model`` is the Hugging Face checkpoint that it leaves.
    """

    name: str
    where: str
    role: str
    settings: StageConfig
    model: Path

    @property
    def ended(self) -> bool:
        """Return whether the stage has left its model, which it writes whole or not at all."""
        return self.model.is_dir()


def stage_plans(config: RunConfig) -> tuple[StagePlan, ...]:
    """Return the stages that a configuration asks for, in the order in which they run."""
    folder = RunFolder(config.run_dir)
    plans = [
        StagePlan(name, where, "actor", settings, folder.stage_model(name))
        for name, where, settings in (("sft", "sft", config.sft), ("dpo", "preference", config.preference))
        if settings is not None
    ]
    for path, model in REWARD_MODELS.sections(config).items():
        if model.training is not None:
            name = path.removeprefix(f"{REWARD_MODELS.section}.")
            left = folder.reward_model(name)
            plans.append(StagePlan(f"reward_{name}", f"{path}.training", path, model.training, left))
    return tuple(plans)


_REINFORCEMENT = (
    "data.train",
    "reward",
    "steps",
    "placement",
    "algorithm",
    "batch",
    "actor.optimizer",
    *(spec.section for spec in ROLES if spec is not ACTOR and not spec.named),
    "hybrid_engine",
    "mismatch",
    "asynchrony",
    "evaluation",
    "sft",
    "preference",
)
_OF_ROWS = ("rollout.max_response_tokens", "rollout.sampling_profiles", "batch.tokens_per_microbatch")
"""Settings below those of reinforcement learning that bound rows wherever a job learns."""
SECTIONS = {"sft": "sft", "prefer": "preference", "reward-model": "reward.models.NAME.training"}
"""The job of one stage -> the section that describes the stage."""


def has_use(job: str, path: str) -> bool:
    """Say whether a job reads the setting at a path."""
    return job not in SECTIONS or not _below(path, *_REINFORCEMENT) or _below(path, *_of_stage(job))


def _of_stage(job: str) -> tuple[str, ...]:
    """Return what the job of one stage reads of the settings of reinforcement learning."""
    return (*_OF_ROWS, SECTIONS[job].partition(".NAME")[0])


def _below(path: str, *sections: str) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def for_job(config: RunConfig) -> RunConfig:
    """Return the configuration with the defaults of all that its job has no use for.

    So a stage alone needs no more than its own settings, and is refused for none but these.
    """
    if config.job not in SECTIONS:
        return config
    config = _with_defaults(config, config.job, "")
    models = {name: model for name, model in config.reward.models.items() if model.training is not None}
    return replace(config, reward=replace(config.reward, models=models))


def _with_defaults(section: Any, job: str, prefix: str) -> Any:
    """Return a section with the defaults of what a job of one stage has no use for."""
    values = {}
    for item in fields(section):
        path, value = f"{prefix}{item.name}", getattr(section, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        used = has_use(job, path) or any(_below(name, path) for name in _of_stage(job))
        if not used and default is not MISSING:
            values[item.name] = default
        elif is_dataclass(value):
            values[item.name] = _with_defaults(value, job, f"{path}.")
    return replace(section, **values)


def pending_stages(config: RunConfig) -> tuple[StagePlan, ...]:
    """Return the stages that are still to run: of the actor's, those after the last that has ended."""
    plans = stage_plans(config)
    ended = [index for index, plan in enumerate(plans) if plan.role == "actor" and plan.ended]
    begin = ended[-1] + 1 if ended else 0
    return tuple(plan for plan in plans[begin:] if not plan.ended)


def models_read(config: RunConfig) -> dict[str, str]:
    """Return the existing folders of models and adapters that a run reads, each with the key that names it.

    The model that a stage has left is named by the key of the stage.
    """
    ended = {plan.role: plan for plan in stage_plans(config) if plan.ended}  # the last one of each role
    named = [(str(plan.model), plan.where) for plan in ended.values()]
    named.append((config.model.path, "model.path"))
    for key, section in role_sections(config).items():
        path = getattr(section, "path", None)
        lora = getattr(section, "lora", None)
        if path is not None:
            named.append((path, f"{key}.path"))
        if lora is not None and lora.path is not None:
            named.append((lora.path, f"{key}.lora.path"))
    return {path: key for path, key in reversed(named) if Path(path).is_dir()}


def starting_model(config: RunConfig) -> str:
    """Return the model that reinforcement learning starts from, once all stages of the actor have ended."""
    return _last_model(config, [plan for plan in stage_plans(config) if plan.role == "actor"])


def present_model(config: RunConfig) -> str:
    """Return the model that the actor starts from now: what its last stage that has ended has left."""
    return _last_model(config, [plan for plan in stage_plans(config) if plan.role == "actor" and plan.ended])


def _last_model(config: RunConfig, plans: list[StagePlan]) -> str:
    return str(plans[-1].model) if plans else config.model.path
