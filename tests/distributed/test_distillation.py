"""On-policy distillation: the same numbers in every layout, as by brute force, and after a resume."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_roles import grpo, metrics
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms import get_algorithm, with_loss_weights
from megatron_rl.types import TrainBatch
from tests.conftest import free_port
from tests.hf_models import save_model
from tests.readme_metrics import unwritten

sys.path.insert(0, str(Path(__file__).parent))
from models import make_batch

TEACHER_SERVER = Path(__file__).with_name("teacher_server_ranks.py")
WORKER = Path(__file__).parent / "workers" / "layout_worker.py"
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


# `top_k` takes the same steps; what `reverse_kl` computes is compared in test_algorithms_estimation.py.
@pytest.mark.parametrize("loss", [pytest.param("reverse_kl", marks=pytest.mark.campaign), "top_k"])
def test_a_student_gets_nearer_to_its_teacher_in_every_layout(
    fork: Any, material: Path, teacher: str, tmp_path: Path, loss: str
) -> None:
    """One rank; tensor parallelism for both; a teacher on a rank of its own, beside a pipeline."""
    distillation: dict[str, Any] = {"name": loss}
    compared = COMPARED
    nearness = "kl/teacher"
    if loss == "top_k":
        distillation |= {"k": 5, "divergence": "forward_kl"}
        compared = (*COMPARED, "distillation/loss", "distillation/teacher_rest", "distillation/actor_rest")
        nearness = "distillation/loss"
    layouts = {
        "one": (1, ()),
        "tensor": (2, ("actor.layout.tensor=2",)),
        "apart": (3, ("actor.layout={pipeline: 2, ranks: [0, 1]}", "teacher.layout={ranks: [2]}")),
    }
    found = {}
    for name, (ranks, overrides) in layouts.items():
        file = run(
            tmp_path / name,
            material,
            algorithm={"name": "distillation", "kl": "none", "distillation": distillation},
        )
        fork("megatron_rl", ranks, "train", file, f"teacher.path={teacher}", *overrides, module=True)
        found[name] = metrics(tmp_path / name)
    first, *_, last = found["one"]
    assert unwritten("a run with a teacher", found["one"]) == []
    if loss == "top_k":
        assert unwritten("a run with a teacher's most likely tokens", found["one"]) == []
    assert last[nearness] < 0.95 * first[nearness], [step[nearness] for step in found["one"]]
    for name in ("tensor", "apart"):
        for mine, truth in zip(found[name], found["one"], strict=True):
            for key in compared:
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


@pytest.mark.parametrize("loss", [pytest.param("reverse_kl", marks=pytest.mark.campaign), "top_k"])
def test_each_task_learns_from_its_own_teacher(
    fork: Any, material: Path, teacher: str, tmp_path: Path, loss: str
) -> None:
    """A model under two names gives the numbers of one teacher, and other ranks those of one rank."""
    records = [json.loads(line) for line in (material / "train.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record["task"] = ("even", "odd", "third")[number % 3]
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    # Not the actor's own model: where teacher and actor are equal, rounding decides each gradient's sign.
    save_model(
        "qwen3", tmp_path / "other", seed=9, vocab_size=40, pad_token_id=0, eos_token_id=1, bos_token_id=2
    )
    for file in (material / "model").glob("*token*"):
        shutil.copy(file, tmp_path / "other")
    distillation = {"name": loss, **({"k": 4} if loss == "top_k" else {})}
    other = {"path": str(tmp_path / "other"), "tasks": ["odd", "third"]}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "single": (1, {"teacher": {"path": teacher}}),
        "same": (1, {"teachers": {"even": {"path": teacher}}, "teacher": {"path": teacher}}),
        "two": (1, {"teachers": {"even": {"path": teacher}, "other": other}}),
        "apart": (
            3,
            {
                "actor": {**LEARNING, "layout": {"tensor": 2, "ranks": [0, 1]}},
                "teachers": {
                    "even": {"path": teacher, "layout": {"ranks": [2]}},
                    "other": {**other, "layout": {"pipeline": 2, "ranks": [1, 2]}},
                },
            },
        ),
    }
    found = {}
    for name, (ranks, changes) in runs.items():
        algorithm = {"name": "distillation", "kl": "none", "distillation": distillation}
        file = run(tmp_path / name, material, algorithm=algorithm, **changes)
        fork("megatron_rl", ranks, "train", file, f"data.train={data}", module=True)
        found[name] = metrics(tmp_path / name)

    assert found["two"][0]["kl/teacher"] != pytest.approx(found["single"][0]["kl/teacher"], rel=0.05)
    for name, truth in (("same", "single"), ("apart", "two")):
        for mine, theirs in zip(found[name], found[truth], strict=True):
            for key in COMPARED:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), (name, key)

    # A task without a teacher is named.
    file = run(
        tmp_path / "none", material, algorithm={"name": "distillation"}, teachers={"even": {"path": teacher}}
    )
    output = fork("megatron_rl", 1, "train", file, f"data.train={data}", module=True, check=False).output
    assert "has no teacher" in output and "teachers.NAME.tasks" in output


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "pipeline": 2},
    {"tensor": 4, "sequence_parallel": True},
    {"tensor": 2, "context": 2, "sequence_parallel": True, "budget": 30},
    {"context": 4},
    {"pipeline": 2, "virtual_pipeline": 2, "budget": 30},
    {"budget": 30},
)
"""Parallel sizes on four ranks; a budget of 30 tokens makes many micro-batches."""


def with_teacher(batch: TrainBatch, model: Any, teacher: Any, k: int) -> TrainBatch:
    """Return the batch without advantages, with the most likely tokens of a dense pass of the teacher."""
    log_p = next_token_log_probs(teacher, batch)
    top = log_p[:, : model.config.vocab_size].topk(k, dim=1)
    others = log_p.scatter(1, top.indices, -torch.inf).logsumexp(1, keepdim=True)
    return replace(
        batch,
        advantages=torch.zeros(len(batch.tokens)),
        teacher_top_ids=top.indices.int(),
        teacher_top_log_probs=torch.cat((top.values, others), dim=1).detach().float(),
    )


def next_token_log_probs(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return the distribution of each token given those before it, [N, V] float64; 0 for each first token."""
    rows = []
    for tokens, temperature in zip(
        batch.tokens.split(batch.lengths.tolist()), batch.temperature.tolist(), strict=True
    ):
        logits = model(tokens[None]).logits[0, :-1] / temperature
        rows.append(torch.cat((torch.zeros_like(logits[:1]), logits.log_softmax(-1))))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "divergence",
    # The third is a mixture of the other two, on the same sums over the vocabulary's shards.
    [*(pytest.param(name, marks=pytest.mark.campaign) for name in ("forward_kl", "reverse_kl")), "jsd"],
)
def test_the_gradient_of_a_divergence_is_that_of_brute_force_in_every_layout(
    fork: Any, tmp_path: Path, divergence: str
) -> None:
    """The step of every tensor, on one rank against transformers in float64, on four against one."""
    torch.manual_seed(3)
    model = save_model("qwen2", tmp_path / "qwen2")
    batch = make_batch(model)
    # A teacher with more rows in its embedding, of which none is among the actor's tokens.
    teacher = save_model("qwen2", tmp_path / "teacher", seed=7, vocab_size=model.config.vocab_size + 5)
    batch = with_teacher(batch, model, teacher.double(), 6)
    torch.save(batch, tmp_path / "qwen2/batch.pt")

    pieces = {"distillation": {"name": "top_k", "k": 6, "divergence": divergence, "coef": 0.3, "beta": 0.2}}
    common = {
        "model": "qwen2",
        "budget": 1000,
        "algorithm": {"name": "distillation", "pieces": pieces},
        "optimizer": {"clip_grad": 1e9},
    }
    for ranks, layouts in ((1, ({},)), (4, LAYOUTS)):
        cases = [{**common, **layout, "name": f"{ranks}-{number}"} for number, layout in enumerate(layouts)]
        (tmp_path / "plan.json").write_text(json.dumps(cases))
        fork(WORKER, ranks, tmp_path, "plan.json", timeout=500)

    # The same step by autograd through all logits: Adam's with so large an epsilon that it is the gradient.
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2", dtype=torch.float64)
    algorithm = get_algorithm("distillation", pieces)
    weighted = with_loss_weights(batch, algorithm)
    log_q = next_token_log_probs(exact, batch)
    ids = batch.teacher_top_ids.long()
    rest = log_q.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    buckets = torch.cat((log_q.gather(1, ids), rest), dim=1)[batch.response_mask]
    expected = batch.teacher_top_log_probs.double()[batch.response_mask]
    token_loss = algorithm.distillation.token_loss(buckets, expected)
    (0.3 * weighted.loss_weights[batch.response_mask] * token_loss).sum().backward()

    alone = torch.load(tmp_path / "1-0.pt", weights_only=False)
    gradients = {name: weight.grad for name, weight in exact.named_parameters() if weight.grad is not None}
    assert alone["steps"].keys() <= gradients.keys()
    for name, step in alone["steps"].items():
        expected_step = -100 * gradients[name]
        assert expected_step.any(), name
        assert float((step - expected_step).norm() / expected_step.norm()) < 1e-3, name

    for number, layout in enumerate(LAYOUTS):
        found = torch.load(tmp_path / f"4-{number}.pt", weights_only=False)
        assert found["values"] == pytest.approx(alone["values"], rel=1e-4, abs=1e-6), layout
        for name, step in alone["steps"].items():
            difference = (found["steps"][name] - step).norm() / step.norm().clamp(min=1e-4)
            assert float(difference) < 1e-4, (layout, name)


