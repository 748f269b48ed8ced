"""The throughput benchmark: its configurations pass `check`, their predictions, a run folder's numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.main import main as command
from megatron_rl.shapes.published import load_shape, read_trainable

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = (ROOT / "benchmarks/README.md").read_text()
BENCH = sorted((ROOT / "configs/bench").glob("*.yaml"))
# Totals as the checkpoints themselves have them (safetensors index or model card).
PUBLISHED = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-405B-Instruct": 405_853_388_800,
    "DeepSeek-V3": 671_026_419_200,
}
# Billions of parameters, and of those that a token passes without the embedding, as the models' reports and
# cards round them: gpt-oss arXiv 2508.10925, Kimi-K2 arXiv 2507.20534, others in their names.
ROUNDED = {
    "Qwen3.5-27B": (27, 27),
    "Qwen3.5-35B-A3B": (35, 3),
    "gpt-oss-120b": (116.83, 5.13),
    "Kimi-K2-Instruct": (1040, 32),
    "GLM-4.7": (355, 32),
    "MiniMax-M2": (230, 10),
}


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    before = set(sys.modules)
    yield __import__("throughput")
    for name in set(sys.modules) - before:
        if name in ("throughput", "common"):
            del sys.modules[name]


def run(throughput: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["throughput.py", *words])
    return throughput.main()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_shipped_shape_has_the_published_total(name: str) -> None:
    path = ROOT / "configs/models" / name / "config.json"
    model = read_trainable(path, [])
    assert model is not None
    shape = model.shape
    assert shape.parameters == PUBLISHED[name] == load_shape(str(path)).parameters
    assert shape.active_parameters == load_shape(str(path)).active_parameters


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_shipped_shape_has_the_size_that_its_authors_state(name: str) -> None:
    model = read_trainable(ROOT / "configs/models" / name / "config.json", [])
    assert model is not None
    total, active = ROUNDED[name]
    shape = model.shape
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert (shape.active_parameters - shape.vocab * shape.hidden) / 1e9 == pytest.approx(active, rel=0.06)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("path", BENCH, ids=lambda path: path.stem)
def test_benchmark_configuration_passes_check(path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    assert command(["check", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    shipped = [load_shape(str(ROOT / "configs/models" / name)) for name in (*PUBLISHED, *ROUNDED)]
    assert report["valid"] and report["model"]["parameters"] in [shape.parameters for shape in shipped]
    assert not [warning for warning in report["warnings"] if "more memory" in warning["message"]]


@pytest.mark.slow
@pytest.mark.parametrize("paths", [BENCH[::4], pytest.param(BENCH, marks=pytest.mark.campaign)])
@pytest.mark.usefixtures("forked_trials")
def test_every_size_is_simulated(
    throughput: Any, monkeypatch: Any, tmp_path: Path, capsys: Any, paths: list[Path]
) -> None:
    out = tmp_path / "out.json"
    assert len(BENCH) == 13
    assert run(throughput, monkeypatch, *map(str, paths), "--simulate", "--json", str(out)) == 0
    shown = capsys.readouterr().out
    records = json.loads(out.read_text())
    for path in paths:
        mine = {record["metric"]: record["median"] for record in records if record["case"] == path.stem}
        assert path.stem in shown
        phases = sum(mine[name] for name in ("generate", "reshard", "score", "learn"))
        assert phases < mine["step"] < phases + 10
        assert 0.01 < mine["FLOPs / peak, learn"] < 0.6 and mine["memory learn"] < 85
        gpus, rate = re.search(r"(\d+)gpu$", path.stem), mine["tokens/s per process, step"]
        assert gpus
        row = f"| `{path.relative_to(ROOT)}` | {int(gpus[1]):,} | {mine['step']:.0f} | {rate:,.0f} |"
        assert row in NUMBERS, row
    assert {record["method"] for record in records} == {"predicted, H100-80GB"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_simulation_follows_overrides_and_names_what_is_missing(
    throughput: Any, monkeypatch: Any, capsys: Any
) -> None:
    assert run(throughput, monkeypatch, "configs/minimal.yaml", "--simulate") == 2
    assert "no GPU to predict for" in capsys.readouterr().err
    assert run(throughput, monkeypatch, str(BENCH[0]), "--simulate", "rollout.n=3") == 2
    assert "`batch.samples_per_prompt`" in capsys.readouterr().err
    assert run(throughput, monkeypatch, str(BENCH[0]), "--simulate", "gpu=H20-96GB") == 0
    assert "predicted, H20-96GB" in capsys.readouterr().out


def test_a_run_folder_stands_beside_its_prediction(
    throughput: Any, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    step = {
        "step": 1, "time/step": 10.0, "time/generate": 5.0, "time/reshard": 0.5, "time/reshard_verify": 0.25,
        "time/score": 1.0, "time/learn": 3.0, "memory/learn_peak_bytes": 2e9,
        "response/length": 1000.0, "throughput/tokens_per_second": 2048 * 1500 / 10.0,
    }  # fmt: skip
    lines = [step | {"time/learn": 99.0}, step, step]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    config = str(ROOT / "configs/bench/qwen2.5-7b-8gpu.yaml")
    assert run(throughput, monkeypatch, config, "--run", str(tmp_path), "--json", str(out)) == 0
    records = json.loads(out.read_text())
    measured = {r["metric"]: r for r in records if r["method"] == "measured on 8 processes"}
    predicted = {r["metric"]: r["median"] for r in records if r["method"].startswith("predicted")}
    assert measured["learn"]["maximum"] == 3.0 and measured["learn"]["repeats"] == 2
    assert measured["generate"]["median"] == 4.25 and measured["reshard"]["median"] == 0.75
    assert measured["tokens/s per process, step"]["median"] == pytest.approx(2048 * 1500 / 10 / 8)
    assert measured["tokens/s per process, generate"]["median"] == pytest.approx(2048 * 1000 / 4.25 / 8)
    assert measured["memory learn_peak"]["median"] == 2.0
    # The same work at another pace: FLOPs over peak scale with the seconds alone.
    used = measured["FLOPs / peak, learn"]["median"] * 3.0
    assert used == pytest.approx(predicted["FLOPs / peak, learn"] * predicted["learn"], rel=1e-6)
