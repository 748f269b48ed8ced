"""The plain sampler against transformers, and against itself under other batchings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_rl.config.sections.rollout import RolloutConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.files import CheckpointFiles
from megatron_rl.rollout.collate import to_rollouts
from megatron_rl.rollout.engines.base import make_engine
from megatron_rl.rollout.engines.torch.engine import TorchEngine
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.pretrained import read_pretrained
from megatron_rl.types import (
    FINISH_FAILED,
    FINISH_LENGTH,
    FINISH_STOP,
    PromptBatch,
    Rollouts,
    SamplingParameters,
)
from megatron_rl.weights.boxes import view_of
from tests.hf_models import FAMILIES, save_model
from tests.sampling import continue_all, engine_of, generate, make_prompts, started, unfinished

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


def prompts(rows: list[list[int]], **sampling: object) -> PromptBatch:
    return make_prompts(rows, SamplingParameters(**{"max_response_tokens": 12, **sampling}))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("qwen2")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


OWN = """
from megatron_rl.rollout.engines.torch.engine import TorchEngine

def engine(model_path, config, *, layout, rank, dtype, seed, max_model_len):
    return TorchEngine.from_hf(model_path, rank=rank, max_model_len=max_model_len)

class Half:
    def __init__(self, *_, **__):
        self.close = print
"""


def test_an_engine_of_ones_own_is_built_on_its_ranks_and_must_have_every_member(
    checkpoint: Path, tmp_path: Path
):
    (tmp_path / "own.py").write_text(OWN)

    def make(name: str, rank: int = 0) -> object:
        config = RolloutConfig(engine=f"{tmp_path / 'own.py'}:{name}")
        layout = ParallelLayout((0,))
        return make_engine(
            checkpoint, config, layout=layout, rank=rank, dtype="float32", seed=0, max_model_len=9
        )

    engine = make("engine")
    assert isinstance(engine, TorchEngine) and engine.max_model_len == 9
    assert make("engine", rank=1) is None
    with pytest.raises(UserError, match=r"lacks(.|\n)*abort, adapters, boxes, fin(.|\n)*weights_version"):
        make("Half")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> TorchEngine:
    return TorchEngine.from_hf(checkpoint, max_model_len=64)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def reference_log_probs(model: torch.nn.Module, rollouts: Rollouts) -> torch.Tensor:
    """Return transformers' log-probs of all response tokens, row by row without padding."""
    parts = []
    left = (rollouts.support_sizes == 0)[:, None].repeat(1, 97)
    positions = torch.repeat_interleave(torch.arange(len(left)), rollouts.support_sizes)
    left[positions, rollouts.support.long()] = True
    for row, mask, allowed, temperature in zip(
        rollouts.tokens.split(rollouts.lengths.tolist()),
        rollouts.response_mask.split(rollouts.lengths.tolist()),
        left.split(rollouts.lengths.tolist()),
        rollouts.temperature,
        strict=True,
    ):
        with torch.no_grad():
            logits = model(row[None]).logits[0, :-1] / temperature
        logits = logits.masked_fill(~allowed[1:], -torch.inf)
        picked = logits.log_softmax(1).gather(1, row[1:, None])[:, 0]
        parts.append(picked[mask[1:]])
    return torch.cat(parts)


def test_greedy_equals_transformers(engine: TorchEngine, model: torch.nn.Module):
    result = generate(engine, prompts(ROWS, temperature=0.0), seed=1)
    for row, text in zip(result.tokens.split(result.lengths.tolist()), ROWS, strict=True):
        expected = model.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert row.tolist() == expected[0].tolist()
    assert (result.finish_reason == FINISH_LENGTH).all()
    assert result.temperature.tolist() == [1.0] * 4
    torch.testing.assert_close(
        result.rollout_log_probs[result.response_mask], reference_log_probs(model, result), atol=1e-5, rtol=0
    )


def test_sampled_log_probs_hold_at_the_temperature(engine: TorchEngine, model: torch.nn.Module):
    result = generate(engine, prompts(ROWS, temperature=0.7), seed=2)
    torch.testing.assert_close(
        result.rollout_log_probs[result.response_mask], reference_log_probs(model, result), atol=1e-5, rtol=0
    )
    assert not result.rollout_log_probs[~result.response_mask].any()


def test_tokens_depend_on_seed_and_position_alone(engine: TorchEngine):
    whole = generate(engine, prompts(ROWS), seed=3)
    again = generate(engine, prompts(ROWS), seed=3)
    assert torch.equal(whole.tokens, again.tokens)
    part = generate(engine, prompts([ROWS[3], ROWS[1]]), seed=3, rows=[3, 1])
    assert torch.equal(part.tokens, whole.rows([3, 1]).tokens)
    other = generate(engine, prompts(ROWS), seed=4)
    assert not torch.equal(whole.tokens, other.tokens)


