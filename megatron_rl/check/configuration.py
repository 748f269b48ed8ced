"""Check a whole configuration before anything is built: every error and warning at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.algorithms.algorithm import Algorithm
from megatron_rl.check.algorithm import check_algorithm
from megatron_rl.check.data.lengths import Looked
from megatron_rl.check.engine.arguments import check_engine_arguments, check_own_engine
from megatron_rl.check.engine.host import host_engine_errors
from megatron_rl.check.engine.sampling_order import check_asynchrony
from megatron_rl.check.files import Files
from megatron_rl.check.inputs import Inputs, check_attention, check_inputs, check_paths
from megatron_rl.check.memory import check_memory, with_gpu_memory
from megatron_rl.check.model.adapters import check_adapted_model, check_lora, idle_adapters
from megatron_rl.check.model.megatron_lm import with_megatron_models
from megatron_rl.check.model.megatron_settings import (
    PATIENCE,
    Trial,
    TriedRole,
    check_model_settings,
    check_optimizer,
    check_routing,
)
from megatron_rl.check.model.parallel_sizes import check_budget, check_layout, check_lengths, check_world
from megatron_rl.check.packages import logging_errors, missing_packages
from megatron_rl.check.rehearsal import rehearse
from megatron_rl.check.resume import resumed_build_errors
from megatron_rl.check.stages import check_row_lengths
from megatron_rl.check.unknown_names import answered
from megatron_rl.check.values import check_values
from megatron_rl.check.warnings import check_warnings
from megatron_rl.config.adapters import adapters_of
from megatron_rl.config.budget import RankMemory, memory_plan
from megatron_rl.config.derive import BatchPlan, batch_plan, default_attention, resolve, smallest_world
from megatron_rl.config.load import LoadedConfig, flatten
from megatron_rl.config.placement import (
    layout_sections,
    megatron_sections,
    megatron_settings,
    role_layouts,
    shared_weights,
    stated_settings,
)
from megatron_rl.config.roles import NUMBER, learner_sections, role_of, section_of, spec_of, where_of
from megatron_rl.config.schema import TRAIN, RunConfig
from megatron_rl.config.sections.bounds import MAX_WORLD
from megatron_rl.config.setting import with_value
from megatron_rl.config.source import DEFAULT, Origin, Section
from megatron_rl.config.stage_plan import for_job, has_use, stage_plans
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.shapes.fit import engine_problems, learning_problems, trainer_problems
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.model import ModelShape
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.shapes.traffic import WeightTraffic

_PROVIDER = ("model.provider", "model.weights")
_OWN_PIECE = re.compile(r"algorithm\..+|rollout\.engine|model\.provider|model\.weights")
"""Settings that may name code of the user's that runs in the training processes."""


