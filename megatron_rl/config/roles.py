"""Table of the roles of a run: name, configuration section and work in a step.

A role is a row of `ROLES`. All code that loops over roles reads this row: placement, memory estimate,
`check`, the planner, the build, and the score phase. A new frozen role that computes a number per token needs
one row here and one section in `config.schema`.

Two role names are literals in the package, since a run has exactly one role of each name. ``actor`` is the
trained policy; its layout and model are the defaults of the other roles. ``rollout`` is the engine that
samples; it has no Megatron model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import (
    ActorConfig,
    CriticConfig,
    ReferenceConfig,
    TaskTeacherConfig,
    TeacherConfig,
)
from megatron_rl.config.sections.rewards import RewardModelConfig
from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.config.setting import with_value

RoleConfig = (
    ActorConfig | CriticConfig | ReferenceConfig | TeacherConfig | TaskTeacherConfig | RewardModelConfig
)

# Output layer of a policy, which computes the log-prob of each token and the entropy of the distribution.
VOCABULARY = "vocabulary"

# Scalar output layer, one number per token, of a critic or a reward model.
NUMBER = "number"

# The role can use the actor's model with its adapters switched off, which is the actor before training.
INITIAL = "initial"

# The role can have its own adapters on the base weights of the actor.
ADAPTED = "adapted"


@dataclass(frozen=True)
class AlgorithmNeed:
    """Property of an algorithm that requires a role.

    Example: a critic is needed by algorithms whose ``needs_critic`` is true.
    """

    attribute: str
    """Attribute of `Algorithm` that is true if the algorithm needs the role."""
    reason: str
    """Reason why a run has the role although its section is not set; ``{name}`` is the algorithm's name."""
    unused_warning: str
    """Warning of a run that has the role although its algorithm does not need it."""
    missing_reason: str
    """Property of an algorithm that does not need the role, such as "without a KL penalty".

    ``{advantage}`` is the class of the algorithm's advantage estimator.
    """
    fix_hint: str
    """Fix of that warning: how to get an algorithm that needs the role, such as "set algorithm.kl=loss"."""


@dataclass(frozen=True)
class RoleSpec:
    """Description of one role, or of a family of named roles such as the reward models.

    Example: ``REFERENCE`` is the frozen policy of the section ``reference``, which computes
    ``ref_log_probs``.
    """

    name: str
    """Name in layouts, estimates and texts; with `named` each model is ``name.NAME``."""
    section: str
    """Configuration path of the role's section; with `named`, of the mapping from NAME to section."""
    section_class: type
    """Class of the section; an instance without arguments is the default section."""
    phase: str
    """Phase of a step in which the role runs inference: generate, reward or score."""
    head: str | None
    """Output layer of the role's Megatron model, `VOCABULARY` or `NUMBER`; None without a Megatron model."""
    outputs: tuple[str, ...] = ()
    """Names in `Scores` of the head's outputs per token; empty for a reward model, whose output is NAME."""
    top_outputs: tuple[str, ...] = ()
    """Columns for the ids and log-probs of the most likely tokens, for algorithms that read them."""
    trains: bool = False
    """Whether a step trains the role's weights; otherwise they are frozen during reinforcement learning."""
    named: bool = False
    """Whether the section is a mapping of any number of models by name."""
    by_task: bool = False
    """Whether each model computes only the rows of its own tasks; all of them write to the same columns."""
    metric_prefix: str = ""
    """Prefix of the role's metrics; empty for the role's name."""
    need: AlgorithmNeed | None = None
    """Property of an algorithm that requires the role; None if the role exists only if its section is set."""
    placement: str | None = None
    """Placement preset that places the role on the second half of the ranks, separate from the actor."""
    shares: str | None = None
    """How the role can share weights with the actor, `INITIAL` or `ADAPTED`; None if it cannot."""

    def sections(self, config: RunConfig) -> Mapping[str, Any]:
        """Return the sections of ``config`` that configure the role, by their configuration paths.

        For example ``{"critic": config.critic}``. A role with ``named`` can have several sections, such as
        ``reward.models.NAME``.
        """
        configured = attrgetter(self.section)(config)
        if self.named:
            return {f"{self.section}.{name}": section for name, section in configured.items()}
        return {} if configured is None else {self.section: configured}

    def is_needed_by(self, algorithm: Any) -> bool:
        """Return whether an algorithm requires the role."""
        return self.need is not None and bool(getattr(algorithm, self.need.attribute, False))


