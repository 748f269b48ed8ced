"""What the ranks of test_hybrid_engine.py run: Megatron weights into vLLM, in many pairs of layouts."""

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
from megatron_rl.hf.export import export
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import load_weights
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.model import build_model, live_parameters
from megatron_rl.megatron.model_spec import pretrained
from megatron_rl.metrics import Metrics
from megatron_rl.planning.reshard import engine_layout
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.rollout.engines.vllm.setup import join_groups
from megatron_rl.rollout.engines.vllm.weights import LiveWeights, model_parameters
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.traffic import shared_bytes
from megatron_rl.types import PromptBatch, Rollouts, SamplingParameters
from megatron_rl.weights.boxes import view_of
from megatron_rl.weights.execute import WeightMismatchError
from tests.hf_models import make_model
from tests.sampling import generate, make_prompts

SHAPE = {"hidden_size": 128, "vocab_size": 301, "max_position_embeddings": 512}
STAGING = 200_000
FOUR = (0, 1, 2, 3)
EIGHT = tuple(range(8))
EXPERTS = {"tensor": 2, "pipeline": 2, "expert": 2, "sequence_parallel": True}
# The only latent attention vLLM has on the host.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}


@dataclass(frozen=True)
class Actor:
    """A trained model's ranks, layout and Megatron settings."""

    ranks: tuple[int, ...]
    sizes: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One engine and the models that fill it in turn.

    ``generates``: it also answers after each update, as an engine does that loads the exported checkpoint.
    """

    family: str
    ranks: tuple[int, ...]
    tensor: int
    actors: tuple[Actor, ...]
    generates: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return "-".join([self.family, *(str(value) for value in self.changes.values())])

    @property
    def shape(self) -> dict[str, Any]:
        return {**SHAPE, **self.changes}


CASES = {
    4: [
        Case(
            "qwen2", FOUR, 2, generates=True,
            actors=(
                Actor(FOUR, {"tensor": 2, "pipeline": 2}),
                Actor(FOUR, {"tensor": 4}),  # two ranks share a key-value head
                Actor(FOUR, {"pipeline": 2}, UNEVEN),
            ),
        ),
        Case(
            "qwen2-tied", (3, 1, 0, 2), 2, generates=True,
            actors=(
                Actor(FOUR, {"tensor": 2, "pipeline": 2}),
                Actor(FOUR, {"pipeline": 2, "virtual_pipeline": 2}),
            ),
        ),
        # The engine's ranks share key-value heads.
        Case("qwen3", FOUR, 4, (Actor(FOUR, {"pipeline": 4}),)),
        Case("llama", (0, 2, 1, 3), 2, (Actor(FOUR, {"tensor": 2, "sequence_parallel": True}),)),
        Case("qwen2", (2, 3), 2, (Actor((0, 1), {"tensor": 2}),)),
        Case("llama3", (1, 3), 2, (Actor((0, 1, 2), {"pipeline": 3}),), changes={"num_hidden_layers": 6}),
        Case(
            "mixtral", FOUR, 2, generates=True,
            actors=(Actor(FOUR, {"expert": 2}), Actor(FOUR, {"tensor": 2, "expert_tensor": 2})),
        ),
        Case("qwen3-moe", FOUR, 2, (Actor(FOUR, EXPERTS),)),
        Case(
            "deepseek-v3", FOUR, 2, generates=True, changes=LATENT,
            actors=(Actor(FOUR, EXPERTS), Actor(FOUR, {"expert": 4})),
        ),
        Case("deepseek-v2", FOUR, 1, (Actor(FOUR, {"pipeline": 4}),), changes=LATENT),
        Case(
            "gemma3", FOUR, 2, generates=True,
            actors=(Actor(FOUR, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),),
        ),
    ],
    8: [
        Case("qwen3-moe", EIGHT, 2, (Actor(EIGHT, EXPERTS),)),
        Case("qwen2", EIGHT[4:], 2, (Actor(FOUR, {"tensor": 2, "pipeline": 2}),)),
    ],
}  # fmt: skip


def engine_on(
    path: Path,
    ranks: tuple[int, ...],
    tensor: int,
    load: bool,
    dtype: str = "float32",
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
    rows = [torch.cat((shared, torch.tensor([7, number, 3 * number]))).tolist() for number in range(3)]
    return make_prompts(rows, SamplingParameters(temperature=0.0, max_response_tokens=12))


def change(model: Any, factor: float) -> None:
    """Stand for a training step: alter every weight, replicas alike."""
    if model is not None:
        with torch.no_grad():
            for value in live_parameters(model).values():
                value.mul_(factor)


def forget(engine: VllmEngine | None) -> None:
    """Overwrite what a sleeping engine discards on an accelerator.

    That is its cache, and all that the model holds but for the registered buffers, which vLLM saves.
    """
    if engine is None:
        return

    model = engine._model
    worker = engine._llm.llm_engine.model_executor.driver_worker
    saved = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    registers = ("_parameters", "_buffers", "_modules")
    attributes = [
        value for module in model.modules() for name, value in vars(module).items() if name not in registers
    ]

    runner = getattr(worker, "worker", worker).model_runner
    for cache in runner.kv_caches:
        cache.fill_(1e3)  # the host's attention takes what it masks times zero, which NaN would survive

    saved |= {cache.untyped_storage()._cdata for cache in runner.kv_caches}
    discarded = [*engine.parameters().values(), *model.parameters()]
    for tensor in [*discarded, *tensors_in(attributes)]:
        if tensor.is_floating_point() and tensor.untyped_storage()._cdata not in saved:
            tensor.data.fill_(math.nan)


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield tensors in containers and in the attributes of vLLM's own objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, torch.nn.Module):
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
        if type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
            inner = vars(value).values()
        for item in inner:
            yield from tensors_in(item, depth - 1)


def build(case: Case, actor: Actor, root: Path) -> Any:
    """Return the trained model with the checkpoint's weights, None on ranks outside."""
    config = make_model(case.family, **case.shape).config
    groups = ParallelGroups(ParallelLayout(actor.ranks, **actor.sizes))
    if device.rank() not in actor.ranks:
        return None
    model = build_model(config, groups, dtype=torch.float32, overrides=actor.overrides)
    load_weights(model, root / case.folder)
    return model


