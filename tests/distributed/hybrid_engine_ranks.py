"""Ranks of test_hybrid_engine.py: sync Megatron weights into vLLM for many pairs of layouts."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import load_weights
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.model import build_model, live_parameters
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.metrics import Metrics
from megatron_rl.planning.reshard import engine_boxes
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.engines.vllm.setup import create_layout_groups
from megatron_rl.rollout.engines.vllm.weights import (
    LiveWeights,
    get_model_parameters,
)
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.traffic import shared_bytes
from megatron_rl.types import PromptBatch, Rollouts, SamplingParameters
from megatron_rl.weights.boxes import view_of
from megatron_rl.weights.execute import WeightMismatchError
from tests.hf_models import make_model
from tests.sampling import generate, make_prompts

SHAPE = {
    "hidden_size": 128,
    "vocab_size": 301,
    "max_position_embeddings": 512,
}
STAGING = 200_000
"""Bytes of the staging buffers: so few that large tensors travel in several transfers."""
FOUR = (0, 1, 2, 3)
EIGHT = tuple(range(8))
EXPERTS = {
    "tensor": 2,
    "pipeline": 2,
    "expert": 2,
    "sequence_parallel": True,
}
# vLLM's attention on CPUs supports this latent shape alone.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
UNEVEN = {
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 3,
}


@dataclass(frozen=True)
class Actor:
    """Trained model of a case: its ranks, the degrees of its layout and overrides of Megatron's settings."""

    ranks: tuple[int, ...]
    sizes: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Engine with its layout, and the trained models whose weights are synced into it one after another."""

    family: str
    ranks: tuple[int, ...]
    tensor: int
    actors: tuple[Actor, ...]
    generates: bool = False
    """The engine also generates after each update, and is compared with one that loads the export."""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        names = [self.family]
        names += [str(value) for value in self.changes.values()]
        return "-".join(names)

    @property
    def shape(self) -> dict[str, Any]:
        return {**SHAPE, **self.changes}


CASES = {
    4: [
        Case(
            "qwen2",
            FOUR,
            2,
            generates=True,
            actors=(
                Actor(FOUR, {"tensor": 2, "pipeline": 2}),
                Actor(FOUR, {"tensor": 4}),  # two ranks share a key-value head
                Actor(FOUR, {"pipeline": 2}, UNEVEN),
            ),
        ),
        Case(
            # The engine has the ranks in another order than the trained models.
            "qwen2-tied",
            (3, 1, 0, 2),
            2,
            generates=True,
            actors=(
                Actor(FOUR, {"tensor": 2, "pipeline": 2}),
                Actor(FOUR, {"pipeline": 2, "virtual_pipeline": 2}),
            ),
        ),
        # Two of the engine's ranks share a key-value head.
        Case("qwen3", FOUR, 4, (Actor(FOUR, {"pipeline": 4}),)),
        Case(
            "llama",
            (0, 2, 1, 3),
            2,
            (Actor(FOUR, {"tensor": 2, "sequence_parallel": True}),),
        ),
        Case("qwen2", (2, 3), 2, (Actor((0, 1), {"tensor": 2}),)),
        Case(
            "llama3",
            (1, 3),
            2,
            (Actor((0, 1, 2), {"pipeline": 3}),),
            changes={"num_hidden_layers": 6},
        ),
        Case(
            "mixtral",
            FOUR,
            2,
            generates=True,
            actors=(
                Actor(FOUR, {"expert": 2}),
                Actor(FOUR, {"tensor": 2, "expert_tensor": 2}),
            ),
        ),
        Case("qwen3-moe", FOUR, 2, (Actor(FOUR, EXPERTS),)),
        Case(
            "deepseek-v3",
            FOUR,
            2,
            generates=True,
            changes=LATENT,
            actors=(Actor(FOUR, EXPERTS), Actor(FOUR, {"expert": 4})),
        ),
        Case(
            "deepseek-v2",
            FOUR,
            1,
            (Actor(FOUR, {"pipeline": 4}),),
            changes=LATENT,
        ),
        Case(
            "gemma3",
            FOUR,
            2,
            generates=True,
            actors=(
                Actor(
                    FOUR,
                    {
                        "tensor": 2,
                        "pipeline": 2,
                        "sequence_parallel": True,
                    },
                ),
            ),
        ),
    ],
    8: [
        Case("qwen3-moe", EIGHT, 2, (Actor(EIGHT, EXPERTS),)),
        Case(
            "qwen2",
            EIGHT[4:],
            2,
            (Actor(FOUR, {"tensor": 2, "pipeline": 2}),),
        ),
    ],
}


def engine_on(
    path: Path,
    ranks: tuple[int, ...],
    tensor: int,
    load: bool,
    dtype: str = "float32",
) -> VllmEngine | None:
    """Return the engine of this rank, or None outside of ``ranks``. Collective over all ranks."""
    layout = ParallelLayout(ranks, tensor=tensor)
    # The groups of an engine on some ranks are created by all of them.
    if len(ranks) < device.world_size():
        create_layout_groups(layout)
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
    """Return prompts that share a prefix, which is longer than one block of the key-value cache."""
    prefix = torch.arange(150) % 301
    rows = [torch.cat((prefix, torch.tensor([7, number, 3 * number]))).tolist() for number in range(3)]
    return make_prompts(
        rows,
        SamplingParameters(temperature=0.0, max_response_tokens=12),
    )


def change_weights(model: Any, factor: float) -> None:
    """Scale every weight by ``factor`` to imitate a training step."""
    # Replicas change alike, as after a real step.
    if model is not None:
        with torch.no_grad():
            for value in live_parameters(model).values():
                value.mul_(factor)


def discard_memory(engine: VllmEngine | None) -> None:
    """Overwrite the memory that a sleeping engine discards on an accelerator.

    It discards the key-value cache and all tensors of the model except for registered buffers, which vLLM
    saves.
    """
    if engine is None:
        return

    model = engine._model
    worker = engine._llm.llm_engine.model_executor.driver_worker
    # Registered buffers and the cache survive; every other tensor of the model becomes NaN.
    saved = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    registers = ("_parameters", "_buffers", "_modules")
    attributes = [
        value for module in model.modules() for name, value in vars(module).items() if name not in registers
    ]

    runner = getattr(worker, "worker", worker).model_runner
    for cache in runner.kv_caches:
        # Attention on CPUs multiplies masked values by zero, and NaN times zero is NaN.
        cache.fill_(1e3)

    saved |= {cache.untyped_storage()._cdata for cache in runner.kv_caches}
    discarded = [*engine.parameters().values(), *model.parameters()]
    for tensor in [*discarded, *tensors_in(attributes)]:
        if tensor.is_floating_point() and tensor.untyped_storage()._cdata not in saved:
            tensor.data.fill_(math.nan)


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers and in attributes of vLLM's own objects, down to ``depth`` levels."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, torch.nn.Module):
        members: Any = ()
        if isinstance(value, dict):
            members = value.values()
        elif isinstance(value, (list, tuple)):
            members = value

        if type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
            members = vars(value).values()
        for item in members:
            yield from tensors_in(item, depth - 1)


def build(case: Case, actor: Actor, root: Path) -> Any:
    """Return the trained model with the checkpoint's weights, or None on ranks outside its layout."""
    # All ranks create the groups, which is collective; ranks outside the layout leave after that.
    config = make_model(case.family, **case.shape).config
    groups = ParallelGroups(ParallelLayout(actor.ranks, **actor.sizes))
    if device.rank() not in actor.ranks:
        return None
    model = build_model(config, groups, dtype=torch.float32, overrides=actor.overrides)
    load_weights(model, root / case.folder)
    return model


