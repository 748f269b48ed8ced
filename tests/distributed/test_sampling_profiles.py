"""Runs whose sampling profile is registered in Python and chosen by name."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from test_older_weights import run
from test_roles import metrics

pytestmark = pytest.mark.starts_ranks

CAREFUL = {"temperature": 0.6, "banned_tokens": ["7"], "max_response_tokens": 4}
PROFILES = f"""import megatron_rl

settings = megatron_rl.sampling_profile("bold", temperature=1.3)
megatron_rl.sampling_profile("careful", **(settings | {CAREFUL}))
"""
COMPARED = ("policy/loss", "policy/grad_norm", "policy/entropy", "reward/mean", "response/length")
TENSOR = {"layout": {"tensor": 2}, "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-3}}


def profile_run(folder: Path, material: Path, profiles: Path, **rollout: object) -> Path:
    """Write a run of two steps that chooses the registered profile by name."""
    profiles.write_text(PROFILES)
    chosen = {"max_response_tokens": 9, "sampling_profile": f"{profiles}:careful", **rollout}
    return run(folder, material, actor=TENSOR, rollout=chosen, steps=2)


def check_samples(folder: Path) -> None:
    """Check that responses and log-probs are those of the profile."""
    files = sorted((folder / "run/rollouts").glob("*.parquet"))
    samples = pandas.concat(map(pandas.read_parquet, files))
    assert max(samples["length"].tolist()) == 4 and "7" not in "".join(samples["response"])
    # Log-probs of another temperature, or with the banned token, would differ by tenths.
    assert max(line["mismatch/abs_diff"] for line in metrics(folder)) < 1e-4


def numbers(folder: Path) -> list[list[float]]:
    return [[line[name] for name in COMPARED] for line in metrics(folder)]


def test_a_profile_of_a_python_file_has_the_numbers_of_its_settings_also_in_a_resume(
    fork, material, tmp_path
) -> None:
    profiles = tmp_path / "profiles.py"
    named = profile_run(tmp_path / "named", material, profiles, engine="torch")
    fork("megatron_rl", 2, "train", named, module=True)
    check_samples(tmp_path / "named")

    settings = {"engine": "torch", **CAREFUL}
    explicit = run(tmp_path / "explicit", material, actor=TENSOR, rollout=settings, steps=2)
    fork("megatron_rl", 2, "train", explicit, module=True)
    assert numbers(tmp_path / "explicit") == numbers(tmp_path / "named")

    # The configuration that the run saved has the settings, and needs the file no more.
    profiles.unlink()
    fork("megatron_rl", 2, "train", tmp_path / "named/run/config.yaml", "steps=3", module=True)
    fork("megatron_rl", 2, "train", explicit, "steps=3", module=True)
    assert len(numbers(tmp_path / "named")) == 3
    assert numbers(tmp_path / "explicit") == numbers(tmp_path / "named")


def test_a_profile_of_a_python_file_reaches_vllm_over_two_ranks(fork, material, tmp_path) -> None:
    profiles = tmp_path / "profiles.py"
    named = profile_run(tmp_path / "named", material, profiles, engine="vllm", tensor=2)
    fork("megatron_rl", 2, "train", named, module=True)
    check_samples(tmp_path / "named")