def equal_to_own_load(
    engine: VllmEngine | None,
    path: Path,
    ranks: tuple[int, ...],
    tensor: int,
) -> None:
    """Every parameter and every greedy token equal those of an engine that loads the exported checkpoint."""
    fresh = engine_on(path, ranks, tensor, load=True)
    if engine is None or fresh is None:
        return

    expected = model_parameters(fresh._model)
    got = model_parameters(engine._model)
    assert expected.keys() == got.keys()

    for name, value in expected.items():
        assert torch.equal(got[name], value), name

    ours = generate(engine, prompts(), seed=1)
    theirs = generate(fresh, prompts(), seed=1)
    assert torch.equal(ours.tokens, theirs.tokens)

    # One of them reads the shared prefix from its cache, which rounds differently.
    torch.testing.assert_close(ours.rollout_log_probs, theirs.rollout_log_probs, atol=1e-5, rtol=0)
    fresh.close()


def equal_to_files(engine: VllmEngine | None, path: Path) -> None:
    """Every box of the engine holds the bits of the exported checkpoint."""
    if engine is None:
        return
    files = CheckpointFiles(path)
    parameters = engine.parameters()
    for box in engine.boxes():
        assert torch.equal(
            view_of(parameters[box.storage], box), files.read(box.name, box.start, box.size)
        ), box


def check_prediction(engine: VllmEngine | None, ranks: tuple[int, ...], tensor: int) -> None:
    """The layout predicted without vLLM is the one vLLM has."""
    if engine is None:
        return

    model = pretrained(AutoConfig.from_pretrained(engine._path))
    predicted = [
        (box.name, box.start, box.size)
        for group in engine_layout(model, ranks, tensor, torch.float32)
        for box in group.boxes
        if device.rank() in group.ranks
    ]
    assert sorted(predicted) == sorted((box.name, box.start, box.size) for box in engine.boxes())


def check_case(case: Case, root: Path) -> None:
    """Fill one engine from each of its models, twice."""
    begin = time.perf_counter()
    engine = engine_on(root / case.folder, case.ranks, case.tensor, load=False)
    for number, actor in enumerate(case.actors):
        check_actor(case, actor, engine, root, first=number == 0)

    if engine is not None:
        engine.close()
    if device.rank() == 0:
        print(f"{case.family} on {case.ranks}: {time.perf_counter() - begin:.1f} s", flush=True)
    dist.barrier()


