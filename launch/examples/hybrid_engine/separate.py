"""Send your Megatron model's weights to vLLM workers of another job, each byte to the workers that need it.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 3 launch/examples/hybrid_engine/separate.py

Ranks 0 and 1 train with tensor parallelism 2 in a separate world; the last rank represents a vLLM server,
which is not part of that world. Here it is called over a pipe; for a real one start ``vllm serve MODEL
--worker-extension-cls megatron_rl.hybrid_engine.worker_extension.HybridWorker --weight-transfer-config
'{"backend": "megatron_rl"}'`` and let ``client`` be vLLM's own ``HTTPVLLMWeightSyncClient``. A request is in
flight during the second update: it is paused, kept, and finished with the new weights.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colocated import generate, tiny_checkpoint, vllm_engine
from transformers import AutoConfig

TRAINERS = 2
KEY = b"example"


class PipeClient:
    """Client that calls the server's weight-sync methods by name."""

    def __init__(self, pipe: str) -> None:
        # The server makes the pipe once its engine is built.
        while not os.path.exists(pipe):
            time.sleep(0.1)
        self._pipe = Client(pipe, authkey=KEY)

    def call(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))
        answer = self._pipe.recv()
        if answer is not None:
            raise RuntimeError(answer)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)


def free_port() -> int:
    """Return a port for the rendezvous of trainers and workers, the same on every trainer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1]]
    dist.broadcast_object_list(ports, src=0)
    return ports[0]


def train(rank: int, checkpoint: Path, pipe: str) -> None:
    """Change the weights as a training step would and send them, twice."""
    from colocated import megatron_model
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from megatron_rl.hf.weights import load_weights
    from megatron_rl.hybrid_engine import weight_transfer
    from megatron_rl.rollout.engines.vllm.backend import TrainerRendezvous

    weight_transfer.register()
    config = AutoConfig.from_pretrained(checkpoint)
    model = weight_transfer.TrainedModel.of([megatron_model(config)], config)
    load_weights(model, checkpoint)

    # Every trainer joins the rendezvous, and the first one calls the server.
    rendezvous = {
        "address": "127.0.0.1",
        "port": free_port(),
        "trainers": TRAINERS,
        "workers": 1,
    }
    client = None
    if rank == 0:
        client = PipeClient(pipe)
    sender = WeightTransferTrainerFactory.trainer_init(
        TrainerRendezvous(model, rank=rank, **rendezvous),
        client=client,  # pyright: ignore[reportArgumentType]
    )

    for step in range(2):
        # In place of your optimizer's step.
        with torch.no_grad():
            for parameter in model.chunks[0].parameters():
                parameter.mul_(1.0 + 0.5 * step)
        sender.send_weights()

    # The server ends its loop when the first trainer closes the pipe.
    sender.shutdown()
    if client is not None:
        client.call("close")
    dist.barrier()


def serve(checkpoint: Path, address: str) -> None:
    """Answer weight-sync calls as a vLLM server with one worker does."""
    from megatron_rl.hybrid_engine import weight_transfer

    weight_transfer.register()
    extension = "megatron_rl.hybrid_engine.worker_extension.HybridWorker"
    llm = vllm_engine(checkpoint, distributed_executor_backend="uni", worker_extension_cls=extension)
    answers = InFlight(llm)

    # Calls come over the pipe, by name, until the trainer closes it.
    with Listener(address, authkey=KEY) as listener, listener.accept() as pipe:
        while True:
            name, arguments = pipe.recv()
            if name == "close":
                pipe.send(None)
                break

            # Between these two calls weights are partly old and partly new: no step may run.
            if name == "start_weight_update":
                answers.pause()
            try:
                getattr(llm, name)(*arguments)
                pipe.send(None)
            except Exception as error:
                pipe.send(repr(error))
                raise
            if name == "finish_weight_update":
                answers.resume()

    print(f"in flight: {answers.finish()}", flush=True)
    print(f"server, weights {llm.get_weight_version()}: {generate(llm, [1, 2, 3])}", flush=True)


class InFlight:
    """Request that is in flight during an update of the weights."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._started = False

    def pause(self) -> None:
        """Stop scheduling; the request stays in the engine."""
        self._llm.llm_engine.sleep(0, mode="keep")

    def resume(self) -> None:
        """Schedule again with the new weights; after the first update, start the request."""
        # Keys and values in the cache belong to the old weights.
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.wake_up(["scheduling"])
        if not self._started:
            from vllm import SamplingParams

            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=12,
                detokenize=False,
            )
            self._llm.llm_engine.add_request("open", {"prompt_token_ids": [5, 6, 7]}, sampling)
            for _ in range(4):
                self._llm.llm_engine.step()
            self._started = True

    def finish(self) -> list[int]:
        """Return the tokens of the complete response."""
        outputs = []
        while self._llm.llm_engine.has_unfinished_requests():
            outputs += self._llm.llm_engine.step()
        return list(outputs[-1].outputs[0].token_ids)


def main(checkpoint: Path) -> None:
    """Train on the first ranks, serve on the last."""
    rank = int(os.environ["RANK"])
    pipe = f"{tempfile.gettempdir()}/vllm-{os.environ['MASTER_PORT']}"
    if rank == TRAINERS:
        # The server is no rank of the trainers' world.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            del os.environ[name]
        serve(checkpoint, pipe)
    else:
        os.environ["WORLD_SIZE"] = str(TRAINERS)
        train(rank, checkpoint, pipe)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_checkpoint())
