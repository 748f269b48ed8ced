"""Weight sync of a generation engine with a Megatron model in the same job.

The idea: the boxes of trainer and engine never change. One reshard plan, built at the first sync, is
therefore used for every later sync.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import (
    gather_objects,
    global_rank,
    sum_over_ranks,
)
from megatron_rl.errors import UserError, unknown_choice_error
from megatron_rl.hf.peft import peft_boxes
from megatron_rl.hf.weights import source_boxes
from megatron_rl.hybrid_engine.rollout_policy import RolloutPolicy
from megatron_rl.megatron.lora import engine_adapters, policy_weights
from megatron_rl.megatron.model import ChunkedModel, live_parameters
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.engines.base import Storage, WeightStore
from megatron_rl.types import TensorBox
from megatron_rl.weights.execute import VERIFY, Execution, storage_key
from megatron_rl.weights.plan import ReshardPlan, build_plan
from megatron_rl.weights.transfer import create_communicator, gather_box_groups


class WeightSource(NamedTuple):
    """Tensors of the trainer on this rank, the counterpart of an engine's `Storage`.

    ``parameters``: function that returns the current storages by name.
    ``boxes``: function that returns the boxes of tensors in these storages.
    """

    parameters: Callable[[], Mapping[str, Tensor]]
    boxes: Callable[[], list[TensorBox]]


class WeightTransfer:
    """Transfer of one set of tensors into an engine, by a plan that is built once.

    ``source``: tensors of the trainer, or None on ranks without the model.
    ``target``: storage of the engine, or None on ranks without an engine.
    ``staging_bytes``: bound of the staging memory for sending and receiving together.
    ``group``: process group, or None for the world.
    """

    def __init__(
        self,
        source: WeightSource | None,
        target: Storage | None,
        staging_bytes: int,
        group: Any,
    ) -> None:
        self._source = source
        self._target = target
        self._staging_bytes = staging_bytes
        self._group = group
        self._rank = global_rank(group)
        self._plan: ReshardPlan | None = None
        self._execution: Execution | None = None
        # Identity of the storages that `_execution` is compiled for.
        self._compiled_key: Any = None

    @property
    def plan(self) -> ReshardPlan:
        """Return the reshard plan, built once. The first access is collective over the group."""
        if self._plan is None:
            self._plan = self._build_plan()
        return self._plan

    def compile_execution(self) -> Execution:
        """Return the execution of the plan on the current storages, recompiled if a storage was replaced."""
        plan = self.plan

        # Compiled views reference the storages, and any storage may have been replaced since the last call.
        source, target = self._get_storages()
        storages_key = (storage_key(source), storage_key(target))
        if self._execution is None or storages_key != self._compiled_key:
            self._execution = Execution(
                plan,
                self._rank,
                source,
                target,
                self._staging_bytes,
                self._group,
            )
            self._compiled_key = storages_key
        return self._execution

    def release_views(self) -> None:
        """Drop the compiled views, which frees tensors without other references."""
        self._execution = None

    def _get_storages(
        self,
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return this rank's source storages and target storages, each by name."""
        source: Mapping[str, Tensor] = {}
        if self._source is not None:
            source = self._source.parameters()
        target: Mapping[str, Tensor] = {}
        if self._target is not None:
            target = self._target.parameters()
        return source, target

    def _build_plan(self) -> ReshardPlan:
        """Gather the layouts of all ranks and build the plan. Collective over the group."""
        source, target = self._get_storages()
        source_boxes: list[TensorBox] | None = None
        if self._source is not None:
            source_boxes = self._source.boxes()
        target_boxes: Sequence[TensorBox] | None = None
        if self._target is not None:
            target_boxes = self._target.boxes()
        self._reject_engine_without_boxes(target_boxes)

        # NCCL creates a communicator in a collective call. Create it here, since some ranks have no messages
        # in the exchange of weights.
        create_communicator(self._group)
        source_layout = gather_box_groups(source_boxes, _get_dtypes(source), self._group)
        target_layout = gather_box_groups(target_boxes, _get_dtypes(target), self._group)

        # The plan prefers senders on the receiver's node; the ranks on one host form a node.
        host_by_rank = dict(gather_objects((self._rank, socket.gethostname()), self._group))
        hosts = sorted(set(host_by_rank.values()))
        node_by_rank = {rank: hosts.index(host) for rank, host in host_by_rank.items()}
        return build_plan(source_layout, target_layout, node_by_rank)

    def _reject_engine_without_boxes(self, boxes: Sequence[TensorBox] | None) -> None:
        """Raise UserError on all ranks if an engine returned an empty list of ``boxes``.

        A box is a slice of a weight with its location in the engine's parameters. Without boxes no weight
        would be transferred. Collective over the group.
        """
        # Gather the names of these engines, so that all ranks raise. If only the engine's rank raised, all
        # other ranks would wait for it in the gather of layouts.
        engine_name = None
        if boxes is not None and not boxes:
            engine_name = f"{type(self._target).__name__} on rank {self._rank}"
        names_by_rank = gather_objects(engine_name, self._group)
        engines_without_boxes = [name for name in names_by_rank if name is not None]

        if engines_without_boxes:
            raise UserError(
                "A generation engine returned no boxes, so its weights cannot be updated.",
                where=engines_without_boxes[0],
                expected="boxes() that cover every parameter of the engine",
                got="an empty list",
                fix="build the engine from a model, and return a box for each of its parameters",
            )