@dataclass(frozen=True)
class CheckReport:
    """Hold what a check found.

    ``config`` has every derived value filled in where there are no errors; ``origins`` says where each
    value comes from. Plans are None where errors leave nothing to plan. ``models`` are files by role.
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
    looked: tuple[Looked, ...] = ()
    algorithm: Algorithm | None = None
    files_missing: bool = False
    untried: bool = False
    """Megatron was not asked, or did not answer in time, whether it takes its settings."""

    def valid(self) -> RunConfig:
        """Return the filled-in configuration, or raise UserErrors with every error."""
        if self.errors:
            raise UserErrors(self.errors)
        return self.config


@dataclass
class _Check:
    config: RunConfig
    launched: int | None
    errors: list[UserError] = field(default_factory=list)
    warnings: list[UserError] = field(default_factory=list)
    untried: list[UserError] = field(default_factory=list)  # what Megatron did not answer
    bad: set[str] = field(default_factory=set)  # paths whose value is known to be wrong
    tree: Section = field(default_factory=Section)  # the configuration as it was written

    def add(self, errors: Iterable[UserError]) -> None:
        """Record errors, except about values that are already known to be wrong, or below one that is."""
        for error in errors:
            where = error.where or ""
            if not any(where == path or where.startswith(f"{path}.") for path in self.bad):
                self.errors.append(error)

    def refuse(self, errors: Iterable[UserError]) -> None:
        """Record errors, and that the values they are about are wrong."""
        errors = list(errors)
        self.add(errors)
        self.bad.update(error.where for error in errors if error.where)

    def fine(self, *prefixes: str) -> bool:
        """Return whether no value at, below or around the paths is known to be wrong."""
        return not any(
            path == prefix or path.startswith(f"{prefix}.") or prefix.startswith(f"{path}.")
            for path in self.bad
            for prefix in prefixes
        )


def check_config(
    config: RunConfig | LoadedConfig,
    world_size: int | None = None,
    *,
    training: bool = False,
    without_files: bool = False,
    shipped_models: Path | None = None,
    patience: float = PATIENCE,
) -> CheckReport:
    """Check a configuration against a number of processes; never raises for what a user gave.

    ``world_size`` None takes the configuration's own, or the smallest that fits. ``training`` makes an
    error of a file that ``prepare`` is still to make; ``without_files`` makes a warning of every missing
    file. ``shipped_models`` holds NAME/config.json for models that are not on this machine. ``patience`` is
    the seconds that Megatron has to try its settings; 0 does not ask it.
    """
    loaded = config if isinstance(config, LoadedConfig) else LoadedConfig(config, None, {})
    if loaded.config is None:
        raise UserErrors(loaded.errors)
    config = for_job(loaded.config)
    config, written, refused = with_megatron_models(config, loaded.broken, absent=without_files)
    stated = {path: origin for path, origin in loaded.origins.items() if has_use(config.job, path)}
    origins = {**stated, **written}
    check = _Check(config, world_size, tree=loaded.tree)
    check.errors.extend(loaded.errors)
    check.bad.update(loaded.broken)
    for setting, errors in refused.items():
        check.errors.extend(errors)
        check.bad.add(setting)
    check.refuse(check_values(config))
    tried = _megatron(check)
    if check.fine("rollout.vllm"):
        check.refuse(check_engine_arguments(config.rollout.vllm))
    check.refuse(check_paths(config))
    if not training:  # a run imports them in any case
        check.refuse(rehearse(_own_pieces(check), only=_PROVIDER))
    files = Files(prepare=config.prepare, absent=without_files)
    # Every rank of a run checks; whether a server is there is asked once, before.
    inputs = Inputs(config, files, check.fine, shipped_models, before=not training)
    trial = Trial(tried if patience > 0 else [], patience)
    try:
        return _checked(check, inputs, trial, origins, training)
    finally:
        trial.stop()


def _own_pieces(check: _Check) -> dict[str, str]:
    """Return the user's pieces of training processes, by the key that names each."""
    values = flatten(check.config)
    return {
        path: value
        for path, value in values.items()
        if isinstance(value, str) and _OWN_PIECE.fullmatch(path) and ":" in value and check.fine(path)
    }


def _megatron(check: _Check) -> list[str]:
    """Apply the rules of Megatron's own settings; return the paths of those that can be tried."""
    config, stated = check.config, megatron_sections(check.config)
    for path, settings in stated.items():
        if settings and check.fine(path):
            check.refuse(check_model_settings(settings, path))
    for path, section in learner_sections(config).items():
        if check.fine(f"{path}.optimizer", f"{path}.ddp"):
            check.refuse(check_optimizer(section.optimizer, f"{path}.optimizer", section.ddp))
            stated[f"{path}.optimizer.megatron"] = section.optimizer.megatron
    for plan in stage_plans(config):
        if check.fine(f"{plan.where}.optimizer"):
            check.refuse(check_optimizer(plan.settings.optimizer, f"{plan.where}.optimizer", {}))
    return [path for path, settings in stated.items() if settings] if check.fine(*stated) else []


def _checked(
    check: _Check, inputs: Inputs, trial: Trial, origins: Mapping[str, Origin], training: bool
) -> CheckReport:
    """Apply the rules that need more than single values, while Megatron tries its settings."""
    config, files, algorithm = check.config, inputs.files, None
    if check.fine("algorithm", "rollout.max_response_tokens"):
        algorithm, mistakes = check_algorithm(config)
        check.add(mistakes)
    if check.fine("rollout.engine"):
        check.add(check_own_engine(config.rollout.engine))
    world = _world(check)
    layouts = _layouts(check, world)
    check.add(check_asynchrony(config, layouts, algorithm))
    check_inputs(inputs)
    if check.fine("checkpoint.resume", "run_dir"):
        check.add(resumed_build_errors(config, layouts, inputs.shape, algorithm))
    check.add(list(logging_errors(config)))
    (check.errors if training else check.warnings).extend(
        [*check_attention(config), *missing_packages(config)]
    )
    _check_model(check, inputs, layouts)
    if config.job == TRAIN and "rollout" in layouts:
        check.add(host_engine_errors(config, inputs.shape, here=training))
    if not check.errors:
        errors, check.untried = trial.result(_tried_roles(inputs, layouts), config.model.dtype)
        check.errors.extend(errors)
        check.warnings.extend(check.untried)
    # Findings about files leave the arithmetic whole: it is shown beside them.
    inputs.errors.extend(files.errors)
    inputs.warnings.extend((*files.warnings, *files.missing))
    (inputs.errors if training and not files.absent else inputs.warnings).extend(files.unmade())
    return _report(check, inputs, origins, world, algorithm)