def check_against_loaded_engine(
    engine: VllmEngine | None,
    path: Path,
    ranks: tuple[int, ...],
    tensor: int,
) -> None:
    """Check parameters and greedy tokens against an engine that loads the exported model."""
    loaded = engine_on(path, ranks, tensor, load=True)
    if engine is None or loaded is None:
        return

    expected = get_model_parameters(loaded._model)
    actual = get_model_parameters(engine._model)
    assert expected.keys() == actual.keys()

    for name, value in expected.items():
        assert torch.equal(actual[name], value), name

    synced_rollouts = generate(engine, prompts(), seed=1)
    loaded_rollouts = generate(loaded, prompts(), seed=1)
    assert torch.equal(synced_rollouts.tokens, loaded_rollouts.tokens)

    # One engine reads the shared prefix from its cache, which rounds differently.
    torch.testing.assert_close(
        synced_rollouts.rollout_log_probs,
        loaded_rollouts.rollout_log_probs,
        atol=1e-5,
        rtol=0,
    )
    loaded.close()


def check_against_files(engine: VllmEngine | None, path: Path) -> None:
    """Check that every box of the engine equals the exported checkpoint, bit by bit."""
    if engine is None:
        return
    files = CheckpointFiles(path)
    parameters = engine.parameters()
    for box in engine.boxes():
        assert torch.equal(
            view_of(parameters[box.storage], box),
            files.read(box.name, box.start, box.size),
        ), box


