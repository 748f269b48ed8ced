"""Check a complete configuration before anything is built, and report every error and warning together.

Rules run from cheap to expensive, and a value with an error is *invalid* for the rules after it, so that one
mistake is one error and not a cascade. The order is single values, pass-through settings, layouts and world
size, files, and the model. Megatron validates its own settings at the same time, in another process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.algorithms.lookup import write_pieces
from megatron_rl.check.data import DatasetStats
from megatron_rl.check.engine.arguments import (
    check_engine_arguments,
    check_user_engine,
    host_engine_errors,
)
from megatron_rl.check.engine.sampling_order import check_sampling_order
from megatron_rl.check.files import FileFindings
from megatron_rl.check.inputs import Inputs, check_inputs, check_path_lengths
from megatron_rl.check.model.accelerator import (
    AppliedDefault,
    accelerated_roles,
    applied_defaults,
    plain_expert_errors,
)
from megatron_rl.check.model.adapters import check_adapted_model, check_lora, idle_adapter_errors
from megatron_rl.check.model.megatron_lm import with_megatron_models
from megatron_rl.check.model.megatron_settings import (
    RUN_TRIAL_TIMEOUT,
    TRIAL_TIMEOUT,
    Trial,
    TrialRole,
    check_model_settings,
    check_optimizer,
    check_routing,
)
from megatron_rl.check.packages import (
    check_attention,
    logging_errors,
    missing_package_errors,
    split_import_errors,
)
from megatron_rl.check.rehearsal import try_imports
from megatron_rl.check.resume import checkpoint_mismatch_errors
from megatron_rl.check.sizes import (
    check_checkpoint,
    check_layout,
    check_lengths,
    check_memory,
    check_memory_target,
    check_microbatch_budget,
    check_top_tokens,
    check_world,
    smallest_valid_world,
    with_gpu_memory,
)
from megatron_rl.check.stages import check_preference_loss, check_row_lengths
from megatron_rl.check.unknown_names import with_suggestions
from megatron_rl.check.values import check_algorithm, check_values
from megatron_rl.check.warnings import check_warnings
from megatron_rl.config.adapters import adapters_of
from megatron_rl.config.budget import RankMemory, memory_plan
from megatron_rl.config.derive import BatchPlan, batch_plan, default_attention, resolve, smallest_world
from megatron_rl.config.load import LoadedConfig, flatten, load
from megatron_rl.config.placement import (
    explicit_megatron_settings,
    layout_sections,
    megatron_sections,
    megatron_settings,
    role_layouts,
    shared_weights,
)
from megatron_rl.config.roles import NUMBER, layout_path_of, learner_sections, role_of, section_of, spec_of
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.config.setting import with_value
from megatron_rl.config.source import DEFAULT, Origin, Section
from megatron_rl.config.stage_plan import job_reads, reset_unread_keys, stage_plans
from megatron_rl.config.token_budget import estimate_tokens
from megatron_rl.errors import UserError, UserErrors, range_error
from megatron_rl.launcher import process_rank
from megatron_rl.shapes.layout import (
    ParallelLayout,
    engine_problems,
    expert_training_problems,
    trainer_problems,
)
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.shapes.traffic import WeightTraffic

_PROVIDER_KEYS = ("model.provider", "model.weights")
"""Keys of user code that no later rule imports, so `try_imports` reports the exceptions of this code."""

_USER_CODE_KEY = re.compile(r"algorithm\..+|preference\.loss|rollout\.engine|model\.provider|model\.weights")
"""Pattern of the keys that may name the user's code that runs inside the training processes."""

_KEY = re.compile(r"[a-z0-9_.]+")
"""Pattern of a dotted configuration key; `UserError.where` may also be a file or a command."""