def _tried_roles(inputs: Inputs, layouts: Mapping[str, ParallelLayout]) -> list[TriedRole]:
    """Return the roles with a trained or frozen model whose config.json is here."""
    roles, config = [], inputs.config
    attention = config.model.attention or default_attention()[0]
    for role, layout in layouts.items():
        model = inputs.models.get(role, inputs.models.get("actor"))
        if role == "rollout" or model is None:
            continue
        section = learner_sections(config).get(section_of(role))
        recompute = section.recompute if section is not None else "none"
        shape = inputs.shapes.get(role, inputs.shape)
        fused = attention == "transformer_engine" and not (shape and shape.plain_layers)
        scalar_head = spec_of(role).head == NUMBER
        settings, optimizer = megatron_settings(config, layout), section.optimizer if section else None
        roles.append(TriedRole(role, model, layout, scalar_head, recompute, fused, *settings, optimizer))
    return roles


def _report(
    check: _Check, inputs: Inputs, origins: Mapping[str, Origin], world: int, algorithm: Algorithm | None
) -> CheckReport:
    config, plans = check.config, dict[str, Any]()
    filled = {path: origins.get(path, DEFAULT) for path in flatten(config)}
    if not check.errors:
        resolved = resolve(config, world, algorithm, inputs.shape)
        config = resolved.config
        config, template = _chat_templates(inputs, config)
        config, gpu_memory = with_gpu_memory(config)
        layouts = role_layouts(config, world)
        batch = batch_plan(config, layouts) if config.job == TRAIN else None
        memory, sync = [], None
        if inputs.shape is not None:
            plans |= {"shapes": {"actor": inputs.shape, **inputs.shapes}, "models": inputs.models}
            memory = memory_plan(config, layouts, plans["shapes"], batch)
        if batch is not None and inputs.shape is not None and config.rollout.capabilities.in_process:
            sync = shared_weights(config, inputs.shape).traffic(layouts["rollout"].ranks)
        records = inputs.preview.count if inputs.preview else None
        stated = replace(check.config, gpu_memory_gib=config.gpu_memory_gib)
        check.warnings.extend(check_warnings(stated, world, layouts, batch, inputs.shape, algorithm, records))
        where = "gpu" if gpu_memory else "gpu_memory_gib"
        too_large, tight = check_memory(config, memory, where)
        check.errors.extend(too_large)
        check.warnings.extend(tight)
        reasons = {**resolved.reasons, **template, **gpu_memory}
        filled = {path: origins.get(path, DEFAULT) for path in flatten(config)}
        for path, reason in reasons.items():
            for name in filled:
                if name == path or name.startswith(f"{path}."):
                    filled[name] = Origin("derived", reason)
        plans |= {
            "layouts": layouts,
            "batch": batch,
            "memory": tuple(memory),
            "sync": sync,
            "records": records,
        }
    return CheckReport(
        config=config,
        world_size=world,
        errors=tuple(
            _located(error, origins) for error in (*answered(check.errors, check.tree), *inputs.errors)
        ),
        warnings=tuple(_located(error, origins) for error in (*check.warnings, *inputs.warnings)),
        origins=filled,
        shape=inputs.shape,
        algorithm=algorithm,
        looked=tuple(inputs.tokens.looked) if inputs.tokens else (),
        untried=bool(check.untried),
        files_missing=bool(inputs.files.missing or inputs.files.to_be_made),
        **plans,
    )


def _world(check: _Check) -> int:
    config = check.config
    if check.launched is not None and not 1 <= check.launched <= MAX_WORLD:
        fix = "start at least one process"
        if check.launched > MAX_WORLD:
            fix = f"start {MAX_WORLD} processes or fewer"
        error = UserError(
            "the number of processes is out of range",
            where="world size",
            expected=f"1 to {MAX_WORLD}",
            got=str(check.launched),
            fix=fix,
        )
        check.add([error])
        check.bad.add("world_size")
        return 1
    if check.fine("world_size"):
        check.add(check_world(config, check.launched))
    # Against another number of processes than the stated one every layout would seem wrong.
    known = config.world_size if config.world_size is not None else check.launched
    if known is not None and 1 <= known <= MAX_WORLD:
        return known
    if not check.fine(*layout_sections(config), "rollout.tensor", "rollout.ranks", "world_size"):
        return 1
    world = smallest_world(config)
    if world > MAX_WORLD:
        check.add([_too_large(world)])
        check.bad.update(("world_size", "actor.layout.tensor"))
        return 1
    check.warnings.append(
        UserError(
            f"the number of processes is not stated; {world} is the smallest that fits",
            where="world_size",
            got="neither world_size, --world-size nor a launcher",
            fix="say --world-size N, or write world_size: N",
        )
    )
    return world


