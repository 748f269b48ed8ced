"""A resumed run equals an uninterrupted one, bit for bit on the same layout."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.checkpoint_meta import (
    checkpoint_path,
    latest_checkpoint,
    prune_checkpoints,
    read_meta,
)
from megatron_rl.errors import UserError
from megatron_rl.shapes.lora import MLP

sys.path.insert(0, str(Path(__file__).parent))
from models import write_model
from test_failures import endless

WORKER = Path(__file__).parent / "workers" / "checkpoint_worker.py"
TP2PP2 = {"tensor": 2, "pipeline": 2, "sequence_parallel": True}
PP2DP2 = {"pipeline": 2}
TP2DP2 = {"tensor": 2}
VPP = {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}
DP4: dict[str, Any] = {}
QWEN = {"model": "qwen2"}
LLAMA = {"model": "llama"}
BF16 = {"dtype": "bfloat16"}
PLAIN = {"distributed": False}
LORA = {"lora": {"rank": 4}}
MOE = {"model": "qwen3-moe", "pipeline": 2, "expert": 2}
ADAPTED_EXPERTS = {"lora": {"rank": 4, "targets": MLP}}
"""The second stage has no other layer that learns, and none of the ranks has one in a sparse model."""
SPARSE = {**MOE, "model": "sparse/qwen3-moe", **ADAPTED_EXPERTS}
HOST = {"offload": True}
EXPERTS_TP2 = {"tensor": 2, "expert": 4, "expert_tensor": 1, "sequence_parallel": True}

IN_MEGATRON = {"megatron": "megatron"}
IN_BF16 = {"megatron": "megatron-bf16"}
IN_BUFFERS = {"buffers": "buffers"}
BUCKETS = {"ddp": {"overlap_grad_reduce": True, "bucket_size": 2000}}

FOUR = [
    {
        "name": "straight",
        "action": "save",
        "to": "run/checkpoints/step_3",
        "shards": "shards",
        **QWEN,
        **TP2PP2,
        **IN_MEGATRON,
        **IN_BUFFERS,
    },
    {"name": "buffers-dp4", "action": "load", "megatron": "buffers", **QWEN, **DP4, **PLAIN},
    {
        "name": "buckets-straight",
        "action": "save",
        "to": "buckets",
        "buffers": "buckets-buffers",
        **LLAMA,
        **PP2DP2,
        **BUCKETS,
    },
    {"name": "buckets-vpp", "action": "load", "megatron": "buckets-buffers", **LLAMA, **VPP},
    {"name": "same-shards", "action": "load", "from": "shards", "same": "straight", **QWEN, **TP2PP2},
    {"name": "shards-tp2dp2", "action": "load", "from": "shards", **QWEN, **TP2DP2},
    {"name": "shards-dp4", "action": "load", "from": "shards", **QWEN, **DP4},
    {"name": "shards-vpp", "action": "load", "from": "shards", **QWEN, **VPP},
    {"name": "dp4-straight", "action": "save", "to": "dp4", "shards": "dp4-shards", **LLAMA, **DP4, **BF16},
    {
        "name": "dp4-same",
        "action": "load",
        "from": "dp4-shards",
        "same": "dp4-straight",
        **LLAMA,
        **DP4,
        **BF16,
    },
    {"name": "data-straight", "action": "save", "to": "data", "shards": "data-shards", **LLAMA, **DP4},
    {"name": "megatron-same", "action": "load", "same": "straight", **QWEN, **TP2PP2, **IN_MEGATRON},
    {"name": "megatron-dp4", "action": "load", **QWEN, **DP4, **PLAIN, **IN_MEGATRON},
    {
        "name": "same",
        "action": "load",
        "from": "run/checkpoints/step_3",
        "same": "straight",
        **QWEN,
        **TP2PP2,
    },
    {"name": "dp4", "action": "load", "from": "run/checkpoints/step_3", **QWEN, **DP4},
    {"name": "pp2dp2", "action": "load", "from": "run/checkpoints/step_3", **QWEN, **PP2DP2},
    {"name": "tp2dp2", "action": "load", "from": "run/checkpoints/step_3", **QWEN, **TP2DP2},
    {"name": "vpp", "action": "load", "from": "run/checkpoints/step_3", **QWEN, **VPP},
    {
        "name": "vpp-straight",
        "action": "save",
        "to": "vpp",
        "buffers": "buffers-bf16",
        **LLAMA,
        **VPP,
        **BF16,
        **IN_BF16,
    },
    {"name": "buffers-vpp", "action": "load", "megatron": "buffers-bf16", **LLAMA, **VPP, **BF16, **PLAIN},
    {
        "name": "buffers-same",
        "action": "load",
        "same": "vpp-straight",
        "megatron": "buffers-bf16",
        **LLAMA,
        **VPP,
        **BF16,
    },
    {"name": "megatron-vpp", "action": "load", **LLAMA, **VPP, **BF16, **PLAIN, **IN_BF16},
    {"name": "vpp-same", "action": "load", "from": "vpp", "same": "vpp-straight", **LLAMA, **VPP, **BF16},
    {"name": "zero-straight", "action": "save", "to": "zero", "untrained": True, **LLAMA, **PP2DP2},
    {"name": "zero-same", "action": "load", "from": "zero", **LLAMA, **PP2DP2},
    {"name": "zero-tp2", "action": "load", "from": "zero", **LLAMA, **TP2DP2},
    {"name": "plain-straight", "action": "save", "to": "plain", **LLAMA, **TP2DP2, **PLAIN},
    {"name": "plain-same", "action": "load", "from": "plain", **LLAMA, **TP2DP2, **PLAIN},
    {
        "name": "lora-straight",
        "action": "save",
        "to": "lora",
        "shards": "lora-shards",
        **LLAMA,
        **TP2PP2,
        **LORA,
    },
    {"name": "shards-lora-dp4", "action": "load", "from": "lora-shards", **LLAMA, **LORA},
    {
        "name": "lora-same",
        "action": "load",
        "from": "lora",
        "same": "lora-straight",
        **LLAMA,
        **TP2PP2,
        **LORA,
    },
    {"name": "lora-vpp", "action": "load", "from": "lora", **LLAMA, **VPP, **LORA},
    {"name": "lora-dp4", "action": "load", "from": "lora", **LLAMA, **LORA},
    {"name": "wrong-rank", "action": "wrong", "from": "lora", **LLAMA, **DP4, "lora": {"rank": 8}},
    {
        "name": "host-straight",
        "action": "save",
        "to": "host",
        "shards": "host-shards",
        **LLAMA,
        **DP4,
        **BF16,
        **HOST,
    },
    {
        "name": "host-same",
        "action": "load",
        "from": "host",
        "same": "host-straight",
        **LLAMA,
        **DP4,
        **BF16,
        **HOST,
    },
    {
        "name": "host-shards-same",
        "action": "load",
        "from": "host-shards",
        "same": "host-straight",
        **LLAMA,
        **DP4,
        **BF16,
        **HOST,
    },
    {"name": "host-data", "action": "load", "from": "data", **LLAMA, **TP2DP2, **HOST},
    {"name": "host-buffers", "action": "load", "megatron": "buckets-buffers", **LLAMA, **VPP, **HOST},
    {"name": "moe-straight", "action": "save", "to": "moe", "shards": "moe-shards", **MOE, **HOST},
    {"name": "moe-same", "action": "load", "from": "moe-shards", "same": "moe-straight", **MOE, **HOST},
    {"name": "moe-device", "action": "load", "from": "moe", **MOE, "virtual_pipeline": 2},
    {"name": "shards-moe-device", "action": "load", "from": "moe-shards", **MOE, "virtual_pipeline": 2},
    {"name": "moe-tp2", "action": "load", "from": "moe", "model": "qwen3-moe", **EXPERTS_TP2},
    {"name": "shards-moe-tp2", "action": "load", "from": "moe-shards", "model": "qwen3-moe", **EXPERTS_TP2},
    {"name": "host-tp2", "action": "load", "from": "host", **LLAMA, **TP2PP2, **BF16, **HOST},
    {"name": "shards-host-tp2", "action": "load", "from": "host-shards", **LLAMA, **TP2PP2, **BF16, **HOST},
    {"name": "experts-straight", "action": "save", "to": "experts", **MOE, **ADAPTED_EXPERTS},
    {
        "name": "experts-etp2",
        "action": "load",
        "from": "experts",
        "model": "qwen3-moe",
        "tensor": 2,
        "expert_tensor": 2,
        "sequence_parallel": True,
        **ADAPTED_EXPERTS,
    },
    {"name": "sparse-straight", "action": "save", "to": "sparse-any", "shards": "sparse-shards", **SPARSE},
    {"name": "sparse-same", "action": "load", "from": "sparse-shards", "same": "sparse-straight", **SPARSE},
    {"name": "broken", "action": "broken", "to": "other/checkpoints/step_9", **LLAMA, **TP2DP2},
    {"name": "wrong-model", "action": "wrong", "from": "run/checkpoints/step_3", **LLAMA, **DP4},
    {"name": "wrong-size", "action": "wrong", "from": "run/checkpoints/step_3", "model": "wide/qwen2", **DP4},
    {"name": "wrong-optimizer", "action": "wrong", "from": "plain", **LLAMA, **TP2DP2},
    {
        "name": "weights",
        "action": "load",
        "from": "run/checkpoints/step_3",
        "weights_only": True,
        **QWEN,
        **PP2DP2,
    },
]
CAMPAIGN = {
    *("shards-dp4", "pp2dp2", "lora-vpp"),  # further layouts of states that two others read
    *("vpp", "shards-vpp", "megatron-vpp"),  # several chunks of a rank, which `buffers-vpp` has too
    *("vpp-same", "zero-same", "host-same"),  # gathered parameters, which `same` and other layouts read
    *("experts-straight", "experts-etp2"),  # adapters of experts, as `sparse-same`, and of other layers
    *("host-buffers", "host-tp2", "shards-host-tp2", "moe-device", "shards-moe-device"),  # as `host-data`
}
"""Cases of `FOUR` that the suite leaves out; the campaign runs all."""
ONE = [
    {"name": "data-alone", "action": "load", "from": "data-shards", **LLAMA},
    {"name": "alone", "action": "load", "from": "run/checkpoints/step_3", **QWEN},
    {"name": "shards-alone", "action": "load", "from": "shards", **QWEN},
    {
        "name": "weights-alone",
        "action": "load",
        "from": "run/checkpoints/step_3",
        "weights_only": True,
        **QWEN,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    for family in ("qwen2", "llama", "qwen3-moe"):
        write_model(path, family)
    write_model(path / "wide", "qwen2", intermediate_size=64)
    write_model(path / "sparse", "qwen3-moe", mlp_only_layers=[])
    return path


def result(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt", weights_only=False)


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["steps"] == expected["steps"]
    for name, value in expected["weights"].items():
        assert torch.equal(found["weights"][name], value), name


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest relative difference of losses, gradient norms and metrics, or of weights."""
    worst = [
        float((found["weights"][name] - value).nan_to_num(nan=torch.inf).abs().max())
        for name, value in expected["weights"].items()
    ]
    for mine, other in zip(found["steps"], expected["steps"], strict=True):
        worst += [abs(mine[name] - value) / max(1.0, abs(value)) for name, value in other.items()]
    return max(worst)


