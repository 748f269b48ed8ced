"""Sampling profiles by name: of the configuration, of a Python file, and for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from config_workspace import CONFIG

import megatron_rl
from megatron_rl.config import sampling_profiles
from megatron_rl.config.load import describe_changes, dump, load_config, load_text
from megatron_rl.errors import UserErrors

PROFILES = """
rollout:
  top_p: 0.9
  sampling_profiles:
    careful: {temperature: 0.7, top_p: 0.95, max_response_tokens: {8: 4, more: 6}}
    proof: careful
  sampling_profile: careful
"""


@pytest.fixture(autouse=True)
def no_profiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sampling_profiles, "_registered_profiles", {})
    yield


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "base.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def write_file(text: str) -> str:
        Path("run.yaml").write_text(f"base: base.yaml\n{text}")
        return "run.yaml"

    return write_file


def errors_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load_config(path, overrides)
    return [str(error) for error in caught.value.errors]


def test_a_profile_of_the_whole_run_gives_its_settings(write) -> None:
    rollout = load_config(write(PROFILES)).rollout
    assert (rollout.temperature, rollout.top_p) == (0.7, 0.95)
    assert rollout.max_response_tokens == rollout.sampling_profiles["careful"]["max_response_tokens"]
    assert rollout.sampling_profiles["proof"] == rollout.sampling_profiles["careful"]


def test_the_saved_configuration_needs_no_profile(write) -> None:
    config = load_config(write(PROFILES))
    assert load_text(dump(config)).valid() == config
    assert describe_changes(dump(config), config) == []


def test_an_override_takes_a_profile(write) -> None:
    path = write("rollout: {sampling_profiles: {bold: {temperature: 1.2}}}")
    assert load_config(path, ["rollout.sampling_profile=bold"]).rollout.temperature == 1.2
    overrides = ["rollout.sampling_profile=bold", "rollout.temperature=0.5"]
    assert load_config(path, overrides).rollout.temperature == 0.5


def test_python_code_registers_profiles_for_runs_and_tasks(write) -> None:
    megatron_rl.sampling_profile("bold", temperature=1.2, banned_tokens=("7",), logit_bias={"1": 0.5})
    rollout = load_config(write("rollout: {sampling_profile: bold}")).rollout
    assert (rollout.temperature, rollout.banned_tokens, rollout.logit_bias) == (1.2, ("7",), {"1": 0.5})
    assert rollout.sampling_profiles["bold"]["temperature"] == 1.2

    # The configuration's own profile of that name replaces it.
    text = "rollout: {sampling_profiles: {bold: {top_k: 3}}, sampling_profile: bold}"
    rollout = load_config(write(text)).rollout
    assert (rollout.banned_tokens, rollout.top_k) == ((), 3)


def test_a_file_registers_profiles(write) -> None:
    calls = [f"megatron_rl.sampling_profile('k{value}', top_k={value})" for value in (1, 2)]
    Path("profiles.py").write_text("\n".join(["import megatron_rl", *calls]))
    text = "rollout: {sampling_profiles: {math: 'profiles.py:k2'}, sampling_profile: 'profiles.py:k1'}"
    rollout = load_config(write(text)).rollout
    assert rollout.top_k == 1
    assert {name: profile["top_k"] for name, profile in rollout.sampling_profiles.items()} == {
        "math": 2,
        "k1": 1,
        "k2": 2,
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("carefull", ("there is no sampling profile 'carefull'", "careful", "did you mean 'careful'?")),
        ("zzz", ("expected: one of careful", "file.py:NAME")),
        ("absent.py:bold", ("absent.py does not exist",)),
        ("empty.py:bold", ("there is no sampling profile 'bold'", "in empty.py")),
        ("broken.py:bold", ("cannot import broken.py", "ZeroDivisionError")),
        ("bad.py:bold", ("has no setting 'temprature'", "write temperature")),
        ("[1]", ("`rollout.sampling_profile` has a value of the wrong type",)),
    ],
)
def test_unknown_profiles_are_errors_with_the_list_of_names(write, value, expected) -> None:
    Path("empty.py").write_text("")
    Path("broken.py").write_text("1 / 0\n")
    Path("bad.py").write_text("import megatron_rl\nmegatron_rl.sampling_profile('bold', temprature=1)\n")
    path = write("rollout: {sampling_profiles: {careful: {temperature: 0.7}}}")
    (error,) = errors_of(path, f"rollout.sampling_profile={value}")
    assert all(text in error for text in expected), error
    if value != "[1]":
        (error,) = errors_of(path, f"rollout.sampling_profiles.math={value}")
        assert all(text in error for text in expected), error


def test_a_registered_profile_is_there_for_records_of_a_configuration_without_rollout() -> None:
    megatron_rl.sampling_profile("bold", temperature=1.2)
    config = load_text("{model: {path: m}, data: {train: d.jsonl}, run_dir: r, steps: 1}").config
    assert config is not None
    assert config.rollout.sampling_profiles["bold"] == {"temperature": 1.2}
    assert load_text(dump(config)).config == config
