"""Rows with given responses: supervised ones, conversations, pairs, and the quickstart's preferences."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.sections.data import DataConfig
from megatron_rl.data import quickstart
from megatron_rl.data.records import Record, load_records
from megatron_rl.data.sources import ResponseSource, encode_responses
from megatron_rl.data.tokenizing import end_token_ids, load_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.types import split_rows

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart.write_inputs(tmp_path_factory.mktemp("quickstart"), "tiny")


def records(values: Sequence[dict[str, Any]]) -> tuple[Record, ...]:
    return tuple(Record(value, f"test.jsonl:{line}") for line, value in enumerate(values, start=1))


def responses(
    items: Sequence[Record], tokenizer: Any, max_tokens: int = 64, model: Path | None = None, **data: Any
) -> ResponseSource:
    every, settings, setting = data.pop("every_turn", False), DataConfig("train", **data), "sft.data"
    encoded = encode_responses(
        tokenizer, settings, {"response": "sft.response_field"}, max_tokens, setting,
        end_token_ids(tokenizer, model), items, every,
    )  # fmt: skip
    return ResponseSource(encoded, settings, seed=1, max_tokens=max_tokens, setting=setting)


def pairs(path, tokenizer, max_tokens=16, **data) -> ResponseSource:
    records = load_records(str(path), setting="pairs")
    config = DataConfig(train="", **data)
    fields = {"chosen": "preference.chosen_field", "rejected": "preference.rejected_field"}
    where = "preference.data"
    ends = end_token_ids(tokenizer)
    encoded = encode_responses(tokenizer, config, fields, max_tokens, where, ends, records)
    return ResponseSource(encoded, config, seed=1, max_tokens=max_tokens, setting=where)


@pytest.fixture(scope="module")
def tokenizer():
    return quickstart.build_tokenizer()


def test_supervised_rows(tokenizer: Any) -> None:
    items = records([{"prompt": "1+1=", "response": "2"}, {"prompt": "6+6=", "response": "12"}])
    rows = responses(items, tokenizer, shuffle=False)
    batch = rows.next_batch(2)
    assert tokenizer.decode(batch.tokens) == "<bos>1+1=2<eos><bos>6+6=12<eos>"
    assert batch.lengths.tolist() == [7, 8]
    assert batch.response_mask.tolist() == [False] * 5 + [True] * 2 + [False] * 5 + [True] * 3
    assert torch.allclose(batch.loss_weights, batch.response_mask / 5)
    assert batch.temperature.tolist() == [1.0, 1.0]
    assert torch.equal(rows.batch_in_file_order().tokens, batch.tokens), "in the order of the data"
    with pytest.raises(UserError, match="a record has no `response`"):
        responses(records([{"prompt": "1"}]), tokenizer)
    with pytest.raises(UserError, match="not a response"):
        responses(records([{"prompt": "1", "response": 2}]), tokenizer)
    assert list(rows.remarks()) == ["2 records, none over the limit of 64 tokens (longest 8)"]
    with pytest.raises(UserError, match=r"raise sft\.max_row_tokens"):
        responses(items, tokenizer, max_tokens=3)
    long = responses(items, tokenizer, max_tokens=7)
    assert len(long) == 1 and next(long.remarks()).startswith("dropped 1 of 2 records: longer than 7 tokens")
    (_, warning) = responses(records([{"prompt": "1", "response": ""}]), tokenizer).remarks()
    assert "1 of 1 responses are empty" in warning and "test.jsonl:1" in warning


def test_a_response_that_says_its_end_has_no_second_one(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    texts = ["2<eos>", "12<pad>", "3", "<eos>", "4<eos>5"]
    items = records([{"prompt": "1+1=", "response": text} for text in texts])
    rows = responses(items, tokenizer, 8, tmp_path, shuffle=False)
    batch = rows.batch_in_file_order()
    found = [tokenizer.decode(row) for row in split_rows(batch.tokens, batch.lengths)]
    ended = ["2<eos>", "12<pad>", "3<eos>", "<eos>"]
    assert found == [f"<bos>1+1={text}" for text in ended]
    assert rows.length_report.over_long == 1 and rows.length_report.longest == 9


def test_the_assistants_last_message_is_the_response(material: Path) -> None:
    tokenizer = load_tokenizer(material / "model")
    tokenizer.chat_template = TEMPLATE
    user, again = {"role": "user", "content": "1+1="}, {"role": "user", "content": "2+2="}
    said = [{"role": "assistant", "content": text} for text in ("2", "4")]
    expected = responses(records([{"prompt": [user, said[0], again], "response": "4"}]), tokenizer)
    for values in (
        {"prompt": [user, said[0], again, said[1]]},
        {"prompt": [user, said[0], again], "response": [said[1]]},
    ):
        rows = responses(records([values]), tokenizer)
        assert torch.equal(rows.batch_in_file_order().tokens, expected.batch_in_file_order().tokens)
        assert torch.equal(
            rows.batch_in_file_order().response_mask, expected.batch_in_file_order().response_mask
        )
    for values in ({"prompt": [user]}, {"prompt": [user], "response": [user]}, {"prompt": said[:1]}):
        with pytest.raises(UserError):
            responses(records([values]), tokenizer)


def test_every_turn_of_a_conversation_is_learned(material: Path) -> None:
    tokenizer: Any = load_tokenizer(material / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}"
        "{% for call in m.tool_calls or [] %}*{{ call.function.arguments.n + 1 }}{% endfor %}<eos>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    call = {"type": "function", "function": {"name": "next", "arguments": '{"n": 4}'}}
    messages: list[Any] = [
        {"role": "user", "content": "1+1", "tool_calls": None},
        {"role": "assistant", "content": "2", "tool_calls": None},
        {"role": "user", "content": "2+2", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "9", "tool_calls": None},
        {"role": "assistant", "content": "12<eos>", "tool_calls": None},
    ]
    learned = {}
    for name, values, every in (
        ("every", {"prompt": messages}, True),
        ("last", {"prompt": messages}, False),
        ("from the second", {"prompt": messages[:3], "response": messages[3:]}, True),
        ("a call", {"prompt": messages[:4]}, True),
    ):
        batch = responses(records([values]), tokenizer, every_turn=every).batch_in_file_order()
        text = "1+1=2<eos>2+2=*5<eos>" + ("" if name == "a call" else "9=12<eos>")
        assert tokenizer.decode(batch.tokens) == text
        assert batch.loss_weights.sum() == 1 and (batch.loss_weights > 0).eq(batch.response_mask).all()
        shown = batch.tokens.where(batch.response_mask, tokenizer.convert_tokens_to_ids("-"))
        learned[name] = tokenizer.decode(shown).replace("<eos>", ".")
    assert learned == {
        "every": "----2.----*5.--12.",
        "last": "---------------12.",
        "from the second": "----------*5.--12.",
        "a call": "----2.----*5.",
    }
    shown, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    with pytest.raises(UserError, match="leaves out the tool_calls"):
        responses(records([{"prompt": messages}]), tokenizer, every_turn=True)
    tokenizer.chat_template = shown.replace("{% else %}", "{% elif m.role == 'user' %}")
    with pytest.raises(UserError, match="omits the content of a message of the role tool"):
        responses(records([{"prompt": messages}]), tokenizer, every_turn=True)
    tokenizer.chat_template = shown + "{{ messages | length }}"
    with pytest.raises(UserError, match="depends on the earlier messages") as error:
        responses(records([{"prompt": messages}]), tokenizer, every_turn=True)
    assert error.value.where.startswith("test.jsonl:1") and "sft.turns=last" in error.value.fix
    with pytest.raises(UserError, match="does not go through the chat template"):
        responses(records([{"prompt": "1+1=", "response": messages[1:4]}]), tokenizer)


def test_a_turn_ends_as_the_chat_template_ends_one(material: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(material / "model")
    tokenizer.chat_template = TEMPLATE.replace("{% endfor %}", "<pad>{% endfor %}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    item = {"prompt": [{"role": "user", "content": "1+1"}], "response": "2"}
    for model in (tmp_path, None):
        row = responses(records([item]), tokenizer, model=model).batch_in_file_order().tokens
        assert tokenizer.decode(row) == "1+1<pad>=2<pad>"


def test_a_resumed_supervised_source_goes_on_exactly(material: Path, tokenizer: Any) -> None:
    items = load_records(material / "sft.jsonl")[:50]
    first, second = (responses(items, tokenizer) for _ in range(2))
    first.next_batch(70)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.next_batch(64).tokens, second.next_batch(64).tokens)


def test_pairs_are_chosen_then_rejected_and_weigh_the_same(tmp_path, tokenizer):
    lines = [f'{{"prompt": "1{i}+1=", "chosen": "1{i + 1}", "rejected": "9"}}' for i in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    rows_of_pairs = pairs(tmp_path / "pairs.jsonl", tokenizer)
    assert len(rows_of_pairs) == 6
    batch = rows_of_pairs.next_batch(4)
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
        for row in split_rows(pairs(tmp_path / "pairs.jsonl", tokenizer).next_batch(4).tokens, batch.lengths)
    ]
    assert firsts == [row.tolist() for row in split_rows(batch.tokens, batch.lengths)]


def test_pairs_may_be_whole_conversations(material: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(material / "model")
    tokenizer.chat_template = TEMPLATE
    asked = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+3"},
    ]
    said = [{"role": "assistant", "content": text} for text in ("5", "6")]
    apart = {"prompt": asked, "chosen": "5", "rejected": "6"}
    whole = {"prompt": "1+1", "chosen": [*asked, said[0]], "rejected": [*asked, said[1]]}
    same = {"chosen": [*asked, said[0]], "rejected": [*asked, said[0]]}
    for name, values in (("apart", apart), ("whole", whole), ("same", same)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(values))
    expected, batch = (
        pairs(tmp_path / f"{name}.jsonl", tokenizer, 64).batch_in_file_order() for name in ("apart", "whole")
    )
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.response_mask, expected.response_mask)
    assert "prefer a response to itself" in list(pairs(tmp_path / "same.jsonl", tokenizer, 64).remarks())[1]
    (tmp_path / "other.jsonl").write_text(
        json.dumps({"chosen": whole["chosen"], "rejected": [asked[2], said[1]]})
    )
    with pytest.raises(UserError, match="`chosen` is not a response"):
        pairs(tmp_path / "other.jsonl", tokenizer, 64)


def test_long_pairs_are_counted_and_wrong_fields_named(tmp_path, tokenizer):
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n'
        '{"prompt": "1+1=", "chosen": "2", "rejected": "33333333333333333333"}\n'
    )
    assert len(pairs(tmp_path / "pairs.jsonl", tokenizer)) == 1
    with pytest.raises(UserError):
        pairs(tmp_path / "pairs.jsonl", tokenizer, over_long="error")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": 3}\n')
    with pytest.raises(UserError, match="rejected"):
        pairs(tmp_path / "pairs.jsonl", tokenizer)


def test_the_quickstart_prefers_right_sums(tmp_path):
    quickstart._write_jsonl(tmp_path / "p", [quickstart._make_preference((17, 25), random.Random(1))])
    (record,) = load_records(str((tmp_path / "p").rename(tmp_path / "p.jsonl")), setting="pairs")
    assert record.values["chosen"] == "42" != record.values["rejected"]
