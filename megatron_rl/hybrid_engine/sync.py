"""Keep a generation engine's weights equal to a Megatron model's, in the same job."""

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
from megatron_rl.distributed.exchange import gather_objects, rank_in, sum_over_ranks
from megatron_rl.errors import UserError
from megatron_rl.hf.peft import peft_boxes
from megatron_rl.hf.weights import source_boxes
from megatron_rl.megatron.lora import engine_adapters, policy_weights
from megatron_rl.megatron.model import Chunked, live_parameters
from megatron_rl.metrics import Metrics
from megatron_rl.rollout.engines.base import Storage, WeightStore
from megatron_rl.types import TensorBox
from megatron_rl.weights.execute import VERIFY, Execution, storage_key
from megatron_rl.weights.plan import ReshardPlan, build_plan
from megatron_rl.weights.transfer import connect, gather_layout


class _Trained(NamedTuple):
    """The trainer's tensors on this rank, as a `Storage` says where an engine's lie."""

    parameters: Callable[[], Mapping[str, Tensor]]
    boxes: Callable[[], list[TensorBox]]


class _Movement:
    """Move one set of tensors into an engine, by a plan that is made once.

    ``source`` and ``target`` are None on ranks that hold or take none.
    """

    def __init__(
        self, source: _Trained | None, target: Storage | None, staging_bytes: int, group: Any
    ) -> None:
        self._source, self._target = source, target
        self._staging_bytes, self._group = staging_bytes, group
        self._rank = rank_in(group)
        self._plan: ReshardPlan | None = None
        self._execution: Execution | None = None
        self._compiled_for: Any = None

    @property
    def plan(self) -> ReshardPlan:
        """Return the plan, built once. The first access is collective over the group."""
        if self._plan is None:
            self._plan = self._build_plan()
        return self._plan

    def compile(self) -> Execution:
        """Return views on the live storage, made again when something was moved in memory."""
        plan = self.plan
        held, written = self._storages()
        key = storage_key(held), storage_key(written)
        if self._execution is None or key != self._compiled_for:
            self._execution = Execution(plan, self._rank, held, written, self._staging_bytes, self._group)
            self._compiled_for = key
        return self._execution

    def release(self) -> None:
        """Let go of the views, and of tensors that nothing else holds."""
        self._execution = None

    def _storages(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        held = self._source.parameters() if self._source is not None else {}
        written = self._target.parameters() if self._target is not None else {}
        return held, written

    def _build_plan(self) -> ReshardPlan:
        held, written = self._storages()
        source_boxes = self._source.boxes() if self._source is not None else None
        target_boxes = self._target.boxes() if self._target is not None else None
        self._refuse_empty(target_boxes)
        connect(self._group)
        sources = gather_layout(source_boxes, _dtypes(held), self._group)
        destinations = gather_layout(target_boxes, _dtypes(written), self._group)
        hosts = dict(gather_objects((self._rank, socket.gethostname()), self._group))
        names = sorted(set(hosts.values()))
        return build_plan(sources, destinations, {rank: names.index(host) for rank, host in hosts.items()})

    def _refuse_empty(self, boxes: Sequence[TensorBox] | None) -> None:
        """Raise UserError on all ranks where an engine names no weights: none could be moved or compared."""
        empty = boxes is not None and not boxes
        named = f"{type(self._target).__name__} on rank {self._rank}" if empty else None
        engines = [name for name in gather_objects(named, self._group) if name is not None]
        if engines:
            raise UserError(
                "A generation engine names no weights, so none would ever reach it.",
                where=engines[0],
                expected="boxes() that cover every parameter of the engine",
                got="no boxes",
                fix="build the engine from a model, and return a box for each of its parameters",
            )


class HybridEngine:
    """Move a model's weights into a generation engine, least traffic first, and prove that they arrived.

    ``model`` is anything with Megatron GPTModel ``chunks`` and a transformers ``hf_config``, None on ranks
    without the trained model; ``engine`` is None on ranks that do not generate. In and out staging stays
    within ``staging_bytes``; ``verify`` is full, sampled or off. ``group`` None is the world: all of its
    ranks call `sync` and `generation_mode` together. ``resident`` gives a context in which the weights of the
    model are in device memory, for a model that is elsewhere between uses. ``apart`` keeps the model's
    adapters apart from its weights: they go to the engine's ``adapters`` (None on ranks without an engine)
    each time, the weights once. ``sleeps`` says whether the engine on this rank gives its memory to others
    between uses.
    """

    def __init__(
        self,
        model: Chunked | None,
        engine: WeightStore | None,
        *,
        staging_bytes: int = HybridEngineConfig.staging_bytes,
        verify: str = HybridEngineConfig.verify,
        group: Any = None,
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
        apart: bool = False,
        adapters: Storage | None = None,
        sleeps: bool = True,
    ) -> None:
        if verify not in VERIFY:
            raise UserError(
                "This kind of verification does not exist.",
                where="hybrid_engine.verify",
                expected="one of " + ", ".join(VERIFY),
                got=repr(verify),
            )
        self.version = 0
        self._model, self._engine, self._group = model, engine, group
        self._resident, self._verify, self._sleeps = resident, verify, sleeps
        self._movements = [_Movement(_weights(model, apart), engine, staging_bytes, group)]
        if apart:
            self._movements.append(_Movement(_adapters(model), adapters, staging_bytes, group))
        self._base_synced = False
        self._synced_version: int | None = None

    @property
    def plan(self) -> ReshardPlan:
        """Return the plan of the weights, built once. The first access is collective over the group."""
        return self._movements[0].plan

    def mark_updated(self, *, base: bool = False) -> None:
        """Say that the model's weights have changed: they are a new version from now on.

        ``base`` says that of a model whose adapters are kept apart the weights beneath them have, too.
        """
        self.version += 1
        self._base_synced = self._base_synced and not base

    def sync(self) -> Metrics:
        """Move the weights, verify them and let the engine take them into use as ``version``.

        Raises WeightMismatchError on all ranks when a checksum differs. Collective over the group.
        """
        begin = time.perf_counter()
        movements = self._due()
        executions = [movement.compile() for movement in movements]
        for execution in executions:
            execution.run(self._verify, self.version)
        device.synchronize()
        moved = time.perf_counter()
        for execution in executions:
            execution.verify(self._verify, self.version)
        verified = time.perf_counter()
        if self._engine is not None:
            self._engine.finish_update(self.version)
        self._acknowledge()
        self._base_synced, self._synced_version = True, self.version
        if getattr(self._model, "adapters", None) is not None:
            for movement in movements:
                movement.release()  # its tensors were made for this sync
        plans = [movement.plan for movement in movements]
        # Bytes are those of the busiest rank, which need not be among the ranks that gather metrics.
        return Metrics.of({"time/reshard": moved - begin, "time/reshard_verify": verified - moved}) + Metrics(
            {},
            {
                "reshard/bytes_received_max": _most(plan.received for plan in plans),
                "reshard/bytes_local_max": _most(plan.local for plan in plans),
                "reshard/staging_bytes_max": float(max(each.staging_peak for each in executions)),
            },
        )

    def _due(self) -> list[_Movement]:
        """Return what this sync moves: not the weights beneath adapters where the engine has them."""
        lost = self._engine is not None and self._engine.needs_weights
        alone = len(self._movements) > 1 and not self._anywhere(lost or not self._base_synced)
        return self._movements[1:] if alone else self._movements

    def verify(self) -> int:
        """Compare every region of the engine's weights with the model's and return how many there are.

        Raises WeightMismatchError on all ranks when a checksum differs. Collective over the group.
        """
        return sum(movement.compile().verify("full", 0) for movement in self._movements)

    @contextmanager
    def generation_mode(self) -> Iterator[Metrics]:
        """Wake the engine and bring its weights up to ``version``; at the end it ``sleeps``, or stays awake.

        Yields what the sync measured, nothing where no weights had to be moved. Collective over the group.
        """
        if self._engine is not None:
            self._engine.wake()
        synced = Metrics()
        if self._is_stale():
            with self._resident():
                synced = self.sync()
        try:
            yield synced
        finally:
            if self._engine is not None and self._sleeps:
                self._engine.sleep()

    def _is_stale(self) -> bool:
        lost = self._engine is not None and self._engine.needs_weights
        return self._anywhere(lost or self._synced_version != self.version)

    def _anywhere(self, condition: bool) -> bool:
        """Say whether a condition holds on any rank. Collective over the group."""
        return bool(sum_over_ranks(torch.tensor([int(condition)]), self._group).item())

    def _acknowledge(self) -> None:
        """Check that every engine now answers with the new version."""
        wrong = self._engine is not None and self._engine.weights_version != self.version
        count = sum_over_ranks(torch.tensor([int(wrong)]), self._group).item()
        if count:
            raise RuntimeError(f"{count} engines did not take version {self.version} of the weights into use")


def _weights(model: Chunked | None, apart: bool) -> _Trained | None:
    if model is None:
        return None
    merges = getattr(model, "adapters", None) is not None and not apart
    return _Trained(
        partial(policy_weights if merges else live_parameters, model), partial(source_boxes, model)
    )


def _adapters(model: Any) -> _Trained | None:
    return None if model is None else _Trained(partial(engine_adapters, model), partial(peft_boxes, model))


def _most(counts: Iterable[Mapping[int, int]]) -> float:
    """Return the most that any rank has of all counts together."""
    together = sum((Counter(count) for count in counts), Counter[int]())
    return float(max(together.values(), default=0))


def _dtypes(storages: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in storages.items()}