@dataclass(frozen=True)
class CheckReport:
    """Errors and warnings of `check_config`, and the configuration with its derived values and plans.

    Attributes:
        config: The configuration, with every derived value filled in if it has no errors.
        world_size: Number of processes that the configuration was checked against.
        errors: Every error, each with the file and line that wrote its value.
        warnings: Settings that are valid but probably a mistake.
        origins: Key -> origin of its value: a file, an override, a default or a derivation.
        layouts: Role -> its layout. ``layouts``, ``batch``, ``memory`` and ``sync`` are None if there are
            errors.
        batch: Sizes of a step's batch; None for a job without reinforcement learning.
        shape: Shape of the actor's model, or None if not available.
        shapes: Role -> shape of its model.
        models: Role -> config.json of its model.
        memory: Memory of each rank in each phase.
        sync: Bytes that one weight sync moves; None for engines outside the ranks.
        records: Number of training records, or None if they were not counted.
        data_stats: Statistics of the data sets that were read.
        algorithm: The constructed algorithm, or None for an unknown name.
        files_missing: Whether some files do not exist yet but are not errors: a preparation command makes
            them, or the check allows missing files.
        untried: Whether Megatron has not validated its settings: the validation was skipped, failed or timed
            out.
        accelerator: Defaults that apply because the run uses accelerators; empty for a run on hosts.
    """

    config: RunConfig
    world_size: int
    errors: tuple[UserError, ...]
    warnings: tuple[UserError, ...]
    origins: Mapping[str, Origin]
    layouts: Mapping[str, ParallelLayout] | None = None
    batch: BatchPlan | None = None
    shape: ModelShape | None = None
    shapes: Mapping[str, ModelShape] = field(default_factory=dict[str, ModelShape])
    models: Mapping[str, Path] = field(default_factory=dict[str, Path])
    memory: tuple[RankMemory, ...] = ()
    sync: WeightTraffic | None = None
    records: int | None = None
    data_stats: tuple[DatasetStats, ...] = ()
    algorithm: Algorithm | None = None
    files_missing: bool = False
    untried: bool = False
    accelerator: tuple[AppliedDefault, ...] = ()

    def valid(self) -> RunConfig:
        """Return the configuration, including derived values; raise UserErrors if the check found errors."""
        if self.errors:
            raise UserErrors(self.errors)
        return self.config

    def explicit_keys(self) -> list[str]:
        """Return the configuration keys that a file or an override has set."""
        return [key for key, origin in self.origins.items() if origin.kind in ("file", "override")]


@dataclass
class _Check:
    """State of one check: the findings so far, and the keys whose values are invalid.

    Attributes:
        config: The configuration to check.
        launched_processes: Number of processes that the launcher started, or None without a launcher.
        errors: Errors of rules on the configuration; `Inputs` has the errors of files.
        warnings: Warnings of rules on the configuration.
        untried_warnings: Warnings that Megatron has not validated its settings.
        invalid: Keys whose value has an error.
        tree: The configuration as the user wrote it.
        accelerator: Defaults that apply because the run uses accelerators.
        on_other_machines: Whether the run will be on other machines. If so, packages that this machine lacks
            are not errors.
        derived: Key -> reason, for values that are derived before the rules are applied.
    """

    config: RunConfig
    launched_processes: int | None
    errors: list[UserError] = field(default_factory=list)
    warnings: list[UserError] = field(default_factory=list)
    untried_warnings: list[UserError] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    tree: Section = field(default_factory=Section)
    accelerator: tuple[AppliedDefault, ...] = ()
    on_other_machines: bool = False
    derived: dict[str, str] = field(default_factory=dict)

    def add_errors(self, errors: Iterable[UserError]) -> None:
        """Record errors, except for values at or below a key that is already invalid."""
        for error in errors:
            key = error.where or ""
            is_reported = any(key == path or key.startswith(f"{path}.") for path in self.invalid)
            if not is_reported:
                self.errors.append(error)

    def add_invalidating_errors(self, errors: Iterable[UserError]) -> None:
        """Record errors, and mark their keys as invalid, so that later rules skip the values."""
        errors = list(errors)
        self.add_errors(errors)
        self.invalid.update(error.where for error in errors if error.where)

    def is_valid(self, *keys: str) -> bool:
        """Return whether the values at the keys, and all values below and above them, are valid."""
        for invalid_key in self.invalid:
            for key in keys:
                is_below = invalid_key.startswith(f"{key}.")
                is_above = key.startswith(f"{invalid_key}.")
                if invalid_key == key or is_below or is_above:
                    return False
        return True


