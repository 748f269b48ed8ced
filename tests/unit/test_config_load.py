"""Loading, overriding and writing configurations back."""

from __future__ import annotations

import dataclasses
import pickle
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from config_workspace import CONFIG

from megatron_rl.algorithms.algorithm import KINDS
from megatron_rl.config.field_types import format_ranges, parse_ranges, value_paths
from megatron_rl.config.load import describe_changes, dump, flatten, load_config, load_text
from megatron_rl.config.other_names import FOREIGN_SECTIONS, foreign_names
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.sections.evaluation import EvaluationSetConfig
from megatron_rl.errors import UserError, UserErrors

ROOT = Path(__file__).resolve().parents[2]


def test_values_are_typed() -> None:
    config = load_text(
        CONFIG, ["actor.optimizer.learning_rate=1e-6", "actor.layout.ranks=0-1,3", "steps=1e2"]
    ).valid()
    assert config.actor.optimizer.learning_rate == 1e-6
    assert config.actor.layout.ranks == (0, 1, 3)
    assert config.steps == 100 and isinstance(config.steps, int)
    assert config.mismatch.warn is None


def test_what_changes_when_a_run_goes_on_is_told_line_by_line() -> None:
    saved = dump(load_text(CONFIG).valid())
    assert describe_changes(saved, load_text(CONFIG, ["run_dir=moved", "checkpoint.every=1"]).valid()) == []
    words = ["batch.prompts_per_step=8", "actor.optimizer.learning_rate=1e-3", "seed=7"]
    assert describe_changes(saved, load_text(CONFIG, words).valid()) == [
        "actor.optimizer.learning_rate was 1.0e-06 and is 0.001",
        "batch.prompts_per_step was 16 and is 8: the order of the prompts changes",
        "seed was 1 and is 7: the order of the prompts changes",
    ]
    (told,) = describe_changes("steps: [", load_text(CONFIG).valid())
    assert "cannot be read" in told


def test_configurations_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load_text(CONFIG).valid().steps = 3  # pyright: ignore


@pytest.mark.parametrize("none", ["null", "None", "~", ""])
def test_overrides_can_remove_optional_values(none: str) -> None:
    loaded = load_text(
        CONFIG + "sft: {data: a.jsonl, steps: 3}\n", [f"sft={none}", f"rollout.environment={none}"]
    )
    config = loaded.valid()
    assert config.sft is None and config.rollout.environment is None


def test_overrides_make_sections() -> None:
    config = load_text(CONFIG, ["reference.layout.tensor=2", "rollout.vllm.enforce_eager=true"]).valid()
    assert config.reference is not None and config.reference.layout is not None
    assert config.reference.layout.tensor == 2
    assert config.rollout.vllm == {"enforce_eager": True}


def test_run_folders_of_earlier_versions_load_where_their_settings_say_nothing() -> None:
    assert load_text(CONFIG + "algorithm: {name: rloo, settings: {}}\n").valid().algorithm.name == "rloo"
    assert load_text(CONFIG + "algorithm: {settings: {clip_ratio_high: 0.3}}\n").errors


def test_a_later_override_wins() -> None:
    assert load_text(CONFIG, ["steps=3", "steps=4"]).valid().steps == 4


def test_an_override_replaces_the_section_it_names() -> None:
    layout = load_text(CONFIG, ["actor.layout={pipeline: 4}"]).valid().actor.layout
    assert (layout.tensor, layout.pipeline) == (1, 4)


def test_a_nested_default_of_the_outer_section_stays() -> None:
    config = load_text(CONFIG, ["sft={data: a, steps: 1, optimizer: {warmup_steps: 1}}"]).valid()
    assert config.sft is not None and config.sft.optimizer.learning_rate == 1e-5


