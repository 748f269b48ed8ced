"""Contained code is loaded from copies that were made at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config.sections.rewards import RewardConfig
from megatron_rl.rewards.function import FunctionReward
from megatron_rl.user_code import activate_copies, compute_files_digest, read_copy, read_user_code, write_copy

SAMPLE = {"prompt": "p", "response": "end", "ground_truth": "t", "metadata": {}}


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    """Yield the file of a reward with a sibling, a package and a file of data beside it."""
    package = tmp_path / "weights_of_it"
    package.mkdir()
    (package / "__init__.py").write_text("from weights_of_it.inner import WEIGHT\n")
    (package / "inner.py").write_text("WEIGHT = 100\n")
    (tmp_path / "sibling_of_it.py").write_text("VALUE = 10\n")
    (tmp_path / "data.txt").write_text("1")
    file = tmp_path / "judges.py"
    file.write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from sibling_of_it import VALUE\n"
        "import weights_of_it\n"
        "def reward(response):\n"
        "    if response == 'raise':\n"
        "        raise ValueError('as it was written')\n"
        "    if response == 'end':\n"
        "        os._exit(1)\n"
        "    data = float((Path(__file__).parent / 'data.txt').read_text())\n"
        "    return data + VALUE + weights_of_it.WEIGHT\n"
    )
    yield file
    activate_copies({})


def test_an_edit_in_the_middle_of_a_run_changes_nothing(code: Path) -> None:
    activate_copies(read_user_code([f"{code}:reward"]))
    with FunctionReward(RewardConfig(f"{code}:reward", timeout=60.0)) as reward:
        assert reward.compute_answers([{**SAMPLE, "response": "x"}])[0].reward == 111
        for file in (code, code.parent / "sibling_of_it.py", code.parent / "weights_of_it/inner.py"):
            file.write_text("import no_such_module_at_all\n")
        ended, after, raised = reward.compute_answers(
            [{**SAMPLE, "response": word} for word in ("end", "x", "raise")]
        )
        assert (ended.reason, after.reward) == ("crashed", 111), "a process that is started again"
        assert "raise ValueError('as it was written')" in raised.message and str(code) in raised.message
        code.unlink()
        assert reward.compute_answers([SAMPLE, {**SAMPLE, "response": "x"}])[1].reward == 111


def test_a_copy_has_a_digest_and_can_be_run_again(code: Path, tmp_path: Path) -> None:
    files = read_user_code([f"{code}:reward", "megatron_rl.rewards.arithmetic:exact_match", "json:loads"])
    names = {"judges.py", "sibling_of_it.py", "__init__.py", "inner.py"}
    assert {Path(name).name for name in files} == names
    target = write_copy(tmp_path / "code", files)
    assert compute_files_digest(files).startswith(target.name)
    assert read_copy(target) == files
    assert write_copy(tmp_path / "code", {**files, str(code): b""}) != target
    next(target.rglob("sibling_of_it.py")).write_text("VALUE = 11\n")
    assert read_copy(target) is None, "a copy that was changed"


def test_modules_of_the_search_path_are_copied(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(code.parent))
    activate_copies(read_user_code(["weights_of_it.inner:WEIGHT", "judges:reward"]))
    (code.parent / "weights_of_it/inner.py").write_text("WEIGHT = 5\n")
    code.write_text("")
    with FunctionReward(RewardConfig("judges:reward", timeout=60.0)) as reward:
        assert reward.compute_answers([{**SAMPLE, "response": "x"}])[0].reward == 111
