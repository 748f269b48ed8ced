"""Save checkpoints in some layouts and load them in others.

    checkpoint_worker.py FOLDER PLAN

``PLAN`` is a JSON file in ``FOLDER`` with a list of cases; the result of a case goes to ``FOLDER/NAME.pt``.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
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

STEPS_BEFORE = 3
STEPS_AFTER = 2
"""Optimizer steps before and after the checkpoint."""
STATE = {
    "step": STEPS_BEFORE,
    "seed": 7,
    "position": {"epoch": 1, "row": 5},
    "buffer": torch.arange(5),
}


def next_random_numbers() -> list[float]:
    """Return the next number of every random generator of this rank."""
    return [
        random.random(),
        float(np.random.rand()),
        *torch.rand(2).tolist(),
        *next_tracker_numbers(),
    ]


def next_tracker_numbers() -> list[float]:
    """Return the next numbers of Megatron's generator for tensor-parallel ranks."""
    with device.megatron_mode():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return torch.rand(2).tolist()


def train_after_checkpoint(
    model: Any,
    optimizer: Any,
    batch: Any,
    case: dict[str, Any],
) -> dict[str, Any]:
    """Train `STEPS_AFTER` steps; return their metrics, the final weights and the ranks' random numbers."""
    metrics = []
    for _ in range(STEPS_AFTER):
        metrics.append(training.train_step(model, optimizer, batch, case["budget"]))

    # A resumed run has to draw the same numbers as an uninterrupted one, on every rank.
    random_numbers_by_rank = training.gather(next_random_numbers())
    return {
        "steps": metrics,
        "weights": training.gathered_weights(model),
        "draws": random_numbers_by_rank,
    }


def optimizer_config_values(case: dict[str, Any]) -> dict[str, bool]:
    """Return the case's settings of the optimizer state: whether it is sharded over ranks and offloaded."""
    return {
        "distributed": case["distributed"],
        "offload": case.get("offload", False),
    }