class _Plans(NamedTuple):
    """Resolved configuration of a check without errors, and the plans computed from it.

    ``reasons`` maps the key of each derived value to its reason; `CheckReport` describes the other fields.
    """

    config: RunConfig
    reasons: Mapping[str, str]
    layouts: Mapping[str, ParallelLayout]
    batch: BatchPlan | None
    shapes: Mapping[str, ModelShape]
    models: Mapping[str, Path]
    memory: tuple[RankMemory, ...]
    sync: WeightTraffic | None
    records: int | None


def check_file(
    path: str | Path,
    overrides: Iterable[str] = (),
    world_size: int | None = None,
    *,
    training: bool = False,
    without_files: bool = False,
    on_other_machines: bool = False,
) -> CheckReport:
    """Load and check a configuration file; raise UserErrors if the file cannot be read.

    ``overrides`` have the form ``key=value``. ``on_other_machines``: whether the run will be on other
    machines than this one. `check_config` describes the other arguments.
    """
    loaded = load(Path(path), overrides, with_weights=training)

    # Models that ship with a configuration file are in a folder `models` beside the file or one level up.
    model_folders: list[Path] = []
    for file in loaded.files:
        model_folders.append(file.parent / "models")
        model_folders.append(file.parent.parent / "models")
    shipped_models = None
    for folder in model_folders:
        if folder.is_dir():
            shipped_models = folder
            break

    # Megatron validates its settings in a separate process, which takes seconds. Start it only on rank 0 of a
    # job: with the time limit 0, `check_config` skips this validation.
    validation_timeout = 0.0
    if process_rank() == 0:
        validation_timeout = RUN_TRIAL_TIMEOUT if training else TRIAL_TIMEOUT

    return check_config(
        loaded,
        world_size,
        training=training,
        without_files=without_files,
        elsewhere=on_other_machines,
        shipped_models=shipped_models,
        patience=validation_timeout,
    )


def check_config(
    config: RunConfig | LoadedConfig,
    world_size: int | None = None,
    *,
    training: bool = False,
    without_files: bool = False,
    elsewhere: bool = False,
    shipped_models: Path | None = None,
    patience: float = TRIAL_TIMEOUT,
) -> CheckReport:
    """Check a configuration against a number of processes; report mistakes instead of raising them.

    Args:
        config: The configuration. A loaded one has the file and line of each value, which errors then show.
        world_size: Number of processes. By default the configuration's own, or the smallest that fits.
        training: Whether this is the check at the start of a run, on each of its ranks: files that
            ``prepare`` has not made yet are errors then, and rules that the run itself applies are skipped.
        without_files: Whether missing files are warnings.
        elsewhere: Whether the run will be on other machines. If so, missing packages of the run are not
            reported, and a package that the user's code imports and this machine lacks is only a warning.
        shipped_models: Folder with NAME/config.json, for models that are not on this machine.
        patience: Maximum seconds that Megatron may take to validate its settings; 0 skips the validation.

    Raises:
        UserErrors: The configuration could not be read at all.
    """
    # A configuration that was built in Python has no origins to show.
    loaded = config if isinstance(config, LoadedConfig) else LoadedConfig(config, None, {})
    if loaded.config is None:
        raise UserErrors(loaded.errors)

    # Reset the settings that the job does not read: mistakes in them are not reported.
    config = reset_unread_keys(loaded.config)
    config, megatron_origins, megatron_errors = with_megatron_models(
        config, loaded.broken, allow_missing=without_files
    )

    origins = {key: origin for key, origin in loaded.origins.items() if job_reads(config.job, key)}
    origins |= megatron_origins

    # Single values first: no later rule is applied to an invalid value.
    check = _Check(config, world_size, tree=loaded.tree, on_other_machines=elsewhere)
    check.errors.extend(loaded.errors)
    check.invalid.update(loaded.broken)
    for key, errors in megatron_errors.items():
        check.errors.extend(errors)
        check.invalid.add(key)
    check.add_invalidating_errors(check_values(config))
    check.add_invalidating_errors(check_memory_target(config))

    # Memory and defaults depend on the layers' implementation. For a run on other GPUs, assume Transformer
    # Engine, which launch/setup.sh installs there, even if this machine lacks it.
    on_other_gpus = elsewhere or (config.gpu is not None and not training)
    if on_other_gpus and config.model.attention is None:
        with_attention: RunConfig = with_value(config, "model.attention", "transformer_engine")
        config = with_attention
        check.config = with_attention
        check.derived["model.attention"] = (
            f"gpu={config.gpu}: launch/setup.sh --gpu installs Transformer Engine"
        )
    trial_keys = _check_megatron_settings(check, on_other_gpus)

    # Pass-through settings, paths, and the user's code in training processes.
    if check.is_valid("rollout.vllm"):
        check.add_invalidating_errors(check_engine_arguments(config.rollout.vllm))
    check.add_invalidating_errors(check_path_lengths(config))
    if not training:  # the run itself imports this code
        check.add_invalidating_errors(
            try_imports(_user_code_paths(check), report_exceptions_for=_PROVIDER_KEYS)
        )

    # At the start of a run every rank checks, so only the check before the run sends requests to servers.
    files = FileFindings(prepare=config.prepare, allow_missing=without_files, hub=loaded.hub)
    inputs = Inputs(config, files, check.is_valid, shipped_models, before_run=not training)
    if patience <= 0:
        trial_keys = []
    trial = Trial(trial_keys, patience)
    try:
        return _check_with_inputs(check, inputs, trial, origins, training)
    finally:
        trial.stop()


