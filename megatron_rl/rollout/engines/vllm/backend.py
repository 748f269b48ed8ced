"""The weight-transfer backend that `hybrid_engine` plugs into vLLM; it brings the transfer itself."""

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

from megatron_rl.check.engine.servers import BACKEND
from megatron_rl.config.sections.rollout import HybridEngineConfig
from megatron_rl.rollout.engines.servers.base import start_call
from megatron_rl.rollout.engines.vllm.live import LiveWeights, check_writable
from megatron_rl.rollout.engines.vllm.orphans import end_with_server


class Transfer(Protocol):
    """What moves weights between the trainers and this process; a `HybridEngine` is one."""

    version: int

    def sync(self) -> Any: ...


@dataclass
class TransferRendezvous(WeightTransferInitInfo):
    """Rendezvous of a vLLM worker with the trainers.

    In a rank of the trainers' own job everything may stay at its default; ``model`` is what the rank trains,
    None where it only generates. A worker elsewhere names the trainers' ``address`` and ``port``, the number
    of trainer ranks (``trainers``) and of vLLM's workers (``workers``) that meet there.
    ``staging_bytes`` and ``verify`` are the `HybridEngine`'s, and equal on all ranks.
    """

    model: Any = None
    address: str | None = None
    port: int = 0
    trainers: int = 0
    workers: int = 0
    staging_bytes: int = HybridEngineConfig.staging_bytes
    verify: str = HybridEngineConfig.verify

    def __post_init__(self) -> None:
        if self.address is not None and not (self.port and self.trainers and self.workers):
            raise ValueError("an address needs port, trainers and workers beside it")


@dataclass
class Update(WeightTransferUpdateInfo):
    """Name the version of the weights that come."""

    version: int


Connect = Callable[[TransferRendezvous, LiveWeights | None, int], tuple[Transfer, Callable[[], None]]]
"""Makes (transfer, end) from a meeting, this process's vLLM weights and its rank at the meeting."""
_connect: list[Connect] = []


class HybridTransferEngine(WeightTransferEngine[TransferRendezvous, Update]):
    """Let vLLM's weight-transfer calls run a transfer into this worker's live weights.

    The engine's prefix cache is out of a worker's reach: pause with ``clear_cache``, or call
    ``reset_prefix_cache`` after the update.
    """

    init_info_cls = TransferRendezvous
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        end_with_server()

    def init_transfer_engine(self, init_info: TransferRendezvous) -> None:
        """Trace the model's own loader and plan the transfer. Collective over the meeting."""
        check_writable(self.model)
        parallel: Any = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        live = LiveWeights(self.model, self.model_config.model, worker)
        self._transfer, self._end = _connect[0](init_info, live, init_info.trainers + worker)

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def receive_weights(self, update_info: Update) -> None:
        """Move and verify the weights. Collective over the meeting."""
        self._transfer.version = update_info.version
        self._transfer.sync()

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has taken the weights into use."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one whole update."""
        self.receive_weights(self.parse_update_info(update_info))

    def shutdown(self) -> None:
        """Leave the meeting."""
        if hasattr(self, "_end"):
            self._end()
            del self._transfer, self._end


@dataclass
class TrainerMeeting(TrainerInitInfo):
    """Say how a trainer rank meets vLLM's workers; see `TransferRendezvous`. ``rank`` counts the trainers."""

    backend: ClassVar[str] = BACKEND

    model: Any
    address: str
    port: int
    trainers: int
    workers: int
    staging_bytes: int = HybridEngineConfig.staging_bytes
    verify: str = HybridEngineConfig.verify


class HybridTrainerEngine(TrainerWeightTransferEngine[TrainerMeeting]):
    """Send a trainer's weights to vLLM workers of another job, each byte where it is needed."""

    init_info_cls = TrainerMeeting

    def __init__(self, transfer: Transfer, end: Callable[[], None], client: Any, is_sender: bool) -> None:
        super().__init__(client=client, is_sender=is_sender)
        self._transfer, self._end = transfer, end
        self._version = 0

    @classmethod
    def trainer_init(
        cls, init_info: TrainerMeeting, *, client: Any, source: Any = None
    ) -> HybridTrainerEngine:
        """Meet the workers. Collective over the meeting; the first trainer tells vLLM where it is."""
        told = {name: value for name, value in vars(init_info).items() if name not in ("model", "rank")}
        meeting = TransferRendezvous(model=init_info.model, **told)
        call = start_call(client.init_weight_transfer_engine, told) if init_info.is_sender else None
        transfer, end = _connect[0](meeting, None, init_info.rank)
        if call is not None:
            call.result()
        return cls(transfer, end, client, init_info.is_sender)

    def send_weights(self) -> None:
        """Move, verify and take into use the next version. Collective over the meeting."""
        self._version += 1
        self._transfer.version = self._version
        call = None
        if self.is_sender:
            self.client.start_weight_update()
            call = start_call(self.client.update_weights, {"version": self._version})
        self._transfer.sync()
        if call is not None:
            call.result()
            self.client.finish_weight_update(str(self._version))

    def shutdown(self) -> None:
        """Leave the meeting."""
        self._end()


def register(connect: Connect) -> None:
    """Make the backend known to vLLM in this process. May be repeated."""
    _connect[:] = [connect]
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HybridTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, HybridTrainerEngine)
