"""The same weights and the same rows give the same numbers and the same step in every parallel layout."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.shapes.layer_weights import is_buffer
from megatron_rl.shapes.layout import ParallelLayout, trainer_problems
from megatron_rl.shapes.pretrained import parse_pretrained
from tests.hf_models import FAMILIES, config_of, save_model, use_epsilon_of_config
from tests.representatives import LAYERS

sys.path.insert(0, str(Path(__file__).parent))
from models import make_batch, reference_log_probs

WORKER = Path(__file__).parent / "workers" / "layout_worker.py"
RANKS = 4
WIDE, NARROW = 1000, 30
"""Tokens of a micro-batch: all rows of a data-parallel rank, or one or two rows."""
SP, VPP = {"sequence_parallel": True}, {"virtual_pipeline": 2}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
DENSE: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "pipeline": 2}, {"context": 4}, {"tensor": 2, **SP, **FULL, "budget": NARROW},
    {"pipeline": 2, **VPP, "budget": NARROW}, {"tensor": 2, "context": 2, **SP}, {"pipeline": 4, **SELECTIVE},
    {"tensor": 4, **SP}, {"budget": NARROW}, {"tensor": 2, "pipeline": 2, **VPP, **SP, **FULL},
    {"pipeline": 2, "context": 2, **FULL}, {"tensor": 2, "pipeline": 2, **SP, **SELECTIVE}, {"tensor": 4},
    {"tensor": 2, "context": 2, "budget": NARROW}, {"pipeline": 2, "budget": NARROW},
)  # fmt: skip
SPARSE: tuple[dict[str, Any], ...] = (
    {"tensor": 2, **SP},  # each tensor rank sends its own tokens to whole experts
    {"tensor": 2, "expert": 2, "pipeline": 2, **SP, **FULL}, {"context": 2, "expert": 4},
    {"tensor": 2, "expert_tensor": 2, **SP}, {"expert": 2, "pipeline": 2, **VPP, "budget": NARROW},
    {"tensor": 2, "expert": 4, **SP, **SELECTIVE}, {"expert": 4}, {"pipeline": 4, **FULL},
    {"tensor": 2, "expert": 2, **SP}, {"expert": 2, "budget": NARROW}, {"tensor": 2, "context": 2, **SP},
    {"tensor": 2, "expert": 2, "expert_tensor": 2, **SP},
)  # fmt: skip
SIZES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
PROVIDED: tuple[dict[str, Any], ...] = tuple(
    {"model": family, "budget": WIDE, "name": f"{family}-{name}", "provider": name, **layout}
    for name, family, layout in (
        ("older", "qwen2", {"tensor": 2, "pipeline": 2, **SP}),
        ("renamed", "qwen2", {"tensor": 2, **FULL}),
        ("gpt_builder", "qwen3-tied", {"tensor": 2, "pipeline": 2, **VPP, **SP}),
        ("gpt_builder", "qwen3-moe", {"tensor": 2, "expert": 2, "pipeline": 2, **SP}),
    )
)
"""Models that a user's own code builds."""
TOLERANCES = {"log_probs": 2e-5, "entropy": 2e-5, "values": 2e-5, "gradients": 1e-4}
"""Float32 sums in another order: rounding of 6e-8 of each term, grown by four layers and 200 tokens."""
GROWN: Mapping[str, float] = {"gemma3": 4.0, "qwen3-5": 4.0, "qwen3-5-moe": 10.0, "qwen3-next": 4.0}
"""Where it grows more: transformers' log-probs of Gemma 3 differ by 6e-5 between float32 and float64, those
of Qwen3.5 by up to 5e-5, with experts 9e-5, if each weight moves by up to half the distance between float32
numbers. A reference in float32 may be as far on the other side, and which sums a processor's kernels take
decides: of the same tests, one machine had 7e-5 and another 1e-4."""


def case(family: str, **sizes: Any) -> dict[str, Any]:
    """Return one case of the worker; its name says the layout."""
    words = "-".join(f"{name}{value}" for name, value in sizes.items())
    return {"budget": WIDE, **sizes, "name": f"{family}-{words or 'alone'}", "model": family}


def sparse(family: str) -> bool:
    """Return whether a tiny model has experts; the multimodal ones of tests with ranks have none."""
    if family not in FAMILIES:
        return False
    config = config_of(family).to_dict()
    return any(config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))