def _user_code_paths(check: _Check) -> dict[str, str]:
    """Return the user's functions and classes that run in training processes: key -> ``file.py:Name``."""
    object_paths: dict[str, str] = {}
    for key, config_value in flatten(check.config).items():
        is_object_path = isinstance(config_value, str) and ":" in config_value
        if is_object_path and _USER_CODE_KEY.fullmatch(key) and check.is_valid(key):
            object_paths[key] = config_value
    return object_paths


def _check_megatron_settings(check: _Check, on_other_machines: bool) -> list[str]:
    """Check Megatron's settings of every role; return the keys that Megatron itself has to validate.

    ``on_other_machines`` is whether the run will be on other machines.
    """
    config = check.config

    # Model settings of each role.
    sections = dict(megatron_sections(config))
    for key, settings in sections.items():
        if settings and check.is_valid(key):
            check.add_invalidating_errors(
                check_model_settings(settings, key, on_other_machines=on_other_machines)
            )

    # Optimizers of learners and of stages.
    for key, section in learner_sections(config).items():
        if check.is_valid(f"{key}.optimizer", f"{key}.ddp"):
            check.add_invalidating_errors(
                check_optimizer(
                    section.optimizer,
                    f"{key}.optimizer",
                    section.ddp,
                    on_other_machines=on_other_machines,
                )
            )
            sections[f"{key}.optimizer.megatron"] = section.optimizer.megatron
            sections[f"{key}.ddp"] = section.ddp
    for plan in stage_plans(config):
        key = f"{plan.where}.optimizer"
        if check.is_valid(key):
            check.add_invalidating_errors(
                check_optimizer(plan.settings.optimizer, key, {}, on_other_machines=on_other_machines)
            )

    # With an error above, skip Megatron's own validation: it would report the same mistake again.
    if not check.is_valid(*sections):
        return []
    return [key for key, settings in sections.items() if settings]


