"""The hybrid engine for people with a Megatron trainer and a vLLM engine of their own.

    import megatron_rl.hybrid_engine.weight_transfer as transfer

    transfer.register()  # before vllm is imported
    llm = LLM(..., weight_transfer_config=WeightTransferConfig(backend="megatron_rl"))
    llm.init_weight_transfer_engine({"init_info": {"model": transfer.TrainedModel.of(chunks, hf_config)}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": step}})
    llm.finish_weight_update()
    llm.reset_prefix_cache(reset_running_requests=True)

In one job this runs on every rank; ranks without an engine call `HybridEngine.sync` instead. Trainers and
engines of two jobs meet at an address: see `rollout.engines.vllm.backend.Meeting` and launch/examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.distributed.groups import join_span, leave_span
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.rollout.engines.vllm.setup import keep_weights_writable, prepare_vllm


@dataclass(frozen=True)
class TrainedModel:
    """Hold one rank's bare GPTModel chunks and the transformers config of the model.

    ``names`` has Megatron's own name of each parameter that layers of yours call otherwise, both below
    ``decoder.layers.N``.
    """

    chunks: Sequence[Any]
    hf_config: Any
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, chunks: Sequence[Any], hf_config: Any, names: Mapping[str, str] | None = None
    ) -> TrainedModel:
        """Take chunks as Megatron's training loop holds them, wrapped in DDP and Float16Module or bare."""
        return cls([_bare(chunk) for chunk in chunks], hf_config, names or {})


def _bare(chunk: Any) -> Any:
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def register() -> None:
    """Prepare vLLM for life inside a trainer's rank and make backend ``megatron_rl`` known to it.

    Call it before anything imports vllm. May be repeated. Workers of a vLLM server use `worker_extension`.
    """
    prepare_vllm()
    register_in_worker()


def register_in_worker() -> None:
    """Make backend ``megatron_rl`` known in a process of vLLM's own."""
    keep_weights_writable()
    from megatron_rl.rollout.engines.vllm import backend

    backend.register(_connect)


def _connect(meeting: Any, live: Any, rank: int) -> tuple[HybridEngine, Callable[[], None]]:
    """Return the engine that moves weights at a meeting, its plan built, and what ends it."""
    group, end = None, _nothing
    if meeting.address is not None:
        group = join_span(meeting.address, meeting.port, rank, meeting.trainers + meeting.workers)

        def end() -> None:
            leave_span(group)

    hybrid = HybridEngine(
        meeting.model, live, staging_bytes=meeting.staging_bytes, verify=meeting.verify, group=group
    )
    _ = hybrid.plan
    return hybrid, end


def _nothing() -> None:
    pass