def fitting(family: str, layouts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the layouts in which a tiny model can be trained."""
    shape = parse_pretrained(config_of(family).to_dict()).shape

    def problems(layout: dict[str, Any]) -> list[Any]:
        sizes = {name: size for name, size in layout.items() if name in SIZES}
        return trainer_problems(shape, ParallelLayout(tuple(range(RANKS)), **sizes))

    return [layout for layout in layouts if not problems(layout)]


def listed(family: str) -> list[dict[str, Any]]:
    """Return a family's cases of `DENSE` or `SPARSE`."""
    return [case(family, **layout) for layout in fitting(family, SPARSE if sparse(family) else DENSE)]


def suite_cases() -> list[dict[str, Any]]:
    """Return the cases of the suite: each layout in the family with layers of its own that has the fewest.

    Other families, and all products of sizes in `every_layout`, are campaign cases.
    """
    counts = Counter(dict.fromkeys(LAYERS, 0))
    cases: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    for family in LAYERS:
        for entry in listed(family):
            cases.setdefault(layout_key(entry), []).append(entry)
    selected = []
    # A layout that few families fit is assigned first.
    for entries in sorted(cases.values(), key=len):
        entry = min(entries, key=lambda entry: counts[entry["model"]])
        counts[entry["model"]] += 1
        selected.append(entry)
    return selected


def layout_key(entry: Mapping[str, Any]) -> tuple[bool, str]:
    """Return a case's list of layouts and its layout there."""
    return sparse(entry["model"]), entry["name"].removeprefix(entry["model"])


def every_layout(family: str) -> Iterator[dict[str, Any]]:
    """Yield a case for each product of parallel sizes on `RANKS` ranks that the tiny model divides by."""
    experts = (1, 2, 4) if sparse(family) else (1,)
    sizes = product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4), experts, experts[:2], (False, True))
    for tensor, pipeline, virtual, context, expert, expert_tensor, sequence in sizes:
        fits = RANKS % (tensor * pipeline * context) == 0 == RANKS % (expert * expert_tensor * pipeline)
        # Megatron trains experts on tensor-parallel ranks with sequence parallelism alone.
        sequences = tensor > 1 if sequence else tensor == 1 or not sparse(family)
        if not (fits and sequences and (virtual == 1 or pipeline == 2) and expert_tensor <= tensor):
            continue
        chosen = (tensor, pipeline, virtual, context, expert, expert_tensor)
        layout = {name: size for name, size in zip(SIZES, chosen, strict=True) if size > 1}
        for recompute in ("none", "full", "selective"):
            if fitting(family, [layout]):
                yield case(family, **layout, **(SP if sequence else {}), recompute=recompute)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save every family's tiny model with a batch that exercises every term of the loss."""
    path = tmp_path_factory.mktemp("layouts")
    for family in FAMILIES:
        model = save_model(family, path / family)
        torch.manual_seed(3)
        torch.save(make_batch(model, truncated=family == "llama"), path / family / "batch.pt")
    return path


def run(fork: Any, folder: Path, ranks: int, cases: list[dict[str, Any]], **options: Any) -> None:
    (folder / f"plan{ranks}.json").write_text(json.dumps(cases))
    fork(WORKER, ranks, folder, f"plan{ranks}.json", timeout=500, **options)


