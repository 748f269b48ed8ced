"""Weight-transfer backends for vLLM, through which `hybrid_engine` sends weights.

vLLM calls one backend on each side of a transfer: `HybridTransferEngine` in vLLM's workers, and
`HybridTrainerEngine` in the trainer's ranks. A backend only runs a transfer. The transfer is planned by the
function that joins the rendezvous, which is an argument of `register_backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megatron_rl.check.engine.servers import TRANSFER_BACKEND
from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.rollout.engines.servers import start_in_thread
from megatron_rl.rollout.engines.vllm.orphans import start_watchdog
from megatron_rl.rollout.engines.vllm.weights import LiveWeights, require_writable


class Transfer(Protocol):
    """Protocol of a weight transfer between trainers and this process; `HybridEngine` implements it."""

    version: int
    """Version of the weights that the next `sync` transfers."""

    def sync(self) -> Any:
        """Transfer and verify the next version of the weights. Collective over trainer ranks and workers."""
        ...


@dataclass
class TransferRendezvous(WeightTransferInitInfo):
    """Rendezvous of a vLLM worker with the trainers.

    A worker in the trainers' job can use the defaults. A worker of another job needs the address, the port
    and the numbers of ranks.

    Example:
        Two trainer ranks and a server with tensor parallelism 2::

            TransferRendezvous(address="10.0.0.1", port=29600, trainers=2, workers=2)
    """

    model: Any = None
    """Model that this rank trains, or None if it only generates."""

    address: str | None = None
    """Host of the trainers' rendezvous, None in the trainers' own job."""

    port: int = 0
    """Port of the rendezvous."""

    trainers: int = 0
    """Number of trainer ranks, which are the first ranks of the process group."""

    workers: int = 0
    """Number of vLLM workers, whose ranks follow the trainer ranks."""

    staging_bytes: int = HybridEngineConfig.staging_bytes
    """Maximum number of bytes in staging buffers, equal on all ranks."""

    verify: str = HybridEngineConfig.verify
    """Verification of a transfer, equal on all ranks; see `HybridEngineConfig.verify`."""

    def __post_init__(self) -> None:
        if self.address is not None and not (self.port and self.trainers and self.workers):
            raise ValueError("an address also needs port, trainers and workers")


@dataclass
class Update(WeightTransferUpdateInfo):
    """Argument of a weight update: the version of the weights to receive."""

    version: int


JoinRendezvous = Callable[[TransferRendezvous, LiveWeights | None, int], tuple[Transfer, Callable[[], None]]]
"""Function that makes a rank join a rendezvous: (rendezvous, this process's vLLM weights or None, rank) ->
(transfer, function that leaves the transfer's process group)."""

_join_rendezvous: JoinRendezvous | None = None
"""Argument of `register_backend`. It is module state, because vLLM constructs the backends itself."""


class HybridTransferEngine(WeightTransferEngine[TransferRendezvous, Update]):
    """Backend in a vLLM worker: writes transferred weights into the worker's live storage.

    A worker cannot reset the engine's prefix cache. So the client must pause generation with ``clear_cache``,
    or call ``reset_prefix_cache`` after the update.
    """

    init_info_cls = TransferRendezvous
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        start_watchdog()

    def init_transfer_engine(self, init_info: TransferRendezvous) -> None:
        """Trace the model's loader and plan the transfer. Collective over the ranks of the rendezvous."""
        require_writable(self.model)
        config: Any = self.parallel_config
        worker_index = config.data_parallel_index * config.world_size + config.rank
        engine_storage = LiveWeights(self.model, self.model_config.model, worker_index)
        rank = init_info.trainers + worker_index
        assert _join_rendezvous is not None, "vLLM finds this backend only after register_backend"
        self._transfer, self._leave_group = _join_rendezvous(init_info, engine_storage, rank)

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def receive_weights(self, update_info: Update) -> None:
        """Transfer and verify the weights. Collective over the ranks of the rendezvous."""
        self._transfer.version = update_info.version
        self._transfer.sync()

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finished the update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one complete update of the weights, described by the fields of `Update`."""
        self.receive_weights(self.parse_update_info(update_info))

    def shutdown(self) -> None:
        """Leave the rendezvous; do nothing if this worker has not joined it."""
        if hasattr(self, "_leave_group"):
            self._leave_group()
            del self._transfer, self._leave_group


@dataclass
class TrainerRendezvous(TrainerInitInfo):
    """Rendezvous of a trainer rank with vLLM's workers; ``rank`` is its index among the trainer ranks.

    The fields are described in `TransferRendezvous`.
    """

    backend: ClassVar[str] = TRANSFER_BACKEND

    model: Any
    address: str
    port: int
    trainers: int
    workers: int
    staging_bytes: int = HybridEngineConfig.staging_bytes
    verify: str = HybridEngineConfig.verify


class HybridTrainerEngine(TrainerWeightTransferEngine[TrainerRendezvous]):
    """Backend in a trainer rank: sends weights to vLLM workers of another job.

    ``leave_group``: function that leaves the transfer's process group.
    ``client``: vLLM's client of the workers, which only the sender calls.
    ``is_sender``: whether this rank calls the client.
    """

    init_info_cls = TrainerRendezvous

    def __init__(
        self,
        transfer: Transfer,
        leave_group: Callable[[], None],
        client: Any,
        is_sender: bool,
    ) -> None:
        super().__init__(client=client, is_sender=is_sender)
        self._transfer = transfer
        self._leave_group = leave_group
        self._version = 0

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerRendezvous,
        *,
        client: Any,
        source: Any = None,
    ) -> HybridTrainerEngine:
        """Join the rendezvous with vLLM's workers; the sender also calls ``client`` to make the workers join.

        ``source`` is not used. Collective over the ranks of the rendezvous.
        """
        # The fields for the workers: all except the model and the rank of this process.
        shared_fields = {
            name: value for name, value in vars(init_info).items() if name not in ("model", "rank")
        }
        rendezvous = TransferRendezvous(model=init_info.model, **shared_fields)
        # The client's call returns only after workers and trainers have planned the transfer together, so it
        # runs in a thread while this rank joins.
        pending_call = None
        if init_info.is_sender:
            pending_call = start_in_thread(client.init_weight_transfer_engine, shared_fields)
        assert _join_rendezvous is not None, "vLLM finds this backend only after register_backend"
        transfer, leave_group = _join_rendezvous(rendezvous, None, init_info.rank)
        if pending_call is not None:
            pending_call.result()
        return cls(transfer, leave_group, client, init_info.is_sender)

    def send_weights(self) -> None:
        """Transfer and verify the next version. Collective over the ranks of the rendezvous."""
        self._version += 1
        self._transfer.version = self._version
        # The client's call returns only after the transfer, so it runs in a thread.
        pending_call = None
        if self.is_sender:
            self.client.start_weight_update()
            pending_call = start_in_thread(self.client.update_weights, {"version": self._version})
        self._transfer.sync()
        if pending_call is not None:
            pending_call.result()
            self.client.finish_weight_update(str(self._version))

    def shutdown(self) -> None:
        """Leave the rendezvous."""
        self._leave_group()


def register_backend(join_rendezvous: JoinRendezvous) -> None:
    """Register both backends, the trainer's and the worker's, with vLLM. May be called repeatedly.

    ``join_rendezvous`` is the function that the backends call to join a rendezvous.
    """
    global _join_rendezvous
    _join_rendezvous = join_rendezvous
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, HybridTransferEngine)
        WeightTransferTrainerFactory.register_engine(TRANSFER_BACKEND, HybridTrainerEngine)
