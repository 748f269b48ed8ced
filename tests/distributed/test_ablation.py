"""The ablation runs its variants through `train`, resumes, and its table has the numbers of their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

import pandas

from megatron_rl.metrics import read_metrics
from tests.conftest import ROOT, Launcher

START = Path(__file__).parent / "workers/forked_launches.py"
SECONDS = 400.0
QUICK = ("--quick", "--ranks", "1", "rollout.engine=torch")


def ablation(fork: Launcher, folder: Path, only: str) -> str:
    """Run three steps of the ablation's variants and return the printed tables."""
    command = (ROOT / "benchmarks/ablation.py", *QUICK, "--folder", folder, "--only", only)
    return fork(START, 1, *command, timeout=SECONDS).stdout


def test_two_variants_run_through_and_the_table_has_the_numbers_of_their_metrics(
    fork: Launcher, tmp_path: Path
) -> None:
    ablation(fork, tmp_path, "packing")
    first = (tmp_path / "packing-1/metrics.jsonl").stat().st_mtime_ns
    printed = ablation(fork, tmp_path, "packing,filters")
    assert (tmp_path / "packing-1/metrics.jsonl").stat().st_mtime_ns == first, "a finished run was repeated"

    report = json.loads((tmp_path / "ablation.json").read_text())
    numbers = {entry["name"]: entry["runs"][0]["numbers"] for entry in report["variants"]}
    assert list(numbers) == ["packing", "filters"]
    for name, measured in numbers.items():
        lines = [line for line in read_metrics(tmp_path / f"{name}-1/metrics.jsonl") if line["step"]]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert measured["seconds"] == median(line["time/step"] for line in lines)
        assert measured["kl"] == fmean(line["kl/ref"] for line in lines)
        assert measured["reward"] == fmean(line["reward/mean"] for line in lines)
        assert measured["accuracy"] == lines[-1]["eval/held_out/accuracy"]

        # A stored sample without a failure has been rewarded by a call.
        paths = [tmp_path / f"{name}-1/rollouts/step_{step}.parquet" for step in (1, 2, 3)]
        samples = pandas.concat([pandas.read_parquet(path) for path in paths])
        assert len(samples) == 3 * 64
        assert round(measured["calls"]) == samples["failure"].isna().sum()
        assert f"| {measured['calls']:,.0f} | {measured['truncated']:.4f} |" in printed
        assert f"| {measured['kl']:.4f} | {measured['reward']:.3f} | {measured['variance']:.3f} |" in printed
    assert numbers["filters"]["calls"] < numbers["packing"]["calls"]

    filters = report["variants"][1]
    assert filters["difference_from"] == "packing"
    assert filters["differences"]["calls"] == [numbers["filters"]["calls"] - numbers["packing"]["calls"]]
    (run,) = filters["runs"]
    assert "-m megatron_rl train benchmarks/ablation.yaml" in run["command"]
    assert run["versions"]["megatron_rl"]
    assert (tmp_path / "ablation.svg").is_file() and (tmp_path / "compare.html").is_file()
