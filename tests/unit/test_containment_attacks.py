"""Attacks on the surroundings of contained code are refused, or announced as not enforced here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.contained import confinement
from tests.campaign.attackers import NAMED, NOBODY, attack, run_as_user, unannounced, without_namespaces
from tests.campaign.attacks import ATTACKS

pytestmark = pytest.mark.starts_contained

USERS = [os.getuid(), NOBODY] if os.getuid() == 0 else [os.getuid()]


@pytest.fixture
def work() -> Iterator[Path]:
    """Yield a folder that every user reaches, as in a project that belongs to the user of the run."""
    # The folders of tmp_path are closed to other users, those of pytest-xdist's workers too.
    with tempfile.TemporaryDirectory(prefix="megatron-rl-attacks-", dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_no_attack_gets_through_what_is_not_named_as_missing(user: int, work: Path) -> None:
    answer = run_as_user(user, lambda: attack(list(ATTACKS), work))
    assert answer["user"] == user
    assert unannounced(answer) == [], answer["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_without_namespaces_what_gets_through_is_named(user: int, work: Path) -> None:
    answer = run_as_user(user, without_namespaces(lambda: attack(list(ATTACKS), work)))
    missing = " ".join(answer["missing"])
    assert confinement.CHILDREN_SEARCHED in missing
    if confinement.FILES_READABLE in missing:  # neither has this kernel Landlock
        return
    assert set(answer["through"]) == set(NAMED), answer["ended"]
    assert unannounced(answer) == []
    assert ("it runs as the user of the run, root" in missing) == (user == 0)
