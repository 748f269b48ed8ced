"""Keep a generation engine's weights equal to a Megatron model's, in the same job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.hybrid_engine.execute import VERIFY, Execution, storage_key
from megatron_rl.hybrid_engine.plan import ReshardPlan, build_plan
from megatron_rl.metrics import Metrics
from megatron_rl.parallel import device
from megatron_rl.parallel.exchange import gather_objects, rank_in, sum_over_ranks
from megatron_rl.parallel.hf.weights import source_boxes
from megatron_rl.parallel.lora import policy_weights
from megatron_rl.parallel.model import Chunked
from megatron_rl.parallel.transfer import connect, gather_layout
from megatron_rl.rollout.engine import WeightStore
from megatron_rl.types import TensorBox


class HybridEngine:
    """Move a model's weights into a generation engine, least traffic first, and prove that they arrived.

    ``model`` is anything with Megatron GPTModel ``chunks`` and a transformers ``hf_config``, None on ranks
    without the trained model; ``engine`` is None on ranks that do not generate. In and out staging stays
    within ``staging_bytes``; ``verify`` is full, sampled or off. ``group`` None is the world: all of its
    ranks call `sync` and `generation_mode` together. ``resident`` gives a context in which the weights of the
    model are in device memory, for a model that is elsewhere between uses.
    """

    def __init__(
        self,
        model: Chunked | None,
        engine: WeightStore | None,
        *,
        staging_bytes: int = 256 * 2**20,
        verify: str = "full",
        group: Any = None,
        resident: Callable[[], AbstractContextManager[None]] = nullcontext,
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
        self._resident = resident
        self._staging_bytes, self._verify = staging_bytes, verify
        self._plan: ReshardPlan | None = None
        self._execution: Execution | None = None
        self._compiled_for: Any = None
        self._synced_version: int | None = None

    @property
    def _rank(self) -> int:
        return rank_in(self._group)

    @property
    def plan(self) -> ReshardPlan:
        """Return the plan, built once. The first access is collective over the group."""
        if self._plan is None:
            self._plan = self._build_plan()
        return self._plan

    def mark_updated(self) -> None:
        """Say that the model's weights have changed: they are a new version from now on."""
        self.version += 1

    def sync(self) -> Metrics:
        """Move the weights, verify them and let the engine take them into use as ``version``.

        Raises WeightMismatchError on all ranks when a checksum differs. Collective over the group.
        """
        begin = time.perf_counter()
        execution = self._compile()
        execution.run()
        device.synchronize()
        moved = time.perf_counter()
        execution.verify(self._verify, self.version)
        verified = time.perf_counter()
        if self._engine is not None:
            self._engine.finish_update(self.version)
        self._acknowledge()
        self._synced_version = self.version
        if getattr(self._model, "adapters", None) is not None:
            self._execution = None  # it holds weights that were made for this sync
        # Bytes are those of the busiest rank, which need not be among the ranks that gather metrics.
        return Metrics.of({"time/reshard": moved - begin, "time/reshard_verify": verified - moved}) + Metrics(
            {},
            {
                "reshard/bytes_received_max": float(max(self.plan.received.values(), default=0)),
                "reshard/bytes_local_max": float(max(self.plan.local.values(), default=0)),
                "reshard/staging_bytes_max": float(execution.staging_peak),
            },
        )

    def verify(self) -> int:
        """Compare every region of the engine's weights with the model's and return how many there are.

        Raises WeightMismatchError on all ranks when a checksum differs. Collective over the group.
        """
        return self._compile().verify("full", 0)

    @contextmanager
    def generation_mode(self) -> Iterator[Metrics]:
        """Wake the engine, bring its weights up to ``version``, and put it to sleep again at the end.

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
            if self._engine is not None:
                self._engine.sleep()

    def _is_stale(self) -> bool:
        lost = self._engine is not None and self._engine.needs_weights
        stale = lost or self._synced_version != self.version
        return bool(sum_over_ranks(torch.tensor([int(stale)]), self._group).item())

    def _build_plan(self) -> ReshardPlan:
        held, written = self._storages()
        model_boxes = source_boxes(self._model) if self._model is not None else None
        engine_boxes = self._engine.boxes() if self._engine is not None else None
        self._refuse_empty(engine_boxes)
        connect(self._group)
        sources = gather_layout(model_boxes, _dtypes(held), self._group)
        destinations = gather_layout(engine_boxes, _dtypes(written), self._group)
        hosts = dict(gather_objects((self._rank, socket.gethostname()), self._group))
        names = sorted(set(hosts.values()))
        return build_plan(sources, destinations, {rank: names.index(host) for rank, host in hosts.items()})

    def _refuse_empty(self, boxes: Sequence[TensorBox] | None) -> None:
        """Raise UserError on all ranks where an engine names no weights: none could be moved or compared."""
        empty = boxes is not None and not boxes
        named = f"{type(self._engine).__name__} on rank {self._rank}" if empty else None
        engines = [name for name in gather_objects(named, self._group) if name is not None]
        if engines:
            raise UserError(
                "A generation engine names no weights, so none would ever reach it.",
                where=engines[0],
                expected="boxes() that cover every parameter of the engine",
                got="no boxes",
                fix="build the engine from a model, and return a box for each of its parameters",
            )

    def _storages(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        held = policy_weights(self._model) if self._model is not None else {}
        written = self._engine.parameters() if self._engine is not None else {}
        return held, written

    def _compile(self) -> Execution:
        """Return views on the live storage, made again when something was moved in memory."""
        plan = self.plan
        held, written = self._storages()
        key = storage_key(held), storage_key(written)
        if self._execution is None or key != self._compiled_for:
            self._execution = Execution(plan, self._rank, held, written, self._staging_bytes, self._group)
            self._compiled_for = key
        return self._execution

    def _acknowledge(self) -> None:
        """Check that every engine now answers with the new version."""
        wrong = self._engine is not None and self._engine.weights_version != self.version
        count = sum_over_ranks(torch.tensor([int(wrong)]), self._group).item()
        if count:
            raise RuntimeError(f"{count} engines did not take version {self.version} of the weights into use")


def _dtypes(storages: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in storages.items()}
