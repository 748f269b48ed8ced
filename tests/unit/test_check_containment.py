"""What `check` says of limits: paths and variables that cannot be, and what this kernel does not enforce."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.check.files import FileFindings
from megatron_rl.check.rewards import check_enforcement, check_limits
from megatron_rl.config.sections.bounds import LimitsConfig
from megatron_rl.contained import confinement
from tests.campaign.attackers import run_as_user, without_namespaces

pytestmark = pytest.mark.starts_contained

WHERE = "reward.limits"


def test_what_limits_name_is_there_and_is_not_everything(tmp_path: Path) -> None:
    files = FileFindings()
    limits = LimitsConfig(
        read=(str(tmp_path), "/", str(tmp_path / "absent")), environment=("MINE", "A=b", "")
    )
    errors = list(check_limits(WHERE, limits, files))
    assert [error.where for error in errors] == [f"{WHERE}.read", *[f"{WHERE}.environment"] * 2]
    (missing,) = files.errors
    assert "absent" in str(missing) and missing.where == f"{WHERE}.read"
    assert not list(check_limits(WHERE, LimitsConfig(read=("~",)), files)) and len(files.errors) == 1


def test_what_a_kernel_does_not_enforce_is_named_once() -> None:
    sections = {WHERE: LimitsConfig(), "reward.code.limits": LimitsConfig(memory_gib=1.0)}

    def warnings() -> list[str]:
        return [str(warning) for warning in check_enforcement(sections)]

    (warning,) = run_as_user(os.getuid(), without_namespaces(warnings))
    assert confinement.CHILDREN_SEARCHED in warning and "docs/limits.md" in warning


def test_the_documentation_explains_each_thing_that_may_not_be_enforced() -> None:
    names = ("CHILDREN_SEARCHED", "NETWORK_REACHABLE", "NO_ROOT", "FILES_READABLE", "FILES_WRITABLE")
    names += ("HIDDEN_READABLE", "NAMES_VISIBLE", "TEMPORARY_UNBOUNDED", "PROCESSES_VISIBLE")
    names += ("PROCESSES_SIGNALLED", "CALLS_UNFILTERED")
    page = Path(__file__).parents[2].joinpath("docs/limits.md").read_text()
    for words in [*(getattr(confinement, name) for name in names), confinement.SAME_USER.format(name="root")]:
        assert f"`{words}`" in page
