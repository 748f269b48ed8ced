"""Conclusions of a proof of machines from its measurements; its jobs are tested in tests/distributed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.errors import UserError
from megatron_rl.planning import proof
from megatron_rl.planning.machine import Finding
from megatron_rl.planning.proof import ACROSS, WITHIN, DeviceProbe, neighbour_pairs
from megatron_rl.shapes.hardware import load_constants

H100 = DeviceProbe("NVIDIA H100 80GB HBM3", 650e12, 2.9e12, 22e9)


def test_pairs_are_of_one_machine_or_of_the_same_place_on_two():
    assert neighbour_pairs(["a"]) == {}
    assert neighbour_pairs(["a", "a", "a"]) == {WITHIN: [(0, 1)]}
    assert neighbour_pairs(["a", "b"]) == {ACROSS: [(0, 1)]}
    assert neighbour_pairs(["a", "a", "b", "b", "c"]) == {WITHIN: [(0, 1), (2, 3)], ACROSS: [(0, 2), (1, 3)]}


def test_a_rank_that_is_far_behind_is_named():
    slow = DeviceProbe(H100.name, 400e12, 2.9e12, 22e9)
    product, memory, host = proof.rate_findings([H100, H100, slow, H100])
    assert (product.level, memory.level, host.level) == ("warning", "ok", "ok")
    assert "400 TFLOP/s bfloat16 on rank 2, the slowest of 4; median 650" in product.text and product.fix
    assert len(list(proof.rate_findings([DeviceProbe("host", 1e9, 1e9, None)]))) == 2


def test_what_was_measured_is_what_the_planner_calculates_with(tmp_path: Path):
    constants = load_constants()
    override = proof.measured_constants([H100, H100], {WITHIN: 300e9, ACROSS: 40e9}, constants)
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(override))
    gpu, share = load_constants(str(file)).gpu("h100"), constants.efficiency
    assert gpu.bf16_flops * gpu.gemm_efficiency == pytest.approx(650e12, rel=2e-3)
    assert gpu.hbm * share.hbm == pytest.approx(2.9e12, rel=2e-3)
    assert gpu.host * share.host == pytest.approx(22e9, rel=2e-3)
    assert gpu.nvlink * share.nvlink == pytest.approx(300e9, rel=2e-3)
    assert gpu.network * share.network == pytest.approx(40e9, rel=2e-3)
    assert load_constants(str(file)).gpu("h200") == constants.gpu("h200")
    assert proof.measured_constants([DeviceProbe("host", 1e9, 1e9, None)], {}, constants) == {}


def test_steps_that_differ_are_an_error(tmp_path: Path):
    for name, norm in (("one_rank", 2.0), ("all_ranks", 2.001)):
        (tmp_path / name).mkdir()
        lines = [
            {"step": 1, "sft/loss": 3.0, "sft/grad_norm": 2.0},
            {"step": 2, "sft/loss": 2.5, "sft/grad_norm": norm},
        ]
        (tmp_path / name / "sft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = Finding("ok", "the same step", "9 s")
    assert proof.compare_steps(tmp_path, done, 1e-3).level == "ok"
    wrong = proof.compare_steps(tmp_path, done, 1e-4)
    assert (
        wrong.level == "error" and "sft/grad_norm of step 2: 2.0, 2.001, which differ by 0.05%" in wrong.text
    )


def test_a_job_that_fails_shows_the_end_of_its_log(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "proof.yaml").write_text("modle: {path: x}\n")
    finding = proof._run_small_job(proof.list_small_jobs(tmp_path, 2)[2], tmp_path)
    assert finding.level == "error" and "exit code 2" in finding.text and "modle" in finding.text
    assert "rollout.engine=torch" in (finding.fix or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [1, 3, 8, *(pytest.param(world, marks=pytest.mark.campaign) for world in (2, 1024))]
)
def test_the_jobs_fit_any_number_of_ranks(tmp_path: Path, world: int, capsys: pytest.CaptureFixture[str]):
    proof._write_job_files(tmp_path, world, on_host=True)
    for task in proof.list_small_jobs(tmp_path, world)[:-1]:
        words = ["-v", "--world-size", str(world), "--for", task.command, f"run_dir={tmp_path / task.name}"]
        assert main(["check", str(tmp_path / "proof.yaml"), *words, *task.overrides]) == 0, (
            capsys.readouterr().out
        )
    shown = capsys.readouterr().out
    assert ("pipeline 2" in shown) == (world % 4 == 0)
    assert any(task.name == "all_ranks" for task in proof.list_small_jobs(tmp_path, world)) == (world > 1)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="files that doctor --gpu has not written"):
        proof._write_job_files(tmp_path, 2, on_host=True)