class HybridEngine:
    """Weight sync between a Megatron model and a generation engine, with verification by checksums.

    All ranks of the group call `sync` and `generation_mode` together.

    ``model``: object with Megatron GPTModel ``chunks`` and a transformers ``hf_config``, or None on ranks
        without the trained model.
    ``engine``: engine on this rank, or None on ranks that do not generate.
    ``staging_bytes``: bound of the staging memory for sending and receiving together.
    ``verify``: "full", "sampled" or "off".
    ``group``: process group, or None for the world.
    ``resident``: context in which the model's weights are in device memory, for a model that is offloaded
        between uses.
    ``separate_adapters``: whether the engine stores adapters separately from the base weights. Then each sync
        moves the adapters, and the base weights move only once; otherwise adapters are merged before a sync.
    ``adapters``: storage of the engine's adapters, or None on ranks without an engine.
    ``sleeps``: whether the engine on this rank releases its memory between uses.
    ``every``: number of versions from one periodic sync to the next, see `RolloutPolicy`.
    ``apart``: former name of ``separate_adapters``, which users' scripts may still pass.
    """

    def __init__(
        self,
        model: ChunkedModel | None,
        engine: WeightStore | None,
        *,
        staging_bytes: int = HybridEngineConfig.staging_bytes,
        verify: str = HybridEngineConfig.verify,
        group: Any = None,
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
        separate_adapters: bool = False,
        adapters: Storage | None = None,
        sleeps: bool = True,
        every: int = HybridEngineConfig.every,
        apart: bool = False,
    ) -> None:
        # `apart` is the former name of `separate_adapters`, which users' scripts may still pass.
        separate_adapters = separate_adapters or apart
        if verify not in VERIFY:
            raise unknown_choice_error("hybrid_engine.verify", verify, VERIFY)

        self.version = 0
        # `every` is the number of versions of the model's weights from one periodic sync to the next. With 0,
        # rollouts always use the first version.
        self.rollout_policy = RolloutPolicy(model, every)
        self._model = model
        self._engine = engine
        self._group = group
        # Returns a context manager. The model's weights are in device memory inside its block, and may be
        # offloaded to the CPU outside of it.
        self._resident = resident
        self._verify = verify
        # Whether the engine releases its memory after each `generation_mode` block.
        self._sleeps = sleeps

        # Weights before adapters: the engine needs the base weights when it activates adapters.
        self._transfers = [
            WeightTransfer(
                _make_weight_source(model, separate_adapters),
                engine,
                staging_bytes,
                group,
            )
        ]
        if separate_adapters:
            self._transfers.append(
                WeightTransfer(_make_adapter_source(model), adapters, staging_bytes, group)
            )

        self._base_synced = False
        self._synced_version: int | None = None

    @property
    def plan(self) -> ReshardPlan:
        """Return the reshard plan, built once. The first access is collective over the group."""
        return self._transfers[0].plan

    @property
    def rollout_version(self) -> int:
        """Return the version of the weights from which `generation_mode` samples."""
        return self.rollout_policy.version_at(self.version)

    def mark_updated(self, *, base: bool = False) -> None:
        """Increment the version, after the model's weights changed.

        ``base``: whether the base weights of a model with separate adapters changed, too.
        """
        self.version += 1
        self._base_synced = self._base_synced and not base

    def sync(self, version: int | None = None) -> Metrics:
        """Move the weights, verify them and activate them in the engine; return the timings.

        ``version``: version of the model's current weights, or None for ``self.version``. Raises
        WeightMismatchError on all ranks if a checksum differs. Collective over the group.
        """
        if version is None:
            version = self.version

        # Build and compile all plans before any weight moves.
        start = time.perf_counter()
        transfers = self._pending_transfers()
        executions = [transfer.compile_execution() for transfer in transfers]
        for execution in executions:
            execution.run(self._verify, version)
        device.synchronize()
        transfer_end = time.perf_counter()

        # Verify the received weights after all copies have ended.
        for execution in executions:
            execution.verify(self._verify, version)
        verify_end = time.perf_counter()

        # Activate only verified weights.
        if self._engine is not None:
            self._engine.finish_update(version)
        self._check_engine_versions(version)
        self._base_synced = True
        self._synced_version = version

        # Free the tensors of merged or exported adapters, which were created only for this sync.
        if getattr(self._model, "adapters", None) is not None:
            for transfer in transfers:
                transfer.release_views()

        plans = [transfer.plan for transfer in transfers]
        # Report the bytes of the busiest rank, which need not be among the ranks that gather metrics.
        timings = {
            "time/reshard": transfer_end - start,
            "time/reshard_verify": verify_end - transfer_end,
        }
        maxima = {
            "reshard/bytes_received_max": _find_largest_total(plan.received for plan in plans),
            "reshard/bytes_local_max": _find_largest_total(plan.local for plan in plans),
            "reshard/staging_bytes_max": float(max(execution.staging_peak for execution in executions)),
        }
        return Metrics.of(timings) + Metrics({}, maxima)

    def _pending_transfers(self) -> list[WeightTransfer]:
        """Return the transfers that this sync needs; skip base weights that the engine already has."""
        if len(self._transfers) == 1:
            return self._transfers

        # If any rank's engine has dropped its weights, all ranks move the base weights again.
        has_dropped_weights = self._engine is not None and self._engine.needs_weights
        if self._is_true_on_any_rank(has_dropped_weights or not self._base_synced):
            return self._transfers
        return self._transfers[1:]

    def verify(self) -> int:
        """Compare every region of the engine's weights with the model's; return the number of regions.

        Raises WeightMismatchError on all ranks if a checksum differs. Collective over the group.
        """
        return sum(transfer.compile_execution().verify("full", 0) for transfer in self._transfers)

    @contextmanager
    def generation_mode(self, *, newest: bool = False) -> Iterator[Metrics]:
        """Wake the engine and sync stale weights before the block; put the engine to sleep after the block.

        The engine stays awake if it was created with ``sleeps=False``. The engine samples from the weights of
        ``rollout_version`` or, with ``newest``, from the model's current weights, for an evaluation. Yields
        the metrics of the sync, which are empty without a sync. Collective over the group.
        """
        version = self.rollout_version
        if newest:
            version = self.version

        # The sync writes into the engine's storage, which exists only while the engine is awake.
        if self._engine is not None:
            self._engine.wake()
        metrics = Metrics()
        if self._is_stale(version):
            with self._resident(), self.rollout_policy.use_version(version, self.version):
                metrics = self.sync(version)

        if not newest and version != self.rollout_policy.version:
            # Copying the weights requires them in device memory. If every version is synced (`every` is 1),
            # `capture_weights` copies nothing.
            weights_scope: AbstractContextManager[None] = nullcontext()
            if self.rollout_policy.every != 1:
                weights_scope = self._resident()
            with weights_scope:
                self.rollout_policy.capture_weights(version)

        try:
            yield metrics
        finally:
            # Sleep even after an error, so that device memory is free for a caller that handles the error.
            if self._engine is not None and self._sleeps:
                self._engine.sleep()

    def _is_stale(self, version: int) -> bool:
        """Return whether any engine lacks the weights of ``version``. Collective over the group."""
        has_dropped_weights = self._engine is not None and self._engine.needs_weights
        return self._is_true_on_any_rank(has_dropped_weights or self._synced_version != version)

    def _is_true_on_any_rank(self, condition: bool) -> bool:
        """Return whether a condition is true on any rank. Collective over the group."""
        return bool(sum_over_ranks(torch.tensor([int(condition)]), self._group).item())

    def _check_engine_versions(self, version: int) -> None:
        """Raise RuntimeError on all ranks if an engine lacks the new version. Collective over the group."""
        is_outdated = self._engine is not None and self._engine.weights_version != version
        num_outdated = sum_over_ranks(torch.tensor([int(is_outdated)]), self._group).item()
        if num_outdated:
            raise RuntimeError(f"{num_outdated} engines do not use version {version} of the weights")