@pytest.mark.parametrize("left_out", [CAMPAIGN, pytest.param(set(), marks=pytest.mark.campaign)])
def test_resume(folder: Path, fork: Any, left_out: set[str]) -> None:
    plan = [case for case in FOUR if case["name"] not in left_out]
    ran = {case["name"] for case in (*plan, *ONE)}
    (folder / "plan4.json").write_text(json.dumps(plan))
    (folder / "plan1.json").write_text(json.dumps(ONE))
    fork(WORKER, 4, folder, "plan4.json", timeout=400)
    fork(WORKER, 1, folder, "plan1.json", timeout=200)
    straight = result(folder, "straight")
    assert straight["steps"][0]["learning_rate"] != straight["steps"][-1]["learning_rate"]
    assert straight["steps"][0]["grad_norm"] > 0.1, "clipping must be at work"

    same = result(folder, "same")
    assert_same_bits(same, straight)
    assert_same_bits(result(folder, "megatron-same"), straight)
    assert_same_bits(result(folder, "buffers-same"), result(folder, "vpp-straight"))
    assert same["draws"] == straight["draws"]
    assert len({tuple(draw) for draw in same["draws"]}) == 4
    assert same["state"]["position"] == {"epoch": 1, "row": 5}
    assert torch.equal(same["state"]["buffer"], torch.arange(5))
    assert_same_bits(result(folder, "same-shards"), straight)
    assert_same_bits(result(folder, "host-shards-same"), result(folder, "host-straight"))
    for pair in ("vpp", "zero", "plain", "lora", "dp4", "host", "moe", "sparse"):
        if f"{pair}-same" not in ran:
            continue
        assert_same_bits(result(folder, f"{pair}-same"), result(folder, f"{pair}-straight"))

    # Shards that are read on another layout give the same bits as gathered parameters.
    for name in ("tp2dp2", "dp4", "vpp", "alone", "lora-dp4", "moe-device", "moe-tp2", "host-tp2"):
        if f"shards-{name}" not in ran:
            continue
        assert_same_bits(result(folder, f"shards-{name}"), result(folder, name))

    # Sums in another order: float32 rounding, grown over three steps.
    layouts = [name for name in LAYOUTS if name in ran]
    worst = {name: largest_difference(result(folder, name), straight) for name in layouts}
    pairs = {
        "zero-tp2": "zero",
        "buckets-vpp": "buckets",
        "buffers-vpp": "vpp",
        "megatron-vpp": "vpp",
        "data-alone": "data",
        # Adam on the host is Adam, also where it continues the device's state, or the device continues its.
        "host-straight": "dp4",
        "host-data": "data",
        "host-buffers": "buckets",
        "moe-device": "moe",
        "lora-vpp": "lora",
        "lora-dp4": "lora",
        "experts-etp2": "experts",
    }
    for name in pairs.keys() & ran:
        worst[name] = largest_difference(result(folder, name), result(folder, f"{pairs[name]}-straight"))
    print("largest difference after resuming in another layout:", {k: f"{v:.1e}" for k, v in worst.items()})
    assert max(worst.values()) < 5e-5

    for name in ("dp4", "data"):
        size = result(folder, f"{name}-straight")["bytes"]
        print(f"bytes allocated at a save by one of 4 data-parallel ranks, {name}:", size)
        # No more than this rank's share, a tensor of it at a time, and what tells the ranks of each other.
        assert size["same"] < 1.5 * size["held"] < size["any"], size

    # Another layout cannot continue the generators; it seeds them, equal on all ranks but Megatron's.
    reseeded = result(folder, "tp2dp2")["draws"]
    assert reseeded == [reseeded[0], reseeded[1], reseeded[0], reseeded[1]]
    assert reseeded[0][:4] == reseeded[1][:4] == result(folder, "dp4")["draws"][0][:4]
    assert reseeded[0][4:] != reseeded[1][4:]

    weights, alone = result(folder, "weights"), result(folder, "weights-alone")
    for name, value in alone["weights"].items():
        assert torch.equal(weights["weights"][name], value), name
    assert (weights["log_probs"] - alone["log_probs"]).nan_to_num().abs().max() < 2e-5
    assert weights["meta"]["step"] == 3


