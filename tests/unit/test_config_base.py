"""A configuration file laid over another one, and the recipes that use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from config_workspace import CONFIG, write_workspace

from megatron_rl.algorithms.algorithm import ALGORITHMS
from megatron_rl.cli.main import main
from megatron_rl.config.load import dump, load, load_config, load_text
from megatron_rl.errors import UserErrors

pytestmark = pytest.mark.usefixtures("functions_load_once")

SHORT = "\n".join(line for line in CONFIG.splitlines() if "samples_per_prompt" not in line)
ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))
BEFORE = {
    "dpo": "grpo",
    "ppo_reward_model": "ppo",
    "distillation_grpo": "grpo",
    "distillation_top_k": "distillation",
}
"""Recipes that are about what is trained before the algorithm, or about one of its pieces."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_the_files_values_lie_over_the_bases(folder: Path) -> None:
    text = "base: ../base.yaml\nsteps: 3\nactor: {layout: {tensor: 4}, recompute: full}\n"
    text += "evaluation: {sets: {held_out: other.jsonl}}\n"
    loaded = load(write("recipes/a.yaml", text), ["batch.prompts_per_step=2"])
    config = loaded.valid()
    assert (config.steps, config.actor.layout.tensor, config.actor.layout.pipeline) == (3, 4, 2)
    assert config.actor.recompute == "full" and config.evaluation.sets["held_out"].data == "other.jsonl"
    assert config.data.train == "train.jsonl"
    assert config.batch.prompts_per_step == 2 and config.batch.samples_per_prompt == 4
    assert [str(file) for file in loaded.files] == ["recipes/a.yaml", "base.yaml"]


def test_every_value_keeps_the_place_where_it_is_written(folder: Path) -> None:
    origins = load(write("recipes/a.yaml", "base: ../base.yaml\nactor: {layout: {tensor: 4}}\n")).origins
    assert str(origins["actor.layout.tensor"]) == "recipes/a.yaml:2"
    assert str(origins["actor.layout.pipeline"]) == "base.yaml:19"
    assert str(origins["seed"]) == "default" and "base" not in origins


def test_a_base_may_have_a_base_and_a_list_replaces_a_list(folder: Path) -> None:
    write("middle.yaml", "base: base.yaml\nsteps: 7\nrollout: {stop: [a, b]}\n")
    loaded = load(write("recipes/a.yaml", "base: ../middle.yaml\nrollout: {stop: [c]}\n"))
    config = loaded.valid()
    assert (config.steps, config.rollout.stop, config.rollout.tensor) == (7, ("c",), 2)
    assert str(loaded.origins["steps"]) == "middle.yaml:2" and len(loaded.files) == 3
    assert load_text(dump(config, loaded.origins)).valid() == config


def test_null_takes_away_what_the_base_says(folder: Path) -> None:
    base = "base: base.yaml\nsft: {data: sft.jsonl, steps: 1}\n"
    base += "evaluation: {at_start: false, sets: {hard: b.jsonl}}\n"
    write("middle.yaml", f"{base}actor: {{offload: true}}\nrollout: {{vllm: {{seed: 1}}}}\n")
    text = "base: middle.yaml\nsft: null\nbatch: {samples_per_prompt: null}\nactor: null\n"
    text += "evaluation: {sets: {held_out: null}}\nrollout: {vllm: null}\n"
    loaded = load(write("a.yaml", text))
    config = loaded.valid()
    assert config.sft is None and config.rollout.vllm == {} and config.rollout.tensor == 2
    assert config.batch.samples_per_prompt == load_text(SHORT).valid().batch.samples_per_prompt
    assert (
        config.batch.prompts_per_step == 16 and str(loaded.origins["batch.samples_per_prompt"]) == "default"
    )
    assert (config.actor.offload, config.actor.layout.tensor) == (False, 1)
    assert list(config.evaluation.sets) == ["hard"] and not config.evaluation.at_start
    assert load("a.yaml", ["evaluation.sets.hard=null"]).valid().evaluation.sets == {}
    assert one_error(write("b.yaml", "base: base.yaml\nsteps: null\n"))["got"] == "null (nothing)"