def test_the_step_of_every_tensor_is_that_of_one_rank_in_every_layout(folder: Path, fork: Any) -> None:
    run(fork, folder, 1, [case(family) for family in FAMILIES])
    cases = [*suite_cases(), *PROVIDED]
    run(fork, folder, RANKS, cases)
    wrong = [words for entry in cases for words in differences(folder, entry)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_of_a_family_is_that_of_one_rank_in_its_other_layouts(
    folder: Path, fork: Any, family: str
) -> None:
    run(fork, folder, 1, [case(family)])
    suite = {entry["name"] for entry in suite_cases()}
    cases = [entry for entry in listed(family) if entry["name"] not in suite]
    run(fork, folder, RANKS, cases)
    wrong = [words for entry in cases for words in differences(folder, entry)]
    assert not wrong, "\n".join(wrong)


def test_the_suite_has_every_layout_of_both_lists() -> None:
    assert len(set(map(layout_key, suite_cases()))) == len(DENSE) + len(SPARSE)


def differences(folder: Path, entry: Mapping[str, Any], fused: bool = False) -> list[str]:
    """Describe the numbers of a case that differ from one rank's by more than rounding."""
    cut = torch.load(folder / f"{entry['name']}.pt", weights_only=False)
    if cut["fused"] != fused:
        return [f"{entry['name']}: its layers are {'plain' if fused else 'fused'} ones"]
    alone = torch.load(folder / f"{entry['model']}-alone.pt", weights_only=False)
    found: dict[tuple[str, str], float] = {}
    for name in ("log_probs", "entropy"):
        found[name, ""] = float((cut[name] - alone[name]).nan_to_num(nan=torch.inf).abs().max())
    assert cut["values"].keys() == alone["values"].keys()
    assert cut["steps"].keys() == alone["steps"].keys()
    for name, value in alone["values"].items():
        found["values", name] = abs(cut["values"][name] - value) / max(1.0, abs(value))
    for name, step in alone["steps"].items():
        difference = (cut["steps"][name] - step).nan_to_num(nan=torch.inf).norm()
        found["gradients", name] = float(difference / step.norm().clamp(min=1e-4))
    return [
        f"{entry['name']}: {kind} {name} differs by {value:.1e}"
        for (kind, name), value in found.items()
        if not value < TOLERANCES[kind] * GROWN.get(entry["model"], 1.0)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(folder: Path, family: str) -> None:
    saved = folder / f"{case(family)['name']}.pt"
    if not saved.exists():
        pytest.fail("the single-process run left no result")
    found = torch.load(saved, weights_only=False)
    batch = torch.load(folder / family / "batch.pt", weights_only=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder / family, dtype=torch.float32, attn_implementation="eager"
    )
    use_epsilon_of_config(model)
    expected = reference_log_probs(
        model, batch.tokens, batch.lengths, batch.temperature, batch.support_sizes, batch.support
    )
    difference = (found["log_probs"] - expected)[batch.response_mask].abs().max()
    grown = GROWN.get(family, 1.0)
    assert difference < TOLERANCES["log_probs"] * grown
    still = [name for name, step in found["steps"].items() if not step.any()]
    assert not [name for name in still if not is_buffer(name)], "the step must move every weight"
    assert 0.05 < found["values"]["policy/clip_fraction"] < 0.95, (
        "the batch must reach the clipped part of the loss"
    )


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}
SGD = {"name": "sgd", "distributed": False, "learning_rate": 1e-2, "megatron": {"sgd_momentum": 0.5}}


def test_overlapped_communication_gives_the_same_weights(folder: Path, fork: Any) -> None:
    """Gradients are reduced during the backward pass, and weights gathered during the forward pass."""
    cases = []
    for family, layout in (("qwen2", {"pipeline": 2, **VPP, "budget": NARROW}), ("qwen3-moe", {"expert": 2})):
        plain = {**case(family, **layout), "updates": 3, "name": f"{family}-plain"}
        cases += [plain, {**plain, "name": f"{family}-overlapped", "ddp": OVERLAP}]
    sgd = {**cases[0], "name": "sgd", "optimizer": SGD}
    run(fork, folder, RANKS, [*cases, sgd])
    read = {entry["name"]: torch.load(folder / f"{entry['name']}.pt", weights_only=False) for entry in cases}
    for plain, overlapped in (cases[:2], cases[2:]):
        expected, found = read[plain["name"]], read[overlapped["name"]]
        # Buckets of another size add the gradient's norm up in another order.
        assert found["values"] == pytest.approx(expected["values"], rel=1e-5, abs=1e-5)
        for name, step in expected["steps"].items():
            assert float((found["steps"][name] - step).norm() / step.norm()) < 1e-5, name
    moved = torch.load(folder / "sgd.pt", weights_only=False)["steps"]
    assert all(float(step.abs().max()) > 0 for step in moved.values())


def test_stages_know_the_shapes_that_come(fork: Any) -> None:
    """Computed shapes equal the shapes that Megatron would send ahead of every tensor."""
    out = fork(Path(__file__).parent / "workers/pipeline_worker.py", RANKS).stdout
    assert int(out.rpartition("compared ")[2]) > 50
