"""LoRA adapters in PEFT's format: tensor names, initial values, and the checksum of the base model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_rl.config.sections.models import LoraConfig
from megatron_rl.distributed import device
from megatron_rl.distributed.exchange import run_on_all_ranks_or_raise
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import compute_fingerprint
from megatron_rl.megatron.lora import adapter_boxes, attach_adapters
from megatron_rl.megatron.model import ParallelModel
from megatron_rl.shapes.lora import PEFT_PREFIX, PEFT_WEIGHTS
from megatron_rl.types import TensorBox


def add_adapters(
    model: ParallelModel,
    config: LoraConfig,
    seed: int,
    *,
    trainable: bool,
) -> None:
    """Attach adapters to a model, with initial weights from the PEFT folder ``config.path``, if set.

    Adapters without stored weights are initialised with new values, which depend on ``seed``.
    """
    initial_weights = None
    if config.path is not None:
        initial_weights = CheckpointFiles(config.path, PEFT_WEIGHTS)
    attach_adapters(model, config, seed, trainable=trainable, initial=initial_weights)


def record_base_checksum(model: ParallelModel, path: str | Path) -> None:
    """Compute the checksum of the base model in the folder ``path``, and store it in ``model.adapters``.

    Only the first rank reads the files. Collective over the model's ranks.
    """
    assert model.adapters is not None
    dtype = model.transformer_config.params_dtype
    is_reader = device.rank() == model.groups.layout.ranks[0]

    def read_checksum() -> str | None:
        if is_reader:
            return compute_fingerprint(path, dtype)
        return None

    # The call is collective, so every rank must run it; only the first rank has a result.
    checksums = run_on_all_ranks_or_raise(
        read_checksum,
        "read the model's weights",
        model.groups.all,
    )
    model.adapters = replace(model.adapters, base=checksums[0])


def peft_boxes(model: ParallelModel) -> list[TensorBox]:
    """Return the boxes of the model's adapters, with the tensor names in PEFT's files."""
    return [replace(box, name=PEFT_PREFIX + box.name) for box in adapter_boxes(model)]
