"""Weight transfer backend of vLLM: the hybrid engine for a Megatron trainer outside of this package.

    import megatron_rl.hybrid_engine.weight_transfer as transfer

    transfer.register()  # before vllm is imported
    llm = LLM(..., weight_transfer_config=WeightTransferConfig(backend="megatron_rl"))
    llm.init_weight_transfer_engine({"init_info": {"model": transfer.TrainedModel.of(chunks, hf_config)}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": step}})
    llm.finish_weight_update()
    llm.reset_prefix_cache(reset_running_requests=True)

In one job, every rank with an engine runs this code, and ranks without an engine call `HybridEngine.sync`.
Trainers and engines of two jobs rendezvous at an address: see
`rollout.engines.vllm.backend.TransferRendezvous` and launch/examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.distributed.groups import join_cross_job_group, leave_cross_job_group
from megatron_rl.hybrid_engine.sync import HybridEngine
from megatron_rl.rollout.engines.vllm.setup import (
    keep_weights_writable,
    prepare_vllm,
)


@dataclass(frozen=True)
class TrainedModel:
    """Trained model on one rank.

    ``chunks``: GPTModel chunks, without wrappers.
    ``hf_config``: transformers config of the model.
    ``names``: parameter name in a custom layer -> Megatron's name, both relative to ``decoder.layers.N``.
    """

    chunks: Sequence[Any]
    hf_config: Any
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        chunks: Sequence[Any],
        hf_config: Any,
        names: Mapping[str, str] | None = None,
    ) -> TrainedModel:
        """Create a model from the chunks of Megatron's training loop.

        ``chunks`` are GPTModels, with or without Megatron's wrappers DDP and Float16Module. ``names`` maps
        parameter names in custom layers to Megatron's names, relative to ``decoder.layers.N``. By default,
        all parameters have Megatron's names.
        """
        return cls([_unwrap(chunk) for chunk in chunks], hf_config, names or {})


def _unwrap(chunk: Any) -> Any:
    """Return the GPTModel inside wrappers such as DDP."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def register() -> None:
    """Prepare vLLM to run inside a trainer's rank, and register the backend ``megatron_rl``.

    Call it before vllm is imported. Repeated calls have no effect. Workers of a vLLM server use
    `worker_extension`.
    """
    prepare_vllm()
    register_in_worker()


def register_in_worker() -> None:
    """Register the backend ``megatron_rl`` in a worker process of vLLM."""
    keep_weights_writable()
    from megatron_rl.rollout.engines.vllm import backend

    backend.register_backend(_join_rendezvous)


def _join_rendezvous(
    rendezvous: Any,
    engine_storage: Any,
    rank: int,
) -> tuple[HybridEngine, Callable[[], None]]:
    """Create the process group of trainers and workers, and a `HybridEngine` over it; build its plan.

    ``rendezvous`` is a `TransferRendezvous`; ``engine_storage`` has the weights of the engine in this
    process, if any. Returns the hybrid engine, and a function that destroys the process group. Collective
    over the trainers and workers.
    """
    # Without an address, trainers and workers are ranks of one job. Their group is the default group of the
    # job, which is not destroyed here.
    group = None
    leave_group = _do_nothing
    if rendezvous.address is not None:
        group = join_cross_job_group(
            rendezvous.address,
            rendezvous.port,
            rank,
            rendezvous.trainers + rendezvous.workers,
        )

        def leave_group() -> None:
            leave_cross_job_group(group)

    hybrid = HybridEngine(
        rendezvous.model,
        engine_storage,
        staging_bytes=rendezvous.staging_bytes,
        verify=rendezvous.verify,
        group=group,
    )
    # The first access builds the plan, which is collective.
    _ = hybrid.plan
    return hybrid, leave_group


def _do_nothing() -> None:
    """Do nothing: the default process group of the job is not destroyed."""