LAYOUTS = ("dp4", "pp2dp2", "tp2dp2", "vpp", "alone", "megatron-dp4", "buffers-dp4")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong-model", ["for another model", "model_type = llama", "model_type = qwen2", "step_3", "fix:"]),
        ("wrong-size", ["for another model", "mlp_width = 64", "mlp_width = 48", "fix:"]),
        ("wrong-optimizer", ["another optimizer", "distributed", "replicated", "fix:"]),
        ("wrong-rank", ["other adapters", "rank 8, alpha 8 on", "rank 4, alpha 4 on", "fix:"]),
    ],
)
def test_another_models_checkpoint_is_refused(folder: Path, name: str, words: list[str]) -> None:
    found = result(folder, name)
    assert all(word in found["message"] for word in words), found["message"]
    assert found["untouched"] and "fix:" in found["message"]


def test_a_broken_save_leaves_nothing_to_resume(folder: Path) -> None:
    found = result(folder, "broken")
    assert not found["there"]
    assert len(found["messages"]) == 4 and all("no space left" in message for (message,) in found["messages"])
    assert len(found["unread"]) == 4 and all("rank 1: " in message for (message,) in found["unread"])
    assert found["state"]["step"] == 5
    assert [path.name for path in (folder / "other" / "checkpoints").iterdir()] == ["step_9"]