def _too_large(world: int) -> UserError:
    shown = str(world) if world < 1 << 64 else "more than 2^64"
    return UserError(
        "the parallel sizes need more processes than there can be",
        where="actor.layout",
        expected=f"at most {MAX_WORLD} processes",
        got=shown,
        fix="lower the parallel sizes of actor, reference and rollout",
    )


def _layouts(check: _Check, world: int) -> dict[str, ParallelLayout]:
    """Return the layouts whose own values are fine, after checking them."""
    layouts, sections, checked = {}, layout_sections(check.config), set[tuple[str, int]]()
    if not check.fine("placement"):
        return layouts
    for role, layout in role_layouts(check.config, world).items():
        has_layout = role == "rollout" or sections[where_of(role)] is not None
        # Sizes that a role has from the actor are stated there, also in a job without the actor.
        stated = layout if has_layout else replace(layout, path="actor.layout")
        paths = ("rollout.tensor", "rollout.ranks") if role == "rollout" else (stated.path,)
        if check.fine("world_size", *paths):
            layouts[role] = layout
            if (stated.path, stated.size) not in checked:
                checked.add((stated.path, stated.size))
                check.add(check_layout(role, stated, world, check.config))
    return layouts


def _check_model(check: _Check, inputs: Inputs, layouts: Mapping[str, ParallelLayout]) -> None:
    shape = inputs.shape
    lengths = check.fine("data.max_prompt_tokens", "rollout.max_response_tokens", "rollout.sampling_profiles")
    if lengths and check.fine("batch.tokens_per_microbatch"):
        check.add(check_budget(check.config))
        check.add(check_row_lengths(check.config, shape))
    check.refuse(idle_adapters(check.config))
    for section, lora in adapters_of(check.config).items():
        path, where = inputs.models.get(role_of(section), inputs.models.get("actor")), f"{section}.lora"
        check.refuse(check_lora(lora, check.config.rollout.engine if section == "actor" else None, where))
        if shape is not None and path is not None and check.fine(where):
            _, settings = stated_settings(check.config, section)
            check.add(check_adapted_model(lora, read_pretrained(path), where, settings))
    if shape is None:
        return
    check.add(check_routing(check.config, shape))
    for role, layout in layouts.items():
        has_layout = role == "rollout" or layout_sections(check.config)[where_of(role)] is not None
        known = role in inputs.shapes or (has_layout and role not in inputs.shapeless)
        if known and check.fine(*megatron_sections(check.config)):
            model = inputs.shapes.get(role, shape)
            _, settings = megatron_settings(check.config, layout)
            rollout = role == "rollout"
            fits = engine_problems(model, layout) if rollout else trainer_problems(model, layout, settings)
            check.add(fits)
            if spec_of(role).trains:
                check.add(learning_problems(model, layout))
    if lengths:
        check.add(check_lengths(check.config, shape))


def _chat_templates(inputs: Inputs, config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Fill in which data sets go through the chat template, each by its own first record; say why."""
    reasons = {}
    for path, messages in inputs.templated.items():
        if path == "data.chat_template" or messages != config.data.chat_template:
            config = with_value(config, path, messages)
            reasons[path] = "prompts are lists of messages" if messages else "prompts are text"
    return config, reasons


def _located(error: UserError, origins: Mapping[str, Origin]) -> UserError:
    """Return the error with the place where its value was written."""
    where = error.where
    if where is None or not re.fullmatch(r"[a-z0-9_.]+", where):
        return error
    origin, above = origins.get(where), where
    while origin is None and "." in above:  # a key inside of a value that is written as a whole
        above = above.rpartition(".")[0]
        origin = origins.get(above)
    if origin is None or origin.kind == "default":
        below = [value for path, value in origins.items() if path.startswith(f"{where}.")]
        stated = [value for value in below if value.kind in ("file", "override")]
        origin = stated[0] if stated else origin
    if origin is None:
        return error
    return replace(error, where=f"{where} ({origin})")
