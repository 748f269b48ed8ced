"""Loading of a configuration from YAML and overrides, and writing it as YAML.

The one idea: `load` never raises. It returns the configuration with every mistake and the origin of every
value, so that ``check`` can report them together with its own findings; `load_config` raises them instead.
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
    """Files that were read: the loaded file, each of its bases, each followed by its own bases."""
    tree: Section = field(default_factory=Section)
    """Explicit values as written, overrides included."""
    hub: Mapping[str, HubCopy] = field(default_factory=dict)
    """Copies of the Hugging Face Hub that are not complete on this machine, by directory."""

    def valid(self) -> RunConfig:
        """Return the configuration, or raise UserErrors with all errors."""
        if self.errors or self.config is None:
            raise UserErrors(self.errors)
        return self.config


def load(path: str | Path, overrides: Iterable[str] = (), with_weights: bool = False) -> LoadedConfig:
    """Load a YAML file and ``key.path=value`` overrides, and collect mistakes instead of raising.

    With ``base: other.yaml`` in it, the file overrides the values of another file, or of a list of files, of
    which later ones override earlier ones; see `read_with_base`. The files of models that are named on the
    Hugging Face Hub are downloaded, their weights only with ``with_weights``.
    """
    errors: list[UserError] = []
    tree, files = read_with_base(Path(path), errors)
    if tree is None:
        return LoadedConfig(None, Path(path), {}, tuple(errors), files=files)
    return replace(_parse_loaded_tree(tree, Path(path), overrides, errors, with_weights), files=files)


def load_text(text: str, overrides: Iterable[str] = (), name: str = "configuration") -> LoadedConfig:
    """Load YAML text as `load` loads a file; ``name`` stands for the file in origins and errors."""
    errors: list[UserError] = []
    tree = read_tree(text, name, errors)
    if errors and not tree.children:
        return LoadedConfig(None, None, {}, tuple(errors))
    return _parse_loaded_tree(tree, None, overrides, errors)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the typed configuration of a YAML file; raise UserErrors with every mistake at once."""
    return load(path, overrides).valid()


def _parse_loaded_tree(
    tree: Section,
    path: Path | None,
    overrides: Iterable[str],
    errors: list[UserError],
    with_weights: bool = False,
) -> LoadedConfig:
    """Apply the overrides to the tree of the file at ``path``, and parse it to a configuration.

    Before that, names on the Hugging Face Hub are replaced by local paths, and names of sampling profiles by
    their settings.
    """
    apply_overrides(tree, overrides, errors)
    hub = resolve_hub_names(tree, errors, with_weights)

    # Refuse `base` after the overrides: `base=other.yaml` on the command line would have no effect.
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
        hub=hub,
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
    """Set ``model.path`` to the folder in run_dir for the config.json and tokenizer of ``model.megatron``.

    Do nothing if ``model.path`` is set or ``model.megatron`` is not.
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
        items = dataclasses.fields(value)
        return {item.name: to_plain(getattr(value, item.name), item.name) for item in items}
    if isinstance(value, dict):
        return {key: to_plain(inner, key) for key, inner in value.items()}
    # Write the ranks of a large job as ranges; an empty list has none.
    if isinstance(value, tuple) and name == "ranks" and value:
        return format_ranges(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return the values of all keys of a configuration by their dotted paths, such as ``actor.lora.rank``."""
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
    are left out.
    """
    # Parse the saved text instead of comparing texts: a newer version may have further keys, at defaults.
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
        # Configurations of earlier versions have algorithm.name alone, without its losses and other pieces.
        if name.startswith("algorithm.") and saved_value is None:
            continue
        line = f"{name} was {one_line(to_plain(saved_value))} and is {one_line(to_plain(value))}"
        # The reward and the profile of a source change neither its prompts nor their order.
        is_of_responses = name.startswith("data.sources.") and name.endswith((".reward", ".profile"))
        if name.startswith(_PROMPT_ORDER) and not is_of_responses:
            line += ": the order of the prompts changes"
        lines.append(line)
    return lines


def _entries(section: Any) -> list[tuple[str, Any]]:
    """Return the names and values of a section, or of a mapping of sections."""
    if isinstance(section, dict):
        return list(section.items())
    return [(item.name, getattr(section, item.name)) for item in dataclasses.fields(section)]


def without_secrets(config: RunConfig) -> RunConfig:
    """Return the configuration as it is written to disk: values whose names indicate a secret are redacted.

    Only mappings with names of the user's choice can have such values: the arguments of the user's own code
    and of vLLM.
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
    """Return YAML that loads to an equal configuration; ``origins`` become comments next to the values."""
    lines: list[str] = []
    _append_lines(config, 0, "", origins or {}, lines)
    return "\n".join(lines) + "\n"


def _append_lines(
    section: Any, depth: int, section_path: str, origins: Mapping[str, Origin], lines: list[str]
) -> None:
    """Append the YAML lines of the section at a path to ``lines``, indented by ``depth`` levels."""
    indent = "  " * depth
    for name, value in _entries(section):
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