def _check_with_inputs(
    check: _Check, inputs: Inputs, trial: Trial, origins: Mapping[str, Origin], training: bool
) -> CheckReport:
    """Apply the rules that compare several values or read files, and build the report.

    ``trial`` is the process in which Megatron validates its settings in parallel. ``training`` is whether
    this is the check at the start of a run.
    """
    # The algorithm, the user's code, and the ranks.
    config = check.config
    algorithm = None
    if check.is_valid("algorithm", "rollout.max_response_tokens"):
        algorithm, algorithm_errors = check_algorithm(config)
        check.add_errors(algorithm_errors)

    if config.preference is not None and check.is_valid("preference.loss"):
        check.add_errors(check_preference_loss(config.preference.loss))
    if check.is_valid("rollout.engine"):
        check.add_errors(check_user_engine(config.rollout.engine))

    world_size = _check_world_size(check)
    layouts = _check_layouts(check, world_size)
    check.add_errors(check_sampling_order(config, layouts, algorithm))

    # Files, functions and servers: the rules below need the shapes that are read here.
    check_inputs(inputs)

    # The checkpoint to resume from, the distillation, and loggers.
    if check.is_valid("checkpoint.resume", "run_dir"):
        check.add_errors(checkpoint_mismatch_errors(config, layouts, inputs.shape, algorithm))
    if algorithm is not None and inputs.shape is not None:
        check.add_errors(check_top_tokens(algorithm, inputs.shape))
    check.add_errors(logging_errors(config))

    # A package that this machine lacks is an error at the start of a run, and before that a warning: the
    # check may run on a different machine than the training.
    if not check.on_other_machines:
        package_errors = list(missing_package_errors(config))
        if "model.attention" not in check.derived:
            package_errors = [*check_attention(config), *package_errors]
        if training:
            check.errors.extend(package_errors)
        else:
            check.warnings.extend(package_errors)

    # User code may import packages that only the run's machines have: such a failure is a warning here.
    if check.on_other_machines:
        for errors in (check.errors, inputs.errors):
            import_errors, other_errors = split_import_errors(errors)
            errors[:] = other_errors
            check.warnings.extend(import_errors)

    # Rules that need the shapes of the models.
    _check_against_models(check, inputs, layouts)
    shapes = dict(inputs.shapes)
    if inputs.shape is not None:
        shapes = {"actor": inputs.shape, **shapes}
    roles = accelerated_roles(config, layouts, shapes, training)
    check.add_errors(plain_expert_errors(roles))
    check.accelerator = applied_defaults(config, roles)
    if config.job == TRAIN and "rollout" in layouts:
        check.add_errors(host_engine_errors(config, inputs.shape, for_this_machine=training))

    # Wait for Megatron's validation only if there are no errors: it would report the same mistakes again.
    if not check.errors:
        trial_errors, check.untried_warnings = trial.wait_for_result(
            _build_trial_roles(inputs, layouts), config.model.dtype, training
        )
        check.errors.extend(trial_errors)
        check.warnings.extend(check.untried_warnings)

    # Errors of files do not go into `check.errors`: the plans are computed even if files are missing.
    files = inputs.files
    inputs.errors.extend(files.errors)
    inputs.warnings.extend((*files.warnings, *files.missing))
    if training and not files.allow_missing:
        inputs.errors.extend(files.missing_directory_errors())
    else:
        inputs.warnings.extend(files.missing_directory_errors())
    return _build_report(check, inputs, origins, world_size, algorithm)


def _check_world_size(check: _Check) -> int:
    """Return the number of processes to check against: configured, launched, or the smallest that fits.

    Returns 1 if the number or the layouts are invalid.
    """
    config = check.config
    check.add_errors(check_world(config, check.launched_processes))

    # Prefer the configured size: with another number of processes every layout would have an error.
    world_size = config.world_size or check.launched_processes
    if world_size is not None and 1 <= world_size <= MAX_WORLD:
        return world_size
    if not check.is_valid(*layout_sections(config), "rollout.tensor", "rollout.ranks", "world_size"):
        return 1

    # Neither configured nor launched: use the smallest number that every role's parallel sizes divide.
    world_size = smallest_valid_world(config)
    if world_size is None:
        expected = f"parallel sizes that divide a number of processes up to {MAX_WORLD}"
        fix = "lower the parallel sizes of actor, reference and rollout"
        check.add_invalidating_errors(
            [range_error("actor.layout", smallest_world(config), expected, fix=fix)]
        )
        check.invalid.add("world_size")
        return 1

    check.warnings.append(
        UserError(
            f"the number of processes is not set; {world_size} is the smallest that fits",
            where="world_size",
            got="neither world_size, --world-size nor a launcher",
            fix="pass --world-size N, or write world_size: N",
        )
    )
    return world_size


