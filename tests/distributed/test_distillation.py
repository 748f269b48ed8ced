"""On-policy distillation in whole runs: the same numbers in every layout, and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_roles import grpo, metrics

from tests.hf_models import save_model
from tests.readme_metrics import unwritten

COMPARED = ("kl/teacher", "policy/loss", "policy/grad_norm", "policy/entropy", "response/length")
LEARNING = {"optimizer": {"learning_rate": 5e-3}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, material: Path) -> str:
    """Make a teacher with other sizes than the actor and the same tokenizer, of more padded rows."""
    folder = tmp_path_factory.mktemp("teacher")
    save_model("qwen3", folder, seed=5, vocab_size=40, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    for file in (material / "model").glob("*token*"):
        shutil.copy(file, folder)
    return str(folder)


def run(folder: Path, material: Path, **changes: Any) -> Path:
    file = grpo(folder, material, actor=LEARNING)
    config = yaml.safe_load(file.read_text())
    config |= {"placement": "colocate", "steps": 4, **changes}
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_student_gets_nearer_to_its_teacher_in_every_layout(
    fork: Any, material: Path, teacher: str, tmp_path: Path
) -> None:
    """One rank; tensor parallelism for both; a teacher on a rank of its own, beside a pipeline."""
    layouts = {
        "one": (1, ()),
        "tensor": (2, ("actor.layout.tensor=2",)),
        "apart": (3, ("actor.layout={pipeline: 2, ranks: [0, 1]}", "teacher.layout={ranks: [2]}")),
    }
    found = {}
    for name, (ranks, overrides) in layouts.items():
        file = run(tmp_path / name, material, algorithm={"name": "distillation", "kl": "none"})
        fork("megatron_rl", ranks, "train", file, f"teacher.path={teacher}", *overrides, module=True)
        found[name] = metrics(tmp_path / name)
    first, *_, last = found["one"]
    assert unwritten("a run with a teacher", found["one"]) == []
    assert last["kl/teacher"] < 0.95 * first["kl/teacher"]
    for name in ("tensor", "apart"):
        for mine, truth in zip(found[name], found["one"], strict=True):
            for key in COMPARED:
                assert mine[key] == pytest.approx(truth[key], rel=1e-3, abs=1e-5), (name, key)


def test_beside_rewards_a_resume_changes_nothing(
    fork: Any, material: Path, teacher: str, tmp_path: Path
) -> None:
    term = {"name": "reverse_kl", "coef": 0.1, "clip": 5.0}
    algorithm = {"name": "grpo", "kl": "none", "distillation": term}
    for name in ("whole", "parted"):
        file = run(tmp_path / name, material, algorithm=algorithm, teacher={"path": teacher})
        if name == "parted":
            shutil.copytree(tmp_path / "whole/run", tmp_path / "parted/run")
            shutil.rmtree(tmp_path / "parted/run/checkpoints/step_4")
        fork("megatron_rl", 2, "train", file, module=True)
    for mine, truth in zip(metrics(tmp_path / "parted"), metrics(tmp_path / "whole"), strict=True):
        assert [mine[key] for key in (*COMPARED, "reward/mean")] == [
            truth[key] for key in (*COMPARED, "reward/mean")
        ]
