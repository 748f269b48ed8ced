"""What the ranks of test_hybrid_engine.py run: Megatron weights into vLLM, in many pairs of layouts."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.hybrid_engine.engine import HybridEngine
from megatron_rl.hybrid_engine.execute import WeightMismatchError
from megatron_rl.hybrid_engine.layouts import engine_layout
from megatron_rl.hybrid_engine.plan import lower_bound
from megatron_rl.parallel import device
from megatron_rl.parallel.groups import ParallelGroups
from megatron_rl.parallel.hf.export import export
from megatron_rl.parallel.hf.files import CheckpointFiles
from megatron_rl.parallel.hf.weights import live_parameters, load_weights, view_of
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.parallel.model import build_model
from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.rollout.vllm_engine_setup import join_groups
from megatron_rl.rollout.vllm_engine_weights import model_parameters
from megatron_rl.types import PromptBatch, SamplingParameters
from tests.hf_models import make_model

SHAPE = {"hidden_size": 128, "vocab_size": 301, "max_position_embeddings": 512}
STAGING = 200_000
# family, actor ranks and sizes, rollout ranks (in order) and tensor parallelism
EXPERT_SIZES = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence_parallel": True}
CASES: list[tuple[str, tuple[int, ...], dict[str, Any], tuple[int, ...], int]] = [
    ("qwen2", (0, 1, 2, 3), {"tensor": 2, "pipeline": 2}, (0, 1, 2, 3), 2),
    ("qwen2-tied", (0, 1, 2, 3), {"tensor": 2, "pipeline": 2}, (3, 1, 0, 2), 2),
    ("qwen3", (0, 1, 2, 3), {"pipeline": 4}, (0, 1, 2, 3), 4),
    ("llama", (0, 1, 2, 3), {"tensor": 2, "sequence_parallel": True}, (0, 2, 1, 3), 2),
    ("qwen3-tied", (0, 1, 2, 3), {"pipeline": 2, "virtual_pipeline": 2}, (0, 1, 2, 3), 1),
    ("qwen2", (0, 1), {"tensor": 2}, (2, 3), 2),
    ("llama3", (0, 1, 2), {"pipeline": 3}, (1, 3), 2),
    ("mixtral", (0, 1, 2, 3), {"expert": 2}, (0, 1, 2, 3), 2),
    (
        "qwen3-moe",
        (0, 1, 2, 3),
        EXPERT_SIZES,
        (0, 1, 2, 3),
        2,
    ),
]

OWN_LOAD = (0, 1, 7)
"""Cases that are also compared with an engine that loads the exported checkpoint by itself."""


def engine_on(
    path: Path, ranks: tuple[int, ...], tensor: int, load: bool, dtype: str = "float32"
) -> VllmEngine | None:
    layout = ParallelLayout(ranks, tensor=tensor)
    if len(ranks) < device.world_size():
        join_groups(layout)
    if device.rank() not in ranks:
        return None
    return VllmEngine(
        path,
        RolloutConfig(tensor=tensor, vllm={"kv_cache_memory_bytes": 2**26}),
        layout=layout,
        rank=device.rank(),
        dtype=dtype,
        max_model_len=384,
        load=load,
    )


def prompts() -> PromptBatch:
    """Return rows that share a prefix longer than one block of the key-value cache."""
    shared = torch.arange(150) % 301
    rows = [torch.cat((shared, torch.tensor([7, number, 3 * number]))) for number in range(3)]
    return PromptBatch(
        tokens=torch.cat(rows),
        lengths=torch.tensor([len(row) for row in rows]),
        prompt_ids=torch.arange(3),
        tasks=("",) * 3,
        prompts=("",) * 3,
        ground_truths=(None,) * 3,
        metadata=({},) * 3,
        sampling=(SamplingParameters(temperature=0.0, max_response_tokens=12),) * 3,
    )


def change(model: Any, factor: float) -> None:
    """Stand for a training step: alter every weight, replicas alike."""
    if model is not None:
        with torch.no_grad():
            for value in live_parameters(model).values():
                value.mul_(factor)


def build(family: str, root: Path, ranks: tuple[int, ...], sizes: dict[str, Any]) -> Any:
    changes = {**SHAPE, "num_hidden_layers": 6} if sizes.get("pipeline") == 3 else SHAPE
    config = make_model(family, **changes).config
    groups = ParallelGroups(ParallelLayout(ranks, **sizes))
    if device.rank() not in ranks:
        return None
    model = build_model(config, groups, dtype=torch.float32)
    load_weights(model, root / family_path(family, sizes))
    return model


def family_path(family: str, sizes: dict[str, Any]) -> str:
    return family + ("-6" if sizes.get("pipeline") == 3 else "")


def equal_to_own_load(engine: VllmEngine | None, path: Path, ranks: tuple[int, ...], tensor: int) -> None:
    """Every parameter and every greedy token equal those of an engine that loads the exported checkpoint."""
    fresh = engine_on(path, ranks, tensor, load=True)
    if engine is None or fresh is None:
        return
    expected, got = model_parameters(fresh._model), model_parameters(engine._model)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    ours, theirs = engine.generate(prompts(), seed=1), fresh.generate(prompts(), seed=1)
    assert torch.equal(ours.tokens, theirs.tokens)
    # One of them reads the shared prefix from its cache, which rounds differently.
    torch.testing.assert_close(ours.rollout_log_probs, theirs.rollout_log_probs, atol=1e-5, rtol=0)
    fresh.close()


def equal_to_files(engine: VllmEngine | None, path: Path) -> None:
    """Every box of the engine holds the bits of the exported checkpoint."""
    if engine is None:
        return
    files, parameters = CheckpointFiles(path), engine.parameters()
    for box in engine.boxes():
        assert torch.equal(
            view_of(parameters[box.storage], box), files.read(box.name, box.start, box.size)
        ), box


def check_prediction(engine: VllmEngine | None, ranks: tuple[int, ...], tensor: int) -> None:
    """The layout predicted without vLLM is the one vLLM has."""
    if engine is None:
        return
    config = AutoConfig.from_pretrained(engine._path)
    predicted = [
        (box.name, box.start, box.size)
        for group in engine_layout(config, ranks, tensor, torch.float32)
        for box in group.boxes
        if device.rank() in group.ranks
    ]
    assert sorted(predicted) == sorted((box.name, box.start, box.size) for box in engine.boxes())


def check_case(number: int, root: Path) -> None:
    family, actor, sizes, rollout, tensor = CASES[number]
    path = root / family_path(family, sizes)
    model = build(family, root, actor, sizes)
    engine = engine_on(path, rollout, tensor, load=False)
    hybrid = HybridEngine(model, engine, staging_bytes=STAGING, verify="full")
    with hybrid.generation_mode() as version:
        assert version == 0
        first = engine.generate(prompts(), seed=1) if engine is not None else None
    check_prediction(engine, rollout, tensor)
    plan = hybrid.plan
    bound = lower_bound(plan.sources, plan.destinations)
    assert {rank: plan.received.get(rank, 0) for rank in plan.needed} == bound
    assert 0 < hybrid.sync_metrics.values()["reshard/staging_bytes_max"] <= STAGING
    change(model, 1.25)
    hybrid.mark_updated()
    with hybrid.generation_mode() as version:
        assert version == 1
        second = engine.generate(prompts(), seed=1) if engine is not None else None
    with hybrid.generation_mode():
        assert not hybrid.sync_metrics.values(), "nothing had changed"
    if first is not None and second is not None:
        assert second.policy_version.tolist() == [1] * 3
        assert not torch.equal(first.rollout_log_probs, second.rollout_log_probs)
    if model is not None:
        export(model, root / f"exported{number}", path)
    dist.barrier()
    equal_to_files(engine, root / f"exported{number}")
    if number in OWN_LOAD:
        equal_to_own_load(engine, root / f"exported{number}", rollout, tensor)
    if number == 0 and engine is not None:
        check_corruption(hybrid, engine)
    if engine is not None:
        engine.close()
    if device.rank() == 0:
        received = max(plan.received.values(), default=0)
        print(
            f"case {family} {sizes} -> {tensor} on {rollout}: received at most {received} bytes", flush=True
        )


def check_corruption(hybrid: HybridEngine, engine: VllmEngine) -> None:
    """One flipped value in one rank's engine stops every rank and names the tensor."""
    name = next(name for name in engine.parameters() if "layers.1.mlp.down_proj" in name)
    if device.rank() == 2:
        engine.parameters()[name][3, 5] *= 1.0000002
    try:
        hybrid.verify()
    except WeightMismatchError as error:
        assert "model.layers.1.mlp.down_proj.weight" in str(error) and "rank 2" in str(error), error
    else:
        raise AssertionError("a corrupted weight was not noticed")
    hybrid.sync()
    hybrid.verify()


def check_precision(root: Path) -> None:
    """Float32 weights arrive in the engine as bfloat16, converted before they travel."""
    family, actor, sizes, rollout, tensor = CASES[0]
    model = build(family, root, actor, sizes)
    engine = engine_on(root / family, rollout, tensor, load=False, dtype="bfloat16")
    assert engine is not None
    hybrid = HybridEngine(model, engine, staging_bytes=STAGING)
    hybrid.sync()
    assert all(region.dtype == torch.bfloat16 for bundle in hybrid.plan.bundles for region in bundle.regions)
    export(model, root / "half", root / family, dtype=torch.bfloat16)
    equal_to_files(engine, root / "half")
    engine.close()


def main(root: Path) -> None:
    device.initialize(timeout=120)
    gc.freeze()  # vLLM collects garbage several times per engine
    for number in [int(argument) for argument in sys.argv[2:]] or range(len(CASES)):
        check_case(number, root)
        dist.barrier()
    check_precision(root)
    dist.barrier()
    if device.rank() == 0:
        print("all cases passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