def _check_layouts(check: _Check, world_size: int) -> dict[str, ParallelLayout]:
    """Check the layouts of all roles; return the layouts that have valid values: role -> layout."""
    layouts: dict[str, ParallelLayout] = {}
    if not check.is_valid("placement"):
        return layouts

    sections = layout_sections(check.config)
    checked_layouts: set[tuple[str, int]] = set()
    for role, layout in role_layouts(check.config, world_size).items():
        # A role without a layout section has the actor's sizes. Its errors name the actor's key, even in a
        # job without the actor. Such roles with the same number of ranks have the same errors: report them
        # once.
        reported_layout = layout
        if role != "rollout" and sections[layout_path_of(role)] is None:
            reported_layout = replace(layout, path="actor.layout")
        size_keys = (reported_layout.path,)
        if role == "rollout":
            size_keys = ("rollout.tensor", "rollout.ranks")
        if not check.is_valid("world_size", *size_keys):
            continue

        layouts[role] = layout
        if (reported_layout.path, reported_layout.size) not in checked_layouts:
            checked_layouts.add((reported_layout.path, reported_layout.size))
            check.add_errors(check_layout(role, reported_layout, world_size, check.config))
    return layouts


def _check_against_models(check: _Check, inputs: Inputs, layouts: Mapping[str, ParallelLayout]) -> None:
    """Check token lengths, adapters, routing and layouts against the shapes of the roles' models."""
    config = check.config
    shape = inputs.shape
    are_lengths_valid = check.is_valid(
        "data.max_prompt_tokens", "rollout.max_response_tokens", "rollout.sampling_profiles"
    )
    if are_lengths_valid and check.is_valid("batch.tokens_per_microbatch"):
        check.add_errors(check_microbatch_budget(config))
        check.add_errors(check_row_lengths(config, shape))

    # Adapters: first the rules on their settings alone, then the rules on their model.
    check.add_invalidating_errors(idle_adapter_errors(config))
    for section, lora in adapters_of(config).items():
        key = f"{section}.lora"

        # Only the actor's adapters are synced to the rollout engine.
        engine = config.rollout.engine if section == "actor" else None
        check.add_invalidating_errors(check_lora(lora, engine, key))
        model_file = inputs.models.get(role_of(section), inputs.models.get("actor"))
        if shape is not None and model_file is not None and check.is_valid(key):
            _, settings = explicit_megatron_settings(config, section)
            check.add_errors(check_adapted_model(lora, read_pretrained(model_file), key, settings))

    if shape is None:
        return

    # Layouts and lengths against the model.
    check.add_errors(check_routing(config, shape))
    for role, layout in layouts.items():
        check.add_errors(_layout_errors(check, inputs, role, layout))
    if are_lengths_valid:
        check.add_errors(check_lengths(config, shape))


def _layout_errors(check: _Check, inputs: Inputs, role: str, layout: ParallelLayout) -> list[UserError]:
    """Return the errors for a layout that does not fit the shape of its role's model."""
    if not check.is_valid(*megatron_sections(check.config)):
        return []
    shape = inputs.shapes.get(role, inputs.shape)
    if shape is None:
        return []

    # A role with the actor's layout and model would only repeat the actor's errors.
    has_own_layout = role == "rollout" or layout_sections(check.config)[layout_path_of(role)] is not None
    is_shape_available = role not in inputs.roles_without_shape
    if role not in inputs.shapes and not (has_own_layout and is_shape_available):
        return []

    _, settings = megatron_settings(check.config, layout)
    if role == "rollout":
        errors = list(engine_problems(shape, layout))
    else:
        errors = list(trainer_problems(shape, layout, settings))
    if spec_of(role).trains:
        errors.extend(expert_training_problems(shape, layout))
    return errors


