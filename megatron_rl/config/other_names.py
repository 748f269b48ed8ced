"""Names that are no keys here: what other projects call ours, and what ours were called before.

Other projects' names of a key stand on its field, see `setting`. A name may be written with the sections
above it, as far as they are needed to tell it from another; the longest match wins.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_rl.config.field_types import hints, section_class
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.algorithm import FORMER_SETTINGS
from megatron_rl.config.setting import ForeignName, setting_of

RENAMED: Mapping[str, str] = {
    **FORMER_SETTINGS,
    "data.eval": "evaluation.sets.NAME.data",
    "evaluation.samples": "evaluation.sets.NAME.samples",
    "evaluation.temperature": "evaluation.sets.NAME.temperature",
    "evaluation.max_prompts": "evaluation.sets.NAME.max_prompts",
}
"""Former key of this project -> its key now; what stood below it stands below that."""

NO_COUNTERPART: Mapping[str, str] = {}
"""Name of another project without a counterpart -> why there is none, or what there is instead."""

FOREIGN_SECTIONS: Mapping[str, ForeignName] = {
    "actor_rollout_ref": ForeignName("verl", "actor, rollout, reference"),
    "trainer": ForeignName("verl", "the top level (steps, run_dir, world_size), evaluation, checkpoint"),
    "custom_reward_function": ForeignName("verl", "reward"),
    "reward_model": ForeignName("verl", "reward"),
    "policy": ForeignName("NeMo-RL", "model, actor, rollout"),
    "grpo": ForeignName("NeMo-RL", "batch, algorithm"),
    "loss_fn": ForeignName("NeMo-RL", "algorithm"),
    "cluster": ForeignName("NeMo-RL", "world_size and gpus_per_node"),
    "checkpointing": ForeignName("NeMo-RL", "checkpoint"),
    "logger": ForeignName("NeMo-RL", "run_dir, logging"),
}
"""Sections of other projects that hold what stands in several of ours: name -> project and our names."""


@dataclasses.dataclass(frozen=True)
class OtherName:
    """Our key of a name that is no key, with the project that has the name, None for no counterpart.

    ``reason`` says why there is no counterpart, or what there is instead. For the other fields see
    `ForeignName`.
    """

    project: str
    ours: str | None
    conversion: str = ""
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])
    piece: str = ""
    reason: str = ""

    @property
    def source(self) -> str:
        """Return the project that has the name, as text that follows the name."""
        if self.project == "common":
            return ""
        return ", the former name" if self.project == "" else f", a name of {self.project}"


@functools.cache
def foreign_names() -> Mapping[str, OtherName]:
    """Return every name of other projects with ours; a key of a section means the section's first place."""
    names: dict[str, OtherName] = {}
    for path, name in stated_names():
        other = OtherName(name.project, path, name.conversion, name.values, name.piece)
        names.setdefault(name.name, other)
    for name, reason in NO_COUNTERPART.items():
        names[name] = OtherName("common", None, reason=reason)
    return names


def other_name(path: str) -> OtherName | None:
    """Return what a dotted name that is no key is called here, or None when it is not known."""
    path = path.replace("-", "_")
    for former, ours in RENAMED.items():
        if path == former or path.startswith(f"{former}."):
            return OtherName("", ours + path.removeprefix(former))
    names = path.split(".")
    suffixes = (".".join(names[start:]) for start in range(len(names)))
    return next((foreign_names()[name] for name in suffixes if name in foreign_names()), None)


def name_in_section(path: str, section: str, below: Iterable[str]) -> OtherName | None:
    """Return what a dotted name that is no key is called in the section that it was written in.

    ``below`` are the paths of the section's own values, relative to it. None where the section has no such
    setting.
    """
    other = other_name(path)
    if other is None or other.ours is None or not section:
        return None
    words = other.ours.split(".")
    ends = [".".join(words[start:]) for start in range(len(words))]
    end = next((end for end in ends if end in below), None)
    return dataclasses.replace(other, ours=f"{section}.{end}") if end is not None else None


def stated_names() -> Iterator[tuple[str, ForeignName]]:
    """Yield our key and another project's name of it, for each name that stands on a field."""
    yield from _stated(RunConfig, "")


def _stated(cls: type, prefix: str) -> Iterator[tuple[str, ForeignName]]:
    for item in dataclasses.fields(cls):
        path = prefix + item.name
        said = setting_of(item)
        yield from ((path, name) for name in said.foreign_names)
        yield from ((f"{path}.{key}", name) for key, name in said.foreign_names_below)
        section = section_class(hints(cls)[item.name])
        if section is not None:
            yield from _stated(section, f"{path}.")
