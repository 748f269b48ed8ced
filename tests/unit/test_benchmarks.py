"""Computations of the benchmarks other than measuring: records, ratios, phases and workloads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import modules of the benchmarks folder, which its scripts import by their bare names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == FOLDER:
            del sys.modules[name]


def test_records_carry_every_field_of_the_format(beside: Any, tmp_path: Path, capsys: Any) -> None:
    common = beside("common")
    report = common.Report("name")
    report.add("case", "ours", "step", "s", [3.0, 1.0, 2.0], 0.5)
    assert report.finish(tmp_path / "out.json") == 0
    (record,) = json.loads((tmp_path / "out.json").read_text())
    assert {name: record[name] for name in ("median", "minimum", "maximum", "repeats", "ratio_to_peer")} == {
        "median": 2.0, "minimum": 1.0, "maximum": 3.0, "repeats": 3, "ratio_to_peer": 0.5,
    }  # fmt: skip
    assert record["versions"]["torch"] and record["hardware"]["cores"] >= 1
    assert "ours" in capsys.readouterr().out
    report.fail("a part")
    assert report.finish(None) == 1
    assert "NOT MEASURED: a part" in capsys.readouterr().out


def test_paired_ratio_is_unmoved_by_a_load_that_both_feel(beside: Any) -> None:
    assert beside("common").paired_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 6.0]) == 0.5


def test_a_failed_process_is_told_with_the_end_of_its_output(beside: Any, tmp_path: Path) -> None:
    common = beside("common")
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('the reason')")
    with pytest.raises(common.ChildFailed, match="the reason"):
        common.torchrun([str(script)], 1, 1, tmp_path / "log", 60)


def test_phases_are_disjoint_and_add_up(beside: Any) -> None:
    step = {
        "time/step": 10.0, "time/generate": 5.0, "time/reshard": 0.5, "time/reshard_verify": 0.25,
        "time/score": 1.0, "time/learn": 3.0,
    }  # fmt: skip
    parts = beside("step_time").phases([step])
    assert parts["generate"] == [4.25] and parts["reshard"] == [0.75] and parts["rest"] == [1.0]
    assert sum(values[0] for name, values in parts.items() if name != "step") == parts["step"][0]


def test_the_model_ends_responses_as_often_as_it_says(beside: Any) -> None:
    workload = beside("workload")
    work = workload.Workload(
        2, 2, 64, hidden=64, layers=2, heads=2, kv_heads=2, intermediate=96, vocabulary=256
    )
    model = workload.build_model(work, workload.build_tokenizer(work.vocabulary), seed=3)
    torch.manual_seed(0)
    with torch.no_grad():
        logits = model(torch.randint(4, 256, (8, 48))).logits[:, 8:]
    ends = logits.softmax(-1)[..., workload.SPECIAL.index(workload.EOS)]
    assert float(ends.mean()) == pytest.approx(work.end_probability, rel=0.3)
    drawn = [length for seed in range(200) for length in workload.lengths(work, seed)]
    assert 0.34 < sum(drawn) / len(drawn) / 64 < 0.46 and max(drawn) == 64 and min(drawn) == 1


def test_ways_to_get_log_probs_agree_and_memory_is_counted(beside: Any) -> None:
    log_probs = beside("log_probs")
    case = log_probs.Case(300, 16, 500, torch.float32)
    ways = log_probs.methods(torch.float32)
    assert {"chunked", "unfused"} <= set(ways)
    for name in ("chunked", "unfused"):
        assert case.error(ways[name]) < 1e-5
    assert case.error(lambda *given: tuple(1.1 * value for value in ways["unfused"](*given))) > 0.05
    # Logits, their exponentials and the log-probs of every token against those of a chunk at a time.
    assert case.peak(ways["unfused"]) > 2 * 300 * 500 * 4
    assert case.peak(ways["unfused"]) > case.peak(ways["chunked"]) > 300 * 500 * 4


@pytest.mark.slow
def test_a_seed_has_data_of_its_own(beside: Any, monkeypatch: Any, tmp_path: Path) -> None:
    seeds, launched = beside("seeds"), list[list[str]]()
    monkeypatch.setattr(seeds, "torchrun", lambda words, *_: launched.append(words))
    command = "python -m megatron_rl.data.quickstart {folder} --seed {seed}"
    seeds.train(Path("run.yaml"), 3, tmp_path / "3", command, 1, ["model.path={folder}/model"])
    assert (tmp_path / "3/model/config.json").is_file()
    assert {"seed=3", f"model.path={tmp_path}/3/model"} <= set(launched[0])


def test_a_recipes_run_is_told_from_its_metrics(beside: Any, monkeypatch: Any, tmp_path: Path) -> None:
    recipes = beside("recipes")
    lines = [
        {"eval/held_out/accuracy": 0.25},
        *({"reward/mean": step / 10, "time/step": 2.0} for step in range(1, 8)),
    ]
    lines[-1]["eval/held_out/accuracy"] = 0.75
    monkeypatch.setattr(recipes, "train", lambda *_: lines)
    found = recipes.measure("grpo", tmp_path, tmp_path, 7, [1, 2], [])
    assert found["before"] == [0.25, 0.25] and found["after"] == [0.75, 0.75]
    assert found["first"] == pytest.approx([0.2, 0.2]) and found["last"] == pytest.approx([0.6, 0.6])
    assert found["seconds"] == [14.0, 14.0]


def test_simulated_replicas_wait_in_lockstep_and_draw_from_one_queue_otherwise(beside: Any) -> None:
    replicas = beside("simulated_replicas")
    cost = replicas.interpolated({1: 1.0, 2: 1.0, 4: 3.0})
    assert [cost(rows) for rows in (1, 2, 3, 4)] == [1.0, 1.0, 2.0, 3.0]
    # Two replicas with room for two rows: the first is given 8 and 8, 6 and 2, the second 1, 1, 1, 3.
    lengths = [[8, 8], [1, 1], [6, 2], [1, 3]]
    lockstep = replicas.simulate(lengths, 2, rows=2, max_in_flight=8, cost=cost)
    assert lockstep[-1] == (14.0, 6)
    drawn = replicas.simulate(lengths, 2, rows=2, max_in_flight=2, cost=cost)
    # The last group begins where one row of the third has ended, and none waits for a whole group's room.
    assert [second for second, _ in drawn] == [1.0, 1.0, 3.0, 4.0, 7.0, 7.0, 8.0, 8.0]
    assert replicas.full(lengths, 2, rows=2, cost=cost) == 7.5
    steady = replicas.simulate([[3, 3]] * 16, 2, rows=2, max_in_flight=2, cost=cost)
    assert replicas.step_in_the_middle(steady, 4) == 6.0


def test_placements_balance_learning_and_sampling(beside: Any) -> None:
    placements = beside("placements")

    def probes(learning: float) -> dict[int, tuple[float, float]]:
        """With a time of 1 s and 12 s by the rows: 4 s with 4 of them."""
        return {rows: (learning, 1 + 12 / rows) for rows in (4, 32)}

    assert [placements.balanced_rows(probes(seconds)) for seconds in (9.0, 3.0, 2.2)] == [2, 6, 10]
    assert placements.balanced_rows(probes(0.5)) == 32, "no number of rows is enough"