def test_meta_says_what_the_checkpoint_is(folder: Path) -> None:
    found = latest_checkpoint(folder / "run/checkpoints")
    assert found == checkpoint_path(folder / "run/checkpoints", 3)
    meta = read_meta(found)
    assert meta["step"] == 3 and meta["seed"] == 7 and meta["dtype"] == "float32"
    assert (
        meta["layout"]["tensor"] == 2
        and meta["layout"]["pipeline"] == 2
        and meta["layout"]["ranks"] == [0, 1, 2, 3]
    )
    assert meta["model"]["hidden"] == 32 and meta["model"]["tied"] is True
    assert "torch" in meta["versions"] and "megatron-core" in meta["versions"]
    assert not list(folder.rglob("*.partial"))


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert latest_checkpoint(folder) is None
    for name in ("step_2", "step_10", "step_30.partial", "step_20", "step_2.old", "notes"):
        (folder / name / "model").mkdir(parents=True)
    for name in ("step_2", "step_10", "step_30.partial", "step_2.old"):
        (folder / name / "meta.json").write_text("{}")
    assert latest_checkpoint(folder) == folder / "step_10"  # step_20 has no meta.json, step_30 was cut off
    prune_checkpoints(folder / "step_10", keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step_10", "step_20"]
    # A run that went on from before a damaged checkpoint keeps what it saves, and that one for a person.
    for name in ("step_4", "step_7"):
        (folder / name).mkdir()
        (folder / name / "meta.json").write_text("{}")
    prune_checkpoints(folder / "step_7", keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step_10", "step_20", "step_7"]
    with pytest.raises(UserError, match="not a complete training checkpoint"):
        read_meta(folder / "step_20")
    with pytest.raises(UserError, match="written by another version"):
        read_meta(folder / "step_10")


def test_a_full_disk_is_named_and_costs_no_checkpoint(fork: Any, material: Path, tmp_path: Path) -> None:
    """As the run's folder grows into a disk that holds its first files, two checkpoints, then everything."""
    run = tmp_path / "run"
    run.mkdir()
    config = endless(tmp_path, material)
    words = ("steps=4", "checkpoint.every=1", "checkpoint.keep=9", "checkpoint.export=false")
    words += ("actor.layout.pipeline=1", "rollout.tensor=1")
    sizes = {"PLACE": str(run), "SIZES": "24 14000 200000"}
    text = fork(WORKER.with_name("full_disk_train.py"), 1, "train", config, *words, env=sizes).output
    first, second, third = re.split(r"\d+ KiB: ", text)[:3]
    told = [line for line in text.splitlines() if "KiB: " in line]
    assert "the disk is too full" in first and "Traceback" not in first, first
    assert "the disk is too full for the checkpoint step_3" in second and "Traceback" not in second, second
    assert str(run) in second and "free some space or set another run_dir" in second
    assert told[:2] == [
        "24 KiB: exit code 2, checkpoints []",
        "14000 KiB: exit code 2, checkpoints ['step_1', 'step_2']",
    ]
    assert f"resumed from {run}/checkpoints/step_2 at step 2" in third
    assert told[2] == "200000 KiB: exit code 0, checkpoints ['step_1', 'step_2', 'step_3', 'step_4']"
