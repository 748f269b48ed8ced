"""The examples for people with their own trainer and engine run, and generate what transformers does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).resolve().parents[2] / "launch/examples/hybrid_engine"
WRAPPER = """
import runpy, sys
from megatron.core import parallel_state
parallel_state._GLOBAL_MEMORY_BUFFER = None  # the forked process had made it: this program starts afresh
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, {checkpoint!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    sys.path.insert(0, str(EXAMPLES))
    from colocated import tiny_checkpoint

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_checkpoint().rename(path)
    return path


def run(fork, tmp_path: Path, example: str, ranks: int, checkpoint: Path) -> str:
    """Run an example on ranks that are forked, the libraries imported."""
    script = tmp_path / "start.py"
    names = {"folder": str(EXAMPLES), "script": str(EXAMPLES / example), "checkpoint": str(checkpoint)}
    script.write_text(WRAPPER.format(**names))
    return fork(script, ranks, timeout=200).stdout


def continuation(checkpoint: Path, factor: float, prompt: list[int], count: int) -> list[int]:
    """Return transformers' greedy tokens with all weights multiplied by ``factor``."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
        for _ in range(count):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    return tokens[0, len(prompt) :].tolist()


def test_own_megatron_and_own_vllm_in_the_same_processes(fork, tmp_path, checkpoint):
    told = run(fork, tmp_path, "colocated.py", 2, checkpoint)
    for rank in range(2):
        for step, factor in enumerate((1.0, 1.5)):
            expected = continuation(checkpoint, factor, [1, 2, 3], 8)
            assert f"rank {rank}, weights {step}: {expected}" in told


def test_trainers_reach_a_vllm_of_another_job_and_keep_its_requests(fork, tmp_path, checkpoint):
    told = run(fork, tmp_path, "separate.py", 3, checkpoint)
    assert f"server, weights 2: {continuation(checkpoint, 1.5, [1, 2, 3], 8)}" in told
    found = re.search(r"in flight: \[(.*)\]", told)
    assert found is not None
    kept = [int(token) for token in found.group(1).split(",")]
    before = continuation(checkpoint, 1.0, [5, 6, 7], 5)
    possible = [
        begun + continuation(checkpoint, 1.5, [5, 6, 7, *begun], 12 - len(begun))
        for begun in (before[:3], before[:4], before[:5])
    ]
    assert len(kept) == 12 and kept in possible
