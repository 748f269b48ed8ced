"""The path of Transformer Engine's layers, on a stand-in in torch: layouts, checkpoints, and the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf_models import save_model
from tests.rank_server import EAGER

sys.path.insert(0, str(Path(__file__).parent))
import test_checkpoint as checkpoints
import test_family_commands as commands
import test_layout_invariance as layouts
from models import make_batch
from test_lora import EVERYWHERE, RANK, write_adapter

SP, VPP, FULL, NARROW = layouts.SP, layouts.VPP, layouts.FULL, layouts.NARROW
CASES = [
    layouts.case("qwen2", tensor=2, pipeline=2, **VPP, **SP, **FULL),
    layouts.case("deepseek-v3", tensor=2, expert=2, pipeline=2, **SP),
    layouts.case("adapted-moe", tensor=2, expert=2, expert_tensor=2, **SP),
    layouts.case("gpt-oss", tensor=2, context=2, **SP),  # sinks over the tokens of several ranks
    layouts.case("minimax-m2", tensor=2, expert=2, **SP),  # norms over all heads
    layouts.case("qwen2", tensor=2, provider="own_attention"),
]
CAMPAIGN_CASES = [
    layouts.case("qwen2", tensor=4, budget=NARROW),  # more ranks than key-value heads
    layouts.case("qwen3-moe", tensor=2, expert=2, expert_tensor=2, **SP),
    layouts.case("adapted", tensor=2, pipeline=2, **SP),
    layouts.case("glm4-moe", context=2, tensor=2, **SP, settings={"apply_rope_fusion": True}),
    layouts.case("ministral3", tensor=2, context=2, **SP),  # queries with factors
    layouts.case("qwen3-moe", tensor=2, expert=2, pipeline=2, **SP, **FULL),
    layouts.case("qwen3-moe", expert=4),
    layouts.case("qwen3-moe", context=2, expert=2, pipeline=2),
    layouts.case("deepseek-v3", tensor=2, **SP, recompute="selective"),
    layouts.case("deepseek-v3", tensor=2, context=2, **SP),
    layouts.case("qwen2", tensor=2, context=2, **SP),
    layouts.case("qwen2", context=4, pipeline=1, recompute="selective"),  # more ranks than key-value heads
    layouts.case("mistral", context=2),
    layouts.case("gpt-oss", tensor=2, expert=2, pipeline=2, **SP, **FULL),
    layouts.case("qwen3-moe", expert=2, tensor=2, **SP, provider="gpt_builder"),
]
"""Other layouts of the same layers; `launch/campaign.sh fused_layouts` has all families in all layouts."""
ADAPTED = {"adapted": "qwen3", "adapted-moe": "qwen3-moe"}
COMPILED = ("qwen2", "deepseek-v3", "gpt-oss")
"""Models with the compiled functions of dense layers, of latent attention and of experts with biases."""
CAMPAIGN_COMPILED = ("qwen3-moe", "adapted", "adapted-moe", "glm4-moe", "minimax-m2", "ministral3")
MODELS = tuple(dict.fromkeys(case["model"] for case in (*CASES, *CAMPAIGN_CASES)))
MOE: dict[str, Any] = {"model": "qwen3-moe"}
WIDE = {"tensor": 2, "expert": 2, "pipeline": 2, "sequence_parallel": True}
SAVED = [
    {
        "name": "straight",
        "action": "save",
        "to": "saved",
        "shards": "shards",
        "buffers": "buffers",
        **MOE,
        **WIDE,
    },
    {"name": "same", "action": "load", "from": "saved", "same": "straight", **MOE, **WIDE},
    {"name": "same-shards", "action": "load", "from": "shards", "same": "straight", **MOE, **WIDE},
    {"name": "cp2", "action": "load", "from": "saved", **MOE, "expert": 2, "context": 2},
    {"name": "dp4", "action": "load", "from": "saved", **MOE, "expert": 4},
    {"name": "buffers-dp4", "action": "load", "megatron": "buffers", **MOE, "expert": 4},
]
PLAIN = [
    {"name": "plain", "action": "wrong", "from": "saved", **MOE},
    {"name": "buffers-plain", "action": "load", "megatron": "buffers", **MOE},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fused")
    for name in MODELS:
        model = save_model(ADAPTED.get(name, name), path / name)
        torch.manual_seed(3)
        torch.save(make_batch(model), path / name / "batch.pt")
    for name in ADAPTED:
        write_adapter(path / name, path / name / "adapter", RANK)
    return path


def with_adapters(folder: Path, cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return cases, those of adapted models with their adapter."""
    result = []
    for case in cases:
        name = case["model"]
        if name in ADAPTED:
            adapter = {"rank": RANK, "targets": EVERYWHERE.get(name), "path": str(folder / name / "adapter")}
            case = case | {"lora": adapter}
        result.append(case)
    return result


@pytest.mark.parametrize(
    ("cases", "compiled"),
    [(CASES, COMPILED), pytest.param(CAMPAIGN_CASES, CAMPAIGN_COMPILED, marks=pytest.mark.campaign)],
)
def test_the_step_is_that_of_plain_layers_on_one_rank(
    fork: Any, fork_fused: Any, folder: Path, cases: list[dict[str, Any]], compiled: tuple[str, ...]
) -> None:
    """In the suite one rank compiles the functions of some models; the campaign compiles on every rank."""
    models = dict.fromkeys([*(case["model"] for case in cases), *compiled])
    alone = with_adapters(folder, map(layouts.case, models))
    alone_compiled = [
        case | {"name": f"{case['model']}-compiled"} for case in alone if case["model"] in compiled
    ]
    on_ranks = with_adapters(folder, cases)
    layouts.run(fork, folder, 1, alone)
    layouts.run(fork_fused, folder, 1, alone_compiled)
    eager = {EAGER: "1"} if cases is CASES else {}
    layouts.run(fork_fused, folder, layouts.RANKS, on_ranks, env=eager)

    wrong = [
        words
        for case in (*on_ranks, *alone_compiled)
        for words in layouts.differences(folder, case, fused=True)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_checkpoint_is_resumed(fork: Any, fork_fused: Any, folder: Path) -> None:
    """In the same layout to the last bit, in another one up to rounding.

    Plain layers refuse it, unless it was saved as Megatron-LM does. A state does not depend on whether
    functions are compiled, which would take longer than all cases.
    """
    (folder / "saved.json").write_text(json.dumps(SAVED))
    fork_fused(checkpoints.WORKER, 4, folder, "saved.json", env={EAGER: "1"})
    straight = checkpoints.result(folder, "straight")
    for name in ("same", "same-shards"):
        checkpoints.assert_same_bits(checkpoints.result(folder, name), straight)
    (folder / "plain.json").write_text(json.dumps(PLAIN))
    fork(checkpoints.WORKER, 1, folder, "plain.json")
    for name in ("cp2", "dp4", "buffers-dp4", "buffers-plain"):
        assert checkpoints.largest_difference(checkpoints.result(folder, name), straight) < 5e-5, name
    refused = checkpoints.result(folder, "plain")
    assert "other layers" in refused["message"] and refused["untouched"]


@pytest.mark.campaign
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-lora"])
def test_the_commands(fork_fused: Any, material: Path, tmp_path: Path, family: str) -> None:
    """Trainer and vLLM agree, a run is resumed on another layout, transformers loads the export."""
    commands.prepare(tmp_path, family, material)
    fork_fused(commands.SCRIPT, 2, tmp_path, family, timeout=400)
    commands.check(tmp_path, family)
