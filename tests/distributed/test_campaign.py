"""A few cases of each kind of campaign; `launch/campaign.sh` tries as many as there is time for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.campaign import campaign, matrices
from tests.campaign.campaign import Case, Result
from tests.conftest import ROOT, run_bounded


@pytest.mark.parametrize(
    ("kind", "count", "seed"),
    [
        # Killed runs are in the suite too, in test_stages.py and test_failures.py.
        pytest.param("kills", 2, 2, marks=pytest.mark.campaign),
        ("damages", 4, 1),
        ("rewards", 4, 1),
        # Fifty steps show the growth of no slow leak; `launch/campaign.sh leaks` takes thousands.
        pytest.param("leaks", 50, 1, marks=pytest.mark.campaign),
    ],
)
def test_promises_hold_in_cases_that_a_seed_chooses(fork, tmp_path, kind, count, seed) -> None:
    words = (kind, "--count", count, "--seed", seed, "--out", tmp_path)
    result = fork("tests.campaign.campaign", 1, *words, module=True, check=False, timeout=580)
    lines = [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
    assert [line["detail"] for line in lines if line["outcome"] != "held"] == []
    assert sum(line["case"]["weight"] for line in lines) >= count and result.returncode == 0


def test_what_the_suite_leaves_out_is_a_campaign() -> None:
    """Both collect real files: each test is in the suite or in the campaign."""
    files = ["tests/distributed/test_campaign.py", "tests/distributed/test_failures.py"]
    campaign_counts = matrices.test_counts(files)
    name = "test_promises_hold_in_cases_that_a_seed_chooses"
    assert campaign_counts[f"{files[0]}::{name}"] == 2

    # Not forked: threads of libraries that other tests loaded would be lost, and crash at the end.
    launch = run_bounded([sys.executable, "-m", "pytest", *files, "--collect-only", "-q"], timeout=120)
    assert launch.returncode == 0, launch.output
    collected = launch.stdout
    ids = [line for line in collected.splitlines() if "::" in line]
    assert sum(f"::{name}[" in line for line in ids) == 2 and f"{name}[leaks-50-1]" not in collected
    assert f"{sum(campaign_counts.values())} deselected" in collected
    assert "matrices" in campaign.KINDS and "# matrices " in (ROOT / "launch/campaign.sh").read_text()


class Dice:
    """Cases that fail every second time, with a count of their trials."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def cases(self, seed: int, count: int) -> list[Case]:
        return [Case(f"case {number}", "dice", {"number": number}) for number in range(count)]

    def try_case(self, case: Case, work: Path) -> Result:
        self.tried.append(case.name)
        if case.settings["number"] == 2:
            raise ValueError("not thought of")
        return Result("held" if case.settings["number"] % 2 else "lost", counts={"eyes": 3})


def test_a_campaign_goes_on_where_it_was_and_says_what_was_lost(tmp_path, monkeypatch, capsys) -> None:
    dice = Dice()
    monkeypatch.setattr(campaign.importlib, "import_module", lambda name: dice)
    lines = campaign.run("kills", 3, 1, tmp_path)
    assert [line["outcome"] for line in lines] == ["lost", "held", "broken"]
    with (tmp_path / "kills.jsonl").open("a") as file:
        file.write('{"outcome": "he')  # the process was killed while it wrote this line
    again = campaign.run("kills", 4, 1, tmp_path)
    assert dice.tried == ["case 0", "case 1", "case 2", "case 3"] and again[:3] == lines
    assert campaign.table("kills", again).splitlines()[-2].split() == ["in", "all", "4", "2", "1", "1"]
    assert campaign.main(["kills", "--count", "4", "--out", str(tmp_path)]) == 1
    assert "case 3: held" in capsys.readouterr().out