def param_groups(optimizer: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the optimizer state and the parameters of each param group of this rank."""
    for sub_optimizer in optimizer.sub_optimizers:
        for group in sub_optimizer.optimizer.param_groups:
            yield sub_optimizer.optimizer.state, group["params"]


def copy_moments(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """Return copies of this rank's optimizer states, one per parameter."""
    moments = []
    for state, params in param_groups(optimizer):
        for param in params:
            moments.append({name: value.clone() for name, value in state[param].items()})
    return moments


def count_saved_bytes(model: Any, optimizer: Any) -> int:
    """Return the bytes that this rank saves: its optimizer shards and its part of the weights."""
    num_bytes = 0
    for chunk in model.chunks:
        num_bytes += sum(param.nbytes for param in chunk.parameters())
    # Data-parallel replicas of the weights save a part each.
    num_bytes //= model.groups.layout.data

    # The optimizer's parameters are master weights, sharded as the moments are.
    for _, params in param_groups(optimizer):
        num_bytes += sum(param.nbytes for param in params)
    for state in copy_moments(optimizer):
        num_bytes += sum(value.nbytes for value in state.values())
    return num_bytes


def save_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Train, save a checkpoint, and train on without interruption."""
    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    # Every rank has random numbers of its own, which a resumed rank has to continue.
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())

    dtype = getattr(torch, case["dtype"])
    model = training.build(folder / case["model"], case, dtype=dtype)
    optimizer = training.build_optimizer(model, case.get("ddp"), **optimizer_config_values(case))
    roles = {"actor": TrainedRole(model, optimizer)}

    any_layout_memory = LiveBytes()
    same_layout_memory = LiveBytes()
    background_save = None
    if case.get("untrained"):
        save_untrained(folder / case["to"], model, optimizer)
    else:
        for _ in range(STEPS_BEFORE):
            training.train_step(model, optimizer, batch, case["budget"])
        next_random_numbers()

        with any_layout_memory:
            save_checkpoint(folder / case["to"], roles, STATE)
        if case.get("shards"):
            with same_layout_memory:
                # Saving in the background continues while the steps below change the weights.
                background_save = save_checkpoint(
                    folder / case["shards"],
                    roles,
                    STATE,
                    optimizer_format=SAME,
                    in_background=True,
                )

    # Checkpoints in other formats, and the moments, for the cases that load them.
    torch.save(copy_moments(optimizer), folder / f"{case['name']}-moments-{dist.get_rank()}.pt")
    for layout, name in ((ANY, "megatron"), (SAME, "buffers")):
        if name in case:
            save_for_megatron(folder / case["model"], folder / case[name], model, optimizer, layout)

    result = train_after_checkpoint(model, optimizer, batch, case)
    if background_save is not None:
        # The optimizer has stepped since: the checkpoint must contain the weights of the save.
        background_save.finish()
        result["bytes"] = {
            "any": any_layout_memory.peak,
            "same": same_layout_memory.peak,
            "held": count_saved_bytes(model, optimizer),
        }
    return result


def save_untrained(folder: Path, model: Any, optimizer: Any) -> None:
    """Save a checkpoint before the first step, and check that it leaves the weights unchanged."""
    weights_before = training.gathered_weights(model)
    roles = {"actor": TrainedRole(model, optimizer)}
    save_checkpoint(folder, roles, {**STATE, "step": 0})

    weights_after = training.gathered_weights(model)
    for name, weight in weights_before.items():
        assert torch.equal(weight, weights_after[name]), f"a save changed {name}"


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
            "iteration": STEPS_BEFORE,
            "arguments": arguments,
        }
        (folder / "megatron.json").write_text(json.dumps(pointer))
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())

    dist.barrier()
    with model.scope():
        state, _ = sharded_state(model, optimizer, is_loading=False, optimizer_format=optimizer_layout)
        # This package stores the optimizer's replicated state separately; Megatron-LM has one entry.
        optimizer_state = merge(state.pop("optimizer_common").data, state.pop("optimizer"))
        # Megatron-LM calls the model's first chunk "model".
        saved = {name.replace("chunk", "model"): value for name, value in state.items()}
        saved |= {
            "args": Namespace(**arguments),
            "iteration": 3,
            "optimizer": optimizer_state,
        }
        write_tensors(iteration_folder, model, saved)


def load_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint into a model with random weights, and train on."""
    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    dtype = getattr(torch, case["dtype"])
    model = training.build(folder / case["model"], case, dtype=dtype)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            # A checkpoint has no base weights of adapters, so these stay.
            if parameter.requires_grad:
                parameter.data.normal_()

    if case.get("weights_only"):
        meta = load_actor_weights(folder / case["from"], model)
        log_probs, _ = training.compute_log_probs(model, batch, case["budget"])
        return {
            "weights": training.gathered_weights(model),
            "log_probs": log_probs,
            "meta": meta,
        }

    optimizer = training.build_optimizer(model, **optimizer_config_values(case))
    if "megatron" in case:
        # Megatron-LM's weights are loaded before the optimizer, whose master weights are copies.
        load_weights(model, folder / case["megatron"])
        optimizer.reload_parameters()
        load_optimizer(optimizer, folder / case["megatron"])
        # Megatron-LM's checkpoint has no learning rate of ours: the schedule advances by the saved steps.
        optimizer.scheduler.step(STEPS_BEFORE)
        state = {}
    else:
        state = load_checkpoint(folder / case["from"], {"actor": TrainedRole(model, optimizer)})

    if case.get("same"):
        # The layout is the saver's, so every rank finds the moments that it saved itself.
        saved_moments = torch.load(folder / f"{case['same']}-moments-{dist.get_rank()}.pt")
        check_moments(copy_moments(optimizer), saved_moments)
    return {
        "state": state,
        **train_after_checkpoint(model, optimizer, batch, case),
    }


def check_moments(loaded: list[Any], saved: list[Any]) -> None:
    """Check that loaded optimizer states equal the saved ones, parameter by parameter."""
    for index, (loaded_state, saved_state) in enumerate(zip(loaded, saved, strict=True)):
        assert loaded_state.keys() == saved_state.keys()
        for name, value in saved_state.items():
            difference = (loaded_state[name] - value).abs().max()
            description = f"{name} of parameter {index} {tuple(value.shape)}"
            assert difference == 0, f"{description} differs by {difference}"


def save_with_failure(
    folder: Path,
    model: Any,
    module: Any,
    name: str,
    fails_here: bool,
) -> list[list[str]]:
    """Save while ``module.name`` fails on ranks with ``fails_here``; return every rank's error messages."""
    original = getattr(module, name)

    def raise_disk_full(*_: Any) -> None:
        raise OSError("no space left on device")

    if fails_here:
        setattr(module, name, raise_disk_full)
    messages = []
    try:
        save_checkpoint(folder, {"actor": TrainedRole(model, None)}, STATE)
    except RuntimeError as error:
        messages.append(str(error))

    setattr(module, name, original)
    return training.gather(messages)


def broken_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Save while the disk fails on all ranks, then on one; then save twice without a failure."""
    model = training.build(folder / case["model"], case)
    target = folder / case["to"]
    roles = {"actor": TrainedRole(model, None)}

    meta_messages = save_with_failure(target, model, checkpoint, "write_meta", True)
    is_second_rank = device.rank() == 1
    digest_messages = save_with_failure(target, model, durable, "compute_digests", is_second_rank)
    target_exists = target.exists()

    # A failed save must leave nothing that keeps a later one from its folder.
    for step in (4, 5):
        save_checkpoint(target, roles, {**STATE, "step": step})
    return {
        "messages": meta_messages,
        "unread": digest_messages,
        "there": target_exists,
        "state": load_checkpoint(target, roles),
    }


def wrong_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Load another model's checkpoint; return the error, and whether the weights stayed untouched."""
    dtype = getattr(torch, case["dtype"])
    model = training.build(folder / case["model"], case, dtype=dtype)
    weights_before = training.gathered_weights(model)
    # A checkpoint may also be loaded without its optimizer.
    optimizer = None

    if case.get("distributed") is not None:
        optimizer = training.build_optimizer(model, distributed=case["distributed"])

    try:
        load_checkpoint(folder / case["from"], {"actor": TrainedRole(model, optimizer)})
    except UserError as error:
        message = str(error)
    else:
        message = ""

    weights_after = training.gathered_weights(model)
    is_unchanged = all(torch.equal(weights_after[name], weight) for name, weight in weights_before.items())
    return {
        "message": message,
        "untouched": is_unchanged,
    }


def main(folder: Path, plan: str) -> None:
    device.initialize(timeout=120)

    actions = {
        "save": save_case,
        "load": load_case,
        "wrong": wrong_case,
        "broken": broken_case,
    }
    defaults = {
        "budget": 40,
        "dtype": "float32",
        "distributed": True,
    }
    for case_values in json.loads((folder / plan).read_text()):
        case = {**defaults, **case_values}
        # Every rank takes part in a case; one rank writes its result.
        result = actions[case["action"]](folder, case)
        if device.rank() == 0:
            torch.save(result, folder / f"{case['name']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
