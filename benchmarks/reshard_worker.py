"""Worker of reshard.py: measure the methods of one case, on every rank of a job."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reshard_mbridge
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from reshard_peers import Gatherer, bucketed, gather_all, per_tensor
from transformers import Qwen2Config

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.hf.weights import source_boxes
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.megatron.model import ParallelModel, build_model, live_parameters
from megatron_rl.megatron.model_spec import describe_model
from megatron_rl.planning.reshard import actor_layout, parse_layout
from megatron_rl.rollout.engines.vllm.engine import VllmEngine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.traffic import best_rank_order, shared_bytes
from megatron_rl.types import TensorBox
from megatron_rl.weights.plan import schedule_phases

RANKS = tuple(range(4))
# Less than the model of `FULL`, so that a transfer takes several rounds of messages.
STAGING = 32 * 2**20
FULL = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000}
QUICK = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8000}


class MegatronTarget:
    """Megatron model with another layout, which a `HybridEngine` fills as if it were a generation engine."""

    def __init__(self, model: ParallelModel) -> None:
        self.weights_version = -1
        self.needs_weights = True
        self._model = model

    def boxes(self) -> list[TensorBox]:
        """Return the boxes of the checkpoint's tensors in this rank's parameters."""
        return source_boxes(self._model)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return this rank's live parameters."""
        return live_parameters(self._model)

    def finish_update(self, version: int) -> None:
        """Record the version of the weights that have arrived."""
        self.weights_version = version
        self.needs_weights = False

    def sleep(self) -> None:
        """Do nothing: the model keeps its memory."""

    def wake(self) -> None:
        """Do nothing: the model never slept."""


def hybrid_methods(model: ParallelModel, receiver: Any) -> tuple[dict[str, Callable[[], None]], HybridEngine]:
    """Return a method per hybrid engine, with and without checksums, and the engine without checksums."""
    plain = HybridEngine(model, receiver, staging_bytes=STAGING, verify="off")
    verified = HybridEngine(
        model,
        receiver,
        staging_bytes=STAGING,
        verify="full",
    )
    return {
        "hybrid_engine": lambda: discard(plain.sync()),
        "hybrid_engine_verified": lambda: discard(verified.sync()),
    }, plain


def discard(value: Any) -> None:
    """Discard a value, so that a lambda function returns None."""


def build_methods(
    case: str, config: Any
) -> tuple[dict[str, Callable[[], None]], Any, HybridEngine, Gatherer | None]:
    """Build the models of a case; return its methods by name, and the objects that `main` inspects.

    These are the parameters that the methods fill, the hybrid engine, and the `Gatherer` of the other
    projects' methods. A transfer between two Megatron models has no `Gatherer`.
    """
    source, _, target = case.partition("-")
    actor = actor_layout(parse_layout(source))
    model = build_model(
        config,
        ParallelGroups(actor),
        dtype=torch.float32,
        seed=3,
    )

    # Transfer from Megatron to Megatron. With another seed, the weights of the target differ until a method
    # has transferred them.
    if target.startswith("megatron-"):
        from megatron.core.resharding.refit import swap_model_weights

        target_model = build_model(
            config,
            ParallelGroups(actor_layout(parse_layout(target.removeprefix("megatron-")))),
            dtype=torch.float32,
            seed=4,
        )
        methods, hybrid = hybrid_methods(model, MegatronTarget(target_model))
        methods["core_resharding"] = lambda: swap_model_weights(
            model.chunks, target_model.chunks, device.backend()
        )
        return methods, live_parameters(target_model), hybrid, None

    # Transfer from Megatron to vLLM, with the order of ranks that a run would choose.
    tensor = parse_layout(target.partition("x")[0])["tensor"]
    overlap = shared_bytes(
        describe_model(config).shape,
        actor,
        tensor,
        torch.float32.itemsize,
    )
    order = best_rank_order(overlap, RANKS, gpus_per_node=len(RANKS))
    # The engine only needs the configuration: it starts with random weights.
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        engine = VllmEngine(
            folder,
            RolloutConfig(tensor=tensor, vllm={"kv_cache_memory_bytes": 2**26}),
            layout=ParallelLayout(order, tensor=tensor),
            rank=device.rank(),
            dtype="float32",
            max_model_len=256,
            shapes=describe_model(config).tensor_shapes(),
        )

    methods, hybrid = hybrid_methods(model, engine)
    gatherer = Gatherer(model)
    # The other methods pass complete tensors to vLLM's own loader.
    load = engine._model.load_weights
    for method in (gather_all, per_tensor, bucketed):
        methods[method.__name__] = lambda method=method: method(gatherer, load)
    if reshard_mbridge.is_available():
        methods["mbridge"] = reshard_mbridge.make_exporter(model, load)
    return methods, engine.parameters(), hybrid, gatherer


def maximum_over_ranks(value: int) -> int:
    """Return the largest value of any rank. Collective over the world."""
    maximum = torch.tensor([value])
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)


@torch.no_grad()
def main(
    case: str,
    repeats: int,
    quick: bool,
    result: Path,
) -> None:
    """Check and measure the methods of a case, and write a JSON file on rank 0."""
    device.initialize()
    shape = {**(QUICK if quick else FULL), "max_position_embeddings": 256}
    config = Qwen2Config(
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        **shape,
    )
    methods, parameters, hybrid, gatherer = build_methods(case, config)

    # Every method must fill the parameters with the same bits; this pass also builds plans and caches.
    metrics: dict[str, dict[str, list[float]]] = {}
    expected = None
    for name, method in methods.items():
        for value in parameters.values():
            # Overwrite the result of the previous method, so that a missing element is detected.
            value.fill_(7.0)
        if gatherer is not None:
            gatherer.received = 0
        method()
        # The hybrid engine's plan contains its bytes. Megatron's own resharding does not count bytes.
        received = 0
        if gatherer is not None:
            received = gatherer.received
        if name.startswith("hybrid"):
            received = hybrid.plan.received.get(device.rank(), 0)
        if expected is None:
            expected = {key: value.clone() for key, value in parameters.items()}
        for key, value in parameters.items():
            assert torch.equal(value, expected[key]), (name, key)

        # Measure staging memory in a pass that is not timed.
        gc.collect()
        with LiveBytes() as live_bytes:
            method()
        metrics[name] = {"seconds": [], "staging_peak_bytes": [maximum_over_ranks(live_bytes.peak)]}
        if name not in ("core_resharding", "mbridge"):
            metrics[name]["bytes_received_max"] = [maximum_over_ranks(received)]
        if name.startswith("hybrid"):
            # The number of messages follows from the plan and the staging memory.
            transfers = schedule_phases(hybrid.plan, STAGING)
            metrics[name]["messages_max"] = [transfers.max_messages_per_rank]
            metrics[name]["peers_max"] = [max(hybrid.plan.peer_counts.values(), default=0)]

    # The garbage collector must not run in the middle of a measurement.
    gc.freeze()
    for _ in range(repeats):
        for name, method in methods.items():
            dist.barrier()
            # Measure from barrier to barrier: a transfer lasts as long as its slowest rank.
            start = time.perf_counter()
            method()
            dist.barrier()
            metrics[name]["seconds"].append(time.perf_counter() - start)
    if device.rank() == 0:
        result.write_text(json.dumps(metrics))
        for name, values in metrics.items():
            print(name, statistics.median(values["seconds"]), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        bool(int(sys.argv[3])),
        Path(sys.argv[4]),
    )
