"""Computations of the benchmarks other than measuring: records, ratios, phases and workloads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch

from megatron_rl.config.derive import longest_row
from megatron_rl.config.load import load_config

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


@pytest.mark.slow
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
    cost = replicas.interpolate_costs({1: 1.0, 2: 1.0, 4: 3.0})
    assert [cost(rows) for rows in (1, 2, 3, 4)] == [1.0, 1.0, 2.0, 3.0]
    # Two replicas with room for two rows: the first is given 8 and 8, 6 and 2, the second 1, 1, 1, 3.
    lengths = [[8, 8], [1, 1], [6, 2], [1, 3]]
    lockstep = replicas.simulate(lengths, 2, rows=2, max_in_flight=8, cost=cost)
    assert lockstep[-1] == (14.0, 6)
    drawn = replicas.simulate(lengths, 2, rows=2, max_in_flight=2, cost=cost)
    # The last group begins where one row of the third has ended, and none waits for a whole group's room.
    assert [second for second, _ in drawn] == [1.0, 1.0, 3.0, 4.0, 7.0, 7.0, 8.0, 8.0]
    assert replicas.full_engine_seconds(lengths, 2, rows=2, cost=cost) == 7.5
    steady = replicas.simulate([[3, 3]] * 16, 2, rows=2, max_in_flight=2, cost=cost)
    assert replicas.seconds_of_middle_step(steady, 4) == 6.0


def test_placements_balance_learning_and_sampling(beside: Any) -> None:
    placements = beside("placements")

    def probes(learning: float) -> dict[int, tuple[float, float]]:
        """With a time of 1 s and 12 s by the rows: 4 s with 4 of them."""
        return {rows: (learning, 1 + 12 / rows) for rows in (4, 32)}

    assert [placements.balanced_rows(probes(seconds)) for seconds in (9.0, 3.0, 2.2)] == [2, 6, 10]
    assert placements.balanced_rows(probes(0.5)) == 32, "no number of rows is enough"


def ablation_results(ablation: Any) -> dict[str, dict[int, dict[str, float]]]:
    """Return made-up numbers of two variants: seed 2 has 1 more in both, and the second variant 0.5 more."""
    columns = [column for columns in ablation.TABLES for column in columns]
    results: dict[str, dict[int, dict[str, float]]] = {"base": {}, "packing": {}}
    for name, extra in (("base", 0.0), ("packing", 0.5)):
        for seed in (1, 2):
            results[name][seed] = {column.key: seed + extra for column in columns}
    # A number that rises with one seed and falls with the other.
    results["packing"][2]["kl"] = 1.75
    return results


def test_a_variant_of_the_ablation_has_the_settings_of_those_before(beside: Any) -> None:
    ablation = beside("ablation")
    configs = {
        variant.name: load_config(FOLDER / "ablation.yaml", ablation.overrides_of(variant.name))
        for variant in ablation.VARIANTS
    }
    smallest = configs["base"].batch.tokens_per_microbatch
    assert smallest == longest_row(configs["base"]), "check refuses a smaller one"
    assert configs["packing"].batch.tokens_per_microbatch is None
    last = configs["profiles"]
    assert last.rollout.filters.names == ("empty", "max_repetition")
    assert last.rollout.max_response_tokens == "auto"
    assert set(last.rollout.sampling_profiles) == {"addition", "sorting"}
    # The largest limit is the same in all, so that evaluations and budgets are.
    assert {longest_row(config) for config in configs.values()} == {smallest}


def test_the_ablation_shows_each_variant_beside_the_one_without(beside: Any) -> None:
    ablation = beside("ablation")
    results = ablation_results(ablation)
    lines = ablation.table(results, (ablation.TIME[0], ablation.RESULT[0])).splitlines()
    assert lines[0] == "| | seconds | KL |"
    assert lines[2:] == [
        "| smallest micro-batches | 1.50 ± 0.71 | 1.5000 ± 0.7071 |",
        "| + packing by tokens | 2.00 ± 0.71 | 1.6250 ± 0.1768 |",
        "| … against the row before | **+0.50 ± 0.00** | +0.1250 ± 0.5303 |",
    ]
    assert ablation.difference_text([-1e-9, -2e-9], ".4f") == "-0.0000 ± 0.0000", "rounding is no difference"
    picture = ElementTree.fromstring(ablation.picture(results))
    circles = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 4 * sum(len(columns) for columns in ablation.TABLES)


@pytest.mark.slow
def test_the_ablations_task_has_two_kinds_of_problems_of_mixed_lengths(beside: Any, tmp_path: Path) -> None:
    beside("ablation_task").make(tmp_path)
    records = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval", "sft")
    }
    for name in ("train", "eval"):
        tasks = [record["task"] for record in records[name]]
        assert tasks.count("addition") == tasks.count("sorting") == len(tasks) / 2
        assert {len(record["ground_truth"]) for record in records[name]} == {2, *range(5, 18, 2)}
    held_out = {record["prompt"] for record in records["eval"]}
    for name in ("train", "sft"):
        assert not held_out & {record["prompt"] for record in records[name]}

    limit = load_config(FOLDER / "ablation.yaml").rollout.max_response_tokens
    looping = [record for record in records["sft"] if len(record["response"]) > 17]
    assert min(len(record["response"]) for record in looping) > limit
    assert len(looping) / len(records["sft"]) == pytest.approx(0.05, abs=0.01)


@pytest.mark.slow
def test_a_job_that_is_stopped_leaves_no_rank(beside: Any, tmp_path: Path) -> None:
    common = beside("common")
    script, pid = tmp_path / "rank.py", tmp_path / "pid"
    script.write_text(f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
                      "time.sleep(600)\n")  # fmt: skip
    with pytest.raises(common.ChildFailed, match="ran longer than 15 s"):
        common.torchrun([str(script)], 1, 1, tmp_path / "log", 15)
    assert not psutil.pid_exists(int(pid.read_text()))


def test_the_page_of_the_ablation_has_the_recorded_numbers(beside: Any, monkeypatch: Any) -> None:
    """``launch/ablation.sh --record`` writes the files."""
    ablation = beside("ablation")
    monkeypatch.chdir(FOLDER.parent)
    texts = {name: path.read_text(encoding="utf-8") for name, path in ablation.RECORDED.items()}
    results = ablation.results_of(json.loads(texts["ablation.json"]))
    assert list(results) == [variant.name for variant in ablation.VARIANTS]
    assert texts["ablation.md"] == ablation.markdown(results)
    assert texts["ablation.svg"] == ablation.picture(results)