def test_a_teacher_behind_a_vllm_server_gives_the_numbers_of_one_in_the_job(
    fork: Any, material: Path, tmp_path: Path
) -> None:
    """A run whose server is gone ends, and names it."""
    # Without further rows: a server counts its most likely tokens among all of its own.
    config = json.loads((material / "model/config.json").read_text())
    teacher = tmp_path / "big"
    save_model(
        "qwen3",
        teacher,
        seed=5,
        vocab_size=config["vocab_size"],
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    for file in (material / "model").glob("*token*"):
        shutil.copy(file, teacher)
    algorithm = {"name": "distillation", "kl": "none", "distillation": {"name": "top_k", "k": 5}}
    inside = run(tmp_path / "inside", material, algorithm=algorithm, teacher={"path": str(teacher)}, steps=2)
    fork("megatron_rl", 1, "train", inside, module=True)
    url = f"http://127.0.0.1:{free_port()}/v1"
    server = {"url": url, "model": "big", "open_after": 2}
    outside = run(tmp_path / "outside", material, algorithm=algorithm, teacher_server=server, steps=2)
    output = fork(TEACHER_SERVER, 1, outside, teacher, timeout=400).output

    found = metrics(tmp_path / "outside")
    assert unwritten("a run with a teacher behind a server", found) == []
    for mine, theirs in zip(found, metrics(tmp_path / "inside"), strict=True):
        assert mine["teacher/failed_fraction"] == 0
        for key in (*COMPARED, "distillation/loss", "distillation/teacher_rest"):
            assert mine[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-4), key
    assert "exit code without a server: 0" not in output
    assert "rewards fail in 100% of the samples, in 2 consecutive steps" in output
    assert f"a reward failed (unreachable): {url}: " in output