def check_prediction(engine: VllmEngine | None, ranks: tuple[int, ...], tensor: int) -> None:
    """Check that the boxes predicted without vLLM equal the boxes of the engine."""
    if engine is None:
        return

    model = describe_model(AutoConfig.from_pretrained(engine._path))
    predicted = [
        (box.name, box.start, box.size)
        for group in engine_boxes(model, ranks, tensor, torch.float32)
        for box in group.boxes
        if device.rank() in group.ranks
    ]
    assert sorted(predicted) == sorted((box.name, box.start, box.size) for box in engine.boxes())


def check_case(case: Case, root: Path) -> None:
    """Check the syncs from each model of a case into one engine."""
    started = time.perf_counter()
    engine = engine_on(root / case.folder, case.ranks, case.tensor, load=False)
    for number, actor in enumerate(case.actors):
        check_actor(case, actor, engine, root, first=number == 0)

    if engine is not None:
        engine.close()
    if device.rank() == 0:
        print(
            f"{case.family} on {case.ranks}: {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    dist.barrier()


def check_actor(
    case: Case,
    actor: Actor,
    engine: VllmEngine | None,
    root: Path,
    first: bool,
) -> None:
    """Check that the engine gets a model's exact bits, before and after an update, at the planned traffic."""
    model = build(case, actor, root)
    hybrid = HybridEngine(model, engine, staging_bytes=STAGING, verify="full")

    first_rollouts, sync_metrics = sync_and_generate(case, hybrid, engine)
    if first:
        check_prediction(engine, case.ranks, case.tensor)

    # The plan moves the bytes that the memory model predicts, and stages no more than allowed.
    plan = hybrid.plan
    received = {rank: plan.received.get(rank, 0) for rank in plan.needed}
    shape = describe_model(make_model(case.family, **case.shape).config).shape
    layout = ParallelLayout(actor.ranks, **actor.sizes)
    predicted = shared_bytes(shape, layout, case.tensor, 4, settings=actor.overrides)
    assert predicted.traffic(case.ranks).received == received, "prediction from sizes differs from the plan"
    assert 0 <= sync_metrics.values()["reshard/staging_bytes_max"] <= STAGING

    # An update reaches an engine that has lost its memory.
    discard_memory(engine)
    change_weights(model, 1.25)
    hybrid.mark_updated()
    second_rollouts, _ = sync_and_generate(case, hybrid, engine)

    with hybrid.generation_mode() as sync_metrics:
        assert hybrid.version == 1 and not sync_metrics.values(), "nothing had changed"

    if first_rollouts is not None and second_rollouts is not None:
        assert second_rollouts.policy_version.tolist() == [1] * 3
        assert not torch.equal(
            first_rollouts.rollout_log_probs,
            second_rollouts.rollout_log_probs,
        )

    # The export of the updated model is the reference.
    name = "-".join(
        [
            case.family,
            *(f"{kind}{size}" for kind, size in actor.sizes.items()),
        ]
    )
    exported = root / f"exported-{name}-on-{len(actor.ranks)}-{case.ranks}"
    if model is not None:
        export_model(model, exported, root / case.folder)

    dist.barrier()
    check_against_files(engine, exported)
    if case.generates and first:
        check_against_loaded_engine(engine, exported, case.ranks, case.tensor)
        if case.family == "qwen2" and engine is not None:
            check_corruption(hybrid, engine)
            check_own_engine(model, engine)


def sync_and_generate(
    case: Case,
    hybrid: HybridEngine,
    engine: VllmEngine | None,
) -> tuple[Rollouts | None, Metrics]:
    """Sync the engine and generate if the case does; return the rollouts and the metrics of the sync."""
    with hybrid.generation_mode() as sync_metrics:
        if engine is not None and case.generates:
            return generate(engine, prompts(), seed=1), sync_metrics
    return None, sync_metrics


def check_corruption(hybrid: HybridEngine, engine: VllmEngine) -> None:
    """Check that a corrupted weight fails every rank, and that the error names the tensor and the ranks."""
    name = next(name for name in engine.parameters() if "layers.1.mlp.down_proj" in name)
    ranks = range(dist.get_world_size())
    # A change of the last bit on one rank, and an equal change of sign on all ranks.
    for corrupted_ranks, factor in (([2], 1.0000002), (ranks, -1.0)):
        if device.rank() in corrupted_ranks:
            engine.parameters()[name][3, 5] *= factor

        try:
            hybrid.verify()
        except WeightMismatchError as error:
            assert "model.layers.1.mlp.down_proj.weight" in str(error), error
            assert [f"rank {rank} has" in str(error) for rank in ranks] == [
                rank in corrupted_ranks for rank in ranks
            ]
        else:
            raise AssertionError("a corrupted weight was not noticed")

        hybrid.sync()
        hybrid.verify()


def check_own_engine(model: Any, engine: VllmEngine) -> None:
    """Check that a user's own ``LLM`` can be synced; its open request finishes with the new weights."""
    from vllm import SamplingParams

    vllm = engine._llm.llm_engine
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
    )
    vllm.add_request("open", {"prompt_token_ids": [5, 6, 7]}, sampling)

    for _ in range(4):
        vllm.step()

    try:
        engine.finish_update(2)
    except RuntimeError as error:
        assert "requests are still running" in str(error), error
    else:
        raise AssertionError("weights changed under a request")

    change_weights(model, 1.5)
    live = LiveWeights.of(engine._llm)
    HybridEngine(model, live, staging_bytes=STAGING).sync()
    assert live.weights_version == 0

    outputs = []
    while vllm.has_unfinished_requests():
        outputs += vllm.step()
    assert len(outputs[-1].outputs[0].token_ids) == 12


def check_precision(root: Path) -> None:
    """Check that float32 weights are converted to bfloat16 before they are sent."""
    case = CASES[4][0]
    model = build(case, case.actors[0], root)
    engine = engine_on(
        root / case.folder,
        case.ranks,
        case.tensor,
        load=False,
        dtype="bfloat16",
    )
    assert engine is not None

    hybrid = HybridEngine(model, engine, staging_bytes=STAGING)
    hybrid.sync()
    assert all(region.dtype == torch.bfloat16 for bundle in hybrid.plan.bundles for region in bundle.regions)

    export_model(model, root / "half", root / case.folder, dtype=torch.bfloat16)
    check_against_files(engine, root / "half")
    engine.close()


def main(root: Path) -> None:
    device.initialize(timeout=120)
    cases = CASES[device.world_size()]
    for number in [int(argument) for argument in sys.argv[2:]] or range(len(cases)):
        check_case(cases[number], root)

    if device.world_size() == 4:
        check_precision(root)

    dist.barrier()
    if device.rank() == 0:
        print("all cases passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