def _make_weight_source(model: ChunkedModel | None, separate_adapters: bool) -> WeightSource | None:
    """Create the source of a model's weights, or return None without a model.

    Adapters are merged into the weights unless ``separate_adapters`` is set.
    """
    if model is None:
        return None

    get_weights = live_parameters
    if getattr(model, "adapters", None) is not None and not separate_adapters:
        get_weights = policy_weights
    return WeightSource(partial(get_weights, model), partial(source_boxes, model))


def _make_adapter_source(model: Any) -> WeightSource | None:
    """Create the source of a model's adapters under PEFT's names, or return None without a model."""
    if model is None:
        return None
    return WeightSource(partial(engine_adapters, model), partial(peft_boxes, model))


def _find_largest_total(bytes_by_plan: Iterable[Mapping[int, int]]) -> float:
    """Sum the bytes of several plans for each rank; return the largest sum.

    ``bytes_by_plan`` has a mapping from rank to bytes for each plan.
    """
    total_by_rank = Counter[int]()
    for bytes_by_rank in bytes_by_plan:
        total_by_rank.update(bytes_by_rank)
    return float(max(total_by_rank.values(), default=0))


def _get_dtypes(storages: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtype of each storage by name."""
    return {name: tensor.dtype for name, tensor in storages.items()}