def test_origins() -> None:
    origins = load_text(CONFIG, ["steps=3"], name="a.yaml").origins
    assert str(origins["model.path"]) == "a.yaml:2"
    assert str(origins["steps"]) == "override steps=3"
    assert str(origins["seed"]) == "default"
    absent = ("sft", "preference", "reference", "teacher", "critic", "rollout.environment")
    absent += ("actor.lora", "teacher_server", "reward.http", "reward.judge", "reward.code")
    below = tuple(f"{section}." for section in absent)
    present = {path for path in value_paths(RunConfig) if not path.startswith(below)}
    names = (item.name for item in dataclasses.fields(EvaluationSetConfig))
    held_out = {f"evaluation.sets.held_out.{name}" for name in names}
    assert origins.keys() == (present - {"evaluation.sets"}) | set(absent) | held_out


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ('rollout.stop=["\\n", "a: b", "#", "é"]', "actor.layout.ranks=0-3"),
        ("reference={path: other, layout: {tensor: 2, ranks: [3, 1]}}", "seed=7"),
        ("sft={data: 'a b', steps: 5}", "rollout.sampling_profiles={math: {temperature: 0.7, stop: ['x']}}"),
        (
            "algorithm.correction={name: mis, band: [0.5, 2.0], threshold: null}",
            "run_dir='null'",
            "model.path='1e3'",
        ),
    ],
)
def test_dump_loads_to_an_equal_configuration(overrides: tuple[str, ...]) -> None:
    loaded = load_text(CONFIG, overrides)
    for origins in (None, loaded.origins):
        assert load_text(dump(loaded.valid(), origins)).valid() == loaded.config


def test_dump_shows_origins() -> None:
    loaded = load_text(CONFIG, ["steps=3"], name="a.yaml")
    assert "steps: 3  # override steps=3" in dump(loaded.valid(), loaded.origins)


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "3,1,2", "5-6,0"])
def test_rank_ranges(text: str) -> None:
    ranks = parse_ranges(text)
    assert ranks is not None and parse_ranges(format_ranges(ranks)) == ranks


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "0-9999999999", "0-99999999", "1;2"])
def test_what_is_no_range(text: str) -> None:
    assert parse_ranges(text) is None


def test_names_of_other_projects_lead_to_names_that_exist() -> None:
    ours = set(value_paths(RunConfig))
    ours |= {
        f"algorithm.{key}.{item.name}"
        for key, kind in KINDS.items()
        for piece in kind.named.values()
        for item in dataclasses.fields(piece)
    }
    sections = {path.rsplit(".", count)[0] for path in ours for count in range(1, path.count(".") + 1)}
    for theirs, name in foreign_names().items():
        assert name.ours in ours | sections or (name.ours is None and name.reason), theirs
        assert theirs not in ours, f"{theirs} is a name of ours"
    assert not set(FOREIGN_SECTIONS) & sections


def test_errors_carry_all_and_survive_a_process_boundary() -> None:
    with pytest.raises(UserErrors) as caught:
        load_config("gone.yaml", ["steps=2"])
    assert isinstance(caught.value, UserError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    error = UserError("wrong", where="a.b", expected="1", got="2\n3", fix="write 1")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).splitlines() == [
        "wrong",
        "  where:    a.b",
        "  expected: 1",
        "  got:      2",
        "            3",
        "  fix:      write 1",
    ]


# A part is a base of whole configurations alone.
@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "parts"),
    ids=lambda path: path.name,
)
def test_shipped_configurations_load(path: Path) -> None:
    config = load_config(path)
    assert load_text(dump(config)).valid() == config
    assert flatten(config)["model.path"]


def test_each_part_is_a_base_of_a_configuration() -> None:
    configs = [path.read_text() for path in (ROOT / "configs").rglob("*.yaml")]
    parts = [path.name for path in (ROOT / "configs/parts").glob("*.yaml")]
    assert parts
    for name in parts:
        assert any(re.search(rf"^base: .*\bparts/{re.escape(name)}", text, re.MULTILINE) for text in configs)
