"""Loading of a configuration from YAML and overrides, and writing it as YAML.

`load` never raises. It returns the configuration with all errors and the origin of every value, so ``check``
can report the errors together with its own findings. `load_config` raises the errors instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.field_types import format_ranges
from megatron_rl.config.hub import HubCopy, resolve_hub_names
from megatron_rl.config.parse import ParseState, parse_section
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.sampling_profiles import resolve_profile_names
from megatron_rl.config.schema import JOBS, RunConfig
from megatron_rl.config.setting import is_section, iter_settings, key_path
from megatron_rl.config.source import (
    Leaf,
    Origin,
    Section,
    apply_overrides,
    one_line,
    read_tree,
    read_with_base,
    refuse_base,
)
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.redaction import redact


@dataclass(frozen=True)
class LoadedConfig:
    """Configuration with the origin of each value, and all errors that were found in its files and overrides.

    Example: ``load("run.yaml", ["steps=many"])`` has one error and ``broken == {"steps"}``.
    """

    config: RunConfig | None
    """Typed configuration; None if a file could not be read."""
    path: Path | None
    """File that was loaded; None for text."""
    origins: Mapping[str, Origin]
    """Dotted path of each value -> its origin."""
    errors: tuple[UserError, ...] = ()
    """All errors found in the files and overrides."""
    broken: frozenset[str] = frozenset()
    """Paths whose value is a placeholder or a default because of a mistake."""
    files: tuple[Path, ...] = ()
    """Files that were read: the loaded file, then each of its bases followed by the base's own bases."""
    tree: Section = field(default_factory=Section)
    """Values as the user wrote them, including overrides."""
    hub: Mapping[str, HubCopy] = field(default_factory=dict)
    """Local directory -> Hugging Face repository, for each repository that is not completely downloaded."""

    def valid(self) -> RunConfig:
        """Return the typed configuration; raise UserErrors with all errors if there are any."""
        if self.errors or self.config is None:
            raise UserErrors(self.errors)
        return self.config


def load(path: str | Path, overrides: Iterable[str] = (), with_weights: bool = False) -> LoadedConfig:
    """Load a YAML file with ``key.path=value`` overrides; collect errors instead of raising them.

    The file may name base files with ``base: other.yaml``, see `read_with_base`. Models and data sets with
    ``hf://`` names are downloaded; weights of models only if ``with_weights`` is true.
    """
    errors: list[UserError] = []
    tree, files = read_with_base(Path(path), errors)
    if tree is None:
        return LoadedConfig(None, Path(path), {}, tuple(errors), files=files)
    return replace(_parse_loaded_tree(tree, Path(path), overrides, errors, with_weights), files=files)


