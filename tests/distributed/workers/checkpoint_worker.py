"""Save checkpoints in some layouts and load them in others. ``checkpoint_worker.py FOLDER PLAN``."""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge

from benchmarks.live_bytes import LiveBytes
from megatron_rl import durable
from megatron_rl.checkpoint import roles as checkpoint
from megatron_rl.checkpoint.folders import write_tensors
from megatron_rl.checkpoint.megatron_lm import (
    checkpoint_arguments,
    load_optimizer,
)
from megatron_rl.checkpoint.roles import (
    TrainedRole,
    load_actor_weights,
    load_checkpoint,
    save_checkpoint,
)
from megatron_rl.checkpoint.tensors import sharded_state
from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.hf.weights import load_weights

sys.path.insert(0, str(Path(__file__).parent))
import training

# Optimizer steps before and after the checkpoint.
BEFORE = 3
AFTER = 3
STATE = {
    "step": BEFORE,
    "seed": 7,
    "position": {"epoch": 1, "row": 5},
    "buffer": torch.arange(5),
}


def draws() -> list[float]:
    """Return the next number of every random generator of this rank."""
    return [
        random.random(),
        float(np.random.rand()),
        *torch.rand(2).tolist(),
        *tracker(),
    ]


def tracker() -> list[float]:
    """Return the next numbers of Megatron's tracker for tensor-parallel ranks."""
    with device.megatron_mode():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return torch.rand(2).tolist()


def continued(model: Any, optimizer: Any, batch: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Train on after the checkpoint; return the steps' metrics, the final weights and all random numbers."""
    steps = [training.train_step(model, optimizer, batch, case["budget"]) for _ in range(AFTER)]
    all_draws: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_draws, draws())
    return {
        "steps": steps,
        "weights": training.gathered_weights(model),
        "draws": all_draws,
    }


def choices(case: dict[str, Any]) -> dict[str, bool]:
    """Return how a case's optimizer state is stored: sharded over ranks, offloaded."""
    return {
        "distributed": case["distributed"],
        "offload": case.get("offload", False),
    }


def moments(optimizer: Any) -> list[Any]:
    """Return copies of this rank's optimizer states."""
    return [
        {name: value.clone() for name, value in optimizer_part.optimizer.state[p].items()}
        for optimizer_part in optimizer.sub_optimizers
        for group in optimizer_part.optimizer.param_groups
        for p in group["params"]
    ]


def save_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Train, save a checkpoint, and train on without interruption."""
    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    # Every rank has random numbers of its own, which a resumed rank has to continue.
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    model = training.build(folder / case["model"], case, dtype=getattr(torch, case["dtype"]))
    optimizer = training.optimizer_of(model, case.get("ddp"), **choices(case))

    gathered_peak = LiveBytes()
    shards_peak = LiveBytes()
    background_save = None

    if case.get("untrained"):
        weights_before = training.gathered_weights(model)
        save_checkpoint(
            folder / case["to"],
            {"actor": TrainedRole(model, optimizer)},
            {**STATE, "step": 0},
        )
        weights_after = training.gathered_weights(model)
        for name, weight in weights_before.items():
            assert torch.equal(weight, weights_after[name]), f"a save changed {name}"
    else:
        for _ in range(BEFORE):
            training.train_step(model, optimizer, batch, case["budget"])
        draws()

        roles = {"actor": TrainedRole(model, optimizer)}
        with gathered_peak:
            save_checkpoint(folder / case["to"], roles, STATE)
        if case.get("shards"):
            with shards_peak:
                # Saving in the background continues while the steps below change the weights.
                background_save = save_checkpoint(
                    folder / case["shards"],
                    roles,
                    STATE,
                    layout=SAME,
                    in_background=True,
                )

    torch.save(
        moments(optimizer),
        folder / f"{case['name']}-moments-{dist.get_rank()}.pt",
    )
    for layout, name in ((ANY, "megatron"), (SAME, "buffers")):
        if name in case:
            save_for_megatron(
                folder / case["model"],
                folder / case[name],
                model,
                optimizer,
                layout,
            )

    result = continued(model, optimizer, batch, case)
    if background_save is not None:
        # The optimizer has stepped since: the checkpoint must contain the weights of the save.
        background_save.finish()
        result["bytes"] = {
            "any": gathered_peak.peak,
            "same": shards_peak.peak,
            "held": share_bytes(model, optimizer),
        }
    return result


def share_bytes(model: Any, optimizer: Any) -> int:
    """Return this rank's share of a checkpoint in bytes: its optimizer shards and its part of the weights."""
    weight_bytes = sum(p.numel() * p.element_size() for chunk in model.chunks for p in chunk.parameters())
    states = [value for state in moments(optimizer) for value in state.values()]
    groups = [
        group
        for optimizer_part in optimizer.sub_optimizers
        for group in optimizer_part.optimizer.param_groups
    ]
    masters = [p for group in groups for p in group["params"]]
    shard_bytes = sum(value.numel() * value.element_size() for value in (*states, *masters))
    return shard_bytes + weight_bytes // model.groups.layout.data


