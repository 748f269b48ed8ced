"""Ranks of test_hf_layouts.py: load, score and export every family in many layouts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_rl.distributed import device
from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.errors import UserError
from megatron_rl.hf.export import export_model
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.hf.weights import load_weights, source_boxes
from megatron_rl.megatron.model import build_model, live_parameters
from megatron_rl.megatron.schedule import forward_only
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.types import split_rows
from megatron_rl.weights.boxes import view_of
from tests.hf_models import make_model

# Family, sizes of the layout, overrides of Megatron's settings. Every family and every axis occurs.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen2", {"tensor": 2, "pipeline": 2}, {}),
    (
        "qwen2-tied",
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
        {},
    ),
    ("qwen3-tied", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    ("llama3", {"tensor": 2}, {}),
    ("qwen3", {"tensor": 4}, {}),  # two ranks share a key-value head
    (
        "gemma3",
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
        {},
    ),
    ("llama-bias", {"tensor": 2, "sequence_parallel": True}, {}),
    ("mistral", {"pipeline": 4}, {}),
    (
        "qwen3",
        {"tensor": 2, "pipeline": 2},
        {
            "num_layers_in_first_pipeline_stage": 1,
            "num_layers_in_last_pipeline_stage": 3,
        },
    ),
    ("mixtral", {"tensor": 2, "pipeline": 2, "expert_tensor": 2}, {}),
    ("qwen3-moe", {"expert": 4}, {}),
    (
        "mixtral",
        {
            "tensor": 2,
            "expert": 2,
            "expert_tensor": 2,
            "sequence_parallel": True,
        },
        {},
    ),
    ("phi3", {"tensor": 4}, {}),
    (
        "qwen3-5",
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
        {},
    ),
    ("qwen3-5", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    (
        "qwen3-5-moe",
        {"tensor": 2, "expert": 4, "sequence_parallel": True},
        {},
    ),
    (
        "qwen3-next",
        {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "sequence_parallel": True,
        },
        {},
    ),
    ("gemma2", {"tensor": 2, "pipeline": 2}, {}),
    (
        "gpt-oss",
        {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "sequence_parallel": True,
        },
        {},
    ),
    (
        "glm4-moe",
        {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "sequence_parallel": True,
        },
        {},
    ),
    ("qwen3-moe", {"context": 2, "expert": 2}, {}),
    ("deepseek-v3", {"context": 2, "pipeline": 2}, {}),
    ("gemma3", {"context": 4}, {}),
    (
        "gemma4",
        {"tensor": 4, "sequence_parallel": True},
        {},
    ),  # ranks share key-value heads of both kinds
    ("deepseek-v2", {"pipeline": 4}, {}),
    (
        "moonlight",
        {"tensor": 2, "expert": 4, "sequence_parallel": True},
        {},
    ),
    (
        "deepseek-v3",
        {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "sequence_parallel": True,
        },
        {},
    ),
    (
        "qwen3-moe",
        {
            "tensor": 2,
            "expert": 2,
            "pipeline": 2,
            "sequence_parallel": True,
        },
        {},
    ),
]


@dataclass(frozen=True)
class Rows:
    """Ragged rows of a scoring pass: tokens [N], lengths [B] and temperatures [B]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    temperature: torch.Tensor


def make_rows() -> Rows:
    """Return eight rows of different lengths, equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([37, 5, 21, 12, 2, 30, 16, 9])
    tokens = torch.randint(0, 131, (int(lengths.sum()),), generator=generator)
    # One temperature for all rows, which the reference applies by hand.
    return Rows(tokens, lengths, torch.full((len(lengths),), 0.7))


def reference_log_probs(model: Any, rows: Rows) -> list[torch.Tensor]:
    """Return transformers' log-probs of each row, with a zero for its first token."""
    result = []
    for row in split_rows(rows.tokens, rows.lengths):
        with torch.no_grad():
            logits = model(row[None]).logits[0, :-1] / 0.7
        values = logits.log_softmax(1).gather(1, row[1:, None])[:, 0]
        result.append(torch.cat((torch.zeros(1), values)))
    return result


def check_scores(model: Any, family: str) -> None:
    """Check that the log-probs of every row equal transformers'."""
    rows = make_rows()
    expected = reference_log_probs(make_model(family), rows)
    scores = forward_only(model, rows, 64, torch.ones(len(rows.tokens), dtype=torch.bool))
    if device.rank() in model.groups.layout.output_ranks():
        assert any(micro_batch.rows for micro_batch in scores)

    for micro_batch in scores:
        for row, values in zip(
            micro_batch.rows,
            micro_batch.outputs[0].split(rows.lengths[list(micro_batch.rows)].tolist()),
            strict=True,
        ):
            torch.testing.assert_close(values, expected[row], atol=1e-4, rtol=0)


