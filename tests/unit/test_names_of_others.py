"""Every answer to a name of another project is followed, to a valid configuration or to a person's choice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from config_workspace import write_workspace

from megatron_rl.check.configuration import check_config
from megatron_rl.config.load import load
from megatron_rl.config.other_names import NO_COUNTERPART, foreign_keys
from megatron_rl.errors import UserError, nearest

pytestmark = pytest.mark.usefixtures("functions_load_once", "forked_trials")

TABLE = {
    written: answer
    for answers in yaml.safe_load((Path(__file__).parent / "names_of_others.yaml").read_text()).values()
    for written, answer in answers.items()
}
IN_SUITE = 4
"""One in so many names is followed in the suite, all others in the campaign."""
WRITE = re.compile(r"write `([a-z0-9_.]+)(?:: (.*?))?`(, or remove the line)?$")
MAX_FIXES = 3


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_workspace(root)
    return root


def errors_of(*overrides: str) -> tuple[UserError, ...]:
    return check_config(load("config.yaml", overrides)).errors


def follow(written: str) -> tuple[str, str]:
    """Return where the fixes for ``key=value`` lead, as the table writes it, and the last fix."""
    key, _, value = written.partition("=")
    base = ["algorithm.name=ppo"] if "critic" in key else []  # which has a critic
    line, answer, fix = written, "", ""
    for _ in range(MAX_FIXES):
        errors = errors_of(*base, *([line] if line else []))
        if not errors:
            return answer or "ready", fix
        assert len(errors) == 1, "\n".join(map(str, errors))
        error = errors[0]
        fix = error.fix or ""
        if fix.startswith("remove the "):
            absent = "is not a known" in error.message
            line, answer = "", "none" if absent else "drop"
            continue
        exact = WRITE.match(fix)
        if exact is None and answer:
            return f"{answer} ?", fix  # the key is right, and wants another one beside it
        if exact is None:
            named = re.search(r"`([a-z0-9_.]+)(?:: ([^`]*))?`", fix)
            assert named is not None, fix
            return ": ".join(filter(None, named.groups())) + " ?", fix
        target, text = exact.group(1), exact.group(2)
        answer = f"{target}: {text}" if text else target
        line = f"{target}={text or value}"
    raise AssertionError(f"{written}: the fixes lead on and on, the last is: {fix}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "written",
    [
        written if number % IN_SUITE == 0 else pytest.param(written, marks=pytest.mark.campaign)
        for number, written in enumerate(TABLE)
    ],
    ids=str,
)
def test_a_fix_leads_to_a_valid_configuration_with_the_right_key(
    written: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    assert follow(written)[0] == TABLE[written], follow(written)[1]


@pytest.mark.slow
def test_the_table_has_the_names_of_many_projects() -> None:
    assert len(TABLE) > 300


def test_no_name_both_has_a_counterpart_and_has_none() -> None:
    assert not {name.name for _, name in foreign_keys()} & set(NO_COUNTERPART)


@pytest.mark.parametrize(
    ("name", "available", "slip"),
    [
        ("rolout", ["rollout", "reward"], "rollout"),
        ("clip_hihg", ["clip_low", "clip_high"], "clip_high"),
        ("grad_clip", ["clip_grad", "learning_rate"], "clip_grad"),
        ("learningrate", ["learning_rate"], "learning_rate"),
        ("Raisde", ["raised", "Raised"], "Raised"),
        ("top_n", ["top_p", "top_k"], None),
        ("min_k", ["min_p"], None),
        ("h200", ["h100"], None),
        ("beta", ["beta1", "beta2"], None),
        ("teacher", ["trackers"], None),
        ("profile", ["provider"], None),
        ("skip_special_tokens", ["max_response_tokens"], None),
        ("clip_high", ["clip_grad"], None),
    ],
)
def test_only_a_slip_is_taken_for_another_name(name: str, available: list[str], slip: str | None) -> None:
    assert nearest(name, available) == slip


def test_an_answer_names_the_line_of_each_name_in_a_section(workspace: Path) -> None:
    file = workspace / "sections.yaml"
    file.write_text((workspace / "config.yaml").read_text() + "trainer:\n  nnodes: 1\n  save_freq: 20\n")
    lines = file.read_text().splitlines()
    places = {error.where for error in check_config(load(file)).errors}
    for name in ("nnodes: 1", "save_freq: 20"):
        line = lines.index(f"  {name}") + 1
        assert f"trainer.{name.partition(':')[0]} ({file}:{line})" in places


def test_a_name_with_dots_in_a_file_is_to_be_written_below_its_section(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    file = workspace / "dots.yaml"
    file.write_text((workspace / "config.yaml").read_text() + "actor.offload: true\n")
    (error,) = check_config(load(file)).errors
    assert error.fix == "write `offload: true` below `actor:`"
