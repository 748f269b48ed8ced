"""Load a run's configuration from YAML and command-line overrides, and write it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.base import read_with_base, refuse_base
from megatron_rl.config.parse import Parse, parse_section
from megatron_rl.config.ranges import format_ranges
from megatron_rl.config.run_folder import RunFolder
from megatron_rl.config.schema import JOBS, RunConfig
from megatron_rl.config.setting import is_section, settings
from megatron_rl.config.source import Leaf, Origin, Section, apply_overrides, one_line, read_tree
from megatron_rl.errors import UserError, UserErrors
from megatron_rl.redaction import redacted


@dataclass(frozen=True)
class LoadedConfig:
    """Hold a configuration with the origin of each value and every mistake found while loading.

    Where ``errors`` is not empty, ``broken`` names the paths whose value is a placeholder or a default;
    None for ``config`` means that a file could not be read. ``files`` are those that were, the named one
    first, then its base and so on. ``tree`` holds the values as they were written, overrides included.
    """

    config: RunConfig | None
    path: Path | None
    origins: Mapping[str, Origin]
    errors: tuple[UserError, ...] = ()
    broken: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()
    tree: Section = field(default_factory=Section)

    def valid(self) -> RunConfig:
        """Return the configuration, or raise UserErrors with every mistake."""
        if self.errors or self.config is None:
            raise UserErrors(self.errors)
        return self.config


def load(path: str | Path, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Read a YAML file and ``key.path=value`` overrides, collecting mistakes instead of raising.

    ``base: other.yaml`` in the file lays it over another one, see `base`.
    """
    errors: list[UserError] = []
    tree, files = read_with_base(Path(path), errors)
    if tree is None:
        return LoadedConfig(None, Path(path), {}, tuple(errors), files=files)
    return replace(_finish(tree, Path(path), overrides, errors), files=files)


def load_text(text: str, overrides: Iterable[str] = (), name: str = "configuration") -> LoadedConfig:
    """Read YAML text as `load` reads a file."""
    errors: list[UserError] = []
    tree = read_tree(text, name, errors)
    if errors and not tree.children:
        return LoadedConfig(None, None, {}, tuple(errors))
    return _finish(tree, None, overrides, errors)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the typed configuration of a YAML file; raises UserErrors with every mistake at once."""
    return load(path, overrides).valid()


def _finish(
    tree: Section, path: Path | None, overrides: Iterable[str], errors: list[UserError]
) -> LoadedConfig:
    apply_overrides(tree, overrides, errors)
    refuse_base(tree, errors)
    _name_megatron_model(tree)
    config, parse = parse_tree(tree, errors)
    return LoadedConfig(config, path, parse.origins, tuple(parse.errors), frozenset(parse.broken), tree=tree)


def parse_tree(tree: Section, errors: list[UserError]) -> tuple[RunConfig, Parse]:
    """Return the configuration of a whole tree and what parsing found; mistakes are added to ``errors``."""
    parse = Parse(errors=errors)
    job = tree.children.get("job")
    if isinstance(job, Leaf) and job.value in JOBS:
        parse.job = job.value
    return parse_section(RunConfig, tree, parse), parse


def _name_megatron_model(tree: Section) -> None:
    """Let ``model.path`` be the folder that is written for ``model.megatron``, where nothing else is said."""
    model, run_dir = tree.children.get("model"), tree.children.get("run_dir")
    if not isinstance(model, Section) or "path" in model.children:
        return
    checkpoint = model.children.get("megatron")
    if isinstance(checkpoint, Leaf) and isinstance(run_dir, Leaf) and isinstance(checkpoint.value, str):
        path = RunFolder(str(run_dir.value)).megatron_model("actor")
        model.children["path"] = Leaf(str(path), Origin("derived", "written for model.megatron"))


def to_plain(value: Any, name: str = "") -> Any:
    """Return a configuration as the mappings and values that YAML or JSON write."""
    if dataclasses.is_dataclass(value):
        return {
            item.name: to_plain(getattr(value, item.name), item.name) for item in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: to_plain(inner, key) for key, inner in value.items()}
    if isinstance(value, tuple):
        return format_ranges(value) if name == "ranks" and value else list(value)
    return value


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return every plain value of a configuration by its dotted path."""
    return {path: value for path, _, value in settings(config)}


def changes(saved: str, config: RunConfig) -> list[str]:
    """Return a line per setting that differs from those in the text of a `dump`, of a run that goes on.

    Where a run writes, how long it waits and what it keeps does not concern its numbers.
    """
    loaded = load_text(saved, name="config.yaml")
    if loaded.errors or loaded.config is None:
        return [f"the settings that the run began with cannot be read: {loaded.errors[0].message}"]
    before, now = flatten(loaded.config), flatten(without_secrets(config))
    return [
        f"{name} was {one_line(to_plain(before.get(name)))} and is {one_line(to_plain(now.get(name)))}"
        + (": the prompts do not come as they would have" if name.startswith(_ORDER) else "")
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and not name.startswith(_WITHOUT_NUMBERS)
    ]


_WITHOUT_NUMBERS = ("run_dir", "checkpoint.", "rank_timeout")
_ORDER = (
    "seed", "data.", "batch.prompts_per_step", "rollout.order", "rollout.oversample", "rollout.partial",
    "rollout.round_tokens", "asynchrony.",
)  # fmt: skip
"""Beginnings of the settings that decide which prompts make a step."""


def _entries(section: Any) -> list[tuple[str, Any]]:
    if isinstance(section, dict):
        return list(section.items())
    return [(item.name, getattr(section, item.name)) for item in dataclasses.fields(section)]


def without_secrets(config: RunConfig) -> RunConfig:
    """Return the configuration as it may be written down: values under names of secrets are hidden.

    They are among what is handed to the user's own code and to other programs.
    """
    rollout, environment = config.rollout, config.rollout.environment
    if environment is not None:
        environment = replace(environment, settings=redacted(environment.settings))
    texts = {name: value for name, value in rollout.vllm.items() if isinstance(value, str)}
    rollout = replace(rollout, environment=environment, vllm=rollout.vllm | redacted(texts))
    reward = replace(config.reward, arguments=redacted(config.reward.arguments))
    return replace(config, reward=reward, rollout=rollout)


def dump(config: RunConfig, origins: Mapping[str, Origin] | None = None) -> str:
    """Return YAML that loads to an equal configuration; ``origins`` become comments beside the values."""
    lines: list[str] = []
    _dump(config, 0, "", origins or {}, lines)
    return "\n".join(lines) + "\n"


def _dump(value: Any, depth: int, prefix: str, origins: Mapping[str, Origin], lines: list[str]) -> None:
    for name, inner in _entries(value):
        path = f"{prefix}.{name}" if prefix else name
        indent = "  " * depth
        if is_section(inner):
            lines.append(f"{indent}{name}:")
            _dump(inner, depth + 1, path, origins, lines)
            continue
        text = one_line(to_plain(inner, name))
        origin = origins.get(path)
        comment = "" if origin is None or origin.kind == "default" else "  # " + " ".join(str(origin).split())
        lines.append(f"{indent}{name}: {text}{comment}")