def _build_trial_roles(inputs: Inputs, layouts: Mapping[str, ParallelLayout]) -> list[TrialRole]:
    """Return the roles that `Trial` validates: each role with a config.json, except the rollout."""
    config = inputs.config
    attention = config.model.attention or default_attention()[0]
    roles: list[TrialRole] = []
    for role, layout in layouts.items():
        model_file = inputs.models.get(role, inputs.models.get("actor"))
        if role == "rollout" or model_file is None:
            continue

        learner = learner_sections(config).get(section_of(role))
        recompute = "none"
        optimizer = None
        ddp: Mapping[str, Any] = {}
        if learner is not None:
            recompute = learner.recompute
            optimizer = learner.optimizer
            ddp = learner.ddp
        shape = inputs.shapes.get(role, inputs.shape)
        has_plain_layers = shape is not None and shape.needs_plain_layers
        settings_key, settings = megatron_settings(config, layout)
        roles.append(
            TrialRole(
                role=role,
                model=model_file,
                layout=layout,
                scalar_head=spec_of(role).head == NUMBER,
                recompute=recompute,
                fused=attention == "transformer_engine" and not has_plain_layers,
                settings_key=settings_key,
                settings=settings,
                optimizer=optimizer,
                ddp=ddp,
            )
        )
    return roles


def _build_report(
    check: _Check, inputs: Inputs, origins: Mapping[str, Origin], world_size: int, algorithm: Algorithm | None
) -> CheckReport:
    """Build the report of a check; derive the remaining values and the plans only if there are no errors."""
    plans = None
    config = check.config
    if not check.errors:
        plans = _compute_plans(check, inputs, world_size, algorithm)
        config = plans.config

    # Every value in a derived section has the origin of the section.
    value_origins = {key: origins.get(key, DEFAULT) for key in flatten(config)}
    if plans is not None:
        for path, reason in plans.reasons.items():
            for key in value_origins:
                if key == path or key.startswith(f"{path}."):
                    value_origins[key] = Origin("derived", reason)

    # Suggest names last, since each suggestion is tried on the complete configuration.
    errors = (*with_suggestions(check.errors, check.tree), *inputs.errors)
    data_stats: tuple[DatasetStats, ...] = ()
    if inputs.token_counter is not None:
        data_stats = tuple(inputs.token_counter.stats)
    report = CheckReport(
        config=config,
        world_size=world_size,
        errors=tuple(_with_origin(error, origins) for error in errors),
        warnings=tuple(_with_origin(error, origins) for error in (*check.warnings, *inputs.warnings)),
        origins=value_origins,
        shape=inputs.shape,
        algorithm=algorithm,
        data_stats=data_stats,
        untried=bool(check.untried_warnings) and not check.on_other_machines,
        accelerator=check.accelerator,
        files_missing=bool(inputs.files.missing or inputs.files.to_be_made),
    )

    if plans is None:
        return report
    return replace(
        report,
        layouts=plans.layouts,
        batch=plans.batch,
        shapes=plans.shapes,
        models=plans.models,
        memory=plans.memory,
        sync=plans.sync,
        records=plans.records,
    )