def check_actor(
    case: Case,
    actor: Actor,
    engine: VllmEngine | None,
    root: Path,
    first: bool,
) -> None:
    """The engine holds a model's weights bit by bit, also after they changed, with the least traffic."""
    model = build(case, actor, root)
    hybrid = HybridEngine(model, engine, staging_bytes=STAGING, verify="full")
    before, synced = synced_answers(case, hybrid, engine)

    if first:
        check_prediction(engine, case.ranks, case.tensor)

    plan = hybrid.plan
    received = {rank: plan.received.get(rank, 0) for rank in plan.needed}
    shape = pretrained(make_model(case.family, **case.shape).config).shape
    layout = ParallelLayout(actor.ranks, **actor.sizes)
    shared = shared_bytes(shape, layout, case.tensor, 4, settings=actor.overrides)
    assert shared.traffic(case.ranks).received == received, "sizes alone say what vLLM's own loader needs"

    assert 0 <= synced.values()["reshard/staging_bytes_max"] <= STAGING

    forget(engine)
    change(model, 1.25)
    hybrid.mark_updated()
    after, _ = synced_answers(case, hybrid, engine)

    with hybrid.generation_mode() as synced:
        assert hybrid.version == 1 and not synced.values(), "nothing had changed"

    if before is not None and after is not None:
        assert after.policy_version.tolist() == [1] * 3
        assert not torch.equal(before.rollout_log_probs, after.rollout_log_probs)

    name = "-".join([case.family, *(f"{kind}{size}" for kind, size in actor.sizes.items())])
    exported = root / f"exported-{name}-on-{len(actor.ranks)}-{case.ranks}"
    if model is not None:
        export(model, exported, root / case.folder)

    dist.barrier()
    equal_to_files(engine, exported)
    if case.generates and first:
        equal_to_own_load(engine, exported, case.ranks, case.tensor)
        if case.family == "qwen2" and engine is not None:
            check_corruption(hybrid, engine)
            check_own_engine(model, engine)


def synced_answers(
    case: Case,
    hybrid: HybridEngine,
    engine: VllmEngine | None,
) -> tuple[Rollouts | None, Metrics]:
    """Bring the engine up to date and let it answer where it should; return also what the sync measured."""
    with hybrid.generation_mode() as synced:
        if engine is not None and case.generates:
            return generate(engine, prompts(), seed=1), synced
    return None, synced


def check_corruption(hybrid: HybridEngine, engine: VllmEngine) -> None:
    """A flipped value in one rank's engine, or in all alike, stops every rank and names tensor and ranks."""
    name = next(name for name in engine.parameters() if "layers.1.mlp.down_proj" in name)
    ranks = range(dist.get_world_size())
    for damaged, factor in (([2], 1.0000002), (ranks, -1.0)):
        if device.rank() in damaged:
            engine.parameters()[name][3, 5] *= factor

        try:
            hybrid.verify()
        except WeightMismatchError as error:
            assert "model.layers.1.mlp.down_proj.weight" in str(error), error
            assert [f"rank {rank} has" in str(error) for rank in ranks] == [rank in damaged for rank in ranks]
        else:
            raise AssertionError("a corrupted weight was not noticed")

        hybrid.sync()
        hybrid.verify()


def check_own_engine(model: Any, engine: VllmEngine) -> None:
    """A user's own ``LLM`` is filled too; its requests are kept and end with the new weights."""
    from vllm import SamplingParams

    vllm = engine._llm.llm_engine
    how = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
    )
    vllm.add_request("kept", {"prompt_token_ids": [5, 6, 7]}, how)

    for _ in range(4):
        vllm.step()

    try:
        engine.finish_update(2)
    except RuntimeError as error:
        assert "requests are still running" in str(error), error
    else:
        raise AssertionError("weights changed under a request")

    change(model, 1.5)
    live = LiveWeights.of(engine._llm)
    HybridEngine(model, live, staging_bytes=STAGING).sync()
    assert live.weights_version == 0

    answers = []
    while vllm.has_unfinished_requests():
        answers += vllm.step()
    assert len(answers[-1].outputs[0].token_ids) == 12


def check_precision(root: Path) -> None:
    """Float32 weights arrive in the engine as bfloat16, converted before they travel."""
    case = CASES[4][0]
    model = build(case, case.actors[0], root)
    engine = engine_on(root / case.folder, case.ranks, case.tensor, load=False, dtype="bfloat16")
    assert engine is not None

    hybrid = HybridEngine(model, engine, staging_bytes=STAGING)
    hybrid.sync()
    assert all(region.dtype == torch.bfloat16 for bundle in hybrid.plan.bundles for region in bundle.regions)

    export(model, root / "half", root / case.folder, dtype=torch.bfloat16)
    equal_to_files(engine, root / "half")
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
