"""What stands on the fields of a configuration: meaning, bounds, choices, and names of other projects."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_workspace import CONFIG

from megatron_rl.check.stages import SMOOTHED_LOSSES
from megatron_rl.cli.reference import PAGES
from megatron_rl.config.field_types import (
    convert_value,
    entry_class,
    field_hints,
    section_class,
    union_members,
)
from megatron_rl.config.load import load_text
from megatron_rl.config.placement import HALF_PRESETS
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.models import OptimizerConfig
from megatron_rl.config.sections.stages import PreferenceConfig
from megatron_rl.config.setting import Setting, setting_of, value_errors

ROOT = Path(__file__).resolve().parents[2]


def sections(cls: type = RunConfig) -> Iterator[type]:
    yield cls
    for hint in field_hints(cls).values():
        section = section_class(hint) or entry_class(hint)
        if section is not None:
            yield from sections(section)


def keys() -> Iterator[tuple[str, Any, Setting, Any]]:
    """Yield name, type, description and default of every key of every section class."""
    for cls in dict.fromkeys(sections()):
        for item in dataclasses.fields(cls):
            yield f"{cls.__name__}.{item.name}", field_hints(cls)[item.name], setting_of(item), item.default


def test_every_key_has_a_meaning_and_every_unset_key_says_what_that_means() -> None:
    for name, hint, said, default in keys():
        assert said.meaning.endswith("."), name
        assert bool(said.unset) == (default is None), name
        # Where null is not the default, it has a meaning of its own.
        says_null = "; null " in said.meaning
        assert (type(None) in union_members(hint)) == (default is None or says_null), name


def test_every_number_is_bounded_on_both_sides() -> None:
    for name, hint, said, default in keys():
        number = int in union_members(hint) or float in union_members(hint)
        low = said.at_least is not None or said.more_than is not None
        high = said.at_most is not None or said.less_than is not None
        assert (low, high) == (number, number), name
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        assert not is_number or said.is_within_bounds(default)


def test_defaults_are_choices() -> None:
    for name, _, said, default in keys():
        # A setting with the choice of a name, such as `auto`, may take a number besides.
        assert not said.choices or not isinstance(default, str) or default in said.choices, name
        assert set(said.spellings.values()) <= set(said.choices), name
        assert not set(said.refusal_reasons) & set(said.choices), name


def test_a_name_of_another_project_means_one_key() -> None:
    names = [name for _, _, said, _ in keys() for name in said.foreign_names]
    names += [name for _, _, said, _ in keys() for _, name in said.foreign_names_below]
    twice = [name for name, count in Counter(name.name for name in names).items() if count > 1]
    assert not twice


def test_placements_are_those_that_can_be_chosen() -> None:
    said = next(setting_of(item) for item in dataclasses.fields(RunConfig) if item.name == "placement")
    assert {*said.choices} == {"colocate", *HALF_PRESETS}


def choices(section: type, name: str) -> tuple[str, ...]:
    return next(setting_of(item).choices for item in dataclasses.fields(section) if item.name == name)


def test_losses_of_pairs_are_those_that_can_be_chosen() -> None:
    import torch

    from megatron_rl.algorithms.preference import dpo_loss

    one = torch.ones(1)
    for kind in set(choices(PreferenceConfig, "loss")) - {"simpo"}:  # which needs no reference
        assert dpo_loss(one, one, one, one, kind=kind).isfinite()
        plain, smoothed = (dpo_loss(one, -one, one, one, kind=kind, label_smoothing=e) for e in (0.0, 0.1))
        assert (plain != smoothed) == (kind in SMOOTHED_LOSSES), kind
    with pytest.raises(ValueError):
        dpo_loss(one, one, one, one, kind="another")


def test_decays_are_those_of_megatron() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = object.__new__(OptimizerParamScheduler)
    scheduler.__dict__ |= {"lr_warmup_steps": 0, "lr_decay_steps": 10, "num_steps": 5}
    scheduler.__dict__ |= {"init_lr": 0.0, "min_lr": 0.0, "max_lr": 1.0}
    group = {"max_lr": 1.0, "min_lr": 0.0}
    rates = {}
    for decay in choices(OptimizerConfig, "decay"):
        scheduler.lr_decay_style = decay
        rates[decay] = scheduler.get_lr(group)
    assert rates == {"constant": 1.0, "linear": 0.5, "cosine": pytest.approx(0.5)}


@pytest.mark.parametrize(
    "override",
    [
        "rank_timeout=1e300",
        "reward.timeout=1e300",
        "rollout.temperature=1e300",
        "actor.optimizer.clip_grad=1e300",
        "reward.weight=-1e300",
        "steps=9000000000000000000",
        "reward={models: {judge: {path: a, weight: 1e300}}}",
        "reward={models: {judge: {path: a, layout: {tensor: 9000000}}}}",
        "reward={models: {judge: {path: a, training: {data: a, steps: 1, optimizer: {beta1: 1.0}}}}}",
        "sft={data: a, steps: 1, optimizer: {decay: lineer}}",
        "reward={models: {judge: {path: ' '}}}",
    ],
)
def test_what_a_section_says_holds_wherever_it_stands(override: str) -> None:
    loaded = load_text(CONFIG, [override])
    assert len(value_errors(loaded.valid())) == 1


@pytest.mark.parametrize(
    ("hint", "raw", "typed"),
    [
        (int, 1e2, 100),
        (float, 3, 3.0),
        (tuple[int, ...], "0-2", (0, 1, 2)),
        (tuple[str, ...] | None, ["a"], ("a",)),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
    ],
)
def test_plain_values_are_converted(hint: Any, raw: Any, typed: Any) -> None:
    accepted, value = convert_value(hint, raw)
    assert accepted and value == typed and type(value) is type(typed)


@pytest.mark.parametrize("name", PAGES)
def test_pages_made_from_the_code_are_what_it_says(name: str) -> None:
    """Write one with ``python -m megatron_rl.cli.reference NAME > docs/NAME.md``."""
    assert (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") == PAGES[name]()


def test_the_reference_has_every_key() -> None:
    page = "".join(make() for name, make in PAGES.items() if name.startswith("configuration"))
    for name, _, said, _ in keys():
        assert f"`{name.partition('.')[2]}`" in page and said.meaning in page
