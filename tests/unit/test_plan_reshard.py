"""Planning a weight transfer for machines that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.cli.main import main
from megatron_rl.planning.reshard import (
    actor_layout,
    find_config,
    parse_layout,
    plan_offline,
)
from megatron_rl.shapes.traffic import received_by_other_projects


@pytest.mark.parametrize(("source", "tensor"), [("tp8", 4), ("tp8", 2), ("tp4pp2", 4), ("tp2pp4dp2", 2)])
def test_received_bytes_are_hybridflows_where_its_assumptions_hold(source, tensor):
    """arXiv:2409.19256, table 2: (N - n) / (N n) of the model for N ranks of a copy and engines of n.

    It counts a model whose every byte is cut evenly; here norms are whole on every rank (under 1e-4 of the
    bytes) and only first and last stages have the vocabulary, so means over ranks are compared.
    """
    actor = actor_layout(parse_layout(source))
    plan = plan_offline(
        find_config("llama-3.1-8b"), actor, actor.ranks, tensor, torch.bfloat16, ranks_per_node=8
    )
    received = sum(plan.received.get(rank, 0) for rank in actor.ranks) / actor.size
    model = 2 * 8.030e9
    assert received == pytest.approx(received_by_other_projects(model, actor, tensor)["HybridFlow"], rel=1e-3)


def test_the_command_adds_a_plan_up(capsys):
    assert main(["plan-reshard", "qwen3-0.6b", "--from", "tp2pp2dp2", "--to", "tp2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["actor_ranks"], found["rollout_ranks"], found["engine_ranks"]) == (8, 8, 2)
    assert found["redundant_most"] == 0
    assert found["received_least"] <= found["received_mean"] <= found["received_most"] <= found["model_bytes"]
    assert 0 < found["staging_most"] <= 256 * 2**20
    assert found["seconds"]["H100-80GB"] > 0
    words = ["--from", "tp2pp2dp2", "--to", "tp2", "--json", "--lora-rank", "8"]
    assert main(["plan-reshard", "qwen3-0.6b", *words]) == 0
    adapters = json.loads(capsys.readouterr().out)
    assert 0 < adapters["received_most"] < 0.02 * found["received_most"]


@pytest.mark.slow
def test_the_page_of_benchmarks_says_what_the_command_says(capsys):
    page = " ".join((Path(__file__).parents[2] / "benchmarks/README.md").read_text().split())
    assert main(["plan-reshard", "llama-3-70b", "--from", "tp8pp8dp2", "--to", "tp8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    gigabytes = {name: received / 1e9 for name, received in plan["peers"].items()}
    words = (
        f"with {plan['received_mean'] / 1e9:.1f} GB received per rank where HybridFlow's formula says "
        f"{gigabytes['HybridFlow']:.2f} and gathering peers receive {gigabytes['HybridFlow-V']:.0f} GB"
    )
    assert "70B from TP8×PP8×DP2 to TP8 in" in page and words in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone", "--from", "tp2", "--to", "tp2"], "unknown model 'gone'"),
        (["qwen3-0.6b", "--from", "tp2", "--to", "pp2"], "not a layout of the engine"),
        (["qwen3-0.6b", "--from", "tp2dp3", "--to", "tp4"], "4 does not divide the 6 ranks of the engine"),
        (
            ["qwen3-0.6b", "--from", "tp2", "--to", "tp2", "--staging-bytes", "0"],
            "`--staging-bytes` is out of range",
        ),
        (
            ["qwen3-30b-a3b", "--from", "tp2", "--to", "tp2", "--lora-rank", "1000"],
            "a rank of at most 512",
        ),
        (["qwen3-0.6b", "--from", "tp" + "9" * 5000, "--to", "tp2"], "at most six digits"),
        (["qwen3-0.6b", "--from", "tp999999dp999999", "--to", "tp2"], "at most 65,536 ranks"),
        (
            ["qwen3-0.6b", "--from", "tp2", "--to", "tp2", "--rollout-ranks", "99999998"],
            "1 to 65,536",
        ),
    ],
)
def test_bad_input_is_told(capsys, words, message):
    assert main(["plan-reshard", *words]) == 2
    assert message in capsys.readouterr().err
