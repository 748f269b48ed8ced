"""A short form of the campaign of generated inputs: `launch/campaign.sh inputs` tries a thousand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign import inputs
from tests.campaign.bad_inputs import GROUPS
from tests.campaign.campaign import HELD

COUNT = 40


def test_cases_of_a_seed_are_the_first_of_more() -> None:
    few, more = list(inputs.cases(3, 9)), list(inputs.cases(3, 12))
    assert more[:9] == few and few != list(inputs.cases(4, 9))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_generated_inputs_are_ready_or_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    cases = list(inputs.cases(7, COUNT))
    assert {case.group for case in cases} == set(GROUPS)
    ready = 0
    for case in cases:
        quiet = replace(
            case, settings={**case.settings, "train": False, "process": False}
        )  # the campaign itself starts processes
        result = inputs.try_case(quiet, tmp_path)
        assert result.outcome == HELD, f"{case}\n{result.detail}"
        ready += bool(result.counts.get("ready"))
    assert 0 < ready < COUNT / 2
