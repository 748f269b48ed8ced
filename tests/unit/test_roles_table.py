"""The table of roles: a new frozen role that scores tokens is one row of it and one section of the schema."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatron_rl
from megatron_rl.algorithms import Algorithm
from megatron_rl.config.roles import MODEL_ROLES, ROLES, RoleSpec, role_of, section_of, spec_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.data import quickstart

PACKAGE = Path(megatron_rl.__file__).parent

SECTION = '    tutor: ReferenceConfig | None = setting(None, "A policy to learn from.", unset="none")\n'
ROW = """\
TUTOR = RoleSpec(
    name="tutor",
    section="tutor",
    section_class=ReferenceConfig,
    phase="score",
    head=VOCABULARY,
    outputs=("tutor_log_probs", "tutor_entropy"),
    placement="split",
)

"""

SCORES = """\
import sys
from pathlib import Path

import torch

from megatron_rl.algorithms.lookup import algorithm_of
from megatron_rl.config.derive import resolve
from megatron_rl.config.load import load_text
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import ReplicaGroup
from megatron_rl.roles.build import Roles, build_actor, build_forward_roles
from megatron_rl.trainer.loop import compute_log_probs
from megatron_rl.trainer.rewards import ScoredBatch
from megatron_rl.types import Rollouts, Scores

device.initialize()
config = load_text(Path(sys.argv[1]).read_text()).valid()
algorithm = algorithm_of(config)
config = resolve(config, 1, algorithm).config
actor = build_actor(config, updates=None)
forward_roles = build_forward_roles(config, algorithm, actor)

# The score phase asks the models alone: engine and rewards have no part in it.
roles = Roles(actor, None, None, None, forward_roles)
assert [role.name for role in roles.models] == ["actor", "tutor"] and list(roles.trained_roles) == ["actor"]
lengths = torch.tensor([5, 7])
mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]).bool()
rollouts = Rollouts(
    tokens=torch.arange(3, 15),
    lengths=lengths,
    response_mask=mask,
    rollout_log_probs=torch.zeros(12),
    group=torch.tensor([0, 1]),
    finish_reason=torch.zeros(2, dtype=torch.long),
    policy_version=torch.zeros(2, dtype=torch.long),
    temperature=torch.ones(2),
)
rewards = Scores(torch.zeros(2), torch.ones(2).bool(), {})
batch = ScoredBatch(None, rollouts, rewards, (None, None))
scores = compute_log_probs(batch, roles, config, 1, ReplicaGroup(None)).scores
assert sorted(scores.columns) == ["tutor_entropy", "tutor_log_probs"]
assert bool((scores.old_log_probs[mask] < 0).all())
torch.testing.assert_close(scores.columns["tutor_log_probs"], scores.old_log_probs, rtol=0, atol=0)
print("the tutor's column is there")
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """Make a copy of the package with a role more: a field in the schema, and a row in the table."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(PACKAGE, root / "megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))

    schema = root / "megatron_rl/config/schema.py"
    anchor = "    rollout: RolloutConfig = setting("
    text = schema.read_text()
    assert text.count(anchor) == 1
    schema.write_text(text.replace(anchor, SECTION + anchor))

    table = root / "megatron_rl/config/roles.py"
    text = table.read_text()
    last = "ROLES = (ACTOR, CRITIC, REFERENCE, "
    assert text.count(last) == 1
    table.write_text(text.replace(last, f"{ROW}{last}TUTOR, "))

    changed = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.read_bytes() != (root / "megatron_rl" / path.relative_to(PACKAGE)).read_bytes()
    ]
    assert sorted(changed) == ["config/roles.py", "config/schema.py"]
    return root


@pytest.fixture(scope="module")
def configuration(extended) -> Path:
    """Write a run of the extended package whose tutor has ranks of its own."""
    material = quickstart.write_inputs(extended / "material")
    config = {
        "run_dir": str(extended / "run"),
        "steps": 2,
        "model": {"path": str(material / "model"), "dtype": "float32", "attention": "torch"},
        "data": {"train": str(material / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "megatron_rl.rewards.arithmetic:exact_match"},
        "rollout": {"engine": "torch", "max_response_tokens": 6},
        "tutor": {"path": str(material / "model")},
        "batch": {"prompts_per_step": 8},
    }
    file = extended / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def run(root: Path, *command: str | Path) -> str:
    """Run Python on the package in ``root`` and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=root,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_check_shows_a_role_that_only_the_table_and_the_schema_name(extended, configuration):
    picture = extended / "picture.svg"
    command = ("-m", "megatron_rl", "check", configuration, "--world-size", "4", "placement=split")
    text = run(extended, *command, "--verbose", "--picture", picture)
    assert re.search(r"^ *tutor .*= 2 ranks", text, re.MULTILINE), "its layout and ranks"
    assert "tutor" in picture.read_text()

    report = json.loads(run(extended, *command, "--json"))
    assert report["roles"]["tutor"]["ranks"] == [2, 3], "the half that split gives it"
    assert report["config"]["tutor.path"]["origin"] == "file"
    names = {item["name"] for rank in report["memory"] for item in rank["items"]}
    assert {"tutor weights", "tutor forward activations"} <= names


@pytest.mark.slow
def test_the_score_phase_runs_a_role_that_only_the_table_and_the_schema_name(extended, configuration):
    script = extended / "scores.py"
    script.write_text(SCORES)
    assert "the tutor's column is there" in run(extended, script, configuration)


@pytest.mark.parametrize("spec", ROLES, ids=lambda spec: spec.name)
def test_each_row_of_the_table_names_a_section_of_the_schema(spec: RoleSpec):
    names = {item.name for item in dataclasses.fields(RunConfig)}
    assert spec.section.partition(".")[0] in names
    role = f"{spec.name}.judge" if spec.named else spec.name
    assert spec_of(role) is spec
    assert role_of(section_of(role)) == role
    if spec.need is not None:
        assert hasattr(Algorithm, spec.need.attribute)
        assert spec.section_class() is not None, "an algorithm may bring it with its default section"


def test_columns_of_roles_do_not_collide():
    # Teachers of tasks have those of the teacher, each for other rows.
    columns = [name for spec in MODEL_ROLES if not spec.by_task for name in spec.outputs]
    assert len(columns) == len(set(columns))