def _compute_plans(check: _Check, inputs: Inputs, world_size: int, algorithm: Algorithm | None) -> _Plans:
    """Derive every unset value and compute the plans; errors and warnings are added to ``check``."""
    resolved = resolve(check.config, world_size, algorithm, inputs.shape)
    config, template_reasons = _with_chat_templates(inputs, resolved.config)
    config, gpu_reasons = with_gpu_memory(config)

    # Write the algorithm's components (pieces), such as its loss, into the configuration. Skip this if the
    # run will be on other machines and a component from the user's code, such as a loss, cannot be imported
    # on this machine: ``algorithm`` then contains the default loss instead.
    piece_reasons: dict[str, str] = {}
    has_all_pieces = not any((warning.where or "").startswith("algorithm.") for warning in check.warnings)
    if algorithm is not None and config.job == TRAIN and (has_all_pieces or not check.on_other_machines):
        config, piece_reasons = write_pieces(config, algorithm)

    # Layouts, batch, memory and the bytes of a weight sync.
    layouts = role_layouts(config, world_size)
    shapes: dict[str, ModelShape] = {}
    models: Mapping[str, Path] = {}
    if inputs.shape is not None:
        shapes = {"actor": inputs.shape, **inputs.shapes}
        models = inputs.models

    budget_reasons: dict[str, str] = {}
    if config.batch.memory_target is not None and config.gpu_memory_gib is not None and shapes:
        tokens, reason = estimate_tokens(config, layouts, shapes)
        check.add_errors(check_memory_target(check.config, tokens))
        config = with_value(config, "batch.tokens_per_microbatch", tokens)
        budget_reasons["batch.tokens_per_microbatch"] = f"{reason} (memory_target)"

    batch = None
    if config.job == TRAIN:
        batch = batch_plan(config, layouts)

    memory: list[RankMemory] = []
    sync = None
    if inputs.shape is not None:
        memory = list(memory_plan(config, layouts, shapes, batch))
        if batch is not None and config.rollout.capabilities.in_process:
            shared_bytes = shared_weights(config, inputs.shape)
            sync = shared_bytes.traffic(layouts["rollout"].ranks, config.gpus_per_node)
    records = None
    if inputs.preview is not None:
        records = inputs.preview.count

    # Warnings are about explicit values. The only derived value that they use is the memory of a GPU.
    user_config = replace(check.config, gpu_memory_gib=config.gpu_memory_gib)
    check.warnings.extend(
        check_warnings(user_config, world_size, layouts, batch, inputs.shape, algorithm, records)
    )
    memory_key = "gpu" if gpu_reasons else "gpu_memory_gib"
    memory_errors, memory_warnings = check_memory(config, memory, memory_key)
    check.errors.extend([*memory_errors, *check_checkpoint(config, layouts, memory)])
    check.warnings.extend(memory_warnings)

    # A later step may derive a value again: its reason replaces the earlier one.
    reasons = {**check.derived, **resolved.reasons}
    reasons |= template_reasons
    reasons |= gpu_reasons
    reasons |= budget_reasons
    reasons |= piece_reasons
    return _Plans(
        config=config,
        reasons=reasons,
        layouts=layouts,
        batch=batch,
        shapes=shapes,
        models=models,
        memory=tuple(memory),
        sync=sync,
        records=records,
    )


def _with_chat_templates(inputs: Inputs, config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Fill in the unset ``chat_template`` of each data set, from its first record.

    Returns the configuration, and the reasons of the filled-in values: key -> reason.
    """
    reasons: dict[str, str] = {}
    for key, uses_template in inputs.derived_templates.items():
        # A data set inherits the value of `data`, and needs its own only if it differs.
        if key == "data.chat_template" or uses_template != config.data.chat_template:
            config = with_value(config, key, uses_template)
            reasons[key] = "prompts are lists of messages" if uses_template else "prompts are text"
    return config, reasons


def _with_origin(error: UserError, origins: Mapping[str, Origin]) -> UserError:
    """Append the origin of the erroneous value to the configuration key in ``error.where``.

    The origin is a file and line, or an override.
    """
    key = error.where
    if key is None or not _KEY.fullmatch(key):
        return error

    # A mapping can be a single value: keys inside it have the mapping's origin.
    origin = origins.get(key)
    parent = key
    while origin is None and "." in parent:
        parent = parent.rpartition(".")[0]
        origin = origins.get(parent)

    # A section has the origin of the first value in it that the user wrote.
    if origin is None or origin.kind == "default":
        for path, other_origin in origins.items():
            if path.startswith(f"{key}.") and other_origin.kind in ("file", "override"):
                origin = other_origin
                break
    if origin is None:
        return error
    return replace(error, where=f"{key} ({origin})")