def load_text(text: str, overrides: Iterable[str] = (), name: str = "configuration") -> LoadedConfig:
    """Load a configuration from YAML text, see `load`; ``name`` is the file name in origins and errors."""
    errors: list[UserError] = []
    tree = read_tree(text, name, errors)
    if errors and not tree.children:
        return LoadedConfig(None, None, {}, tuple(errors))
    return _parse_loaded_tree(tree, None, overrides, errors)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the typed configuration of a YAML file; raise UserErrors with all errors of the file."""
    return load(path, overrides).valid()


def _parse_loaded_tree(
    tree: Section,
    path: Path | None,
    overrides: Iterable[str],
    errors: list[UserError],
    with_weights: bool = False,
) -> LoadedConfig:
    """Apply the overrides to the tree of the file at ``path``, and parse the tree to a configuration.

    Before parsing, ``hf://`` names are replaced by local paths, and names of sampling profiles by their
    settings.
    """
    apply_overrides(tree, overrides, errors)
    incomplete_copies = resolve_hub_names(tree, errors, with_weights)

    # Check for `base` after the overrides: `base=other.yaml` on the command line would have no effect.
    refuse_base(tree, errors)
    _set_megatron_model_path(tree)
    resolve_profile_names(tree, errors)
    config, state = parse_tree(tree, errors)
    return LoadedConfig(
        config,
        path,
        state.origins,
        tuple(state.errors),
        frozenset(state.broken),
        tree=tree,
        hub=incomplete_copies,
    )


def parse_tree(tree: Section, errors: list[UserError]) -> tuple[RunConfig, ParseState]:
    """Parse the tree of a complete configuration; append all errors to ``errors``.

    Returns the configuration, and the state with the origin of each value and the paths of invalid values.
    """
    state = ParseState(errors=errors)
    # Read the job first, since it decides which keys are required.
    job = tree.children.get("job")
    if isinstance(job, Leaf) and job.value in JOBS:
        state.job = job.value
    return parse_section(RunConfig, tree, state), state


def _set_megatron_model_path(tree: Section) -> None:
    """Set an unset ``model.path`` to the folder that will contain the model files of ``model.megatron``.

    The run writes config.json and the tokenizer into this folder in ``run_dir``. Without ``model.megatron``,
    the tree stays unchanged.
    """
    model = tree.children.get("model")
    run_dir = tree.children.get("run_dir")
    if not isinstance(model, Section) or "path" in model.children:
        return

    checkpoint = model.children.get("megatron")
    if isinstance(checkpoint, Leaf) and isinstance(run_dir, Leaf) and isinstance(checkpoint.value, str):
        path = RunFolder(str(run_dir.value)).megatron_model("actor")
        model.children["path"] = Leaf(str(path), Origin("derived", "written for model.megatron"))


def to_plain(value: Any, name: str = "") -> Any:
    """Convert a configuration, or the value of the key ``name``, to plain values for YAML and JSON."""
    if dataclasses.is_dataclass(value):
        names = [item.name for item in dataclasses.fields(value)]
        return {field_name: to_plain(getattr(value, field_name), field_name) for field_name in names}
    if isinstance(value, dict):
        return {key: to_plain(inner, key) for key, inner in value.items()}
    # Write ranks as ranges, since a large job has many; ranges cannot express an empty list.
    if isinstance(value, tuple) and name == "ranks" and value:
        return format_ranges(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def flatten(config: RunConfig) -> dict[str, Any]:
    """Map the dotted path of each key of a configuration, such as ``actor.lora.rank``, to its value."""
    return {path: value for path, _, value in iter_settings(config)}


# Keys that do not affect the numerical results of a run: output paths, retention and timeouts.
_RESULT_INDEPENDENT = ("run_dir", "checkpoint.", "rank_timeout")

# Prefixes of the keys that decide which prompts are in a step.
_PROMPT_ORDER = (
    "seed", "data.", "batch.prompts_per_step", "rollout.order", "rollout.oversample", "rollout.partial",
    "rollout.round_tokens", "asynchrony.",
)  # fmt: skip


def describe_changes(saved_text: str, config: RunConfig) -> list[str]:
    """Return a line of text for each setting that differs from the run being resumed.

    ``saved_text`` is the `dump` of that run's configuration. Settings that do not affect numerical results
    are omitted.
    """
    # Compare values, not texts: this version may have new keys, whose defaults the saved text lacks.
    loaded = load_text(saved_text, name="config.yaml")
    if loaded.errors or loaded.config is None:
        return [f"the settings that the run began with cannot be read: {loaded.errors[0].message}"]

    saved_values = flatten(loaded.config)
    # A dump hides secrets, so hide them here too before the comparison.
    values = flatten(without_secrets(config))
    lines = []
    for name in sorted({*saved_values, *values}):
        saved_value = saved_values.get(name)
        value = values.get(name)
        if saved_value == value or name.startswith(_RESULT_INDEPENDENT):
            continue
        # Earlier versions saved only algorithm.name, without the derived losses and other algorithm settings.
        if name.startswith("algorithm.") and saved_value is None:
            continue
        line = f"{name} was {one_line(to_plain(saved_value))} and is {one_line(to_plain(value))}"
        # These two keys are below `data.`, but do not decide which prompts are in a step.
        keeps_prompts = name.startswith("data.sources.") and name.endswith((".reward", ".profile"))
        if name.startswith(_PROMPT_ORDER) and not keeps_prompts:
            line += ": the order of the prompts changes"
        lines.append(line)
    return lines


def _named_values(section: Any) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs of a section, or of a mapping of sections."""
    if isinstance(section, dict):
        return list(section.items())
    return [(item.name, getattr(section, item.name)) for item in dataclasses.fields(section)]


def without_secrets(config: RunConfig) -> RunConfig:
    """Redact the values whose names indicate a secret; the result can be written to disk.

    Only mappings with names chosen by the user can contain secrets: arguments of the user's code and of vLLM.
    """
    rollout = config.rollout
    environment = rollout.environment
    if environment is not None:
        environment = replace(environment, settings=redact(environment.settings))

    # Hide only strings: `hf_token: true` contains no secret, but makes vLLM use the stored token.
    texts = {name: value for name, value in rollout.vllm.items() if isinstance(value, str)}
    rollout = replace(rollout, environment=environment, vllm=rollout.vllm | redact(texts))
    reward = replace(config.reward, arguments=redact(config.reward.arguments))
    return replace(config, reward=reward, rollout=rollout)


def dump(config: RunConfig, origins: Mapping[str, Origin] | None = None) -> str:
    """Format a configuration as YAML that loads to an equal one; ``origins`` become comments."""
    lines: list[str] = []
    _append_lines(config, 0, "", origins or {}, lines)
    return "\n".join(lines) + "\n"


def _append_lines(
    section: Any, depth: int, section_path: str, origins: Mapping[str, Origin], lines: list[str]
) -> None:
    """Append the YAML lines of the section at a path to ``lines``, indented by ``depth`` levels.

    ``origins`` maps the path of a value to its origin, which becomes a comment on the line.
    """
    indent = "  " * depth
    for name, value in _named_values(section):
        path = key_path(section_path, name)
        if is_section(value):
            lines.append(f"{indent}{name}:")
            _append_lines(value, depth + 1, path, origins, lines)
            continue

        line = f"{indent}{name}: {one_line(to_plain(value, name))}"
        origin = origins.get(path)
        if origin is not None and origin.kind != "default":
            # An override may have line breaks, which would end the comment.
            line += "  # " + " ".join(str(origin).split())
        lines.append(line)
