"""Save in some layouts, load in others; write what came out. ``checkpoint_worker.py FOLDER PLAN``."""

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
from megatron_rl.checkpoint.megatron_lm import checkpoint_arguments, load_optimizer
from megatron_rl.checkpoint.roles import TrainedRole, load, load_model, save
from megatron_rl.checkpoint.tensors import sharded_state
from megatron_rl.config.checkpoint_meta import ANY, SAME
from megatron_rl.distributed import device
from megatron_rl.errors import UserError
from megatron_rl.hf.weights import load_weights

sys.path.insert(0, str(Path(__file__).parent))
import training

# optimizer steps before and after the checkpoint
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
    return [random.random(), float(np.random.rand()), *torch.rand(2).tolist(), *tracker()]


def tracker() -> list[float]:
    with device.megatron_mode():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return torch.rand(2).tolist()


def continued(model: Any, optimizer: Any, batch: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the steps after the checkpoint, the weights at their end, and this rank's random numbers."""
    steps = [training.train_step(model, optimizer, batch, case["budget"]) for _ in range(AFTER)]
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, draws())
    return {
        "steps": steps,
        "weights": training.gathered_weights(model),
        "draws": numbers,
    }


def choices(case: dict[str, Any]) -> dict[str, bool]:
    """Return where a case keeps its optimizer's state."""
    return {"distributed": case["distributed"], "offload": case.get("offload", False)}


def moments(optimizer: Any) -> list[Any]:
    """Return a copy of this rank's optimizer states."""
    return [
        {name: value.clone() for name, value in part.optimizer.state[p].items()}
        for part in optimizer.parts
        for group in part.optimizer.param_groups
        for p in group["params"]
    ]


def save_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and train on without interruption."""
    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    model = training.build(folder / case["model"], case, dtype=getattr(torch, case["dtype"]))
    optimizer = training.optimizer_of(model, case.get("ddp"), **choices(case))

    gathered = LiveBytes()
    shards = LiveBytes()
    saving = None

    if case.get("untrained"):
        before = training.gathered_weights(model)
        save(folder / case["to"], {"actor": TrainedRole(model, optimizer)}, {**STATE, "step": 0})
        after = training.gathered_weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before), "a save changed the weights"
    else:
        for _ in range(BEFORE):
            training.train_step(model, optimizer, batch, case["budget"])
        draws()
        parts = {"actor": TrainedRole(model, optimizer)}
        with gathered:
            save(folder / case["to"], parts, STATE)
        if case.get("shards"):
            with shards:
                saving = save(folder / case["shards"], parts, STATE, layout=SAME, in_background=True)

    torch.save(moments(optimizer), folder / f"{case['name']}-moments-{dist.get_rank()}.pt")
    for layout, name in ((ANY, "megatron"), (SAME, "buffers")):
        if name in case:
            save_for_megatron(folder / case["model"], folder / case[name], model, optimizer, layout)

    result = continued(model, optimizer, batch, case)
    if saving is not None:
        saving.finish()  # the weights have changed meanwhile
        result["bytes"] = {
            "any": gathered.peak,
            "same": shards.peak,
            "held": held_bytes(model, optimizer),
        }
    return result


def held_bytes(model: Any, optimizer: Any) -> int:
    """Return the bytes of this rank's share of a checkpoint: its shards, and of the weights."""
    weights = sum(p.numel() * p.element_size() for chunk in model.chunks for p in chunk.parameters())
    states = [value for state in moments(optimizer) for value in state.values()]
    groups = [group for part in optimizer.parts for group in part.optimizer.param_groups]
    masters = [p for group in groups for p in group["params"]]
    shards = sum(value.numel() * value.element_size() for value in (*states, *masters))
    return shards + weights // model.groups.layout.data


def save_for_megatron(
    source: Path,
    folder: Path,
    model: Any,
    optimizer: Any,
    optimizer_layout: str,
) -> None:
    """Write model and optimizer as Megatron-LM saves them, and a model's folder that points there."""
    place = folder / "iter_0000003"
    layout = model.groups.layout

    arguments = {
        **checkpoint_arguments(source)[0],
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
    if device.rank() == 0:
        place.mkdir(parents=True)
        pointer = {
            "checkpoint": str(place),
            "iteration": BEFORE,
            "arguments": arguments,
        }
        (folder / "megatron.json").write_text(json.dumps(pointer))
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())

    dist.barrier()
    with model.scope():
        state, _ = sharded_state(model, optimizer, is_loading=False, layout=optimizer_layout)
        states = merge(state.pop("optimizer_common").data, state.pop("optimizer"))
        names = {name: name.replace("chunk", "model") for name in state}
        saved = {names[name]: value for name, value in state.items()}
        write_tensors(
            place,
            model,
            {
                **saved,
                "args": Namespace(**arguments),
                "iteration": 3,
                "optimizer": states,
            },
        )


def load_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Resume in another process's place, from weights that are wrong before the load."""
    batch = torch.load(folder / case["model"] / "batch.pt", weights_only=False)
    model = training.build(folder / case["model"], case, dtype=getattr(torch, case["dtype"]))
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad:  # the base of adapters is not in the checkpoint
                parameter.data.normal_()

    if case.get("weights_only"):
        meta = load_model(folder / case["from"], model)
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
        optimizer.scheduler.step(BEFORE)
        state = {}
    else:
        state = load(folder / case["from"], {"actor": TrainedRole(model, optimizer)})

    same = folder / f"{case.get('same', '')}-moments-{dist.get_rank()}.pt"
    if case.get("same"):
        for index, (mine, saved) in enumerate(zip(moments(optimizer), torch.load(same), strict=True)):
            assert mine.keys() == saved.keys()
            for name, value in saved.items():
                difference = (mine[name] - value).abs().max()
                assert difference == 0, (
                    f"{name} of parameter {index} {tuple(value.shape)} differs by {difference}"
                )
    return {"state": state, **continued(model, optimizer, batch, case)}


def broken_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Save with a disk that fails, on all ranks and then on one, then on a sound one, twice."""
    model = training.build(folder / case["model"], case)
    target = folder / case["to"]

    def refusals(module: Any, name: str, broken: bool) -> list[list[str]]:
        """Return what each rank says of a save in which a function fails on the ranks that are ``broken``."""
        sound = getattr(module, name)
        messages = []

        def full(*_: Any) -> None:
            raise OSError("no space left on device")

        setattr(module, name, full if broken else sound)
        try:
            save(target, {"actor": TrainedRole(model, None)}, STATE)
        except RuntimeError as error:
            messages.append(str(error))

        setattr(module, name, sound)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, messages)
        return found

    result: dict[str, Any] = {"messages": refusals(checkpoint, "write_meta", True)}
    result["unread"] = refusals(durable, "digests", device.rank() == 1)
    result["there"] = target.exists()

    for step in (4, 5):
        save(target, {"actor": TrainedRole(model, None)}, {**STATE, "step": step})
    return {**result, "state": load(target, {"actor": TrainedRole(model, None)})}


def wrong_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint of another model: the message, and whether the weights stayed untouched."""
    model = training.build(folder / case["model"], case, dtype=getattr(torch, case["dtype"]))
    before = training.gathered_weights(model)
    optimizer = None

    if case.get("distributed") is not None:
        optimizer = training.optimizer_of(model, distributed=case["distributed"])

    try:
        load(folder / case["from"], {"actor": TrainedRole(model, optimizer)})
    except UserError as error:
        message = str(error)
    else:
        message = ""

    after = training.gathered_weights(model)
    return {"message": message, "untouched": all(torch.equal(after[name], before[name]) for name in before)}


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