ACTOR = RoleSpec(
    name="actor",
    section="actor",
    section_class=ActorConfig,
    phase="score",
    head=VOCABULARY,
    outputs=("old_log_probs", "entropy"),
    trains=True,
    metric_prefix="policy",
)
CRITIC = RoleSpec(
    name="critic",
    section="critic",
    section_class=CriticConfig,
    phase="score",
    head=NUMBER,
    outputs=("values",),
    trains=True,
    need=AlgorithmNeed(
        attribute="needs_critic",
        reason="the algorithm {name} has a critic",
        unused_warning="a critic is built and trained, but the algorithm does not use it",
        missing_reason="with the advantage {advantage}",
        fix_hint="choose an algorithm with one, such as algorithm.name=ppo",
    ),
    placement="split",
    shares=ADAPTED,
)
REFERENCE = RoleSpec(
    name="reference",
    section="reference",
    section_class=ReferenceConfig,
    phase="score",
    head=VOCABULARY,
    outputs=("ref_log_probs", "ref_entropy"),
    need=AlgorithmNeed(
        attribute="needs_reference",
        reason="algorithm.kl needs a reference policy",
        unused_warning="the reference policy is loaded but the algorithm does not use it",
        missing_reason="without a KL penalty",
        fix_hint="set algorithm.kl=loss",
    ),
    shares=INITIAL,
)
TEACHER = RoleSpec(
    name="teacher",
    section="teacher",
    section_class=TeacherConfig,
    phase="score",
    head=VOCABULARY,
    outputs=("teacher_log_probs", "teacher_entropy"),
    top_outputs=("teacher_top_ids", "teacher_top_log_probs"),
    need=AlgorithmNeed(
        attribute="needs_teacher",
        reason="algorithm.distillation needs a teacher",
        unused_warning="the teacher is loaded but the algorithm does not use it",
        missing_reason="without a distillation",
        fix_hint="set algorithm.distillation=reverse_kl",
    ),
    placement="split",
)
TASK_TEACHERS = replace(
    TEACHER,
    name="teachers",
    section="teachers",
    section_class=TaskTeacherConfig,
    named=True,
    by_task=True,
)
REWARD_MODELS = RoleSpec(
    name="reward",
    section="reward.models",
    section_class=RewardModelConfig,
    phase="reward",
    head=NUMBER,
    named=True,
    metric_prefix="reward_model",
    placement="split",
)
ROLLOUT = RoleSpec(
    name="rollout",
    section="rollout",
    section_class=RolloutConfig,
    phase="generate",
    head=None,
    placement="standalone",
)

# Every role, in the order of layouts and printed tables. Roles on shared ranks also work in this order: all
# ranks must call collectives in the same order.
ROLES = (ACTOR, CRITIC, REFERENCE, TEACHER, TASK_TEACHERS, REWARD_MODELS, ROLLOUT)

# The roles with a Megatron model.
MODEL_ROLES = tuple(spec for spec in ROLES if spec.head is not None)


def teacher_of_task(config: RunConfig) -> dict[str, str]:
    """Map each task with a separate teacher to the role of its teacher, ``teachers.NAME``."""
    roles: dict[str, str] = {}
    for name, section in config.teachers.items():
        # A teacher without tasks teaches the task of its own name.
        for task in section.tasks or (name,):
            roles[task] = f"{TASK_TEACHERS.name}.{name}"
    return roles


def spec_of(role: str) -> RoleSpec:
    """Return the spec of a role by its name, such as ``critic`` or ``reward.judge``."""
    for spec in ROLES:
        if role == spec.name or (spec.named and role.startswith(f"{spec.name}.")):
            return spec
    raise KeyError(role)


def spec_at(path: str) -> RoleSpec:
    """Return the spec of the role whose section is at a configuration path."""
    return spec_of(role_of(path))


def role_sections(config: RunConfig) -> dict[str, RoleConfig]:
    """Map the configuration path of each role with a model to its section, the actor first."""
    sections: dict[str, Any] = {}
    for spec in MODEL_ROLES:
        sections |= spec.sections(config)
    return sections


def learner_sections(config: RunConfig) -> dict[str, ActorConfig | CriticConfig]:
    """Map the configuration path of each role that a step trains to its section, the actor first."""
    sections: dict[str, Any] = {}
    for spec in MODEL_ROLES:
        if spec.trains:
            sections |= spec.sections(config)
    return sections


def with_role_sections(config: RunConfig, change: Callable[[str, Any], Any]) -> RunConfig:
    """Replace the section of each role that has a model by the result of ``change(path, section)``."""
    sections = {path: change(path, section) for path, section in role_sections(config).items()}
    for path, section in sections.items():
        config = with_value(config, path, section)
    return config


def explicit_model_paths(config: RunConfig) -> dict[str, str | None]:
    """Map the section path of each role except the actor to the role's model path.

    A model path of None means the actor's model.
    """
    paths = {}
    for path, section in role_sections(config).items():
        if not isinstance(section, ActorConfig):
            paths[path] = section.path
    return paths


def role_of(path: str) -> str:
    """Return the role whose section or layout is at a configuration path; the inverse of `section_of`.

    Example:
        >>> role_of("reward.models.judge"), role_of("critic.layout")
        ('reward.judge', 'critic')
    """
    path = path.removesuffix(".layout")
    for spec in ROLES:
        if spec.named and path.startswith(f"{spec.section}."):
            return f"{spec.name}.{path.removeprefix(f'{spec.section}.')}"
    return path


def section_of(role: str) -> str:
    """Return the configuration path of a role's section; the inverse of `role_of`."""
    for spec in ROLES:
        if spec.named and role.startswith(f"{spec.name}."):
            return f"{spec.section}.{role.removeprefix(f'{spec.name}.')}"
    return role


def layout_path_of(role: str) -> str:
    """Return the configuration path of a role's layout."""
    if spec_of(role).head is None:
        return section_of(role)  # the engine's parallel sizes are keys of its section, without a `layout`
    return f"{section_of(role)}.layout"
