"""The source of preference pairs, and the preferences of the quickstart."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data import quickstart
from megatron_rl.data.records import load_records
from megatron_rl.data.responses import ResponseSource, encode_responses
from megatron_rl.errors import UserError
from megatron_rl.types import split_rows


def source(path, tokenizer, max_tokens=16, **data) -> ResponseSource:
    records = load_records(str(path), setting="pairs")
    config = DataConfig(train="", **data)
    fields = {"chosen": "preference.chosen_field", "rejected": "preference.rejected_field"}
    where = "preference.data"
    encoded = encode_responses(tokenizer, config, fields, max_tokens, where, records)
    return ResponseSource(encoded, tokenizer, config, seed=1, max_tokens=max_tokens, setting=where)


@pytest.fixture(scope="module")
def tokenizer():
    return quickstart.build_tokenizer()


def test_pairs_are_chosen_then_rejected_and_weigh_the_same(tmp_path, tokenizer):
    lines = [f'{{"prompt": "1{i}+1=", "chosen": "1{i + 1}", "rejected": "9"}}' for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    pairs = source(tmp_path / "pairs.jsonl", tokenizer)
    assert len(pairs) == 6
    batch = pairs.next(4)
    rows = [
        tokenizer.decode(row, skip_special_tokens=True) for row in split_rows(batch.tokens, batch.lengths)
    ]
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        prompt, answer = chosen.split("=")
        assert rejected == f"{prompt}=9" and int(answer) == int(prompt[1]) + 11
    last = batch.lengths.cumsum(0) - 1
    assert torch.allclose(batch.loss_weights[last], torch.full((8,), 1 / 8))
    assert batch.tokens[last].unique().tolist() == [tokenizer.eos_token_id]
    firsts = [
        row.tolist()
        for row in split_rows(source(tmp_path / "pairs.jsonl", tokenizer).next(4).tokens, batch.lengths)
    ]
    assert firsts == [row.tolist() for row in split_rows(batch.tokens, batch.lengths)]


def test_long_pairs_are_counted_and_wrong_fields_named(tmp_path, tokenizer):
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n'
        '{"prompt": "1+1=", "chosen": "2", "rejected": "33333333333333333333"}\n'
    )
    assert len(source(tmp_path / "pairs.jsonl", tokenizer)) == 1
    with pytest.raises(UserError):
        source(tmp_path / "pairs.jsonl", tokenizer, over_long="error")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": 3}\n')
    with pytest.raises(UserError, match="rejected"):
        source(tmp_path / "pairs.jsonl", tokenizer)


def test_the_quickstart_prefers_right_sums(tmp_path):
    quickstart._write_lines(tmp_path / "p", [quickstart._preference((17, 25), random.Random(1))])
    (record,) = load_records(str((tmp_path / "p").rename(tmp_path / "p.jsonl")), setting="pairs")
    assert record.values["chosen"] == "42" != record.values["rejected"]