def test_stop_token_ends_and_belongs_to_the_response(engine: TorchEngine):
    free = generate(engine, prompts(ROWS), seed=5)
    first = free.rows([0])
    stop = int(first.tokens[len(ROWS[0]) + 4])
    ended = generate(engine, prompts(ROWS, stop_token_ids=(stop,)), seed=5).rows([0])
    response = ended.tokens[len(ROWS[0]) :].tolist()
    assert response[-1] == stop and stop not in response[:-1]
    assert response == first.tokens[len(ROWS[0]) : len(ended.tokens)].tolist()
    assert ended.finish_reason.tolist() == [FINISH_STOP]


def test_filtered_tokens_are_never_sampled(engine: TorchEngine, model: torch.nn.Module):
    narrow = generate(engine, prompts(ROWS, top_k=1), seed=6)
    assert torch.equal(narrow.tokens, generate(engine, prompts(ROWS, temperature=0.0), seed=6).tokens)
    assert not narrow.rollout_log_probs.any()  # a distribution of one token
    assert torch.equal(narrow.support.long(), narrow.tokens[narrow.response_mask])
    wide = generate(engine, prompts(ROWS, top_p=0.8, min_p=0.02, temperature=0.7), seed=6)
    torch.testing.assert_close(
        wide.rollout_log_probs[wide.response_mask], reference_log_probs(model, wide), atol=1e-5, rtol=0
    )
    sizes = wide.support_sizes[wide.response_mask]
    assert 1 < sizes.float().mean() < 90 and not wide.support_sizes[~wide.response_mask].any()


def test_over_long_and_empty_prompts_fail_their_row_only(engine: TorchEngine):
    result = generate(engine, prompts([ROWS[0], [1] * 64, [], [1] * 60]), seed=1)
    assert result.finish_reason.tolist() == [FINISH_LENGTH, FINISH_FAILED, FINISH_FAILED, FINISH_LENGTH]
    assert result.lengths.tolist() == [15, 64, 0, 64]


def test_callable_without_cache_samples_the_same(engine: TorchEngine, model: torch.nn.Module):
    def logits(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([model(row[None]).logits[0, -1] for row in tokens.split(lengths.tolist())])

    plain = engine_of(logits, max_model_len=64, batch_rows=3)
    batch = prompts(ROWS, temperature=0.8, top_p=0.9)
    left, right = generate(plain, batch, seed=8), generate(engine, batch, seed=8)
    assert torch.equal(left.tokens, right.tokens)
    torch.testing.assert_close(left.rollout_log_probs, right.rollout_log_probs, atol=1e-5, rtol=0)


def test_written_weights_are_taken_into_use(checkpoint: Path):
    engine = TorchEngine.from_hf(checkpoint)
    before = generate(engine, prompts(ROWS), seed=1)
    boxes = {box.storage: box for box in engine.boxes()}
    for name, parameter in engine.parameters().items():
        assert boxes[name].size == parameter.shape
        parameter.mul_(1.5)
    engine.finish_update(7)
    after = generate(engine, prompts(ROWS), seed=1)
    assert after.policy_version.tolist() == [7] * 4
    assert not torch.equal(before.rollout_log_probs, after.rollout_log_probs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_checkpoint_lies_in_its_box(family: str, tmp_path: Path):
    save_model(family, tmp_path)
    engine, files = TorchEngine.from_hf(tmp_path), CheckpointFiles(tmp_path)
    boxes = {box.name: box for box in engine.boxes()}
    described = read_pretrained(tmp_path / "config.json")
    assert set(boxes) == {name for name in files.names() if not described.is_copied(name)}
    for name, box in boxes.items():
        view = view_of(engine.parameters()[box.storage], box)
        assert torch.equal(view, files.read(name, [0] * len(box.size), box.size)), name


def in_parts(engine: TorchEngine, batch: PromptBatch, seed: int, tokens: int) -> Rollouts:
    groups = started(batch, 1, seed, 0)
    while unfinished(groups):
        before = to_rollouts(groups).lengths
        continue_all(engine, groups, tokens, 0)
        assert int((to_rollouts(groups).lengths - before).max()) <= tokens
    return to_rollouts(groups)


@pytest.mark.parametrize("tokens", [1, 5, 12])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_interrupted_responses_equal_uninterrupted_ones(engine, temperature: float, tokens: int):
    stop = int(
        generate(engine, prompts(ROWS, temperature=temperature), seed=5).rows([0]).tokens[len(ROWS[0]) + 6]
    )
    batch = prompts(ROWS, temperature=temperature, stop_token_ids=(stop,), max_response_tokens=20)
    whole = generate(engine, batch, seed=5)
    parts = in_parts(engine, batch, 5, tokens)
    assert torch.equal(parts.tokens, whole.tokens) and torch.equal(parts.response_mask, whole.response_mask)
    torch.testing.assert_close(parts.rollout_log_probs, whole.rollout_log_probs, atol=1e-5, rtol=0)
    assert torch.equal(parts.finish_reason, whole.finish_reason)
    assert {FINISH_STOP, FINISH_LENGTH} >= set(whole.finish_reason.tolist())


def test_rows_that_cannot_be_sampled_fail_in_parts_too(engine):
    batch = prompts([ROWS[0], [1] * 64, [], [1] * 60])
    parts = in_parts(engine, batch, 1, 3)
    assert torch.equal(parts.finish_reason, generate(engine, batch, seed=1).finish_reason)