def test_a_base_alone_is_the_base(folder: Path) -> None:
    assert load_config(write("recipes/a.yaml", "base: ../base.yaml\n")) == load_config("base.yaml")


def test_check_shows_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    write("recipe.yaml", "base: config.yaml\nsteps: 3\n")
    assert main(["check", "recipe.yaml", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "recipe.yaml:2" in shown and "config.yaml:6" in shown


def one_error(path: str, *overrides: str) -> dict[str, str | None]:
    with pytest.raises(UserErrors) as caught:
        load_config(path, overrides)
    assert len(caught.value.errors) == 1, caught.value
    return caught.value.errors[0].to_json()


def test_a_base_that_is_not_there(folder: Path) -> None:
    assert one_error(write("recipes/a.yaml", "steps: 3\nbase: ../bse.yaml\n")) == {
        "message": "bse.yaml does not exist",
        "where": "recipes/a.yaml:2",
        "expected": "a YAML file",
        "got": "no bse.yaml in .; there is base.yaml",
        "fix": "other files in its folder: base.yaml",
    }


def test_a_circle_of_bases(folder: Path) -> None:
    write("b.yaml", "base: recipes/a.yaml\n")
    assert one_error(write("recipes/a.yaml", "base: ../b.yaml\n")) == {
        "message": "`base` leads back to a file that was already read",
        "where": "b.yaml:1",
        "expected": "a chain of files that ends",
        "got": "recipes/a.yaml -> b.yaml -> recipes/a.yaml",
        "fix": "remove `base` from one of them",
    }


def test_the_later_of_several_bases_wins_and_the_file_over_all(folder: Path) -> None:
    write(
        "part.yaml", "steps: 5\nbatch: {prompts_per_step: 2}\nrollout: {stop: [a]}\ndata: {shuffle: null}\n"
    )
    write("first.yaml", "base: base.yaml\nsteps: 7\ndata: {shuffle: false}\nactor: {recompute: full}\n")
    loaded = load(write("recipes/a.yaml", "base: [../first.yaml, ../part.yaml]\nrollout: {stop: [b]}\n"))
    config = loaded.valid()
    assert (config.steps, config.rollout.stop, config.actor.recompute) == (5, ("b",), "full")
    # A null of the later base restores the default, and the other base's other values stay.
    assert config.data.shuffle and (config.batch.prompts_per_step, config.batch.samples_per_prompt) == (2, 4)
    origins = loaded.origins
    assert [str(origins[key]) for key in ("steps", "actor.recompute", "rollout.stop")] == [
        "part.yaml:1",
        "first.yaml:4",
        "recipes/a.yaml:2",
    ]
    assert [str(file) for file in loaded.files] == ["recipes/a.yaml", "first.yaml", "base.yaml", "part.yaml"]
    # A base of a later one wins over an earlier one, too.
    config = load_config(write("b.yaml", "base: [part.yaml, first.yaml]\n"))
    assert (config.steps, config.data.shuffle, config.batch.prompts_per_step) == (7, False, 16)


def test_several_bases_may_share_one_and_may_not_lead_back(folder: Path) -> None:
    write("one.yaml", "base: base.yaml\nsteps: 7\n")
    write("two.yaml", "base: base.yaml\nseed: 9\n")
    loaded = load(write("a.yaml", "base: [one.yaml, two.yaml]\n"))
    # The shared base is below both: it does not undo the first one's values.
    config = loaded.valid()
    assert (config.seed, config.steps) == (9, 7) and str(loaded.origins["steps"]) == "one.yaml:2"
    assert [str(file) for file in loaded.files] == ["a.yaml", "one.yaml", "base.yaml", "two.yaml"]
    # Also where it is named by itself after a file that starts from it, or through a link.
    Path("link.yaml").symlink_to("base.yaml")
    Path("links").mkdir()
    write("links/three.yaml", "base: [../one.yaml, base.yaml]\n")
    Path("links/base.yaml").symlink_to("../base.yaml")
    for name in ("base.yaml", "link.yaml", "links/base.yaml", "links/three.yaml"):
        assert load_config(write("d.yaml", f"base: [one.yaml, {name}]\n")).steps == 7
    error = one_error(write("two.yaml", "base: [base.yaml, a.yaml]\n"))
    assert error["got"] == "two.yaml -> a.yaml -> two.yaml" and error["where"] == "a.yaml:1"
    error = one_error(write("c.yaml", "base: [base.yaml, gone.yaml]\n"))
    assert (error["message"], error["where"]) == ("gone.yaml does not exist", "c.yaml:1")


def test_a_link_in_another_folder_has_the_bases_of_that_folder(folder: Path) -> None:
    for name in ("first", "second"):
        Path(name).mkdir()
    write("first/common.yaml", "base: own.yaml\nevaluation: {every: 5}\n")
    write("first/own.yaml", "base: ../base.yaml\nsteps: 7\n")
    write("second/own.yaml", "base: ../base.yaml\nseed: 9\n")
    Path("second/common.yaml").symlink_to("../first/common.yaml")
    loaded = load(write("a.yaml", "base: [first/common.yaml, second/common.yaml]\n"))
    config = loaded.valid()
    assert (config.steps, config.seed, config.evaluation.every) == (7, 9, 5)
    assert "second/own.yaml" in map(str, loaded.files)


def test_a_base_that_is_a_link_to_itself_is_an_error(folder: Path) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    for value in ("loop.yaml", "[base.yaml, loop.yaml]"):
        error = one_error(write("a.yaml", f"base: {value}\n"))
        assert error["message"] == "the configuration file cannot be read"


@pytest.mark.parametrize("value", ["[]", "[base.yaml, 3]", "3", "{a: b}", "''", "null"])
def test_a_base_that_is_no_name(folder: Path, value: str) -> None:
    error = one_error(write("recipes/a.yaml", f"base: {value}\nsteps: 3\n"))
    assert error["message"] == "`base` is not the name of a file, or a list of names"
    assert error["where"] == "recipes/a.yaml:1"


def test_a_base_that_is_a_folder_or_no_yaml(folder: Path) -> None:
    assert one_error(write("a.yaml", "base: recipes\n"))["message"] == "the configuration file cannot be read"
    write("b.yaml", "a: [1\n")
    assert one_error(write("a.yaml", "base: b.yaml\n"))["message"] == (
        "the configuration file is not valid YAML"
    )


def test_a_base_is_for_files_only(folder: Path) -> None:
    message = "`base` can only be written in a configuration file"
    assert one_error("base.yaml", "base=recipes/a.yaml")["message"] == message
    with pytest.raises(UserErrors, match=message):
        load_text("base: base.yaml\n" + CONFIG).valid()


def test_every_algorithm_without_a_critic_has_a_recipe() -> None:
    found, critics = {path.stem for path in RECIPES} - BEFORE.keys(), {"ppo", "vapo"}
    assert {name for name, algorithm in ALGORITHMS.items() if algorithm.needs_critic} == critics
    assert found - critics == set(ALGORITHMS) - critics


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_say_in_a_few_lines_what_they_are(path: Path) -> None:
    """That each passes `check` is tested with the other configurations of the folder."""
    config = load_config(path)
    assert config.algorithm.name == BEFORE.get(path.stem, path.stem)
    assert config.run_dir == f"runs/recipes/{path.stem}"
    assert len([line for line in path.read_text().splitlines() if not line.startswith("#")]) <= 14


def test_recipes_need_no_data_to_be_checked(tmp_path: Path) -> None:
    """The shape of the model comes with the base's folder where the run's data is still to be made."""
    target = tmp_path / "configs"
    (target / "recipes").mkdir(parents=True)
    (target / "models").symlink_to(ROOT / "configs/models")
    for name in ("quickstart.yaml", "recipes/grpo.yaml"):
        (target / name).write_text((ROOT / "configs" / name).read_text())
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", "check", "configs/recipes/grpo.yaml", "-v"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "MEMORY" in done.stdout, done.stdout + done.stderr