def check_loading(model: Any, folder: Path) -> None:
    """Check that replicas of a parameter read each byte of it once together, and all get its exact bits.

    Each rank reads as much as the others of its group, up to one dense and one expert parameter.
    """
    read = CheckpointFiles.read
    bytes_read = [0]

    def counted(files: CheckpointFiles, *box: Any) -> torch.Tensor:
        values = read(files, *box)
        bytes_read[0] += values.nbytes
        return values

    parameters = live_parameters(model)
    files = CheckpointFiles(folder)
    # A parameter that loading leaves out stays NaN.
    for parameter in parameters.values():
        parameter.fill_(torch.nan)

    setattr(CheckpointFiles, "read", counted)
    load_weights(model, folder)
    setattr(CheckpointFiles, "read", read)

    expected_bytes = 0.0
    for box in source_boxes(model):
        values = files.read(box.name, box.start, box.size)
        group = model.groups.expert_data if ".experts." in box.storage else model.groups.data_context
        expected_bytes += values.nbytes / group.size()
        assert torch.equal(view_of(parameters[box.storage], box), values), box

    assert bytes_read[0] <= expected_bytes + 2 * max(parameter.nbytes for parameter in parameters.values()), (
        bytes_read,
        expected_bytes,
    )
    # Over all ranks the bytes are exact: nothing is read twice.
    totals = torch.tensor([bytes_read[0], expected_bytes], dtype=torch.float64)
    dist.all_reduce(totals)
    assert round(totals[0].item()) == round(totals[1].item()), totals


def check_round_trip(model: Any, first: Path, second: Path) -> None:
    """Check that an exported checkpoint has the loaded one's bits, and that transformers loads it."""
    # Small files and pieces, so that tensors are split over several of both.
    export_model(model, second, first, file_bytes=60_000, slice_bytes=9_000)
    if device.rank() == 0:
        before = CheckpointFiles(first)
        after = CheckpointFiles(second)
        assert before.names() == after.names(), before.names() ^ after.names()

        for name in before.names():
            shape = before.shape(name)
            start = [0] * len(shape)
            assert torch.equal(
                before.read(name, start, shape),
                after.read(name, start, shape),
            ), name

        reloaded = AutoModelForCausalLM.from_pretrained(second).state_dict()
        for name, value in AutoModelForCausalLM.from_pretrained(first).state_dict().items():
            assert torch.equal(reloaded[name], value), name
    dist.barrier()


def check_padding(model: Any) -> None:
    """Check that the rows that pad the vocabulary are zero."""
    if model.spec.gpt_kwargs["vocab_size"] == model.spec.model.shape.vocab:
        return
    # Padding is at the end of the vocabulary, so it belongs to the last tensor-parallel rank.
    if model.groups.coordinates.tensor == model.groups.layout.tensor - 1:
        for chunk in model.chunks:
            if chunk.pre_process:
                assert not chunk.embedding.word_embeddings.weight[-1].any()


def check_refusals(root: Path) -> None:
    """Check that every rank fails if the export's folder exists or one rank cannot read its file."""
    config = make_model("qwen2").config
    model = build_model(
        config,
        ParallelGroups(ParallelLayout((0, 1, 2, 3), tensor=2)),
        dtype=torch.float32,
    )
    try:
        load_weights(model, root / ("qwen2" if device.rank() != 3 else "nowhere"))
    except UserError as error:
        assert "no safetensors" in str(error) and "nowhere" in str(error), error
    else:
        raise AssertionError("weights that one rank could not read were loaded")

    # The failed load has left the groups usable.
    load_weights(model, root / "qwen2")
    try:
        export_model(model, root / "qwen2")
    except UserError as error:
        assert "exists" in str(error), error
    else:
        raise AssertionError("an existing checkpoint was overwritten")


def main(root: Path) -> None:
    device.initialize(timeout=120)
    # Without further arguments all cases run.

    selected = [int(argument) for argument in sys.argv[2:]]
    for number, (family, sizes, overrides) in enumerate(CASES):
        if selected and number not in selected:
            continue

        layout = ParallelLayout(tuple(range(4)), **sizes)
        config = make_model(family).config
        model = build_model(
            config,
            ParallelGroups(layout),
            dtype=torch.float32,
            overrides=overrides,
        )
        check_loading(model, root / family)
        check_padding(model)

        check_round_trip(model, root / family, root / f"again{number}")
        check_scores(model, family)
        if device.rank() == 0:
            print("case", family, sizes, "ok", flush=True)

    check_refusals(root)
    if device.rank() == 0:
        print("all cases", len(CASES), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