def save_for_megatron(
    source: Path,
    folder: Path,
    model: Any,
    optimizer: Any,
    optimizer_layout: str,
) -> None:
    """Save model and optimizer as Megatron-LM does, and write a model folder that points to them."""
    iteration_folder = folder / "iter_0000003"
    layout = model.groups.layout

    # The layout of the save: Megatron-LM's checkpoints contain it in their arguments.
    arguments = {
        **checkpoint_arguments(source)[0],
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
    if device.rank() == 0:
        iteration_folder.mkdir(parents=True)
        pointer = {
            "checkpoint": str(iteration_folder),
            "iteration": BEFORE,
            "arguments": arguments,
        }
        (folder / "megatron.json").write_text(json.dumps(pointer))
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())

    dist.barrier()
    with model.scope():
        state, _ = sharded_state(model, optimizer, is_loading=False, layout=optimizer_layout)
        states = merge(state.pop("optimizer_common").data, state.pop("optimizer"))
        # Megatron-LM calls the model's first chunk "model".
        names = {name: name.replace("chunk", "model") for name in state}
        saved = {names[name]: value for name, value in state.items()}
        write_tensors(
            iteration_folder,
            model,
            {
                **saved,
                "args": Namespace(**arguments),
                "iteration": 3,
                "optimizer": states,
            },
        )


def load_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into a model with random weights, and train on."""
    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    model = training.build(folder / case["model"], case, dtype=getattr(torch, case["dtype"]))
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad:  # a checkpoint has no base weights of adapters
                parameter.data.normal_()

    if case.get("weights_only"):
        meta = load_actor_weights(folder / case["from"], model)
        log_probs, _ = training.scores(model, batch, case["budget"])
        return {
            "weights": training.gathered_weights(model),
            "log_probs": log_probs,
            "meta": meta,
        }

    optimizer = training.optimizer_of(model, **choices(case))
    if "megatron" in case:
        load_weights(model, folder / case["megatron"])
        optimizer.reload_parameters()
        load_optimizer(optimizer, folder / case["megatron"])
        # Megatron-LM's checkpoint has no learning rate of ours: the schedule advances by the saved steps.
        optimizer.scheduler.step(BEFORE)
        state = {}
    else:
        state = load_checkpoint(folder / case["from"], {"actor": TrainedRole(model, optimizer)})

    if case.get("same"):
        # The layout is the saver's, so every rank finds the moments that it saved itself.
        saved_moments = torch.load(folder / f"{case['same']}-moments-{dist.get_rank()}.pt")
        for index, (actual, saved) in enumerate(zip(moments(optimizer), saved_moments, strict=True)):
            assert actual.keys() == saved.keys()
            for name, value in saved.items():
                difference = (actual[name] - value).abs().max()
                assert difference == 0, (
                    f"{name} of parameter {index} {tuple(value.shape)} differs by {difference}"
                )
    return {"state": state, **continued(model, optimizer, batch, case)}


def broken_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Save while the disk fails on all ranks, then on one; then save twice with a sound disk."""
    model = training.build(folder / case["model"], case)
    target = folder / case["to"]

    def failed_save_messages(module: Any, name: str, is_broken: bool) -> list[list[str]]:
        """Save while ``module.name`` fails on ranks with ``is_broken``; return all ranks' error messages."""
        original = getattr(module, name)
        messages = []

        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        setattr(module, name, full if is_broken else original)
        try:
            save_checkpoint(target, {"actor": TrainedRole(model, None)}, STATE)
        except RuntimeError as error:
            messages.append(str(error))

        setattr(module, name, original)
        all_messages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_messages, messages)
        return all_messages

    result: dict[str, Any] = {"messages": failed_save_messages(checkpoint, "write_meta", True)}
    result["unread"] = failed_save_messages(durable, "compute_digests", device.rank() == 1)
    result["there"] = target.exists()

    for step in (4, 5):
        save_checkpoint(target, {"actor": TrainedRole(model, None)}, {**STATE, "step": step})
    return {
        **result,
        "state": load_checkpoint(target, {"actor": TrainedRole(model, None)}),
    }


def wrong_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Load another model's checkpoint; return the error, and whether the weights stayed untouched."""
    model = training.build(folder / case["model"], case, dtype=getattr(torch, case["dtype"]))
    weights_before = training.gathered_weights(model)
    # A checkpoint may also be loaded without its optimizer.
    optimizer = None

    if case.get("distributed") is not None:
        optimizer = training.optimizer_of(model, distributed=case["distributed"])

    try:
        load_checkpoint(folder / case["from"], {"actor": TrainedRole(model, optimizer)})
    except UserError as error:
        message = str(error)
    else:
        message = ""

    weights_after = training.gathered_weights(model)
    return {
        "message": message,
        "untouched": all(torch.equal(weights_after[name], weights_before[name]) for name in weights_before),
    }


def main(folder: Path, plan: str) -> None:
    device.initialize(timeout=120)

    actions = {
        "save": save_case,
        "load": load_case,
        "wrong": wrong_case,
        "broken": broken_case,
    }
    for case in json.loads((folder / plan).read_text()):
        case = {"budget": 40, "dtype": "float32", "distributed": True, **case}
        result = actions[case["action"]](folder, case)
        if device.rank() == 0:
            torch.save(result, folder / f"{case['name']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
